"""The head's rows for ids beyond the small vocabulary.

A wide vocabulary must not change the probabilities of the small one, so the padding's logits have to stay far below
the best one at every state that the target or the drafter can reach. The reserved ids do not serve: some states'
product with their mean row is hardly below zero. `fit_padding` finds a direction that every state points away from.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from benchmark.widen.shapes import MODELS, SmallPair

FILE = Path(__file__).with_name("padding.safetensors")
MARGIN = 30.0  # nats below the best logit: 244,000 such ids together move the log-sum-exp by less than 3e-8


def load_padding(pair: SmallPair) -> torch.Tensor:
    """bf16 [2, small hidden] on the pair's device. Raises ValueError if it was fitted for other weights."""
    with safe_open(FILE, "pt") as f:
        fitted_for, rows = f.metadata()["pair"], f.get_tensor("padding")
    if fitted_for != pair.digest():
        raise ValueError(
            f"{FILE}: fitted for another pair than the one in {MODELS}; "
            "fit it with: python -m benchmark.widen.fit_padding"
        )
    return rows.to(pair.draft_weights["fc.weight"].device)
