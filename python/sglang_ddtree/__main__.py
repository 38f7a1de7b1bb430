"""Command line of the plugin: `python -m sglang_ddtree`. Each command has a file of its own in `operate/`."""

from __future__ import annotations

import typer

from sglang_ddtree.operate.doctor import doctor
from sglang_ddtree.operate.fit_markov import fit_markov
from sglang_ddtree.operate.set_budget import set_budget
from sglang_ddtree.operate.sweep import sweep

app = typer.Typer(
    help="Tools around DDTREE, the tree-speculative algorithm.",
    add_completion=False,
    rich_markup_mode=None,  # errors of the command line in one line, not in a box
    pretty_exceptions_enable=False,
)
app.command()(doctor)
app.command()(fit_markov)
app.command()(set_budget)
app.command()(sweep)

if __name__ == "__main__":
    app(prog_name="python -m sglang_ddtree")
