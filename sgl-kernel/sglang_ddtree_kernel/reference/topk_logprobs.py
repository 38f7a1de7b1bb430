"""Specification of `topk_logprobs` and `merge_topk`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ShardTopK(NamedTuple):
    values: torch.Tensor  # fp32 [R, k], logits
    ids: torch.Tensor  # int64 [R, k], global token ids
    lse: torch.Tensor  # fp32 [R], log-sum-exp of the shard's logits


def _order_key(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys, larger for a larger value and then for a smaller id; none are equal, so top-k is exact.

    A positive float's bits, read as an integer, grow with it; a negative float's fall, and must be flipped.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - ids


def topk_logprobs(logits: torch.Tensor, k: int, vocab_offset: int) -> ShardTopK:
    """logits [R, V_local] -> values fp32 [R, k], ids int64 [R, k], lse fp32 [R]."""
    logits = logits.float()
    columns = torch.arange(logits.shape[1], device=logits.device)
    best = _order_key(logits, columns).topk(k, dim=1).indices
    return ShardTopK(logits.gather(1, best), best + vocab_offset, logits.logsumexp(1))


def merge_topk(
    values: torch.Tensor, ids: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """values, ids [S, R, k], lse [S, R] -> logprobs fp32 [R, k], ids int64 [R, k]."""
    k = values.shape[2]
    values, ids = values.transpose(0, 1).flatten(1), ids.transpose(0, 1).flatten(1)
    best = _order_key(values, ids).topk(k, dim=1).indices
    values, ids = values.gather(1, best), ids.gather(1, best)
    # Rounding may push value - lse just above 0, and best-first search needs scores that never rise.
    logprobs = (values - lse.logsumexp(0)[:, None]).clamp(max=0)
    return logprobs.masked_fill(values == -torch.inf, -torch.inf), ids
