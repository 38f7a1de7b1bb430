"""RMS norm of every head of a GatedDeltaNet layer's rows, times their gate."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel._gated_norm_triton import gated_norm_triton
from sglang_ddtree_kernel.reference import gated_norm as reference

ACTIVATIONS = ("silu", "swish", "sigmoid")  # the first two are one


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, activation: str = "silu"
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * activation(gate), the mean over each head's V values.

    The gate is read where a wider projection left it: SGLang's own norm wants a copy of its own.

    Args:
        x: [R, HV, V], contiguous.
        gate: [R, HV * V], any stride between rows, contiguous along the last dimension.
        weight: [V].
        activation: "silu" (or "swish") or "sigmoid".

    Returns:
        [R, HV * V] in x's dtype, computed in fp32.

    Raises:
        ValueError: a shape, a stride or the activation does not fit.
    """
    if x.ndim != 3 or not x.is_contiguous():
        raise ValueError(f"x must be contiguous [R, HV, V], got {list(x.shape)} with strides {x.stride()}")
    num_rows, heads, dim = x.shape
    if gate.shape != (num_rows, heads * dim) or (gate.shape[1] > 1 and gate.stride(1) != 1):
        raise ValueError(
            f"gate must be [{num_rows}, {heads * dim}], contiguous along the last dimension,"
            f" got {list(gate.shape)} with strides {gate.stride()}"
        )
    if weight.shape != (dim,):
        raise ValueError(f"weight must be [{dim}], got {list(weight.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    on_gpu = x.is_cuda and x.dtype != torch.float64
    return (gated_norm_triton if on_gpu else reference.gated_norm)(x, gate, weight, eps, activation)
