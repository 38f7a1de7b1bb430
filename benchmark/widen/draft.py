"""The wide drafter: every tensor of a DFlash checkpoint from those of the small one, and its bigram factors."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from benchmark.widen.rules import grouped_heads, partition, sources, tile
from benchmark.widen.tensors import FAINT, Beside, Builder, Split, WideModel

if TYPE_CHECKING:
    from benchmark.widen.shapes import SmallPair, Widening


def wide_draft(pair: SmallPair, widening: Widening) -> WideModel:
    """Raises ValueError, naming the dimension, if the wide shape is no multiple of the small one."""
    small, wide, weights = pair.draft, widening.draft, pair.draft_weights
    device = weights["fc.weight"].device
    build = Builder(weights, "draft.")

    hidden = tile("hidden", small.hidden, wide.hidden, device)
    ffn = tile("ffn", small.ffn, wide.ffn, device)
    heads, kv_heads = grouped_heads(small.heads, small.kv_heads, wide.heads, wide.kv_heads, device)
    head_entries, kv_entries = heads.blocks(small.head_dim), kv_heads.blocks(small.head_dim)

    # Each wide feature is one of the small features; one that comes several times counts in shares.
    slots = feature_slots(pair, widening)
    shares = {slot: iter(partition(uses)) for slot, uses in Counter(slots).items()}
    fc = weights["fc.weight"].split(small.hidden, dim=1)
    build.tensors["fc.weight"] = Beside(
        [
            Split(f"draft.fc.{place}", fc[slot], hidden.small, hidden, next(shares[slot]))
            for place, slot in enumerate(slots)
        ]
    )
    build.copy("hidden_norm.weight", "hidden_norm.weight", hidden.small)
    for layer, source in enumerate(sources(widening.draft_placed, wide.layers)):
        p, s = f"layers.{layer}.", f"layers.{source}."
        out = 1.0 if layer in widening.draft_placed else FAINT
        build.attention(p, s, head_entries.small, kv_entries, head_entries, hidden, out)
        build.norms_and_mlp(p, s, hidden, ffn, out)
    build.copy("norm.weight", "norm.weight", hidden.small)
    return WideModel(build.tensors)


def feature_slots(pair: SmallPair, widening: Widening) -> list[int]:
    """For each wide feature, which of the small drafter's features it carries: that of the last small layer placed at
    or before its layer. Raises ValueError if the small drafter does not read that one, or reads one that is missing."""
    wanted, slots = pair.draft.target_layers, []
    for layer in widening.draft.target_layers:
        source = sum(at <= layer for at in widening.placed) - 1
        if source not in wanted:
            raise ValueError(
                f"target_layers: wide layer {layer} gives the output of small layer {source}, not one of {wanted}"
            )
        slots.append(wanted.index(source))
    if missing := set(range(len(wanted))) - set(slots):
        raise ValueError(f"target_layers: no wide layer gives {sorted(wanted[slot] for slot in missing)}")
    return slots


def wide_factors(factors: torch.Tensor, vocab: int) -> torch.Tensor:
    """Bigram factors [V, R] for more tokens: zeros, so that a padding id neither favours nor is favoured."""
    return F.pad(factors, (0, 0, 0, vocab - len(factors)))
