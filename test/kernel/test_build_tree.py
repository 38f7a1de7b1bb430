from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_ddtree_kernel.build_tree import build_tree
from sglang_ddtree_kernel.reference.build_tree import build_tree_heap, build_tree_levels
from sglang_ddtree_kernel.tree_types import ancestor_words, chain_ancestors, pack_ancestors, unpack_ancestors
from tree_cases import ancestor_mask, assert_same_tree, random_tree

FEW_VALUES = torch.tensor([0.0, -0.0, -0.5, -0.5, -1.0, -1.5, -torch.inf])


def draw_logprobs(seed: int, shape: tuple[int, ...], ties: bool) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    if ties:
        return FEW_VALUES[torch.randint(len(FEW_VALUES), shape, generator=rng)]
    return torch.randn(shape, generator=rng).mul(2).log_softmax(-1)


def draw_case(seed, bs, horizon, width, conditioned, ties):
    shape = (bs, horizon, width, width) if conditioned else (bs, horizon, width)
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (bs, horizon, width), generator=rng)
    return draw_logprobs(seed, shape, ties), ids, torch.randint(50, (bs,), generator=rng)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    bs=st.integers(1, 3),
    horizon=st.integers(1, 6),
    width=st.integers(1, 5),
    budget=st.integers(1, 40),
    conditioned=st.booleans(),
    ties=st.booleans(),
    spine=st.booleans(),
)
def test_levels_equal_heap(seed, bs, horizon, width, budget, conditioned, ties, spine):
    case = draw_case(seed, bs, horizon, width, conditioned, ties)
    assert_same_tree(
        build_tree_levels(*case, budget, spine=spine), build_tree_heap(*case, budget, spine=spine)
    )


@pytest.mark.parametrize("spine", [False, True], ids=["pure", "spine"])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(
    "horizon,width,budget",
    [(15, 8, 15), (15, 8, 64), (15, 8, 128), (1, 8, 15), (15, 1, 15), (15, 1, 4), (3, 2, 128)],
)
def test_served_sizes(horizon, width, budget, ties, spine):
    for conditioned in (False, True):
        case = draw_case(budget, 2, horizon, width, conditioned, ties)
        assert_same_tree(build_tree(*case, budget, spine=spine), build_tree_heap(*case, budget, spine=spine))


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("spine", [False, True], ids=["pure", "spine"])
def test_plain_edges_equal_broadcast_edges(spine, ties):
    logprobs, ids, roots = draw_case(3, 2, 6, 4, False, ties)
    conditioned = logprobs[:, :, None].repeat(1, 1, 4, 1)
    assert_same_tree(
        build_tree(conditioned, ids, roots, 20, spine=spine),
        build_tree(logprobs, ids, roots, 20, spine=spine),
    )


@pytest.mark.parametrize("spine", [False, True], ids=["pure", "spine"])
def test_kept_set_is_the_best_of_all_paths(spine):
    """Against enumeration: every path is scored, and the budget's best scores are the kept ones."""
    horizon, width, budget = 3, 3, 11
    logprobs, ids, roots = draw_case(5, 1, horizon, width, True, ties=False)
    scores, level = [], {(): torch.tensor(0.0)}
    for depth in range(horizon):
        level = {
            (*path, c): score + logprobs[0, depth, path[-1] if path else 0, c]
            for path, score in level.items()
            for c in range(width)
        }
        scores.append(level)
    every = {path: score for level in scores for path, score in level.items()}
    chain, where = [], ()
    for depth in range(horizon):
        where = (*where, int(logprobs[0, depth, where[-1] if where else 0].argmax()))
        chain.append(where)
    ranked = sorted(every, key=lambda path: (not (spine and path in chain), -every[path]))[:budget]
    rows = sorted(ranked, key=len)
    tree = build_tree(logprobs, ids, roots, budget, spine=spine)
    assert tree.valid_counts.tolist() == [budget + 1]
    assert tree.depths[0].tolist() == [0] + [len(path) for path in rows]
    assert tree.tokens[0].tolist() == roots.tolist() + [int(ids[0, len(path) - 1, path[-1]]) for path in rows]
    assert tree.parents[0].tolist() == [-1] + [rows.index(p[:-1]) + 1 if len(p) > 1 else 0 for p in rows]


