"""The demo pair in one run: plain decoding, the drafter's chain, trees, and trees whose siblings share state.

    .venv/bin/python benchmark/serving/demo_table.py [--json FILE]

Prints, per configuration, tau (tokens committed per step) and the share of texts equal to plain decoding's over 24 code
prompts, and tokens per second at one and at four requests at a time: medians of three passes over eight of the prompts,
after a warm-up, all on the machine it runs on. The chain is a tree of cap 1: one node per depth. Leaky trees, whose
siblings share recurrent state, are measured for tau only.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test"))
# Engines are forked (see sglang_ddtree/cpu/patches.py): nothing parallel may run in this process.
os.environ.setdefault("SGLANG_DDTREE_FORK", "1")
os.environ.setdefault("OMP_NUM_THREADS", str(min(4, os.cpu_count() or 1)))

from support.engines import engine, greedy  # noqa: E402
from support.prompts import PROMPTS  # noqa: E402

PASSES, TIMED, CONCURRENCY = 3, 8, (1, 4)


@contextmanager
def leaky(on: bool):
    if on:
        os.environ["SGLANG_DDTREE_LEAKY"] = "1"
    try:
        yield
    finally:
        os.environ.pop("SGLANG_DDTREE_LEAKY", None)


def one_pass(running, prompts: list[str], concurrency: int, new_tokens: int) -> tuple[list[dict], float]:
    """Outputs of the prompts, `concurrency` at a time, and the seconds they took."""
    outputs, started = [], time.perf_counter()
    for i in range(0, len(prompts), concurrency):
        outputs += running.generate(prompts[i : i + concurrency], greedy(new_tokens))
    return outputs, time.perf_counter() - started


def measure(name: str, budget: int | None, cap: int, is_leaky: bool, new_tokens: int) -> dict:
    row = dict(name=name, budget=budget, cap=cap)
    started = time.perf_counter()
    with leaky(is_leaky), engine(budget, cap, disable_radix_cache=True) as running:
        row["start_s"] = time.perf_counter() - started
        running.generate(PROMPTS[:4], greedy(16))
        outputs, _ = one_pass(running, PROMPTS, 1, new_tokens)
        for concurrency in () if is_leaky else CONCURRENCY:
            passes = [one_pass(running, PROMPTS[:TIMED], concurrency, new_tokens) for _ in range(PASSES)]
            row[f"tok_s_{concurrency}"] = TIMED * new_tokens / statistics.median(s for _, s in passes)
        prompt = [7] * 3 + list(range(100, 2097))
        started = time.perf_counter()
        running.generate(input_ids=prompt, sampling_params=greedy(1))
        row["prefill_2000_s"] = time.perf_counter() - started
    row["tokens"] = [o["output_ids"] for o in outputs]
    steps = sum(o["meta_info"].get("spec_verify_ct", new_tokens - 1) for o in outputs)
    row["tau"] = len(PROMPTS) * (new_tokens - 1) / steps
    return row


def main(
    new_tokens: int = 128,
    budgets: str = "15,31,64,128",
    json_file: Annotated[Path | None, typer.Option("--json", help="one JSON line per configuration")] = None,
):
    """Runs every configuration, one engine after another (ten to twenty minutes on two cores)."""
    sizes = [int(b) for b in budgets.split(",")]
    plan = [("plain decoding", None, 8, False), ("chain of 15", 15, 1, False)]
    plan += [(f"tree, budget {b}", b, 8, False) for b in sizes]
    plan += [(f"leaky tree, budget {b}", b, 8, True) for b in sizes]
    rows = [measure(*p, new_tokens) for p in track(plan, "configurations", console=Console(stderr=True))]
    plain = rows[0]
    table = Table(
        title=f"demo pair, fp32, greedy, {len(PROMPTS)} prompts x {new_tokens} tokens, {os.cpu_count()} cores"
    )
    for column in (
        "",
        "tau",
        "texts equal",
        "tok/s, 1 request",
        "ratio",
        "tok/s, 4 requests",
        "ratio",
        "start s",
        "prefill s",
    ):
        table.add_column(column, justify="left" if not column else "right")
    for r in rows:
        r["equal"] = sum(a == b for a, b in zip(r["tokens"], plain["tokens"], strict=True))
        cells = [r["name"], f"{r['tau']:.2f}", f"{r['equal']} / {len(PROMPTS)}"]
        for key in (f"tok_s_{c}" for c in CONCURRENCY):
            cells += [f"{r[key]:.0f}", f"{r[key] / plain[key]:.2f}"] if key in r else ["", ""]
        table.add_row(*cells, f"{r['start_s']:.1f}", f"{r['prefill_2000_s']:.2f}")
    Console(width=130).print(table)
    if json_file is not None:
        lines = (json.dumps({k: v for k, v in r.items() if k != "tokens"}) for r in rows)
        json_file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
