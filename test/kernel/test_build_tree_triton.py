"""The kernel of `build_tree` against the heap: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from sglang_ddtree_kernel._build_tree_triton import build_tree_triton
from sglang_ddtree_kernel.reference.build_tree import build_tree_heap
from test_build_tree import draw_case
from tree_cases import assert_same_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(case, budget, spine):
    case = [x.to(DEVICE) for x in case]
    assert_same_tree(
        build_tree_triton(*case, budget, spine=spine), build_tree_heap(*case, budget, spine=spine)
    )


@pytest.mark.parametrize("spine", [False, True], ids=["pure", "spine"])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("conditioned", [False, True], ids=["plain", "conditioned"])
@pytest.mark.parametrize(
    "bs,horizon,width,budget", [(2, 15, 8, 15), (1, 15, 8, 64), (1, 31, 32, 30), (2, 3, 2, 40), (1, 15, 1, 4)]
)
def test_equals_heap(bs, horizon, width, budget, conditioned, ties, spine):
    check(draw_case(budget, bs, horizon, width, conditioned, ties), budget, spine)


@pytest.mark.parametrize("seed", range(12 if DEVICE == "cpu" else 200))
def test_small_cases(seed):
    horizon, width, budget = 1 + seed % 5, 1 + seed % 4, 1 + seed % 23
    check(draw_case(seed, 2, horizon, width, seed % 2 == 0, seed % 3 > 0), budget, seed % 5 > 2)


@pytest.mark.parametrize("spine", [False, True], ids=["pure", "spine"])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_511_nodes(ties, spine):
    if DEVICE == "cpu" and (ties or spine):
        pytest.skip("one such tree is enough for the interpreter")
    check(draw_case(1, 1, 15, 32, DEVICE == "cuda", ties), 511, spine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    logprobs, ids, roots = draw_case(9, 2, 5, 4, False, ties=False)
    check((logprobs.to(dtype), ids, roots), 17, False)


def test_nothing_to_draft_and_odd_values():
    ids = torch.ones(2, 3, 2, dtype=torch.int64)
    logprobs = torch.full((2, 3, 2), -torch.inf)
    logprobs[1] = torch.tensor([0.5, torch.nan])
    for spine in (False, True):
        check((logprobs, ids, torch.tensor([5, 6])), 20, spine)


def test_many_requests():
    bs = 3 if DEVICE == "cpu" else 300
    check(draw_case(4, bs, 6, 4, True, ties=True), 20, False)


@pytest.mark.parametrize(
    "argument,horizon,width,budget", [("ids", 32, 2, 4), ("ids", 2, 33, 4), ("budget", 2, 2, 512)]
)
def test_errors_name_the_argument(argument, horizon, width, budget):
    case = draw_case(0, 1, horizon, width, False, False)
    with pytest.raises(ValueError, match=f"^{argument} must"):
        build_tree_triton(*case, budget)
