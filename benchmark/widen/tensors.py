"""Wide tensors, made when asked for, whole or in parts: rows and columns as a tensor-parallel rank wants them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from benchmark.widen.rules import Replicas, partition, turns

ALL = slice(None)
ROWS_AT_ONCE = 4096  # of a matrix; the temporaries of so many rows stay below 0.5 GB at the 27B shape
# What an added layer's output projections are multiplied by. Its weights stay ordinary numbers and cost what any
# weights cost, and what it adds to the residual, 1e-12 of a real layer's output, is lost in the rounding of fp32.
FAINT = 2.0**-40


class WideTensor(Protocol):
    shape: tuple[int, ...]

    def part(self, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """These rows and columns (of a matrix; a vector ignores `columns`), bf16, on the small tensor's device."""


class Copied:
    """Entries of a small tensor, repeated: embeddings, norms, convolutions, per-head vectors."""

    def __init__(
        self, small: torch.Tensor, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ):
        """rows, columns: int64, the small index of every wide one; None for a tensor that stays as it is."""
        self.small = small
        self.rows = torch.arange(len(small), device=small.device) if rows is None else rows
        self.columns = columns
        self.shape = (len(self.rows), *small.shape[1:])
        if columns is not None:
            self.shape = (len(self.rows), len(columns))

    def part(self, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        out = self.small[self.rows[rows]]
        return out if self.columns is None else out[:, self.columns[columns]]


class Split:
    """A matrix that reads replicas.

    W'[o, j] = W[row(o), column(j)] * share[(replica(j) + turn(o, column(j))) mod n], n replicas of each column.
    """

    def __init__(
        self, name: str, small: torch.Tensor, rows: torch.Tensor, columns: Replicas, scale: float = 1.0
    ):
        """small: bf16 [r, c]. rows: int64, the small row of every wide one. scale: a power of two on all entries.
        name: decides the turns, so that matrices of equal content differ."""
        self.small, self.rows, self.columns = small, rows, columns
        self.key = zlib.crc32(name.encode())
        self.shape = (len(rows), len(columns.small))
        shares = torch.tensor(partition(columns.count), dtype=torch.float32, device=small.device)
        rotated = torch.stack([shares.roll(-replica) for replica in range(columns.count)]) * scale
        self.share = rotated.to(small.dtype)  # [replica, turn], exact: powers of two

    def part(self, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        n, small_columns = len(self.share), torch.arange(self.small.shape[1], device=self.small.device)
        wide_rows = torch.arange(self.shape[0], device=self.small.device)[rows]
        places = self.columns.place[columns]
        whole = self.columns.tiled and len(places) == self.shape[1]
        out = self.small.new_empty(len(wide_rows), len(places))
        for chunk, into in zip(wide_rows.split(ROWS_AT_ONCE), out.split(ROWS_AT_ONCE), strict=True):
            turn = turns(self.key, chunk, small_columns, n)
            small = self.small[self.rows[chunk]]
            entries = into if whole else into.new_empty(len(chunk), self.shape[1])
            by_replica = entries.view(len(chunk), n, -1)
            for replica, share in enumerate(self.share):
                torch.mul(small, share.take(turn), out=by_replica[:, replica])
            if not whole:
                into.copy_(entries[:, places])
        return out


class Beside:
    """Matrices of equal height, one after another along the columns."""

    def __init__(self, matrices: list[Split]):
        self.matrices = matrices
        self.shape = (matrices[0].shape[0], sum(m.shape[1] for m in matrices))

    def part(self, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        begin, end, step = columns.indices(self.shape[1])
        if step != 1:
            raise ValueError(f"columns: a step of {step} is not supported")
        parts, at = [], 0
        for m in self.matrices:
            low, high = max(begin - at, 0), min(end - at, m.shape[1])
            if low < high:
                parts.append(m.part(rows, slice(low, high)))
            at += m.shape[1]
        return torch.cat(parts, dim=1)


class WideModel(Mapping):
    """All tensors of a wide checkpoint by name; reading one makes it, and nothing keeps it."""

    def __init__(self, tensors: dict[str, WideTensor]):
        self.tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name].part()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        return self.tensors[name].part(rows, columns)

    def layer(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose name begins with `prefix`, without it."""
        return {name.removeprefix(prefix): self[name] for name in self if name.startswith(prefix)}


@dataclass
class Builder:
    """Gathers a wide model's tensors from the small one's weights.

    prefix: before the names from which turns are drawn, or layers of two models would share theirs.
    """

    weights: dict[str, torch.Tensor]
    prefix: str = ""
    tensors: dict = field(default_factory=dict)

    def split(self, name: str, source: str, rows, columns, scale: float = 1.0) -> None:
        self.tensors[name] = Split(self.prefix + name, self.weights[source], rows, columns, scale)

    def copy(self, name: str, source: str, rows=None) -> None:
        self.tensors[name] = Copied(self.weights[source], rows)

    def attention(self, p: str, s: str, queries, kv, heads, hidden, scale: float) -> None:
        """p, s: prefixes of the wide and the small layer's names; queries: rows of q_proj; the rest: replicas."""
        p, s = p + "self_attn.", s + "self_attn."
        self.split(p + "q_proj.weight", s + "q_proj.weight", queries, hidden)
        self.split(p + "k_proj.weight", s + "k_proj.weight", kv.small, hidden)
        self.split(p + "v_proj.weight", s + "v_proj.weight", kv.small, hidden)
        self.copy(p + "q_norm.weight", s + "q_norm.weight")
        self.copy(p + "k_norm.weight", s + "k_norm.weight")
        self.split(p + "o_proj.weight", s + "o_proj.weight", hidden.small, heads, scale)

    def norms_and_mlp(self, p: str, s: str, hidden, ffn, scale: float) -> None:
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            self.copy(p + norm, s + norm, hidden.small)
        self.split(p + "mlp.gate_proj.weight", s + "mlp.gate_proj.weight", ffn.small, hidden)
        self.split(p + "mlp.up_proj.weight", s + "mlp.up_proj.weight", ffn.small, hidden)
        self.split(p + "mlp.down_proj.weight", s + "mlp.down_proj.weight", hidden.small, ffn, scale)
