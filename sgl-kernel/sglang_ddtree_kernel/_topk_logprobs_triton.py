"""Triton kernels of `topk_logprobs`: one pass that keeps maxima, and a search that descends along them.

Columns form groups, and groups form blocks. The k best columns lie in the k groups whose maxima are greatest
(of equal maxima, those that stand first): every column outside them is outranked by k of those maxima. The k
best groups lie in the k best blocks likewise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree_kernel.reference.topk_logprobs import ShardTopK

NO_ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-0x80000000)
LOG2E = tl.constexpr(1.4426950408889634)
MANY_ROWS = (
    64  # from here on, longer blocks: the pass is bound by memory, and the search by the number of blocks
)


@triton.jit
def _ordered(x):
    """int32 that orders as the float x does; -0.0 becomes 0.0. At most 16 bits are used by a 16-bit float."""
    if x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        ordered = bits ^ ((bits >> 15) & 0x7FFF)
    return tl.where(ordered == -1, 0, ordered)


@triton.jit
def _key(x, column):
    """Larger for a larger value, then for a smaller column; int32 for a 16-bit x, else int64."""
    if x.dtype.primitive_bitwidth == 32:
        return (_ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - column)
    else:
        return (_ordered(x) << 16) | (0xFFFF - column)


@triton.jit
def _value(ordered):
    """Inverse of `_ordered` for fp32."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _pass_kernel(
    logits,
    group_max_out,
    block_max_out,
    block_lse_out,
    vocab,
    row_stride,
    ROW_BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUP: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Maxima of groups [R, ROW_BLOCKS, BLOCK / GROUP] and of blocks [R, ROW_BLOCKS], and log-sum-exps of blocks."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    BLOCK: tl.constexpr = STEPS * LANES * VECTOR
    STEP_GROUPS: tl.constexpr = LANES * VECTOR // GROUP
    out = row * ROW_BLOCKS + block
    # Threads are dealt along the first dimension, so all steps of a lane are one thread's.
    lane_column = tl.arange(0, LANES)[:, None, None] * VECTOR
    vector_column = block * BLOCK + tl.arange(0, STEPS)[None, :, None] * (LANES * VECTOR) + lane_column
    column = vector_column + tl.arange(0, VECTOR)[None, None, :]
    # One comparison for a whole vector where the row's end cannot fall into one.
    inside = tl.broadcast_to(vector_column < vocab, [LANES, STEPS, VECTOR]) if ALIGNED else column < vocab
    x = tl.load(logits + row * row_stride + column, mask=inside, other=-float("inf"))
    x32 = x.to(tl.float32)
    vector_max = tl.max(x32, 2)
    group_max = tl.max(tl.reshape(vector_max, [STEP_GROUPS, GROUP // VECTOR, STEPS]), 1)
    group = tl.arange(0, STEPS)[None, :] * STEP_GROUPS + tl.arange(0, STEP_GROUPS)[:, None]
    tl.store(group_max_out + out * (BLOCK // GROUP) + group, group_max.to(x.dtype))
    # Every lane sums relative to its own maximum, so that no lane waits for another before the end.
    lane_max = tl.max(vector_max, 1)
    base = tl.where(lane_max == -float("inf"), 0.0, lane_max) * LOG2E
    lane_sum = tl.sum(tl.sum(tl.exp2(x32 * LOG2E - base[:, None, None]), 2), 1)
    block_max = tl.max(lane_max)
    block_base = tl.where(block_max == -float("inf"), 0.0, block_max) * LOG2E
    total = tl.sum(lane_sum * tl.exp2(base - block_base))
    tl.store(block_max_out + out, block_max.to(x.dtype))
    tl.store(block_lse_out + out, block_max + tl.log(total))


@triton.jit
def _log_sum_exp(x):
    greatest = tl.max(x)
    return greatest + tl.log(tl.sum(tl.exp(x - tl.where(greatest == -float("inf"), 0.0, greatest))))


@triton.jit
def _best_pairs(high, low, place, K: tl.constexpr):
    """The K greatest pairs in order; two 32-bit maxima are faster than one of 64 bits."""
    best_high = tl.zeros_like(place)
    best_low = tl.zeros_like(place)
    for i in range(K):
        top_high = tl.max(high)
        top_low = tl.max(tl.where(high == top_high, low, NOTHING))
        best_high = tl.where(place == i, top_high, best_high)
        best_low = tl.where(place == i, top_low, best_low)
        high = tl.where((high == top_high) & (low == top_low), NOTHING, high)
    return best_high, best_low


@triton.jit
def _best_units(maxima, unit, inside, limit, place, K: tl.constexpr):
    """Numbers of the K units with the greatest maxima, `limit` where there are fewer; in no useful order."""
    wide: tl.constexpr = maxima.dtype.primitive_bitwidth == 32
    nothing: tl.constexpr = -(2**63) if wide else -(2**31)
    low_bits: tl.constexpr = 0x7FFFFFFF if wide else 0xFFFF
    key = tl.where(inside, _key(maxima, unit), nothing)
    best = tl.zeros_like(place)
    for i in range(K):
        top = tl.max(key)
        best = tl.where(place == i, low_bits - (top & low_bits).to(tl.int32), best)
        key = tl.where(key == top, nothing, key)
    return tl.minimum(best, limit)


@triton.jit
def _best_columns(x, groups, exists, place, K: tl.constexpr, GROUP: tl.constexpr):
    """Values in fp32 and numbers of the K best columns of `groups`, for 16-bit x [K_PAD, GROUP].

    A column's place among those at hand, in the order of ids, has few enough bits to share an integer with its value,
    so that a round is one maximum; of equal values the smaller id wins.
    """
    rank = tl.sum((groups[:, None] > groups[None, :]).to(tl.int32), 1)
    key = tl.where(exists, _key(x, rank[:, None] * GROUP + tl.arange(0, GROUP)[None, :]), NOTHING)
    best = tl.zeros_like(place)
    for i in range(K):
        top = tl.max(key)
        best = tl.where(place == i, top, best)
        key = tl.where(key == top, NOTHING, key)
    among = 0xFFFF - (best & 0xFFFF)
    # The group that has this rank: no two that exist have the same.
    has_rank = rank[None, :] == (among // GROUP)[:, None]
    group = tl.sum(tl.where(has_rank & (place < K)[None, :], groups[None, :], 0), 1)
    ordered = best >> 16
    bits = (ordered ^ ((ordered >> 15) & 0x7FFF)).to(tl.int16)
    return bits.to(x.dtype, bitcast=True).to(tl.float32), group * GROUP + among % GROUP


@triton.jit
def _search_kernel(
    logits,
    group_max,
    block_max,
    block_lse,
    values_out,
    ids_out,
    lse_out,
    vocab,
    row_stride,
    vocab_offset,
    num_blocks,
    ROW_BLOCKS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """One row: its K best blocks, the K best groups of those, and the K best columns of those."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, K_PAD)
    used = (place < K)[:, None]

    # Whole vectors, past the row's last block too: what lies there is not used.
    block = tl.arange(0, ROW_BLOCKS)
    exists = block < num_blocks
    maxima = tl.load(block_max + row * ROW_BLOCKS + block)
    lse = tl.where(exists, tl.load(block_lse + row * ROW_BLOCKS + block), -float("inf"))
    blocks = _best_units(maxima, block, exists, num_blocks, place, K)

    group = blocks[:, None] * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[None, :]
    num_groups = num_blocks * BLOCK_GROUPS
    exists = used & (group < num_groups)
    maxima = tl.load(group_max + row * (ROW_BLOCKS * BLOCK_GROUPS) + group, mask=exists, other=0.0)
    tl.store(lse_out + row, _log_sum_exp(lse))  # while the maxima are on their way
    groups = _best_units(maxima, group, exists, num_groups, place, K)

    column = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = used & (column < vocab)
    x = tl.load(logits + row * row_stride + column, mask=exists, other=0.0)
    if x.dtype.primitive_bitwidth == 16:
        best_value, best_column = _best_columns(x, groups, exists, place, K, GROUP)
    else:
        high = tl.where(exists, _ordered(x), NOTHING)
        best_high, best_low = _best_pairs(high, ~column, place, K)
        best_value, best_column = _value(best_high), ~best_low
    out = row * K + place
    tl.store(values_out + out, best_value, mask=place < K)
    tl.store(ids_out + out, (best_column + vocab_offset).to(tl.int64), mask=place < K)


@triton.jit
def _merge_kernel(
    values,
    ids,
    lse,
    logprobs_out,
    ids_out,
    shards,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    SHARDS: tl.constexpr,
):
    """One row of [shards, R, K] and [shards, R]: its K best in order, as log-probabilities."""
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    shard, place = tl.arange(0, SHARDS), tl.arange(0, K_PAD)
    from_row = shard.to(tl.int64) * num_rows + row
    entry = from_row[:, None] * K + place[None, :]
    listed = (shard < shards)[:, None] & (place < K)[None, :]
    high = tl.where(listed, _ordered(tl.load(values + entry, mask=listed, other=0.0)), NOTHING)
    low = ~tl.load(ids + entry, mask=listed, other=NO_ID).to(tl.int32)  # larger for a smaller id
    best_high, best_low = _best_pairs(high, low, place, K)

    row_lse = _log_sum_exp(tl.load(lse + from_row, mask=shard < shards, other=-float("inf")))
    value = _value(best_high)
    # Rounding may push value - lse just above 0, and best-first search needs scores that never rise.
    logprob = tl.where(value == -float("inf"), value, tl.minimum(value - row_lse, 0.0))
    out = row.to(tl.int64) * K + place
    tl.store(logprobs_out + out, logprob, mask=place < K)
    tl.store(ids_out + out, (~best_low).to(tl.int64), mask=place < K)


def topk_logprobs_triton(
    logits: torch.Tensor,
    k: int,
    vocab_offset: int = 0,
    *,
    group: int = 32,
    steps: int | None = None,
    lanes: int = 32,
) -> ShardTopK:
    """`topk_logprobs` in two launches that read the logits once; ids must stay below 2^31 - 1.

    The last arguments tune it: columns of a group; a block is steps x lanes x 16 bytes of a row, read by one warp.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab = logits.shape
    vector = 16 // logits.element_size()
    if steps is None:
        steps = 4 if num_rows < MANY_ROWS else 8
    block = steps * lanes * vector
    num_blocks, block_groups = triton.cdiv(vocab, block), block // group
    if num_blocks * block_groups > 1 << 16:
        raise ValueError(f"logits must have at most {group << 16} columns, got {vocab}")
    out = ShardTopK(
        logits.new_empty(num_rows, k, dtype=torch.float32),
        logits.new_empty(num_rows, k, dtype=torch.int64),
        logits.new_empty(num_rows, dtype=torch.float32),
    )
    if not num_rows:
        return out
    row_blocks = triton.next_power_of_2(num_blocks)
    group_max = logits.new_empty(num_rows, row_blocks, block_groups)
    block_max = logits.new_empty(num_rows, row_blocks)
    block_lse = logits.new_empty(num_rows, row_blocks, dtype=torch.float32)
    _pass_kernel[(num_blocks, num_rows)](
        logits,
        group_max,
        block_max,
        block_lse,
        vocab,
        logits.stride(0),
        ROW_BLOCKS=row_blocks,
        ALIGNED=vocab % vector == 0,
        GROUP=group,
        STEPS=steps,
        LANES=lanes,
        VECTOR=vector,
        num_warps=1,
    )
    _search_kernel[(num_rows,)](
        logits,
        group_max,
        block_max,
        block_lse,
        *out,
        vocab,
        logits.stride(0),
        vocab_offset,
        num_blocks,
        ROW_BLOCKS=row_blocks,
        K=k,
        K_PAD=triton.next_power_of_2(k),
        GROUP=group,
        BLOCK_GROUPS=block_groups,
        num_warps=1,  # a maximum over one warp needs no barrier, and the search is nothing but such maxima
    )
    return out


def merge_topk_triton(
    values: torch.Tensor, ids: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_topk` in one launch."""
    shards, num_rows, k = values.shape
    logprobs, out_ids = values.new_empty(num_rows, k), ids.new_empty(num_rows, k)
    if num_rows:
        _merge_kernel[(num_rows,)](
            values.contiguous(),
            ids.contiguous(),
            lse.contiguous(),
            logprobs,
            out_ids,
            shards,
            K=k,
            K_PAD=triton.next_power_of_2(k),
            SHARDS=triton.next_power_of_2(shards),
            num_warps=1,
        )
    return logprobs, out_ids
