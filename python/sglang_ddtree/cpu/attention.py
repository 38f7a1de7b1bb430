"""SGLang's torch_native attention backend plus the drafter's block forward, which it lacks."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang_ddtree_kernel.tree_attention import tree_attention
from sglang_ddtree_kernel.tree_types import chain_ancestors, pack_ancestors


class CpuAttnBackend(TorchNativeAttnBackend):
    """TARGET_VERIFY reaches this backend only for the drafter's block: the target's tree goes to tree_attention."""

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if layer.sliding_window_size > 0:
            raise NotImplementedError(
                "--speculative-draft-model-path: sliding-window drafters are not served on CPU"
            )
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        bs, block = forward_batch.batch_size, forward_batch.spec_info.draft_token_num
        if layer.attn_type == AttentionType.ENCODER_ONLY:  # every mask token sees the whole block
            visible = pack_ancestors(torch.ones(bs, block, block, dtype=torch.bool))
        else:
            visible = chain_ancestors(bs, block)
        out = tree_attention(
            q.view(bs, block, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.out_cache_loc.view(bs, block),
            visible,
            layer.scaling,
        )
        return out.reshape(bs * block, -1).to(q.dtype)


def create_backend(runner) -> CpuAttnBackend:
    return CpuAttnBackend(runner)
