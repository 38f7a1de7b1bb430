"""The kernel of `condition_children` against its reference: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from sglang_ddtree_kernel._condition_children_triton import condition_children_triton
from sglang_ddtree_kernel.reference.condition_children import condition_children
from test_condition_children import draw_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(case, weight):
    case = [x.to(DEVICE) for x in case]
    got, wanted = condition_children_triton(*case, weight), condition_children(*case, weight)
    assert torch.equal(got == -torch.inf, wanted == -torch.inf)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert got.max() <= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("bs", "horizon", "width", "rank"),
    [
        (2, 15, 8, 64),
        (1, 3, 8, 128),
        (2, 4, 16, 96),
        (1, 2, 32, 256),
        (3, 4, 5, 3),
        (1, 1, 8, 16),
        (2, 3, 1, 1),
    ],
)
def test_equals_the_reference(bs, horizon, width, rank, weight, dtype):
    logprobs, ids, left, right = draw_case(rank, bs, horizon, width, rank)
    case = logprobs, ids, (left * rank**-0.25).to(dtype), (right * rank**-0.25).to(dtype)
    check(case, weight)


def test_levels_of_nothing():
    logprobs, *rest = draw_case(3)
    logprobs[0, 1] = -torch.inf
    logprobs[1] = -torch.inf
    check((logprobs, *rest), 1.0)


def test_strided_inputs_and_no_request():
    logprobs, ids, left, right = draw_case(5, width=8)
    check((logprobs[..., ::2], ids[..., ::2], left.T.contiguous().T, right), 1.0)
    assert condition_children_triton(logprobs[:0], ids[:0], left, right, 1.0).shape == (0, 5, 8, 8)


@pytest.mark.parametrize(("argument", "width", "rank"), [("ids", 33, 4), ("left", 4, 257)])
def test_errors_name_the_argument(argument, width, rank):
    with pytest.raises(ValueError, match=f"^{argument} must"):
        condition_children_triton(*draw_case(0, width=width, rank=rank), 1.0)
