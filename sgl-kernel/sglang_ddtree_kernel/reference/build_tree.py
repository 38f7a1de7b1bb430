"""Specifications of `build_tree`: the textbook heap, and the same tree level by level for all requests."""

from __future__ import annotations

import heapq

import numpy as np
import torch

from sglang_ddtree_kernel.tree_types import DraftTree, ancestor_words


def _edges(logprobs: torch.Tensor) -> torch.Tensor:
    """Conditioned fp32 edges [bs, T, C, C], at most 0 and without NaN; plain ones broadcast over parents."""
    edges = torch.nan_to_num(logprobs.float(), nan=-torch.inf, posinf=0.0, neginf=-torch.inf).clamp_(max=0)
    if edges.ndim == 3:
        edges = edges[:, :, None].expand(-1, -1, edges.shape[2], -1)
    return edges


def build_tree_heap(
    logprobs: torch.Tensor, ids: torch.Tensor, root_tokens: torch.Tensor, budget: int, *, spine: bool = False
) -> DraftTree:
    """Best-first search with a priority queue, one request at a time; arguments as in `build_tree`."""
    bs, horizon, _ = ids.shape
    tokens = np.zeros((bs, budget + 1), np.int64)
    parents = np.full((bs, budget + 1), -1, np.int32)
    depths = np.zeros((bs, budget + 1), np.int32)
    counts = np.zeros(bs, np.int32)
    edges, ids_np = _edges(logprobs).cpu().numpy(), ids.cpu().numpy()
    for b in range(bs):
        # A kept node: (depth, parent, candidate, position within its level, score, on the spine).
        kept = [(0, -1, 0, 0, np.float32(0), spine)]
        level_sizes = [1] + [0] * horizon
        heap = []

        def push_children(parent, b=b, kept=kept, heap=heap):
            depth, _, candidate, position, score, on_spine = kept[parent]
            if depth == horizon:
                return
            below = edges[b, depth, candidate]
            for c, edge in enumerate(below):
                child_score = np.float32(score + edge)
                if child_score > -np.inf:
                    child_on_spine = bool(on_spine and c == below.argmax())
                    # The tuple is the tie rule; the spine precedes everything.
                    key = (not child_on_spine, float(-child_score), depth + 1, position, c)
                    heapq.heappush(heap, (key, parent, child_score))

        push_children(0)
        while heap and len(kept) <= budget:
            (off_spine, _, depth, _, candidate), parent, score = heapq.heappop(heap)
            kept.append((depth, parent, candidate, level_sizes[depth], score, not off_spine))
            level_sizes[depth] += 1
            push_children(len(kept) - 1)

        order = sorted(range(len(kept)), key=lambda node: kept[node][0])  # stable: pop order within a depth
        row_of = {node: row for row, node in enumerate(order)}
        tokens[b, 0] = root_tokens[b]
        counts[b] = len(kept)
        for row, node in enumerate(order[1:], start=1):
            depth, parent, candidate, *_ = kept[node]
            tokens[b, row] = ids_np[b, depth - 1, candidate]
            parents[b, row] = row_of[parent]
            depths[b, row] = depth
    tokens, parents, depths, counts = (
        torch.from_numpy(array).to(ids.device) for array in (tokens, parents, depths, counts)
    )
    return DraftTree(tokens, parents, depths, ancestor_words(parents, horizon), counts)


def build_tree_levels(
    logprobs: torch.Tensor, ids: torch.Tensor, root_tokens: torch.Tensor, budget: int, *, spine: bool = False
) -> DraftTree:
    """The tree of `build_tree_heap`, level by level and for all requests at once.

    Few rows per level suffice. A node at place r of its level comes after the r - 1 nodes before it there and
    after its depth - 1 ancestors below the root; so if r > budget - depth + 1, it is not among the `budget`
    best, and neither are its descendants, which come later still. A level therefore keeps and expands at most
    that many nodes. What is left contains the tree, and a last top-N over all levels picks it.

    Every sort is stable and every list is laid out by (depth, parent's place, candidate): the tie rule.
    """
    bs, horizon, width = ids.shape
    num_rows = budget + 1
    edges = _edges(logprobs)

    # Nodes are numbered through all levels; a node's code is parent node * width + candidate.
    root = ids.new_zeros(bs, 1)
    scores = edges.new_zeros(bs, 1)
    candidates = root
    on_spine = torch.ones_like(root, dtype=torch.bool)
    all_keys, all_codes, sizes = [edges.new_full((bs, 1), torch.inf)], [root], [1]
    level_start = 0
    for depth in range(1, min(horizon, budget) + 1):
        below = edges[:, depth - 1].gather(1, candidates[:, :, None].expand(-1, -1, width))
        scores = (scores[:, :, None] + below).flatten(1)
        keys = scores
        if spine:  # while it lasts, the spine is place 0 of every level
            tip = below[:, 0].argmax(1, keepdim=True)
            tip_score = scores.gather(1, tip)
            on_spine = on_spine & (tip_score > -torch.inf)
            keys = scores.scatter(1, tip, torch.where(on_spine, torch.inf, tip_score))
        keys, order = keys.sort(dim=1, descending=True, stable=True)
        size = min(budget - depth + 1, sizes[-1] * width)
        keys, order = keys[:, :size], order[:, :size]
        scores = scores.gather(1, order) if spine else keys
        candidates = order % width
        all_keys.append(keys)
        all_codes.append(order + level_start * width)
        level_start += sizes[-1]
        sizes.append(size)

    # The N best of all levels; -inf ones become a void node, numbered last so that it sorts to the end.
    void = max(sum(sizes), num_rows)
    padding = void + 1 - sum(sizes)
    all_keys.append(edges.new_full((bs, padding), -torch.inf))
    all_codes.append(ids.new_zeros(bs, padding))
    best_keys, best = torch.cat(all_keys, 1).sort(dim=1, descending=True, stable=True)
    nodes = torch.where(best_keys[:, :num_rows] > -torch.inf, best[:, :num_rows], void).sort(dim=1).values

    # Node numbers ascend by (depth, place), which is the order of rows.
    valid = nodes < void
    rows = torch.arange(num_rows, device=ids.device).expand(bs, -1)
    row_of = ids.new_zeros(bs, void + 1).scatter(1, nodes, rows)
    codes = torch.cat(all_codes, 1).gather(1, nodes)
    level_of = torch.cat(
        [ids.new_full((size,), depth) for depth, size in enumerate(sizes)] + [ids.new_zeros(padding)]
    )
    depths = level_of[nodes]
    drafted = depths > 0
    parents = torch.where(drafted, row_of.gather(1, codes.div(width, rounding_mode="floor")), -1)
    tokens = ids.flatten(1).gather(1, (depths - 1).clamp(min=0) * width + codes % width)
    tokens = torch.where(drafted, tokens, 0)
    tokens[:, 0] = root_tokens
    return DraftTree(
        tokens=tokens,
        parents=parents.int(),
        depths=depths.int(),
        ancestors=ancestor_words(parents, len(sizes) - 1),
        valid_counts=valid.sum(1, dtype=torch.int32),
    )
