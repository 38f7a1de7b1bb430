"""The drafter's forward: one block of mask tokens behind the last committed token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_ddtree_kernel.tree_types import chain_ancestors, pack_ancestors


@dataclass(kw_only=True)
class DDTreeBlockInput(DFlashVerifyInput):
    """Who sees whom in a block of masks; the hook on RadixAttention recognises this type.

    As in stock DFLASH a mask sees the whole block, in sliding-window layers only what stands before it.
    """

    whole: torch.Tensor  # int64 [bs, block, 1], bit words under which every row sees every row
    before: torch.Tensor  # int64 [bs, block, 1], bit words of a chain
    depths: torch.Tensor  # int32 [bs, block], positions behind the committed tokens

    @classmethod
    def create(cls, max_bs: int, block_size: int, device: torch.device | str) -> DDTreeBlockInput:
        everyone = torch.ones(max_bs, block_size, block_size, dtype=torch.bool, device=device)
        depths = torch.arange(block_size, dtype=torch.int32, device=device)
        return cls(
            draft_token=torch.empty(0, dtype=torch.int64, device=device),
            positions=torch.empty(0, dtype=torch.int64, device=device),
            draft_token_num=block_size,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            whole=pack_ancestors(everyone),
            before=chain_ancestors(max_bs, block_size, device),
            depths=depths.expand(max_bs, -1).contiguous(),
        )

    def visible(self, layer, bs: int) -> torch.Tensor:
        words = self.whole if layer.attn_type == AttentionType.ENCODER_ONLY else self.before
        return words[:bs]


def draft_block_batch(
    *,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor | None,
    req_pool_indices: torch.Tensor,
    slots: torch.Tensor,
    mask_token_id: int,
    embed: torch.nn.Module,
    spec_info: DDTreeBlockInput,
) -> ForwardBatch:
    """Block [bonus, MASK, ...] at positions L .. L + block - 1, attending to the committed draft KV and to itself.

    bonus_tokens int64 [bs]; seq_lens int [bs]; seq_lens_cpu int32 [bs], a host bound of L + block, where a backend
    wants one; slots int64 [bs, block], where the block's own KV goes (overwritten at the next step).
    """
    bs, block = slots.shape
    ids = torch.full((bs, block), mask_token_id, dtype=torch.long, device=slots.device)
    ids[:, 0] = bonus_tokens
    positions = seq_lens[:, None].long() + spec_info.depths[:bs]
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=bs,
        input_ids=ids.reshape(-1),
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        out_cache_loc=slots.reshape(-1),
        seq_lens_sum=None if seq_lens_cpu is None else int(seq_lens_cpu.sum()),
        seq_lens_cpu=seq_lens_cpu,
        positions=positions.reshape(-1),
        input_embeds=embed(ids).flatten(0, 1),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
