"""What the recipe prints: one line per event with the seconds since its start, and a progress bar on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
# Child processes count from their parent's start.
STARTED = float(os.environ.setdefault("TRAIN_DEMO_STARTED", str(time.time())))


def elapsed() -> float:
    """Seconds since the recipe started."""
    return time.time() - STARTED


def say(message: str) -> None:
    console.print(f"[{elapsed():6.1f} s] {message}", markup=False)


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that moves a bar to the given count."""
    if not console.is_terminal:
        yield lambda done: None
        return
    with Progress(console=console) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.update(task, completed=done)
