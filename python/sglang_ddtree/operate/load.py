"""A measured load on an OpenAI-compatible server: tokens per second, latency, and what DDTREE accepted meanwhile."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import requests

from sglang_ddtree.operate import streams
from sglang_ddtree.operate.unit import OperateError

PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Measured:
    """One load. tok_s: output tokens a second over all requests; ttft_s, request_s: medians; tau: tokens a step."""

    requests: int
    tokens: int
    seconds: float
    tok_s: float
    ttft_s: float
    request_s: float
    tau: float


def read_prompts(path: Path) -> list[dict]:
    """One JSON object a line: {"prompt": text}, or {"messages": [...]} for chat. Raises OperateError."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, json.JSONDecodeError) as e:
        raise OperateError(f"--prompts {path}: {e}; give a file with one JSON object a line") from None
    if not rows or any(not isinstance(r, dict) or len({"prompt", "messages"} & set(r)) != 1 for r in rows):
        raise OperateError(f'--prompts {path}: each line needs either "prompt" or "messages"')
    return rows


def counts(base: str) -> tuple[int, int]:
    """(steps, accepted drafts) of the server since its start, over its data-parallel ranks."""
    headers = {"Authorization": f"Bearer {streams.api_key()}"}
    answer = requests.get(base + "/server_info", headers=headers, timeout=30)
    answer.raise_for_status()
    states = [s["ddtree"] for s in answer.json()["internal_states"] if "ddtree" in s]
    return sum(s["steps"] for s in states), sum(s["accepted_drafts"] for s in states)


def measure(base: str, prompts: list[dict], number: int, concurrency: int, max_tokens: int) -> Measured:
    """Sends `number` greedy requests, `concurrency` at a time, after as many unmeasured ones as run at a time."""
    streams.send(base, prompts, concurrency, concurrency, max_tokens)
    steps, accepted = counts(base)
    answers, seconds = streams.send(base, prompts, number, concurrency, max_tokens)
    now_steps, now_accepted = counts(base)
    tokens = sum(a.tokens for a in answers)
    return Measured(
        requests=number,
        tokens=tokens,
        seconds=seconds,
        tok_s=tokens / seconds,
        ttft_s=statistics.median(a.first_s for a in answers),
        request_s=statistics.median(a.seconds for a in answers),
        tau=1 + (now_accepted - accepted) / max(1, now_steps - steps),
    )
