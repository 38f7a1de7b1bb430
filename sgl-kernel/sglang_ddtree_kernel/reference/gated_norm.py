"""Specification of `gated_norm`."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel.reference.gdn_math import compute_dtype, sigmoid, silu


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    dtype = compute_dtype(x)
    gate = gate.reshape(x.shape).to(dtype)
    gate = sigmoid(gate) if activation == "sigmoid" else silu(gate)
    normed = torch.nn.functional.rms_norm(x.to(dtype), x.shape[-1:], eps=eps)
    return (normed * weight.to(dtype) * gate).to(x.dtype).flatten(1)
