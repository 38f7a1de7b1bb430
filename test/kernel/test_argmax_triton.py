"""The kernels of `greedy_tokens` against torch: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from sglang_ddtree_kernel._argmax_triton import argmax_triton
from test_topk_logprobs import make_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(logits, block=64):
    """Parts of 64 columns, so that a row has several."""
    tokens = argmax_triton(logits.to(DEVICE), block=block)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == logits.cpu().max(1).indices.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("vocab", [2, 63, 64, 65, 997])
def test_equals_torch(vocab, kind, dtype):
    check(make_logits(kind, 5, vocab).to(dtype))


@pytest.mark.parametrize("columns", [[0, 999], [63, 64], [64, 127, 128], [700, 998, 999]], ids=str)
@pytest.mark.parametrize("value", [3.0, 0.0, -torch.inf, torch.nan])
def test_the_first_of_equals_across_parts(value, columns):
    logits = torch.full((2, 1000), -torch.inf)
    logits[1] = -1 - torch.rand(1000)
    logits[:, columns] = value
    check(logits)


def test_zeros_of_both_signs_are_equal():
    logits = -1 - torch.rand(1, 300)
    logits[0, 70], logits[0, 200] = -0.0, 0.0
    check(logits)


@pytest.mark.parametrize("rows,vocab", [(1, 1), (3, 1), (0, 10)])
def test_few_columns_or_none(rows, vocab):
    check(torch.randn(rows, vocab))


def test_strided_logits():
    logits = torch.randn(6, 500)
    check(logits[::2, 7:450])
    check(logits[:, :20].T)


def test_one_part():
    check(torch.randn(2, 1000), block=1024)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 512])
def test_served_size_in_a_graph(rows, dtype):
    logits = torch.randn(rows, 248_320, device="cuda").mul(3).to(dtype)
    argmax_triton(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = argmax_triton(logits)
    logits.copy_(torch.randn(rows, 248_320, device="cuda").round())  # ties
    graph.replay()
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(tokens, first)
