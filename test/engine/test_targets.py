"""Other targets than the demo pair: a tiny random hybrid and a dense Qwen3 without GDN layers."""

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
