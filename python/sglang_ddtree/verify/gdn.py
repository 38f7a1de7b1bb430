"""GDN layers of the target while a tree is verified."""

from __future__ import annotations

import torch
from sglang_ddtree_kernel.conv1d_tree import conv1d_tree
from sglang_ddtree_kernel.gated_norm import gated_norm
from sglang_ddtree_kernel.gdn_tree_verify import gdn_tree_verify

from sglang_ddtree.verify.input import DDTreeVerifyInput


def radix_linear_attention_forward(original, layer, forward_batch, mixed_qkv, a, b):
    """Hook around RadixLinearAttention.forward, for every model with GDN layers.

    mixed_qkv [bs * N, D] before the convolution, a and b [bs * N, HV] -> [1, bs * N, HV, V].
    """
    spec = forward_batch.spec_info
    if not isinstance(spec, DDTreeVerifyInput):
        return original(layer, forward_batch, mixed_qkv, a, b)
    return _tree_rows(layer, spec, forward_batch.batch_size, mixed_qkv, a, b)[None]


def gated_delta_net_forward(original, module, hidden_states, forward_batch):
    """Hook around Qwen3_5GatedDeltaNet.forward: q|k|v, z, b and a are read where the projections left them.

    The stock forward copies each into a tensor of its own, four launches a layer that a step of 16 rows notices.
    """
    spec = forward_batch.spec_info
    if not isinstance(spec, DDTreeVerifyInput) or isinstance(hidden_states, tuple):
        return original(module, hidden_states, forward_batch)
    layer = module.attn
    qkvz, ba = module._forward_input_proj(hidden_states)
    value_dim = layer.num_v_heads * layer.head_v_dim
    mixed_qkv, z = qkvz.split([qkvz.shape[-1] - value_dim, value_dim], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    out = _tree_rows(layer, spec, forward_batch.batch_size, mixed_qkv, a, b)
    out = gated_norm(out, z, module.norm.weight, module.norm.eps, module.norm.activation)
    return module.out_proj(out)[0]


def _tree_rows(
    layer, spec: DDTreeVerifyInput, bs: int, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Conv and delta rule along each row's own path: [bs * N, HV, V].

    The rows go to the stash, from which the accepted path is folded into the state later; the state pools are only
    read here.
    """
    stash, num_rows = spec.stash, spec.draft_token_num
    mixed_qkv, a, b = (x.view(bs, num_rows, -1) for x in (mixed_qkv, a, b))
    i = stash.layer_index[layer.layer_id]
    qkv = conv1d_tree(
        mixed_qkv,
        stash.conv_states[i],
        stash.state_slots,
        layer.conv_weights,
        layer.bias,
        spec.gdn_parents,
        layer.activation,
        gates=(a, b),
        stash=stash.rows_of(i, bs),
    )
    out = gdn_tree_verify(
        qkv,
        a,
        b,
        layer.A_log,
        layer.dt_bias,
        stash.states[i],
        stash.state_slots,
        spec.gdn_ancestors,
        layer.num_k_heads,
        layer.head_k_dim,
        plan=spec.plan,
    )
    return out.view(bs * num_rows, layer.num_v_heads, layer.head_v_dim)
