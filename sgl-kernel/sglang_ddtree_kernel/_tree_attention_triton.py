"""Triton kernels of `tree_attention`: keys are split over programs, a second launch merges their parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_ddtree_kernel.tree_types import num_words

# Keys below which a share costs more to merge than it saves; few tiles need the shares to fill the chip.
MIN_SHARE, MIN_SHARE_OF_MANY = 128, 1024
MAX_SPLITS = 31  # with the tree's part a power of two
LOG2E = 1.4426950408889634


class Tile(NamedTuple):
    block_m: int  # stacked query rows of a program
    block_n: int  # keys of a step; divides 64, so that a step reads one ancestor word
    num_warps: int
    num_stages: int


def pick_tile(capability: int, head_dim: int, itemsize: int, stacked_rows: int) -> Tile:
    """Tile for a padded head size, operand bytes and N * Hq / Hkv stacked rows; capability 90, 100, 120."""
    roomy = capability // 10 in (9, 10)  # 227 KiB of shared memory per program, else 99
    if itemsize == 4:
        if head_dim > 128:
            return Tile(16, 32, 8, 1)
        return Tile(64, 32, 8, 1) if roomy else Tile(32, 32, 8, 1)
    if stacked_rows <= 16:
        return Tile(16, 32, 4, 2) if head_dim > 128 and not roomy else Tile(16, 64, 4, 2)
    if stacked_rows <= 64 or not roomy:
        if head_dim > 128:
            return Tile(64, 32, 4, 3) if roomy else Tile(64, 32, 8, 1)
        return Tile(64, 64, 4, 2)
    return Tile(128, 64, 8, 2)


@triton.jit
def _attend(
    q,
    k,
    v,
    visible,
    acc,
    row_max,
    row_sum,
    scale,
    logit_cap,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the softmax in base 2; `scale` includes log2(e), or is without it under a cap."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        logits = logit_cap * (1.0 - 2.0 / (tl.exp(2.0 * (logits / logit_cap)) + 1.0)) * 1.4426950408889634
    logits = tl.where(visible, logits, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    base = tl.where(new_max == -float("inf"), 0.0, new_max)
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(row_max - base)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def _rows_of(
    pool, slot, stride_slot, column, inside, HEAD: tl.constexpr, PADDED: tl.constexpr, DTYPE: tl.constexpr
):
    mask = inside[:, None]
    if HEAD != PADDED:
        mask = mask & (column < HEAD)[None, :]
    return tl.load(pool + slot[:, None] * stride_slot + column[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit
def _split_kernel(
    q,
    k_pool,
    v_pool,
    req_to_token,
    req_pool_indices,
    seq_lens,
    tree_slots,
    ancestors,
    depths,
    part_out,
    part_lse,
    scale,
    logit_cap,
    window,
    num_rows,
    group,
    stride_q_row,
    stride_q_head,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    stride_req,
    KV_HEADS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    PADDED_WORDS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):
    """A tile of one KV head's stacked queries against one share of the committed keys, or the tree's keys.

    Row m of the stack is head m % group of tree row m // group. The tree is the last part.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    request, kv_head = tl.program_id(2) // KV_HEADS, tl.program_id(2) % KV_HEADS
    splits = tl.num_programs(1) - 1
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = m < num_rows * group
    row = tl.minimum(m // group, num_rows - 1)
    head = kv_head * group + m % group

    request_row = request.to(tl.int64) * num_rows

    # The share follows from the length on the device, the number of shares does not.
    length = tl.load(seq_lens + request).to(tl.int32)
    first = tl.maximum(length - window, 0) if WINDOWED else 0  # what the root sees, and so any row
    share = tl.maximum(tl.cdiv(tl.cdiv(length - first, BLOCK_N), splits), MIN_BLOCKS) * BLOCK_N
    begin = first + part * share
    end = tl.minimum(begin + share, length)
    is_tree = part == splits
    if is_tree:
        begin = 0
        words = WORDS
        if WORDS > 1:  # of a tree, all but the last rows end before the last word
            word = tl.arange(0, PADDED_WORDS)[None, :]
            word_at = ancestors + (request_row + row)[:, None] * WORDS + word
            seen = tl.load(word_at, mask=exists[:, None] & (word < WORDS), other=0) != 0
            words = tl.max(tl.max(tl.where(seen, word + 1, 0), 1), 0)
        end = tl.minimum(words * 64, num_rows)

    out_row = (part.to(tl.int64) * (tl.num_programs(2) // KV_HEADS) * num_rows + request_row + row) * (
        KV_HEADS * group
    ) + head
    if begin >= end:
        tl.store(part_lse + out_row, tl.full([BLOCK_M], -float("inf"), tl.float32), mask=exists)
    else:
        d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        q_at = q + (request_row + row) * stride_q_row + head * stride_q_head
        q_mask = exists[:, None]
        if D != BLOCK_D:
            q_mask = q_mask & (d < D)[None, :]
        query = tl.load(q_at[:, None] + d[None, :], mask=q_mask, other=0.0).to(DTYPE)
        k_pool += kv_head.to(tl.int64) * stride_k_head
        v_pool += kv_head.to(tl.int64) * stride_v_head
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        column = tl.arange(0, BLOCK_N)
        if WINDOWED:
            depth = tl.load(depths + request_row + row)
        if is_tree:
            word_at = ancestors + (request_row + row) * WORDS
            for start in range(begin, end, BLOCK_N):
                inside = start + column < end
                slot = tl.load(tree_slots + request_row + start + column, mask=inside, other=0)
                slot = tl.maximum(slot.to(tl.int64), 0)
                k = _rows_of(k_pool, slot, stride_k_slot, d, inside, D, BLOCK_D, DTYPE)
                v = _rows_of(v_pool, slot, stride_v_slot, dv, inside, DV, BLOCK_DV, DTYPE)
                word = tl.load(word_at + start // 64)
                visible = ((word[:, None] >> (start % 64 + column).to(tl.int64)[None, :]) & 1) != 0
                if WINDOWED:
                    key_depth = tl.load(depths + request_row + start + column, mask=inside, other=0)
                    visible = visible & (depth[:, None] - key_depth[None, :] <= window)
                acc, row_max, row_sum = _attend(
                    query, k, v, visible, acc, row_max, row_sum, scale, logit_cap, CAPPED, PRECISION
                )
        else:
            slots = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * stride_req
            for start in range(begin, end, BLOCK_N):
                inside = start + column < end
                slot = tl.load(slots + start + column, mask=inside, other=0).to(tl.int64)
                k = _rows_of(k_pool, slot, stride_k_slot, d, inside, D, BLOCK_D, DTYPE)
                v = _rows_of(v_pool, slot, stride_v_slot, dv, inside, DV, BLOCK_DV, DTYPE)
                visible = inside[None, :]
                if WINDOWED:
                    visible = visible & ((length - start + depth)[:, None] - column[None, :] <= window)
                acc, row_max, row_sum = _attend(
                    query, k, v, visible, acc, row_max, row_sum, scale, logit_cap, CAPPED, PRECISION
                )
        safe_sum = tl.where(row_sum > 0, row_sum, 1.0)
        out_mask = exists[:, None]
        if DV != BLOCK_DV:
            out_mask = out_mask & (dv < DV)[None, :]
        tl.store(part_out + out_row[:, None] * DV + dv[None, :], acc / safe_sum[:, None], mask=out_mask)
        tl.store(part_lse + out_row, row_max + tl.log2(row_sum), mask=exists)


@triton.jit
def _merge_kernel(
    part_out,
    part_lse,
    out,
    parts,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One output of [parts, outputs, DV] by its base-2 log-sum-exps; a part at -inf is not read.

    All parts are loaded at once: their latency would add up in a loop.
    """
    output, outputs = tl.program_id(0), tl.num_programs(0)
    part, dv = tl.arange(0, PARTS), tl.arange(0, BLOCK_DV)
    at = part.to(tl.int64) * outputs + output
    lse = tl.load(part_lse + at, mask=part < parts, other=-float("inf"))
    weight = tl.exp2(lse - tl.max(lse))  # a row sees itself, so that one part is finite
    mask = (weight > 0)[:, None] & (dv < DV)[None, :]
    values = tl.load(part_out + at[:, None] * DV + dv[None, :], mask=mask, other=0.0)
    merged = tl.sum(weight[:, None] * values, 0) / tl.sum(weight)
    tl.store(out + output.to(tl.int64) * DV + dv, merged.to(out.dtype.element_ty), mask=dv < DV)


def pick_splits(tiles: int, num_sms: int, tile: Tile, max_keys: int) -> tuple[int, int]:
    """Shares of the committed keys, and the least keys of a share; `tiles` programs would run without."""
    resident = num_sms * (1 if tile.block_m > 64 else 2)
    splits, min_share = resident // tiles - 1, MIN_SHARE
    if splits < 2:  # no longer one wave with the tree's part: the count whose last wave idles least
        splits = min(range(1, 5), key=lambda s: (round(triton.cdiv(tiles * s, resident) / s, 1), s))
        min_share = MIN_SHARE_OF_MANY
    return max(min(splits, MAX_SPLITS, triton.cdiv(max_keys, min_share)), 1), min_share


def tree_attention_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_slots: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
    *,
    window: int = 0,
    depths: torch.Tensor | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """`tree_attention` in two launches. Products run in the wider dtype of q and pool, fp32 as 3 x tf32.

    `tile` and `splits` override the choice by device and shapes (for tuning and tests).
    """
    bs, num_rows, q_heads, d = q.shape
    kv_heads, dv = v_pool.shape[1:]
    group = q_heads // kv_heads
    block_d, block_dv = (max(triton.next_power_of_2(x), 16) for x in (d, dv))
    dtype = torch.promote_types(q.dtype, k_pool.dtype)
    if q.stride(3) != 1 or q.stride(0) != num_rows * q.stride(1):
        q = q.contiguous()
    if k_pool.stride(2) != 1 or v_pool.stride(2) != 1:
        raise ValueError("k_pool and v_pool must have contiguous heads")
    capability, num_sms = 90, 132
    if q.is_cuda:
        properties = torch.cuda.get_device_properties(q.device)
        capability, num_sms = properties.major * 10 + properties.minor, properties.multi_processor_count
    if tile is None:
        tile = pick_tile(capability, max(block_d, block_dv), dtype.itemsize, num_rows * group)
    m_tiles = triton.cdiv(num_rows * group, tile.block_m)
    max_keys = min(window, req_to_token.shape[1]) if window else req_to_token.shape[1]
    picked, min_share = pick_splits(max(m_tiles * kv_heads * bs, 1), num_sms, tile, max_keys)
    splits = splits or picked
    num_outputs = bs * num_rows * q_heads
    part_out = q.new_empty(splits + 1, num_outputs, dv, dtype=torch.float32)
    part_lse = q.new_empty(splits + 1, num_outputs, dtype=torch.float32)
    out = v_pool.new_empty(bs, num_rows, q_heads, dv)
    if not num_outputs:
        return out
    _split_kernel[(m_tiles, splits + 1, bs * kv_heads)](
        q,
        k_pool,
        v_pool,
        req_to_token,
        req_pool_indices,
        seq_lens,
        tree_slots.contiguous(),
        ancestors.contiguous(),
        depths.contiguous() if window else None,
        part_out,
        part_lse,
        scale if logit_cap > 0 else scale * LOG2E,
        logit_cap,
        window,
        num_rows,
        group,
        q.stride(1),
        q.stride(2),
        k_pool.stride(0),
        k_pool.stride(1),
        v_pool.stride(0),
        v_pool.stride(1),
        req_to_token.stride(0),
        KV_HEADS=kv_heads,
        CAPPED=logit_cap > 0,
        WINDOWED=window > 0,
        DTYPE={torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype],
        PRECISION="tf32x3" if dtype == torch.float32 else "tf32",
        D=d,
        DV=dv,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        WORDS=num_words(num_rows),
        PADDED_WORDS=triton.next_power_of_2(num_words(num_rows)),
        MIN_BLOCKS=triton.cdiv(min_share, tile.block_n),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    parts_padded = triton.next_power_of_2(splits + 1)
    _merge_kernel[(num_outputs,)](
        part_out,
        part_lse,
        out,
        splits + 1,
        DV=dv,
        BLOCK_DV=block_dv,
        PARTS=parts_padded,
        num_warps=4 if parts_padded * block_dv > 1024 else 1,
    )
    return out
