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
from sglang_ddtree_kernel.accept_tree import greedy_tokens

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


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

    logits [bs * N, V], adjusted already; positions int64 [bs * N] of the rows themselves, as in decoding.
    """
    if info.is_all_greedy:
        return greedy_tokens(logits).view(-1, num_rows)
    rows = expand(info, num_rows)
    probs = torch.softmax(logits.float() / rows.temperatures, dim=-1)
    simple = not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling)
    tokens = sampler._sample_from_probs(probs, rows, positions, simple)
    sampler._sync_token_ids_across_tp(tokens, rows)
    return tokens.view(-1, num_rows).long()
