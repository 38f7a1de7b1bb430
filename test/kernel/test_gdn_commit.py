from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gdn_cases import DEMO, SMALL, Draw, Heads
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_ddtree_kernel.conv1d_tree import conv1d_tree
from sglang_ddtree_kernel.gdn_commit import gdn_commit
from sglang_ddtree_kernel.gdn_tree_verify import gdn_tree_verify
from sglang_ddtree_kernel.reference import gdn_commit as reference
from sglang_ddtree_kernel.reference.gdn_commit import conv1d_decode_step, gdn_decode_step
from sglang_ddtree_kernel.reference.gdn_tree_verify import gdn_tree_verify_replay
from sglang_ddtree_kernel.tree_types import chain_ancestors


def case(
    lens, heads: Heads = SMALL, L=3, num_rows=20, P=16, width=4, dtype=torch.float32, pool_dtype=None, seed=0
):
    """Requests in scattered slots, random accepted rows (root first), a spare column in the conv pool."""
    draw, bs = Draw(seed, dtype), len(lens)
    pool_dtype, dim = pool_dtype or dtype, heads.dim
    rows = torch.full((bs, P), -1, dtype=torch.int32)
    for i, n in enumerate(lens):
        order = torch.randperm(num_rows - 1, generator=draw.rng)[: n - 1] + 1
        rows[i, :n] = torch.cat([torch.zeros(1, dtype=torch.long), order.sort().values])
    return dict(
        mixed_qkv=draw.normal(L, bs, num_rows, dim),
        a=draw.normal(L, bs, num_rows, heads.HV),
        b=draw.normal(L, bs, num_rows, heads.HV),
        conv_weight=draw.normal(L, dim, width),
        conv_bias=draw.normal(L, dim),
        A_log=draw.normal(L, heads.HV),
        dt_bias=draw.normal(L, heads.HV),
        states=draw.normal(L, 2 * bs + 3, heads.HV, heads.V, heads.K, dtype=pool_dtype),
        conv_states=draw.normal(L, 2 * bs + 3, dim, width, dtype=pool_dtype),
        slots=torch.randperm(bs, generator=draw.rng) * 2 + 1,
        accepted_rows=rows,
        accept_lens=torch.tensor(lens, dtype=torch.int32),
        num_k_heads=heads.H,
        head_k_dim=heads.K,
    )


def decode_one(c, states, conv_states, layer, i, row):
    """One autoregressive token of one request, a batch of its own."""
    slot = c.slots[i : i + 1]
    bias = None if c.conv_bias is None else c.conv_bias[layer]
    y = conv1d_decode_step(
        c.mixed_qkv[layer, i : i + 1, row], conv_states[layer], slot, c.conv_weight[layer], bias
    )
    gates = c.a[layer, i : i + 1, row], c.b[layer, i : i + 1, row], c.A_log[layer], c.dt_bias[layer]
    return gdn_decode_step(y, *gates, states[layer], slot, c.num_k_heads, c.head_k_dim)


def step_by_step(inputs, track_slots=None, track_steps=None):
    """The pools that decoding the accepted tokens one by one leaves, snapshots included."""
    c = SimpleNamespace(**inputs)
    states, conv_states = c.states.clone(), c.conv_states.clone()
    committed = c.conv_weight.shape[2] - 1
    for layer in range(len(states)):
        for i, slot in enumerate(c.slots.tolist()):
            if slot < 0:
                continue
            for t in range(int(c.accept_lens[i])):
                decode_one(c, states, conv_states, layer, i, int(c.accepted_rows[i, t]))
                if track_steps is not None and int(track_steps[i]) == t + 1 and int(track_slots[i]) >= 0:
                    states[layer, int(track_slots[i])] = states[layer, slot]
                    conv_states[layer, int(track_slots[i]), :, :committed] = conv_states[
                        layer, slot, :, :committed
                    ]
    return states, conv_states


def check(inputs, **track):
    states, conv_states = step_by_step(inputs, **track)
    gdn_commit(**inputs, **track)
    assert torch.equal(inputs["states"], states)
    assert torch.equal(inputs["conv_states"], conv_states)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("lens", [[1], [2], [16], [3, 1, 16, 5]], ids=str)
def test_is_bitwise_the_decode(lens, width):
    check(case(lens, width=width))


def test_is_bitwise_the_decode_at_model_sizes():
    check(case([7, 2], DEMO, L=6))


@pytest.mark.parametrize("heads", [Heads(1, 1, 8, 8), Heads(2, 2, 16, 20), Heads(3, 9, 20, 12)], ids=str)
def test_head_layouts(heads):
    check(case([4, 9], heads))


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_dtypes(dtype, pool_dtype):
    check(case([5, 8], dtype=dtype, pool_dtype=pool_dtype))


@settings(derandomize=True, max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6), lens=st.lists(st.integers(1, 8), min_size=1, max_size=4), L=st.integers(1, 3)
)
def test_is_bitwise_the_decode_on_random_batches(seed, lens, L):
    check(case(lens, Heads(1, 3, 8, 12), L=L, P=8, num_rows=9, seed=seed))


