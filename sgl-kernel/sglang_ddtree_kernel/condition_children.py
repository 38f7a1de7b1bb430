"""Condition the drafter's candidates on their parents: bigram log-odds correct the marginals of each depth."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel._condition_children_triton import condition_children_triton
from sglang_ddtree_kernel.reference import condition_children as reference


def condition_children(
    logprobs: torch.Tensor, ids: torch.Tensor, left: torch.Tensor, right: torch.Tensor, weight: float
) -> torch.Tensor:
    """Log-probabilities of each candidate below each candidate of the depth above, as `build_tree` takes them.

    A block drafter gives one marginal p_d per depth, whatever stands at the depth before. With the log-odds
    s(a, c) = left[a] . right[c] of c after a, relative to c anywhere, candidate c below candidate a has

        log q_d(c | a) = log p_d(c) + weight * (s(a, c) - log sum_a' p_{d-1}(a') exp s(a', c)) + const(a)

    where the sum is over the candidates of depth d - 1, normalised; it takes out what the marginal already knows
    of its parents. const(a) gives the candidates below a the mass that they have in p_d.

    Args:
        logprobs: fp32 [bs, T, C], at most 0; a candidate at -inf stays there.
        ids: int64 [bs, T, C], token of each candidate, 0 <= id < V.
        left, right: bf16 or fp32 [V, R], of one dtype; products are summed in fp32.
        weight: how far the log-odds count; 0 keeps the marginals.

    Returns:
        fp32 [bs, T, C, C], at most 0: [:, d, p, c] is candidate c of depth d + 1 below candidate p of depth d. The
        first depth has no candidates above it: all its rows are its marginal.

    Raises:
        ValueError: a shape or dtype does not fit; on CUDA also C > 32 or R > 256.
    """
    if ids.ndim != 3 or ids.dtype != torch.int64:
        raise ValueError(f"ids must be int64 [bs, T, C], got {ids.dtype} {list(ids.shape)}")
    if logprobs.shape != ids.shape or logprobs.dtype != torch.float32:
        raise ValueError(
            f"logprobs must be fp32 {list(ids.shape)} as ids are, got {logprobs.dtype} {list(logprobs.shape)}"
        )
    if left.ndim != 2 or left.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"left must be bf16 or fp32 [V, R], got {left.dtype} {list(left.shape)}")
    if right.shape != left.shape or right.dtype != left.dtype:
        raise ValueError(
            f"right must be {left.dtype} {list(left.shape)} as left is, got {right.dtype} {list(right.shape)}"
        )
    if ids.is_cuda:
        return condition_children_triton(logprobs, ids, left, right, weight)
    return reference.condition_children(logprobs, ids, left, right, weight)
