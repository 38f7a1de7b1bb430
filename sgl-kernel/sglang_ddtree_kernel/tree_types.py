"""The draft tree as tensors, and its ancestor bit-mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch

WORD_BITS = 64


@dataclass
class DraftTree:
    """A batch of draft trees with N = budget + 1 rows each, on one device.

    Row 0 is the root: the last committed token, whose KV and state are not written yet. Rows are ordered by
    (depth, best first), so parents stand before their children and valid rows before invalid ones. Invalid
    rows (the budget could not be filled) hold token 0 and are their own only ancestor.
    """

    tokens: torch.Tensor  # int64 [bs, N]
    parents: torch.Tensor  # int32 [bs, N], -1 at the root and at invalid rows
    depths: torch.Tensor  # int32 [bs, N], 0 at the root and at invalid rows
    ancestors: torch.Tensor  # int64 [bs, N, ceil(N / 64)], see `pack_ancestors`
    valid_counts: torch.Tensor  # int32 [bs], rows including the root


def num_words(num_rows: int) -> int:
    """64-bit words that hold one bit for each of `num_rows` rows."""
    return (num_rows + WORD_BITS - 1) // WORD_BITS


def ancestor_words(parents: torch.Tensor, horizon: int) -> torch.Tensor:
    """Ancestor bit words int64 [bs, N, ceil(N / 64)] of trees no deeper than `horizon`.

    Args:
        parents: int32 or int64 [bs, N], -1 where a row has no parent.
        horizon: greatest depth of any row; each round doubles how far up a row has looked.
    """
    bs, num_rows = parents.shape
    rows = torch.arange(num_rows, device=parents.device)
    # A row without a parent points at itself, which adds nothing to its words.
    above = torch.where(parents < 0, rows, parents.long())
    word_starts = torch.arange(num_words(num_rows), device=parents.device) * WORD_BITS
    bit = rows[:, None] - word_starts
    own = torch.where((bit >= 0) & (bit < WORD_BITS), torch.ones_like(bit) << bit.clamp(0, WORD_BITS - 1), 0)
    words = own.expand(bs, -1, -1)
    for _ in range(horizon.bit_length()):
        words = words | words.gather(1, above[:, :, None].expand_as(words))
        above = above.gather(1, above)
    return words.contiguous()


def pack_ancestors(mask: torch.Tensor) -> torch.Tensor:
    """Pack bool [bs, N, N] into int64 [bs, N, ceil(N / 64)].

    Bit j % 64 of word j // 64 of row i is mask[i, j]. Bit 63 is the sign bit of its word.
    """
    num_rows = mask.shape[-1]
    padding = num_words(num_rows) * WORD_BITS - num_rows
    bits = torch.nn.functional.pad(mask, (0, padding)).unflatten(-1, (-1, WORD_BITS)).long()
    return (bits << torch.arange(WORD_BITS, device=mask.device)).sum(-1)


def unpack_ancestors(words: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Inverse of `pack_ancestors`: bool [bs, N, N], whose [i, j] says whether row j is i or above it."""
    bits = words[..., None] >> torch.arange(WORD_BITS, device=words.device)
    return (bits & 1).flatten(-2)[..., :num_rows].bool()


def chain_ancestors(bs: int, num_rows: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Words int64 [bs, N, ceil(N / 64)] under which every row sees all rows before it, whatever their branch.

    Only the leaky benchmark mode wants this: it is what a chain verifier does to a tree.
    """
    mask = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril()
    return pack_ancestors(mask.expand(bs, -1, -1))
