"""Real SGLang engines on the demo pair or on a tiny random pair, and the comparison with plain decoding."""

from __future__ import annotations

import atexit
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "models/demo-target")
DRAFT = str(ROOT / "models/demo-draft")

# fp32 logits of one model in two batch shapes differ by about 1e-5; a gap below ten times that is a tie.
TIE_GAP = 1e-4


@contextmanager
def engine(budget: int | None = None, cap: int = 8, *, target: str = TARGET, draft: str = DRAFT, **kwargs):
    """sglang.Engine on CPU in fp32; with a budget it serves DDTREE, without one it decodes token by token."""
    import sglang

    args = dict(
        model_path=target,
        device="cpu",
        dtype="float32",
        log_level="error",
        context_length=4096,
        max_total_tokens=32768,
        max_running_requests=8,
        max_mamba_cache_size=80,
    )
    if budget is not None:
        args.update(
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=draft,
            speculative_ddtree_budget=budget,
            speculative_ddtree_topk_cap=cap,
        )
    running = sglang.Engine(**{**args, **kwargs})
    try:
        yield running
    finally:
        running.shutdown()
        atexit.unregister(running.shutdown)  # or it logs once more when pytest has closed its streams


def greedy(new_tokens: int, **kwargs) -> dict:
    return dict(temperature=0, max_new_tokens=new_tokens, ignore_eos=True, **kwargs)


@dataclass
class Reference:
    """Plain decoding's tokens, and at each position the gap between its best two log-probabilities."""

    tokens: list[int]
    gaps: list[float]


def decode_plainly(running, prompts: list, new_tokens: int, **kwargs) -> list[Reference]:
    """One request at a time. prompts: texts, or token id lists."""
    references = []
    for prompt in prompts:
        key = "prompt" if isinstance(prompt, str) else "input_ids"
        out = running.generate(
            **{key: prompt},
            sampling_params=greedy(new_tokens, **kwargs),
            return_logprob=True,
            top_logprobs_num=2,
        )
        top = out["meta_info"]["output_top_logprobs"]
        references.append(Reference(out["output_ids"], [a[0] - b[0] for a, b in top]))
    return references


def divergences(references: list[Reference], outputs: list[list[int]]) -> list[str]:
    """Checks each output against its reference; returns a line for every tie that went the other way.

    Raises AssertionError where they differ although plain decoding was sure of its token.
    """
    ties = []
    for i, (reference, tokens) in enumerate(zip(references, outputs, strict=True)):
        assert len(tokens) == len(reference.tokens), (
            f"request {i}: {len(tokens)} tokens, not {len(reference.tokens)}"
        )
        at = next((k for k, (a, b) in enumerate(zip(reference.tokens, tokens, strict=True)) if a != b), None)
        if at is None:
            continue
        gap = reference.gaps[at]
        assert gap < TIE_GAP, (
            f"request {i} differs at token {at}, where plain decoding's top-2 gap is {gap:.3g}"
        )
        ties.append(f"request {i}, token {at}: top-2 gap {gap:.2g}")
    return ties


def tau(outputs: list[dict], new_tokens: int) -> float:
    """Mean tokens committed per verify step. The first token of each request comes from prefill."""
    steps = sum(o["meta_info"]["spec_verify_ct"] for o in outputs)
    return (new_tokens - 1) * len(outputs) / steps
