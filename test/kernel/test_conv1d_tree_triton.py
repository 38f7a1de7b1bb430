"""The kernel of `conv1d_tree` against its specification: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from gdn_cases import TREES
from sglang_ddtree_kernel._conv1d_tree_triton import conv1d_tree_triton
from sglang_ddtree_kernel.reference import conv1d_tree as reference
from test_conv1d_tree import case
from tree_cases import random_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(inputs, activation="silu", tolerance=2e-6, **options):
    want = reference.conv1d_tree(**inputs, activation=activation)
    before = inputs["conv_states"].clone()
    inputs = {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in inputs.items()}
    got = conv1d_tree_triton(**inputs, activation=activation, **options)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(inputs["conv_states"].cpu(), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tree", TREES)
def test_equals_reference(tree, width):
    check(case(TREES[tree](), width), rows=8, channels=16)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_options(rows, activation, with_bias):
    inputs = case(random_tree(0, 2, 19, 5), extra_columns=2)
    if not with_bias:
        inputs["bias"] = None
    check(inputs, activation, rows=rows)


def test_padded_request():
    inputs = case(random_tree(1, 3, 16, 5))
    inputs["slots"] = torch.tensor([3, -1, 1], dtype=torch.int32)
    inputs["conv_states"][0] = float("nan")
    inputs["conv_states"][2] = float("inf")
    check(inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    check(case(random_tree(2, 2, 16, 5), dtype=dtype), tolerance=torch.finfo(dtype).eps)


def test_rows_are_rounded_as_the_window_would_hold_them():
    inputs = case(random_tree(3, 2, 16, 5))
    inputs["conv_states"] = inputs["conv_states"].half()
    check(inputs)


def test_strided_rows_and_int64_parents():
    inputs = case(random_tree(4, 2, 16, 5))
    inputs["x"] = torch.cat([inputs["x"], inputs["x"]], 2)[..., : inputs["x"].shape[2]]
    inputs["parents"] = inputs["parents"].long()
    check(inputs)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")
@pytest.mark.parametrize("bs,num_rows", [(1, 16), (3, 100), (1, 512)])
def test_many_rows(bs, num_rows):
    check(case(random_tree(1, bs, num_rows, 31)))
