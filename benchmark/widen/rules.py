"""How a small matrix becomes a wide one of the same function: replicas, and shares that sum to exactly one.

A wide vector holds every entry of the small one several times. A wide matrix that reads it must count each entry once,
so the entries of a row that meet the replicas of one small column are shares of the small entry. The shares are
powers of two, hence exact in bf16, and which replica gets which share differs from row to row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

WORD = 0xFFFFFFFF


def partition(n: int) -> list[float]:
    """n powers of two that sum to exactly 1, not all equal for n > 2: each half goes to unequal numbers of shares."""
    if n == 1:
        return [1.0]
    fewer = max(1, (n - 1) // 2)
    return [share / 2 for share in partition(fewer) + partition(n - fewer)]


def turns(key: int, rows: torch.Tensor, columns: torch.Tensor, n: int) -> torch.Tensor:
    """By how much the shares are rotated: pseudo-random in [0, n), int64 [len(rows), len(columns)].

    A function of its arguments alone, so that any part of a matrix can be made anywhere. rows and columns are
    non-negative int64; the multipliers are odd, their bits otherwise arbitrary.
    """
    x = (rows[:, None] * 0x2545F491 + columns * 0x3C6EF35F + key) & WORD
    x = ((x ^ (x >> 15)) * 0x1B873593) & WORD
    return (x ^ (x >> 13)) % n


@dataclass
class Replicas:
    """Every wide index is a replica of a small one; all small indices have equally many."""

    small: torch.Tensor  # int64 [wide]: the small index
    count: int = field(init=False)  # replicas of each small index
    place: torch.Tensor = field(
        init=False
    )  # int64 [wide]: where in [replica, small index] each wide index stands
    tiled: bool = field(init=False)  # every wide index stands at its own place

    def __post_init__(self):
        found = torch.bincount(self.small)
        if not bool((found == found[0]).all()):
            raise ValueError(f"replicas per index are uneven: {found.min()} to {found.max()}")
        self.count = int(found[0])
        wide = torch.arange(len(self.small), device=self.small.device)
        self.place = torch.empty_like(wide)
        self.place[torch.argsort(self.small, stable=True)] = (
            wide % self.count * len(found) + wide // self.count
        )
        self.tiled = bool((self.place == wide).all())

    def blocks(self, size: int) -> Replicas:
        """Replicas of the entries, where these are replicas of blocks (heads) of `size` entries."""
        entries = torch.arange(size, device=self.small.device)
        return Replicas((self.small[:, None] * size + entries).flatten())


def tile(what: str, small: int, wide: int, device: torch.device) -> Replicas:
    """Wide index j is a replica of j mod small. Raises ValueError unless wide is a multiple of small."""
    if wide % small:
        raise ValueError(
            f"{what}: {wide} is not a multiple of the small pair's {small}; change it in shapes.py"
        )
    return Replicas(torch.arange(wide, device=device) % small)


def grouped_heads(
    heads: int, kv_heads: int, wide_heads: int, wide_kv_heads: int, device: torch.device
) -> tuple[Replicas, Replicas]:
    """Query and KV heads of grouped-query attention.

    KV heads are tiled; a query head is a replica of one that reads the small KV head of which its own is a replica.
    Raises ValueError unless the groups fit.
    """
    kv = tile("kv_heads", kv_heads, wide_kv_heads, device)
    group, wide_group = heads // kv_heads, wide_heads // wide_kv_heads
    if wide_group % group:
        raise ValueError(
            f"heads: {wide_group} per KV head are not a multiple of the small pair's {group}; change shapes.py"
        )
    head = torch.arange(wide_heads, device=device)
    return Replicas(kv.small[head // wide_group] * group + head % wide_group % group), kv


def sources(placed: tuple[int, ...], layers: int, interval: int = 1) -> list[int]:
    """The small layer behind every wide layer: a placed one itself, an added one the last placed before of its type.

    placed: the wide index of every small layer. A layer's type is whether it is the last of `interval`.
    Raises ValueError if a small layer stands at a wide index of another type, or an added one has none before it.
    """

    def is_last(layer: int) -> bool:
        return layer % interval == interval - 1

    at, found = {wide: small for small, wide in enumerate(placed)}, []
    last: dict[bool, int] = {}
    for layer in range(layers):
        kind = is_last(layer)
        if layer in at:
            if is_last(at[layer]) != kind:
                raise ValueError(f"placed: small layer {at[layer]} at {layer} is of another type")
            last[kind] = at[layer]
        elif kind not in last:
            raise ValueError(f"placed: added layer {layer} has no placed layer of its type before it")
        found.append(last[kind])
    return found
