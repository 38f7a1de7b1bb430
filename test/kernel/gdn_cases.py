"""Random GatedDeltaNet layers and draft trees for the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang_ddtree_kernel.tree_types import DraftTree
from tree_cases import chain_tree, random_tree, tree_from_parents


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of one layer; V and K differ so that a swap of the two shows."""

    H: int = 2
    HV: int = 6
    K: int = 16
    V: int = 24

    @property
    def dim(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V


SMALL = Heads()
DEMO = Heads(2, 6, 128, 128)


def star_tree(bs: int, num_rows: int) -> DraftTree:
    return tree_from_parents([[-1] + [0] * (num_rows - 1)] * bs, [[0] * num_rows] * bs)


TREES = {
    "root-only": lambda: chain_tree(2, 1),
    "chain-17": lambda: chain_tree(2, 17),
    "star-16": lambda: star_tree(2, 16),
    "random-16": lambda: random_tree(0, 2, 16, 5),
    "random-31-invalid": lambda: random_tree(1, 3, 31, 15, invalid=7),
    "random-65": lambda: random_tree(2, 2, 65, 15),
    "random-130-invalid": lambda: random_tree(3, 1, 130, 12, invalid=20),
}


class Draw:
    """A seeded source of tensors."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32):
        self.rng, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self.rng, dtype=torch.float64).to(dtype or self.dtype)

    def gates(self, *lead: int, HV: int, span: float = 1.0) -> tuple[torch.Tensor, ...]:
        """a, b [*lead, HV]; A_log, dt_bias [HV]. A wide `span` gives decays and betas near 0 and near 1."""
        a, b = self.normal(*lead, HV) * span, self.normal(*lead, HV) * span
        return a, b, self.normal(HV), self.normal(HV)
