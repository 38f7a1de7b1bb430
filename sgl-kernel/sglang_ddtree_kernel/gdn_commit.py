"""Fold accepted rows into the GatedDeltaNet states and conv windows of all layers."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel._gdn_commit_triton import gdn_commit_triton
from sglang_ddtree_kernel.reference import gdn_commit as reference


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
    """Advance both pools in place by the accepted rows, with the arithmetic of one-token decoding.

    Args:
        mixed_qkv: [L, bs, N, D], conv inputs of the verified rows. a, b: [L, bs, N, HV].
        conv_weight: [L, D, W], 2 <= W <= 4. conv_bias: [L, D] or None. A_log, dt_bias: [L, HV].
        states: [L, slots, HV, V, K]; narrower than fp32, it is rounded after every token, as decoding does.
        conv_states: [L, slots, D, >= W-1], windows in the first W-1 columns, oldest first.
        slots: int [bs], distinct; < 0 for padded requests, which write nothing.
        accepted_rows: int32 [bs, P], rows of the accepted path, root first, padded with -1.
        accept_lens: int32 [bs], entries of accepted_rows that count, at least 1.
        num_k_heads, head_k_dim: H and K.
        track_slots: int [bs], slots that receive a snapshot of state and window; < 0 for none.
        track_steps: int32 [bs], rows to fold before the snapshot, 1..accept_lens; anything else means none.

    Raises:
        ValueError: a shape does not fit, or only one of track_slots and track_steps is given.
    """
    if mixed_qkv.ndim != 4:
        raise ValueError(f"mixed_qkv must be [L, bs, N, D], got {list(mixed_qkv.shape)}")
    L, bs, num_rows, dim = mixed_qkv.shape
    if states.ndim != 5 or states.shape[0] != L or states.shape[4] != head_k_dim:
        raise ValueError(f"states must be [{L}, slots, HV, V, {head_k_dim}], got {list(states.shape)}")
    num_v_heads, head_v_dim = states.shape[2:4]
    if num_k_heads < 1 or num_v_heads % num_k_heads:
        raise ValueError(f"num_k_heads must divide the {num_v_heads} value heads, got {num_k_heads}")
    if dim != 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim:
        raise ValueError(f"mixed_qkv has {dim} columns, which do not hold the q, k and v heads")
    if conv_weight.ndim != 3 or conv_weight.shape[:2] != (L, dim) or not 2 <= conv_weight.shape[2] <= 4:
        raise ValueError(f"conv_weight must be [{L}, {dim}, 2..4], got {list(conv_weight.shape)}")
    windows = (L, states.shape[1], dim)
    if conv_states.ndim != 4 or conv_states.shape[:3] != windows:
        raise ValueError(f"conv_states must be {[*windows]} + [>= W-1], got {list(conv_states.shape)}")
    if conv_states.shape[3] < conv_weight.shape[2] - 1:
        raise ValueError(f"conv_states needs {conv_weight.shape[2] - 1} columns, got {conv_states.shape[3]}")
    if accepted_rows.ndim != 2 or accepted_rows.shape[0] != bs:
        raise ValueError(f"accepted_rows must be [{bs}, P], got {list(accepted_rows.shape)}")
    if (track_slots is None) != (track_steps is None):
        raise ValueError("track_slots and track_steps must be given together")
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    for name, x, shape in (
        ("a", a, (L, bs, num_rows, num_v_heads)),
        ("b", b, (L, bs, num_rows, num_v_heads)),
        ("conv_bias", conv_bias, (L, dim)),
        ("A_log", A_log, (L, num_v_heads)),
        ("dt_bias", dt_bias, (L, num_v_heads)),
        ("slots", slots, (bs,)),
        ("accept_lens", accept_lens, (bs,)),
        ("track_slots", track_slots, (bs,)),
        ("track_steps", track_steps, (bs,)),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(x.shape)}")
    on_device = mixed_qkv.is_cuda and mixed_qkv.dtype != torch.float64
    commit = gdn_commit_triton if on_device else reference.gdn_commit
    commit(
        mixed_qkv,
        a,
        b,
        conv_weight,
        conv_bias,
        A_log,
        dt_bias,
        states,
        conv_states,
        slots,
        accepted_rows,
        accept_lens,
        num_k_heads,
        head_k_dim,
        track_slots,
        track_steps,
        activation=activation,
        eps=eps,
    )
