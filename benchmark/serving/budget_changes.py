"""Many budget changes under a constant load: does any accepted request get lost, does anything crash?

    .venv/bin/python benchmark/serving/budget_changes.py [--changes 20] [--streams 2] [--json FILE]

Installs the unit with the demo pair in a systemd of its own (test/support/systemd.py says what that needs) and changes
budget and cap by `set-budget` while streams run. Prints what became of every request and the seconds of each change;
exits 1 where a request was lost, a change failed or systemd had to restart anything.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test"))

from support.servers import Load  # noqa: E402
from support.service import UNIT, Service  # noqa: E402
from support.systemd import PrivateSystemd, why_not  # noqa: E402

SETTINGS = [(15, 8), (3, 2), (31, 8), (7, 4), (64, 8), (1, 1), (15, 1), (31, 4)]
console = Console(soft_wrap=True, highlight=False)


def main(
    changes: Annotated[int, typer.Option(min=1)] = 20,
    streams: Annotated[int, typer.Option(min=1, max=8, help="requests at a time")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of a request")] = 96,
    json_file: Annotated[Path | None, typer.Option("--json", help="the figures as JSON")] = None,
) -> None:
    """Changes the settings under load and counts."""
    if reason := why_not():
        console.print(f"error: a systemd of our own {reason}")
        raise typer.Exit(2)
    with tempfile.TemporaryDirectory() as folder:
        systemd = PrivateSystemd(Path(folder) / "log")
        try:
            figures = run(Service(systemd), changes, streams, tokens)
        finally:
            systemd.close()
    console.print_json(data=figures)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    bad = figures["lost"] or figures["failed"] or figures["restarts_by_systemd"] or figures["tracebacks"]
    raise typer.Exit(1 if bad else 0)


def run(service: Service, changes: int, streams: int, tokens: int) -> dict:
    load, seconds, failed = Load(service.base, streams, tokens), [], []
    try:
        for i in range(changes):
            budget, cap = SETTINGS[i % len(SETTINGS)]
            done = service.set_budget("--budget", str(budget), "--cap", str(cap))
            said = done.stdout.strip() or done.stderr.strip()
            console.print(f"{i + 1}/{changes} {said}; {dict(load.outcomes)}")
            if done.returncode:
                failed.append(said)
            else:
                seconds.append(int(said.rpartition("after ")[2].split()[0]))
    finally:
        load.stop()
    return dict(
        changes=changes,
        failed=failed,
        complete=load.outcomes["complete"],
        refused=load.outcomes["refused"],
        lost=load.lost,
        restarts_by_systemd=int(service.show("NRestarts")),
        tracebacks=service.systemd.journal(UNIT).count("Traceback"),
        seconds_median=statistics.median(seconds) if seconds else None,
        seconds_max=max(seconds, default=None),
    )


if __name__ == "__main__":
    typer.run(main)
