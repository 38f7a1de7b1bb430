"""Causal depthwise convolution over packed prompts, and the conv window they leave behind."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel.reference.gdn_math import causal_conv

BLOCK = 64  # rows at a time, so that the partial sums stay in cache


def causal_conv1d_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    activation: str | None = "silu",
) -> torch.Tensor:
    """Convolve sequences packed along T and update their conv windows in place (CPU only).

    Args:
        x: [D, T]; a transposed view of a [T, D] tensor is the fast layout.
        weight: [D, W]. bias: [D] or None.
        conv_states: [slots, D, >= W-1], oldest column first.
        has_initial_state: bool [sequences]; False starts from zeros; None means that all continue.
        slots: [sequences]; < 0 starts from zeros and writes nothing.
        cu_seqlens: [sequences + 1], offsets into T.
    Returns:
        y [D, T] in x's dtype.
    """
    committed = weight.shape[1] - 1
    rows = x.t()  # [T, D]
    y = torch.empty_like(rows)
    bounds = cu_seqlens.tolist()
    fresh = [False] * len(slots) if has_initial_state is None else (~has_initial_state.bool()).tolist()
    for i, slot in enumerate(slots.tolist()):
        start, end = bounds[i], bounds[i + 1]
        if start == end:
            continue
        window = conv_states[max(slot, 0), :, :committed].t().to(x.dtype)
        if fresh[i] or slot < 0:
            window = torch.zeros_like(window)
        history = torch.cat([window, rows[start:end]])
        for begin in range(start, end, BLOCK):
            block = rows[begin : min(begin + BLOCK, end)]
            around = history[begin - start : begin - start + committed + len(block)]
            y[begin : begin + len(block)] = causal_conv(around, block, weight, bias, activation)
        if slot >= 0:
            conv_states[slot, :, :committed] = history[end - start :].t().to(conv_states.dtype)
    return y.t()
