"""The kernel of `conv1d_tree` against its specification: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from gdn_cases import TREES
from sglang_ddtree_kernel._conv1d_tree_triton import conv1d_tree_triton
from sglang_ddtree_kernel.reference import conv1d_tree as reference
from test_conv1d_tree import assert_stashed, case, with_stash
from tree_cases import random_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter cuts fp32 off to bf16


def copied(x):
    """On the device; a view stays a view of as large a tensor."""
    if isinstance(x, tuple):
        return tuple(map(copied, x))
    if not torch.is_tensor(x):
        return x
    if x._base is None:
        return x.to(DEVICE, copy=True)
    return copied(x._base).as_strided(x.shape, x.stride(), x.storage_offset())


def check(inputs, activation="silu", tolerance=2e-6, **options):
    given = {name: copied(x) for name, x in inputs.items()}
    want = reference.conv1d_tree(**inputs, activation=activation)
    got = conv1d_tree_triton(**given, activation=activation, **options)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        given["conv_states"].cpu(), inputs["conv_states"], rtol=0, atol=0, equal_nan=True
    )
    return given.get("stash")


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


@pytest.mark.parametrize("HV", [1, 6, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", ["root-only", "random-31-invalid"])
def test_stash_holds_the_inputs_bit_for_bit(tree, dtype, HV):
    plain = case(TREES[tree](), dtype=dtype)
    plain["slots"][-1] = -1
    inputs = with_stash(plain, HV)
    inputs["x"][0, 0, :2] = torch.tensor([-0.0, torch.finfo(dtype).smallest_normal / 4])
    stash = check(inputs, tolerance=max(2e-6, torch.finfo(dtype).eps), channels=16)
    assert_stashed(inputs, stash)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_stash_of_other_dtypes(rows):
    inputs = with_stash(case(TREES["random-31-invalid"]()), 6, HALF, torch.float64)
    assert_stashed(inputs, check(inputs, rows=rows))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")
@pytest.mark.parametrize("bs,num_rows", [(1, 16), (3, 100), (1, 512)])
def test_many_rows(bs, num_rows):
    check(case(random_tree(1, bs, num_rows, 31)))
