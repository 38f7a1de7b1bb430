"""Triton kernels of `gdn_commit`: one launch for what does not depend on the state, one for the fold itself.

`_path_kernel` convolves the accepted path, one head's channels per program, and moves the conv windows: no
other program reads a window, so none can read one that has moved already. `_fold_kernel` keeps a tile of one
state in registers from the first to the last token, so states are read and written once; the arithmetic is
one-token decoding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_ddtree_kernel._gdn_triton import inverse_norm, log_decay, sigmoid, silu


@triton.jit
def _tracked(track_slots, track_steps, request, steps):
    """(slot, step) of the snapshot; slot < 0 for none."""
    step = tl.load(track_steps + request)
    slot = tl.load(track_slots + request).to(tl.int64)
    return tl.where((step >= 1) & (step <= steps), slot, -1), step


@triton.jit
def _window_after(x, x_row, window, window_column, rows, steps, in_channel, COMMITTED: tl.constexpr):
    """[channels, 4]: the window after `steps` rows; columns from COMMITTED on are padding."""
    column = tl.arange(0, 4)
    step = steps + column - COMMITTED
    wanted = in_channel[:, None] & (column < COMMITTED)[None, :]
    from_path = (step >= 0)[None, :]
    row = tl.load(rows + step, mask=(step >= 0) & (column < COMMITTED), other=0)
    taken = tl.load(x[:, None] + row[None, :] * x_row, mask=wanted & from_path, other=0.0)
    at = window[:, None] + (steps + column)[None, :] * window_column
    kept = tl.load(at, mask=wanted & (step < 0)[None, :], other=0.0)
    return tl.where(from_path, taken.to(kept.dtype), kept)


@triton.jit
def _column(tile, j: tl.constexpr):
    """Column j of a tile [channels, 4]."""
    return tl.sum(tl.where(tl.arange(0, 4)[None, :] == j, tile, 0.0), 1)


@triton.jit
def _path_kernel(
    mixed_qkv, a, b, weight, bias, A_log, dt_bias, conv_states, slots, accepted_rows, accept_lens,
    track_slots, track_steps, keys, values, gates,
    bs, D, P, eps, x_layer, x_request, x_row, a_layer, a_request, a_row, b_layer, b_request, b_row,
    window_layer, window_slot, window_channel, window_column,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHANNELS: tl.constexpr,
    STEPS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, TRACK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Normalised keys [L, bs, P, H, K], values [L, bs, P, HV, V], gates [L, bs, HV, 2, P]: decay, beta."""
    if PDL:
        gdc_launch_dependents()
    head, layer_request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    layer, request = layer_request // bs, layer_request % bs
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:
        return
    steps = tl.load(accept_lens + request)
    is_value = head >= 2 * H
    first = tl.where(is_value, 2 * H * K + (head - 2 * H) * V, head * K)
    inside = tl.arange(0, CHANNELS)
    in_channel = inside < tl.where(is_value, V, K)
    channel = first + inside
    rows = accepted_rows + request * P
    x = mixed_qkv + layer * x_layer + request * x_request + channel
    windows = conv_states + layer * window_layer + channel.to(tl.int64) * window_channel
    window = windows + slot * window_slot

    if head >= H:
        # Taps and window once, as [channels, 4], which is how they lie in memory.
        four = tl.arange(0, 4)
        taps = tl.load(
            weight + (layer * D + channel)[:, None] * WIDTH + four[None, :],
            mask=in_channel[:, None] & (four < WIDTH)[None, :],
            other=0.0,
        ).to(tl.float32)
        committed = tl.load(
            window[:, None] + four[None, :] * window_column,
            mask=in_channel[:, None] & (four < WIDTH - 1)[None, :],
            other=0.0,
        ).to(tl.float32)
        start_value = tl.zeros([CHANNELS], tl.float32)
        if HAS_BIAS:
            start_value += tl.load(bias + layer * D + channel, mask=in_channel, other=0.0).to(tl.float32)
        for start in range(0, steps, STEPS):
            step = start + tl.arange(0, STEPS)
            live = step < steps
            mask = live[:, None] & in_channel[None, :]
            y = tl.zeros([STEPS, CHANNELS], tl.float32) + start_value[None, :]
            for tap in tl.static_range(WIDTH):
                before = step - (WIDTH - 1 - tap)
                row = tl.load(rows + before, mask=live & (before >= 0), other=0)
                taken = tl.load(
                    x[None, :] + row[:, None] * x_row, mask=mask & (before >= 0)[:, None], other=0.0
                )
                if tap < WIDTH - 1:
                    taken = taken.to(conv_states.dtype.element_ty).to(tl.float32)
                    for column in tl.static_range(tap, WIDTH - 1):
                        from_window = (before == column - (WIDTH - 1))[:, None]
                        taken = tl.where(from_window, _column(committed, column)[None, :], taken)
                y += taken.to(tl.float32) * _column(taps, tap)[None, :]
            if SILU:
                y = silu(y)
            y = y.to(mixed_qkv.dtype.element_ty)  # as decoding hands it on
            token = layer_request * P + step
            if is_value:
                v_head = head - 2 * H
                tl.store(values + (token[:, None] * HV + v_head) * V + inside[None, :], y, mask=mask)
                a_at = a + layer * a_layer + request * a_request + v_head
                b_at = b + layer * b_layer + request * b_request + v_head
                row = tl.load(rows + step, mask=live, other=0)
                g = log_decay(
                    tl.load(a_at + row * a_row, mask=live, other=0.0),
                    tl.load(A_log + layer * HV + v_head),
                    tl.load(dt_bias + layer * HV + v_head),
                )
                beta = sigmoid(tl.load(b_at + row * b_row, mask=live, other=0.0).to(tl.float32))
                gate = gates + (layer_request * HV + v_head) * (2 * P) + step
                tl.store(gate, tl.exp(g), mask=live)
                tl.store(gate + P, beta, mask=live)
            else:
                key = tl.where(mask, y.to(tl.float32), 0.0)  # channels past K are not the head's
                key *= inverse_norm(key, eps)[:, None]
                tl.store(keys + (token[:, None] * H + head - H) * K + inside[None, :], key, mask=mask)

    column = tl.arange(0, 4)[None, :]
    wanted = (column < WIDTH - 1) & in_channel[:, None]
    moved = _window_after(x, x_row, window, window_column, rows, steps, in_channel, WIDTH - 1)
    if TRACK:
        snapshot_slot, snapshot_step = _tracked(track_slots, track_steps, request, steps)
        taken_steps, taken = tl.minimum(snapshot_step, steps), in_channel & (snapshot_slot >= 0)
        snapshot = _window_after(x, x_row, window, window_column, rows, taken_steps, taken, WIDTH - 1)
        tl.debug_barrier()
        at = (windows + snapshot_slot * window_slot)[:, None] + column * window_column
        tl.store(at, snapshot, mask=wanted & (snapshot_slot >= 0))
    tl.debug_barrier()  # other threads may still read the columns that move
    tl.store(window[:, None] + column * window_column, moved, mask=wanted)


