"""GDN layers of the target while a tree is verified."""

from __future__ import annotations

from sglang_ddtree_kernel.conv1d_tree import conv1d_tree
from sglang_ddtree_kernel.gdn_tree_verify import gdn_tree_verify

from sglang_ddtree.verify.input import DDTreeVerifyInput


def radix_linear_attention_forward(original, layer, forward_batch, mixed_qkv, a, b):
    """Hook around RadixLinearAttention.forward: conv and delta rule along each row's own path.

    mixed_qkv [bs * N, D] before the convolution, a and b [bs * N, HV] -> [1, bs * N, HV, V]. The rows go to the
    stash, from which the accepted path is folded into the state later; the state pools are only read here.
    """
    spec = forward_batch.spec_info
    if not isinstance(spec, DDTreeVerifyInput):
        return original(layer, forward_batch, mixed_qkv, a, b)
    stash, (bs, num_rows) = spec.stash, spec.slots.shape
    mixed_qkv = mixed_qkv.view(bs, num_rows, -1)
    a, b = a.view(bs, num_rows, -1), b.view(bs, num_rows, -1)
    i = stash.put(layer.layer_id, mixed_qkv, a, b)
    qkv = conv1d_tree(
        mixed_qkv,
        stash.conv_states[i],
        stash.state_slots,
        layer.conv_weights,
        layer.bias,
        spec.gdn_parents,
        layer.activation,
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
    return out.reshape(1, bs * num_rows, layer.num_v_heads, layer.head_v_dim)
