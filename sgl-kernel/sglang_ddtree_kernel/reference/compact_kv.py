"""Specification of `compact_kv`."""

from __future__ import annotations

import torch


def compact_kv(pools: list[torch.Tensor], dst: torch.Tensor, src: torch.Tensor) -> None:
    """pools: [slots, ...] each, changed in place; dst, src int64 [M]."""
    for pool in pools:
        pool[dst] = pool[src]  # indexing copies, so every read precedes the writes
