"""`sweep`: try budgets and caps on a running unit, one after another, and say what each is worth."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import openai
import typer
from requests import RequestException
from rich.table import Table

from sglang_ddtree.operate import load
from sglang_ddtree.operate import unit as units
from sglang_ddtree.operate.set_budget import apply, check_arguments
from sglang_ddtree.operate.terminal import console, refuse
from sglang_ddtree.operate.unit import OperateError, Unit


def whole_numbers(flag: str, text: str) -> list[int]:
    """'15,31' -> [15, 31]. Raises OperateError."""
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise OperateError(f"{flag} {text}: give whole numbers of at least 1, separated by commas")
    return [int(p) for p in parts]


def sweep(
    name: Annotated[str, typer.Argument(metavar="NAME", help="the instance: sglang-ddtree@NAME")],
    budgets: Annotated[str, typer.Option(help="separated by commas")] = "15,31,64",
    caps: Annotated[str, typer.Option(help="separated by commas")] = "8",
    prompts: Annotated[
        Path, typer.Option(help='JSON lines, {"prompt": ...} or {"messages": [...]}; best your own traffic')
    ] = load.PROMPTS,
    requests: Annotated[int, typer.Option(min=1, help="measured requests for each setting")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at a time")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="output tokens of a request")] = 256,
    json_file: Annotated[Path | None, typer.Option("--json", help="the rows as JSON")] = None,
) -> None:
    """Measure budgets and caps on a service: each is set as `set-budget` does, then a load runs; settings come back."""
    try:
        unit = Unit(name)
        plan = [(b, c) for b in whole_numbers("--budgets", budgets) for c in whole_numbers("--caps", caps)]
        rows_of_prompts = load.read_prompts(prompts)
        with unit.lock():
            rows = _run(unit, plan, rows_of_prompts, requests, concurrency, max_tokens)
    except OperateError as e:
        raise refuse(e) from None
    console.print(_table(unit, rows, concurrency))
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


def _run(unit: Unit, plan, prompts, number: int, concurrency: int, max_tokens: int) -> list[dict]:
    before = unit.text()
    settings = units.parse(before, unit.path)
    if unit.show("ActiveState") != "active":
        raise OperateError(f"{unit.service} is not running; systemctl start {unit.service}")
    old = [whole_numbers(name, settings[name])[0] for name in ("DDTREE_BUDGET", "DDTREE_CAP")]
    for budget, cap in plan:
        changed = units.edit(before, {"DDTREE_BUDGET": budget, "DDTREE_CAP": cap})
        check_arguments(units.arguments(units.parse(changed, unit.path)))
    rows = []
    try:
        for budget, cap in plan:
            console.print(f"budget {budget}, cap {cap} ({len(rows) + 1}/{len(plan)}) ...")
            seconds = apply(unit, budget, cap, check=False)["seconds"]
            measured = load.measure(units.url(settings), prompts, number, concurrency, max_tokens)
            rows.append({"budget": budget, "cap": cap, "restart_s": seconds} | asdict(measured))
    except (openai.OpenAIError, RequestException) as e:
        raise OperateError(
            f"budget {budget}, cap {cap}: the load failed ({e}); see: journalctl -u {unit.service}"
        ) from e
    finally:
        console.print(f"back to budget {old[0]}, cap {old[1]} ...")
        apply(unit, *old, check=False)
    return rows


def _table(unit: Unit, rows: list[dict], concurrency: int) -> Table:
    table = Table(title=f"{unit.service}, {concurrency} requests at a time")
    for column in ("budget", "cap", "tau", "tok/s", "first token s", "request s", "restart s"):
        table.add_column(column, justify="right")
    best = max(r["tok_s"] for r in rows)
    for r in rows:
        cells = [str(r["budget"]), str(r["cap"]), f"{r['tau']:.2f}", f"{r['tok_s']:.0f}"]
        cells += [f"{r['ttft_s']:.2f}", f"{r['request_s']:.2f}", f"{r['restart_s']:.0f}"]
        table.add_row(*cells, style="bold" if r["tok_s"] == best else None)
    return table
