"""Specifications of `tree_attention`: row by row in any precision, and a faster one for the CPU."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel.tree_types import unpack_ancestors


def tree_attention_naive(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_slots: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
    dtype: torch.dtype = torch.float64,
    *,
    window: int = 0,
    depths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each row and head by itself over exactly the tokens it sees, in `dtype`; else as `tree_attention`."""
    bs, num_rows, q_heads, _ = q.shape
    group = q_heads // k_pool.shape[1]
    sees = unpack_ancestors(ancestors, num_rows)
    out = torch.empty(bs, num_rows, q_heads, v_pool.shape[2], dtype=dtype, device=q.device)
    for b in range(bs):
        length = int(seq_lens[b])
        all_slots = torch.cat([req_to_token[req_pool_indices[b], :length].long(), tree_slots[b].clamp(min=0)])
        committed = sees.new_ones(length)
        for i in range(num_rows):
            visible = torch.cat([committed, sees[b, i]])
            if window:
                positions = torch.cat([torch.arange(length, device=q.device), length + depths[b]])
                visible = visible & (positions[length + i] - positions <= window)
            slots = all_slots[visible]
            for h in range(q_heads):
                logits = k_pool[slots, h // group].to(dtype) @ q[b, i, h].to(dtype) * scale
                if logit_cap > 0:
                    logits = logit_cap * torch.tanh(logits / logit_cap)
                out[b, i, h] = logits.softmax(0) @ v_pool[slots, h // group].to(dtype)
    return out


def tree_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_slots: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
    *,
    window: int = 0,
    depths: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32, one request at a time because their lengths differ; -> [bs, N, Hq, dv] in the dtype of `v_pool`.

    The query heads of a KV head are stacked into one long query, so that keys and values are never repeated.
    """
    bs, num_rows, q_heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    group = q_heads // kv_heads
    visible = unpack_ancestors(ancestors, num_rows)
    if window:
        visible &= depths[:, :, None] - depths[:, None, :] <= window
    stacked = q.float().view(bs, num_rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    tree_slots = tree_slots.clamp(min=0)
    outputs = []
    for b, length in enumerate(seq_lens.tolist()):
        first = max(length - window, 0) if window else 0  # what the root sees, and so any row
        slots = torch.cat([req_to_token[req_pool_indices[b], first:length], tree_slots[b]])
        k = k_pool[slots].float().transpose(0, 1)[None]
        v = v_pool[slots].float().transpose(0, 1)[None]
        mask = k.new_zeros(num_rows, length - first + num_rows)
        mask[:, length - first :].masked_fill_(~visible[b], -torch.inf)
        if window:
            positions = torch.arange(first, length, device=q.device)
            too_old = length + depths[b, :, None] - positions > window
            mask[:, : length - first].masked_fill_(too_old, -torch.inf)
        mask = mask.repeat(group, 1)
        if logit_cap > 0:
            logits = stacked[b] @ k[0].transpose(1, 2) * scale
            out = (logit_cap * torch.tanh(logits / logit_cap) + mask).softmax(-1) @ v[0]
        else:
            out = torch.nn.functional.scaled_dot_product_attention(stacked[b][None], k, v, mask, scale=scale)[
                0
            ]
        outputs.append(out.view(kv_heads, group, num_rows, -1).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.stack(outputs).to(v_pool.dtype)
