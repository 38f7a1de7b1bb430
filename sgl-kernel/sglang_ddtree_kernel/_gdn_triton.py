"""Device functions that the GatedDeltaNet kernels share: the Triton side of `reference.gdn_math`."""

from __future__ import annotations

import triton
import triton.language as tl

SOFTPLUS_LINEAR_ABOVE = tl.constexpr(20.0)
LOG_DECAY_FLOOR = tl.constexpr(-1e38)  # a finite stand-in for -inf, so that differences of sums are numbers


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(a, A_log, dt_bias):
    """g = -exp(A_log) softplus(a + dt_bias) in fp32."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    softplus = tl.where(
        x > SOFTPLUS_LINEAR_ABOVE, x, tl.log(1.0 + tl.exp(tl.minimum(x, SOFTPLUS_LINEAR_ABOVE)))
    )
    return tl.maximum(-tl.exp(A_log.to(tl.float32)) * softplus, LOG_DECAY_FLOOR)


@triton.jit
def inverse_norm(x, eps):
    """1 / sqrt(|x|^2 + eps) of every row of x [R, K], in fp32."""
    x = x.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, 1) + eps)
