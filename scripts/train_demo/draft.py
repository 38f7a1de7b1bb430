"""The drafter: parameters under their checkpoint names, and its forward over many blocks of each sequence."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

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
from scripts.train_demo.shapes import DraftShape

LAYER = tuple(
    name + ".weight"
    for name in (
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
)
LOSS_DECAY = 7.0  # weights exp(-(k - 1) / 7) over the block's depths k


def initial_draft(shape: DraftShape, seed: int, device: str) -> dict[str, torch.Tensor]:
    """fp32 master parameters by checkpoint name."""
    g = torch.Generator(device).manual_seed(seed)
    h, out_std = shape.hidden, 0.02 / math.sqrt(2 * shape.layers)
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def ones(n: int) -> torch.Tensor:
        return torch.ones(n, device=device)

    weights = {
        "fc.weight": normal(g, 0.02, h, len(shape.target_layers) * h),
        "hidden_norm.weight": ones(h),
        "norm.weight": ones(h),
    }
    for i in range(shape.layers):
        values = (
            ones(h),
            normal(g, 0.02, q_size, h),
            normal(g, 0.02, kv_size, h),
            normal(g, 0.02, kv_size, h),
            ones(shape.head_dim),
            ones(shape.head_dim),
            normal(g, out_std, h, q_size),
            ones(h),
            normal(g, 0.02, shape.ffn, h),
            normal(g, 0.02, shape.ffn, h),
            normal(g, out_std, h, shape.ffn),
        )
        weights.update({f"layers.{i}.{name}": v for name, v in zip(LAYER, values, strict=True)})
    return weights


class Draft:
    """Forward of blocks [bonus, MASK, ...] at given anchors; `embedding` and `head` are the target's, not trained."""

    def __init__(
        self,
        shape: DraftShape,
        weights: dict[str, torch.Tensor],
        embedding: torch.Tensor,
        head: torch.Tensor,
        *,
        compiled: bool = False,
    ):
        self.shape, self.weights, self.embedding, self.head = shape, weights, embedding, head
        self.device = head.device
        self.dtype = compute_dtype(self.device)

        self._context = region(self.context, compiled)
        self._layer = region(self.layer, compiled)
        self._block_loss = region(self.block_loss, compiled)
        depths = torch.arange(shape.horizon, device=self.device)
        self.loss_weights = torch.exp(-depths / LOSS_DECAY)

    def context(self, features, fc, norm):
        return rms_norm(linear(features, fc), norm, self.shape.eps)

    def layer(self, x, context, mask, block_table, context_table, *weights):
        """x [B, rows, h] of all blocks attends to context [B, T, h] and to itself, as `mask` [B, 1, rows, T + rows]."""
        s = self.shape
        norm, w_q, w_k, w_v, q_norm, k_norm, w_o, mlp_norm, gate, up, down = weights
        h = rms_norm(x, norm, s.eps)

        def keys(rows, cos_sin):
            k = linear(rows, w_k).unflatten(-1, (s.kv_heads, s.head_dim))
            return rotate(rms_norm(k, k_norm, s.eps), *cos_sin)

        q = linear(h, w_q).unflatten(-1, (s.heads, s.head_dim))
        q = rotate(rms_norm(q, q_norm, s.eps), *block_table)
        k = torch.cat([keys(context, context_table), keys(h, block_table)], dim=1)
        v = torch.cat([linear(context, w_v), linear(h, w_v)], dim=1).unflatten(-1, (s.kv_heads, s.head_dim))
        group = s.heads // s.kv_heads
        k, v = (rows.transpose(1, 2).repeat_interleave(group, 1) for rows in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        x = x + linear(o.transpose(1, 2).flatten(2), w_o)
        return x + gated_mlp(rms_norm(x, mlp_norm, s.eps), gate, up, down)

    def hidden(self, features: torch.Tensor, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """The last layer's output at the mask rows.

        Args:
            features: [B, T, len(target_layers) * hidden], the target's at every position.
            ids: int64 [B, T]; ids[anchor] is the bonus token of the block there.
            anchors: int64 [B, A]; a block sees the features of positions before its anchor.
        Returns:
            [B, A, horizon, hidden].
        """
        s = self.shape
        batch, length = ids.shape
        blocks = anchors.shape[1]
        rows = torch.full((batch, blocks, s.block), s.mask, device=ids.device)
        rows[:, :, 0] = ids.gather(1, anchors)
        x = F.embedding(rows.flatten(1), self.embedding).to(self.dtype)
        if torch.is_grad_enabled():
            x.requires_grad_()  # so that every layer is one compiled region, the first one too

        offsets = torch.arange(s.block, device=ids.device)
        positions = torch.arange(length, device=ids.device)
        block_positions = (anchors.unsqueeze(-1) + offsets).flatten(1)
        table = [t.unsqueeze(-2) for t in rotary_table(block_positions, s.head_dim, s.rope_theta, self.dtype)]
        context_table = [
            t.unsqueeze(-2) for t in rotary_table(positions, s.head_dim, s.rope_theta, self.dtype)
        ]
        before = positions < anchors.repeat_interleave(s.block, 1).unsqueeze(-1)
        block_of = torch.arange(blocks, device=ids.device).repeat_interleave(s.block)
        same = (block_of[:, None] == block_of).expand(batch, -1, -1)
        visible = torch.cat([before, same], dim=-1).unsqueeze(1)
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=ids.device)
        mask.masked_fill_(~visible, -torch.inf)

        w = self.weights
        context = self._context(features.to(self.dtype), w["fc.weight"], w["hidden_norm.weight"])
        for i in range(s.layers):
            layer = [w[f"layers.{i}.{name}"] for name in LAYER]
            x = self._layer(x, context, mask, table, context_table, *layer)
        return x.unflatten(1, (blocks, s.block))[:, :, 1:]

    def block_loss(self, x, norm, head, labels, weights):
        logits = linear(rms_norm(x, norm, self.shape.eps), head).float()
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        losses = losses.view(-1, self.shape.horizon)
        return (losses * weights).sum() / (weights.sum() * losses.shape[0])

    def loss(self, features: torch.Tensor, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Cross entropy (nats) of the tokens after each anchor, near ones weighing more; arguments as `hidden`."""
        depths = torch.arange(1, self.shape.block, device=ids.device)
        labels = ids.gather(1, (anchors.unsqueeze(-1) + depths).flatten(1))
        x = self.hidden(features, ids, anchors)
        return self._block_loss(x, self.weights["norm.weight"], self.head, labels, self.loss_weights)

    def logprobs(self, features: torch.Tensor, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """fp32 log-probabilities [B, A, horizon, vocab]."""
        x = rms_norm(self.hidden(features, ids, anchors), self.weights["norm.weight"], self.shape.eps)
        return F.linear(x.float(), self.head.float()).log_softmax(-1)
