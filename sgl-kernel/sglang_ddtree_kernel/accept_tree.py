"""Walk the draft tree along the target's tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree_kernel._argmax_triton import argmax_triton
from sglang_ddtree_kernel.reference.accept_tree import Accepted, accept_tree_walk
from sglang_ddtree_kernel.tree_types import DraftTree


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Argmax token of every row; ties go to the smaller id, -0.0 equal to 0.0.

    Args:
        logits: [R, V], V >= 1, finite or -inf; a row of -inf alone gives token 0, one with a NaN the first NaN's id.

    Returns:
        int64 [R].

    Raises:
        ValueError: `logits` is not such a matrix.
    """
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"logits must be [R, V] with V >= 1, got {list(logits.shape)}")
    if logits.is_cuda and logits.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return argmax_triton(logits)
    return logits.max(-1).indices  # the first one, as argmax, but three times as fast on a CPU


def accept_tree(
    tree: DraftTree,
    target_tokens: torch.Tensor,
    out_slots: torch.Tensor | None = None,
    horizon: int | None = None,
) -> Accepted:
    """Accept drafts from the root down while the target's token at a row is one of the row's children.

    The first token without a child is the bonus. With argmaxes this is greedy verification; with one sample
    of the target's own (adjusted) distribution per row, the output has exactly the target's distribution, as
    each emitted token is such a sample given the tokens before it. Should two siblings hold one token, the
    first row wins.

    Args:
        tree: N rows per request.
        target_tokens: int64 [bs, N], the target's token after each row.
        out_slots: int64 [bs, N], KV slot of each row; if given, the moves that make the accepted KV
            contiguous are returned.
        horizon: most drafts to accept, at least 1 (default N - 1); P = horizon + 1 columns come back,
            whatever N is.

    Returns:
        Accepted, see its fields.

    Raises:
        ValueError: a shape or dtype does not fit, or `horizon` is below 1.
    """
    shape = tree.tokens.shape
    if target_tokens.shape != shape or target_tokens.dtype != torch.int64:
        raise ValueError(
            f"target_tokens must be int64 {list(shape)},"
            f" got {target_tokens.dtype} {list(target_tokens.shape)}"
        )
    if out_slots is not None and (out_slots.shape != shape or out_slots.dtype != torch.int64):
        raise ValueError(
            f"out_slots must be int64 {list(shape)}, got {out_slots.dtype} {list(out_slots.shape)}"
        )
    if horizon is None:
        horizon = max(shape[1] - 1, 1)
    if horizon < 1:
        raise ValueError(f"horizon must be at least 1, got {horizon}")
    if target_tokens.is_cuda:
        return accept_tree_triton(tree, target_tokens, out_slots, horizon)
    return accept_tree_walk(tree, target_tokens, out_slots, horizon)


@triton.jit
def _accept_kernel(
    tokens,
    parents,
    targets,
    slots,
    rows_out,
    lens_out,
    tokens_out,
    bonus_out,
    src_out,
    dst_out,
    num_rows,
    width,
    HAS_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One request: tokens, parents, targets and slots are [bs, N], the outputs [bs, width] or [bs]."""
    request = tl.program_id(0).to(tl.int64)
    first = request * num_rows
    out = request * width
    row = tl.arange(0, ROWS)
    inside = row < num_rows
    drafts = tl.load(tokens + first + row, mask=inside, other=0)
    above = tl.load(parents + first + row, mask=inside, other=-1)

    here = 0
    length = 0
    bonus = tl.load(targets + first)
    while here < num_rows:  # `num_rows` says that the walk has ended
        bonus = tl.load(targets + first + here)
        tl.store(rows_out + out + length, here)
        tl.store(tokens_out + out + length, bonus)
        if HAS_SLOTS:
            tl.store(src_out + out + length, tl.load(slots + first + here))
            tl.store(dst_out + out + length, tl.load(slots + first + length))
        length += 1
        child = tl.min(tl.where((above == here) & (drafts == bonus), row, num_rows))
        here = tl.where(length < width, child, num_rows)
    tl.store(lens_out + request, length)
    tl.store(bonus_out + request, bonus)
    root_slot = tl.load(slots + first) if HAS_SLOTS else 0
    for place in range(length, width):
        tl.store(rows_out + out + place, -1)
        tl.store(tokens_out + out + place, 0)
        if HAS_SLOTS:
            tl.store(src_out + out + place, root_slot)
            tl.store(dst_out + out + place, root_slot)


def accept_tree_triton(
    tree: DraftTree, target_tokens: torch.Tensor, out_slots: torch.Tensor | None, horizon: int
) -> Accepted:
    """`accept_tree` in one launch, a program per request; slots are gathered on the way."""
    bs, num_rows = target_tokens.shape
    width = horizon + 1
    rows = target_tokens.new_empty(bs, width, dtype=torch.int32)
    lens = target_tokens.new_empty(bs, dtype=torch.int32)
    tokens, bonus = target_tokens.new_empty(bs, width), target_tokens.new_empty(bs)
    src = dst = None
    if out_slots is not None:
        src, dst = target_tokens.new_empty(bs, width), target_tokens.new_empty(bs, width)
        out_slots = out_slots.contiguous()
    _accept_kernel[(bs,)](
        tree.tokens.contiguous(),
        tree.parents.contiguous(),
        target_tokens.contiguous(),
        out_slots,
        rows,
        lens,
        tokens,
        bonus,
        src,
        dst,
        num_rows,
        width,
        HAS_SLOTS=out_slots is not None,
        ROWS=triton.next_power_of_2(num_rows),
        num_warps=1,  # a minimum over one warp needs no barrier, and the walk is nothing but such minima
    )
    return Accepted(rows, lens, tokens, bonus, src, dst)
