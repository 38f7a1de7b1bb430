"""Draft trees for the tests, made without the code under test."""

from __future__ import annotations

import torch
from sglang_ddtree_kernel.tree_types import DraftTree, pack_ancestors


def ancestor_mask(parents: list[int]) -> torch.Tensor:
    """bool [N, N], by climbing from every row to the root."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for row in range(len(parents)):
        above = parents[row]
        while above >= 0:
            mask[row, above] = True
            above = parents[above]
    return mask


def tree_from_parents(parents: list[list[int]], tokens: list[list[int]]) -> DraftTree:
    """Parents must stand before children; every row after the first without a parent is invalid."""
    masks = torch.stack([ancestor_mask(p) for p in parents])
    parents = torch.tensor(parents, dtype=torch.int32)
    return DraftTree(
        tokens=torch.tensor(tokens),
        parents=parents,
        depths=(masks.sum(-1) - 1).int(),
        ancestors=pack_ancestors(masks),
        valid_counts=(parents >= 0).sum(1).int() + 1,
    )


def random_tree(
    seed: int, bs: int, num_rows: int, horizon: int, vocab: int = 4, invalid: int = 0
) -> DraftTree:
    """Random shapes in depth order; `invalid` rows in every second request; siblings may share tokens."""
    rng = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(high, (1,), generator=rng))

    all_parents, all_tokens = [], []
    for b in range(bs):
        valid = max(num_rows - (invalid if b % 2 == 0 else 0), 1)
        parents, depths = [-1], [0]
        for _ in range(1, valid):
            above = draw(len(parents))
            while depths[above] >= horizon:
                above = parents[above]
            parents.append(above)
            depths.append(depths[above] + 1)
        order = sorted(range(valid), key=lambda row: depths[row])
        row_of = {old: new for new, old in enumerate(order)} | {-1: -1}
        all_parents.append([row_of[parents[old]] for old in order] + [-1] * (num_rows - valid))
        all_tokens.append([draw(vocab) for _ in range(valid)] + [0] * (num_rows - valid))
    return tree_from_parents(all_parents, all_tokens)


def chain_tree(bs: int, num_rows: int) -> DraftTree:
    """Row i follows row i - 1 and holds token i."""
    return tree_from_parents([list(range(-1, num_rows - 1))] * bs, [list(range(num_rows))] * bs)


def star_tree(bs: int, num_rows: int) -> DraftTree:
    """All rows below the root; row i holds token i."""
    return tree_from_parents([[-1] + [0] * (num_rows - 1)] * bs, [list(range(num_rows))] * bs)


def assert_same_tree(actual: DraftTree, expected: DraftTree) -> None:
    for name in ("tokens", "parents", "depths", "ancestors", "valid_counts"):
        a, e = getattr(actual, name), getattr(expected, name)
        assert a.dtype == e.dtype and a.shape == e.shape and torch.equal(a, e), (name, a, e)


# Moves of KV rows, dst <- src, by name.
MOVES = {
    "nothing": ([], []),
    "one": ([3], [5]),
    "down": ([1, 2, 3], [2, 3, 4]),
    "up": ([2, 3, 4], [1, 2, 3]),
    "swap": ([1, 2], [2, 1]),
    "repeated no-op": ([0, 1, 0, 0], [0, 7, 0, 0]),
}
