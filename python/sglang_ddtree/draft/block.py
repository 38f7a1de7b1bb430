"""The drafter's forward: one block of mask tokens behind the last committed token."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


def draft_block_batch(
    *,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    req_pool_indices: torch.Tensor,
    slots: torch.Tensor,
    mask_token_id: int,
    embed: torch.nn.Module,
    spec_info,
) -> ForwardBatch:
    """Block [bonus, MASK, ...] at positions L .. L + block - 1, attending to the committed draft KV and to itself.

    bonus_tokens int64 [bs]; seq_lens int [bs]; seq_lens_cpu int32 [bs], a host bound of L + block; slots int64
    [bs, block], where the block's own KV goes (overwritten at the next step).
    """
    bs, block = slots.shape
    ids = torch.full((bs, block), mask_token_id, dtype=torch.long, device=slots.device)
    ids[:, 0] = bonus_tokens
    positions = seq_lens[:, None].long() + torch.arange(block, device=slots.device)
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=bs,
        input_ids=ids.reshape(-1),
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        out_cache_loc=slots.reshape(-1),
        seq_lens_sum=int(seq_lens_cpu.sum()),
        seq_lens_cpu=seq_lens_cpu,
        positions=positions.reshape(-1),
        input_embeds=embed(ids).flatten(0, 1),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
