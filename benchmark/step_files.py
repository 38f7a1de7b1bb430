"""Measured step times, from the files of `python -m benchmark.steps --json`."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

STEP_PLACE = ("context", "tp", "hardware")
KINDS = {"plain": "plain", "DFLASH": "chain", "tree": "tree"}


class StepFileError(Exception):
    """A file of step times that cannot be read: one line with the file and the remedy."""


@dataclass(frozen=True)
class Step:
    """One measured step. kind: plain, chain or tree; rows: of one request; ms: median over passes."""

    kind: str
    rows: int
    requests: int
    ms: float
    context: int
    tp: int
    hardware: str

    def __str__(self) -> str:
        name = "plain decoding" if self.kind == "plain" else f"{self.kind}, {self.rows} rows"
        return f"{name}, {self.requests} at a time"


def read_steps(path: Path) -> list[Step]:
    """The tool's lines. Raises StepFileError."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as e:
        raise StepFileError(
            f"{path}: {e.strerror}; name a file of `python -m benchmark.steps --json`"
        ) from None
    steps = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            where = {name: row[name] for name in STEP_PLACE}
            kind, rows_of_one = _kind(row["name"])
            for requests, passes in row["step_ms"].items():
                steps.append(Step(kind, rows_of_one, int(requests), statistics.median(passes), **where))
        except (KeyError, ValueError, TypeError, AttributeError) as e:
            raise StepFileError(
                f"{path}, line {number}: none of `python -m benchmark.steps --json` ({e}); remove it"
            ) from None
    return steps


def _kind(name: str) -> tuple[str, int]:
    """'tree, 16 rows' -> ('tree', 16)."""
    for start, kind in KINDS.items():
        if name.startswith(start):
            return kind, 1 if kind == "plain" else int(name.split(", ")[1].split()[0])
    raise ValueError(f"name {name!r}")
