from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gdn_cases import TREES, Draw
from sglang_ddtree_kernel.conv1d_tree import conv1d_tree
from sglang_ddtree_kernel.reference.conv1d_prefill import causal_conv1d_prefill
from sglang_ddtree_kernel.reference.gdn_commit import conv1d_decode_step
from sglang_ddtree_kernel.tree_types import unpack_ancestors
from tree_cases import random_tree

DIM = 20


def plain_conv(window, rows, weight, bias, activation):
    """window [D, W-1] then rows [n, D], by PyTorch's own convolution in float64 -> [n, D]."""
    x = torch.cat([window, rows.t()], 1).double()[None]
    y = F.conv1d(x, weight.double().unsqueeze(1), None if bias is None else bias.double(), groups=len(weight))
    return (F.silu(y) if activation == "silu" else y)[0].t()


def case(tree, width=4, dtype=torch.float32, extra_columns=0, seed=0):
    bs, num_rows = tree.tokens.shape
    draw = Draw(seed, dtype)
    return dict(
        x=draw.normal(bs, num_rows, DIM),
        conv_states=draw.normal(bs + 2, DIM, width - 1 + extra_columns),
        slots=torch.arange(bs).flip(0) + 1,
        weight=draw.normal(DIM, width),
        bias=draw.normal(DIM),
        parents=tree.parents,
    )


def with_stash(inputs, HV=6, dtype=None, gate_dtype=None):
    """Adds gates and a stash of the given dtypes (the inputs' by default), all of them inside wider tensors."""
    x = inputs["x"]
    bs, num_rows, dim = x.shape
    wide = Draw(7, x.dtype).normal(bs, num_rows + 2, dim + 2 * HV + 3)  # as one projection gives x, a and b
    wide[:, 1:-1, :dim] = x
    x, a, b, _ = wide[:, 1:-1].split([dim, HV, HV, 3], 2)
    stash = [
        torch.full((bs + 1, num_rows + 1, given.shape[2] + 2), -7.0, dtype=kind or x.dtype)[:bs, 1:, 1:-1]
        for given, kind in ((x, dtype), (a, gate_dtype), (b, gate_dtype))
    ]
    return inputs | dict(x=x, gates=(a, b), stash=tuple(stash))


def assert_stashed(inputs, stash):
    """Every bit as it came where the dtypes agree, and nothing written beside the rows."""
    for kept, given in zip(stash, (inputs["x"], *inputs["gates"]), strict=True):
        got, want = kept.cpu(), given.to(kept.dtype)
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
        around = kept._base.clone()
        around.as_strided(kept.shape, kept.stride(), kept.storage_offset()).fill_(-7)
        assert (around == -7).all()


def replay(inputs, ancestors, activation="silu"):
    x, width = inputs["x"], inputs["weight"].shape[1]
    paths = unpack_ancestors(ancestors, x.shape[1])
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i, slot in enumerate(inputs["slots"].tolist()):
        window = inputs["conv_states"][max(slot, 0), :, : width - 1]
        window = torch.zeros_like(window) if slot < 0 else window
        for row in range(x.shape[1]):
            rows = x[i, paths[i, row]]
            out[i, row] = plain_conv(window, rows, inputs["weight"], inputs["bias"], activation)[-1]
    return out


