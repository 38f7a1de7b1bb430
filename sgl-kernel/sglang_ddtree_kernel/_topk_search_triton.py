"""The search of `topk_logprobs`, which descends along the maxima that its pass kept, one warp for a row.

Columns form groups, and groups form blocks. The k best columns lie in the k groups whose maxima are greatest
(of equal maxima, those that stand first): every column outside them is outranked by k of those maxima. The k
best groups lie in the k best blocks likewise.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-0x80000000)
LANES = tl.constexpr(32)  # of a warp
FEW_KEYS = tl.constexpr(8)  # 16 take 20 s to compile, and 32 minutes


@triton.jit
def ordered(x):
    """int32 that orders as fp32 x does; -0.0 becomes 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(order == -1, 0, order)


@triton.jit
def _key(x, column):
    """Larger for a larger value (-0.0 is 0.0), then for a smaller column; int32 for a 16-bit x, else int64."""
    if x.dtype.primitive_bitwidth == 32:
        return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - column)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        # The bits of a bfloat16 of this value, or of some other number, and of the same zeros, for a float16.
        bits = (bits.to(tl.float32, bitcast=True) + 0.0).to(tl.int32, bitcast=True)
        high = bits ^ ((bits >> 31) & 0x7FFF0000)
        return high | (~column & 0xFFFF)


