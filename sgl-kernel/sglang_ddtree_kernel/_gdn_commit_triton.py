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

from sglang_ddtree_kernel._gdn_triton import log_decay, sigmoid, silu

L2_SHARE = 32 << 20  # bytes of workspace that stay in the L2 cache beside other traffic


@triton.jit
def _tracked(track_slots, track_steps, request, steps):
    """(slot, step) of the snapshot; slot < 0 for none."""
    step = tl.load(track_steps + request)
    slot = tl.load(track_slots + request).to(tl.int64)
    return tl.where((step >= 1) & (step <= steps), slot, -1), step


@triton.jit
def _window_column(at, stride, in_channel, COLUMN: tl.constexpr):
    """Column COLUMN of [channels, columns] in fp32; zeros where it is negative."""
    if COLUMN < 0:
        return tl.zeros(in_channel.shape, tl.float32)
    else:
        return tl.load(at + COLUMN * stride, mask=in_channel, other=0.0).to(tl.float32)


@triton.jit
def _store_window(at, stride, w0, w1, w2, in_channel, WIDTH: tl.constexpr):
    if WIDTH > 3:
        tl.store(at + (WIDTH - 4) * stride, w0, mask=in_channel)
    if WIDTH > 2:
        tl.store(at + (WIDTH - 3) * stride, w1, mask=in_channel)
    tl.store(at + (WIDTH - 2) * stride, w2, mask=in_channel)


@triton.jit
def _path_kernel(
    mixed_qkv, a, b, weight, bias, A_log, dt_bias, conv_states, slots, accepted_rows, accept_lens,
    track_slots, track_steps, keys, values, gates,
    bs, D, P, eps, x_layer, x_request, x_row, a_layer, a_request, a_row, b_layer, b_request, b_row,
    window_layer, window_slot, window_channel, window_column,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHANNELS: tl.constexpr,
    STEPS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, TRACK: tl.constexpr,
):  # fmt: skip
    """Normalised keys [L, bs, P, H, K], values [L, bs, P, HV, V], gates [L, bs, HV, 2, P]: decay, beta.

    The window slides along the path in registers, so that every input is loaded once, ahead of its turn, and what
    is left in the registers after the last token is the window that the pool receives.
    """
    head, layer_request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    layer, request = layer_request // bs, layer_request % bs
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:
        return
    steps = tl.load(accept_lens + request)
    is_value = head >= 2 * H
    first_channel = tl.where(is_value, 2 * H * K + (head - 2 * H) * V, head * K)
    inside = tl.arange(0, CHANNELS)
    in_channel = inside < tl.where(is_value, V, K)
    channel = first_channel + inside
    rows = accepted_rows + request * P
    x = mixed_qkv + layer * x_layer + request * x_request + channel
    windows = conv_states + layer * window_layer + channel.to(tl.int64) * window_channel
    window = windows + slot * window_slot
    taps = weight + (layer * D + channel) * WIDTH
    last = steps
    if TRACK:
        snapshot_slot, snapshot_step = _tracked(track_slots, track_steps, request, steps)
        last = tl.where(snapshot_slot >= 0, snapshot_step, steps)

    # Four inputs are on their way at any time, of the last token again where there are no more. Queries are not
    # needed, only the inputs that their windows keep.
    first = tl.where(head < H, tl.maximum(last - (WIDTH - 1), 0), 0)
    x0 = tl.load(x + tl.load(rows + first) * x_row, mask=in_channel, other=0.0)
    x1 = tl.load(x + tl.load(rows + tl.minimum(first + 1, steps - 1)) * x_row, mask=in_channel, other=0.0)
    x2 = tl.load(x + tl.load(rows + tl.minimum(first + 2, steps - 1)) * x_row, mask=in_channel, other=0.0)
    x3 = tl.load(x + tl.load(rows + tl.minimum(first + 3, steps - 1)) * x_row, mask=in_channel, other=0.0)
    row = tl.load(rows + tl.minimum(first + 4, steps - 1))
    # The three inputs before the token; those that a narrower window does not hold are zero.
    w0 = _window_column(window, window_column, in_channel, WIDTH - 4)
    w1 = _window_column(window, window_column, in_channel, WIDTH - 3)
    w2 = _window_column(window, window_column, in_channel, WIDTH - 2)
    tap0 = _window_column(taps, 1, in_channel, WIDTH - 4)
    tap1 = _window_column(taps, 1, in_channel, WIDTH - 3)
    tap2 = _window_column(taps, 1, in_channel, WIDTH - 2)
    tap3 = _window_column(taps, 1, in_channel, WIDTH - 1)
    start_value = tl.zeros([CHANNELS], tl.float32)
    if HAS_BIAS:
        start_value += tl.load(bias + layer * D + channel, mask=in_channel, other=0.0).to(tl.float32)

    if is_value:
        v_head = head - 2 * H
        token_step = tl.arange(0, STEPS)
        live = token_step < steps
        gate_row = tl.load(rows + token_step, mask=live, other=0)
        g = log_decay(
            tl.load(
                a + layer * a_layer + request * a_request + v_head + gate_row * a_row, mask=live, other=0.0
            ),
            tl.load(A_log + layer * HV + v_head),
            tl.load(dt_bias + layer * HV + v_head),
        )
        logit = tl.load(
            b + layer * b_layer + request * b_request + v_head + gate_row * b_row, mask=live, other=0.0
        )
        gate = gates + (layer_request * HV + v_head) * (2 * P) + token_step
        tl.store(gate, tl.exp(g), mask=live)
        tl.store(gate + P, sigmoid(logit.to(tl.float32)), mask=live)

    for step in range(first, steps):
        taken = x0.to(tl.float32)
        x0, x1, x2 = x1, x2, x3
        x3 = tl.load(x + row * x_row, mask=in_channel, other=0.0)
        row = tl.load(rows + tl.minimum(step + 5, steps - 1))
        if head >= H:
            y = start_value + w0 * tap0
            y += w1 * tap1
            y += w2 * tap2
            y += taken * tap3
            if SILU:
                y = silu(y)
            y = y.to(mixed_qkv.dtype.element_ty)  # as decoding hands it on
            token = layer_request * P + step
            if is_value:
                tl.store(values + (token * HV + head - 2 * H) * V + inside, y, mask=in_channel)
            else:
                key = tl.where(in_channel, y.to(tl.float32), 0.0)  # channels past K are not the head's
                key *= 1.0 / tl.sqrt(tl.sum(key * key) + eps)
                tl.store(keys + (token * H + head - H) * K + inside, key, mask=in_channel)
        w0, w1, w2 = w1, w2, taken.to(conv_states.dtype.element_ty).to(tl.float32)
        if TRACK and (step + 1 == snapshot_step) & (snapshot_slot >= 0):
            _store_window(windows + snapshot_slot * window_slot, window_column, w0, w1, w2, in_channel, WIDTH)
    _store_window(window, window_column, w0, w1, w2, in_channel, WIDTH)


