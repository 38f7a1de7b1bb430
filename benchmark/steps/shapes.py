"""Configs of the Qwen3.6-27B shape and of its published drafter's shape, for engines with dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.train_demo.shapes import DraftShape, TargetShape

VOCAB, CONTEXT = 248_320, 262_144
TARGET = TargetShape(
    vocab=VOCAB,
    hidden=5120,
    ffn=17_408,
    layers=64,
    gdn_key_heads=16,
    gdn_value_heads=48,
    heads=24,
    kv_heads=4,
).config() | dict(max_position_embeddings=CONTEXT, eos_token_id=248_044)
DRAFT = DraftShape(
    vocab=VOCAB,
    mask=248_070,
    hidden=5120,
    ffn=17_408,
    layers=5,
    heads=32,
    kv_heads=8,
    target_layers=(1, 16, 31, 46, 61),
    target_depth=64,
).config() | dict(max_position_embeddings=CONTEXT)


def write_configs(folder: Path) -> tuple[Path, Path]:
    """Writes both configs below `folder`; returns the two model folders."""
    paths = []
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        paths.append(path)
    return tuple(paths)
