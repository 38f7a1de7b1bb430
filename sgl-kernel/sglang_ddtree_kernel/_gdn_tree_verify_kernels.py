"""Triton kernels of `gdn_tree_verify`: the tree-WY form by blocks of rows, forward substitution between them.

With raw (not normalised) keys and queries, S = S_0^T and D, G as in the reference, a block i of rows obeys

    U_i = T_i (V_i - c_i K_i S - sum_{j<i} C_ij U_j),        T_i = (I + diag(beta_i) C_ii)^-1 diag(beta_i),
    O_i = d_i Q_i S + sum_{j<=i} P_ij U_j,

where C = K K^T * D / (|k| |k|), strictly below the diagonal, P = Q K^T * D / (|q| |k| sqrt K), and c, d are
e^G with the norms. None of C, T, P, c, d depends on v or the state. With several blocks they are made once
for all V blocks of a head: first what belongs to a row (`scalars_kernel`), then every tile by a program of
its own (`tiles_kernel`), while `rows_kernel` already multiplies by the state. One block is made in place.

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
    split_tile,
    store_tile,
    unit_lower_inverse,
)

COARSE = tl.constexpr(256.0)  # in units of 1 / COARSE, 512 times -128 is 2^24, which fp32 still holds
FINE = tl.constexpr(268435456.0)  # 2^28: 512 remainders of at most 2^-9 are 2^28


@triton.jit
def _path_log_decay(ancestors, a, a_row, row, last, N, A_log, dt_bias, WORDS: tl.constexpr):
    """G of `row`, g summed along each path, as coarse + fine [B] fp32.

    A strong decay near the root must not cost differences of G the digits of the mild ones below it. Integers
    add up exactly, up to 512 of them with g cut off at -128, where e^g is 0 in fp32; and a warp adds its
    integers in one instruction.
    """
    bit = tl.arange(0, 32)
    coarse = tl.zeros([row.shape[0]], tl.int32)
    fine = tl.zeros([row.shape[0]], tl.int32)
    for start in range(0, last + 1, 32):
        words = tl.load(ancestors + row * WORDS + start // 64, mask=row < N, other=0)
        words = (words >> (start % 64)).to(tl.int32)
        a_column = tl.load(a + (start + bit) * a_row, mask=start + bit < N, other=0.0)
        g = tl.maximum(log_decay(a_column, A_log, dt_bias), -128.0)
        g_coarse = tl.floor(g * COARSE + 0.5)
        g_fine = (g - g_coarse / COARSE) * FINE
        on_path = (words[:, None] >> bit[None, :]) & 1 != 0
        coarse += tl.sum(tl.where(on_path, g_coarse.to(tl.int32)[None, :], 0), 1)
        fine += tl.sum(tl.where(on_path, g_fine.to(tl.int32)[None, :], 0), 1)
    return coarse.to(tl.float32) / COARSE, fine.to(tl.float32) / FINE


@triton.jit
def _rows_of_head(x, row, x_row, N, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    mask = (row < N)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + row[:, None] * x_row + column[None, :], mask=mask, other=0.0)


@triton.jit
def _visible(ancestors, row, first_column, N, WORDS: tl.constexpr, B: tl.constexpr):
    """bool [B, B]: is column first_column + c the row itself or above it? B divides 32."""
    words = tl.load(ancestors + row * WORDS + first_column // 64, mask=row < N, other=0)
    words = (words >> (first_column % 64)).to(tl.int32)
    return (words[:, None] >> tl.arange(0, B)[None, :]) & 1 != 0


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
def _diagonal_inverse(k, norm_k, beta, decay, B: tl.constexpr, LOG_B: tl.constexpr, PRECISION: tl.constexpr):
    """T_i of a block."""
    below = tl.arange(0, B)[None, :] < tl.arange(0, B)[:, None]
    A = _decayed_product(k, k, beta * norm_k, norm_k, tl.where(below, decay, 0.0), PRECISION)
    return unit_lower_inverse(A, B, LOG_B, PRECISION) * beta[None, :]


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
    B: tl.constexpr, LOG_B: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What belongs to one head's rows, [heads, 7, rows]: c, d, coarse and fine G, norms of k and q, beta."""
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
        tl.load(A_log + v_head), tl.load(dt_bias + v_head), WORDS,
    )  # fmt: skip
    norm_q, norm_k, eG = inverse_norm(q, eps) * scale, inverse_norm(k, eps), tl.exp(coarse + fine)
    scalars += head * (7 * padded) + row
    tl.store(scalars, eG * norm_k)
    tl.store(scalars + padded, eG * norm_q)
    tl.store(scalars + 2 * padded, coarse)
    tl.store(scalars + 3 * padded, fine)
    tl.store(scalars + 4 * padded, norm_k)
    tl.store(scalars + 5 * padded, norm_q)
    tl.store(scalars + 6 * padded, sigmoid(beta.to(tl.float32)))


