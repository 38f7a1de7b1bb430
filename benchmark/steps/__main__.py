"""Step times at the Qwen3.6-27B shape: token by token, SGLang's DFLASH chain, and trees.

    python -m benchmark.steps [--budgets 15,63] [--bs 1,8] [--tp 1] [--profile] [--json FILE]

Weights are random (the shape decides the time of a step, not the text), so nearly every draft is refused; what counts
is milliseconds per step. Engines run one after another, each in its own processes, on the same GPUs; every figure is
the median of passes after a warm-up, and each step of a tree is given as a ratio to decoding token by token.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmark.serving.machine import commit
from benchmark.steps.shapes import write_configs
from benchmark.steps.trace import StepTrace, newest_trace, read_trace

console = Console(width=150)
PASSES = 3
MARKERS = {
    None: "ArgMaxOps",
    "DFLASH": "accept_bonus",
    "DDTREE": "_path_kernel",
}  # kernels that run once a step


def passes_of(engine, prompts: list[list[int]], new_tokens: int) -> list[float]:
    """Milliseconds a step, one figure a pass: prefill is measured apart and taken off."""

    def run(n: int):
        started = time.perf_counter()
        out = engine.generate(
            input_ids=prompts, sampling_params=dict(max_new_tokens=n, temperature=0, ignore_eos=True)
        )
        return time.perf_counter() - started, out

    run(8)
    times = []
    for _ in range(PASSES):
        prefill, _ = run(1)
        total, outputs = run(new_tokens)
        steps = max(o["meta_info"].get("spec_verify_ct") or new_tokens - 1 for o in outputs)
        times.append(1e3 * (total - prefill) / steps)
    return times


def profile(engine, prompts: list[list[int]], folder: Path, marker: str) -> StepTrace:
    engine.start_profile(output_dir=str(folder), activities=["GPU"])
    engine.generate(
        input_ids=prompts, sampling_params=dict(max_new_tokens=16, temperature=0, ignore_eos=True)
    )
    engine.stop_profile()
    deadline = time.monotonic() + 60
    while not list(folder.rglob("*.trace.json.gz")) and time.monotonic() < deadline:
        time.sleep(1)
    time.sleep(2)  # until it is written to its end
    return read_trace(newest_trace(folder), marker)


def measure(
    name: str, args: dict, batch_sizes: list[int], context: int, new_tokens: int, trace: bool
) -> dict:
    import sglang

    started = time.perf_counter()
    engine = sglang.Engine(**args)
    row = dict(name=name, start_s=time.perf_counter() - started, step_ms={}, idle={}, kernels={})
    try:
        for bs in batch_sizes:
            draw = random.Random(bs)
            prompts = [[draw.randrange(1000, 200_000) for _ in range(context)] for _ in range(bs)]
            row["step_ms"][bs] = passes_of(engine, prompts, new_tokens)
            if trace:
                marker = MARKERS[args.get("speculative_algorithm")]
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        found = profile(engine, prompts, Path(folder), marker)
                    except ValueError as e:
                        console.print(f"{name}, bs {bs}: no trace ({e})")
                        continue
                row["idle"][bs] = found.idle
                row["kernels"][bs] = found.kernels[:40]
                row.setdefault("traced_ms", {})[bs] = found.step_ms
    finally:
        engine.shutdown()
    return row


def print_row(row: dict) -> None:
    for bs, times in row["step_ms"].items():
        idle = f", GPU idle {row['idle'][bs]:.1%}" if bs in row["idle"] else ""
        passes = " ".join(f"{t:.2f}" for t in times)
        console.print(f"{row['name']}, bs {bs}: {statistics.median(times):.2f} ms a step ({passes}){idle}")
        for kernel, us, launches in row["kernels"].get(bs, []):
            console.print(f"   {us:9.1f} us {launches:7.1f} x {kernel[:110]}", highlight=False)


def main(
    budgets: str = "15,63",
    bs: str = "1,8",
    context: int = 1024,
    new_tokens: int = 96,
    tp: int = 1,
    chain: Annotated[bool, typer.Option(help="measure SGLang's DFLASH chain too")] = True,
    plain: Annotated[bool, typer.Option(help="measure decoding token by token too")] = True,
    trace: Annotated[bool, typer.Option("--profile", help="GPU idle share and time by kernel")] = False,
    attention_backend: str = "triton",
    json_file: Annotated[Path | None, typer.Option("--json", help="all figures, one JSON line a row")] = None,
):
    """Measures every configuration and prints the table."""
    batch_sizes = [int(x) for x in bs.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write_configs(Path(folder))
        common = dict(
            model_path=str(target),
            load_format="dummy",
            skip_tokenizer_init=True,
            attention_backend=attention_backend,
            tp_size=tp,
            mem_fraction_static=0.8,
            max_running_requests=max(batch_sizes),
            cuda_graph_bs_decode=batch_sizes,
            disable_prefill_cuda_graph=True,
            disable_radix_cache=True,
            random_seed=1,
            context_length=max(8192, context + 1024),
            log_level="warning",
        )
        drafter = dict(speculative_draft_model_path=str(draft))
        plan = [("plain", common)] if plain else []
        if chain:
            plan.append(("DFLASH chain, 16 rows", common | drafter | dict(speculative_algorithm="DFLASH")))
        for b in [int(x) for x in budgets.split(",") if x]:
            args = common | drafter | dict(speculative_algorithm="DDTREE", speculative_ddtree_budget=b)
            plan.append((f"tree, {b + 1} rows", args))
        rows = []
        for name, args in plan:
            row = measure(name, args, batch_sizes, context, new_tokens, trace)
            rows.append(row)
            print_row(row)
            if json_file is not None:
                with json_file.open("a") as f:
                    about = dict(commit=commit(), hardware=f"{tp} x {gpu_name()}", context=context, tp=tp)
                    f.write(json.dumps(about | row) + "\n")
    table = Table(title=f"27B shape, dummy weights, bf16, context {context}, TP {tp}, {gpu_name()}")
    table.add_column("")
    for size in batch_sizes:
        for column in (f"bs {size}: ms", "x plain", "GPU idle"):
            table.add_column(column, justify="right")
    for row in rows:
        cells = [row["name"]]
        for size in batch_sizes:
            ms = statistics.median(row["step_ms"][size])
            ratio = ms / statistics.median(rows[0]["step_ms"][size])
            cells += [f"{ms:.2f}", f"{ratio:.2f}", f"{row['idle'][size]:.1%}" if size in row["idle"] else ""]
        table.add_row(*cells)
    console.print(table)


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    typer.run(main)
