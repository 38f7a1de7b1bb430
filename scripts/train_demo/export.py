"""Writes the pair as SGLang 0.5.17 and transformers load it: bf16 safetensors, configs, tokenizer, model cards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from scripts.train_demo.plan import Plan
from scripts.train_demo.shapes import DraftShape, TargetShape

SHARD_BYTES = 14_500_000
# Messages become comments, and the model writes the code below them.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'user' or message['role'] == 'system' -%}
{{ '# ' + message['content'] | replace('\\n', '\\n# ') + '\\n' }}
{%- else -%}
{{ message['content'] + '\\n' }}
{%- endif -%}
{%- endfor -%}
"""
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "model_max_length": 32768,
}


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """bf16, one file or shards of at most SHARD_BYTES with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    state = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in weights.items()}
    split = split_torch_state_dict_into_shards(state, max_shard_size=SHARD_BYTES)
    for name, keys in split.filename_to_tensors.items():
        save_file({k: state[k] for k in keys}, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors writes for the owner only
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_target(folder: Path, shape: TargetShape, weights: dict[str, torch.Tensor], tokenizer: Path) -> None:
    write_weights(folder, weights)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")


def write_draft(folder: Path, shape: DraftShape, weights: dict[str, torch.Tensor]) -> None:
    write_weights(folder, weights)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")


def write_prompts(folder: Path, plan: Plan, prompts: list[dict]) -> None:
    """`heldout_prompts.json`: the evaluation prompts as texts, for a served engine to be measured on."""
    saved = {
        "note": "Excerpts of packages that neither model was trained on; each encodes to prompt_tokens ids.",
        "prompt_tokens": plan.prompt_tokens,
        "new_tokens": plan.new_tokens,
        "prompts": [{"origin": p["origin"], "text": p["text"]} for p in prompts],
    }
    (folder / "heldout_prompts.json").write_text(json.dumps(saved, indent=1) + "\n")
