"""The kernels of `gdn_commit` against their specification: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from gdn_cases import SMALL, Heads
from sglang_ddtree_kernel._gdn_commit_triton import gdn_commit_triton
from sglang_ddtree_kernel.reference import gdn_commit as reference
from test_gdn_commit import case

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FEW = Heads(1, 2, 32, 16)


def clones(inputs, device="cpu"):
    return {name: x.to(device, copy=True) if torch.is_tensor(x) else x for name, x in inputs.items()}


def check(inputs, track_slots=None, track_steps=None, tolerance=2e-6, window_tolerance=0.0, **options):
    track = dict(track_slots=track_slots, track_steps=track_steps)
    want, got = clones(inputs), clones(inputs, DEVICE)
    reference.gdn_commit(**want, **track)
    gdn_commit_triton(**got, **clones(track, DEVICE), **options)
    window_tolerance = dict(rtol=window_tolerance, atol=window_tolerance)
    torch.testing.assert_close(got["conv_states"].cpu(), want["conv_states"], **window_tolerance)
    written = (want["states"] != inputs["states"]).flatten(2).any(2)
    assert torch.equal(got["states"].cpu()[~written], inputs["states"][~written])
    scale = want["states"].abs().max().item()
    torch.testing.assert_close(got["states"].cpu(), want["states"], rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("lens", [[1], [2], [16], [3, 1, 16, 5]], ids=str)
def test_equals_reference(lens, width):
    check(case(lens, L=2, width=width))


@pytest.mark.parametrize(
    "heads", [Heads(1, 1, 8, 8), Heads(2, 2, 16, 20), Heads(3, 9, 20, 12), Heads(1, 2, 64, 40)], ids=str
)
@pytest.mark.parametrize("value_rows,key_lanes", [(16, 16), (32, 4)])
def test_head_layouts(heads, value_rows, key_lanes):
    check(case([4, 9], heads, L=2), value_rows=value_rows, key_lanes=key_lanes)


def test_a_long_path():
    check(case([32, 7], FEW, L=2, num_rows=40, P=32), tolerance=4e-6)


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float16, torch.float16)],
    ids=str,
)
def test_dtypes(dtype, pool_dtype):
    # Keys and values are rounded to dtype after the convolution, a pool at every token: last bits may differ.
    check(case([5, 8], FEW, dtype=dtype, pool_dtype=pool_dtype), tolerance=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_pool_is_rounded_after_every_token(dtype):
    # The interpreter rounds to bf16 towards zero: a unit in the last place, at every token.
    eps = torch.finfo(torch.bfloat16).eps
    check(
        case([5, 8], FEW, dtype=dtype, pool_dtype=torch.bfloat16),
        tolerance=eps if ON_GPU else 8 * eps,
        window_tolerance=0.0 if ON_GPU else eps,
    )


@pytest.mark.parametrize("step", range(-1, 8))
def test_snapshot_at_every_step(step):
    check(
        case([7, 4, 7], FEW, L=2),
        track_slots=torch.tensor([0, 2, -1]),
        track_steps=torch.tensor([step, min(step, 4), step], dtype=torch.int32),
    )


def test_snapshot_past_the_accepted_rows_is_not_taken():
    check(case([3], FEW), track_slots=torch.tensor([0]), track_steps=torch.tensor([4], dtype=torch.int32))


@pytest.mark.parametrize("slots", [[3, -1, 1], [-1, 5, -1], [-1, -1, -1]], ids=str)
def test_padded_requests_write_nothing(slots):
    inputs = case([3, 5, 2], FEW)
    inputs["slots"] = torch.tensor(slots, dtype=torch.int32)
    check(
        inputs,
        track_slots=torch.tensor([0, 2, 4], dtype=torch.int32),
        track_steps=torch.tensor([2, 2, 1], dtype=torch.int32),
    )


@pytest.mark.parametrize("span", [5.0, 30.0])
def test_extreme_gates(span):
    inputs = case([9, 4], FEW, L=2)
    for name in ("a", "b"):
        inputs[name] *= span
    check(inputs)


def test_no_bias_and_no_activation():
    inputs = case([3, 6], FEW) | {"conv_bias": None, "activation": None}
    check(inputs)


def test_strided_pools_and_stash():
    """Pools whose slots hold all layers, and rows of a stash that has room for more requests."""
    inputs = case([3, 6], SMALL, L=2)
    for name in ("states", "conv_states"):
        inputs[name] = inputs[name].transpose(0, 1).contiguous().transpose(0, 1)
    for name in ("mixed_qkv", "a", "b"):
        inputs[name] = torch.cat([inputs[name]] * 2, 1)[:, :2]
    track = dict(track_slots=None, track_steps=None)
    want, got = clones(inputs), clones(inputs, DEVICE)
    reference.gdn_commit(**want, **track)
    gdn_commit_triton(**got, **track)
    torch.testing.assert_close(got["states"].cpu(), want["states"], rtol=4e-6, atol=4e-6)
    assert torch.equal(got["conv_states"].cpu(), want["conv_states"])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_served_sizes(pool_dtype):
    inputs = case([16, 3, 7], Heads(4, 12, 128, 128), L=4, dtype=torch.bfloat16, pool_dtype=pool_dtype)
    inputs["conv_weight"] *= 0.3
    check(inputs, tolerance=2 * torch.finfo(torch.bfloat16).eps)
