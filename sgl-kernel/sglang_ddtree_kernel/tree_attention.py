"""Attention of draft-tree rows over the committed tokens and their own branch."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel._tree_attention_triton import tree_attention_triton
from sglang_ddtree_kernel.reference import tree_attention as reference
from sglang_ddtree_kernel.tree_types import num_words


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
    """Softmax attention where each row sees all committed tokens and, in the tree, its ancestors and itself.

    A row at depth t has position seq_lens + t, and a window takes from its view what lies further back. Rows of a
    block that all see each other, such as a drafter's, are rows that all have all ancestor bits.

    Args:
        q: [bs, N, Hq, d]; query head h reads KV head h // (Hq / Hkv).
        k_pool: [slots, Hkv, d], already holding the tree's keys.
        v_pool: [slots, Hkv, dv].
        req_to_token: int32 [rows, max_ctx], slot of every committed token.
        req_pool_indices: int [bs], row of each request in `req_to_token`.
        seq_lens: int [bs], committed tokens, the root not among them.
        tree_slots: int64 [bs, N], slot of each tree row; negative ones (padded requests) read slot 0.
        ancestors: int64 [bs, N, ceil(N / 64)], see `DraftTree`; every row is its own ancestor. Bits of
            later rows count as well.
        scale: factor of the logits, in general d^-1/2.
        logit_cap: logits become cap * tanh(logit / cap) where the cap is positive.
        window: tokens before a row's own that it may see, 0 for all of them: a key counts where the positions'
            difference is at most `window`, as with SGLang's `sliding_window_size` (q_id <= kv_id + size in its
            kernels/ops/attention/extend_attention.py), which is one less than the `sliding_window` of a
            Hugging Face config.
        depths: int32 [bs, N], needed with a window only; 0 at the root and at invalid rows.

    Returns:
        [bs, N, Hq, dv] in the dtype of `v_pool`.

    Raises:
        ValueError: shapes or options do not fit.
    """
    if q.ndim != 4:
        raise ValueError(f"q must be [bs, N, Hq, d], got {list(q.shape)}")
    bs, num_rows, q_heads, head_dim = q.shape
    if k_pool.ndim != 3 or k_pool.shape[2] != head_dim:
        raise ValueError(f"k_pool must be [slots, Hkv, d = {head_dim}], got {list(k_pool.shape)}")
    if v_pool.ndim != 3 or v_pool.shape[:2] != k_pool.shape[:2]:
        raise ValueError(
            f"v_pool must be [slots, Hkv, dv] with {list(k_pool.shape[:2])}, got {list(v_pool.shape)}"
        )
    if q_heads % k_pool.shape[1]:
        raise ValueError(f"q must have a multiple of Hkv = {k_pool.shape[1]} heads, got {q_heads}")
    for name, tensor in (("req_pool_indices", req_pool_indices), ("seq_lens", seq_lens)):
        if tensor.shape != (bs,):
            raise ValueError(f"{name} must be [bs] = [{bs}], got {list(tensor.shape)}")
    if tree_slots.shape != (bs, num_rows):
        raise ValueError(f"tree_slots must be {[bs, num_rows]}, got {list(tree_slots.shape)}")
    words_shape = [bs, num_rows, num_words(num_rows)]
    if list(ancestors.shape) != words_shape or ancestors.dtype != torch.int64:
        raise ValueError(
            f"ancestors must be int64 {words_shape}, got {ancestors.dtype} {list(ancestors.shape)}"
        )
    if window < 0:
        raise ValueError(f"window must be at least 0, got {window}")
    if window:
        if depths is None:
            raise ValueError(f"depths must be given with a window, here {window}")
        if depths.shape != (bs, num_rows) or depths.dtype != torch.int32:
            raise ValueError(
                f"depths must be int32 {[bs, num_rows]}, got {depths.dtype} {list(depths.shape)}"
            )
    attend = tree_attention_triton if q.is_cuda else reference.tree_attention
    return attend(
        q,
        k_pool,
        v_pool,
        req_to_token,
        req_pool_indices,
        seq_lens,
        tree_slots,
        ancestors,
        scale,
        logit_cap,
        window=window,
        depths=depths,
    )
