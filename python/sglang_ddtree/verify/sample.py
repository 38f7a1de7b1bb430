"""The target's token after every tree row: its argmax, or one sample of its adjusted distribution.

Sample-and-walk: every row is sampled as if it were the last token of its path; the walk then follows the samples. The
token that follows each accepted row is such a sample given exactly that row's path, so the text has the target's own
distribution, and with a seed it is the very text that decoding one token at a time gives (SGLang derives the noise of
a row from seed and position).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.runtime_context import get_server_args
from sglang_ddtree_kernel.accept_tree import greedy_tokens

from sglang_ddtree.server_args import is_ddtree

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


def copy_logits_to_buffer(
    original,
    processor: LogitsProcessor,
    logits: torch.Tensor,
    metadata: LogitsMetadata,
    use_buffer: bool = True,
) -> torch.Tensor:
    """Hook around the copy to fp32, which would read and write more than the argmax of all rows does.

    The worker converts them where more is wanted, which a captured forward cannot know.
    """
    if (
        processor.final_logit_softcapping
        or not metadata.forward_mode.is_target_verify()
        or not is_ddtree(get_server_args())
    ):
        return original(processor, logits, metadata, use_buffer)
    return logits[:, : processor.vocab_size].contiguous()


def reads_only_argmax(batch: ScheduleBatch) -> bool:
    """Are the logits of this batch, penalties aside, neither changed nor sampled nor returned?"""
    info = batch.sampling_info
    return info.is_all_greedy and not (
        batch.return_logprob
        or batch.has_grammar
        or info.logit_bias is not None
        or info.has_custom_logit_processor
    )


def adjust_logits(logits: torch.Tensor, info: SamplingBatchInfo, num_rows: int) -> None:
    """Applies logit bias and custom processors to logits [bs * N, V] in place, in the order of plain decoding."""
    if info.logit_bias is not None:
        logits.view(-1, num_rows, logits.shape[-1]).add_(info.logit_bias[:, None])
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, info, num_tokens_in_batch=num_rows)


def expand(info: SamplingBatchInfo, num_rows: int) -> SamplingBatchInfo:
    """The same sampling parameters for every row of a request."""
    rows = copy.copy(info)
    for name in PER_REQUEST:
        value = getattr(info, name)
        if value is not None:
            setattr(rows, name, value.repeat_interleave(num_rows, dim=0))
    return rows


def target_tokens(
    logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor, num_rows: int, sampler: Sampler
) -> torch.Tensor:
    """Token int64 [bs, N] after each row.

    logits [bs * N, V], adjusted already, in fp32 unless only their argmax is wanted; positions int64 [bs * N] of the
    rows themselves, as in decoding.
    """
    if info.is_all_greedy:
        return greedy_tokens(logits).view(-1, num_rows)
    rows = expand(info, num_rows)
    probs = torch.softmax(logits / rows.temperatures, dim=-1)
    simple = not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling)
    tokens = sampler._sample_from_probs(probs, rows, positions, simple)
    sampler._sync_token_ids_across_tp(tokens, rows)
    return tokens.view(-1, num_rows).long()
