"""Writes the model folders of the widened demo pair.

    python -m benchmark.widen --shape 27b --out DIR

DIR/target and DIR/draft hold configs, the tokenizer, the bigram factors, and no weights: `benchmark.widen.loader`
makes them. `python -m benchmark.widen.verify` proves the widening, `python -m benchmark.widen.serve` serves it,
`python -m benchmark.widen.fit_padding` fits the padding of the vocabulary after the demo pair was trained again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmark.widen.folders import write_folders
from benchmark.widen.shapes import WIDENINGS


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(WIDENINGS)}")],
    out: Annotated[Path, typer.Option(help="where the folders target and draft go")],
):
    if shape not in WIDENINGS:
        raise typer.BadParameter(f"{shape!r} is not one of {', '.join(WIDENINGS)}", param_hint="--shape")
    for path in write_folders(shape, out):
        print(path)


if __name__ == "__main__":
    typer.run(main)
