"""What a server is asked for beside plain greedy text: the answers equal those of decoding token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.engines import TARGET, engine, greedy
from support.prompts import PROMPTS

LONG = (Path(__file__).parents[2] / "python/sglang_ddtree/worker.py").read_text()[:6000]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99}},
    "required": ["name", "n"],
}


def ask(running) -> dict[str, object]:
    """Every request once, one at a time."""

    def tokens(prompt, new_tokens=64, **params):
        return running.generate(prompt, greedy(new_tokens) | params)["output_ids"]

    answers = {
        # First: SGLang has two sampling routes, whose noise differs, and takes the one for top-k as long as the running
        # batch has not dropped an earlier greedy request.
        "seed": tokens(PROMPTS[1], temperature=1.0, sampling_seed=7),
        "prompt longer than the prefill chunk": tokens(LONG),
        "its prefix from the cache": tokens(LONG + "\n\ndef f(x):\n"),
        "frequency penalty": tokens(PROMPTS[0], frequency_penalty=0.7),
        "presence penalty": tokens(PROMPTS[0], presence_penalty=0.9),
        "repetition penalty": tokens(PROMPTS[0], repetition_penalty=1.3),
        # Not with a repetition penalty as well: without overlap SGLang applies penalties in the order of a set of
        # classes, which changes from process to process; with overlap additive ones come first, as in DDTREE.
        "both additive penalties": tokens(PROMPTS[4], frequency_penalty=0.3, presence_penalty=0.2),
        "min_new_tokens": tokens(PROMPTS[13], min_new_tokens=50, ignore_eos=False),
        "logit bias": tokens(PROMPTS[0], logit_bias={"11": 3.0, "200": 5.0}),
        "stop string": tokens(PROMPTS[1], stop=["return"], ignore_eos=False),
        "json schema": tokens(PROMPTS[2], json_schema=json.dumps(SCHEMA), ignore_eos=False),
        "regex": tokens(PROMPTS[3], regex=r"[a-z]{3,8} = \[[0-9]+(, [0-9]+){3,9}\]\n", ignore_eos=False),
        "seed with top-p and top-k": tokens(
            PROMPTS[3], temperature=0.8, top_p=0.9, top_k=20, sampling_seed=11
        ),
    }
    encode = running.tokenizer_manager.tokenizer.encode
    first = running.generate(PROMPTS[1], greedy(400))
    # As ids: a text that is encoded again may come out as other tokens.
    dialogue = encode(PROMPTS[1]) + first["output_ids"] + encode("\n\nclass Vector:\n")
    second = running.generate(input_ids=dialogue, sampling_params=greedy(64))
    answers["first turn"], answers["second turn"] = first["output_ids"], second["output_ids"]
    answers["tokens of the second turn from the cache"] = second["meta_info"]["cached_tokens"]
    out = running.generate(PROMPTS[0], greedy(24), return_logprob=True, top_logprobs_num=2)["meta_info"]
    answers["log-probs"] = [(pytest.approx(v, abs=1e-4), i) for v, i, *_ in out["output_token_logprobs"]]
    answers["top tokens"] = [[i for _, i, *_ in top] for top in out["output_top_logprobs"]]
    return answers


@pytest.fixture(scope="module")
def plain():
    # Without overlap scheduling: with it, SGLang's own penalties lag a token behind.
    args = dict(chunked_prefill_size=128, enable_deterministic_inference=True)
    with engine(disable_overlap_schedule=True, **args) as running:
        return ask(running)


def test_answers_equal_plain_decoding(plain):
    with engine(15, chunked_prefill_size=128, enable_deterministic_inference=True) as running:
        answers = ask(running)
    # The checkpoint of this prefix was written while decoding, in the middle of an accepted path.
    assert answers["tokens of the second turn from the cache"] >= 256
    different = [name for name in plain if plain[name] != answers[name]]
    assert not different


def test_all_penalties_at_once_follow_the_formula():
    """Additive ones first, as SGLang's overlap mode; counted here token by token on transformers' logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    strengths = dict(frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.1)
    with engine(15) as running:
        served = running.generate(PROMPTS[4], greedy(64) | strengths)["output_ids"]
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    ids, counts = (
        AutoTokenizer.from_pretrained(TARGET).encode(PROMPTS[4]),
        torch.zeros(model.config.vocab_size),
    )
    start = len(ids)
    while len(ids) < start + 64:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        logits = logits - 0.3 * counts - 0.2 * (counts > 0)
        logits = torch.where(counts > 0, torch.where(logits < 0, logits * 1.1, logits / 1.1), logits)
        ids.append(int(logits.argmax()))
        counts[ids[-1]] += 1
    assert served == ids[start:]


def test_penalties_of_one_request_leave_its_neighbours_alone(plain):
    with engine(15) as running:
        params = [
            greedy(64),
            greedy(64, frequency_penalty=0.7),
            greedy(64),
            greedy(64, repetition_penalty=1.3),
        ]
        outputs = running.generate([PROMPTS[0]] * 4, params)
    tokens = [o["output_ids"] for o in outputs]
    assert tokens[1] == plain["frequency penalty"]
    assert tokens[3] == plain["repetition penalty"]
    assert tokens[0] == tokens[2] != tokens[1]