def check(inputs, tree, activation="silu", tolerance=2e-6):
    before = inputs["conv_states"].clone()
    got = conv1d_tree(**inputs, activation=activation)
    assert got.dtype == inputs["x"].dtype
    torch.testing.assert_close(inputs["conv_states"], before, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        got.double(), replay(inputs, tree.ancestors, activation), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tree", TREES)
def test_equals_conv_along_each_path(tree, width):
    tree = TREES[tree]()
    check(case(tree, width), tree)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_bias", [True, False])
def test_options(activation, with_bias):
    tree = random_tree(0, 2, 16, 5)
    inputs = case(tree, extra_columns=2)
    if not with_bias:
        inputs["bias"] = None
    check(inputs, tree, activation)


def test_padded_request():
    tree = random_tree(1, 3, 16, 5)
    inputs = case(tree)
    inputs["slots"] = torch.tensor([3, -1, 1])
    inputs["conv_states"][0] = float("nan")
    inputs["conv_states"][2] = float("inf")
    check(inputs, tree)


def test_bf16_is_rounded_once():
    tree = random_tree(2, 2, 16, 5)
    check(case(tree, dtype=torch.bfloat16), tree, tolerance=2**-8)


@pytest.mark.parametrize("dtypes", [(None, None), (torch.bfloat16, torch.float32)], ids=["same", "other"])
@pytest.mark.parametrize("tree", ["root-only", "random-31-invalid"])
def test_stash(tree, dtypes):
    tree = TREES[tree]()
    plain = case(tree)
    plain["slots"][0] = -1
    inputs = with_stash(plain, 6, *dtypes)
    assert torch.equal(conv1d_tree(**inputs), conv1d_tree(**plain))
    assert_stashed(inputs, inputs["stash"])


@pytest.mark.parametrize("lengths", [[1], [2, 1], [5, 0, 70], [3, 9]], ids=str)
def test_prefill_equals_plain_conv_and_tree_and_decode(lengths):
    draw, total, n = Draw(3), sum(lengths), len(lengths)
    weight, bias, x = draw.normal(DIM, 4), draw.normal(DIM), draw.normal(DIM, total)
    pool = draw.normal(n + 1, DIM, 4)
    slots, fresh = torch.arange(n).flip(0), torch.arange(n) == 1
    cu = torch.tensor([0, *lengths]).cumsum(0)
    stepped = pool.clone()
    before = pool.clone()
    y = causal_conv1d_prefill(x, weight, bias, pool, ~fresh, slots, cu)
    assert y.shape == x.shape
    for i, slot in enumerate(slots.tolist()):
        rows = x[:, cu[i] : cu[i + 1]]
        if rows.shape[1] == 0:
            continue
        if fresh[i]:
            stepped[slot, :, :3] = 0
        window = stepped[slot, :, :3].clone()
        got = y[:, cu[i] : cu[i + 1]]
        torch.testing.assert_close(
            got.double(), plain_conv(window, rows.t(), weight, bias, "silu").t(), rtol=2e-6, atol=2e-6
        )
        for t, row in enumerate(rows.t()):
            step = conv1d_decode_step(row[None], stepped, slots[i : i + 1], weight, bias)
            assert torch.equal(step[0], got[:, t])
    assert torch.equal(pool, stepped)
    assert torch.equal(pool[:, :, 3], before[:, :, 3])


def test_prefill_without_a_slot_writes_nothing():
    draw = Draw(4)
    pool = draw.normal(2, DIM, 3)
    before = pool.clone()
    x, weight = draw.normal(DIM, 5), draw.normal(DIM, 4)
    y = causal_conv1d_prefill(x, weight, None, pool, None, torch.tensor([-1]), torch.tensor([0, 5]))
    assert torch.equal(pool, before)
    want = plain_conv(torch.zeros(DIM, 3), x.t(), weight, None, "silu").t()
    torch.testing.assert_close(y.double(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x: x[0]),
        ("conv_states", lambda x: x[..., 1:]),
        ("slots", lambda x: x[1:]),
        ("weight", lambda x: x[:, :1]),
        ("bias", lambda x: x[1:]),
        ("parents", lambda x: x[:, 1:]),
    ],
)
def test_bad_arguments(name, change):
    inputs = case(random_tree(5, 2, 16, 5))
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=name):
        conv1d_tree(**inputs)
    with pytest.raises(ValueError, match="activation"):
        conv1d_tree(**case(random_tree(5, 2, 16, 5)), activation="gelu")


def test_bad_stash():
    inputs = with_stash(case(random_tree(5, 2, 16, 5)))
    gates, stash = inputs["gates"], inputs["stash"]
    for change in ({"gates": None}, {"stash": None}):
        with pytest.raises(ValueError, match="gates and stash must be given together"):
            conv1d_tree(**inputs | change)
    with pytest.raises(ValueError, match="gates must be"):
        conv1d_tree(**inputs | {"stash": stash[:2]})
    for i in range(2):
        for change in (lambda x: x[:, 1:], lambda x: x.mT.contiguous().mT):
            with pytest.raises(ValueError, match=rf"gates\[{i}\] must"):
                conv1d_tree(**inputs | {"gates": [change(x) if j == i else x for j, x in enumerate(gates)]})
    for i in range(3):
        for change in (lambda x: x[..., 1:], lambda x: x.mT.contiguous().mT):
            with pytest.raises(ValueError, match=rf"stash\[{i}\] must"):
                conv1d_tree(**inputs | {"stash": [change(x) if j == i else x for j, x in enumerate(stash)]})
