"""Causal depthwise convolution along the root-to-row paths of a draft tree."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel.reference.gdn_math import compute_dtype, read_slots, silu


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
    """Shapes as in `sglang_ddtree_kernel.conv1d_tree`."""
    if stash is not None:
        for kept, given in zip(stash, (x, *gates), strict=True):
            kept.copy_(given)
    bs, num_rows, dim = x.shape
    width, dtype = weight.shape[1], compute_dtype(x)
    committed = width - 1
    total = committed + num_rows

    # One line of positions per request, [committed window | rows]: stepping back from a row leads to its
    # parent, from a row without a parent to the newest committed column, from there to the column before.
    window = read_slots(conv_states[None, :, :, :committed], slots)[0].transpose(1, 2)  # [bs, W-1, D]
    history = torch.cat([window.to(dtype), x.to(conv_states.dtype).to(dtype)], 1).view(bs * total, dim)
    back = torch.arange(-1, total - 1, device=x.device).repeat(bs, 1)
    back[:, committed:] = torch.where(parents >= 0, parents + committed, committed - 1)
    position = torch.arange(committed, total, device=x.device).expand(bs, num_rows)
    positions = []
    for _ in range(committed):
        position = back.gather(1, position)
        positions.append(position)

    taps = weight.to(dtype).t().contiguous()  # [W, D]
    first = torch.arange(bs, device=x.device).unsqueeze(1) * total
    y = None
    for tap, position in zip(taps, reversed(positions), strict=False):
        product = history.index_select(0, (position + first).view(-1)).mul_(tap)
        if y is None:
            y = product if bias is None else product.add_(bias.to(dtype))
        else:
            y += product
    y = y.view(bs, num_rows, dim) + x.to(dtype) * taps[-1]
    return (silu(y) if activation == "silu" else y).to(x.dtype)
