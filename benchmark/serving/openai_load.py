"""A load on any OpenAI-compatible server from the plain `openai` client: what a user of the server sees.

    python -m benchmark.serving.openai_load --base-url http://127.0.0.1:30000 --requests 32 --concurrency 4

Prints tokens per second, time to the first token and time between tokens, of streamed completions. Two extensions that
SGLang serves are used: `ignore_eos`, and a token count in every chunk, as one step's tokens come in one chunk.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import openai
import typer
from rich.console import Console
from rich.table import Table
from sglang_ddtree.operate.streams import send

from benchmark.serving.prompts import UsageError, read_rows


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
        load = dict(tokens=tokens, temperature=temperature, ignore_eos=True)
        send(base_url, rows, concurrency, concurrency, **load)
        answers, seconds = send(base_url, rows, requests, concurrency, **load)
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
