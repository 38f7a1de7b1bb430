"""The small pair as it is read, and the shapes it is widened to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmark.steps import shapes as real
from scripts.train_demo.shapes import DraftShape, TargetShape

MODELS = Path(__file__).resolve().parents[2] / "models"
TARGET, DRAFT = MODELS / "demo-target", MODELS / "demo-draft"
SMALL = DraftShape.from_config(json.loads((DRAFT / "config.json").read_text()))  # its mask token and block


@dataclass
class SmallPair:
    """The shipped pair on one device, weights in bf16 as stored."""

    target: TargetShape
    draft: DraftShape
    target_weights: dict[str, torch.Tensor]
    draft_weights: dict[str, torch.Tensor]

    @classmethod
    def load(cls, device: torch.device | str = "cpu") -> SmallPair:
        def weights(folder: Path) -> dict[str, torch.Tensor]:
            files = sorted(folder.glob("model*.safetensors"))
            return {k: v for f in files for k, v in load_file(f, device=str(device)).items()}

        draft = DraftShape.from_config(json.loads((DRAFT / "config.json").read_text()))
        target = TargetShape.from_config(json.loads((TARGET / "config.json").read_text()), draft.mask)
        return cls(target, draft, weights(TARGET), weights(DRAFT))

    def digest(self) -> str:
        """SHA-256 over all weights of both models: which pair this is."""
        digest = hashlib.sha256()
        for weights in (self.target_weights, self.draft_weights):
            for name in sorted(weights):
                digest.update(name.encode() + weights[name].cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Widening:
    """A wide shape, and where in its depth the small layers stand."""

    target: TargetShape
    draft: DraftShape
    placed: tuple[int, ...]  # wide index of each small target layer
    draft_placed: tuple[int, ...]


def _widening(target: TargetShape, draft: DraftShape, **placed: tuple[int, ...]) -> Widening:
    """With the small pair's mask token and block: they are part of what it computes."""
    target = replace(target, first_reserved=SMALL.mask)
    return Widening(target, replace(draft, mask=SMALL.mask, block=SMALL.block), **placed)


WIDENINGS = {
    # Small enough for a test on two cores; every dimension grows, by factors of 2 and 3.
    "mid": _widening(
        TargetShape(
            vocab=6144,
            hidden=768,
            ffn=1088,
            layers=12,
            gdn_key_heads=4,
            gdn_value_heads=12,
            heads=8,
            kv_heads=2,
        ),
        DraftShape(
            vocab=6144,
            hidden=768,
            ffn=1088,
            layers=4,
            heads=16,
            kv_heads=4,
            target_layers=(1, 3, 4, 6, 9),
            target_depth=12,
        ),
        placed=(0, 1, 2, 3, 5, 6, 8, 11),
        draft_placed=(0, 1, 3),
    ),
    # Features of layers 1, 16, 31, 46, 61 as in the published drafter: those of small layers 1, 3, 3, 5, 6.
    "27b": _widening(
        TargetShape.from_config(real.TARGET, SMALL.mask),
        DraftShape.from_config(real.DRAFT),
        placed=(0, 1, 2, 3, 32, 33, 50, 63),
        draft_placed=(0, 2, 4),
    ),
}
