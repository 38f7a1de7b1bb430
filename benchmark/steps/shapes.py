"""Configs of the Qwen3.6-27B shape and of its published drafter's shape, for engines with dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB = 248_320
TARGET = dict(
    architectures=["Qwen3_5ForCausalLM"],
    model_type="qwen3_5_text",
    hidden_size=5120,
    num_hidden_layers=64,
    full_attention_interval=4,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    attn_output_gate=True,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    mamba_ssm_dtype="float32",
    intermediate_size=17_408,
    vocab_size=VOCAB,
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    attention_bias=False,
    rope_parameters=dict(
        rope_theta=1e7,
        rope_type="default",
        partial_rotary_factor=0.25,
        mrope_section=[11, 11, 10],
        mrope_interleaved=True,
    ),
    max_position_embeddings=262_144,
    dtype="bfloat16",
    bos_token_id=None,
    eos_token_id=248_044,
)
DRAFT = dict(
    architectures=["DFlashDraftModel"],
    model_type="qwen3",
    hidden_size=5120,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=17_408,
    vocab_size=VOCAB,
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    attention_bias=False,
    rope_theta=1e7,
    max_position_embeddings=262_144,
    dtype="bfloat16",
    block_size=16,
    num_target_layers=64,
    dflash_config=dict(mask_token_id=248_070, target_layer_ids=[1, 16, 31, 46, 61]),
)


def write_configs(folder: Path) -> tuple[Path, Path]:
    """Writes both configs below `folder`; returns the two model folders."""
    paths = []
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        paths.append(path)
    return tuple(paths)
