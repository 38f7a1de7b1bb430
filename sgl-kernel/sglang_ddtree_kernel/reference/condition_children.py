"""Specification of `condition_children`."""

from __future__ import annotations

import torch


def condition_children(
    logprobs: torch.Tensor, ids: torch.Tensor, left: torch.Tensor, right: torch.Tensor, weight: float
) -> torch.Tensor:
    """logprobs fp32, ids int64 [bs, T, C]; left, right [V, R] -> fp32 [bs, T, C, C].

    Log-odds are left[parent] . right[child]; `expected` is what the marginals of the parents make of them.
    """
    above, below = logprobs[:, :-1], logprobs[:, 1:, None]
    log_odds = left[ids[:, :-1]].float() @ right[ids[:, 1:]].float().mT
    # A level of -inf only has no children to order: any finite weights will do.
    parents = torch.where((above > -torch.inf).any(-1, keepdim=True), above, 0.0)
    expected = (parents.log_softmax(-1)[..., None] + log_odds).logsumexp(2, keepdim=True)
    scores = below + weight * (log_odds - expected)
    mass, total = below.logsumexp(-1, keepdim=True), scores.logsumexp(-1, keepdim=True)
    correction = torch.where(mass > -torch.inf, mass - total, 0.0)
    conditioned = (scores + correction).clamp_(max=0)
    first = logprobs[:, :1, None].expand(-1, -1, ids.shape[2], -1)
    return torch.cat([first, conditioned], dim=1)
