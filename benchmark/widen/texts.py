"""Code that the small pair was not trained on."""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer

from benchmark.serving.prompts import heldout_prompts
from benchmark.widen.shapes import MODELS, TARGET
from scripts.train_demo.evaluate import prompt_ids

SOURCES = ("python", "sgl-kernel", "scripts")


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


def heldout_ids() -> torch.Tensor:
    """The held-out prompts, int64 [64, P]."""
    return prompt_ids([{"text": text} for text in heldout_prompts()], tokenizer())


def project_ids(length: int, count: int) -> torch.Tensor:
    """int64 [count, length]: windows of this project's own sources."""
    files = sorted(f for part in SOURCES for f in (MODELS.parent / part).rglob("*.py"))
    encode = tokenizer().encode
    ids = [i for f in files for i in encode(f.read_text()).ids]
    starts = random.Random(0).sample(range(len(ids) - length), count)
    return torch.tensor([ids[s : s + length] for s in starts])
