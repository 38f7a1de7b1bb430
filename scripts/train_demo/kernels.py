"""The gated delta rule for training and decoding: flash-linear-attention on a GPU, plain PyTorch on a CPU.

Mathematics: arXiv 2412.06464 (GatedDeltaNet). Shapes: q, k [B, T, H, K], v [B, T, HV, V], log decay g and beta
[B, T, HV]; q and k are normalised inside, q is scaled by K ** -0.5.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F

MAX_CONFIGS = 4


def prepare(first_config: int = 0) -> None:
    """Makes fla-core usable here and quick to start; call once per process that has a GPU.

    Autotuning is cut to MAX_CONFIGS candidates a kernel, timed briefly. `first_config` rotates them, so that several
    processes that share one Triton cache compile different candidates first. fla-core 0.6.0 refuses the backward
    on Hopper with Triton below 3.7.1 because of wrong results at tiles of 64 keys; with 128-wide heads the
    tile is 128, and `gradient_error` proves the gradients at every run.
    """
    if find_spec("fla") is None:
        raise SystemExit(
            "fla-core is not installed; on a GPU the recipe needs the extra: pip install -e '.[train]'"
        )

    import triton
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self, fn, arg_names, configs, *args, **kwargs):
        if configs and len(configs) > MAX_CONFIGS:
            configs = list(configs)[:: len(configs) // MAX_CONFIGS][:MAX_CONFIGS]
        if configs:
            turn = first_config % len(configs)
            configs = list(configs)[turn:] + list(configs)[:turn]
        original(self, fn, arg_names, configs, *args, **kwargs)
        self.do_bench = lambda call, quantiles: triton.testing.do_bench(
            call, warmup=2, rep=10, quantiles=quantiles
        )

    Autotuner.__init__ = init
    import fla.ops.common.chunk_o as chunk_o

    chunk_o.IS_NVIDIA_HOPPER = False


def chunk_rule(q, k, v, g, beta, *, final_state: bool = False):
    """o [B, T, HV, V], and with `final_state` the state [B, HV, V, K] after the last token, otherwise None."""
    if q.is_cuda:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule
    else:
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as rule

        group = v.shape[2] // q.shape[2]
        q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    o, state = rule(q, k, v, g=g, beta=beta, output_final_state=final_state, use_qk_l2norm_in_kernel=True)
    return o, state.transpose(-1, -2) if final_state else None


def surrogate_rule(q, k, v, g, beta, *, final_state: bool = False):
    """As cheap as can be, with the shapes, strides and gradients of `chunk_rule`: to compile what surrounds it."""
    return v * (beta * g).to(v.dtype).unsqueeze(-1) * (q.mean() * k.mean()), None


def recurrent_rule(q, k, v, g, beta, state) -> torch.Tensor:
    """One token (T = 1): o [B, 1, HV, V]; `state` fp32 [B, HV, V, K] is updated in place."""
    if q.is_cuda:
        return _recurrent_triton(q, k, v, g, beta, state)
    group = v.shape[2] // q.shape[2]
    q = (F.normalize(q[:, 0].float(), dim=-1) * q.shape[-1] ** -0.5).repeat_interleave(group, 1)
    k = F.normalize(k[:, 0].float(), dim=-1).repeat_interleave(group, 1)
    state.mul_(g[:, 0].float().exp()[..., None, None])
    write = (v[:, 0].float() - (state @ k.unsqueeze(-1)).squeeze(-1)) * beta[:, 0].float().unsqueeze(-1)
    state.addcmul_(write.unsqueeze(-1), k.unsqueeze(-2))
    return (state @ q.unsqueeze(-1)).squeeze(-1).to(v.dtype).unsqueeze(1)


def _recurrent_triton(q, k, v, g, beta, state) -> torch.Tensor:
    """fla-core's one-token kernel with the final state on top of the initial one: half the memory traffic.

    Safe because each program loads its slice of the state before it stores the same slice.
    """
    from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd_kernel as kernel

    batch, heads, dim = k.shape[0], k.shape[2], k.shape[3]
    value_heads, tile = v.shape[2], 8
    o = torch.empty(batch, 1, value_heads, dim, dtype=v.dtype, device=v.device)
    kernel[(dim // tile * batch * value_heads,)](
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        g=g.contiguous(),
        gk=None,
        gv=None,
        beta=beta.contiguous(),
        A_log=None,
        dt_bias=None,
        o=o,
        h0=state,
        ht=state,
        cu_seqlens=None,
        scale=dim**-0.5,
        T=1,
        H=heads,
        HV=value_heads,
        K=dim,
        V=dim,
        BK=dim,
        BV=tile,
        IS_BETA_HEADWISE=True,
        USE_QK_L2NORM_IN_KERNEL=True,
        APPLY_BETA_SIGMOID=False,
        ALLOW_NEG_EIGVAL=False,
        STATE_V_FIRST=True,
        num_warps=1,
        num_stages=3,
    )
    return o


def gradient_error(heads: int, value_heads: int, dim: int, device: str, length: int = 192) -> float:
    """Greatest relative error of output and gradients of `chunk_rule` against autograd through `recurrent` steps.

    The comparison runs in fp32 on the values that bf16 rounds to; bf16 kernels stay below 0.01.
    """
    generator = torch.Generator(device).manual_seed(3)

    def draw(*shape):
        return torch.randn(2, length, *shape, generator=generator, device=device)

    q, k, v = draw(heads, dim), draw(heads, dim), draw(value_heads, dim)
    g, beta, grad = -draw(value_heads).abs() * 0.2, draw(value_heads).sigmoid(), draw(value_heads, dim)
    inputs = [x.bfloat16().float().requires_grad_() for x in (q, k, v, g, beta)]
    q, k, v, g, beta = inputs
    group = value_heads // heads
    state, outputs = torch.zeros(2, value_heads, dim, dim, device=device), []
    for t in range(length):
        key = F.normalize(k[:, t], dim=-1).repeat_interleave(group, 1)
        query = F.normalize(q[:, t], dim=-1).repeat_interleave(group, 1) * dim**-0.5
        state = state * g[:, t].exp()[..., None, None]
        write = (v[:, t] - torch.einsum("bhvk,bhk->bhv", state, key)) * beta[:, t].unsqueeze(-1)
        state = state + write.unsqueeze(-1) * key.unsqueeze(-2)
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, query))
    expected = torch.stack(outputs, 1)
    expected = [expected, *torch.autograd.grad(expected, inputs, grad)]

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = [x.detach().to(torch.float32 if x is g else dtype).requires_grad_() for x in inputs]
    actual, _ = chunk_rule(*inputs)
    actual = [actual, *torch.autograd.grad(actual, inputs, grad.to(actual.dtype))]
    return max(((a.float() - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True))
