"""The `torch.ops.sgl_kernel.*_cpu` operators that SGLang's Qwen3.5 and GDN code calls on CPU, from our references.

The names and argument orders are SGLang's (models/qwen3_5.py, layers/attention/linear/gdn_backend.py,
sgl_kernel/mamba.py, sgl_kernel/speculative.py); the arithmetic is plain PyTorch.
"""

from __future__ import annotations

import torch
from sglang_ddtree_kernel.reference.conv1d_prefill import causal_conv1d_prefill
from sglang_ddtree_kernel.reference.gated_norm import gated_norm
from sglang_ddtree_kernel.reference.gdn_chunk import gdn_chunk_prefill
from sglang_ddtree_kernel.reference.gdn_commit import conv1d_decode_step, gdn_decode_step
from sglang_ddtree_kernel.reference.gdn_math import gdn_gates

_library: torch.library.Library | None = None


def _rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps)


def _gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (_rms_norm(x, eps) * (1.0 + weight.float())).to(x.dtype)


def fused_sigmoid_mul(x, gate, inplace=True):
    gate = torch.sigmoid(gate.reshape(x.shape))
    return x.mul_(gate) if inplace else x * gate


def fused_qk_gemma_rmsnorm(q, k, q_weight, k_weight, eps, head_dim):
    q, k = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    return _gemma_rms_norm(q, q_weight, eps), _gemma_rms_norm(k, k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    q, gate = q_gate.view(-1, num_heads, 2, head_dim).unbind(2)
    q, k = fused_qk_gemma_rmsnorm(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(len(gate), -1)


def fused_qkvzba_split_reshape_cat_contiguous(qkvz, ba, num_k_heads, num_v_heads, head_k_dim, head_v_dim):
    value_dim = num_v_heads * head_v_dim
    qkv, z = qkvz.split([2 * num_k_heads * head_k_dim + value_dim, value_dim], dim=-1)
    b, a = ba.split([num_v_heads, num_v_heads], dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_v_heads, head_v_dim), b.contiguous(), a.contiguous()


def fused_rmsnorm_gated(x, weight, z, eps):
    return gated_norm(x[:, None], z, weight, eps, "silu")


def fused_gdn_gating(A_log, a, b, dt_bias):
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    return g.unsqueeze(0), beta.unsqueeze(0)


def fused_sigmoid_gating_delta_rule_update(
    A_log, dt_bias, q, k, v, a, b, states, slots, cu_seqlens, *defaults
):
    """One decoded token per request: q, k [1, bs, H, K], v [1, bs, HV, V]."""
    bs, num_k_heads, head_k_dim = k.shape[1:]
    mixed_qkv = torch.cat([x.reshape(bs, -1) for x in (q, k, v)], dim=1)
    a, b = a.view(bs, -1), b.view(bs, -1)
    return gdn_decode_step(mixed_qkv, a, b, A_log, dt_bias, states, slots, num_k_heads, head_k_dim).unsqueeze(
        0
    )


def causal_conv1d_fwd(
    x, weight, bias, conv_states, cu_seqlens, slots, has_initial_state, silu, pad_slot, is_vnni
):
    activation = "silu" if silu else None
    return causal_conv1d_prefill(
        x, weight, bias, conv_states, has_initial_state, slots, cu_seqlens, activation
    )


def causal_conv1d_update(x, conv_states, weight, bias, silu, cache_seqlens, slots, pad_slot, is_vnni):
    return conv1d_decode_step(x, conv_states, slots, weight, bias, "silu" if silu else None)


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    head_first,
    use_qk_l2norm_in_kernel,
    initial_state_indices,
    **_,
):
    """Prefill over packed sequences [1, T, ...]; the third result holds the state at every chunk start.

    Takes the place of sgl_kernel.mamba.chunk_gated_delta_rule_cpu, which returns no chunk states; the prefix cache
    with `extra_buffer` needs them.
    """
    out, starts = gdn_chunk_prefill(
        q[0],
        k[0],
        v[0],
        g[0],
        beta[0],
        initial_state,
        initial_state_indices,
        cu_seqlens,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )
    return out.unsqueeze(0), None, starts.unsqueeze(0)


def assign_req_to_token_pool(req_pool_indices, req_to_token, start, end, slots, pool_len):
    """req_to_token[r, start : end] of each request takes its share of the newly allocated slots."""
    lens = (end - start).long()
    rows = req_pool_indices.long().repeat_interleave(lens)
    first = (lens.cumsum(0) - lens).repeat_interleave(lens)
    columns = start.long().repeat_interleave(lens) + torch.arange(len(rows)) - first
    req_to_token[rows, columns] = slots[: len(rows)].to(req_to_token.dtype)


_OPERATORS = (
    ("fused_sigmoid_mul", "(Tensor(a!) x, Tensor gate, bool inplace=True) -> Tensor(a!)"),
    (
        "fused_qk_gemma_rmsnorm",
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) -> (Tensor, Tensor)",
    ),
    (
        "fused_qk_gemma_rmsnorm_with_gate",
        "(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim, int num_heads) "
        "-> (Tensor, Tensor, Tensor)",
    ),
    (
        "fused_qkvzba_split_reshape_cat_contiguous",
        "(Tensor qkvz, Tensor ba, int num_k_heads, int num_v_heads, int head_k_dim, int head_v_dim) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    ),
    ("fused_rmsnorm_gated", "(Tensor x, Tensor weight, Tensor z, float eps) -> Tensor"),
    ("fused_gdn_gating", "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)"),
    (
        "fused_sigmoid_gating_delta_rule_update",
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
        "Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
        "bool use_qk_l2norm_in_kernel=True, float softplus_beta=1.0, float softplus_threshold=20.0) -> Tensor",
    ),
    (
        "causal_conv1d_fwd",
        "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_states, Tensor cu_seqlens, Tensor slots, "
        "Tensor has_initial_state, bool silu, int pad_slot, bool is_vnni) -> Tensor",
    ),
    (
        "causal_conv1d_update",
        "(Tensor x, Tensor(a!) conv_states, Tensor weight, Tensor? bias, bool silu, Tensor? cache_seqlens, "
        "Tensor slots, int pad_slot, bool is_vnni) -> Tensor",
    ),
    (
        "assign_req_to_token_pool",
        "(Tensor req_pool_indices, Tensor(a!) req_to_token, Tensor start, Tensor end, Tensor slots, "
        "int pool_len) -> ()",
    ),
)


def define() -> None:
    """Defines the operators in this process and replaces the one wrapper whose result is too short."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name, schema in _OPERATORS:
        _library.define(f"{name}_cpu{schema}")
        _library.impl(f"{name}_cpu", globals()[name], "CompositeExplicitAutograd")
    import sgl_kernel.mamba

    sgl_kernel.mamba.chunk_gated_delta_rule_cpu = chunk_gated_delta_rule
