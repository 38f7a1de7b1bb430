"""The kernel of `accept_tree` against its specification: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sglang_ddtree_kernel.accept_tree import accept_tree_triton
from sglang_ddtree_kernel.reference.accept_tree import accept_tree_replay
from test_accept_tree import assert_same
from tree_cases import chain_tree, random_tree, star_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(tree, targets, slots, horizon):
    tree = dataclasses.replace(
        tree, **{f.name: getattr(tree, f.name).to(DEVICE) for f in dataclasses.fields(tree)}
    )
    targets = targets.to(DEVICE)
    slots = None if slots is None else slots.to(DEVICE)
    accepted = accept_tree_triton(tree, targets, slots, horizon)
    assert_same(accepted, accept_tree_replay(tree, targets, slots, horizon))
    return accepted


@pytest.mark.parametrize("with_slots", [False, True], ids=["no slots", "slots"])
@pytest.mark.parametrize(
    "bs,num_rows,depth,horizon", [(3, 1, 1, 1), (4, 16, 8, 15), (2, 65, 15, 6), (1, 512, 31, 31)]
)
@pytest.mark.parametrize("vocab", [1, 3])
def test_random_trees(vocab, bs, num_rows, depth, horizon, with_slots):
    for seed in range(4):
        tree = random_tree(seed, bs, num_rows, depth, vocab, invalid=num_rows // 3)
        rng = torch.Generator().manual_seed(seed)
        targets = torch.randint(vocab, (bs, num_rows), generator=rng)
        slots = torch.randperm(bs * num_rows, generator=rng).view(bs, num_rows) if with_slots else None
        check(tree, targets, slots, horizon)


def test_whole_chain_and_star():
    slots = torch.arange(6)[None] + 10
    assert check(chain_tree(1, 6), torch.tensor([[1, 2, 3, 4, 5, 9]]), slots, 7).lens.item() == 6
    assert check(star_tree(1, 6), torch.tensor([[4, 0, 0, 0, 8, 0]]), slots, 2).lens.item() == 2


def test_tokens_beyond_32_bits():
    tree, targets = chain_tree(1, 3), torch.tensor([[1, 2**40, 7]])
    tree.tokens[0, 2] = 2**40
    assert check(tree, targets, None, 3).tokens.tolist() == [[1, 2**40, 7, 0]]
