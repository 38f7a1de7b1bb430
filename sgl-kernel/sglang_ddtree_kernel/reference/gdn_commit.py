"""The one-token decode step of a GatedDeltaNet layer, and the commit that folds an accepted path with it.

Both go through `delta_rule_step_` and `causal_conv`, so the state after a commit is, bit for bit, the state
that autoregressive decoding of the same tokens leaves: it depends on the committed tokens alone, not on the
tree. A state pool narrower than fp32 is therefore rounded after every token, as decoding would round it.
"""

from __future__ import annotations

import torch

from sglang_ddtree_kernel.reference.gdn_math import (
    causal_conv,
    compute_dtype,
    gdn_gates,
    read_slots,
    split_heads,
    write_slots,
)


def delta_rule_step_(
    S: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> None:
    """One token in place. S [R, V, K]; k [R, 1, K]; v [R, 1, V]; decay = e^g and beta [R, 1, 1].

    decay = 1 with beta = 0 leaves S as it is: so are steps past the accepted length skipped on a device.
    """
    S.mul_(decay)
    u = (v - torch.bmm(k, S.transpose(1, 2))).mul_(beta)
    S.addcmul_(u.transpose(1, 2), k)


def conv1d_decode_step(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None = "silu",
) -> torch.Tensor:
    """x [bs, D], weight [D, W], conv_states [slots, D, >= W-1] (updated in place) -> y [bs, D]."""
    pool = conv_states[None, :, :, : weight.shape[1] - 1]
    history = torch.cat([read_slots(pool, slots)[0].transpose(1, 2), x.to(pool.dtype).unsqueeze(1)], 1)
    write_slots(pool, slots, history[None, :, 1:].transpose(2, 3))
    return causal_conv(history, x.unsqueeze(1), weight, bias, activation).squeeze(1)


def gdn_decode_step(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    num_k_heads: int,
    head_k_dim: int,
    *,
    eps: float = 1e-6,
) -> torch.Tensor:
    """One autoregressive token of one layer; writes the new states into the pool.

    mixed_qkv [bs, D] after conv and SiLU; a, b [bs, HV]; states [slots, HV, V, K]; slots [bs], < 0 for padded
    requests (their state counts as zero and nothing is written). Returns o [bs, HV, V] in mixed_qkv's dtype.
    """
    bs, HV = a.shape
    q, k, v = split_heads(mixed_qkv, num_k_heads, head_k_dim, HV, eps)
    q, k = (x.repeat_interleave(HV // num_k_heads, 1).unsqueeze(2) for x in (q, k))  # [bs, HV, 1, K]
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    v, decay, beta = v.unsqueeze(2), g.exp()[..., None, None], beta[..., None, None]
    dtype = compute_dtype(states)
    if mixed_qkv.device.type == "cpu":
        # A request at a time, in the pool itself where that is fp32: the heads stay in cache, and no
        # product's batch depends on the number of requests.
        out = torch.empty_like(v)
        for i, slot in enumerate(slots.tolist()):
            S = torch.zeros_like(states[0], dtype=dtype) if slot < 0 else states[slot].to(dtype)
            delta_rule_step_(S, k[i], v[i], decay[i], beta[i])
            torch.bmm(q[i], S.transpose(1, 2), out=out[i])
            if slot >= 0 and dtype != states.dtype:
                states[slot] = S
    else:
        S = read_slots(states[None], slots)[0].to(dtype)
        flat = S.view(bs * HV, *S.shape[2:])
        delta_rule_step_(flat, *(x.flatten(0, 1) for x in (k, v, decay, beta)))
        out = torch.bmm(q.flatten(0, 1), flat.transpose(1, 2)).view_as(v)
        write_slots(states[None], slots, S[None])
    return out.squeeze(2).to(mixed_qkv.dtype)


def gdn_commit(
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
) -> None:
    """Shapes as in `sglang_ddtree_kernel.gdn_commit`."""
    L, bs, num_rows, dim = mixed_qkv.shape
    HV, committed = a.shape[-1], conv_weight.shape[-1] - 1
    on_cpu = mixed_qkv.device.type == "cpu"
    if on_cpu:
        accepted_rows = accepted_rows[:, : int(accept_lens.max())]
    steps = accepted_rows.shape[1]
    rows = accepted_rows.clamp(min=0).long()
    rows = (rows + torch.arange(bs, device=rows.device).unsqueeze(1) * num_rows).view(-1)

    def pick(x: torch.Tensor) -> torch.Tensor:  # [L, bs, N, ...] -> [L, bs, P, ...]
        return x.reshape(L, bs * num_rows, -1).index_select(1, rows).view(L, bs, steps, -1)

    x = pick(mixed_qkv)
    conv_pool = conv_states[..., :committed]
    history = torch.cat([read_slots(conv_pool, slots).transpose(2, 3), x.to(conv_pool.dtype)], 2)
    bias = None if conv_bias is None else conv_bias.unsqueeze(1)
    y = causal_conv(history, x, conv_weight.unsqueeze(1), bias, activation)
    _, k, v = split_heads(y, num_k_heads, head_k_dim, HV, eps)
    k = k.repeat_interleave(HV // num_k_heads, -2).unsqueeze(-2)  # [L, bs, P, HV, 1, K]
    g, beta = gdn_gates(pick(a), pick(b), A_log[:, None, None], dt_bias[:, None, None])
    inputs = (k, v.unsqueeze(-2), g.exp()[..., None, None], beta[..., None, None])

    tracked = None
    if track_slots is not None:
        valid = (track_steps >= 1) & (track_steps <= accept_lens) & (slots >= 0)
        tracked = torch.where(valid, track_slots, -1)
    fold = _fold_request_by_request if on_cpu else _fold_batched
    fold(states, slots, inputs, accept_lens, tracked, track_steps)

    def window(
        lens: torch.Tensor,
    ) -> torch.Tensor:  # the last W-1 conv inputs after `lens` rows: [L, bs, D, W-1]
        columns = lens.long().unsqueeze(1) + torch.arange(committed, device=lens.device)
        columns = columns.view(1, bs, committed, 1).expand(L, bs, committed, dim)
        return history.gather(2, columns).transpose(2, 3)

    if tracked is not None:
        write_slots(conv_pool, tracked, window(track_steps.clamp(min=0).minimum(accept_lens)))
    write_slots(conv_pool, slots, window(accept_lens))


def _fold_request_by_request(states, slots, inputs, accept_lens, tracked, track_steps) -> None:
    """CPU: one request of one layer at a time, which keeps its state in cache; in the pool itself if fp32."""
    dtype = compute_dtype(states)
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        steps = int(accept_lens[i])
        snapshot_slot = -1 if tracked is None else int(tracked[i])
        snapshot_after = 0 if snapshot_slot < 0 else int(track_steps[i])
        for layer, pool in enumerate(states.unbind(0)):
            S = pool[slot].to(dtype)  # the pool's own memory if dtypes agree
            columns = zip(*(x[layer, i, :steps].unbind(0) for x in inputs), strict=True)
            for step, token in enumerate(columns):
                delta_rule_step_(S, *token)
                if dtype != pool.dtype:
                    S.copy_(S.to(pool.dtype))
                if step + 1 == snapshot_after:
                    pool[snapshot_slot] = S
            if dtype != pool.dtype:
                pool[slot] = S


def _fold_batched(states, slots, inputs, accept_lens, tracked, track_steps) -> None:
    """All layers and requests together, P steps, without looking at any value on the host."""
    k, v, decay, beta = inputs
    live = torch.arange(k.shape[2], device=k.device) < accept_lens.unsqueeze(1)  # [bs, P]
    live = live[None, :, :, None, None, None]
    inputs = (k, v, decay.masked_fill(~live, 1.0), beta.masked_fill(~live, 0.0))
    S = read_slots(states, slots).to(compute_dtype(states))
    flat = S.view(-1, *S.shape[3:])
    snapshot = S
    for step in range(k.shape[2]):
        delta_rule_step_(flat, *(x[:, :, step].reshape(-1, *x.shape[4:]) for x in inputs))
        if S.dtype != states.dtype:
            S.copy_(S.to(states.dtype))
        if tracked is not None:
            snapshot = torch.where((track_steps == step + 1).view(1, -1, 1, 1, 1), S, snapshot)
    if tracked is not None:
        write_slots(states, tracked, snapshot)
    write_slots(states, slots, S)
