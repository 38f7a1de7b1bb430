"""Runs, sorted into what one figure shows: one machine and pair, one temperature, one line per method and cap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmark.serving.grids import CHAIN, LEAKY, PLAIN, TREE
from benchmark.serving.records import Run

BENCH = "bench_serving"


@dataclass(frozen=True)
class Group:
    """Runs of one machine, pair and TP; of the same measurement made twice, the later line of the file."""

    hardware: str
    target: str
    draft: str
    tp: int
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return f"{Path(self.target).name} + {Path(self.draft).name}, {self.hardware}"

    @property
    def temperatures(self) -> list[float]:
        return sorted({r.temperature for r in self.runs})

    def concurrencies(self, temperature: float) -> list[int]:
        return sorted({r.concurrency for r in self.runs if r.temperature == temperature})

    def at(self, temperature: float, concurrency: int, client: str = BENCH) -> list[Run]:
        return [
            r
            for r in self.runs
            if (r.temperature, r.concurrency, r.client) == (temperature, concurrency, client)
        ]


def groups(runs: list[Run]) -> list[Group]:
    """In the order in which they first appear."""
    latest: dict[tuple, Run] = {}
    for r in runs:
        latest[
            (r.hardware, r.target, r.draft, r.tp, r.method, r.budget, r.cap)
            + (r.client, r.temperature, r.concurrency)
        ] = r
    found: dict[tuple, list[Run]] = {}
    for r in latest.values():
        found.setdefault((r.hardware, r.target, r.draft, r.tp), []).append(r)
    return [Group(*about, tuple(rows)) for about, rows in found.items()]


def one(runs: list[Run], method: str) -> Run | None:
    """The run of a method that has no budget to vary: plain decoding or the chain."""
    return next((r for r in runs if r.method == method), None)


def lines(runs: list[Run]) -> dict[tuple[str, int], list[Run]]:
    """(method, cap) -> runs by budget, for trees and leaky trees."""
    found: dict[tuple[str, int], list[Run]] = {}
    for r in sorted(runs, key=lambda r: r.budget or 0):
        if r.method in (TREE, LEAKY):
            found.setdefault((r.method, r.cap), []).append(r)
    return found


def usual_cap(method: str, runs: list[Run]) -> int:
    """The cap that stands for a method: the server's default where it was measured."""
    caps = {r.cap for r in runs if r.method == method}
    return 8 if 8 in caps else min(caps)


def survival(histogram: list[int]) -> list[float]:
    """Share of steps that accepted at least 1, 2, ... drafts. histogram[i]: steps that accepted i."""
    steps = sum(histogram)
    return [sum(histogram[d:]) / steps for d in range(1, len(histogram))] if steps else []


def label(run: Run) -> str:
    if run.method == PLAIN:
        return "plain decoding"
    if run.method == CHAIN:
        return "chain of 15"
    return f"{'leaky' if run.method == LEAKY else 'exact'} tree, budget {run.budget}, cap {run.cap}"


def losses(group: Group) -> list[str]:
    """Where a tree is no faster than plain decoding or than the chain, or a larger budget than a smaller one."""
    said = []
    for temperature in group.temperatures:
        for concurrency in group.concurrencies(temperature):
            runs = group.at(temperature, concurrency)
            where = f"T {temperature:g}, {concurrency} at a time"
            for other in filter(None, (one(runs, PLAIN), one(runs, CHAIN))):
                slower = sorted(
                    (r for r in runs if r.method == TREE and r.tok_s < other.tok_s), key=lambda r: r.tok_s
                )
                if slower:
                    these = ", ".join(f"budget {r.budget} cap {r.cap} ({r.tok_s:.0f})" for r in slower)
                    said.append(f"{where}: slower than {label(other)} ({other.tok_s:.0f} tok/s): {these}.")
            for (method, cap), rows in lines(runs).items():
                best = max(rows, key=lambda r: r.tok_s)
                if method == TREE and cap == usual_cap(TREE, runs) and best is not rows[-1]:
                    last = rows[-1]
                    said.append(
                        f"{where}, cap {cap}: fastest at budget {best.budget} ({best.tok_s:.0f} tok/s); budget "
                        f"{last.budget} accepts {last.tau:.2f} against {best.tau:.2f} tokens a step but gives "
                        f"{last.tok_s:.0f} tok/s."
                    )
    return said
