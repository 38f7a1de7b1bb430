"""Candidates of the draft head: best tokens of each row, over a vocabulary that may be split across ranks."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel._topk_logprobs_triton import merge_topk_triton, topk_logprobs_triton
from sglang_ddtree_kernel.reference import topk_logprobs as reference
from sglang_ddtree_kernel.reference.topk_logprobs import ShardTopK

KERNEL_MAX_K = (
    32  # the kernels search their list once per candidate; beyond, the reference is the better program
)


def topk_logprobs(logits: torch.Tensor, k: int, vocab_offset: int = 0) -> ShardTopK:
    """The k best logits of every row of one vocabulary shard, with the shard's log-sum-exp.

    Order: value descending, equal values by ascending id; -0.0 equals 0.0.

    Args:
        logits: [R, V_local], fp32, bf16 or fp16; finite or -inf.
        k: candidates per row, 1 <= k <= V_local.
        vocab_offset: global id of the shard's first column.

    Returns:
        ShardTopK(values fp32 [R, k], ids int64 [R, k] (global), lse fp32 [R]).

    Raises:
        ValueError: `logits` is not a floating-point matrix, or `k` is outside 1..V_local.
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating point [R, V_local], got {logits.dtype} {list(logits.shape)}"
        )
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be in 1..V_local = {logits.shape[1]}, got {k}")
    if logits.is_cuda and k <= KERNEL_MAX_K and logits.dtype != torch.float64:
        return topk_logprobs_triton(logits, k, vocab_offset)
    return reference.topk_logprobs(logits, k, vocab_offset)


def merge_topk(
    values: torch.Tensor, ids: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the shards' candidates: ids and order equal those of the unsharded vocabulary.

    Args:
        values: fp32 [S, R, k], one `topk_logprobs` result per shard.
        ids: int64 [S, R, k], disjoint between shards.
        lse: fp32 [S, R].

    Returns:
        logprobs fp32 [R, k], value - logsumexp over all shards, at most 0; -inf for a logit of -inf.
        ids int64 [R, k].

    Raises:
        ValueError: the shapes do not agree.
    """
    if values.ndim != 3:
        raise ValueError(f"values must be [S, R, k], got {list(values.shape)}")
    if ids.shape != values.shape:
        raise ValueError(f"ids must be {list(values.shape)} as values are, got {list(ids.shape)}")
    if lse.shape != values.shape[:2]:
        raise ValueError(f"lse must be [S, R] = {list(values.shape[:2])}, got {list(lse.shape)}")
    if values.is_cuda and values.shape[2] <= KERNEL_MAX_K:
        return merge_topk_triton(values, ids, lse)
    return reference.merge_topk(values, ids, lse)
