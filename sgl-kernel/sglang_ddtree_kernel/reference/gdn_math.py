"""The pieces of GatedDeltaNet that verification, commit, decode and prefill must all compute alike.

Sigmoid, SiLU and softplus are spelled out with `exp` and `log1p`: on CPU, PyTorch's fused versions use
another routine for the elements that do not fill a SIMD register, so their last bit would depend on the batch
an element stands in.
"""

from __future__ import annotations

import torch

SOFTPLUS_LINEAR_ABOVE = 20.0


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """fp32, unless the caller asks for float64 by passing it."""
    return torch.promote_types(x.dtype, torch.float32)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    denominator = torch.neg(x).exp_().add_(1.0)
    return torch.div(x, denominator, out=denominator)


def softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(
        x > SOFTPLUS_LINEAR_ABOVE, x, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_LINEAR_ABOVE)))
    )


def gdn_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [..., HV]; A_log, dt_bias broadcast against them. Returns (log decay g <= 0, beta in (0, 1))."""
    dtype = compute_dtype(a)
    g = -torch.exp(A_log.to(dtype)) * softplus(a.to(dtype) + dt_bias.to(dtype))
    return g, sigmoid(b.to(dtype))


def l2_normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def split_heads(
    mixed_qkv: torch.Tensor, num_k_heads: int, head_k_dim: int, num_v_heads: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixed_qkv [..., D] after the convolution -> q, k [..., H, K] and v [..., HV, V].

    q and k are normalised, q is also scaled by K^-1/2.
    """
    lead, qk_dim = mixed_qkv.shape[:-1], 2 * num_k_heads * head_k_dim
    x = mixed_qkv.to(compute_dtype(mixed_qkv))
    qk = l2_normalise(x[..., :qk_dim].reshape(*lead, 2, num_k_heads, head_k_dim), eps)
    v = x[..., qk_dim:].reshape(*lead, num_v_heads, -1)
    return qk.select(-3, 0) * head_k_dim**-0.5, qk.select(-3, 1), v


def causal_conv(
    history: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """history [..., W-1+P, D], P rows x [..., P, D], weight [..., D, W], bias [..., D] -> y like x.

    `history` is the committed window followed by the P rows as the conv pool would hold them (in its dtype).
    Products are added one by one, oldest tap first, as a one-token step does.
    """
    dtype, rows, width = compute_dtype(x), x.shape[-2], weight.shape[-1]
    taps = weight.to(dtype).movedim(-1, 0).contiguous().unsqueeze(-2)  # W times [..., 1, D]
    y = history[..., :rows, :].to(dtype) * taps[0]
    if bias is not None:
        y += bias.to(dtype).unsqueeze(-2)
    for j in range(1, width - 1):
        y += history[..., j : j + rows, :].to(dtype) * taps[j]
    y += x.to(dtype) * taps[-1]
    return (silu(y) if activation == "silu" else y).to(x.dtype)


def read_slots(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """pool [L, slots, ...] -> a copy [L, bs, ...]; zeros for padded requests (slot < 0)."""
    values = pool.index_select(1, slots.clamp(min=0))
    padded = slots < 0
    if padded.device.type == "cpu" and not padded.any():
        return values
    return values.masked_fill_(padded.view(1, -1, *[1] * (pool.dim() - 2)), 0)


def write_slots(pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """pool [L, slots, ...] takes values [L, bs, ...] at `slots`; requests with slot < 0 write nothing.

    On a device a padded request repeats the write of the first live one, so that shapes do not depend on the
    data and no write races with a different value; if none is live, slot 0 is rewritten with itself.
    """
    live = slots >= 0
    if live.device.type == "cpu" and live.all():
        pool[:, slots.long()] = values.to(pool.dtype)
        return
    source = torch.where(live, torch.arange(len(slots), device=slots.device), live.int().argmax())
    target = slots.long()[source].clamp(min=0)
    pool[:, target] = torch.where(live.any(), values[:, source].to(pool.dtype), pool[:, target])
