"""Triton kernels of `gdn_tree_verify`: the tree-WY form by blocks of rows, with forward substitution between them.

With raw (not normalised) keys and queries, S = S_0^T and D, G as in the reference, a block i of rows obeys

    U_i = T_i (V_i - c_i K_i S - sum_{j<i} C_ij U_j),        T_i = (I + diag(beta_i) C_ii)^-1 diag(beta_i),
    O_i = d_i Q_i S + sum_{j<=i} P_ij U_j,

where C = K K^T * D / (|k| |k|), strictly below the diagonal, P = Q K^T * D / (|q| |k| sqrt K) and c, d are e^G with
the norms. C, T, P, c, d do not depend on v or the state: with several blocks a first launch makes them (`_tiles_kernel`),
once for all V blocks of a head, every tile a program of its own; with one block they are made in place.

PRECISION "bf16x3" is for bf16 inputs: products of raw keys and queries are then exact on bf16 tensor cores, the fp32
state enters as two bf16 halves (16 bits of mantissa), and products of fp32 tiles take three bf16 products. Everything
stays closer to fp32 than tf32 would. Other inputs take "tf32x3"; the interpreter knows neither and takes "ieee".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree_kernel._gdn_triton import inverse_norm, log_decay, sigmoid


@triton.jit
def _path_log_decay(ancestors, a, a_row, row, last, N, A_log, dt_bias, WORDS: tl.constexpr, CHUNK: tl.constexpr):
    """G [B] of `row`: g summed along each path, in float64.

    A strong decay near the root must not cost the digits of the mild ones below it, which differences of G carry.
    """
    bit = tl.arange(0, CHUNK)
    G = tl.zeros([row.shape[0]], tl.float64)
    for start in range(0, last + 1, CHUNK):
        words = tl.load(ancestors + row * WORDS + start // 64, mask=row < N, other=0)
        g = log_decay(
            tl.load(a + (start + bit) * a_row, mask=start + bit < N, other=0.0), A_log, dt_bias
        )
        on_path = (words[:, None] >> (start % 64 + bit)[None, :].to(tl.int64)) & 1 != 0
        G += tl.sum(tl.where(on_path, g[None, :].to(tl.float64), 0.0), 1)
    return G


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
        product = tl.dot(x.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision=PRECISION)
    return product * (scale_x[:, None] * scale_k[None, :]) * decay


@triton.jit
def _decay(G_row, G_column, visible):
    """e^(G_row - G_column) where visible: at most 1; 0 elsewhere, where the difference may be positive."""
    difference = (G_row[:, None] - G_column[None, :]).to(tl.float32)
    return tl.exp(tl.where(visible, difference, -float("inf")))


@triton.jit
def _unit_lower_inverse(A, B: tl.constexpr, LOG_B: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [B, B], in log2 B merges of neighbouring diagonal blocks.

    [[X, 0], [Y, Z]]^-1 = [[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]]. Powers of A never appear: with near-identical keys
    they would grow to binomial size and cancel.
    """
    row, column = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, A, 0.0)
    for level in tl.static_range(1, LOG_B):
        merges = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        left = tl.dot(inverse, tl.where(merges, A, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(left, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _diagonal_tiles(
    q, k, G, beta, visible, norm_q, norm_k,
    B: tl.constexpr, LOG_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T_i and P_ii of a block."""
    row, column = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    decay = _decay(G, G, visible & (column <= row))
    P = _decayed_product(q, k, norm_q, norm_k, decay, PRECISION)
    A = _decayed_product(k, k, beta * norm_k, norm_k, tl.where(column < row, decay, 0.0), PRECISION)
    T = _unit_lower_inverse(A, B, LOG_B, PRECISION) * beta[None, :]
    return T, P


@triton.jit
def _times_state(x, S, PRECISION: tl.constexpr):
    """x [B, K] times S [K, BV] in fp32."""
    if PRECISION == "bf16x3":
        high = S.to(tl.bfloat16)
        product = tl.dot(x, high)
        if S.dtype != tl.bfloat16:
            low = (S.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
            product = tl.dot(x, low, product)
    else:
        product = tl.dot(x.to(tl.float32), S.to(tl.float32), input_precision=PRECISION)
    return product


@triton.jit
def _tiles_kernel(
    mixed_qkv, a, b, A_log, dt_bias, ancestors, tiles, factors,
    N, eps, scale, x_batch, x_row, a_batch, a_row, b_batch, b_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, WORDS: tl.constexpr,
    B: tl.constexpr, LOG_B: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile (i, j <= i) of one head: C and P, or T and P on the diagonal, with the rows' factors c and d."""
    head, j, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if j > i:
        return
    blocks = tl.num_programs(2)
    batch, v_head = head // HV, head % HV
    k_head = v_head // (HV // H)
    mixed_qkv += batch * x_batch + k_head * K
    a += batch * a_batch + v_head
    b += batch * b_batch + v_head
    ancestors += batch * N * WORDS
    A_log_head, dt_bias_head = tl.load(A_log + v_head), tl.load(dt_bias + v_head)

    inside = tl.arange(0, B)
    row, column = i * B + inside, j * B + inside
    q = _rows_of_head(mixed_qkv, row, x_row, N, K, K_PAD)
    k = _rows_of_head(mixed_qkv + H * K, row, x_row, N, K, K_PAD)
    norm_q, norm_k = inverse_norm(q, eps) * scale, inverse_norm(k, eps)
    G = _path_log_decay(ancestors, a, a_row, row, i * B + B - 1, N, A_log_head, dt_bias_head, WORDS, CHUNK)
    visible = _visible(ancestors, row, j * B, N, WORDS, B)

    tile = head * (blocks * (blocks + 1) // 2) + i * (i + 1) // 2 + j
    tiles += tile * (2 * B * B) + inside[:, None] * B + inside[None, :]
    if i == j:
        beta = sigmoid(tl.load(b + row * b_row, mask=row < N, other=0.0).to(tl.float32))
        first, P = _diagonal_tiles(q, k, G, beta, visible, norm_q, norm_k, B, LOG_B, PRECISION)
        tl.store(tiles, first)
        tl.store(tiles + B * B, P)
        eG = tl.exp(G.to(tl.float32))
        factor = factors + head * (blocks * B * 2) + row
        tl.store(factor, eG * norm_k)
        tl.store(factor + blocks * B, eG * norm_q)
    else:
        k_above = _rows_of_head(mixed_qkv + H * K, column, x_row, N, K, K_PAD)
        norm_above = inverse_norm(k_above, eps)
        G_above = _path_log_decay(
            ancestors, a, a_row, column, j * B + B - 1, N, A_log_head, dt_bias_head, WORDS, CHUNK
        )
        decay = _decay(G, G_above, visible)
        tl.store(tiles, _decayed_product(k, k_above, norm_k, norm_above, decay, PRECISION))
        tl.store(tiles + B * B, _decayed_product(q, k_above, norm_q, norm_above, decay, PRECISION))


@triton.jit
def _rows_kernel(
    mixed_qkv, a, b, A_log, dt_bias, states, slots, ancestors, tiles, factors, updates, out,
    N, blocks, eps, scale, x_batch, x_row, a_batch, a_row, b_batch, b_row, state_slot, state_head, state_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    WORDS: tl.constexpr, B: tl.constexpr, LOG_B: tl.constexpr, CHUNK: tl.constexpr, ONE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All rows of BV value columns of one head. `updates` [heads, rows, V] keeps the U of earlier blocks."""
    head = tl.program_id(1).to(tl.int64)
    batch, v_head = head // HV, head % HV
    k_head = v_head // (HV // H)
    inside, ok, ov = tl.arange(0, B), tl.arange(0, K_PAD), tl.program_id(0) * BV + tl.arange(0, BV)
    mixed_qkv += batch * x_batch
    out += (batch * N * HV + v_head) * V + ov[None, :]

    slot = tl.load(slots + batch).to(tl.int64)
    S = tl.load(
        states + slot * state_slot + v_head * state_head + ov[None, :].to(tl.int64) * state_v + ok[:, None],
        mask=(slot >= 0) & (ov < V)[None, :] & (ok < K)[:, None],
        other=0.0,
    )
    if ONE_BLOCK:
        ancestors += batch * N * WORDS
        A_log_head, dt_bias_head = tl.load(A_log + v_head), tl.load(dt_bias + v_head)
        a += batch * a_batch + v_head
        G = _path_log_decay(ancestors, a, a_row, inside, B - 1, N, A_log_head, dt_bias_head, WORDS, CHUNK)
        beta = tl.load(b + batch * b_batch + v_head + inside * b_row, mask=inside < N, other=0.0)
        beta = sigmoid(beta.to(tl.float32))
        visible = _visible(ancestors, inside, 0, N, WORDS, B)
        blocks = 1
    else:
        tiles += head * (blocks * (blocks + 1) // 2) * (2 * B * B) + inside[:, None] * B + inside[None, :]
        factors += head * (blocks * B * 2)
        updates += head * (blocks * B) * V + ov[None, :]

    for i in range(0, blocks):
        row = i * B + inside
        mask = (row < N)[:, None] & (ov < V)[None, :]
        q = _rows_of_head(mixed_qkv + k_head * K, row, x_row, N, K, K_PAD)
        k = _rows_of_head(mixed_qkv + (H + k_head) * K, row, x_row, N, K, K_PAD)
        v = tl.load(
            mixed_qkv + 2 * H * K + v_head * V + row[:, None] * x_row + ov[None, :], mask=mask, other=0.0
        )
        if ONE_BLOCK:
            norm_q, norm_k = inverse_norm(q, eps) * scale, inverse_norm(k, eps)
            T, P = _diagonal_tiles(q, k, G, beta, visible, norm_q, norm_k, B, LOG_B, PRECISION)
            eG = tl.exp(G.to(tl.float32))
            factor_k, factor_q = eG * norm_k, eG * norm_q
        else:
            factor_k, factor_q = tl.load(factors + row), tl.load(factors + blocks * B + row)
        rest = v.to(tl.float32) - factor_k[:, None] * _times_state(k, S, PRECISION)
        o = factor_q[:, None] * _times_state(q, S, PRECISION)
        if not ONE_BLOCK:
            for j in range(0, i):
                C = tl.load(tiles)
                P_above = tl.load(tiles + B * B)
                U_above = tl.load(updates + (j * B + inside)[:, None] * V, mask=(ov < V)[None, :], other=0.0)
                rest -= tl.dot(C, U_above, input_precision=PRECISION)
                o += tl.dot(P_above, U_above, input_precision=PRECISION)
                tiles += 2 * B * B
            T = tl.load(tiles)
            P = tl.load(tiles + B * B)
            tiles += 2 * B * B
        U = tl.dot(T, rest, input_precision=PRECISION)
        o += tl.dot(P, U, input_precision=PRECISION)
        tl.store(out + row[:, None] * (HV * V), o.to(out.dtype.element_ty), mask=mask)
        if not ONE_BLOCK:
            tl.store(updates + row[:, None] * V, U, mask=(ov < V)[None, :])
            tl.debug_barrier()  # the next block's loads of U come from other threads of this program


def _block_rows(num_rows: int) -> int:
    return 16 if num_rows <= 16 else 32


def _value_columns(programs: int, V: int) -> int:
    """Value columns of a program: fewer where there are too few heads to fill the device."""
    columns = 32 if programs <= 132 else 64
    return min(columns, max(16, triton.next_power_of_2(V)))


def gdn_tree_verify_triton(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    ancestors: torch.Tensor,
    num_k_heads: int,
    head_k_dim: int,
    *,
    eps: float = 1e-6,
    block_rows: int | None = None,
    value_columns: int | None = None,
    num_warps: int = 4,
    one_block: bool = True,
) -> torch.Tensor:
    """`gdn_tree_verify` in one launch for up to a block of rows, in two beyond; the last four arguments tune it.

    Workspace of the two launches, in fp32 per request and value head: N (N + block_rows) for the tiles and N V for
    the updates.
    """
    mixed_qkv, a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (mixed_qkv, a, b))
    if states.stride(3) != 1:
        raise ValueError(f"states must be contiguous along K, got strides {states.stride()}")
    bs, N, _ = mixed_qkv.shape
    HV, V, words = states.shape[1], states.shape[2], ancestors.shape[2]
    out = mixed_qkv.new_empty(bs, N, HV, V)
    heads = bs * HV
    if heads * N == 0:
        return out
    B = block_rows or _block_rows(N)
    BV = value_columns or _value_columns(heads, V)
    blocks = triton.cdiv(N, B)
    one_block = one_block and blocks == 1
    if triton.knobs.runtime.interpret:
        precision = "ieee"
    else:
        precision = "bf16x3" if mixed_qkv.dtype == torch.bfloat16 else "tf32x3"
    inputs = (mixed_qkv, a, b, A_log.contiguous(), dt_bias.contiguous())
    strides = (*mixed_qkv.stride()[:2], *a.stride()[:2], *b.stride()[:2])
    common = dict(
        H=num_k_heads,
        HV=HV,
        K=head_k_dim,
        K_PAD=max(16, triton.next_power_of_2(head_k_dim)),
        WORDS=words,
        B=B,
        LOG_B=B.bit_length() - 1,
        CHUNK=16 if N <= 16 else 32 if N <= 32 else 64,
        PRECISION=precision,
        num_stages=1,
    )
    ancestors, scale = ancestors.contiguous(), head_k_dim**-0.5
    tiles = factors = updates = None
    if not one_block:
        tiles = out.new_empty(heads, blocks * (blocks + 1) // 2, 2, B, B, dtype=torch.float32)
        factors = out.new_empty(heads, 2, blocks * B, dtype=torch.float32)
        updates = out.new_empty(heads, blocks * B, V, dtype=torch.float32)
        _tiles_kernel[(heads, blocks, blocks)](
            *inputs, ancestors, tiles, factors, N, eps, scale, *strides, **common, num_warps=4
        )
    _rows_kernel[(triton.cdiv(V, BV), heads)](
        *inputs,
        states,
        slots,
        ancestors,
        tiles,
        factors,
        updates,
        out,
        N,
        blocks,
        eps,
        scale,
        *strides,
        *states.stride()[:3],
        V=V,
        BV=BV,
        ONE_BLOCK=one_block,
        **common,
        num_warps=num_warps,
    )
    return out
