from __future__ import annotations

import pytest
import torch
from gdn_cases import SMALL, Draw, Heads
from sglang_ddtree_kernel.reference.gdn_chunk import gdn_chunk_prefill

# As for tree verification; a chunk of 64 sums more terms, and its state feeds the next chunk.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def case(lengths, heads: Heads = SMALL, dtype=torch.float32, seed=0, gate=0.1):
    draw, total, n = Draw(seed, dtype), sum(lengths), len(lengths)
    return dict(
        q=draw.normal(total, heads.H, heads.K),
        k=draw.normal(total, heads.H, heads.K),
        v=draw.normal(total, heads.HV, heads.V),
        g=-gate * draw.normal(total, heads.HV).abs(),
        beta=draw.normal(total, heads.HV).sigmoid(),
        states=draw.normal(n + 2, heads.HV, heads.V, heads.K),
        slots=torch.arange(n).flip(0) + 1,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
    )


def recurrence(q, k, v, g, beta, states, slots, cu_seqlens, chunk=64, use_qk_l2norm=True):
    """Token by token in float64: outputs, chunk-start states, and the pool afterwards."""
    group, scale = v.shape[1] // k.shape[1], k.shape[-1] ** -0.5
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (q * scale).repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    pool, out, starts = states.double().clone(), torch.zeros_like(v), []
    bounds = cu_seqlens.tolist()
    for i, slot in enumerate(slots.tolist()):
        S = torch.zeros_like(pool[0]) if slot < 0 else pool[slot].clone()
        for t in range(bounds[i], bounds[i + 1]):
            if (t - bounds[i]) % chunk == 0:
                starts.append(S)
            S = S * g[t].exp()[:, None, None]
            u = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", S, k[t]))
            S = S + u[:, :, None] * k[t][:, None, :]
            out[t] = torch.einsum("hvk,hk->hv", S, q[t])
        if slot >= 0:
            pool[slot] = S
    return out, torch.stack(starts), pool


def check(inputs, tolerance=TOLERANCE[torch.float32], **options):
    want_out, want_starts, want_pool = recurrence(**inputs, **options)
    out, starts = gdn_chunk_prefill(**inputs, **options)
    assert out.dtype == inputs["v"].dtype and starts.dtype == torch.float32
    torch.testing.assert_close(out.double(), want_out, rtol=tolerance, atol=tolerance)
    starts_tolerance = max(tolerance, 1e-6)  # they come back in fp32
    torch.testing.assert_close(starts.double(), want_starts, rtol=starts_tolerance, atol=starts_tolerance)
    torch.testing.assert_close(inputs["states"].double(), want_pool, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 200])
def test_equals_recurrence(length, dtype):
    check(case([length], dtype=dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("lengths", [[64, 64], [1, 65, 3], [130, 0, 7, 64]], ids=str)
def test_several_sequences(lengths):
    check(case(lengths))


@pytest.mark.parametrize("chunk", [1, 16, 32])
def test_chunk_sizes(chunk):
    check(case([50, 33]), chunk=chunk)


@pytest.mark.parametrize("heads", [Heads(1, 1, 8, 8), Heads(2, 2, 16, 8), Heads(4, 12, 8, 16)], ids=str)
def test_head_layouts(heads):
    check(case([70, 20], heads))


@pytest.mark.parametrize("gate", [0.0, 1e-4, 5.0, 300.0])
def test_extreme_decays(gate):
    check(case([100], gate=gate))


def test_strong_decay_keeps_the_digits_of_mild_ones_after_it():
    inputs = case([64], gate=0.01)
    inputs["g"][1] = -5000.0
    check(inputs)


def test_near_identical_keys_with_beta_near_one():
    inputs = case([130], gate=1e-3)
    inputs["k"] = inputs["k"][:1] + 1e-3 * inputs["k"]
    inputs["beta"] = 1 - 1e-4 * inputs["beta"]
    check(inputs, 2e-4)  # the keys differ by 1e-3: what tells them apart has lost that many digits


def test_without_normalisation():
    inputs = case([80])
    inputs["q"], inputs["k"] = (torch.nn.functional.normalize(inputs[x], dim=-1) for x in "qk")
    check(inputs, use_qk_l2norm=False)


def test_padded_sequence_starts_from_zeros_and_writes_nothing():
    inputs = case([10, 70])
    inputs["slots"] = torch.tensor([-1, 2])
    check(inputs)


def test_bf16():
    inputs = case([70], dtype=torch.bfloat16)
    check(inputs, 2**-7)


def test_chunked_prefix_continues_from_the_pool():
    """Two calls, split anywhere, equal one: prompts may arrive in pieces."""
    whole, first, second = case([150]), case([150]), case([150])
    out, _ = gdn_chunk_prefill(**whole)
    pieces = []
    second["states"] = first["states"]
    for inputs, span in ((first, slice(0, 90)), (second, slice(90, 150))):
        for name in ("q", "k", "v", "g", "beta"):
            inputs[name] = inputs[name][span]
        inputs["cu_seqlens"] = torch.tensor([0, span.stop - span.start])
        pieces.append(gdn_chunk_prefill(**inputs)[0])
    torch.testing.assert_close(torch.cat(pieces), out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(first["states"], whole["states"], rtol=2e-5, atol=2e-5)


def test_no_tokens():
    inputs = case([0])
    out, starts = gdn_chunk_prefill(**inputs)
    assert out.shape == (0, SMALL.HV, SMALL.V) and len(starts) == 0
