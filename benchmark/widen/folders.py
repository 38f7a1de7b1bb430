"""Model folders without weights: config, tokenizer, and one file that says what the loader is to make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from sglang_ddtree.draft import markov

from benchmark.widen.draft import wide_draft, wide_factors
from benchmark.widen.padding import load_padding
from benchmark.widen.shapes import DRAFT, TARGET, WIDENINGS, SmallPair
from benchmark.widen.target import wide_target
from benchmark.widen.tensors import WideModel

RECIPE = "widen.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_folders(shape: str, folder: Path) -> tuple[Path, Path]:
    """Writes `target` and `draft` below `folder`; returns both. shape: a key of WIDENINGS."""
    widening, pair = WIDENINGS[shape], SmallPair.load()
    load_padding(pair)  # another pair than the fitted one is refused here, not inside an engine's start
    paths = []
    for role, model in (("target", widening.target), ("draft", widening.draft)):
        path = folder / role
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(model.config(), indent=1) + "\n")
        (path / RECIPE).write_text(json.dumps({"shape": shape, "role": role}) + "\n")
        paths.append(path)
    target, draft = paths
    for name in TOKENIZER:
        shutil.copyfile(TARGET / name, target / name)
    if (DRAFT / markov.FILE_NAME).exists():
        factors = markov.read(DRAFT / markov.FILE_NAME, pair.target.vocab)
        wide = (wide_factors(f, widening.target.vocab) for f in factors)
        markov.save(draft / markov.FILE_NAME, *wide, {"widened to": shape})
    return target, draft


def wide_model(shape: str, role: str, device: torch.device | str) -> WideModel:
    """The tensors of one of the two models. role: target or draft."""
    pair = SmallPair.load(device)
    if role == "draft":
        return wide_draft(pair, WIDENINGS[shape])
    return wide_target(pair, WIDENINGS[shape], load_padding(pair))


def open_folder(folder: str | Path, device: torch.device | str) -> WideModel:
    """The tensors of a folder made by `write_folders`. Raises ValueError for any other folder."""
    path = Path(folder) / RECIPE
    if not path.exists():
        raise ValueError(
            f"{path} is missing; make the folder with: python -m benchmark.widen --shape 27b --out DIR"
        )
    recipe = json.loads(path.read_text())
    return wide_model(recipe["shape"], recipe["role"], device)