@triton.jit
def _row_sums(x):
    """Sums of x [G, R, KO, KI] over its last two dimensions: one chain of sums for all that a thread holds."""
    G: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    KO: tl.constexpr = x.shape[2]
    KI: tl.constexpr = x.shape[3]
    x = tl.trans(tl.reshape(x, [G, R, KO, KI // 4, 4]), 0, 1, 3, 2, 4)
    return tl.sum(tl.sum(tl.reshape(x, [G, R, KI // 4, KO * 4]), 3), 2)


@triton.jit
def _fold_kernel(
    keys, values, gates, states, slots, accept_lens, track_slots, track_steps,
    bs, P, state_layer, state_slot, state_head, state_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KO: tl.constexpr, KI: tl.constexpr, G: tl.constexpr, R: tl.constexpr, POLICY: tl.constexpr, TRACK: tl.constexpr,
):  # fmt: skip
    """A [G R, K] tile of one state, held as [G, R, KO, KI]: R adjacent rows, 4 adjacent columns to a thread.

    Keys are loaded once per g, which is how the threads that need them hold them: by way of L1 rather than of
    shared memory and its barriers.
    """
    BV: tl.constexpr = G * R
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    v_head, layer_request = tl.program_id(0) // V_BLOCKS, tl.program_id(1).to(tl.int64)
    layer, request = layer_request // bs, layer_request % bs
    states += v_head.to(tl.int64) * state_head
    ov = tl.program_id(0) % V_BLOCKS * BV + tl.arange(0, G)[:, None] * R + tl.arange(0, R)[None, :]
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:
        return
    steps = tl.load(accept_lens + request)
    ok = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    in_key, in_value = tl.broadcast_to((ok < K)[None, :, :], [G, KO, KI]), ov < V
    mask = in_value[:, :, None, None] & in_key[:, None, :, :]
    states += layer * state_layer
    states += ov[:, :, None, None].to(tl.int64) * state_v + ok[None, None, :, :]
    S = tl.load(states + slot * state_slot, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if TRACK:
        snapshot_slot, snapshot_step = _tracked(track_slots, track_steps, request, steps)

    keys += (layer_request * P * H + v_head // (HV // H)) * K + tl.broadcast_to(ok[None, :, :], [G, KO, KI])
    values += (layer_request * P * HV + v_head) * V + ov
    gates += (layer_request * HV + v_head) * (2 * P)
    k = tl.load(keys, mask=in_key, other=0.0)
    v = tl.load(values, mask=in_value, other=0.0)
    decay, beta = tl.load(gates), tl.load(gates + P)
    for step in range(0, steps):
        # The next token's loads need not wait for this token's arithmetic. One past the last is read, not used.
        keys += H * K
        values += HV * V
        gates += 1
        next_k = tl.load(keys, mask=in_key, other=0.0)
        next_v = tl.load(values, mask=in_value, other=0.0)
        next_decay, next_beta = tl.load(gates), tl.load(gates + P)
        S *= decay
        u = (v.to(tl.float32) - _row_sums(S * k[:, None, :, :])) * beta
        S += u[:, :, None, None] * k[:, None, :, :]
        S = S.to(states.dtype.element_ty).to(tl.float32)  # decoding stores every token's state
        if TRACK and (step + 1 == snapshot_step) & (snapshot_slot >= 0):
            tl.store(states + snapshot_slot * state_slot, S.to(states.dtype.element_ty), mask=mask)
        k, v, decay, beta = next_k, next_v, next_decay, next_beta
    tl.store(states + slot * state_slot, S.to(states.dtype.element_ty), mask=mask, eviction_policy=POLICY)


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
    value_rows: int = 16,
    key_lanes: int = 32,
    num_warps: int = 1,
    path_registers: int = 64,
    stream: bool | None = None,
) -> None:
    """`gdn_commit` in two launches; the last arguments tune it.

    stream: states do not displace the workspace in the L2 cache; by default where it fits there.

    Workspace per layer, request and accepted row: H K keys in fp32, HV V values in their dtype, 2 HV gates.
    """
    mixed_qkv, a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (mixed_qkv, a, b))
    if states.stride(4) != 1:
        raise ValueError(f"states must be contiguous along K, got strides {states.stride()}")
    L, bs, _, D = mixed_qkv.shape
    H, K, (HV, V), P = num_k_heads, head_k_dim, states.shape[2:4], accepted_rows.shape[1]
    if L * bs * P == 0:
        return
    # One token more than is written: the fold reads one past the last, and does not use it.
    keys = mixed_qkv.new_empty((L * bs * P + 1) * H * K, dtype=torch.float32)
    values = mixed_qkv.new_empty((L * bs * P + 1) * HV * V)
    gates = mixed_qkv.new_empty(L * bs * HV * 2 * P + 1, dtype=torch.float32)
    common = dict(H=H, HV=HV, K=K, V=V, TRACK=track_slots is not None)
    if stream is None:
        stream = sum(x.numel() * x.element_size() for x in (keys, values, gates)) <= L2_SHARE
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
        STEPS=triton.next_power_of_2(P),
        WIDTH=conv_weight.shape[2],
        HAS_BIAS=conv_bias is not None,
        SILU=activation == "silu",
        num_warps=1,
        maxnreg=path_registers,
        **common,
    )
    K_PAD = max(key_lanes, triton.next_power_of_2(K))
    groups = num_warps * 128 // key_lanes  # a warp's threads hold 4 columns each
    rows = max(1, value_rows // groups)
    _fold_kernel[(HV * triton.cdiv(V, groups * rows), L * bs)](
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
        G=groups,
        R=rows,
        POLICY="evict_first" if stream else "",
        num_warps=num_warps,
        **common,
    )
