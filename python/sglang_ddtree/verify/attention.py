"""Attention layers of the target while a tree is verified, and of the drafter while it drafts a block."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang_ddtree_kernel.tree_attention import tree_attention

from sglang_ddtree.draft.block import DDTreeBlockInput
from sglang_ddtree.verify.input import DDTreeVerifyInput


def radix_attention_forward(original, layer, q, k, v, forward_batch, save_kv_cache=True, *args, **kwargs):
    """Hook around RadixAttention.forward: a row sees the committed tokens and, of its own step, what `visible` says.

    q [bs * N, Hq * d], k and v [bs * N, Hkv * d] -> [bs * N, Hq * dv]. Everything else goes to the stock backend.
    """
    spec = forward_batch.spec_info
    if not isinstance(spec, DDTreeVerifyInput | DDTreeBlockInput):
        return original(layer, q, k, v, forward_batch, save_kv_cache, *args, **kwargs)
    backend = get_attn_backend()
    pool = backend.token_to_kv_pool
    bs, num_rows = forward_batch.batch_size, spec.draft_token_num
    if save_kv_cache and k is not None:
        pool.set_kv_buffer(
            layer,
            KVWriteLoc(forward_batch.out_cache_loc, None),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        )
    out = tree_attention(
        q.view(bs, num_rows, layer.tp_q_head_num, layer.qk_head_dim),
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        backend.req_to_token_pool.req_to_token,
        forward_batch.req_pool_indices,
        forward_batch.seq_lens,
        forward_batch.out_cache_loc.view(bs, num_rows),
        spec.visible(layer, bs),
        layer.scaling,
        layer.logit_cap,
        window=max(layer.sliding_window_size, 0),
        depths=spec.depths[:bs],
    )
    return out.reshape(bs * num_rows, layer.tp_q_head_num * layer.v_head_dim).to(q.dtype)
