"""Command line of the recipe: `run` makes the pair, `evaluate` measures an exported one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from scripts.train_demo.acceptance import GRID, MAIN
from scripts.train_demo.plan import Plan
from scripts.train_demo.report import console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
ROOT = Path(__file__).resolve().parents[2]


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="folder for demo-target/, demo-draft/ and figures.json")],
    work: Annotated[Path, typer.Option(help="caches and checkpoints; a second run with it resumes")],
    plan: Annotated[str, typer.Option(help="full: 430 s on one H200; smoke: tiny, on any machine")] = "full",
):
    """Data, target, drafter, evaluation, export."""
    from scripts.train_demo.recipe import Recipe, set_caches

    set_caches(work.resolve())
    Recipe(Plan.named(plan), work.resolve()).run(out / "demo-target", out / "demo-draft")


@app.command()
def evaluate(
    models: Annotated[Path, typer.Option(help="folder with demo-target/ and demo-draft/")] = ROOT / "models",
    prompts_file: Annotated[Path | None, typer.Option("--prompts", help="heldout_prompts.json")] = None,
    count: Annotated[int, typer.Option(min=1, help="so many of the prompts")] = 64,
    grid: Annotated[bool, typer.Option(help="caps 4, 8, 16, with and without spine")] = False,
    heldout_files: Annotated[int, typer.Option(min=0, help="so many held-out files for bits a byte")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="all figures")] = None,
):
    """Acceptance on held-out prompts: bf16 on a GPU, fp32 on a CPU."""
    from scripts.train_demo import kernels
    from scripts.train_demo.evaluate import evaluate_pair, print_table

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        kernels.prepare()
    path = prompts_file or models / "heldout_prompts.json"
    for needed in (models / "demo-target/config.json", models / "demo-draft/config.json", path):
        if not needed.exists():
            raise SystemExit(f"{needed}: no such file; check --models and --prompts, `run` writes all three")
    saved = json.loads(path.read_text())
    figures = evaluate_pair(
        models / "demo-target",
        models / "demo-draft",
        saved["prompts"][:count],
        GRID if grid else MAIN,
        saved["new_tokens"],
        device,
        heldout_files,
    )
    print_table(figures)
    for name in ("reserved_margin", "heldout_bits_per_byte"):
        if name in figures:
            console.print(f"{name}: {figures[name]}")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    app()
