"""A load on any OpenAI-compatible server from the plain `openai` client: what a user of the server sees.

    python -m benchmark.serving.openai_load --base-url http://127.0.0.1:30000 --requests 32 --concurrency 4

Prints tokens per second, time to the first token and time between tokens, of streamed completions. Two extensions that
SGLang serves are used: `ignore_eos`, and a token count in every chunk, as one step's tokens come in one chunk.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import openai
import typer
from rich.console import Console
from rich.table import Table

from benchmark.serving.prompts import UsageError, read_rows

TIMEOUT = 600  # seconds for one request


@dataclass
class Answer:
    """One streamed answer. first_s, last_s: seconds to its first and last chunk; chunks: (seconds, tokens so far)."""

    chunks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.chunks[0][0]

    @property
    def last_s(self) -> float:
        return self.chunks[-1][0]

    @property
    def tokens(self) -> int:
        return self.chunks[-1][1]

    def gaps_ms(self) -> list[float]:
        """Milliseconds per token after the first chunk; tokens that came together share the time since the last."""
        gaps = []
        for (before, had), (now, has) in zip(self.chunks, self.chunks[1:], strict=False):
            gaps += [1e3 * (now - before) / (has - had)] * (has - had)
        return gaps


def send(
    base: str,
    rows: list[dict],
    number: int,
    concurrency: int,
    tokens: int,
    temperature: float,
    model: str | None,
) -> tuple[list[Answer], float]:
    """`number` requests, `concurrency` at a time, row after row; returns the answers and the seconds they took.

    Every answer has exactly `tokens` tokens: end-of-text is ignored. Raises openai.APIError.
    """
    return asyncio.run(_send(base, rows, number, concurrency, tokens, temperature, model))


async def _send(base, rows, number, concurrency, tokens, temperature, model) -> tuple[list[Answer], float]:
    async with openai.AsyncOpenAI(
        base_url=base + "/v1", api_key="none", timeout=TIMEOUT, max_retries=0
    ) as client:
        model = model or (await client.models.list()).data[0].id
        free = asyncio.Semaphore(concurrency)

        async def one(i: int) -> Answer:
            async with free:
                return await _request(client, model, rows[i % len(rows)], tokens, temperature)

        started = time.perf_counter()
        answers = await asyncio.gather(*map(one, range(number)))
        return list(answers), time.perf_counter() - started


async def _request(client, model: str, row: dict, tokens: int, temperature: float) -> Answer:
    answer, started = Answer(), time.perf_counter()
    create = client.completions.create if "prompt" in row else client.chat.completions.create
    stream = await create(
        model=model,
        max_tokens=tokens,
        temperature=temperature,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"ignore_eos": True},
        **row,
    )
    async for chunk in stream:
        now, usage = time.perf_counter() - started, chunk.usage
        if chunk.choices and usage is not None:
            had = answer.chunks[-1][1] if answer.chunks else 0
            if usage.completion_tokens > had:
                answer.chunks.append((now, usage.completion_tokens))
    return answer


def main(
    base_url: str = "http://127.0.0.1:30000",
    requests: Annotated[int, typer.Option(min=1, help="in all")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="requests at a time")] = 4,
    tokens: Annotated[
        int, typer.Option(min=2, help="output tokens of each; the end-of-text is ignored")
    ] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines, {"prompt": ...} or {"messages": [...]}; default: held-out code'),
    ] = None,
) -> None:
    """Measures a running server; as many unmeasured requests as run at a time go first."""
    console = Console(width=100)
    try:
        rows = read_rows(prompts)
        send(base_url, rows, concurrency, concurrency, tokens, temperature, None)
        answers, seconds = send(base_url, rows, requests, concurrency, tokens, temperature, None)
    except UsageError as e:
        console.print(f"error: {e}")
        raise typer.Exit(2) from None
    except openai.APIError as e:
        console.print(f"error: --base-url {base_url}: {e}")
        raise typer.Exit(1) from None
    gaps = sorted(gap for a in answers for gap in a.gaps_ms())
    table = Table(
        title=f"{requests} requests, {concurrency} at a time, {tokens} tokens each, T {temperature:g}"
    )
    for column in ("tok/s", "first token ms, median", "between tokens ms, median", "p99"):
        table.add_column(column, justify="right")
    first = 1e3 * statistics.median(a.first_s for a in answers)
    cells = (
        sum(a.tokens for a in answers) / seconds,
        first,
        statistics.median(gaps),
        gaps[int(0.99 * len(gaps))],
    )
    table.add_row(*(f"{x:.1f}" for x in cells))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
