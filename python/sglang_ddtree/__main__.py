"""Command line of the plugin: `python -m sglang_ddtree`."""

from __future__ import annotations

import typer
from rich.console import Console

app = typer.Typer(help="Tools around DDTREE, the tree-speculative algorithm.", add_completion=False)


@app.callback()
def main() -> None:
    """Keeps `doctor` a subcommand while it is the only one."""


@app.command()
def doctor() -> None:
    """Check every hook and shim against the installed SGLang; say what is wrong, a line each, and exit 1."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_ddtree import hooks

    console = Console(soft_wrap=True)
    problems = hooks.check(applied=True)
    for line in problems:
        console.print(f"[red]problem[/red] {line}", highlight=False)
    where = "CPU (no GPU found)" if hooks.on_cpu() else "GPU"
    verdict = f"{len(problems)} problems" if problems else "all as pinned"
    console.print(
        f"{len(hooks.contacts())} contacts with sglang {hooks.SGLANG_VERSION} on {where}: {verdict}",
        highlight=False,
    )
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    app(prog_name="python -m sglang_ddtree")
