"""Other targets than the demo pair: tiny random hybrids, one of them on eight ranks, and a dense Qwen3 without GDN."""

from __future__ import annotations

import pytest
import torch
from support.engines import decode_plainly, divergences, engine, greedy
from support.tiny_pair import dense_target, drafter, hybrid_target

VOCAB, NEW_TOKENS = 512, 40


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_random_pair(kind, tmp_path):
    target = tmp_path / "target"
    {"hybrid": hybrid_target, "dense": dense_target}[kind](target, VOCAB)
    pair = dict(target=str(target), skip_tokenizer_init=True, context_length=1024)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (1, 3, 17, 64, 65, 200)]
    with engine(**pair) as running:
        plain = decode_plainly(running, prompts, NEW_TOKENS)
    for budget, cap in ((7, 8), (40, 3)):
        with engine(budget, cap, draft=drafter(tmp_path / "draft", VOCAB), **pair) as running:
            outputs = running.generate(input_ids=prompts, sampling_params=greedy(NEW_TOKENS))
        divergences(plain, [o["output_ids"] for o in outputs])


@pytest.mark.slow
def test_eight_ranks(tmp_path):
    """Two KV heads on eight ranks: each is held by four of them; GDN and query heads, vocabulary and FFN are split."""
    heads, pair = 16, dict(target=str(tmp_path / "target"), skip_tokenizer_init=True, context_length=1024)
    hybrid_target(tmp_path / "target", VOCAB, heads)
    draft = drafter(tmp_path / "draft", VOCAB, heads)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (3, 70)]
    with engine(**pair) as running:
        plain = decode_plainly(running, prompts, 16)
    with engine(7, draft=draft, tp_size=8, **pair) as running:
        outputs = running.generate(input_ids=prompts, sampling_params=greedy(16))
    divergences(plain, [o["output_ids"] for o in outputs])
