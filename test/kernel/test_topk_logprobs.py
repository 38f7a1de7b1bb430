from __future__ import annotations

import pytest
import torch
from sglang_ddtree_kernel.topk_logprobs import merge_topk, topk_logprobs


def by_sorting(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids by a stable descending sort, whose equal values stay in the order of their ids."""
    values, ids = logits.float().sort(dim=1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


def split(vocab: int, shards: int) -> list[int]:
    """Unequal sizes, each at least vocab // (2 * shards)."""
    sizes = [vocab // shards + (-1) ** i * (vocab // (3 * shards)) for i in range(shards - 1)]
    return sizes + [vocab - sum(sizes)]


def make_logits(kind: str, rows: int, vocab: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(rows * vocab)
    logits = torch.randn(rows, vocab, generator=rng) * 3
    if kind == "ties":
        logits = logits.round()  # holds both zeros, 0.0 and -0.0
    if kind == "masked":
        logits[torch.rand(rows, vocab, generator=rng) < 0.97] = -torch.inf
        logits[1] = -torch.inf
    return logits.bfloat16() if kind == "bf16" else logits


@pytest.mark.parametrize("kind", ["plain", "ties", "masked", "bf16"])
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("k", [1, 8, 32])
def test_shards_equal_the_whole(shards, k, kind):
    logits = make_logits(kind, 5, 997)
    parts, offset = [], 0
    for part in logits.split(split(997, shards), dim=1):
        parts.append(topk_logprobs(part, k, offset))
        offset += part.shape[1]
    logprobs, ids = merge_topk(*(torch.stack(field) for field in zip(*parts, strict=True)))
    values, expected_ids = by_sorting(logits, k)
    assert torch.equal(ids, expected_ids)
    expected = (logits.double().log_softmax(1).gather(1, ids)).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    assert logprobs.dtype == torch.float32 and (logprobs <= 0).all()
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=2e-6)
    if shards == 1:
        assert torch.equal(parts[0].values, values)
        assert torch.equal(parts[0].ids, expected_ids)


def test_zeros_of_both_signs_are_equal():
    part = topk_logprobs(torch.tensor([[-0.0, 0.0, -1.0, -0.0, 1.0]]), 4)
    assert part.ids.tolist() == [[4, 0, 1, 3]]


def test_certain_token_has_logprob_zero():
    logits = torch.full((1, 64), -200.0)
    logits[0, 9] = 300.0
    part = topk_logprobs(logits, 2)
    logprobs, ids = merge_topk(part.values[None], part.ids[None], part.lse[None])
    assert ids.tolist() == [[9, 0]] and logprobs.tolist() == [[0.0, -500.0]]


def test_row_without_any_candidate():
    part = topk_logprobs(torch.full((2, 16), -torch.inf), 3, vocab_offset=100)
    logprobs, ids = merge_topk(part.values[None], part.ids[None], part.lse[None])
    assert (logprobs == -torch.inf).all()
    assert ids.tolist() == [[100, 101, 102]] * 2


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="^k must"):
        topk_logprobs(torch.zeros(2, 4), 5)
    with pytest.raises(ValueError, match="^logits must"):
        topk_logprobs(torch.zeros(4), 2)
    values, ids = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="^values must"):
        merge_topk(values[0], ids, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="^ids must"):
        merge_topk(values, ids[0], torch.zeros(2, 3))
    with pytest.raises(ValueError, match="^lse must"):
        merge_topk(values, ids, torch.zeros(3, 2))
