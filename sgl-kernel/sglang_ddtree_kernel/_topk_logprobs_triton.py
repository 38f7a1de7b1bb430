"""Triton kernels of `topk_logprobs`: one pass that keeps maxima of groups and blocks of columns, and a search of them.

`_topk_search_triton` explains the search.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree_kernel._topk_search_triton import (
    NO_ID,
    NOTHING,
    best_pairs,
    log_sum_exp,
    ordered,
    search_kernel,
    value_of,
)
from sglang_ddtree_kernel.reference.topk_logprobs import ShardTopK

LOG2E = tl.constexpr(1.4426950408889634)
MANY_ROWS = (
    64  # from here on, longer blocks: the pass is bound by memory, and the search by the number of blocks
)


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
    block_max = value_of(tl.max(ordered(lane_max)))  # one instruction of a warp, for integers
    block_base = tl.where(block_max == -float("inf"), 0.0, block_max) * LOG2E
    total = tl.sum(lane_sum * tl.exp2(base - block_base))
    tl.store(block_max_out + out, block_max.to(x.dtype))
    tl.store(block_lse_out + out, block_max + tl.log(total))


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
    high = tl.where(listed, ordered(tl.load(values + entry, mask=listed, other=0.0)), NOTHING)
    low = ~tl.load(ids + entry, mask=listed, other=NO_ID).to(tl.int32)  # larger for a smaller id
    best_high, best_low = best_pairs(high, low, place, K)

    row_lse = log_sum_exp(tl.load(lse + from_row, mask=shard < shards, other=-float("inf")))
    value = value_of(best_high)
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
    search_kernel[(num_rows, 2)](
        logits,
        group_max,
        block_max,
        block_lse,
        *out,
        logits.stride(0),
        vocab_offset,
        VOCAB=vocab,
        BLOCKS=num_blocks,
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
