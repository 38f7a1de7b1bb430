"""Triton kernel of `gated_norm`: a program takes some heads, of whichever rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree_kernel._gdn_triton import sigmoid, silu

PROGRAMS = 264  # two for every multiprocessor of an H100; beyond, a program takes more heads


@triton.jit
def _gated_norm_kernel(
    x, gate, weight, out, total, gate_row, eps,
    HV: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, HEADS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """HEADS of the `total` = R * HV heads."""
    head, column = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, V_PAD)
    inside = (head < total)[:, None] & (column < V)[None, :]
    row = (head // HV).to(tl.int64)
    at = head.to(tl.int64)[:, None] * V + column[None, :]
    gate_at = (row * gate_row + head % HV * V)[:, None] + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, mask=column < V, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / V + eps)
    factor = sigmoid(gates) if SIGMOID else silu(gates)
    result = values * scale[:, None] * weights[None, :] * factor
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def gated_norm_triton(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: str,
    *,
    heads: int | None = None,
) -> torch.Tensor:
    """`gated_norm` in one launch. heads: of a program, a power of two."""
    num_rows, HV, V = x.shape
    total = num_rows * HV
    out = x.new_empty(num_rows, HV * V)
    if not total:
        return out
    if heads is None:
        heads = min(4, triton.next_power_of_2(triton.cdiv(total, PROGRAMS)))
    _gated_norm_kernel[(triton.cdiv(total, heads),)](
        x,
        gate,
        weight.contiguous(),
        out,
        total,
        gate.stride(0),
        eps,
        HV=HV,
        V=V,
        V_PAD=triton.next_power_of_2(V),
        HEADS=heads,
        SIGMOID=activation == "sigmoid",
        num_warps=1,
    )
    return out
