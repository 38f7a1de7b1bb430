"""How the commands speak: results on stdout, one line of refusal on stderr."""

from __future__ import annotations

import typer
from rich.console import Console

console = Console(soft_wrap=True, highlight=False)
_errors = Console(stderr=True, soft_wrap=True, highlight=False)


def refuse(error: Exception) -> typer.Exit:
    """Prints the error in one line; raise what it returns."""
    _errors.print("error:", style="red", end=" ")
    _errors.print(str(error), markup=False)
    return typer.Exit(1)
