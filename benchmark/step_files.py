"""Measured step times, from the files of `python -m benchmark.steps --json` and from those under benchmark/results/."""

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


def read_steps(path: Path, context: int = 1024, tp: int = 1, hardware: str = "one GPU") -> list[Step]:
    """The tool's lines, or a JSON object that has them as rows. What neither a line nor the object says of context, tp
    and hardware, the arguments say.

    Raises StepFileError.
    """
    try:
        text = path.read_text()
    except OSError as e:
        raise StepFileError(
            f"{path}: {e.strerror}; name a file of `python -m benchmark.steps --json`"
        ) from None
    try:
        whole = json.loads(text)
        about, rows = (whole, whole["rows"]) if "rows" in whole else ({}, [whole])
    except json.JSONDecodeError:
        about, rows = {}, _lines(path, text)
    steps, about = [], dict(context=context, tp=tp, hardware=hardware) | about
    for row in rows:
        try:
            where = {name: row.get(name, value) for name, value in about.items() if name in STEP_PLACE}
            kind, rows_of_one = _kind(row["name"])
            for requests, passes in row["step_ms"].items():
                ms = statistics.median(passes)
                steps.append(Step(kind, rows_of_one, int(requests), ms, **where))
        except (KeyError, ValueError, TypeError, AttributeError) as e:
            raise StepFileError(
                f"{path}: a row that is none of `python -m benchmark.steps --json` ({e}); remove it"
            ) from None
    return steps


def _lines(path: Path, text: str) -> list[dict]:
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as e:
        raise StepFileError(f"{path}: {e}; name a file of `python -m benchmark.steps --json`") from None


def _kind(name: str) -> tuple[str, int]:
    """'tree, 16 rows' -> ('tree', 16)."""
    for start, kind in KINDS.items():
        if name.startswith(start):
            return kind, 1 if kind == "plain" else int(name.split(", ")[1].split()[0])
    raise ValueError(f"name {name!r}")
