"""Triton kernel of `build_tree`: best-first search by one warp per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree_kernel.tree_types import DraftTree, num_words

# A candidate's key is the pair (high, low). `high` orders as its score does; `low` is the tie rule in bits:
# depth, the parent's place in its level, candidate, each counted down from its greatest value.
MAX_HORIZON, MAX_BUDGET, MAX_WIDTH = 31, 511, 32
NONE = tl.constexpr(-0x80000000)
# Scores are at most 0 and so are their integers; this lifts any finite one above 0, where only the spine is.
SPINE_LIFT = tl.constexpr(0x7F800002)


@triton.jit
def _ordered(x):
    """int32 that orders as the fp32 x does; -0.0 becomes 0. For x <= 0, the map is its own inverse."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(ordered == -1, 0, ordered)


@triton.jit
def _score(high):
    high = tl.where(high > 0, high - SPINE_LIFT, high)
    return (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_child(
    edges,
    score,
    depth,
    place,
    candidate,
    on_spine,
    limit_high,
    limit_low,
    horizon,
    width,
    CONDITIONED: tl.constexpr,
    SPINE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Greatest key below the limit among the children of a node; `high` is NONE if there is none."""
    child = tl.arange(0, WIDTH)
    table = depth * width + candidate if CONDITIONED else depth
    inside = (child < width) & (depth < horizon)
    edge = tl.load(edges + table * width + child, mask=inside, other=-float("inf")).to(tl.float32)
    edge = tl.minimum(tl.where(edge == edge, edge, -float("inf")), 0.0)
    total = score + edge
    high = tl.where(total > -float("inf"), _ordered(total), NONE)
    if SPINE:
        order = tl.where(inside, _ordered(edge), NONE)
        tip = tl.min(tl.where(order == tl.max(order), child, WIDTH))
        lifted = on_spine & (child == tip) & (high > NONE)
        high = tl.where(lifted, high + SPINE_LIFT, high)
    low = ((30 - depth) << 14) | ((511 - place) << 5) | (31 - child)
    below = (high < limit_high) | ((high == limit_high) & (low < limit_low))
    high = tl.where(below, high, NONE)
    best_high = tl.max(high)
    return best_high, tl.max(tl.where(high == best_high, low, -1))


@triton.jit
def _build_kernel(
    logprobs,
    ids,
    root_tokens,
    tokens_out,
    parents_out,
    depths_out,
    ancestors_out,
    counts_out,
    num_rows,
    horizon,
    width,
    CONDITIONED: tl.constexpr,
    SPINE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One request. Nodes are held in the order they are kept, each with the best child it has not given yet.

    The frontier is therefore one key per kept node, and keeping a node looks at two rows of edges: its own,
    and its parent's for the next best sibling.
    """
    request = tl.program_id(0).to(tl.int64)
    edges = logprobs + request * horizon * width * (width if CONDITIONED else 1)
    ids += request * horizon * width

    node = tl.arange(0, ROWS)
    depth = tl.where(node == 0, 0, -1)
    place = tl.zeros([ROWS], tl.int32)  # within the level
    parent_place = tl.zeros([ROWS], tl.int32)
    candidate = tl.zeros([ROWS], tl.int32)
    score = tl.zeros([ROWS], tl.int32)  # bits of the fp32 score, so that a masked sum reads one exactly
    spine = tl.where(node == 0, 1, 0)

    top_high, top_low = _best_child(
        edges, 0.0, 0, 0, 0, True, 0x7FFFFFFF, 0, horizon, width, CONDITIONED, SPINE, WIDTH
    )
    next_high = tl.where(node == 0, top_high, NONE)
    next_low = tl.where(node == 0, top_low, 0)
    count = 1
    while (count < num_rows) & (top_high > NONE):
        above = (next_high == top_high) & (next_low == top_low)
        above_score = tl.sum(tl.where(above, score, 0)).to(tl.float32, bitcast=True)
        above_candidate = tl.sum(tl.where(above, candidate, 0))
        above_spine = tl.sum(tl.where(above, spine, 0)) > 0
        above_place = 511 - ((top_low >> 5) & 511)
        new_depth = 31 - (top_low >> 14)
        new_candidate = 31 - (top_low & 31)
        new_score = _score(top_high)
        new_place = tl.sum((depth == new_depth).to(tl.int32))
        on_spine = top_high > 0

        child_high, child_low = _best_child(
            edges,
            new_score,
            new_depth,
            new_place,
            new_candidate,
            on_spine,
            0x7FFFFFFF,
            0,
            horizon,
            width,
            CONDITIONED,
            SPINE,
            WIDTH,
        )
        sibling_high, sibling_low = _best_child(
            edges,
            above_score,
            new_depth - 1,
            above_place,
            above_candidate,
            above_spine,
            top_high,
            top_low,
            horizon,
            width,
            CONDITIONED,
            SPINE,
            WIDTH,
        )
        new = node == count
        next_high = tl.where(new, child_high, tl.where(above, sibling_high, next_high))
        next_low = tl.where(new, child_low, tl.where(above, sibling_low, next_low))
        depth = tl.where(new, new_depth, depth)
        place = tl.where(new, new_place, place)
        parent_place = tl.where(new, above_place, parent_place)
        candidate = tl.where(new, new_candidate, candidate)
        score = tl.where(new, new_score.to(tl.int32, bitcast=True), score)
        if SPINE:
            spine = tl.where(new, on_spine.to(tl.int32), spine)
        count += 1
        top_high = tl.max(next_high)
        top_low = tl.max(tl.where(next_high == top_high, next_low, -1))

    # Rows: levels one after the other. A parent's row is the start of its level plus its place there.
    row = node
    parent = tl.full([ROWS], -1, tl.int32)
    level_start = 1
    above_start = 0
    for level in range(1, horizon + 1):
        here = depth == level
        row = tl.where(here, level_start + place, row)
        parent = tl.where(here, above_start + parent_place, parent)
        above_start = level_start
        level_start += tl.sum(here.to(tl.int32))
    drafted = depth > 0
    token = tl.load(ids + (depth - 1) * width + candidate, mask=drafted, other=0)
    token = tl.where(node == 0, tl.load(root_tokens + request).to(tl.int64), token)
    out = request * num_rows
    stored = node < num_rows
    tl.store(tokens_out + out + row, token, mask=stored)
    tl.store(parents_out + out + row, parent, mask=stored)
    tl.store(depths_out + out + row, tl.where(drafted, depth, 0), mask=stored)
    tl.store(counts_out + request, count)

    tl.debug_barrier()  # the parents are read back, by row
    deepest = tl.max(depth)
    for word in range(WORDS):
        at = node
        bits = tl.zeros([ROWS], tl.int64)
        for _ in range(deepest + 1):
            mine = (at >= 0) & ((at >> 6) == word)
            bits |= tl.where(mine, tl.full([ROWS], 1, tl.int64) << (at & 63), 0)
            at = tl.load(parents_out + out + at, mask=stored & (at >= 0), other=-1)
        tl.store(ancestors_out + (out + node) * WORDS + word, bits, mask=stored)


def build_tree_triton(
    logprobs: torch.Tensor, ids: torch.Tensor, root_tokens: torch.Tensor, budget: int, *, spine: bool = False
) -> DraftTree:
    """`build_tree` in one launch.

    Raises:
        ValueError: the horizon, the candidates or the budget exceed what the keys can hold.
    """
    bs, horizon, width = ids.shape
    if horizon > MAX_HORIZON or width > MAX_WIDTH:
        raise ValueError(f"ids must have T <= {MAX_HORIZON} and C <= {MAX_WIDTH}, got {list(ids.shape)}")
    if budget > MAX_BUDGET:
        raise ValueError(f"budget must be at most {MAX_BUDGET}, got {budget}")
    num_rows = budget + 1
    words = num_words(num_rows)
    tree = DraftTree(
        tokens=ids.new_empty(bs, num_rows),
        parents=ids.new_empty(bs, num_rows, dtype=torch.int32),
        depths=ids.new_empty(bs, num_rows, dtype=torch.int32),
        ancestors=ids.new_empty(bs, num_rows, words),
        valid_counts=ids.new_empty(bs, dtype=torch.int32),
    )
    if bs:
        _build_kernel[(bs,)](
            logprobs.contiguous(),
            ids.contiguous(),
            root_tokens.contiguous(),
            tree.tokens,
            tree.parents,
            tree.depths,
            tree.ancestors,
            tree.valid_counts,
            num_rows,
            horizon,
            width,
            CONDITIONED=logprobs.ndim == 4,
            SPINE=spine,
            ROWS=triton.next_power_of_2(num_rows),
            WIDTH=MAX_WIDTH,  # a lane each: a maximum over a whole warp is one instruction
            WORDS=words,
            num_warps=1,
        )
    return tree
