"""What a commit needs of every tree row, instead of a copy of the recurrent state per row.

Per row and GDN layer: the projected q|k|v before the convolution, and the gates a and b. At the shape of Qwen3.6-27B
that is 0.97 MiB a row over 48 layers, where SGLang's per-row snapshots take 144 MiB.
"""

from __future__ import annotations

from collections import defaultdict
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
        if self.states.dtype != torch.float32:
            # Decoding rounds the state after every token, the rows of a tree are not rounded one by one.
            raise ValueError(
                f"--mamba-ssm-dtype: states in {self.states.dtype} are not supported with DDTREE; use float32"
            )
        self.pool, self.layer_index = pool, pool.mamba_map
        layers = {m.layer_id: m for m in model_runner.model.modules() if isinstance(m, RadixLinearAttention)}
        self.layers = [layers[layer_id] for layer_id in pool.mamba_map]
        first = self.layers[0]
        self.num_k_heads, self.head_k_dim = first.num_k_heads, first.head_k_dim
        self.activation = first.activation
        self.num_rows, self.dtype = num_rows, model_runner.dtype
        self.state_slots = None
        self._allocate(0)
        self._stack_weights()

    @property
    def row_bytes(self) -> int:
        """Bytes of one tree row of one request, over all layers."""
        return sum(x.shape[0] * x.shape[-1] * x.itemsize for x in (self.mixed_qkv, self.a, self.b))

    def reserve(self, bs: int) -> None:
        """Makes room for bs requests; in captured graphs the addresses must not change afterwards."""
        if self.mixed_qkv.shape[1] < bs:
            self._allocate(bs)

    def _allocate(self, bs: int) -> None:
        shape, heads = (len(self.layers), bs, self.num_rows), self.layers[0].num_v_heads
        empty = lambda width: self.states.new_empty(*shape, width, dtype=self.dtype)  # noqa: E731
        self.mixed_qkv, self.a, self.b = empty(self.conv_states.shape[2]), empty(heads), empty(heads)

    def _stack_weights(self) -> None:
        """The commit reads all layers' small weights from one tensor of each kind.

        They are copied anew at every step, one launch for each dtype, since a weight update may have changed them.
        """
        kinds = ("conv_weights", "bias", "A_log", "dt_bias")
        sources = {kind: [getattr(m, kind) for m in self.layers] for kind in kinds}
        if sources["bias"][0] is None:
            del sources["bias"]
        self.weights = {kind: torch.stack([x.detach() for x in xs]) for kind, xs in sources.items()}
        by_dtype = defaultdict(lambda: ([], []))
        for kind, xs in sources.items():
            copies, originals = by_dtype[xs[0].dtype]
            copies += self.weights[kind].unbind()
            originals += [x.detach() for x in xs]
        self._weight_copies = list(by_dtype.values())

    def begin(self, req_pool_indices: torch.Tensor) -> None:
        """Looks up the state slots of this step's requests, int64 [bs]."""
        slots = self.pool.get_mamba_indices(req_pool_indices)
        self.state_slots = self.pool.translate_mamba_indices(slots).long()

    def rows_of(self, i: int, bs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where layer i keeps its rows: q|k|v [bs, N, D], a and b [bs, N, HV]."""
        return self.mixed_qkv[i, :bs], self.a[i, :bs], self.b[i, :bs]

    def commit(
        self, accepted: Accepted, track_slots: torch.Tensor | None, track_steps: torch.Tensor | None
    ) -> None:
        """Folds the accepted rows into conv and recurrent state by the autoregressive recurrence.

        track_slots int64 [bs], track_steps int32 [bs]: where the prefix cache wants the state after that many rows.
        """
        bs = accepted.lens.shape[0]
        for copies, originals in self._weight_copies:
            torch._foreach_copy_(copies, originals)
        gdn_commit(
            self.mixed_qkv[:, :bs],
            self.a[:, :bs],
            self.b[:, :bs],
            self.weights["conv_weights"],
            self.weights.get("bias"),
            self.weights["A_log"],
            self.weights["dt_bias"],
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


def reserved_slots(server_args) -> int:
    """KV slots a request holds beyond the length that the host knows.

    One step's tree or block, behind what the step in flight may commit, which the host has not seen yet.
    """
    return server_args.speculative_num_draft_tokens + server_args.speculative_dflash_block_size


def req_to_token_extra_context_len(original, server_args) -> int:
    """Hook around the width of a req_to_token row: as wide as the reservation of a step."""
    extra = original(server_args)
    return max(extra, 4 + reserved_slots(server_args)) if is_ddtree(server_args) else extra


def alloc_for_spec_decode(original, *args, nxt_kv_lens, cur_kv_lens_cpu, nxt_kv_lens_cpu, **kwargs):
    """Hook around the allocation of a decode step: what the tree needs, where DFLASH asks for its rows twice."""
    args_ = get_server_args()
    if is_ddtree(args_):
        spare = 2 * args_.speculative_num_draft_tokens - reserved_slots(args_)
        torch.maximum(cur_kv_lens_cpu, nxt_kv_lens_cpu - spare, out=nxt_kv_lens_cpu)
        nxt_kv_lens.copy_(nxt_kv_lens_cpu, non_blocking=True)
        kwargs["num_needed_tokens"] = int((nxt_kv_lens_cpu - cur_kv_lens_cpu).sum())
    return original(
        *args,
        nxt_kv_lens=nxt_kv_lens,
        cur_kv_lens_cpu=cur_kv_lens_cpu,
        nxt_kv_lens_cpu=nxt_kv_lens_cpu,
        **kwargs,
    )
