"""Products of fp32 tiles on bf16 tensor cores, and the inverse of a unit triangular tile made of them.

PRECISION "bf16x3" takes every fp32 tile as two bf16 ones and three products: 16 bits of mantissa, where tf32
has 10. Others are passed on to `tl.dot`. Tiles kept in memory for later products are kept in two planes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split(x):
    """fp32 x as high + low in bf16; high is cut off, not rounded, which takes one instruction."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def split_tile(x, PRECISION: tl.constexpr):
    """x as the pair that `multiply_split` takes."""
    low = x
    if PRECISION == "bf16x3":
        x, low = split(x)
    return x, low


@triton.jit
def multiply_split(x, x_low, y, y_low, total, PRECISION: tl.constexpr):
    """total + (x + x_low) (y + y_low) without the product of the low parts; unsplit if not "bf16x3"."""
    if PRECISION == "bf16x3":
        # Three sums of their own: a chain of dependent products would cost their latencies one after the other.
        total = tl.dot(x, y, total) + (tl.dot(x_low, y) + tl.dot(x, y_low))
    else:
        total = tl.dot(x, y, total, input_precision=PRECISION)
    return total


@triton.jit
def multiply(x, y, total, PRECISION: tl.constexpr):
    """total + x y of fp32 tiles."""
    x, x_low = split_tile(x, PRECISION)
    y, y_low = split_tile(y, PRECISION)
    return multiply_split(x, x_low, y, y_low, total, PRECISION)


@triton.jit
def store_tile(at, x, low, plane, PRECISION: tl.constexpr):
    tl.store(at, x)
    if PRECISION == "bf16x3":
        tl.store(at + plane, low)


@triton.jit
def load_tile(at, plane, mask, PRECISION: tl.constexpr):
    other = None if mask is None else 0.0
    high = tl.load(at, mask=mask, other=other)
    low = high
    if PRECISION == "bf16x3":
        low = tl.load(at + plane, mask=mask, other=other)
    return high, low


@triton.jit
def unit_lower_inverse(A, B: tl.constexpr, LOG_B: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [B, B], in log2 B merges of neighbouring diagonal blocks.

    [[X, 0], [Y, Z]]^-1 = [[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]]. Powers of A never appear: with near-identical
    keys they would grow to binomial size and cancel.
    """
    row, column = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, A, 0.0)
    for level in tl.static_range(1, LOG_B):
        merges = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        left = multiply(inverse, tl.where(merges, -A, 0.0), tl.zeros([B, B], tl.float32), PRECISION)
        inverse = multiply(left, inverse, inverse, PRECISION)
    return inverse
