"""Move the KV of accepted rows to the slots of the committed sequence."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel.reference import compact_kv as reference


def compact_kv(pools: list[torch.Tensor], dst: torch.Tensor, src: torch.Tensor) -> None:
    """pool[dst] = pool[src] in place for every pool, as if all rows were read before any is written.

    Args:
        pools: each [slots, ...], any dtype; shapes behind the first dimension may differ.
        dst: int64 [M], destination slots, distinct except among moves with dst == src.
        src: int64 [M], source slots.

    Raises:
        ValueError: `dst` or `src` is not int64 [M], or their lengths differ.
    """
    if dst.ndim != 1 or dst.dtype != torch.int64:
        raise ValueError(f"dst must be int64 [M], got {dst.dtype} {list(dst.shape)}")
    if src.shape != dst.shape or src.dtype != torch.int64:
        raise ValueError(f"src must be int64 {list(dst.shape)} as dst is, got {src.dtype} {list(src.shape)}")
    reference.compact_kv(pools, dst, src)
