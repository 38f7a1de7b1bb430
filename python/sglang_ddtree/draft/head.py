"""The drafter's head: top-k log-probabilities of its hidden states under the target's lm_head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang_ddtree_kernel.topk_logprobs import merge_topk, topk_logprobs

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator


class DraftHead:
    """One GEMM for all rows of a step, one pass over the logits, and with TP one small all-gather.

    Every rank ends with the same candidates bit for bit, so that every rank builds the same tree.
    """

    def __init__(self, lm_head: torch.nn.Module, cap: int, tp_group: GroupCoordinator):
        shard = getattr(lm_head, "shard_indices", None)
        if not torch.is_floating_point(lm_head.weight):
            raise ValueError(
                "--quantization: DDTREE needs an unquantised lm_head; exclude lm_head from quantisation"
            )
        if shard is not None and shard.num_added_elements:
            raise ValueError("--model-path: DDTREE does not support an lm_head with added vocabulary")
        self.weight = lm_head.weight[: shard.num_org_elements] if shard is not None else lm_head.weight
        self.vocab_start = shard.org_vocab_start_index if shard is not None else 0
        self.cap = cap
        self.tp_group = tp_group if tp_group.world_size > 1 else None

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [R, hidden_size] -> log-probs fp32 [R, cap] (descending), ids int64 [R, cap]."""
        logits = hidden.to(self.weight.dtype) @ self.weight.T
        local = topk_logprobs(logits, min(self.cap, logits.shape[1]), self.vocab_start)
        values, ids, lse = local.values[None], local.ids[None], local.lse[None]
        if self.tp_group is not None:
            values, ids, lse = self._gather(local)
        return merge_topk(values, ids, lse)

    def _gather(self, local) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All shards' candidates, [S, R, k] twice and [S, R]. Ids travel as fp32, exact below 2^24."""
        rows, k = local.values.shape
        packed = torch.cat([local.values, local.ids.float(), local.lse[:, None]], dim=1)
        packed = self.tp_group.all_gather(packed, dim=0).view(-1, rows, 2 * k + 1)
        return packed[..., :k].contiguous(), packed[..., k : 2 * k].long(), packed[..., -1].contiguous()
