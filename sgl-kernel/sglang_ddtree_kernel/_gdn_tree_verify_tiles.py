"""Triton kernels of `gdn_tree_verify`: the tree-WY form by blocks of rows, forward substitution between them.

With raw (not normalised) keys and queries, S = S_0^T and D, G as in the reference, a block i of rows obeys

    U_i = T_i (V_i - c_i K_i S - sum_{j<i} C_ij U_j),        T_i = (I + diag(beta_i) C_ii)^-1 diag(beta_i),
    O_i = d_i Q_i S + sum_{j<=i} P_ij U_j,

where C = K K^T * D / (|k| |k|), strictly below the diagonal, P = Q K^T * D / (|q| |k| sqrt K), and c, d are
e^G with the norms. None of C, T, P, c, d depends on v or the state. With several blocks they are made once
for all V blocks of a head: first what belongs to a row (`scalars_kernel`), then every tile by a program of
its own (`tiles_kernel`), while `rows_kernel` already multiplies by the state. One block is made in place.

Where the rows after the root fill their blocks, the root is a block of its own (FIRST = 1: the others begin at row 1).
Its C and P are columns and its U is a row, so it takes outer products and no tile.

With PRECISION "bf16x3" (see `_split_triton`) raw bf16 keys and queries need one product by each other, which
is exact, and two by the fp32 state. fp32 inputs take "tf32x3" and spill registers: they are for tests. The
interpreter takes "ieee".
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_ddtree_kernel._gdn_triton import inverse_norm, log_decay, sigmoid
from sglang_ddtree_kernel._split_triton import multiply, split_tile, store_tile, unit_lower_inverse

COARSE = tl.constexpr(256.0)  # in units of 1 / COARSE, 512 times -128 is 2^24, which fp32 still holds
FINE = tl.constexpr(268435456.0)  # 2^28: 512 remainders of at most 2^-9 are 2^28
# Of a row: c, d, coarse and fine G, norms of k and q, beta, C and P against the root.
SCALARS = tl.constexpr(9)


@triton.jit
def coarse_and_fine(g):
    """g, cut off at -128, as integers that count 1 / COARSE and 1 / FINE."""
    g = tl.maximum(g, -128.0)
    coarse = tl.floor(g * COARSE + 0.5)
    return coarse.to(tl.int32), ((g - coarse / COARSE) * FINE).to(tl.int32)


@triton.jit
def path_log_decay(ancestors, a, a_row, row, last, N, A_log, dt_bias, WORDS: tl.constexpr):
    """G of `row`, g summed along each path, as coarse + fine [B] fp32.

    A strong decay near the root must not cost differences of G the digits of the mild ones below it. Integers
    add up exactly, up to 512 of them with g cut off at -128, where e^g is 0 in fp32; and a warp adds its
    integers in one instruction.
    """
    bit = tl.arange(0, 32)
    coarse = tl.zeros([row.shape[0]], tl.int32)
    fine = tl.zeros([row.shape[0]], tl.int32)
    for start in range(0, last + 1, 32):
        within = (row < N) & (start // 64 < WORDS)  # the last rows may be followed by some that pad the block
        words = tl.load(ancestors + row * WORDS + start // 64, mask=within, other=0)
        words = (words >> (start % 64)).to(tl.int32)
        a_column = tl.load(a + (start + bit) * a_row, mask=start + bit < N, other=0.0)
        g_coarse, g_fine = coarse_and_fine(log_decay(a_column, A_log, dt_bias))
        on_path = (words[:, None] >> bit[None, :]) & 1 != 0
        coarse += tl.sum(tl.where(on_path, g_coarse[None, :], 0), 1)
        fine += tl.sum(tl.where(on_path, g_fine[None, :], 0), 1)
    return coarse.to(tl.float32) / COARSE, fine.to(tl.float32) / FINE


@triton.jit
def rows_of_head(x, row, x_row, N, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    mask = (row < N)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + row[:, None] * x_row + column[None, :], mask=mask, other=0.0)


@triton.jit
def visible_columns(
    ancestors, row, first_column, N, FIRST: tl.constexpr, WORDS: tl.constexpr, B: tl.constexpr
):
    """bool [B, B]: is column FIRST + first_column + c the row itself or above it? B divides 32 and first_column."""
    at, shift = ancestors + row * WORDS + first_column // 64, first_column % 64 + FIRST
    words = tl.load(at, mask=row < N, other=0).to(tl.uint64, bitcast=True) >> shift
    if FIRST:  # the last column's bit may be the next word's first
        after = tl.load(at + 1, mask=(row < N) & (first_column // 64 + 1 < WORDS), other=0)
        words |= after.to(tl.uint64, bitcast=True) << (64 - shift)
    return (words.to(tl.int32)[:, None] >> tl.arange(0, B)[None, :]) & 1 != 0


@triton.jit
def decay_between(coarse, fine, coarse_above, fine_above, visible):
    """e^(G - G above) where visible: at most 1; 0 elsewhere, where the difference may be positive."""
    difference = (coarse - coarse_above) + (fine - fine_above)
    return tl.exp(tl.where(visible, difference, -float("inf")))


@triton.jit
def decay_of_pairs(coarse, fine, coarse_above, fine_above, visible):
    """`decay_between` of every row and every column, [B, B]."""
    return decay_between(coarse[:, None], fine[:, None], coarse_above[None, :], fine_above[None, :], visible)


@triton.jit
def against_root(
    ancestors, q, k, norm_q, norm_k, coarse, fine, row, k_root, a_root, A_log, dt_bias, N, eps,
    K: tl.constexpr, K_PAD: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """C and P of rows [B] in the root's column, without beta; zeros where the root is not above a row."""
    at = tl.arange(0, K_PAD)
    root = tl.load(k_root + at, mask=at < K, other=0.0).to(tl.float32)
    norm_root = 1.0 / tl.sqrt(tl.sum(root * root) + eps)
    root_coarse, root_fine = coarse_and_fine(log_decay(tl.load(a_root), A_log, dt_bias))
    visible = tl.load(ancestors + row * WORDS, mask=row < N, other=0) & 1 != 0
    root_coarse, root_fine = root_coarse.to(tl.float32) / COARSE, root_fine.to(tl.float32) / FINE
    decay = decay_between(coarse, fine, root_coarse, root_fine, visible) * norm_root
    C = tl.sum(k.to(tl.float32) * root[None, :], 1) * norm_k * decay
    P = tl.sum(q.to(tl.float32) * root[None, :], 1) * norm_q * decay
    return C, P


