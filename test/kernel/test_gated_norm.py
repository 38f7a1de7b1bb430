"""The specification of `gated_norm` against float64, and its kernel, on a GPU or interpreted, against both."""

from __future__ import annotations

import pytest
import torch
from gdn_cases import Draw
from sglang_ddtree_kernel._gated_norm_triton import gated_norm_triton
from sglang_ddtree_kernel.gated_norm import gated_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


def case(num_rows=5, heads=3, dim=24, dtype=torch.float32, seed=0):
    """The gate lies between other columns of a wider tensor, as in the projection."""
    draw = Draw(seed, dtype)
    wide = draw.normal(num_rows, heads * dim + 7)
    return draw.normal(num_rows, heads, dim) * 3, wide[:, 4 : 4 + heads * dim], draw.normal(dim)


def by_hand(x, gate, weight, activation):
    """Head by head in float64."""
    x, gate, weight = x.double(), gate.double(), weight.double()
    dim = x.shape[2]
    out = torch.empty(len(x), x.shape[1] * dim, dtype=torch.float64)
    for row in range(len(x)):
        for head in range(x.shape[1]):
            here = slice(head * dim, (head + 1) * dim)
            g = gate[row, here]
            factor = 1 / (1 + torch.exp(-g)) * (1 if activation == "sigmoid" else g)
            out[row, here] = x[row, head] / (x[row, head].square().mean() + EPS).sqrt() * weight * factor
    return out


def on_device(x, gate, weight):
    """The gate stays a view of a wider tensor."""
    wide = gate._base.to(DEVICE)
    return x.to(DEVICE), wide.as_strided(gate.shape, gate.stride(), gate.storage_offset()), weight.to(DEVICE)


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_definition(dtype, activation):
    """Half precision rounds the result once: half a unit of its last place, a whole one where bf16 is cut off."""
    inputs = case(dtype=dtype)
    cut_off = DEVICE == "cpu" and dtype == torch.bfloat16  # by the interpreter
    tolerance = max(4e-6, torch.finfo(dtype).eps / (1 if cut_off else 2))
    want = by_hand(*inputs, activation)
    for got in (
        gated_norm(*inputs, EPS, activation),
        gated_norm_triton(*on_device(*inputs), EPS, activation).cpu(),
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("num_rows,HV,V", [(1, 1, 1), (1, 48, 128), (7, 3, 16), (3, 6, 100)])
def test_sizes(num_rows, HV, V, heads):
    inputs = case(num_rows, HV, V)
    got = gated_norm_triton(*on_device(*inputs), EPS, "silu", heads=heads).cpu()
    torch.testing.assert_close(got.double(), by_hand(*inputs, "silu"), rtol=4e-6, atol=4e-6)


def test_zero_rows_and_extreme_gates():
    x, gate, weight = case()
    assert gated_norm_triton(*on_device(x[:0], gate[:0], weight), EPS, "silu").shape == (0, 72)
    x[0] = 0.0  # eps alone keeps the norm finite
    gate[1:3] = torch.tensor([-1e4, 1e4])[:, None]
    got = gated_norm_triton(*on_device(x, gate, weight), EPS, "silu").cpu()
    assert got.isfinite().all() and not got[0].any() and not got[1].any()
    torch.testing.assert_close(got.double(), by_hand(x, gate, weight, "silu"), rtol=4e-6, atol=4e-6)


def test_wrong_arguments():
    x, gate, weight = case()
    with pytest.raises(ValueError, match="contiguous .R, HV, V."):
        gated_norm(x.transpose(0, 1), gate, weight)
    with pytest.raises(ValueError, match=r"gate must be \[5, 72\]"):
        gated_norm(x, gate[:, 1:], weight)
    with pytest.raises(ValueError, match=r"weight must be \[24\]"):
        gated_norm(x, gate, weight[1:])
    with pytest.raises(ValueError, match="activation must be one of silu, swish, sigmoid, got 'tanh'"):
        gated_norm(x, gate, weight, activation="tanh")
