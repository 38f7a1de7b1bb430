"""Move the KV of accepted rows to the slots of the committed sequence."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_ddtree_kernel.reference import compact_kv as reference

TILE_BYTES = 32 * 1024  # of a program's registers while all its moves are in flight
MAX_MOVES = 4096  # of which a program can hold the slots and a word each
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class KvPools:
    """The pools of all layers and a device table of their addresses; make it once, outside graph capture."""

    def __init__(self, pools: list[torch.Tensor]):
        self.pools = list(pools)
        for pool in self.pools:
            if pool.numel() and not pool[0].is_contiguous():
                raise ValueError(f"pools must have contiguous rows, got strides {pool.stride()}")
        table = [
            [pool.data_ptr(), pool.stride(0) * pool.itemsize, self._row_bytes(pool)] for pool in self.pools
        ]
        # One word is copied at a time: the widest that every address and width is a multiple of.
        self.word = math.gcd(8, *(number for entry in table for number in entry))
        self.max_row_words = max((entry[2] // self.word for entry in table), default=0)
        device = self.pools[0].device if self.pools else None
        # int64 [pools, 3]: address, bytes from row to row, bytes of a row
        self.table = torch.tensor(table, dtype=torch.int64, device=device)

    @staticmethod
    def _row_bytes(pool: torch.Tensor) -> int:
        return math.prod(pool.shape[1:]) * pool.itemsize


def compact_kv(pools: list[torch.Tensor] | KvPools, dst: torch.Tensor, src: torch.Tensor) -> None:
    """pool[dst] = pool[src] in place for every pool, as if all rows were read before any is written.

    Args:
        pools: each [slots, ...], any dtype; shapes behind the first dimension may differ. A list of CUDA
            tensors has its addresses copied to the device at every call; `KvPools` does it once.
        dst: int64 [M] or [bs, M], destination slots, distinct except among moves with dst == src.
        src: int64, shaped as `dst`, source slots. No move of one request may read what a move of another
            writes; on CUDA, requests then move side by side, which one list of all moves cannot.

    Raises:
        ValueError: `dst` or `src` is not int64, their shapes differ, or (on CUDA) M exceeds 4096.
    """
    if dst.ndim not in (1, 2) or dst.dtype != torch.int64:
        raise ValueError(f"dst must be int64 [M] or [bs, M], got {dst.dtype} {list(dst.shape)}")
    if src.shape != dst.shape or src.dtype != torch.int64:
        raise ValueError(f"src must be int64 {list(dst.shape)} as dst is, got {src.dtype} {list(src.shape)}")
    if dst.is_cuda:
        compact_kv_triton(pools if isinstance(pools, KvPools) else KvPools(pools), dst, src)
    else:
        pools = pools.pools if isinstance(pools, KvPools) else pools
        reference.compact_kv(pools, dst.flatten(), src.flatten())


@triton.jit
def _compact_kernel(
    table, dst, src, num_moves, WORD: tl.constexpr, MOVES: tl.constexpr, COLUMNS: tl.constexpr
):
    """All moves of one request in one block of columns of one pool, which no other program touches."""
    WORD_BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
    entry = table + tl.program_id(1) * 3
    base, pitch, row_bytes = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)) * WORD_BYTES
    if tl.program_id(0) * COLUMNS * WORD_BYTES < row_bytes:
        move = tl.arange(0, MOVES)
        first = tl.program_id(2) * num_moves
        from_slot = tl.load(src + first + move, mask=move < num_moves, other=0)
        to_slot = tl.load(dst + first + move, mask=move < num_moves, other=0)
        real = (from_slot != to_slot)[:, None] & (column < row_bytes)[None, :]
        read = (base + from_slot * pitch)[:, None] + column[None, :]
        write = (base + to_slot * pitch)[:, None] + column[None, :]
        words = tl.load(read.to(tl.pointer_type(WORD)), mask=real)
        tl.debug_barrier()  # a slot may be one move's source and another's destination
        tl.store(write.to(tl.pointer_type(WORD)), words, mask=real)


def compact_kv_triton(pools: KvPools, dst: torch.Tensor, src: torch.Tensor) -> None:
    """`compact_kv` in one launch; a program reads all moves of its request and columns before it writes."""
    bs, num_moves = dst.shape if dst.ndim == 2 else (1, dst.shape[0])
    if num_moves > MAX_MOVES:
        raise ValueError(f"dst must hold at most {MAX_MOVES} moves per request, got {num_moves}")
    if not bs or not num_moves or not pools.max_row_words:
        return
    moves = triton.next_power_of_2(num_moves)
    columns = min(max(TILE_BYTES // (moves * pools.word), 1), triton.next_power_of_2(pools.max_row_words))
    _compact_kernel[(triton.cdiv(pools.max_row_words, columns), len(pools.pools), bs)](
        pools.table,
        dst.contiguous(),
        src.contiguous(),
        num_moves,
        WORD=WORDS[pools.word],
        MOVES=moves,
        COLUMNS=columns,
        num_warps=8,
    )
