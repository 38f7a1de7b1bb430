"""GPU time of a decode step, read from a profiler trace."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass
class StepTrace:
    steps: int
    step_ms: float  # from the first step's start to the last one's
    idle: float  # share of that time in which no kernel, copy or fill ran
    kernels: list[tuple[str, float, float]]  # name, microseconds a step, launches a step; the longest first


def newest_trace(folder: Path) -> Path:
    return max(folder.rglob("*.trace.json.gz"), key=lambda p: p.stat().st_mtime)


def read_trace(path: Path, marker: str) -> StepTrace:
    """Steps between the first and the last kernel whose name contains `marker`, which runs once a step.

    Raises ValueError if there are fewer than three of them.
    """
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    events = sorted((e for e in events if e.get("cat") in GPU), key=lambda e: e["ts"])
    marks = [e["ts"] for e in events if marker in e["name"]]
    if len(marks) < 3:
        raise ValueError(f"{path}: {len(marks)} kernels named *{marker}*; profile at least three steps")
    begin, end = marks[1], marks[-1]  # the first step may still wait for the profiler
    steps = len(marks) - 2
    busy, reached = 0.0, begin
    times, launches = Counter(), Counter()
    for e in events:
        if not begin <= e["ts"] < end:
            continue
        stop = e["ts"] + e["dur"]
        busy += max(0.0, min(stop, end) - max(e["ts"], reached))
        reached = max(reached, stop)
        times[e["name"]] += e["dur"]
        launches[e["name"]] += 1
    kernels = [(name, us / steps, launches[name] / steps) for name, us in times.most_common()]
    return StepTrace(steps, (end - begin) / 1e3 / steps, 1 - busy / (end - begin), kernels)
