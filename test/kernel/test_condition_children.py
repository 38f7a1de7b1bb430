from __future__ import annotations

import math

import pytest
import torch
from sglang_ddtree_kernel.build_tree import build_tree
from sglang_ddtree_kernel.condition_children import condition_children
from sglang_ddtree_kernel.reference.build_tree import build_tree_heap
from tree_cases import assert_same_tree

VOCAB = 50


def draw_case(seed, bs=2, horizon=5, width=4, rank=6, dtype=torch.float32, ties=False):
    """Marginals with a few -inf, ids, and factors; with ties all of them are of few values."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.rand(bs, horizon, VOCAB, generator=rng).argsort(-1)[..., :width]
    logprobs = torch.randn(bs, horizon, VOCAB, generator=rng).mul(2).log_softmax(-1)[..., :width]
    factors = torch.randn(2, VOCAB, rank, generator=rng)
    if ties:
        logprobs = torch.full_like(logprobs, -math.log(VOCAB))
        factors = factors.sign() * (torch.rand(factors.shape, generator=rng) < 0.1)
    logprobs.masked_fill_(torch.rand(logprobs.shape, generator=rng) < 0.1, -torch.inf)
    return logprobs.contiguous(), ids, *factors.to(dtype)


def by_hand(logprobs, ids, left, right, weight):
    """The documented formula in Python floats, one edge at a time."""
    bs, horizon, width = ids.shape
    out = torch.full((bs, horizon, width, width), -torch.inf, dtype=torch.float64)
    for b in range(bs):
        p = logprobs[b].double().exp().tolist()
        out[b, 0] = logprobs[b, 0].double()
        for d in range(1, horizon):
            odds = [
                [math.exp(left[a].double() @ right[c].double()) for c in ids[b, d].tolist()]
                for a in ids[b, d - 1].tolist()
            ]
            above = p[d - 1] if sum(p[d - 1]) else [1.0] * width
            for a in range(width):
                q = []
                for c in range(width):
                    expected = sum(w * odds[i][c] for i, w in enumerate(above)) / sum(above)
                    q.append(p[d][c] * (odds[a][c] / expected) ** weight)
                for c in range(width):
                    if q[c]:
                        out[b, d, a, c] = math.log(min(1.0, q[c] / sum(q) * sum(p[d])))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0, 2.0])
def test_equals_the_formula(weight, dtype):
    case = draw_case(1, dtype=dtype)
    torch.testing.assert_close(
        condition_children(*case, weight).double(), by_hand(*case, weight), rtol=0, atol=2e-5
    )


def test_weight_0_keeps_the_marginals():
    logprobs, *rest = draw_case(2)
    got = condition_children(logprobs, *rest, 0.0)
    torch.testing.assert_close(got, logprobs[:, :, None].expand_as(got), rtol=0, atol=1e-6)


def test_a_level_of_nothing_leaves_no_nan():
    logprobs, *rest = draw_case(3)
    logprobs[0, 1] = -torch.inf
    logprobs[1] = -torch.inf
    got = condition_children(logprobs, *rest, 1.0)
    assert not got.isnan().any()
    assert torch.equal(got > -torch.inf, (logprobs > -torch.inf)[:, :, None].expand_as(got))


def test_extreme_factors_stay_log_probabilities():
    """Odds of e^-600 to e^600: no candidate above the mass of its set, none lost to overflow."""
    logprobs, ids, left, right = draw_case(4, rank=2)
    logprobs = logprobs.masked_fill(logprobs == -torch.inf, -9.0)
    got = condition_children(logprobs, ids, left * 20, right * 20, 1.0)
    assert got.isfinite().all() and got.max() <= 0
    mass = logprobs.exp().sum(-1)[:, :, None].expand(got.shape[:-1])
    torch.testing.assert_close(got.exp().sum(-1), mass, rtol=1e-4, atol=0)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("spine", [False, True], ids=["pure", "spine"])
def test_conditioned_trees_equal_the_heap(ties, spine):
    for seed in range(10):
        case = draw_case(seed, horizon=6, width=5, ties=ties)
        edges, roots = condition_children(*case, 1.0), torch.tensor([1, 2])
        assert_same_tree(
            build_tree(edges, case[1], roots, 31, spine=spine),
            build_tree_heap(edges, case[1], roots, 31, spine=spine),
        )


def test_children_depend_on_their_parent():
    """Two parents, two children, factors that prefer 1 after 0 and 3 after 2."""
    ids = torch.tensor([[[0, 2], [1, 3]]])
    logprobs = torch.tensor([0.5, 0.4]).log().expand(1, 2, 2).contiguous()
    left, right = torch.zeros(2, 4, 1)
    left[0], left[2], right[1], right[3] = 2.0, -2.0, 2.0, -2.0
    edges = condition_children(logprobs, ids, left, right, 1.0)
    assert edges[0, 1, 0].argmax() == 0 and edges[0, 1, 1].argmax() == 1
    tree = build_tree(edges, ids, torch.tensor([9]), 4)
    assert tree.tokens.tolist() == [[9, 0, 2, 1, 3]] and tree.parents.tolist() == [[-1, 0, 0, 1, 2]]


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("ids", {"ids": torch.zeros(1, 2, 3, dtype=torch.int32)}),
        ("logprobs", {"logprobs": torch.zeros(1, 2, 4)}),
        ("logprobs", {"logprobs": torch.zeros(1, 2, 3, dtype=torch.bfloat16)}),
        ("left", {"left": torch.zeros(9, 4, dtype=torch.float16)}),
        ("left", {"left": torch.zeros(9)}),
        ("right", {"right": torch.zeros(9, 5)}),
        ("right", {"right": torch.zeros(9, 4, dtype=torch.bfloat16)}),
    ],
)
def test_errors_name_the_argument(argument, change):
    arguments = {
        "logprobs": torch.zeros(1, 2, 3),
        "ids": torch.zeros(1, 2, 3, dtype=torch.int64),
        "left": torch.zeros(9, 4),
        "right": torch.zeros(9, 4),
        "weight": 1.0,
    }
    with pytest.raises(ValueError, match=f"^{argument} must"):
        condition_children(**(arguments | change))
