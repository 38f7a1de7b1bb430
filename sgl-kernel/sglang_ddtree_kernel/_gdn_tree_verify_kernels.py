"""Triton kernels of `gdn_tree_verify`: the tree-WY form by blocks of rows, forward substitution between them.

With raw (not normalised) keys and queries, S = S_0^T and D, G as in the reference, a block i of rows obeys

    U_i = T_i (V_i - c_i K_i S - sum_{j<i} C_ij U_j),        T_i = (I + diag(beta_i) C_ii)^-1 diag(beta_i),
    O_i = d_i Q_i S + sum_{j<=i} P_ij U_j,

where C = K K^T * D / (|k| |k|), strictly below the diagonal, P = Q K^T * D / (|q| |k| sqrt K), and c, d are
e^G with the norms. None of C, T, P, c, d depends on v or the state. With several blocks they are made once
for all V blocks of a head: first what belongs to a row (`scalars_kernel`), then every tile by a program of
its own (`tiles_kernel`). With one block all is made in place.

With PRECISION "bf16x3" (see `_split_triton`) raw bf16 keys and queries need one product by each other, which
is exact, and two by the fp32 state. fp32 inputs take "tf32x3" and spill registers: they are for tests. The
interpreter takes "ieee".
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_ddtree_kernel._gdn_triton import inverse_norm, log_decay, sigmoid
from sglang_ddtree_kernel._split_triton import (
    load_tile,
    multiply,
    multiply_split,
    split,
    store_tile,
    unit_lower_inverse,
)


@triton.jit
def _path_log_decay(
    ancestors, a, a_row, row, last, N, A_log, dt_bias, WORDS: tl.constexpr, CHUNK: tl.constexpr
):
    """G of `row`, g summed along each path, as coarse + fine [B] fp32.

    A strong decay near the root must not cost differences of G the digits of the mild ones below it. Coarse
    parts are multiples of 2^-8: with g cut off at -128, where e^g is 0 in fp32, 512 of them add up exactly.
    """
    bit = tl.arange(0, CHUNK)
    coarse = tl.zeros([row.shape[0]], tl.float32)
    fine = tl.zeros([row.shape[0]], tl.float32)
    for start in range(0, last + 1, CHUNK):
        words = tl.load(ancestors + row * WORDS + start // 64, mask=row < N, other=0)
        a_column = tl.load(a + (start + bit) * a_row, mask=start + bit < N, other=0.0)
        g = tl.maximum(log_decay(a_column, A_log, dt_bias), -128.0)
        g_coarse = tl.floor(g * 256.0 + 0.5) / 256.0
        on_path = (words[:, None] >> (start % 64 + bit)[None, :].to(tl.int64)) & 1 != 0
        coarse += tl.sum(tl.where(on_path, g_coarse[None, :], 0.0), 1)
        fine += tl.sum(tl.where(on_path, (g - g_coarse)[None, :], 0.0), 1)
    return coarse, fine


@triton.jit
def _rows_of_head(x, row, x_row, N, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    mask = (row < N)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + row[:, None] * x_row + column[None, :], mask=mask, other=0.0)


@triton.jit
def _visible(ancestors, row, first_column, N, WORDS: tl.constexpr, B: tl.constexpr):
    """bool [B, B]: is column first_column + c the row itself or above it? B divides 64."""
    words = tl.load(ancestors + row * WORDS + first_column // 64, mask=row < N, other=0)
    shift = (first_column % 64 + tl.arange(0, B)).to(tl.int64)
    return (words[:, None] >> shift[None, :]) & 1 != 0


@triton.jit
def _decayed_product(x, k, scale_x, scale_k, decay, PRECISION: tl.constexpr):
    if PRECISION == "bf16x3":
        product = tl.dot(x, tl.trans(k))
    else:
        zero = tl.zeros([x.shape[0], k.shape[0]], tl.float32)
        product = multiply(x.to(tl.float32), tl.trans(k.to(tl.float32)), zero, PRECISION)
    return product * (scale_x[:, None] * scale_k[None, :]) * decay


@triton.jit
def _decay(coarse, fine, coarse_above, fine_above, visible):
    """e^(G_row - G_column) where visible: at most 1; 0 elsewhere, where the difference may be positive."""
    difference = (coarse[:, None] - coarse_above[None, :]) + (fine[:, None] - fine_above[None, :])
    return tl.exp(tl.where(visible, difference, -float("inf")))


@triton.jit
def _diagonal_tiles(
    q, k, coarse, fine, beta, visible, norm_q, norm_k,
    B: tl.constexpr, LOG_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T_i and P_ii of a block."""
    row, column = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    decay = _decay(coarse, fine, coarse, fine, visible & (column <= row))
    P = _decayed_product(q, k, norm_q, norm_k, decay, PRECISION)
    A = _decayed_product(k, k, beta * norm_k, norm_k, tl.where(column < row, decay, 0.0), PRECISION)
    return unit_lower_inverse(A, B, LOG_B, PRECISION) * beta[None, :], P


