"""The target: parameters under their checkpoint names, and its forward over whole sequences."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from scripts.train_demo import kernels
from scripts.train_demo.layers import (
    compute_dtype,
    gated_mlp,
    linear,
    normal,
    region,
    rms_norm,
    rotary_table,
    rotate,
)
from scripts.train_demo.shapes import TargetShape

GDN_INPUT = ("input_layernorm.weight",) + tuple(
    "linear_attn." + name
    for name in (
        "in_proj_qkv.weight",
        "in_proj_z.weight",
        "in_proj_b.weight",
        "in_proj_a.weight",
        "conv1d.weight",
        "A_log",
        "dt_bias",
    )
)
MLP = (
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
GDN_OUTPUT = ("linear_attn.norm.weight", "linear_attn.out_proj.weight", *MLP)
ATTENTION_INPUT = ("input_layernorm.weight",) + tuple(
    f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
)
ATTENTION_OUTPUT = ("self_attn.o_proj.weight", *MLP)


def initial_target(shape: TargetShape, seed: int, device: str) -> dict[str, torch.Tensor]:
    """fp32 master parameters by checkpoint name."""
    g = torch.Generator(device).manual_seed(seed)
    h, out_std = shape.hidden, 0.02 / math.sqrt(2 * shape.layers)

    def zeros(n: int) -> torch.Tensor:
        return torch.zeros(n, device=device)

    weights = {"model.embed_tokens.weight": normal(g, 0.02, shape.vocab, h)}
    for i in range(shape.layers):
        p = f"model.layers.{i}."
        weights[p + "input_layernorm.weight"] = zeros(h)  # zero-centred: the gain is 1 + weight
        if shape.is_attention(i):
            a, d = p + "self_attn.", shape.head_dim
            weights[a + "q_proj.weight"] = normal(g, 0.02, shape.heads * 2 * d, h)  # [query | gate] per head
            weights[a + "k_proj.weight"] = normal(g, 0.02, shape.kv_heads * d, h)
            weights[a + "v_proj.weight"] = normal(g, 0.02, shape.kv_heads * d, h)
            weights[a + "o_proj.weight"] = normal(g, out_std, h, shape.heads * d)
            weights[a + "q_norm.weight"], weights[a + "k_norm.weight"] = zeros(d), zeros(d)
        else:
            a, n = p + "linear_attn.", shape.gdn_value_heads
            mixed = 2 * shape.gdn_key_size + shape.gdn_value_size
            uniform = torch.rand(2, n, generator=g, device=device)
            step = torch.exp(uniform[0] * math.log(100) + math.log(1e-3))  # log-uniform in [0.001, 0.1]
            weights[a + "in_proj_qkv.weight"] = normal(g, 0.02, mixed, h)
            weights[a + "in_proj_z.weight"] = normal(g, 0.02, shape.gdn_value_size, h)
            weights[a + "in_proj_b.weight"] = normal(g, 0.02, n, h)
            weights[a + "in_proj_a.weight"] = normal(g, 0.02, n, h)
            weights[a + "conv1d.weight"] = normal(g, 0.3, mixed, 1, shape.conv)
            weights[a + "A_log"] = torch.log(1 + 15 * uniform[1])
            weights[a + "dt_bias"] = step + torch.log(-torch.expm1(-step))  # softplus(dt_bias) = step
            weights[a + "norm.weight"] = torch.ones(shape.gdn_dim, device=device)
            weights[a + "out_proj.weight"] = normal(g, out_std, h, shape.gdn_value_size)
        weights[p + "post_attention_layernorm.weight"] = zeros(h)
        weights[p + "mlp.gate_proj.weight"] = normal(g, 0.02, shape.ffn, h)
        weights[p + "mlp.up_proj.weight"] = normal(g, 0.02, shape.ffn, h)
        weights[p + "mlp.down_proj.weight"] = normal(g, out_std, h, shape.ffn)
    weights["model.norm.weight"] = zeros(h)
    weights["lm_head.weight"] = normal(g, 0.02, shape.vocab, h)
    return weights


class Target:
    """Forward passes over a dict of weights (fp32 masters or a rounded copy), in the device's compute dtype.

    `compiled` runs the regions around the GDN kernel and the attention through torch.compile.
    """

    def __init__(self, shape: TargetShape, weights: dict[str, torch.Tensor], *, compiled: bool = False):
        self.shape, self.weights = shape, weights
        self.device = weights["lm_head.weight"].device
        self.dtype = compute_dtype(self.device)

        # The embedding is a region too: the compiled backward never waits for the device, so a graph can hold it.
        self._embed = region(self.embed, compiled)
        self._gdn_layer_input = region(self.gdn_input, compiled)
        self._gdn_layer_output = region(self.gdn_output, compiled)
        self._attention_layer = region(self.attention_layer, compiled)
        self._head_loss = region(self.head_loss, compiled)

    def layer(self, i: int, names: tuple[str, ...]) -> list[torch.Tensor]:
        return [self.weights[f"model.layers.{i}.{name}"] for name in names]

    def embed(self, ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, embedding).to(self.dtype)

    def gdn_mix(self, mixed, z, b, a, conv, a_log, dt_bias):
        """Convolution, heads and gates; `mixed` [B, conv - 1 + T, C] starts with the rows before the T tokens."""
        s = self.shape
        batch, length = z.shape[:2]
        taps = conv[:, 0].to(mixed.dtype)
        x = sum(mixed[:, j : j + length] * taps[:, j] for j in range(s.conv))
        q, k, v = F.silu(x).split([s.gdn_key_size, s.gdn_key_size, s.gdn_value_size], dim=-1)
        decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
        keys, values = (batch, length, s.gdn_key_heads, -1), (batch, length, s.gdn_value_heads, -1)
        q, k, v = (x.contiguous() for x in (q.reshape(keys), k.reshape(keys), v.reshape(values)))
        return q, k, v, decay, b.sigmoid(), z.reshape(values)

    def gdn_projections(self, x, norm, w_qkv, w_z, w_b, w_a):
        h = rms_norm(x, 1 + norm, self.shape.eps)
        return linear(h, w_qkv), linear(h, w_z), linear(h, w_b), linear(h, w_a)

    def gdn_input(self, x, norm, w_qkv, w_z, w_b, w_a, conv, a_log, dt_bias):
        mixed, z, b, a = self.gdn_projections(x, norm, w_qkv, w_z, w_b, w_a)
        return self.gdn_mix(F.pad(mixed, (0, 0, self.shape.conv - 1, 0)), z, b, a, conv, a_log, dt_bias)

    def gdn_output(self, x, o, z, gdn_norm, w_out, norm, gate, up, down):
        gated = rms_norm(o.float(), gdn_norm, self.shape.eps) * F.silu(z.float())
        x = x + linear(gated.to(x.dtype).flatten(2), w_out)
        return x + gated_mlp(rms_norm(x, 1 + norm, self.shape.eps), gate, up, down)

    def attention_input(self, x, cos, sin, norm, w_q, w_k, w_v, q_norm, k_norm):
        """q [B, heads, T, d], k and v [B, kv_heads, T, d], gate [B, T, heads * d]."""
        s = self.shape
        batch, length = x.shape[:2]
        h = rms_norm(x, 1 + norm, s.eps)
        q, gate = linear(h, w_q).view(batch, length, s.heads, 2 * s.head_dim).chunk(2, dim=-1)
        k, v = (linear(h, w).view(batch, length, s.kv_heads, s.head_dim) for w in (w_k, w_v))
        cos, sin = cos[:, None], sin[:, None]
        q = rotate(rms_norm(q, 1 + q_norm, s.eps), cos, sin)
        k = rotate(rms_norm(k, 1 + k_norm, s.eps), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(2)

    def attention_output(self, x, o, gate, w_out, norm, w_gate, w_up, w_down):
        x = x + linear(o.transpose(1, 2).flatten(2) * gate.sigmoid(), w_out)
        return x + gated_mlp(rms_norm(x, 1 + norm, self.shape.eps), w_gate, w_up, w_down)

    def attention_layer(self, x, cos, sin, *weights):
        q, k, v, gate = self.attention_input(x, cos, sin, *weights[: len(ATTENTION_INPUT)])
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_output(x, o, gate, *weights[len(ATTENTION_INPUT) :])

    def hidden(self, ids: torch.Tensor, rule: Callable = kernels.chunk_rule) -> torch.Tensor:
        """ids int64 [B, T] -> the last layer's output [B, T, hidden], before the final norm."""
        x = self._embed(ids, self.weights["model.embed_tokens.weight"])
        positions = torch.arange(ids.shape[1], device=ids.device)
        cos, sin = rotary_table(positions, self.shape.rotary_dim, self.shape.rope_theta, self.dtype)
        for i in range(self.shape.layers):
            if self.shape.is_attention(i):
                x = self._attention_layer(x, cos, sin, *self.layer(i, ATTENTION_INPUT + ATTENTION_OUTPUT))
            else:
                q, k, v, g, beta, z = self._gdn_layer_input(x, *self.layer(i, GDN_INPUT))
                o, _ = rule(q, k, v, g, beta)
                x = self._gdn_layer_output(x, o, z, *self.layer(i, GDN_OUTPUT))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [..., vocab] of the last layer's output."""
        x = rms_norm(hidden, 1 + self.weights["model.norm.weight"], self.shape.eps)
        return F.linear(x.float(), self.weights["lm_head.weight"].float())

    def head_loss(self, x, norm, head, labels):
        logits = linear(rms_norm(x, 1 + norm, self.shape.eps), head).float()
        return F.cross_entropy(logits.view(-1, self.shape.vocab), labels.reshape(-1))

    def loss(self, ids: torch.Tensor, rule: Callable = kernels.chunk_rule) -> torch.Tensor:
        """Mean next-token cross entropy (nats) over ids [B, T + 1]."""
        norm, head = self.weights["model.norm.weight"], self.weights["lm_head.weight"]
        return self._head_loss(self.hidden(ids[:, :-1], rule), norm, head, ids[:, 1:])
