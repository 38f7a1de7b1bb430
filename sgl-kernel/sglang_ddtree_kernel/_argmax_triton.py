"""Triton kernels of `greedy_tokens`: a row is read by several programs at once, and a second launch merges them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _first_greatest(x, column):
    """The greatest of x and the least column that holds it; a NaN counts as infinite, so that it shows."""
    x = x.to(tl.float32)
    greatest = tl.max(tl.where(x == x, x, float("inf")))
    holds = (x == greatest) | (x != x)  # there is a NaN only where the greatest is infinite
    return greatest, tl.min(tl.where(holds, column, 0x7FFFFFFF))


@triton.jit
def _part_kernel(logits, greatest_out, column_out, vocab, row_stride, BLOCK: tl.constexpr):
    """Greatest logit fp32 [R, parts] of BLOCK columns, and its column int32 [R, parts]."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + column, mask=column < vocab, other=-float("inf"))
    greatest, first = _first_greatest(x, column)
    out = row * tl.num_programs(0) + part
    tl.store(greatest_out + out, greatest)
    tl.store(column_out + out, first)


@triton.jit
def _merge_kernel(greatest, column, tokens_out, parts, PARTS: tl.constexpr):
    """One row of [R, parts]; parts stand in the order of their columns."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    inside = part < parts
    x = tl.load(greatest + row * parts + part, mask=inside, other=-float("inf"))
    first = tl.load(column + row * parts + part, mask=inside, other=0x7FFFFFFF)
    _, token = _first_greatest(x, first)
    tl.store(tokens_out + row, token.to(tl.int64))


def argmax_triton(logits: torch.Tensor, *, block: int = 4096, num_warps: int = 4) -> torch.Tensor:
    """`greedy_tokens` in two launches that read the logits once. block, num_warps: columns and warps of a program."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab = logits.shape
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    if not num_rows:
        return tokens
    parts = triton.cdiv(vocab, block)
    greatest = logits.new_empty(num_rows, parts, dtype=torch.float32)
    column = logits.new_empty(num_rows, parts, dtype=torch.int32)
    _part_kernel[(parts, num_rows)](
        logits, greatest, column, vocab, logits.stride(0), BLOCK=block, num_warps=num_warps
    )
    _merge_kernel[(num_rows,)](
        greatest, column, tokens, parts, PARTS=triton.next_power_of_2(parts), num_warps=1
    )
    return tokens
