"""Edges of memory and length: the end of the context, retraction, and bf16."""

from __future__ import annotations

import torch
from support.engines import decode_plainly, divergences, engine, greedy, tau
from support.prompts import PROMPTS


def test_to_the_end_of_the_context():
    """A step reserves rows far beyond the last position that a text may reach."""
    limits = dict(context_length=192, max_total_tokens=4096, allow_auto_truncate=True)
    with engine(**limits) as running:
        plain = decode_plainly(running, PROMPTS[:4], 1000)
    with engine(64, **limits) as running:
        outputs = running.generate(PROMPTS[:4], greedy(1000))
    assert all(o["meta_info"]["finish_reason"]["type"] == "length" for o in outputs)
    divergences(plain, [o["output_ids"] for o in outputs])


def test_requests_retracted_for_lack_of_slots_give_the_same_text():
    """Six requests whose reservations do not fit together: some are taken back and prefilled again later."""
    with engine() as running:
        plain = decode_plainly(running, PROMPTS[:6], 160)
        penalised = running.generate(PROMPTS[6], greedy(160))["output_ids"]
    with engine(15, max_total_tokens=700) as running:
        outputs = running.generate(PROMPTS[:7], greedy(160))
    divergences(plain, [o["output_ids"] for o in outputs[:6]])
    assert outputs[6]["output_ids"] == penalised


def test_bf16():
    """bf16 rounds every layer, so near-ties flip: the texts agree mostly, and drafts are accepted as in fp32."""
    with engine(dtype="bfloat16") as running:
        plain = running.generate(PROMPTS[:8], greedy(32))
    with engine(15, dtype="bfloat16") as running:
        outputs = running.generate(PROMPTS[:8], greedy(32))
        scored = running.generate(PROMPTS[:2], greedy(32), return_logprob=True)
        forced = running.generate(PROMPTS[0], greedy(8) | {"logit_bias": {"77": 1000.0}})
    # Logits whose argmax alone is wanted stay in bf16; others are adjusted, and log-probs taken, in fp32.
    logprobs = torch.tensor([x[0] for o in scored for x in o["meta_info"]["output_token_logprobs"]])
    assert [o["output_ids"] for o in scored] == [o["output_ids"] for o in outputs[:2]]
    assert (logprobs.bfloat16().float() != logprobs).float().mean() > 0.5
    assert forced["output_ids"] == [77] * 8
    same = sum(a["output_ids"] == b["output_ids"] for a, b in zip(plain, outputs, strict=True))
    print(f"bf16: {same} of 8 texts equal, tau {tau(outputs, 32):.2f}")
    assert same >= 5
    assert tau(outputs, 32) > 2.5
