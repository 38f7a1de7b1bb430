"""What fits on a GPU: requests at a time, from the shapes in two config.json files.

Counted per GPU: weights, KV of target and drafter, GDN states (one live and two of the prefix cache per request, as
SGLang's extra_buffer strategy keeps), the stash of the tree's rows, and the logits of the rows in fp32. Not counted:
activations, captured graphs and fragmentation, for which the rest beyond `fraction` is left.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree.operate.unit import OperateError

STATES_PER_REQUEST = 3
GIB = 1 << 30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Shapes:
    """Bytes on one GPU of tensor-parallel size tp."""

    weights: int
    kv_per_token: int
    state_per_request: int
    stash_per_row: int
    logits_per_row: int

    def per_request(self, budget: int, context: int) -> int:
        rows = budget + 1
        return (
            self.kv_per_token * (context + rows)
            + STATES_PER_REQUEST * self.state_per_request
            + rows * (self.stash_per_row + self.logits_per_row)
        )

    def requests(self, budget: int, context: int, gpu_bytes: float, fraction: float) -> int:
        """How many requests of `context` tokens fit at a time; 0 where not even the weights do."""
        return max(0, int((gpu_bytes * fraction - self.weights) // self.per_request(budget, context)))


def read_config(flag: str, folder: Path) -> dict:
    """config.json of a model folder, the text part of a multimodal one. Raises OperateError."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as e:
        raise OperateError(f"{flag} {folder}: no readable config.json ({e}); name a model's folder") from None
    return config | config.get("text_config", {})


def weights_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def shapes(target: Path, draft: Path, tp: int) -> Shapes:
    """Shapes of a pair. Raises OperateError where the target's config lacks the fields of a GDN hybrid."""
    t, d = read_config("--model-path", target), read_config("--draft-model-path", draft)
    try:
        layers = t["num_hidden_layers"]
        attention = layers // t["full_attention_interval"]
        key_heads, value_heads = t["linear_num_key_heads"], t["linear_num_value_heads"]
        key_dim, value_dim = t["linear_key_head_dim"], t["linear_value_head_dim"]
        conv = (2 * key_heads * key_dim + value_heads * value_dim) // tp
        window = t["linear_conv_kernel_dim"] - 1
        size = BYTES.get(t.get("dtype") or t.get("torch_dtype"), 2)
        state_size = BYTES.get(t.get("mamba_ssm_dtype"), 4)
        kv = 2 * size * attention * max(1, t["num_key_value_heads"] // tp) * t["head_dim"]
        kv += 2 * size * d["num_hidden_layers"] * max(1, d["num_key_value_heads"] // tp) * d["head_dim"]
    except KeyError as e:
        raise OperateError(
            f"--model-path {target}: config.json lacks {e.args[0]}; name a Qwen3.5-type target and its drafter"
        ) from None
    state = value_heads // tp * key_dim * value_dim * state_size + conv * window * size
    return Shapes(
        weights=(weights_bytes(target) + weights_bytes(draft)) // tp,
        kv_per_token=kv,
        state_per_request=(layers - attention) * state,
        stash_per_row=(layers - attention) * (conv + 2 * value_heads // tp) * size,
        logits_per_row=t["vocab_size"] * 4,
    )