@triton.jit
def value_of(order):
    """Inverse of `ordered` for fp32."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def log_sum_exp(x):
    greatest = value_of(tl.max(ordered(x)))
    return greatest + tl.log(tl.sum(tl.exp(x - tl.where(greatest == -float("inf"), 0.0, greatest))))


@triton.jit
def best_pairs(high, low, place, K: tl.constexpr):
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
    among = _key_position(best)
    # The group that has this rank: no two that exist have the same.
    has_rank = rank[None, :] == (among // GROUP)[:, None]
    group = tl.sum(tl.where(has_rank & (place < K)[None, :], groups[None, :], 0), 1)
    return _key_value(best, x.dtype), group * GROUP + among % GROUP


@triton.jit
def _search_any(
    logits, group_max, block_max, place,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, ROW_BLOCKS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """Values in fp32 and numbers of the K best columns of one row, each at its place."""
    used = (place < K)[:, None]
    block = tl.arange(0, ROW_BLOCKS)
    exists = block < BLOCKS
    blocks = _best_units(tl.load(block_max + block, mask=exists), block, exists, BLOCKS, place, K)
    group = blocks[:, None] * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[None, :]
    GROUPS: tl.constexpr = BLOCKS * BLOCK_GROUPS
    exists = used & (group < GROUPS)
    maxima = tl.load(group_max + group, mask=exists, other=0.0)
    groups = _best_units(maxima, group, exists, GROUPS, place, K)
    column = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = used & (column < VOCAB)
    x = tl.load(logits + column, mask=exists, other=0.0)
    if x.dtype.primitive_bitwidth == 16:
        value, column = _best_columns(x, groups, exists, place, K, GROUP)
    else:
        high = tl.where(exists, ordered(x), NOTHING)
        best_high, best_low = best_pairs(high, ~column, place, K)
        value, column = value_of(best_high), ~best_low
    return value, column


@triton.jit
def _exists(at, start, SIZE: tl.constexpr, end, ALL: tl.constexpr):
    return (at < SIZE) if ALL else (at < SIZE) & (start + at < end)


@triton.jit
def _load(x, start, SIZE: tl.constexpr, end, ALL: tl.constexpr):
    """x[start : start + SIZE] as a tuple of vectors of a warp. Unless ALL exist, those from x[end] on do not."""
    values = ()
    for part in tl.static_range(0, SIZE, LANES):
        at = part + tl.arange(0, LANES)
        # x + at first: it is the same for all units of a stage.
        values += (tl.load(x + at + start, mask=_exists(at, start, SIZE, end, ALL)),)
    return values


@triton.jit
def _keys(values, start, position, SIZE: tl.constexpr, end, ALL: tl.constexpr):
    """int32 keys of 16-bit `values` from `_load`, the first of them at `position`."""
    keys = ()
    for i in tl.static_range(len(values)):
        at = i * LANES + tl.arange(0, LANES)
        keys += (tl.where(_exists(at, start, SIZE, end, ALL), _key(values[i], position + at), NOTHING),)
    return keys


@triton.jit
def _key_position(key):
    """That of `NOTHING` is the greatest: no unit has it where there is nothing."""
    return ~key & 0xFFFF


@triton.jit
def _key_value(key, dtype: tl.constexpr):
    order = key >> 16
    bits = (order ^ ((order >> 15) & 0x7FFF)).to(tl.int16)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _insert(best, key, K: tl.constexpr):
    """The K greatest of the falling tuple `best` and key; every lane for itself."""
    COUNT: tl.constexpr = len(best)
    inserted = ()
    for i in tl.static_range(min(COUNT + 1, K)):
        falling = tl.minimum(best[i - 1], key) if i > 0 else key
        inserted += (tl.maximum(best[i], falling) if i < COUNT else falling,)
    return inserted


@triton.jit
def _falling(keys, K: tl.constexpr):
    """The K greatest keys of every lane in order. The greatest of all leads a lane."""
    best = ()
    for i in tl.static_range(len(keys)):
        best = _insert(best, keys[i], K)
    return best


@triton.jit
def _without(best, top, K: tl.constexpr):
    """What can be among the K greatest of `best`, from `_falling`, after `top`: the lane that it led moves up."""
    COUNT: tl.constexpr = len(best)
    led = best[0] == top
    rest = ()
    for i in tl.static_range(min(COUNT, K)):
        rest += (tl.where(led, best[i + 1] if i + 1 < COUNT else NOTHING, best[i]),)
    return rest


@triton.jit
def _descend(keys, x, SIZE: tl.constexpr, end, ALL: tl.constexpr, K: tl.constexpr):
    """The K best units, scalars, and the SIZE values of x that each has, on their way while others are found."""
    best = _falling(keys, K)
    units = ()
    values = ()
    for i in tl.static_range(K):
        top = tl.max(best[0])
        best = _without(best, top, K - 1 - i)
        units += (_key_position(top),)
        values += (_load(x, units[i] * SIZE, SIZE, end, ALL),)
    return units, values


@triton.jit
def _search_few(
    logits, group_max, block_max, place,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, ROW_BLOCKS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """`_search_any` for 16 bits and K so small that all can be unrolled.

    What is found stays in scalars, which need no gather, and sorted lanes make a round one maximum and one move.
    """
    keys = _keys(_load(block_max, 0, BLOCKS, 0, True), 0, 0, BLOCKS, 0, True)
    ALL_GROUPS: tl.constexpr = K <= BLOCKS
    blocks, maxima = _descend(keys, group_max, BLOCK_GROUPS, BLOCKS * BLOCK_GROUPS, ALL_GROUPS, K)
    keys = ()
    for i in tl.static_range(K):
        start = blocks[i] * BLOCK_GROUPS
        keys += _keys(maxima[i], start, start, BLOCK_GROUPS, BLOCKS * BLOCK_GROUPS, ALL_GROUPS)
    # Where none is cut and K are whole, those past the row's end, which are last, are not among the best.
    ALL_COLUMNS: tl.constexpr = VOCAB % GROUP == 0 and K * GROUP <= VOCAB
    groups, x = _descend(keys, logits, GROUP, VOCAB, ALL_COLUMNS, K)
    # A column's place among those at hand, in the order of ids, has few enough bits for a key.
    all_groups = tl.full(place.shape, NO_ID, tl.int32)
    for i in tl.static_range(K):
        all_groups = tl.where(place == i, groups[i], all_groups)
    ranks = ()
    keys = ()
    for i in tl.static_range(K):
        ranks += (tl.sum((all_groups < groups[i]).to(tl.int32)),)
        keys += _keys(x[i], groups[i] * GROUP, ranks[i] * GROUP, GROUP, VOCAB, ALL_COLUMNS)
    columns = _falling(keys, K)
    best = tl.zeros_like(place)
    for i in tl.static_range(K):
        top = tl.max(columns[0])
        columns = _without(columns, top, K - 1 - i)
        best = tl.where(place == i, top, best)
    position = _key_position(best)
    group = tl.zeros_like(place)
    for i in tl.static_range(K):
        group = tl.where(position // GROUP == ranks[i], groups[i], group)
    return _key_value(best, logits.dtype.element_ty), group * GROUP + position % GROUP


@triton.jit
def search_kernel(
    logits,
    group_max,
    block_max,
    block_lse,
    values_out,
    ids_out,
    lse_out,
    row_stride,
    vocab_offset,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """One row: its K best blocks, the K best groups of those, and the K best columns of those; or its log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        FEW: tl.constexpr = K <= FEW_KEYS and logits.dtype.element_ty.primitive_bitwidth == 16
        place = tl.arange(0, max(K_PAD, LANES) if FEW else K_PAD)  # integers of whole warps reduce at once
        search: tl.constexpr = _search_few if FEW else _search_any
        value, column = search(
            logits + row * row_stride,
            group_max + row * (ROW_BLOCKS * BLOCK_GROUPS),
            block_max + row * ROW_BLOCKS,
            place,
            VOCAB,
            BLOCKS,
            ROW_BLOCKS,
            K,
            GROUP,
            BLOCK_GROUPS,
        )
        out = row * K + place
        tl.store(values_out + out, value, mask=place < K)
        tl.store(ids_out + out, (column + vocab_offset).to(tl.int64), mask=place < K)
    else:
        block = tl.arange(0, ROW_BLOCKS)
        lse = tl.load(block_lse + row * ROW_BLOCKS + block, mask=block < BLOCKS, other=-float("inf"))
        tl.store(lse_out + row, log_sum_exp(lse))