@pytest.mark.parametrize("step", range(-1, 8))
def test_snapshot_at_every_step(step):
    inputs = case([7, 4, 7])
    track_slots = torch.tensor([0, 2, -1])
    check(
        inputs,
        track_slots=track_slots,
        track_steps=torch.tensor([step, min(step, 4), step], dtype=torch.int32),
    )


def test_snapshot_past_the_accepted_rows_is_not_taken():
    check(case([3]), track_slots=torch.tensor([0]), track_steps=torch.tensor([4], dtype=torch.int32))


@pytest.mark.parametrize("slots", [[3, -1, 1], [-1, 5, -1], [-1, -1, -1]], ids=str)
def test_padded_requests_write_nothing(slots):
    inputs = case([3, 5, 2])
    inputs["slots"] = torch.tensor(slots)
    check(
        inputs,
        track_slots=torch.tensor([0, 2, 4]),
        track_steps=torch.tensor([2, 2, 1], dtype=torch.int32),
    )


def test_no_bias():
    check(case([3, 6]) | {"conv_bias": None})


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batched_fold_equals_the_fold_by_request(monkeypatch, pool_dtype):
    """What devices without a kernel run: the same steps, but larger batches may round otherwise."""
    track = dict(
        track_slots=torch.tensor([0, -1, 2, 4]), track_steps=torch.tensor([2, 1, 9, 0], dtype=torch.int32)
    )
    want, got = (case([3, 1, 16, 5], pool_dtype=pool_dtype) for _ in range(2))
    for inputs in (want, got):
        inputs["slots"] = torch.tensor([3, 1, -1, 5])
    gdn_commit(**want, **track)
    monkeypatch.setattr(reference, "_fold_request_by_request", reference._fold_batched)
    gdn_commit(**got, **track)
    assert torch.equal(got["conv_states"], want["conv_states"])
    tolerance = 1e-5 if pool_dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got["states"], want["states"], rtol=tolerance, atol=tolerance)


def test_decode_does_not_depend_on_the_batch():
    draw, heads, bs = Draw(5), SMALL, 5
    x, gates = draw.normal(bs, heads.dim), draw.gates(bs, HV=heads.HV)
    states, slots = draw.normal(8, heads.HV, heads.V, heads.K), torch.tensor([6, 0, -1, 3, 2])
    alone = states.clone()
    together = gdn_decode_step(x, *gates, states, slots, heads.H, heads.K)
    for i in range(bs):
        a, b, A_log, dt_bias = gates
        one = slice(i, i + 1)
        o = gdn_decode_step(x[one], a[one], b[one], A_log, dt_bias, alone, slots[one], heads.H, heads.K)
        assert torch.equal(o[0], together[i])
    assert torch.equal(states, alone)
    assert together.isfinite().all()


def test_decode_equals_the_replay_of_one_row():
    draw, heads = Draw(6), SMALL
    x, gates = draw.normal(2, heads.dim), draw.gates(2, HV=heads.HV)
    states, slots = draw.normal(4, heads.HV, heads.V, heads.K), torch.tensor([3, 1])
    a, b, A_log, dt_bias = (t.double() for t in gates)
    want = gdn_tree_verify_replay(
        x.double()[:, None], a[:, None], b[:, None], A_log, dt_bias, states.double(), slots,
        chain_ancestors(2, 1), heads.H, heads.K,
    )  # fmt: skip
    got = gdn_decode_step(x, *gates, states, slots, heads.H, heads.K)
    torch.testing.assert_close(got.double(), want[:, 0], rtol=2e-6, atol=2e-6)


def test_verify_then_commit_agrees_with_decode():
    """Outputs of a verified chain are those of decoding it, and so is the state: fp32 up to rounding."""
    inputs = case([6], L=1, num_rows=6)
    c = SimpleNamespace(**inputs)
    states, conv_states = c.states.clone(), c.conv_states.clone()
    parents = torch.arange(-1, 5)[None]
    y = conv1d_tree(c.mixed_qkv[0], c.conv_states[0], c.slots, c.conv_weight[0], c.conv_bias[0], parents)
    o = gdn_tree_verify(
        y,
        c.a[0],
        c.b[0],
        c.A_log[0],
        c.dt_bias[0],
        c.states[0],
        c.slots,
        chain_ancestors(1, 6),
        SMALL.H,
        SMALL.K,
    )
    for row in range(6):
        want = decode_one(c, states, conv_states, 0, 0, row)
        torch.testing.assert_close(o[:, row], want, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixed_qkv", lambda x: x[0]),
        ("a", lambda x: x[:, 1:]),
        ("conv_weight", lambda x: x[1:]),
        ("conv_bias", lambda x: x[1:]),
        ("states", lambda x: x[1:]),
        ("conv_states", lambda x: x[..., :2]),
        ("accepted_rows", lambda x: x[1:]),
        ("accept_lens", lambda x: x[1:]),
        ("track_slots", lambda x: x),
    ],
)
def test_bad_arguments(name, change):
    inputs = case([2, 3]) | {"track_slots": None}
    inputs[name] = torch.tensor([0, 1]) if name == "track_slots" else change(inputs[name])
    with pytest.raises(ValueError, match=name):
        gdn_commit(**inputs)