@triton.jit
def _times_state(x, S, PRECISION: tl.constexpr):
    """x [B, K] times S [K, BV] in fp32."""
    if PRECISION == "bf16x3" and x.dtype == tl.bfloat16:
        if S.dtype == tl.bfloat16:
            product = tl.dot(x, S)
        else:
            high, low = split(S.to(tl.float32))
            product = tl.dot(x, high, tl.dot(x, low))
    else:
        zero = tl.zeros([x.shape[0], S.shape[1]], tl.float32)
        product = multiply(x.to(tl.float32), S.to(tl.float32), zero, PRECISION)
    return product


@triton.jit
def scalars_kernel(
    mixed_qkv, a, b, A_log, dt_bias, ancestors, scalars,
    N, eps, scale, x_batch, x_row, a_batch, a_row, b_batch, b_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, WORDS: tl.constexpr,
    B: tl.constexpr, LOG_B: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What belongs to one head's rows, [heads, 7, rows]: coarse and fine G, norms of k and q, beta, c, d."""
    if PDL:
        gdc_launch_dependents()
    head, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, v_head = head // HV, head % HV
    mixed_qkv += batch * x_batch + v_head // (HV // H) * K
    padded = tl.num_programs(1) * B
    row = i * B + tl.arange(0, B)
    q = _rows_of_head(mixed_qkv, row, x_row, N, K, K_PAD)
    k = _rows_of_head(mixed_qkv + H * K, row, x_row, N, K, K_PAD)
    beta = tl.load(b + batch * b_batch + v_head + row * b_row, mask=row < N, other=0.0)
    coarse, fine = _path_log_decay(
        ancestors + batch * N * WORDS, a + batch * a_batch + v_head, a_row, row, i * B + B - 1, N,
        tl.load(A_log + v_head), tl.load(dt_bias + v_head), WORDS, CHUNK,
    )  # fmt: skip
    norm_q, norm_k, eG = inverse_norm(q, eps) * scale, inverse_norm(k, eps), tl.exp(coarse + fine)
    scalars += head * (7 * padded) + row
    tl.store(scalars, coarse)
    tl.store(scalars + padded, fine)
    tl.store(scalars + 2 * padded, norm_k)
    tl.store(scalars + 3 * padded, norm_q)
    tl.store(scalars + 4 * padded, sigmoid(beta.to(tl.float32)))
    tl.store(scalars + 5 * padded, eG * norm_k)
    tl.store(scalars + 6 * padded, eG * norm_q)


@triton.jit
def tiles_kernel(
    mixed_qkv, ancestors, scalars, tiles, N, x_batch, x_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, WORDS: tl.constexpr,
    B: tl.constexpr, LOG_B: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile (i, j <= i) of one head: -C and P, on the diagonal T and P."""
    if PDL:
        gdc_launch_dependents()
    head, j, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if j > i:
        return
    padded = tl.num_programs(2) * B
    batch, v_head = head // HV, head % HV
    mixed_qkv += batch * x_batch + v_head // (HV // H) * K
    inside = tl.arange(0, B)
    row, column = i * B + inside, j * B + inside
    q = _rows_of_head(mixed_qkv, row, x_row, N, K, K_PAD)
    k = _rows_of_head(mixed_qkv + H * K, row, x_row, N, K, K_PAD)
    visible = _visible(ancestors + batch * N * WORDS, row, j * B, N, WORDS, B)

    if PDL:
        gdc_wait()
    scalars += head * (7 * padded)
    coarse, fine = tl.load(scalars + row), tl.load(scalars + padded + row)
    norm_k, norm_q = tl.load(scalars + 2 * padded + row), tl.load(scalars + 3 * padded + row)
    plane = padded * padded
    PLANES: tl.constexpr = 2 if PRECISION == "bf16x3" else 1
    first = tiles + head * (2 * PLANES * plane) + row[:, None] * padded + column[None, :]
    second = first + PLANES * plane
    if i == j:
        beta = tl.load(scalars + 4 * padded + row)
        T, P = _diagonal_tiles(q, k, coarse, fine, beta, visible, norm_q, norm_k, B, LOG_B, PRECISION)
        store_tile(first, T, plane, None, PRECISION)
        store_tile(second, P, plane, None, PRECISION)
    else:
        k_above = _rows_of_head(mixed_qkv + H * K, column, x_row, N, K, K_PAD)
        coarse_above, fine_above = tl.load(scalars + column), tl.load(scalars + padded + column)
        norm_above = tl.load(scalars + 2 * padded + column)
        decay = _decay(coarse, fine, coarse_above, fine_above, visible)
        C = _decayed_product(k, k_above, norm_k, norm_above, decay, PRECISION)
        P = _decayed_product(q, k_above, norm_q, norm_above, decay, PRECISION)
        store_tile(first, -C, plane, None, PRECISION)
        store_tile(second, P, plane, None, PRECISION)


@triton.jit
def rows_kernel(
    mixed_qkv, a, b, A_log, dt_bias, states, slots, ancestors, scalars, tiles, updates, out,
    N, blocks, eps, scale, x_batch, x_row, a_batch, a_row, b_batch, b_row, state_slot, state_head, state_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, WORDS: tl.constexpr, B: tl.constexpr, LOG_B: tl.constexpr, CHUNK: tl.constexpr,
    PANEL: tl.constexpr, ONE_BLOCK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows of BV value columns of one head; `updates` keeps U, of which a product takes PANEL rows."""
    head = tl.program_id(1).to(tl.int64)
    batch, v_head = head // HV, head % HV
    k_head = v_head // (HV // H)
    inside, ok, ov = tl.arange(0, B), tl.arange(0, K_PAD), tl.program_id(0) * BV + tl.arange(0, BV)
    in_v = (ov < V)[None, :]
    mixed_qkv += batch * x_batch
    out += (batch * N * HV + v_head) * V + ov[None, :]

    slot = tl.load(slots + batch).to(tl.int64)
    S = tl.load(
        states + slot * state_slot + v_head * state_head + ov[None, :].to(tl.int64) * state_v + ok[:, None],
        mask=(slot >= 0) & in_v & (ok < K)[:, None],
        other=0.0,
    )
    if ONE_BLOCK:
        ancestors += batch * N * WORDS
        A_log_head, dt_bias_head = tl.load(A_log + v_head), tl.load(dt_bias + v_head)
        a += batch * a_batch + v_head
        coarse, fine = _path_log_decay(
            ancestors, a, a_row, inside, B - 1, N, A_log_head, dt_bias_head, WORDS, CHUNK
        )
        beta = tl.load(b + batch * b_batch + v_head + inside * b_row, mask=inside < N, other=0.0)
        beta = sigmoid(beta.to(tl.float32))
        visible = _visible(ancestors, inside, 0, N, WORDS, B)
        blocks = 1
    else:
        PLANES: tl.constexpr = 2 if PRECISION == "bf16x3" else 1
        padded = blocks * B
        plane = padded * padded
        tiles += head * (2 * PLANES * plane)
        scalars += head * (7 * padded)
        updates += head * (PLANES * padded * V) + ov[None, :]

    q_head, k_head, v_at = (
        mixed_qkv + k_head * K,
        mixed_qkv + (H + k_head) * K,
        mixed_qkv + 2 * H * K + v_head * V,
    )
    q = _rows_of_head(q_head, inside, x_row, N, K, K_PAD)
    k = _rows_of_head(k_head, inside, x_row, N, K, K_PAD)
    v = tl.load(v_at + inside[:, None] * x_row + ov[None, :], mask=(inside < N)[:, None] & in_v, other=0.0)
    for i in range(0, blocks):
        row = i * B + inside
        mask = (row < N)[:, None] & in_v
        from_state_k, from_state_q = _times_state(k, S, PRECISION), _times_state(q, S, PRECISION)
        if ONE_BLOCK:
            norm_q, norm_k = inverse_norm(q, eps) * scale, inverse_norm(k, eps)
            T, P = _diagonal_tiles(q, k, coarse, fine, beta, visible, norm_q, norm_k, B, LOG_B, PRECISION)
            eG = tl.exp(coarse + fine)
            factor_k, factor_q = eG * norm_k, eG * norm_q
        else:
            if PDL:
                gdc_wait()
            factor_k, factor_q = tl.load(scalars + 5 * padded + row), tl.load(scalars + 6 * padded + row)
        rest = v.to(tl.float32) - factor_k[:, None] * from_state_k
        if not ONE_BLOCK:  # for the next block, before the waits of this one
            q = _rows_of_head(q_head, row + B, x_row, N, K, K_PAD)
            k = _rows_of_head(k_head, row + B, x_row, N, K, K_PAD)
            v = tl.load(
                v_at + (row + B)[:, None] * x_row + ov[None, :], mask=(row + B < N)[:, None] & in_v, other=0.0
            )
        o = factor_q[:, None] * from_state_q
        if ONE_BLOCK:
            U = multiply(T, rest, tl.zeros([B, BV], tl.float32), PRECISION)
            o = multiply(P, U, o, PRECISION)
        else:
            line = tiles + row[:, None] * padded
            second, own = line + PLANES * plane, (row < padded)[None, :]
            T, T_low = load_tile(line + row[None, :], plane, own, PRECISION)
            P, P_low = load_tile(second + row[None, :], plane, own, PRECISION)
            for start in range(0, i * B, PANEL):
                above = start + tl.arange(0, PANEL)
                known = above < i * B
                U, U_low = load_tile(
                    updates + above[:, None] * V, padded * V, known[:, None] & in_v, PRECISION
                )
                M, M_low = load_tile(line + above[None, :], plane, known[None, :], PRECISION)
                rest = multiply_split(M, M_low, U, U_low, rest, PRECISION)
                M, M_low = load_tile(second + above[None, :], plane, known[None, :], PRECISION)
                o = multiply_split(M, M_low, U, U_low, o, PRECISION)
            if PRECISION == "bf16x3":
                rest, rest_low = split(rest)
            else:
                rest_low = rest
            U = multiply_split(T, T_low, rest, rest_low, tl.zeros([B, BV], tl.float32), PRECISION)
            if PRECISION == "bf16x3":
                U, U_low = split(U)
            else:
                U_low = U
            o = multiply_split(P, P_low, U, U_low, o, PRECISION)
            if i + 1 < blocks:
                at = updates + row[:, None] * V
                tl.store(at, U, mask=in_v)
                if PRECISION == "bf16x3":
                    tl.store(at + padded * V, U_low, mask=in_v)
        tl.store(out + row[:, None] * (HV * V), o.to(out.dtype.element_ty), mask=mask)
        if not ONE_BLOCK:
            tl.debug_barrier()  # the next block's loads of U come from other threads of this program