def test_tie_rule_by_hand():
    """All scores equal: the first level is filled first, then the children of its first node, and so on."""
    ids = torch.arange(6).view(1, 3, 2) + 10
    tree = build_tree(torch.zeros(1, 3, 2), ids, torch.tensor([7]), 5)
    assert tree.tokens.tolist() == [[7, 10, 11, 12, 13, 12]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2]]
    spined = build_tree(torch.zeros(1, 3, 2), ids, torch.tensor([7]), 5, spine=True)
    assert spined.tokens.tolist() == [[7, 10, 11, 12, 13, 14]]
    assert spined.parents.tolist() == [[-1, 0, 0, 1, 1, 3]]


def test_spine_is_truncated_by_the_budget_and_stops_at_minus_inf():
    logprobs, ids, roots = draw_case(1, 1, 6, 3, False, ties=False)
    tree = build_tree(logprobs, ids, roots, 4, spine=True)
    best = ids[0].gather(1, logprobs[0].argmax(-1, keepdim=True))[:, 0]
    assert tree.tokens[0].tolist() == roots.tolist() + best[:4].tolist()
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]
    logprobs[:, 2] = -torch.inf
    tree = build_tree(logprobs, ids, roots, 20, spine=True)
    assert tree.depths.max() == 2 and tree.valid_counts.tolist() == [1 + 3 + 9]


def test_nothing_to_draft():
    ids = torch.ones(2, 3, 2, dtype=torch.int64)
    logprobs = torch.full((2, 3, 2), -torch.inf)
    logprobs[1] = 0
    tree = build_tree(logprobs, ids, torch.tensor([5, 6]), 20)
    assert tree.valid_counts.tolist() == [1, 1 + 2 + 4 + 8]
    assert tree.tokens[0].tolist() == [5] + [0] * 20
    assert torch.equal(unpack_ancestors(tree.ancestors, 21)[0], torch.eye(21, dtype=torch.bool))


def test_positive_and_nan_logprobs_are_harmless():
    logprobs = torch.tensor([[[0.5, torch.nan, -1.0]] * 3])
    case = logprobs, torch.arange(9).view(1, 3, 3), torch.tensor([0])
    assert_same_tree(build_tree(*case, 12), build_tree_heap(*case, 12))
    clean = torch.tensor([[[0.0, -torch.inf, -1.0]] * 3])
    assert_same_tree(build_tree(*case, 12), build_tree(clean, *case[1:], 12))
    assert logprobs[0, 0, 0] == 0.5  # the input is left as it was


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_fp32(dtype):
    logprobs, ids, roots = draw_case(9, 2, 5, 4, False, ties=False)
    logprobs = logprobs.to(dtype)
    assert_same_tree(build_tree(logprobs, ids, roots, 17), build_tree_heap(logprobs.float(), ids, roots, 17))


@pytest.mark.parametrize("num_rows", [1, 2, 16, 63, 64, 65, 129])
def test_ancestor_words(num_rows):
    tree = random_tree(num_rows, 3, num_rows, 15, invalid=num_rows // 3)
    mask = torch.stack([ancestor_mask(p) for p in tree.parents.tolist()])
    assert torch.equal(ancestor_words(tree.parents, 15), pack_ancestors(mask))
    assert torch.equal(unpack_ancestors(tree.ancestors, num_rows), mask)
    bits = [[sum(1 << j for j in range(num_rows) if row[j]) for row in m] for m in mask.tolist()]
    words = [[[(w >> 64 * i) % 2**64 for i in range((num_rows + 63) // 64)] for w in row] for row in bits]
    assert [[[w % 2**64 for w in row] for row in m] for m in tree.ancestors.tolist()] == words


@pytest.mark.parametrize("num_rows", [1, 64, 65])
def test_chain_ancestors(num_rows):
    parents = torch.arange(-1, num_rows - 1).expand(2, -1)
    assert torch.equal(chain_ancestors(2, num_rows), ancestor_words(parents, num_rows))


@pytest.mark.parametrize(
    "argument,change",
    [
        ("ids", {"ids": torch.zeros(1, 2, 3, dtype=torch.int32)}),
        ("logprobs", {"logprobs": torch.zeros(1, 2, 4)}),
        ("logprobs", {"logprobs": torch.zeros(1, 2, 3, dtype=torch.int64)}),
        ("root_tokens", {"root_tokens": torch.zeros(2, dtype=torch.int64)}),
        ("budget", {"budget": 0}),
    ],
)
def test_errors_name_the_argument(argument, change):
    arguments = {
        "logprobs": torch.zeros(1, 2, 3),
        "ids": torch.zeros(1, 2, 3, dtype=torch.int64),
        "root_tokens": torch.zeros(1, dtype=torch.int64),
        "budget": 4,
    }
    with pytest.raises(ValueError, match=f"^{argument} must"):
        build_tree(**(arguments | change))
