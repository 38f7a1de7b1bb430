"""One page of what a sweep measured.

    python -m benchmark.report RUNS.jsonl [MORE.jsonl] --out report.html [--steps FILE]

Writes a self-contained HTML page and its figures as PNG files beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmark.cost_model import H200_STEPS
from benchmark.report.page import Pictures, render
from benchmark.report.series import BENCH, groups
from benchmark.serving import records
from benchmark.step_files import StepFileError, read_steps

console = Console(highlight=False, soft_wrap=True)


def main(
    runs: Annotated[list[Path], typer.Argument(help="files of benchmark.serving.sweep")],
    out: Annotated[Path, typer.Option(help="the page")] = Path("report.html"),
    steps: Annotated[Path, typer.Option(help="step times at the 27B shape")] = H200_STEPS,
) -> None:
    """Draws the figures and writes the page."""
    try:
        found = [run for path in runs for run in records.read(path)]
        if not any(run.client == BENCH for run in found):
            raise records.RecordError(
                f"{', '.join(map(str, runs))}: no run there; make one with python -m benchmark.serving.sweep"
            )
        measured = read_steps(steps)
    except (records.RecordError, StepFileError) as e:
        console.print("error:", str(e), markup=False)
        raise typer.Exit(2) from None
    pictures = Pictures(out)
    command = f"python -m benchmark.report {' '.join(p.name for p in runs)} --out {out.name}"
    out.write_text(render(groups(found), measured, command, pictures))
    console.print(f"{out}: {len(found)} runs, {len(pictures.paths)} figures")


if __name__ == "__main__":
    typer.run(main)
