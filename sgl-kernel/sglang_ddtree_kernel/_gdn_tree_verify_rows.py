"""The walk of `gdn_tree_verify` over the rows of a head, by the formulas of `_gdn_tree_verify_tiles`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sglang_ddtree_kernel._gdn_tree_verify_tiles import (
    SCALARS,
    against_root,
    decay_of_pairs,
    decayed_product,
    diagonal_inverse,
    path_log_decay,
    rows_of_head,
    visible_columns,
)
from sglang_ddtree_kernel._gdn_triton import inverse_norm, log_decay, sigmoid
from sglang_ddtree_kernel._split_triton import (
    load_tile,
    multiply,
    multiply_split,
    split,
    split_tile,
    store_tile,
)

PANEL = tl.constexpr(64)  # rows of U from the groups before that enter one product


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
def _root(
    S, q_row, v_row, a, b, A_log, dt_bias, eps, scale, in_v,
    H: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """U and the output of row 0, [BV] each. Its k and q are the first rows of a tile, as products are fast."""
    at, part = tl.arange(0, S.shape[0]), tl.arange(0, 16)
    x = tl.load(
        q_row + tl.where(part == 0, H * K, 0)[:, None] + at[None, :],
        mask=(part < 2)[:, None] & (at < K)[None, :],
        other=0.0,
    )
    root_k = tl.load(q_row + H * K + at, mask=at < K, other=0.0).to(tl.float32)
    v = tl.sum(tl.load(v_row, mask=in_v, other=0.0).to(tl.float32), 0)
    norm = inverse_norm(x, eps)
    times_k = tl.sum(x.to(tl.float32) * root_k[None, :], 1) * norm
    times_k = tl.sum(tl.where(part == 1, times_k, 0.0)) * tl.sum(tl.where(part == 0, norm, 0.0))
    from_state = _times_state(x, S, PRECISION) * norm[:, None]
    decay = tl.exp(log_decay(tl.load(a), A_log, dt_bias))
    from_state_k = tl.sum(tl.where((part == 0)[:, None], from_state, 0.0), 0)
    from_state_q = tl.sum(tl.where((part == 1)[:, None], from_state, 0.0), 0)
    U = sigmoid(tl.load(b).to(tl.float32)) * (v - decay * from_state_k)
    return U, (decay * from_state_q + times_k * U) * scale


@triton.jit
def _load_pair(tiles, row, column, padded, plane, second_at, mask, PRECISION: tl.constexpr):
    """T_i or -C_ij, then P_ij, each high and low."""
    at = tiles + row[:, None] * padded + column[None, :]
    return load_tile(at, plane, mask, PRECISION) + load_tile(at + second_at, plane, mask, PRECISION)


@triton.jit
def rows_kernel(
    mixed_qkv, a, b, A_log, dt_bias, states, slots, ancestors, scalars, tiles, updates, out,
    N, eps, scale, x_batch, x_row, a_batch, a_row, b_batch, b_row, state_slot, state_head, state_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, WORDS: tl.constexpr, FIRST: tl.constexpr, B: tl.constexpr, LOG_B: tl.constexpr,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, ONE_BLOCK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows of BV value columns of one head, GROUP of BLOCKS at a time: what U a group has stays in registers.

    `updates` keeps the U of the groups before.
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
    a += batch * a_batch + v_head
    b += batch * b_batch + v_head
    A_log, dt_bias = tl.load(A_log + v_head), tl.load(dt_bias + v_head)
    if FIRST:
        U_root, o_root = _root(
            S, q_head, v_head_rows, a, b, A_log, dt_bias, eps, scale, in_v, H, K, PRECISION
        )
        tl.store(out, o_root[None, :].to(out.dtype.element_ty), mask=in_v)
    if ONE_BLOCK:
        row = FIRST + inside
        q = rows_of_head(q_head, row, x_row, N, K, K_PAD)
        k = rows_of_head(q_head + H * K, row, x_row, N, K, K_PAD)
        mask = (row < N)[:, None] & in_v
        v = tl.load(v_head_rows + row[:, None] * x_row, mask=mask, other=0.0)
        ancestors += batch * N * WORDS
        coarse, fine = path_log_decay(ancestors, a, a_row, row, FIRST + B - 1, N, A_log, dt_bias, WORDS)
        beta = sigmoid(tl.load(b + row * b_row, mask=row < N, other=0.0).to(tl.float32))
        visible = visible_columns(ancestors, row, 0, N, FIRST, WORDS, B)
        norm_q, norm_k, eG = inverse_norm(q, eps) * scale, inverse_norm(k, eps), tl.exp(coarse + fine)
        from_state_k, from_state_q = _times_state(k, S, PRECISION), _times_state(q, S, PRECISION)
        decay = decay_of_pairs(coarse, fine, coarse, fine, visible)
        P = decayed_product(q, k, norm_q, norm_k, decay, PRECISION)
        T = diagonal_inverse(k, norm_k, beta, decay, B, LOG_B, PRECISION)
        rest = v.to(tl.float32) - (eG * norm_k)[:, None] * from_state_k
        o = (eG * norm_q)[:, None] * from_state_q
        if FIRST:
            C_root, P_root = against_root(
                ancestors, q, k, norm_q, norm_k, coarse, fine, row, q_head + H * K, a, A_log, dt_bias, N, eps,
                K, K_PAD, WORDS,
            )  # fmt: skip
            rest -= C_root[:, None] * U_root[None, :]
            o += P_root[:, None] * U_root[None, :]
        U = multiply(T, rest, tl.zeros([B, BV], tl.float32), PRECISION)
        o = multiply(P, U, o, PRECISION)
        tl.store(out + row[:, None] * (HV * V), o.to(out.dtype.element_ty), mask=mask)
    else:
        PLANES: tl.constexpr = 2 if PRECISION == "bf16x3" else 1
        padded = BLOCKS * B
        plane = padded * padded
        tiles += head * (2 * PLANES * plane)
        second_at = PLANES * plane
        scalars += head * (SCALARS * padded)
        padded_v = tl.num_programs(0) * BV
        updates += head * (PLANES * padded * padded_v) + ov[None, :]
        for first in range(0, BLOCKS, GROUP):
            k = rows_of_head(q_head + H * K, FIRST + first * B + inside, x_row, N, K, K_PAD)
            q = rows_of_head(q_head, FIRST + first * B + inside, x_row, N, K, K_PAD)
            places, vs, from_state_k, from_state_q = (), (), (), ()
            for m in tl.static_range(GROUP):  # needs no tile: runs beside the launch that makes them
                row = FIRST + (first + m) * B + inside
                mask = (row < N)[:, None] & in_v
                places += ((first + m) * B + inside,)
                vs += (tl.load(v_head_rows + row[:, None] * x_row, mask=mask, other=0.0),)
                this_k, this_q = k, q
                if m + 1 < GROUP:
                    k = rows_of_head(q_head + H * K, row + B, x_row, N, K, K_PAD)
                    q = rows_of_head(q_head, row + B, x_row, N, K, K_PAD)
                from_state_k += (_times_state(this_k, S, PRECISION),)
                from_state_q += (_times_state(this_q, S, PRECISION),)
            if PDL:
                gdc_wait()
            # A barrier between a load and its use costs the load's whole latency, so loads come first.
            factors_k, factors_q, C_root, P_root = (), (), (), ()
            for m in tl.static_range(GROUP):
                factors_k += (tl.load(scalars + places[m]),)
                factors_q += (tl.load(scalars + padded + places[m]),)
                if FIRST:
                    C_root += (tl.load(scalars + 7 * padded + places[m]),)
                    P_root += (tl.load(scalars + 8 * padded + places[m]),)
            diagonal = _load_pair(tiles, places[0], places[0], padded, plane, second_at, None, PRECISION)
            rests, outs = (), ()
            for m in tl.static_range(GROUP):
                rest = vs[m].to(tl.float32) - factors_k[m][:, None] * from_state_k[m]
                o = factors_q[m][:, None] * from_state_q[m]
                if FIRST:
                    rest -= C_root[m][:, None] * U_root[None, :]
                    o += P_root[m][:, None] * U_root[None, :]
                rests += (rest,)
                outs += (o,)
            for start in range(0, first * B, PANEL):
                above = start + tl.arange(0, PANEL)
                known = above < first * B
                U, U_low = load_tile(
                    updates + above[:, None] * padded_v, padded * padded_v, known[:, None], PRECISION
                )
                raw_rests, raw_outs = rests, outs
                rests, outs = (), ()
                for m in tl.static_range(GROUP):
                    M, M_low, P, P_low = _load_pair(
                        tiles, places[m], above, padded, plane, second_at, known[None, :], PRECISION
                    )
                    rests += (multiply_split(M, M_low, U, U_low, raw_rests[m], PRECISION),)
                    outs += (multiply_split(P, P_low, U, U_low, raw_outs[m], PRECISION),)
            for m in tl.static_range(GROUP):
                T, T_low, P, P_low = diagonal
                below = ()
                for n in tl.static_range(m + 1, GROUP):
                    below += (
                        _load_pair(tiles, places[n], places[m], padded, plane, second_at, None, PRECISION),
                    )
                if m + 1 < GROUP:
                    diagonal = _load_pair(
                        tiles, places[m + 1], places[m + 1], padded, plane, second_at, None, PRECISION
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
                    store_tile(
                        updates + places[m][:, None] * padded_v, U, U_low, padded * padded_v, PRECISION
                    )
            for m in tl.static_range(GROUP):
                row = FIRST + places[m]
                mask = (row < N)[:, None] & in_v
                tl.store(out + row[:, None] * (HV * V), outs[m].to(out.dtype.element_ty), mask=mask)
            if first + GROUP < BLOCKS:
                tl.debug_barrier()  # the next group's loads of U come from other threads of this program
