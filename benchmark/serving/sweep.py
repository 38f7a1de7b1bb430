"""Speed and acceptance over methods, budgets, caps, temperatures and concurrencies, on real servers.

    python -m benchmark.serving.sweep --grid quick|greedy|full|cpu|smoke [--out RUNS.jsonl] [-- SGLANG FLAGS]

Methods: plain SGLang, its DFLASH chain, DDTREE, and DDTREE with leaky branches (siblings share recurrent state, as in
the first port; the text is wrong, which is the point). Each server is started once per method, budget, cap and TP,
serves every load of the grid, and is drained. Before a load is timed, the same prompts go through at the same
concurrency; their responses' own figures must equal what /metrics counted meanwhile. One JSON line per load; a load
whose line is there already, from the same commit and flags, is not run again: an interrupted sweep goes on.
"""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import statistics
import tempfile
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Annotated

import openai
import requests
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmark.serving import acceptance, machine, records
from benchmark.serving.grids import GRIDS, Grid, Load, Start
from benchmark.serving.loads import BenchServing, LoadError, Repetition, openai_client
from benchmark.serving.prompts import HELDOUT, UsageError, read_rows, texts
from benchmark.serving.records import Run
from benchmark.serving.servers import SERVED_NAME, Pair, Server, ServerError, arguments

console = Console(width=120, highlight=False)
FAILURES = (ServerError, LoadError, openai.APIError, requests.RequestException, TimeoutError)


