"""Triton kernel of `condition_children`: a program for each depth of each request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_WIDTH, MAX_RANK = 32, 256


@triton.jit
def _log_sum_exp(x, AXIS: tl.constexpr):
    """-inf where every x is."""
    greatest = tl.max(x, AXIS)
    base = tl.where(greatest == -float("inf"), 0.0, greatest)
    return base + tl.log(tl.sum(tl.exp(x - tl.expand_dims(base, AXIS)), AXIS))


@triton.jit
def _condition_kernel(
    logprobs,
    ids,
    left,
    right,
    out,
    horizon,
    width,
    rank,
    weight,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Parents are rows and children columns of a [WIDTH, WIDTH] tile."""
    depth, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = request * horizon + depth
    place = tl.arange(0, WIDTH)
    listed = place < width
    pair = listed[:, None] & listed[None, :]
    at = out + row * width * width + place[:, None] * width + place[None, :]
    marginal = tl.load(logprobs + row * width + place, mask=listed, other=-float("inf"))
    if depth == 0:
        tl.store(at, tl.broadcast_to(marginal[None, :], [WIDTH, WIDTH]), mask=pair)
    else:
        above = tl.load(logprobs + (row - 1) * width + place, mask=listed, other=-float("inf"))
        parent = tl.load(ids + (row - 1) * width + place, mask=listed, other=0)
        child = tl.load(ids + row * width + place, mask=listed, other=0)
        k = tl.arange(0, RANK)
        inside = (k < rank)[None, :] & listed[:, None]
        u = tl.load(left + parent[:, None] * rank + k[None, :], mask=inside, other=0.0)
        v = tl.load(right + child[:, None] * rank + k[None, :], mask=inside, other=0.0)
        log_odds = tl.dot(u.to(tl.float32), tl.trans(v.to(tl.float32)), input_precision=PRECISION)

        # A level of -inf only has no children to order: any finite weights will do.
        nothing = tl.max(above, 0) == -float("inf")
        above = tl.where(listed, tl.where(nothing, 0.0, above), -float("inf"))
        above -= _log_sum_exp(above, 0)
        expected = _log_sum_exp(above[:, None] + log_odds, 0)
        scores = marginal[None, :] + weight * (log_odds - expected[None, :])
        mass, total = _log_sum_exp(marginal, 0), _log_sum_exp(scores, 1)
        scores += tl.where(mass > -float("inf"), mass - total, 0.0)[:, None]
        tl.store(at, tl.minimum(scores, 0.0), mask=pair)


def condition_children_triton(
    logprobs: torch.Tensor, ids: torch.Tensor, left: torch.Tensor, right: torch.Tensor, weight: float
) -> torch.Tensor:
    """`condition_children` in one launch.

    Raises:
        ValueError: more candidates or a higher rank than one program holds.
    """
    bs, horizon, width = ids.shape
    rank = left.shape[1]
    if width > MAX_WIDTH:
        raise ValueError(f"ids must have C <= {MAX_WIDTH}, got {list(ids.shape)}")
    if rank > MAX_RANK:
        raise ValueError(f"left must have R <= {MAX_RANK}, got {list(left.shape)}")
    out = logprobs.new_empty(bs, horizon, width, width)
    if out.numel():
        _condition_kernel[(horizon, bs)](
            logprobs.contiguous(),
            ids.contiguous(),
            left.contiguous(),
            right.contiguous(),
            out,
            horizon,
            width,
            rank,
            float(weight),
            WIDTH=max(16, triton.next_power_of_2(width)),  # the least of a matrix product
            RANK=max(16, triton.next_power_of_2(rank)),
            PRECISION="ieee" if left.dtype == torch.float32 else "tf32",  # which holds every bf16
            num_warps=1 if width <= 16 else 4,
        )
    return out
