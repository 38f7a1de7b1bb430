"""Sampled DDTREE text has exactly the target's distribution: chi-square over the first three tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare
from support.engines import engine
from support.tiny_pair import drafter, hybrid_target

VOCAB, DRAWS, PROMPT = 12, 20_000, [3, 7, 5]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    model = hybrid_target(folder / "target", VOCAB)
    return model, str(folder / "target"), drafter(folder / "draft", VOCAB)


@pytest.fixture(scope="module")
def running(pair):
    _, target, draft = pair
    args = dict(
        skip_tokenizer_init=True, context_length=256, max_running_requests=128, max_mamba_cache_size=800
    )
    with engine(10, 4, target=target, draft=draft, enable_deterministic_inference=True, **args) as running:
        yield running


def adjusted(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Distribution float64 [..., V]: top-k, then tokens until the mass before them exceeds top_p, renormalised."""
    probs, order = torch.softmax(logits.double() / temperature, dim=-1).sort(dim=-1, descending=True)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill((before > top_p) | (torch.arange(logits.shape[-1]) >= top_k), 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, order, probs)


def exact_distribution(model, **params) -> torch.Tensor:
    """Probability float64 [V, V, V] of the first three tokens after PROMPT."""
    with torch.no_grad():
        pairs = torch.tensor([[*PROMPT, *p] for p in itertools.product(range(VOCAB), repeat=2)])
        logits = model(pairs).logits.view(VOCAB, VOCAB, -1, VOCAB)
    first = adjusted(logits[0, 0, len(PROMPT) - 1], **params)
    second = adjusted(logits[:, 0, len(PROMPT)], **params)
    third = adjusted(logits[:, :, len(PROMPT) + 1], **params)
    return first[:, None, None] * second[:, :, None] * third


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        (0.7, 1.0, VOCAB),
        pytest.param(1.0, 1.0, VOCAB, marks=pytest.mark.exhaustive),
        pytest.param(0.7, 0.95, VOCAB, marks=pytest.mark.exhaustive),
        (1.0, 0.9, 6),
    ],
)
def test_first_three_tokens(pair, running, temperature, top_p, top_k):
    params = dict(temperature=temperature, top_p=top_p, top_k=top_k)
    expected = exact_distribution(pair[0], **params).flatten() * DRAWS
    observed = torch.zeros(VOCAB**3, dtype=torch.float64)
    for start in range(0, DRAWS, 4000):
        seeds = range(start, start + 4000)
        sampling = [params | dict(max_new_tokens=3, ignore_eos=True, sampling_seed=s) for s in seeds]
        for out in running.generate(input_ids=[PROMPT] * 4000, sampling_params=sampling):
            a, b, c = out["output_ids"]
            observed[(a * VOCAB + b) * VOCAB + c] += 1
    assert observed[expected == 0].sum() == 0, "a token was drawn that top-k or top-p excludes"
    # Cells of fewer than five expected draws are pooled, as the test's approximation asks.
    large = expected >= 5
    cells = [torch.cat([x[large], x[~large].sum()[None]]) for x in (observed, expected)]
    if cells[1][-1] == 0:
        cells = [x[:-1] for x in cells]
    p_value = chisquare(cells[0].numpy(), cells[1].numpy()).pvalue
    print(f"T {temperature}, top-p {top_p}, top-k {top_k}: {len(cells[0])} cells, p = {p_value:.3f}")
    assert p_value > 1e-3
