"""The kernels of `topk_logprobs` against its specification: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sglang_ddtree_kernel import _topk_logprobs_triton as kernels
from sglang_ddtree_kernel.reference import topk_logprobs as reference
from test_topk_logprobs import make_logits, split

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# Several blocks per row and groups per block at sizes that the interpreter bears.
topk_logprobs_small = partial(kernels.topk_logprobs_triton, steps=2, lanes=8, group=16)


def assert_same(actual, expected):
    assert torch.equal(actual.values, expected.values)
    assert torch.equal(actual.ids, expected.ids) and actual.ids.dtype == torch.int64
    torch.testing.assert_close(actual.lse, expected.lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("k", [1, 8, 11, 32])
def test_equals_reference(k, kind, dtype):
    logits = make_logits(kind, 3, 997).to(DEVICE, dtype)
    assert_same(topk_logprobs_small(logits, k, 70), reference.topk_logprobs(logits, k, 70))


@pytest.mark.parametrize("order", ["rising", "falling", "one group", "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adverse_orders(dtype, order):
    """Values that crowd one group, and values that are all alike."""
    values = torch.arange(600, dtype=torch.float32)
    values = {
        "rising": values,
        "falling": -values,
        "one group": torch.where((values // 16 == 20) & (values % 3 > 0), 1000 - values, -values),
        "constant": torch.zeros(600),
    }[order]
    logits = (values / 256)[None].to(DEVICE, dtype)
    assert_same(topk_logprobs_small(logits, 8), reference.topk_logprobs(logits, 8, 0))


@pytest.mark.parametrize("vocab,k", [(1, 1), (5, 5), (32, 32), (130, 32)])
def test_few_columns(vocab, k):
    logits = make_logits("ties", 4, vocab).to(DEVICE)
    assert_same(topk_logprobs_small(logits, k), reference.topk_logprobs(logits, k, 0))


@pytest.mark.parametrize("vocab,k", [(1, 1), (5, 5), (8, 8), (40, 8), (130, 8), (256, 8), (260, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_narrow_columns(vocab, k, dtype):
    """Fewer blocks or whole groups than k, and zeros of both signs, which tie."""
    logits = make_logits("ties", 4, vocab).to(DEVICE, dtype)
    zeros = torch.where(torch.arange(vocab, device=DEVICE) % 3 == 0, 0.0, -0.0).to(dtype).expand(2, -1)
    masked = torch.full_like(logits, -torch.inf)
    masked[:, -1] = -1.0
    for x in (logits, zeros, masked):
        assert_same(topk_logprobs_small(x, k), reference.topk_logprobs(x, k, 0))


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE == "cpu", reason="a CPU flushes such numbers to zero once some library has asked it to"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_subnormal_values_differ(dtype):
    """None of them is taken for zero."""
    bits = torch.arange(1, 101, dtype=torch.int16, device=DEVICE)
    logits = torch.stack([bits.view(dtype), bits.flip(0).view(dtype), -bits.view(dtype)])
    assert_same(topk_logprobs_small(logits, 8), reference.topk_logprobs(logits, 8, 0))


def test_strided_rows():
    logits = make_logits("plain", 4, 300).to(DEVICE)
    for view in (logits[::2, 7:250], logits[:, :60].T):
        assert_same(topk_logprobs_small(view, 4), reference.topk_logprobs(view, 4, 0))


@pytest.mark.parametrize("kind", ["plain", "ties", "masked", "bf16"])
@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 8])
def test_merged_shards_equal_the_reference(k, shards, kind):
    logits = make_logits(kind, 5, 997).to(DEVICE)
    parts, offset = [], 0
    for part in logits.split(split(997, shards), dim=1):
        parts.append(reference.topk_logprobs(part, k, offset))
        offset += part.shape[1]
    fields = [torch.stack(field) for field in zip(*parts, strict=True)]
    logprobs, ids = kernels.merge_topk_triton(*fields)
    expected_logprobs, expected_ids = reference.merge_topk(*fields)
    assert torch.equal(ids, expected_ids)
    assert (logprobs <= 0).all()
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-6, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,k", [(1, 8), (15, 8), (15, 32), (240, 8)])
def test_served_size(rows, k, dtype):
    logits = torch.randn(rows, 248_320, device="cuda").mul(3).to(dtype)
    actual, expected = kernels.topk_logprobs_triton(logits, k), reference.topk_logprobs(logits, k, 0)
    assert torch.equal(actual.values, expected.values) and torch.equal(actual.ids, expected.ids)
    torch.testing.assert_close(actual.lse, expected.lse, rtol=1e-5, atol=1e-5)
