"""Causal depthwise convolution of a GatedDeltaNet layer along the paths of a draft tree."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel._conv1d_tree_triton import conv1d_tree_triton
from sglang_ddtree_kernel.reference import conv1d_tree as reference


def conv1d_tree(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parents: torch.Tensor,
    activation: str | None = "silu",
    *,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    stash: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Convolve every row with its W-1 nearest ancestors, continued by the committed window.

    The pool stays as it is. A commit needs the inputs of this layer once more, so they can be stashed on the way.

    Args:
        x: [bs, N, D], inputs of the rows; row 0 is the root. Never copied where the last dimension is contiguous.
        conv_states: [slots, D, >= W-1], the committed windows in the first W-1 columns, oldest first.
        slots: int [bs]; < 0 for padded requests, whose window counts as zeros.
        weight: [D, W], 2 <= W <= 4, newest tap last. bias: [D] or None.
        parents: int [bs, N]; -1 at the root and at invalid rows, which then convolve as if they were roots.
        activation: "silu" or None.
        gates: a and b, each [bs, N, HV], which the convolution does not use.
        stash: (rows [bs, N, D], a [bs, N, HV], b [bs, N, HV]) that receive x and the gates, unchanged but for
            the stash's dtypes, of padded requests too. Gates and stash: any strides but along the last dimension,
            which is contiguous; both are given or neither.

    Returns:
        y [bs, N, D] in x's dtype, computed in fp32.

    Raises:
        ValueError: a shape or option does not fit.
    """
    if x.ndim != 3:
        raise ValueError(f"x must be [bs, N, D], got {list(x.shape)}")
    bs, num_rows, dim = x.shape
    if weight.ndim != 2 or weight.shape[0] != dim or not 2 <= weight.shape[1] <= 4:
        raise ValueError(f"weight must be [{dim}, 2..4], got {list(weight.shape)}")
    committed = weight.shape[1] - 1
    if conv_states.ndim != 3 or conv_states.shape[1] != dim or conv_states.shape[2] < committed:
        raise ValueError(f"conv_states must be [slots, {dim}, >= {committed}], got {list(conv_states.shape)}")
    if slots.shape != (bs,):
        raise ValueError(f"slots must be [{bs}], got {list(slots.shape)}")
    if bias is not None and bias.shape != (dim,):
        raise ValueError(f"bias must be [{dim}], got {list(bias.shape)}")
    if parents.shape != (bs, num_rows):
        raise ValueError(f"parents must be [{bs}, {num_rows}], got {list(parents.shape)}")
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    _check_stash(x, gates, stash)
    on_gpu = x.is_cuda and x.dtype != torch.float64
    convolve = conv1d_tree_triton if on_gpu else reference.conv1d_tree
    return convolve(x, conv_states, slots, weight, bias, parents, activation, gates=gates, stash=stash)


def _check_stash(x: torch.Tensor, gates: tuple | None, stash: tuple | None) -> None:
    if (gates is None) != (stash is None):
        raise ValueError("gates and stash must be given together or not at all")
    if gates is None:
        return
    if len(gates) != 2 or len(stash) != 3:
        raise ValueError(f"gates must be (a, b) and stash (rows, a, b), got {len(gates)} and {len(stash)}")
    bs, num_rows, _ = x.shape
    per_head = [bs, num_rows, gates[0].shape[-1]]
    named = zip(
        ("gates[0]", "gates[1]", "stash[0]", "stash[1]", "stash[2]"),
        (*gates, *stash),
        (per_head, per_head, list(x.shape), per_head, per_head),
        strict=True,
    )
    for name, tensor, shape in named:
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {list(tensor.shape)}")
        if tensor.stride(2) != 1 and tensor.shape[2] > 1:
            raise ValueError(
                f"{name} must be contiguous along its last dimension, got strides {tensor.stride()}"
            )
