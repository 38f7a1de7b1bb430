"""Streamed requests to an OpenAI-compatible server, a number of them at a time, and when their tokens came."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field

import openai

TIMEOUT = 600  # seconds for one request


@dataclass
class Answer:
    """One streamed answer. chunks: (seconds since its request, tokens so far); seconds: until the stream ended."""

    chunks: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def first_s(self) -> float:
        return self.chunks[0][0] if self.chunks else self.seconds

    @property
    def last_s(self) -> float:
        return self.chunks[-1][0] if self.chunks else self.seconds

    @property
    def tokens(self) -> int:
        return self.chunks[-1][1] if self.chunks else 0

    def gaps_ms(self) -> list[float]:
        """Milliseconds per token after the first chunk; tokens that came together share the time since the last."""
        gaps = []
        for (before, had), (now, has) in zip(self.chunks, self.chunks[1:], strict=False):
            gaps += [1e3 * (now - before) / (has - had)] * (has - had)
        return gaps


def api_key() -> str:
    return os.environ.get("SGLANG_API_KEY", "none")


def send(
    base: str,
    rows: list[dict],
    number: int,
    concurrency: int,
    tokens: int,
    temperature: float = 0.0,
    model: str | None = None,
    ignore_eos: bool = False,
) -> tuple[list[Answer], float]:
    """`number` requests, `concurrency` at a time, row after row; returns the answers and the seconds they took.

    rows: {"prompt": text} or {"messages": [...]}, over again where there are fewer. tokens: of an answer at most, or
    with ignore_eos exactly. model: the server's first by default. Raises openai.APIError.
    """
    return asyncio.run(_send(base, rows, number, concurrency, tokens, temperature, model, ignore_eos))


async def _send(base, rows, number, concurrency, tokens, temperature, model, ignore_eos):
    async with openai.AsyncOpenAI(
        base_url=base + "/v1", api_key=api_key(), timeout=TIMEOUT, max_retries=0
    ) as client:
        model = model or (await client.models.list()).data[0].id
        free = asyncio.Semaphore(concurrency)

        async def one(i: int) -> Answer:
            async with free:
                return await _request(client, model, rows[i % len(rows)], tokens, temperature, ignore_eos)

        started = time.perf_counter()
        answers = await asyncio.gather(*map(one, range(number)))
        return list(answers), time.perf_counter() - started


async def _request(
    client, model: str, row: dict, tokens: int, temperature: float, ignore_eos: bool
) -> Answer:
    """SGLang's extensions: end-of-text ignored, and a token count in every chunk, as a step's tokens come in one."""
    answer, started = Answer(), time.perf_counter()
    create = client.completions.create if "prompt" in row else client.chat.completions.create
    stream = await create(
        model=model,
        max_tokens=tokens,
        temperature=temperature,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"ignore_eos": ignore_eos},
        **{k: row[k] for k in ("prompt", "messages") if k in row},
    )
    async for chunk in stream:
        answer.seconds = time.perf_counter() - started
        if chunk.usage is not None and chunk.usage.completion_tokens > answer.tokens:
            answer.chunks.append((answer.seconds, chunk.usage.completion_tokens))
    return answer