@triton.jit
def _fold_kernel(
    keys, values, gates, states, slots, accept_lens, track_slots, track_steps,
    bs, P, state_layer, state_slot, state_head, state_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KO: tl.constexpr, KI: tl.constexpr, BV: tl.constexpr, TRACK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A [BV, K] tile of one state, held as [BV, KO, KI]: a row has few threads, its sum few shuffles."""
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    v_head, layer_request = tl.program_id(0) // V_BLOCKS, tl.program_id(1).to(tl.int64)
    layer, request = layer_request // bs, layer_request % bs
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:
        return
    steps = tl.load(accept_lens + request)
    ov = tl.program_id(0) % V_BLOCKS * BV + tl.arange(0, BV)
    ok = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    mask = (ov < V)[:, None, None] & (ok < K)[None, :, :]
    states += layer * state_layer + v_head.to(tl.int64) * state_head
    states += ov[:, None, None].to(tl.int64) * state_v + ok[None, :, :]
    S = tl.load(states + slot * state_slot, mask=mask, other=0.0).to(tl.float32)
    if TRACK:
        snapshot_slot, snapshot_step = _tracked(track_slots, track_steps, request, steps)

    keys += (layer_request * P * H + v_head // (HV // H)) * K + ok
    values += (layer_request * P * HV + v_head) * V + ov
    gates += (layer_request * HV + v_head) * (2 * P)
    if PDL:
        gdc_wait()  # all before reads what older launches wrote
    in_key, in_value = ok < K, ov < V
    k = tl.load(keys, mask=in_key, other=0.0)
    v = tl.load(values, mask=in_value, other=0.0)
    decay, beta = tl.load(gates), tl.load(gates + P)
    for step in range(0, steps):
        # The next token's loads need not wait for this token's arithmetic. The last token loads itself again.
        following = tl.minimum(step + 1, steps - 1)
        next_k = tl.load(keys + following * (H * K), mask=in_key, other=0.0)
        next_v = tl.load(values + following * (HV * V), mask=in_value, other=0.0)
        next_decay, next_beta = tl.load(gates + following), tl.load(gates + P + following)
        S *= decay
        u = (v.to(tl.float32) - tl.sum(tl.sum(S * k[None, :, :], 1), 1)) * beta
        S += u[:, None, None] * k[None, :, :]
        S = S.to(states.dtype.element_ty).to(tl.float32)  # decoding stores every token's state
        if TRACK and (step + 1 == snapshot_step) & (snapshot_slot >= 0):
            tl.store(states + snapshot_slot * state_slot, S.to(states.dtype.element_ty), mask=mask)
        k, v, decay, beta = next_k, next_v, next_decay, next_beta
    tl.store(states + slot * state_slot, S.to(states.dtype.element_ty), mask=mask)


def gdn_commit_triton(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    conv_states: torch.Tensor,
    slots: torch.Tensor,
    accepted_rows: torch.Tensor,
    accept_lens: torch.Tensor,
    num_k_heads: int,
    head_k_dim: int,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
    eps: float = 1e-6,
    value_rows: int = 32,
    key_lanes: int = 32,
    num_warps: int = 2,
    path_steps: int = 4,
    path_warps: int = 2,
    dependent: bool = False,
) -> None:
    """`gdn_commit` in two launches; the last arguments tune it. If `dependent`, the second starts during the first
    (compute capability 9.0 and above).

    Workspace per layer, request and accepted row: H K keys in fp32, HV V values in their dtype, 2 HV gates.
    """
    mixed_qkv, a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (mixed_qkv, a, b))
    if states.stride(4) != 1:
        raise ValueError(f"states must be contiguous along K, got strides {states.stride()}")
    L, bs, _, D = mixed_qkv.shape
    H, K, (HV, V), P = num_k_heads, head_k_dim, states.shape[2:4], accepted_rows.shape[1]
    if L * bs * P == 0:
        return
    keys = mixed_qkv.new_empty(L, bs, P, H, K, dtype=torch.float32)
    values = mixed_qkv.new_empty(L, bs, P, HV, V)
    gates = mixed_qkv.new_empty(L, bs, HV, 2, P, dtype=torch.float32)
    common = dict(H=H, HV=HV, K=K, V=V, TRACK=track_slots is not None, PDL=dependent)
    _path_kernel[(2 * H + HV, L * bs)](
        mixed_qkv,
        a,
        b,
        conv_weight.contiguous(),
        None if conv_bias is None else conv_bias.contiguous(),
        A_log.contiguous(),
        dt_bias.contiguous(),
        conv_states,
        slots,
        accepted_rows.contiguous(),
        accept_lens,
        track_slots,
        track_steps,
        keys,
        values,
        gates,
        bs,
        D,
        P,
        eps,
        *mixed_qkv.stride()[:3],
        *a.stride()[:3],
        *b.stride()[:3],
        *conv_states.stride(),
        CHANNELS=triton.next_power_of_2(max(K, V)),
        STEPS=path_steps,
        WIDTH=conv_weight.shape[2],
        HAS_BIAS=conv_bias is not None,
        SILU=activation == "silu",
        num_warps=path_warps,
        **common,
    )
    K_PAD = max(key_lanes, triton.next_power_of_2(K))
    BV = min(value_rows, triton.next_power_of_2(V))
    _fold_kernel[(HV * triton.cdiv(V, BV), L * bs)](
        keys,
        values,
        gates,
        states,
        slots,
        accept_lens,
        track_slots,
        track_steps,
        bs,
        P,
        *states.stride()[:4],
        KO=K_PAD // key_lanes,
        KI=key_lanes,
        BV=BV,
        num_warps=num_warps,
        **(dict(launch_pdl=True) if dependent else {}),
        **common,
    )