@triton.jit
def decayed_product(x, k, scale_x, scale_k, decay, PRECISION: tl.constexpr):
    if PRECISION == "bf16x3":
        product = tl.dot(x, tl.trans(k))
    else:
        zero = tl.zeros([x.shape[0], k.shape[0]], tl.float32)
        product = multiply(x.to(tl.float32), tl.trans(k.to(tl.float32)), zero, PRECISION)
    return product * (scale_x[:, None] * scale_k[None, :]) * decay


@triton.jit
def diagonal_inverse(k, norm_k, beta, decay, B: tl.constexpr, LOG_B: tl.constexpr, PRECISION: tl.constexpr):
    """T_i of a block."""
    below = tl.arange(0, B)[None, :] < tl.arange(0, B)[:, None]
    A = decayed_product(k, k, beta * norm_k, norm_k, tl.where(below, decay, 0.0), PRECISION)
    return unit_lower_inverse(A, B, LOG_B, PRECISION) * beta[None, :]


@triton.jit
def scalars_kernel(
    mixed_qkv, a, b, A_log, dt_bias, ancestors, scalars,
    N, eps, scale, x_batch, x_row, a_batch, a_row, b_batch, b_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, WORDS: tl.constexpr,
    FIRST: tl.constexpr, B: tl.constexpr, LOG_B: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What belongs to one head's rows, [heads, SCALARS, rows]."""
    if PDL:
        gdc_launch_dependents()
    head, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, v_head = head // HV, head % HV
    mixed_qkv += batch * x_batch + v_head // (HV // H) * K
    padded = tl.num_programs(1) * B
    place = i * B + tl.arange(0, B)
    row = FIRST + place
    q = rows_of_head(mixed_qkv, row, x_row, N, K, K_PAD)
    k = rows_of_head(mixed_qkv + H * K, row, x_row, N, K, K_PAD)
    beta = tl.load(b + batch * b_batch + v_head + row * b_row, mask=row < N, other=0.0)
    ancestors += batch * N * WORDS
    a += batch * a_batch + v_head
    A_log, dt_bias = tl.load(A_log + v_head), tl.load(dt_bias + v_head)
    coarse, fine = path_log_decay(
        ancestors, a, a_row, row, FIRST + i * B + B - 1, N, A_log, dt_bias, WORDS
    )  # fmt: skip
    norm_q, norm_k, eG = inverse_norm(q, eps) * scale, inverse_norm(k, eps), tl.exp(coarse + fine)
    scalars += head * (SCALARS * padded) + place
    tl.store(scalars, eG * norm_k)
    tl.store(scalars + padded, eG * norm_q)
    tl.store(scalars + 2 * padded, coarse)
    tl.store(scalars + 3 * padded, fine)
    tl.store(scalars + 4 * padded, norm_k)
    tl.store(scalars + 5 * padded, norm_q)
    tl.store(scalars + 6 * padded, sigmoid(beta.to(tl.float32)))
    if FIRST:
        C, P = against_root(
            ancestors, q, k, norm_q, norm_k, coarse, fine, row, mixed_qkv + H * K, a, A_log, dt_bias, N, eps,
            K, K_PAD, WORDS,
        )  # fmt: skip
        tl.store(scalars + 7 * padded, C)
        tl.store(scalars + 8 * padded, P)


@triton.jit
def tiles_kernel(
    mixed_qkv, ancestors, scalars, tiles, N, x_batch, x_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, WORDS: tl.constexpr,
    FIRST: tl.constexpr, B: tl.constexpr, LOG_B: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head's T_i, or for a j <= i its P_ij and, if j < i, -C_ij."""
    if PDL:
        gdc_launch_dependents()
    head, j, i = tl.program_id(0).to(tl.int64), tl.program_id(1) - 1, tl.program_id(2)
    if j > i:
        return
    padded = tl.num_programs(2) * B
    plane = padded * padded
    PLANES: tl.constexpr = 2 if PRECISION == "bf16x3" else 1
    batch, v_head = head // HV, head % HV
    mixed_qkv += batch * x_batch + v_head // (HV // H) * K
    inside = tl.arange(0, B)
    above = tl.where(j < 0, i, j)
    place, place_above = i * B + inside, above * B + inside
    row = FIRST + place
    visible = visible_columns(ancestors + batch * N * WORDS, row, above * B, N, FIRST, WORDS, B)
    k_above = rows_of_head(mixed_qkv + H * K, FIRST + place_above, x_row, N, K, K_PAD)
    tiles += head * (2 * PLANES * plane) + place[:, None] * padded + place_above[None, :]
    scalars += head * (SCALARS * padded)
    if j < 0:
        if PDL:
            gdc_wait()
        coarse, fine = tl.load(scalars + 2 * padded + place), tl.load(scalars + 3 * padded + place)
        norm_k, beta = tl.load(scalars + 4 * padded + place), tl.load(scalars + 6 * padded + place)
        decay = decay_of_pairs(coarse, fine, coarse, fine, visible)
        T = diagonal_inverse(k_above, norm_k, beta, decay, B, LOG_B, PRECISION)
        store_tile(tiles, *split_tile(T, PRECISION), plane, PRECISION)
    else:
        q = rows_of_head(mixed_qkv, row, x_row, N, K, K_PAD)
        k = k_above
        if j < i:
            k = rows_of_head(mixed_qkv + H * K, row, x_row, N, K, K_PAD)
        if PDL:
            gdc_wait()
        coarse, fine = tl.load(scalars + 2 * padded + place), tl.load(scalars + 3 * padded + place)
        norm_k, norm_q = tl.load(scalars + 4 * padded + place), tl.load(scalars + 5 * padded + place)
        coarse_above = tl.load(scalars + 2 * padded + place_above)
        fine_above = tl.load(scalars + 3 * padded + place_above)
        norm_above = tl.load(scalars + 4 * padded + place_above)
        decay = decay_of_pairs(coarse, fine, coarse_above, fine_above, visible)
        P = decayed_product(q, k_above, norm_q, norm_above, decay, PRECISION)
        store_tile(tiles + PLANES * plane, *split_tile(P, PRECISION), plane, PRECISION)
        if j < i:
            C = decayed_product(k, k_above, norm_k, norm_above, decay, PRECISION)
            store_tile(tiles, *split_tile(-C, PRECISION), plane, PRECISION)
