"""An independent forward of a DFlash checkpoint in plain PyTorch: no SGLang module, no cache.

Mathematics: arXiv 2602.06036 (DFlash). The context enters as keys and values only, projected from the target's
features; the block [bonus, MASK, ...] attends to the context and, in both directions, to itself. A layer of type
sliding_attention sees the last `sliding_window` positions, itself included, and nothing behind itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


class DFlashReference:
    def __init__(self, draft: str, embedding: torch.Tensor):
        self.config = json.loads((Path(draft) / "config.json").read_text())
        self.weights = {k: v.float() for k, v in load_file(Path(draft) / "model.safetensors").items()}
        self.embedding = embedding.float()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.config["rms_norm_eps"])

    def rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, heads, d], rotated by halves."""
        half = x.shape[-1] // 2
        angle = positions[:, None] / self.config["rope_theta"] ** (torch.arange(half) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.float().split(half, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def __call__(self, features: torch.Tensor, bonus: int) -> torch.Tensor:
        """features [L, k * hidden] of the committed tokens -> hidden [block, hidden] from position L on."""
        c, w = self.config, self.weights
        heads, kv_heads, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        context = self.norm(features.float() @ w["fc.weight"].T, "hidden_norm.weight")
        ids = torch.full((c["block_size"],), c["dflash_config"]["mask_token_id"])
        ids[0] = bonus
        x = self.embedding[ids]
        positions = torch.arange(len(features) + len(ids), dtype=torch.float32)
        for i in range(c["num_hidden_layers"]):
            p = f"layers.{i}."
            h = self.norm(x, p + "input_layernorm.weight")
            rows = torch.cat([context, h])
            q = (h @ w[p + "self_attn.q_proj.weight"].T).view(-1, heads, d)
            k = (rows @ w[p + "self_attn.k_proj.weight"].T).view(-1, kv_heads, d)
            v = (rows @ w[p + "self_attn.v_proj.weight"].T).view(-1, kv_heads, d)
            q = self.rope(self.norm(q, p + "self_attn.q_norm.weight"), positions[len(features) :])
            k = self.rope(self.norm(k, p + "self_attn.k_norm.weight"), positions)
            group = heads // kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
            if "layer_types" in c and c["layer_types"][i] == "sliding_attention":
                behind = positions[len(features) :, None] - positions
                scores = scores.masked_fill((behind < 0) | (behind >= c["sliding_window"]), -torch.inf)
            out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
            x = x + out @ w[p + "self_attn.o_proj.weight"].T
            h = self.norm(x, p + "post_attention_layernorm.weight")
            gated = F.silu(h @ w[p + "mlp.gate_proj.weight"].T) * (h @ w[p + "mlp.up_proj.weight"].T)
            x = x + gated @ w[p + "mlp.down_proj.weight"].T
        return self.norm(x, "norm.weight")