@triton.jit
def tiles_kernel(
    mixed_qkv, ancestors, scalars, tiles, N, x_batch, x_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, WORDS: tl.constexpr,
    B: tl.constexpr, LOG_B: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
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
    row, column = i * B + inside, tl.where(j < 0, i, j) * B + inside
    visible = _visible(ancestors + batch * N * WORDS, row, tl.where(j < 0, i, j) * B, N, WORDS, B)
    k_above = _rows_of_head(mixed_qkv + H * K, column, x_row, N, K, K_PAD)
    tiles += head * (2 * PLANES * plane) + row[:, None] * padded + column[None, :]
    scalars += head * (7 * padded)
    if j < 0:
        if PDL:
            gdc_wait()
        coarse, fine = tl.load(scalars + 2 * padded + row), tl.load(scalars + 3 * padded + row)
        norm_k, beta = tl.load(scalars + 4 * padded + row), tl.load(scalars + 6 * padded + row)
        decay = _decay(coarse, fine, coarse, fine, visible)
        T = _diagonal_inverse(k_above, norm_k, beta, decay, B, LOG_B, PRECISION)
        store_tile(tiles, *split_tile(T, PRECISION), plane, PRECISION)
    else:
        q = _rows_of_head(mixed_qkv, row, x_row, N, K, K_PAD)
        k = k_above
        if j < i:
            k = _rows_of_head(mixed_qkv + H * K, row, x_row, N, K, K_PAD)
        if PDL:
            gdc_wait()
        coarse, fine = tl.load(scalars + 2 * padded + row), tl.load(scalars + 3 * padded + row)
        norm_k, norm_q = tl.load(scalars + 4 * padded + row), tl.load(scalars + 5 * padded + row)
        coarse_above, fine_above = (
            tl.load(scalars + 2 * padded + column),
            tl.load(scalars + 3 * padded + column),
        )
        norm_above = tl.load(scalars + 4 * padded + column)
        decay = _decay(coarse, fine, coarse_above, fine_above, visible)
        P = _decayed_product(q, k_above, norm_q, norm_above, decay, PRECISION)
        store_tile(tiles + PLANES * plane, *split_tile(P, PRECISION), plane, PRECISION)
        if j < i:
            C = _decayed_product(k, k_above, norm_k, norm_above, decay, PRECISION)
            store_tile(tiles, *split_tile(-C, PRECISION), plane, PRECISION)


@triton.jit
def _load_pair(tiles, i, j, padded, plane, second_at, B: tl.constexpr, PRECISION: tl.constexpr):
    """T_i or -C_ij, then P_ij, each high and low."""
    inside = tl.arange(0, B)
    at = tiles + (i * B + inside)[:, None] * padded + (j * B + inside)[None, :]
    return load_tile(at, plane, None, PRECISION) + load_tile(at + second_at, plane, None, PRECISION)


@triton.jit
def rows_kernel(
    mixed_qkv, a, b, A_log, dt_bias, states, slots, ancestors, scalars, tiles, updates, out,
    N, eps, scale, x_batch, x_row, a_batch, a_row, b_batch, b_row, state_slot, state_head, state_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, WORDS: tl.constexpr, B: tl.constexpr, LOG_B: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, PANEL: tl.constexpr, ONE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All rows of BV value columns of one head, GROUP of BLOCKS at a time: what U a group has stays in registers.

    `updates` keeps the U of the groups before, of which PANEL rows enter a product.
    """
    head = tl.program_id(1).to(tl.int64)
    batch, v_head = head // HV, head % HV
    k_head = v_head // (HV // H)
    inside, ok, ov = tl.arange(0, B), tl.arange(0, K_PAD), tl.program_id(0) * BV + tl.arange(0, BV)
    in_v = (ov < V)[None, :]
    mixed_qkv += batch * x_batch
    out += (batch * N * HV + v_head) * V + ov[None, :]
    q_head = mixed_qkv + k_head * K
    v_head_rows = mixed_qkv + 2 * H * K + v_head * V + ov[None, :]

    slot = tl.load(slots + batch).to(tl.int64)
    S = tl.load(
        states + slot * state_slot + v_head * state_head + ov[None, :].to(tl.int64) * state_v + ok[:, None],
        mask=(slot >= 0) & in_v & (ok < K)[:, None],
        other=0.0,
    )
    if ONE_BLOCK:
        q = _rows_of_head(q_head, inside, x_row, N, K, K_PAD)
        k = _rows_of_head(q_head + H * K, inside, x_row, N, K, K_PAD)
        mask = (inside < N)[:, None] & in_v
        v = tl.load(v_head_rows + inside[:, None] * x_row, mask=mask, other=0.0)
        ancestors += batch * N * WORDS
        coarse, fine = _path_log_decay(
            ancestors, a + batch * a_batch + v_head, a_row, inside, B - 1, N,
            tl.load(A_log + v_head), tl.load(dt_bias + v_head), WORDS,
        )  # fmt: skip
        beta = tl.load(b + batch * b_batch + v_head + inside * b_row, mask=inside < N, other=0.0)
        beta = sigmoid(beta.to(tl.float32))
        visible = _visible(ancestors, inside, 0, N, WORDS, B)
        norm_q, norm_k, eG = inverse_norm(q, eps) * scale, inverse_norm(k, eps), tl.exp(coarse + fine)
        from_state_k, from_state_q = _times_state(k, S, PRECISION), _times_state(q, S, PRECISION)
        decay = _decay(coarse, fine, coarse, fine, visible)
        P = _decayed_product(q, k, norm_q, norm_k, decay, PRECISION)
        T = _diagonal_inverse(k, norm_k, beta, decay, B, LOG_B, PRECISION)
        rest = v.to(tl.float32) - (eG * norm_k)[:, None] * from_state_k
        U = multiply(T, rest, tl.zeros([B, BV], tl.float32), PRECISION)
        o = multiply(P, U, (eG * norm_q)[:, None] * from_state_q, PRECISION)
        tl.store(out + inside[:, None] * (HV * V), o.to(out.dtype.element_ty), mask=mask)
    else:
        PLANES: tl.constexpr = 2 if PRECISION == "bf16x3" else 1
        padded = BLOCKS * B
        plane = padded * padded
        tiles += head * (2 * PLANES * plane)
        second_at = PLANES * plane
        scalars += head * (7 * padded)
        padded_v = tl.num_programs(0) * BV
        updates += head * (PLANES * padded * padded_v) + ov[None, :]
        for first in range(0, BLOCKS, GROUP):
            k = _rows_of_head(q_head + H * K, first * B + inside, x_row, N, K, K_PAD)
            q = _rows_of_head(q_head, first * B + inside, x_row, N, K, K_PAD)
            rests, outs, vs = (), (), ()
            for m in tl.static_range(GROUP):  # needs no tile: runs beside the launch that makes them
                row = (first + m) * B + inside
                mask = (row < N)[:, None] & in_v
                vs += (tl.load(v_head_rows + row[:, None] * x_row, mask=mask, other=0.0),)
                this_k, this_q = k, q
                if m + 1 < GROUP:
                    k = _rows_of_head(q_head + H * K, row + B, x_row, N, K, K_PAD)
                    q = _rows_of_head(q_head, row + B, x_row, N, K, K_PAD)
                rests += (_times_state(this_k, S, PRECISION),)
                outs += (_times_state(this_q, S, PRECISION),)
            if PDL:
                gdc_wait()
            # A barrier between a load and its use costs the load's whole latency, so loads come first.
            factors_k, factors_q = (), ()
            for m in tl.static_range(GROUP):
                row = (first + m) * B + inside
                factors_k += (tl.load(scalars + row),)
                factors_q += (tl.load(scalars + padded + row),)
            diagonal = _load_pair(tiles, first, first, padded, plane, second_at, B, PRECISION)
            raw_rests, raw_outs = rests, outs
            rests, outs = (), ()
            for m in tl.static_range(GROUP):
                rests += (vs[m].to(tl.float32) - factors_k[m][:, None] * raw_rests[m],)
                outs += (factors_q[m][:, None] * raw_outs[m],)
            for start in range(0, first * B, PANEL):
                above = start + tl.arange(0, PANEL)
                known = above < first * B
                U, U_low = load_tile(
                    updates + above[:, None] * padded_v, padded * padded_v, known[:, None], PRECISION
                )
                raw_rests, raw_outs = rests, outs
                rests, outs = (), ()
                for m in tl.static_range(GROUP):
                    at = tiles + ((first + m) * B + inside)[:, None] * padded + above[None, :]
                    M, M_low = load_tile(at, plane, known[None, :], PRECISION)
                    P, P_low = load_tile(at + second_at, plane, known[None, :], PRECISION)
                    rests += (multiply_split(M, M_low, U, U_low, raw_rests[m], PRECISION),)
                    outs += (multiply_split(P, P_low, U, U_low, raw_outs[m], PRECISION),)
            for m in tl.static_range(GROUP):
                T, T_low, P, P_low = diagonal
                below = ()
                for n in tl.static_range(m + 1, GROUP):
                    below += (
                        _load_pair(tiles, first + n, first + m, padded, plane, second_at, B, PRECISION),
                    )
                if m + 1 < GROUP:
                    diagonal = _load_pair(
                        tiles, first + m + 1, first + m + 1, padded, plane, second_at, B, PRECISION
                    )
                rest, rest_low = split_tile(rests[m], PRECISION)
                U = multiply_split(T, T_low, rest, rest_low, tl.zeros([B, BV], tl.float32), PRECISION)
                U, U_low = split_tile(U, PRECISION)
                raw_rests, raw_outs = rests, outs
                rests = raw_rests[: m + 1]
                outs = raw_outs[:m] + (multiply_split(P, P_low, U, U_low, raw_outs[m], PRECISION),)
                for n in tl.static_range(m + 1, GROUP):
                    M, M_low, P, P_low = below[n - m - 1]
                    rests += (multiply_split(M, M_low, U, U_low, raw_rests[n], PRECISION),)
                    outs += (multiply_split(P, P_low, U, U_low, raw_outs[n], PRECISION),)
                if first + GROUP < BLOCKS:
                    column = (first + m) * B + inside
                    store_tile(updates + column[:, None] * padded_v, U, U_low, padded * padded_v, PRECISION)
            for m in tl.static_range(GROUP):
                row = (first + m) * B + inside
                mask = (row < N)[:, None] & in_v
                tl.store(out + row[:, None] * (HV * V), outs[m].to(out.dtype.element_ty), mask=mask)
            if first + GROUP < BLOCKS:
                tl.debug_barrier()  # the next group's loads of U come from other threads of this program
