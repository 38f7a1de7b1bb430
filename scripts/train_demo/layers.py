"""What both models are made of: norm, linear, rotary positions, gated MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def compute_dtype(device: torch.device | str) -> torch.dtype:
    """Activations: bf16 on a GPU, fp32 on a CPU. Master weights are fp32 on both."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def region(function: Callable, compiled: bool) -> Callable:
    """A part of a forward of fixed shapes, through torch.compile if `compiled`."""
    return torch.compile(function, dynamic=False) if compiled else function


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises the last dimension in fp32; `weight` is the whole gain (a zero-centred one passes 1 + weight)."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def gated_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def rotary_table(
    positions: torch.Tensor, dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [*positions.shape, dim / 2] for rotation by halves."""
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    angles = positions.float().unsqueeze(-1) * theta**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first 2 * cos.shape[-1] channels of x [..., d]; cos and sin must broadcast over the rest."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def normal(generator: torch.Generator, std: float, *shape: int) -> torch.Tensor:
    """Initial values on the generator's device."""
    return torch.randn(*shape, generator=generator, device=generator.device) * std
