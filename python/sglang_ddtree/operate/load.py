"""A measured load on an OpenAI-compatible server: tokens per second, latency, and what DDTREE accepted meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import openai
import requests

from sglang_ddtree.operate.unit import OperateError

PROMPTS = Path(__file__).with_name("prompts.jsonl")
TIMEOUT = 600  # seconds for one request


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


def api_key() -> str:
    return os.environ.get("SGLANG_API_KEY", "none")


def counts(base: str) -> tuple[int, int]:
    """(steps, accepted drafts) of the server since its start, over its data-parallel ranks."""
    headers = {"Authorization": f"Bearer {api_key()}"}
    answer = requests.get(base + "/server_info", headers=headers, timeout=30)
    answer.raise_for_status()
    states = [s["ddtree"] for s in answer.json()["internal_states"] if "ddtree" in s]
    return sum(s["steps"] for s in states), sum(s["accepted_drafts"] for s in states)


def measure(base: str, prompts: list[dict], number: int, concurrency: int, max_tokens: int) -> Measured:
    """Sends `number` greedy requests, `concurrency` at a time, after as many unmeasured ones as run at a time."""
    return asyncio.run(_measure(base, prompts, number, concurrency, max_tokens))


async def _measure(
    base: str, prompts: list[dict], number: int, concurrency: int, max_tokens: int
) -> Measured:
    async with openai.AsyncOpenAI(
        base_url=base + "/v1", api_key=api_key(), timeout=TIMEOUT, max_retries=0
    ) as client:
        model = (await client.models.list()).data[0].id
        free = asyncio.Semaphore(concurrency)

        async def one(i: int) -> tuple[float, float, int]:
            async with free:
                return await _request(client, model, prompts[i % len(prompts)], max_tokens)

        await asyncio.gather(*map(one, range(concurrency)))
        steps, accepted = counts(base)
        started = time.perf_counter()
        done = await asyncio.gather(*map(one, range(number)))
        seconds = time.perf_counter() - started
    now_steps, now_accepted = counts(base)
    tokens = sum(n for _, _, n in done)
    return Measured(
        requests=number,
        tokens=tokens,
        seconds=seconds,
        tok_s=tokens / seconds,
        ttft_s=statistics.median(first for first, _, _ in done),
        request_s=statistics.median(whole for _, whole, _ in done),
        tau=1 + (now_accepted - accepted) / max(1, now_steps - steps),
    )


async def _request(
    client: openai.AsyncOpenAI, model: str, row: dict, max_tokens: int
) -> tuple[float, float, int]:
    """(seconds to the first token, seconds to the last, output tokens) of one request."""
    started, first, tokens = time.perf_counter(), None, 0
    create = client.completions.create if "prompt" in row else client.chat.completions.create
    stream = await create(
        model=model,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        **{k: row[k] for k in ("prompt", "messages") if k in row},
    )
    async for chunk in stream:
        if chunk.choices and first is None:
            first = time.perf_counter() - started
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return first or 0.0, time.perf_counter() - started, tokens
