from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_ddtree_kernel.accept_tree import accept_tree, greedy_tokens
from sglang_ddtree_kernel.reference.accept_tree import accept_tree_replay
from tree_cases import chain_tree, random_tree, star_tree


def assert_same(actual, expected):
    for name, a, e in zip(expected._fields, actual, expected, strict=True):
        assert (a is None) == (e is None), name
        if e is not None:
            assert a.dtype == e.dtype and torch.equal(a, e), (name, a, e)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    bs=st.integers(1, 4),
    num_rows=st.integers(1, 24),
    depth=st.integers(1, 8),
    horizon=st.integers(1, 10),
    vocab=st.integers(1, 4),
    invalid=st.integers(0, 24),
    with_slots=st.booleans(),
)
def test_walk_equals_replay(seed, bs, num_rows, depth, horizon, vocab, invalid, with_slots):
    tree = random_tree(seed, bs, num_rows, depth, vocab, invalid)
    rng = torch.Generator().manual_seed(seed + 1)
    targets = torch.randint(vocab, (bs, num_rows), generator=rng)
    slots = torch.randperm(bs * num_rows, generator=rng).view(bs, num_rows) if with_slots else None
    accepted = accept_tree(tree, targets, slots, horizon)
    assert_same(accepted, accept_tree_replay(tree, targets, slots, horizon))
    if with_slots:  # real moves never share a destination, and no padded move changes anything
        moves = accepted.src_slots != accepted.dst_slots
        assert accepted.dst_slots[moves].unique().numel() == int(moves.sum())
        assert not moves[accepted.rows < 0].any()


def test_whole_chain():
    tree = chain_tree(2, 6)
    targets = torch.tensor([[1, 2, 3, 4, 5, 9]] * 2)
    accepted = accept_tree(tree, targets, torch.arange(12).view(2, 6) + 20, horizon=7)
    assert accepted.rows.tolist() == [[0, 1, 2, 3, 4, 5, -1, -1]] * 2
    assert accepted.lens.tolist() == [6, 6]
    assert accepted.tokens.tolist() == [[1, 2, 3, 4, 5, 9, 0, 0]] * 2
    assert accepted.bonus.tolist() == [9, 9]
    assert accepted.src_slots[1].tolist() == [26, 27, 28, 29, 30, 31, 26, 26]
    assert torch.equal(accepted.src_slots, accepted.dst_slots)


def test_nothing_accepted():
    accepted = accept_tree(chain_tree(1, 6), torch.full((1, 6), 7), torch.arange(6)[None])
    assert accepted.lens.tolist() == [1] and accepted.bonus.tolist() == [7]
    assert accepted.tokens.tolist() == [[7, 0, 0, 0, 0, 0]]
    assert accepted.src_slots.tolist() == accepted.dst_slots.tolist() == [[0] * 6]


def test_star_moves_one_row():
    accepted = accept_tree(
        star_tree(1, 6), torch.tensor([[4, 0, 0, 0, 8, 0]]), torch.arange(6)[None] + 10, horizon=2
    )
    assert accepted.rows.tolist() == [[0, 4, -1]]
    assert accepted.tokens.tolist() == [[4, 8, 0]]
    assert accepted.src_slots.tolist() == [[10, 14, 10]] and accepted.dst_slots.tolist() == [[10, 11, 10]]


def test_horizon_cuts_the_walk():
    accepted = accept_tree(chain_tree(1, 6), torch.tensor([[1, 2, 3, 4, 5, 9]]), horizon=2)
    assert accepted.lens.tolist() == [3] and accepted.tokens.tolist() == [[1, 2, 3]]
    assert accepted.bonus.tolist() == [3]


def test_invalid_rows_are_never_accepted():
    tree = random_tree(0, 1, 6, 3, vocab=1, invalid=5)  # the root alone is valid, every token is 0
    accepted = accept_tree(tree, torch.zeros(1, 6, dtype=torch.int64))
    assert accepted.lens.tolist() == [1] and accepted.rows[0, 1:].tolist() == [-1] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [7, 4096, 50_001])
def test_greedy_ties_go_to_the_smaller_id(vocab, dtype):
    rng = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 4, (6, vocab), generator=rng).to(dtype)
    logits[0] = -torch.inf
    logits[1] = -logits[1].abs()  # the greatest are zeros of both signs
    expected = [row.index(max(row)) for row in logits.tolist()]
    tokens = greedy_tokens(logits)
    assert tokens.dtype == torch.int64 and tokens.tolist() == expected


def test_greedy_nan_shows():
    logits = torch.randn(1, 40)
    logits[0, [7, 11]] = torch.nan
    assert greedy_tokens(logits).tolist() == [7]


def test_errors_name_the_argument():
    tree, targets = chain_tree(1, 4), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="^target_tokens must"):
        accept_tree(tree, targets[:, :3])
    with pytest.raises(ValueError, match="^out_slots must"):
        accept_tree(tree, targets, targets.int())
    with pytest.raises(ValueError, match="^horizon must"):
        accept_tree(tree, targets, horizon=0)
    for shape in ((3,), (3, 0)):
        with pytest.raises(ValueError, match="^logits must"):
            greedy_tokens(torch.zeros(shape))
