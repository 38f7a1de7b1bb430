"""What a commit needs of every tree row, instead of a copy of the recurrent state per row.

Per row and GDN layer: the projected q|k|v before the convolution, and the gates a and b. At the shape of Qwen3.6-27B
that is 0.97 MiB a row over 48 layers, where SGLang's per-row snapshots take 144 MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.runtime_context import get_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_ddtree_kernel.gdn_commit import gdn_commit

from sglang_ddtree.server_args import is_ddtree

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang_ddtree_kernel.reference.accept_tree import Accepted


class GdnStash:
    """Rows of the tree under verification, for all GDN layers of the target, and their commit.

    conv_states [L, slots, D, >= W - 1] and states [L, slots, HV, V, K] are SGLang's own pools.
    """

    def __init__(self, model_runner: ModelRunner, num_rows: int):
        pool = model_runner.req_to_token_pool
        cache = pool.mamba_pool.mamba_cache
        self.conv_states, self.states = cache.conv[0], cache.temporal
        self.pool, self.layer_index = pool, pool.mamba_map
        layers = {m.layer_id: m for m in model_runner.model.modules() if isinstance(m, RadixLinearAttention)}
        self.layers = [layers[layer_id] for layer_id in pool.mamba_map]
        first = self.layers[0]
        self.num_k_heads, self.head_k_dim = first.num_k_heads, first.head_k_dim
        self.activation = first.activation
        self.num_rows = num_rows
        self.state_slots = None
        self.mixed_qkv = self.a = self.b = None

    def begin(self, req_pool_indices: torch.Tensor) -> None:
        """Looks up the state slots of this step's requests, int64 [bs]."""
        slots = self.pool.get_mamba_indices(req_pool_indices)
        self.state_slots = self.pool.translate_mamba_indices(slots).long()

    def put(self, layer_id: int, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> int:
        """Keeps one layer's rows ([bs, N, D], [bs, N, HV] twice); returns the layer's index in the pools."""
        bs = mixed_qkv.shape[0]
        if self.mixed_qkv is None or self.mixed_qkv.shape[1] < bs:
            self._allocate(bs, mixed_qkv, a)
        i = self.layer_index[layer_id]
        self.mixed_qkv[i, :bs] = mixed_qkv
        self.a[i, :bs] = a
        self.b[i, :bs] = b
        return i

    def _allocate(self, bs: int, mixed_qkv: torch.Tensor, gates: torch.Tensor) -> None:
        shape = (len(self.layers), bs, self.num_rows)
        self.mixed_qkv = mixed_qkv.new_empty(*shape, mixed_qkv.shape[-1])
        self.a, self.b = gates.new_empty(2, *shape, gates.shape[-1]).unbind(0)

    def commit(
        self, accepted: Accepted, track_slots: torch.Tensor | None, track_steps: torch.Tensor | None
    ) -> None:
        """Folds the accepted rows into conv and recurrent state by the autoregressive recurrence.

        track_slots int64 [bs], track_steps int32 [bs]: where the prefix cache wants the state after that many rows.
        """
        bs, layers = accepted.lens.shape[0], self.layers
        has_bias = layers[0].bias is not None
        gdn_commit(
            self.mixed_qkv[:, :bs],
            self.a[:, :bs],
            self.b[:, :bs],
            torch.stack([m.conv_weights for m in layers]),
            torch.stack([m.bias for m in layers]) if has_bias else None,
            torch.stack([m.A_log for m in layers]),
            torch.stack([m.dt_bias for m in layers]),
            self.states,
            self.conv_states,
            self.state_slots,
            accepted.rows,
            accepted.lens,
            self.num_k_heads,
            self.head_k_dim,
            track_slots,
            track_steps,
            activation=self.activation,
        )


def mamba_pool_init(original, pool, *args, **kwargs):
    """Hook around MambaPool.__init__: no per-row snapshots of conv windows and recurrent states."""
    if is_ddtree(get_server_args()):
        kwargs["speculative_num_draft_tokens"] = None
    return original(pool, *args, **kwargs)


def stash_bytes(configurator) -> int:
    """Bytes of the stash for every request that may run at once."""
    params = configurator.mambaish_config.mamba2_cache_params
    args, layers = configurator.server_args, len(params.layers)
    conv_dim, value_heads = params.shape.conv[0][0], params.shape.temporal[0]
    row = (conv_dim + 2 * value_heads) * configurator.model_dtype.itemsize
    return layers * (args.speculative_ddtree_budget + 1) * row * args.max_running_requests


def handle_max_mamba_cache(original, configurator, total_rest_memory):
    """Hook around the solver that splits memory (GiB) between KV and states: charges the stash, not snapshots."""
    if not is_ddtree(get_server_args()):
        return original(configurator, total_rest_memory)
    algorithm, configurator.spec_algorithm = configurator.spec_algorithm, SpeculativeAlgorithm.NONE
    try:
        return original(configurator, total_rest_memory - stash_bytes(configurator) / (1 << 30))
    finally:
        configurator.spec_algorithm = algorithm


def req_to_token_extra_context_len(original, server_args) -> int:
    """Hook around the width of a req_to_token row: a step reserves twice its rows beyond the committed length."""
    extra = original(server_args)
    if not is_ddtree(server_args):
        return extra
    return max(extra, 4 + 2 * server_args.speculative_num_draft_tokens)
