"""Real acceptance at a real step's cost: the widened pair served, token by token and with trees.

    python -m benchmark.widen.measure --shape 27b [--budgets 15,31] [--bs 1,8] [--tp 1] [--json FILE]

The first prompts of models/heldout_prompts.json, greedy, so many at a time. tau is tokens committed per step and
request. A step's time is that of a pass without its prefill, which is measured apart, over its steps; a batch takes as
many as its slowest request. Texts are compared with those of the same wide model token by token: in bf16 a near-tie
may go either way, in fp32 none should differ.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmark.serving.prompts import heldout_prompts
from benchmark.widen.folders import write_folders
from benchmark.widen.loader import GeneratedLoader
from benchmark.widen.shapes import WIDENINGS

console = Console(width=120, highlight=False)


def engine_args(target: Path, draft: Path, budget: int | None, batch_sizes: list[int], tp: int) -> dict:
    """Arguments of `sglang.Engine`, on a GPU as served in bf16, without one in fp32. budget: None for no drafter."""
    args = dict(
        model_path=str(target),
        load_format=GeneratedLoader,
        tp_size=tp,
        max_running_requests=max(batch_sizes),
        disable_radix_cache=True,
        context_length=4096,
        random_seed=1,
        log_level="warning",
    )
    if torch.cuda.is_available():
        args |= dict(attention_backend="triton", mem_fraction_static=0.8, cuda_graph_bs_decode=batch_sizes)
        args |= dict(disable_prefill_cuda_graph=True)
    else:
        args |= dict(device="cpu", dtype="float32", max_total_tokens=32768, max_mamba_cache_size=80)
    if budget is not None:
        args |= dict(speculative_algorithm="DDTREE", speculative_draft_model_path=str(draft))
        args |= dict(speculative_ddtree_budget=budget)
    return args


def one_pass(engine, prompts: list[str], bs: int, new_tokens: int) -> tuple[list[dict], float]:
    """Outputs, and the seconds all batches took."""
    sampling = dict(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
    outputs, started = [], time.perf_counter()
    for i in range(0, len(prompts), bs):
        outputs += engine.generate(prompts[i : i + bs], sampling)
    return outputs, time.perf_counter() - started


def measure(args: dict, prompts: list[str], batch_sizes: list[int], new_tokens: int) -> dict:
    """Figures by batch size, and the token ids at the first one."""
    import sglang

    started = time.perf_counter()
    engine = sglang.Engine(**args)
    row = dict(start_s=time.perf_counter() - started, by_bs={})
    try:
        for bs in batch_sizes:
            one_pass(engine, prompts[:bs], bs, 16)
            _, prefill = one_pass(engine, prompts, bs, 1)
            outputs, total = one_pass(engine, prompts, bs, new_tokens)
            steps = [o["meta_info"].get("spec_verify_ct") or new_tokens - 1 for o in outputs]
            batches = [max(steps[i : i + bs]) for i in range(0, len(steps), bs)]
            row["by_bs"][bs] = dict(
                tau=len(outputs) * (new_tokens - 1) / sum(steps),
                step_ms=1e3 * (total - prefill) / sum(batches),
                tokens_per_s=len(outputs) * (new_tokens - 1) / (total - prefill),
                tokens=[o["output_ids"] for o in outputs],
            )
    finally:
        engine.shutdown()
    return row


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(WIDENINGS)}")] = "27b",
    budgets: str = "15,31",
    bs: str = "1,8",
    tp: int = 1,
    count: Annotated[int, typer.Option(min=1, max=64, help="so many of the 64 prompts")] = 16,
    new_tokens: Annotated[int, typer.Option(min=16)] = 192,
    json_file: Annotated[Path | None, typer.Option("--json", help="all figures")] = None,
):
    """Measures every configuration, one engine after another, and prints the table."""
    if shape not in WIDENINGS:
        raise typer.BadParameter(f"{shape!r} is not one of {', '.join(WIDENINGS)}", param_hint="--shape")
    batch_sizes = [int(x) for x in bs.split(",")]
    prompts = heldout_prompts()[:count]
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write_folders(shape, Path(folder))
        for budget in [None, *map(int, budgets.split(","))]:
            name = "token by token" if budget is None else f"tree, {budget + 1} rows"
            args = engine_args(target, draft, budget, batch_sizes, tp)
            rows[name] = measure(args, prompts, batch_sizes, new_tokens)
            console.print(f"{name}: engine started in {rows[name]['start_s']:.0f} s")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, fp32"
    table = Table(
        title=f"demo pair widened to {shape}, {count} prompts x {new_tokens} tokens, TP {tp}, {where}"
    )
    for column in ("", "bs", "tau", "ms a step", "x plain", "tokens/s", "x plain", "texts equal"):
        table.add_column(column, justify="right" if column else "left")
    for size in batch_sizes:
        plain = rows["token by token"]["by_bs"][size]
        for name, row in rows.items():
            r = row["by_bs"][size]
            r["equal"] = sum(a == b for a, b in zip(r["tokens"], plain["tokens"], strict=True))
            cells = [
                name,
                str(size),
                f"{r['tau']:.2f}",
                f"{r['step_ms']:.2f}",
                f"{r['step_ms'] / plain['step_ms']:.2f}",
            ]
            cells += [f"{r['tokens_per_s']:.0f}", f"{r['tokens_per_s'] / plain['tokens_per_s']:.2f}"]
            table.add_row(*cells, f"{r['equal']} / {count}")
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    typer.run(main)