class Sweep:
    """A grid on one pair.

    prompts: texts from the file `origin`; a load takes them evenly spread, over again where it needs more. folder: for
    what need not stay.
    """

    def __init__(
        self, grid: Grid, pair: Pair, origin: str, prompts: list[str], out: Path, commit: str, folder: Path
    ):
        self.grid, self.pair, self.origin, self.prompts = grid, pair, origin, prompts
        self.out, self.commit, self.folder = out, commit, folder
        self.streams = max(concurrency for _, concurrency in grid.traffic)
        self.bench = BenchServing(pair.target, folder, out.with_suffix(".bench.jsonl"))
        self.done = {run.key() for run in records.read(out)}
        self.failures: list[str] = []

    def identity(self, start: Start, load: Load) -> dict:
        """The fields of a run that say what it measures."""
        return dict(
            commit=self.commit,
            hardware=machine.hardware(start.tp),
            target=self.pair.target,
            draft=self.pair.draft,
            flags=arguments(start, self.pair, bool(machine.gpus()), self.streams),
            prompts=self.origin,
            method=start.method,
            budget=start.budget,
            cap=start.cap,
            tp=start.tp,
            client=load.client,
            temperature=load.temperature,
            concurrency=load.concurrency,
            requests=load.requests,
            tokens=load.tokens,
            repeats=self.grid.repeats,
        )

    def missing(self, start: Start) -> list[Load]:
        return [x for x in self.grid.loads(start) if records.key(**self.identity(start, x)) not in self.done]

    def spread(self, number: int) -> list[str]:
        """So many prompts, evenly from all of the file: neighbours there resemble each other."""
        every = max(1, len(self.prompts) // number)
        return [self.prompts[i * every % len(self.prompts)] for i in range(number)]

    def run(self, progress: Progress) -> None:
        plan = [(start, self.missing(start)) for start in self.grid.starts()]
        plan = [(start, loads) for start, loads in plan if loads]
        servers = progress.add_task("servers", total=len(plan))
        upcoming = iter(plan)
        waiting: deque[Server] = deque()
        draining: Server | None = None
        try:
            self.bench.start()
            for start, loads in plan:
                progress.update(servers, description=f"{start}: starting")
                # The servers after this one do meanwhile what needs no GPU: beside its start, not beside its loads.
                for later, _ in islice(upcoming, 1 + machine.servers_ahead() - len(waiting)):
                    waiting.append(self.server(later))
                server = waiting.popleft()
                try:
                    if draining is not None:
                        draining.stop()
                    server.go()
                    for load in loads:
                        progress.update(servers, description=f"{start}: {load}")
                        self.one(start, load, server)
                except FAILURES as e:
                    self.failed(start, server, e)
                finally:
                    server.drain()
                    draining = server
                progress.advance(servers)
        finally:
            for server in waiting:
                server.drain()
            for server in (*waiting, *([draining] if draining else [])):
                server.stop()

    def server(self, start: Start) -> Server:
        """Waiting at its gate, or on its way there."""
        return Server(start, self.pair, self.streams, self.folder / f"{start.slug}.log")

    def failed(self, start: Start, server: Server, error: Exception) -> None:
        """Keeps the server's log, and says whether the server itself had ended."""
        kept = self.out.with_suffix(f".failed-{start.slug}.log")
        shutil.copy(server.log, kept)
        if not isinstance(error, ServerError) and server.process.poll() is not None:
            error = ServerError(f"ended with status {server.process.returncode}: {server.last_words()}")
        self.failures.append(f"{start}: {type(error).__name__}: {error}; its server's log: {kept}")
        console.print("failed:", self.failures[-1], markup=False)

    def one(self, start: Start, load: Load, server: Server) -> None:
        """Warms up, checks the counts, measures, and writes the line."""
        chosen = self.spread(load.requests)
        before = acceptance.counts(server.base)
        warming = chosen[: load.warm_up]
        told = acceptance.generate(server.base, warming, load.temperature, load.tokens, load.concurrency)
        warm = acceptance.counts(server.base, before.requests + load.warm_up)
        wrong = acceptance.disagreement(warm - before, told)
        if wrong:
            self.failures.append(f"{start}, {load}: {wrong}")
            console.print(self.failures[-1], markup=False)
        busy = os.getloadavg()[0]
        repetitions: list[Repetition] = []
        steps: list[int] = []
        last = warm
        for _ in range(self.grid.repeats):
            client = self.bench if load.client == "bench_serving" else openai_client
            repetitions.append(client(server.base, SERVED_NAME, load, chosen))
            now = acceptance.counts(server.base, last.requests + load.requests)
            steps.append((now - last).decode_steps)
            last = now
        tok_s = [r.tok_s for r in repetitions]
        step_ms = [1e3 * r.decode_s / n for r, n in zip(repetitions, steps, strict=True)]
        gpu = machine.gpu_memory_gib()
        memory = dict(gpu_gib=gpu) if gpu is not None else dict(resident_gib=server.resident_gib())
        if (buffers := server.buffers()) is not None:
            memory |= dict(ddtree_buffers_gib=buffers["gib"], ddtree_mib_a_row=buffers["mib_a_row"])
        run = Run(
            **self.identity(start, load),
            rows=start.rows,
            when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=machine.versions(),
            warm_up_requests=told.requests,
            start_s=server.start_s,
            tok_s=statistics.median(tok_s),
            tok_s_each=tok_s,
            step_ms=statistics.median(step_ms),
            step_ms_each=step_ms,
            tau=(last - warm).tau,
            tau_responses=told.tau,
            agree=wrong is None,
            histogram=told.histogram,
            ttft_ms=statistics.median(r.ttft_ms for r in repetitions),
            itl_ms=records.median_and_p99([gap for r in repetitions for gap in r.gaps_ms]),
            memory=memory,
            load_average=busy,
        )
        records.append(self.out, run)
        console.print(
            f"{start}, {load}: {run.tok_s:.1f} tok/s, {run.step_ms:.2f} ms a step, tau {run.tau:.2f}",
            markup=False,
        )


def check_gpus(grid: str) -> None:
    """Raises UsageError where this machine cannot run the grid."""
    here, needed = len(machine.gpus()), max(GRIDS[grid].tps)
    if grid not in ("cpu", "smoke") and not here:
        raise UsageError(f"--grid {grid}: there is no GPU here; use --grid cpu or --grid smoke")
    if needed > max(1, here):
        raise UsageError(f"--grid {grid}: needs {needed} GPUs, {here} are here; use --grid quick")


def show_plan(sweep: Sweep) -> None:
    table = Table(title=f"{sweep.grid.runs()} loads on {len(sweep.grid.starts())} servers")
    for column in ("server", "loads still to run"):
        table.add_column(column)
    for start in sweep.grid.starts():
        table.add_row(str(start), "; ".join(map(str, sweep.missing(start))) or "none")
    console.print(table)


def main(
    grid: Annotated[str, typer.Option(help=" | ".join(GRIDS))] = "cpu",
    model_path: Annotated[str, typer.Option(help="the target's folder")] = "models/demo-target",
    draft_path: Annotated[str, typer.Option(help="its DFlash drafter's folder")] = "models/demo-draft",
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines, {"prompt": ...} or {"messages": [...]}; default: held-out code'),
    ] = None,
    out: Annotated[Path, typer.Option(help="one JSON line per load is added here")] = Path("runs.jsonl"),
    commit: Annotated[
        str | None, typer.Option(help="for a copy of the project without its git history")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="only show what would run")] = False,
    flags: Annotated[
        list[str] | None, typer.Argument(help="after --: further SGLang flags of every server")
    ] = None,
) -> None:
    """Runs what the grid has and the file has not; exits 1 where a server or load failed or counts disagreed."""
    try:
        if grid not in GRIDS:
            raise UsageError(f"--grid {grid}: choose one of {', '.join(GRIDS)}")
        for flag, folder in (("--model-path", model_path), ("--draft-path", draft_path)):
            if not (machine.ROOT / folder / "config.json").exists():
                raise UsageError(f"{flag} {folder}: no config.json there; name a model's folder")
        check_gpus(grid)
        chosen = texts(read_rows(prompts), str(machine.ROOT / model_path))
        with tempfile.TemporaryDirectory() as folder:
            pair = Pair(model_path, draft_path, tuple(flags or ()))
            origin = str(prompts or HELDOUT.relative_to(machine.ROOT))
            sweep = Sweep(GRIDS[grid], pair, origin, chosen, out, commit or machine.commit(), Path(folder))
            if plan:
                return show_plan(sweep)
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            signal.signal(
                signal.SIGTERM, signal.default_int_handler
            )  # either way the server is stopped first
            try:
                with Progress(*columns, console=console) as progress:
                    sweep.run(progress)
            finally:
                sweep.bench.close()
    except (UsageError, records.RecordError, LoadError) as e:
        console.print("error:", str(e), markup=False)
        raise typer.Exit(2) from None
    console.print(f"{out}: {len(records.read(out))} runs; {len(sweep.failures)} failures")
    raise typer.Exit(1 if sweep.failures else 0)


if __name__ == "__main__":
    typer.run(main)
