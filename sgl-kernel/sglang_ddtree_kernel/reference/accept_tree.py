"""Specifications of `accept_tree`: a plain walk per request, and the same walk for all requests at once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_ddtree_kernel.tree_types import DraftTree


class Accepted(NamedTuple):
    """What one step commits; P = horizon + 1, and `lens` counts the root's row, or as well the bonus."""

    rows: torch.Tensor  # int32 [bs, P], tree rows of the path, the root first, then -1
    lens: torch.Tensor  # int32 [bs], accepted drafts + 1
    tokens: torch.Tensor  # int64 [bs, P], accepted drafts, the bonus at lens - 1, then 0
    bonus: torch.Tensor  # int64 [bs]
    # KV moves, or None; beyond lens both are the root's slot, so that the move changes nothing.
    src_slots: torch.Tensor | None  # int64 [bs, P], slots of `rows`
    dst_slots: torch.Tensor | None  # int64 [bs, P], slots of the first P rows


def accept_tree_replay(
    tree: DraftTree, target_tokens: torch.Tensor, out_slots: torch.Tensor | None, horizon: int
) -> Accepted:
    """One request at a time, in Python; arguments as in `accept_tree`."""
    width = horizon + 1
    rows, lens, tokens, bonus, src, dst = [], [], [], [], [], []
    for b, (drafts, parents, targets) in enumerate(
        zip(tree.tokens.tolist(), tree.parents.tolist(), target_tokens.tolist(), strict=True)
    ):
        path = [0]
        while len(path) < width:
            children = [row for row, parent in enumerate(parents) if parent == path[-1]]
            hits = [row for row in children if drafts[row] == targets[path[-1]]]
            if not hits:
                break
            path.append(hits[0])
        padding = width - len(path)
        rows.append(path + [-1] * padding)
        lens.append(len(path))
        bonus.append(targets[path[-1]])
        tokens.append([drafts[row] for row in path[1:]] + [bonus[-1]] + [0] * padding)
        if out_slots is not None:
            slots = out_slots[b].tolist()
            src.append([slots[row] for row in path] + [slots[0]] * padding)
            dst.append(slots[: len(path)] + [slots[0]] * padding)

    def tensor(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=target_tokens.device)

    moves = (None, None) if out_slots is None else (tensor(src), tensor(dst))
    return Accepted(
        tensor(rows, torch.int32), tensor(lens, torch.int32), tensor(tokens), tensor(bonus), *moves
    )


def accept_tree_walk(
    tree: DraftTree, target_tokens: torch.Tensor, out_slots: torch.Tensor | None, horizon: int
) -> Accepted:
    """The result of `accept_tree_replay` with a loop over depths only."""
    bs, num_rows = target_tokens.shape
    device = target_tokens.device
    row_ids = torch.arange(num_rows, device=device)

    # next_row[i]: the first child of row i that the target agrees with, or the sink N, which leads to itself.
    above = tree.parents.long()
    has_parent = above >= 0
    above = above.clamp(min=0)
    agreed = has_parent & (tree.tokens == target_tokens.gather(1, above))
    next_row = target_tokens.new_full((bs, num_rows + 1), num_rows)
    next_row.scatter_reduce_(1, above, torch.where(agreed, row_ids, num_rows), "amin")

    path = [target_tokens.new_zeros(bs, 1)]
    for _ in range(horizon):
        path.append(next_row.gather(1, path[-1]))
    path = torch.cat(path, 1)
    on_path = path < num_rows
    rows = torch.where(on_path, path, 0)

    lens = on_path.sum(1, dtype=torch.int32)
    # The target's token at a row of the path is the next draft of the path, or at its end the bonus.
    emitted = target_tokens.gather(1, rows)
    bonus = emitted.gather(1, lens.long()[:, None] - 1)[:, 0]
    src_slots = dst_slots = None
    if out_slots is not None:
        src_slots = out_slots.gather(1, rows)
        places = torch.arange(horizon + 1, device=device)
        dst_slots = out_slots.gather(1, torch.where(on_path, places, 0))
    return Accepted(
        rows=torch.where(on_path, path, -1).int(),
        lens=lens,
        tokens=torch.where(on_path, emitted, 0),
        bonus=bonus,
        src_slots=src_slots,
        dst_slots=dst_slots,
    )
