"""Greedy DDTREE text is plain decoding's text, token for token, whatever the tree's shape and the drafter."""

from __future__ import annotations

import pytest
from support.engines import DRAFT, TARGET, decode_plainly, divergences, engine, greedy
from support.prompts import PROMPTS

NEW_TOKENS = 32


@pytest.fixture(scope="module")
def plain():
    with engine() as running:
        return decode_plainly(running, PROMPTS, NEW_TOKENS)


BUDGETS, CAPS = (1, 4, 15, 16, 31, 64, 128), (1, 4, 8)
USUAL = {(budget, 8) for budget in BUDGETS} | {(4, 1), (15, 4), (64, 1), (64, 4)}
GRID = [
    pytest.param(b, c, marks=[] if (b, c) in USUAL else pytest.mark.exhaustive) for b in BUDGETS for c in CAPS
]


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "cap"), GRID)
def test_every_budget_and_cap(plain, budget, cap):
    with engine(budget, cap) as running:
        outputs = running.generate(PROMPTS, greedy(NEW_TOKENS))
    for line in divergences(plain, [o["output_ids"] for o in outputs]):
        print("tie:", line)


def test_transformers_agrees(plain):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    for i in range(0, len(PROMPTS), 4):
        ids = torch.tensor([tokenizer.encode(PROMPTS[i])])
        out = model.generate(
            ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        divergences(plain[i : i + 1], [out[0, ids.shape[1] :].tolist()])


def test_bigram_factors_change_speed_only(plain):
    """The demo drafter's factors are beside its weights, so every other engine here serves with them."""
    steps = []
    for markov in ("off", None):
        with engine(15, speculative_ddtree_markov=markov) as running:
            outputs = running.generate(PROMPTS, greedy(NEW_TOKENS))
        divergences(plain, [o["output_ids"] for o in outputs])
        steps.append(sum(o["meta_info"]["spec_verify_ct"] for o in outputs))
    print(f"{steps[0]} steps without factors, {steps[1]} with")
    assert steps[1] < steps[0]


def test_tensor_parallel(plain):
    with engine(31, tp_size=2) as running:
        outputs = running.generate(PROMPTS[:6], greedy(NEW_TOKENS))
    divergences(plain[:6], [o["output_ids"] for o in outputs])


def test_leaky_mode_is_wrong(plain, monkeypatch):
    """The benchmark switch must really share state between siblings, or the table it feeds means nothing."""
    monkeypatch.setenv("SGLANG_DDTREE_LEAKY", "1")
    with engine(31) as running:
        outputs = running.generate(PROMPTS, greedy(NEW_TOKENS))
    different = sum(o["output_ids"] != p.tokens for o, p in zip(outputs, plain, strict=True))
    assert different > len(PROMPTS) // 2


@pytest.mark.parametrize("kind", ["random", "adversarial"])
def test_bad_drafter_changes_speed_only(plain, kind, tmp_path):
    from support.drafters import adversarial_drafter, random_drafter

    draft = {"random": random_drafter, "adversarial": adversarial_drafter}[kind](DRAFT, TARGET, tmp_path)
    with engine(31, draft=draft) as running:
        outputs = running.generate(PROMPTS[:8], greedy(NEW_TOKENS))
    divergences(plain[:8], [o["output_ids"] for o in outputs])
    steps = sum(o["meta_info"]["spec_verify_ct"] for o in outputs)
    accepted = sum(o["meta_info"]["spec_num_correct_drafts"] for o in outputs)
    print(f"{kind}: {accepted} drafts accepted in {steps} steps")
    if kind == "adversarial":
        assert accepted == 0
