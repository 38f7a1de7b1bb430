"""Triton kernel of `conv1d_tree`: a tile of rows and channels climbs by the parents table.

With a stash, every tile also stores its own rows as they came, and one program more per tile of rows copies the
gates: beside the others, so that nobody waits for them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree_kernel._gdn_triton import silu


@triton.jit
def _above(parents, position, in_row):
    """The position before `position`: rows of the tree, then -1, -2, ... for the window, newest first."""
    in_tree = in_row & (position >= 0)
    parent = tl.load(parents + position, mask=in_tree, other=-1).to(tl.int32)
    return tl.where(in_tree, parent, position - 1)


@triton.jit
def _taken(x, x_row, window, window_column, position, COMMITTED: tl.constexpr, slot, mask):
    """[ROWS, CHANNELS] at `position`; rows of the tree are rounded as the window would hold them."""
    in_tree = (position >= 0)[:, None]
    row = tl.load(x + position[:, None] * x_row, mask=mask & in_tree, other=0.0)
    column = (COMMITTED + position)[:, None] * window_column
    committed = tl.load(window + column, mask=mask & (position < 0)[:, None] & (slot >= 0), other=0.0)
    return tl.where(in_tree, row.to(window.dtype.element_ty).to(tl.float32), committed.to(tl.float32))


@triton.jit
def _tap(weight, j: tl.constexpr, in_channel):
    return tl.load(weight + j, mask=in_channel, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _copy(source, source_row, kept, kept_row, row, N, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """Rows `row` < N of a [N, COLUMNS] matrix to another."""
    column = tl.arange(0, PADDED)
    mask = (row < N)[:, None] & (column < COLUMNS)[None, :]
    values = tl.load(source + row[:, None] * source_row + column[None, :], mask=mask, other=0.0)
    at = kept + row[:, None] * kept_row + column[None, :]
    tl.store(at, values.to(kept.dtype.element_ty), mask=mask)


@triton.jit
def _conv1d_tree_kernel(
    x, conv_states, slots, weight, bias, parents, out, a, b, kept_x, kept_a, kept_b,
    N, D, x_batch, x_row, state_slot, state_channel, state_column, a_batch, a_row, b_batch, b_row,
    kept_x_batch, kept_x_row, kept_a_batch, kept_a_row, kept_b_batch, kept_b_row,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, HAS_STASH: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, HV: tl.constexpr, PADDED_HV: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if HAS_STASH and tl.program_id(0) == tl.num_programs(0) - 1:
        kept_a, kept_b = kept_a + batch * kept_a_batch, kept_b + batch * kept_b_batch
        _copy(a + batch * a_batch, a_row, kept_a, kept_a_row, row, N, HV, PADDED_HV)
        _copy(b + batch * b_batch, b_row, kept_b, kept_b_row, row, N, HV, PADDED_HV)
        return
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    in_row, in_channel = row < N, channel < D
    mask = in_row[:, None] & in_channel[None, :]
    slot = tl.load(slots + batch).to(tl.int64)
    x += batch * x_batch + channel[None, :]
    parents += batch * N
    window = conv_states + slot * state_slot + channel[None, :].to(tl.int64) * state_channel

    one = _above(parents, row, in_row)
    two = _above(parents, one, in_row)
    three = _above(parents, two, in_row)

    # Oldest tap first, as a one-token step adds them.
    y = tl.zeros([ROWS, CHANNELS], tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + channel, mask=in_channel, other=0.0).to(tl.float32)[None, :]
    weight += channel * WIDTH
    if WIDTH == 4:
        y += _taken(x, x_row, window, state_column, three, WIDTH - 1, slot, mask) * _tap(
            weight, 0, in_channel
        )
    if WIDTH >= 3:
        y += _taken(x, x_row, window, state_column, two, WIDTH - 1, slot, mask) * _tap(
            weight, WIDTH - 3, in_channel
        )
    y += _taken(x, x_row, window, state_column, one, WIDTH - 1, slot, mask) * _tap(
        weight, WIDTH - 2, in_channel
    )
    own = tl.load(x + row[:, None] * x_row, mask=mask, other=0.0)
    if HAS_STASH:
        at = kept_x + batch * kept_x_batch + row[:, None] * kept_x_row + channel[None, :]
        tl.store(at, own.to(kept_x.dtype.element_ty), mask=mask)
    y += own.to(tl.float32) * _tap(weight, WIDTH - 1, in_channel)
    if SILU:
        y = silu(y)
    tl.store(out + (batch * N + row)[:, None] * D + channel[None, :], y.to(out.dtype.element_ty), mask=mask)


def conv1d_tree_triton(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parents: torch.Tensor,
    activation: str | None = "silu",
    *,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    stash: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    rows: int = 16,
    channels: int = 128,
    num_warps: int = 4,
) -> torch.Tensor:
    """`conv1d_tree` in one launch; the last three arguments tune it."""
    x = x if x.stride(2) == 1 else x.contiguous()
    bs, N, D = x.shape
    out = x.new_empty(bs, N, D)
    a, b, kept_x, kept_a, kept_b = (*gates, *stash) if stash is not None else [None] * 5
    heads = 1 if a is None else a.shape[2]
    beside = [step for kept in (a, b, kept_x, kept_a, kept_b) for step in _steps(kept)]
    if out.numel():
        _conv1d_tree_kernel[(triton.cdiv(D, channels) + (a is not None), triton.cdiv(N, rows), bs)](
            x,
            conv_states,
            slots,
            weight.contiguous(),
            bias,
            parents.contiguous(),
            out,
            a,
            b,
            kept_x,
            kept_a,
            kept_b,
            N,
            D,
            *x.stride()[:2],
            *conv_states.stride(),
            *beside,
            WIDTH=weight.shape[1],
            HAS_BIAS=bias is not None,
            SILU=activation == "silu",
            HAS_STASH=stash is not None,
            ROWS=rows,
            CHANNELS=channels,
            HV=heads,
            PADDED_HV=triton.next_power_of_2(heads),
            num_warps=num_warps,
        )
    return out


def _steps(x: torch.Tensor | None) -> tuple[int, int]:
    """Strides of requests and rows."""
    return (0, 0) if x is None else x.stride()[:2]
