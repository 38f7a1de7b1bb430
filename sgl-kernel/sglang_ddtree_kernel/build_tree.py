"""Build the draft tree: the best nodes under the drafter's own log-probabilities."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel._build_tree_triton import build_tree_triton
from sglang_ddtree_kernel.reference.build_tree import build_tree_levels
from sglang_ddtree_kernel.tree_types import DraftTree


def build_tree(
    logprobs: torch.Tensor,
    ids: torch.Tensor,
    root_tokens: torch.Tensor,
    budget: int,
    *,
    spine: bool = False,
) -> DraftTree:
    """Keep the `budget` best nodes of each request, best first, as trees of N = budget + 1 rows.

    A node is a path of candidates, one per level; its score is the fp32 sum of the log-probabilities along
    the path, added in path order. As no log-probability is positive, a parent never scores below its child:
    the kept set is closed under parents. Its probabilities sum to the expected accepted length under the
    drafter, which no other set of that size exceeds. A node whose score is -inf is never kept.

    Tie rule, a total order: higher score, then smaller depth, then the parent that stands first in its level,
    then the smaller candidate index. Rows are ordered by depth, and by that order within a depth.

    Args:
        logprobs: fp32, bf16 or fp16 [bs, T, C], or [bs, T, C, C] with children that depend on their parent:
            [:, d, p, c] is candidate c at depth d + 1 below candidate p of depth d (d = 0 reads p = 0 only).
            Positive values count as 0, NaN as -inf.
        ids: int64 [bs, T, C], token of each candidate.
        root_tokens: int64 [bs], last committed token.
        budget: nodes to keep besides the root, at least 1.
        spine: keep the argmax chain before anything else (each level's best candidate below the chain so far,
            ties to the smaller index, until -inf); its node then stands first among the rows of its depth.

    Raises:
        ValueError: a shape or dtype does not fit, or `budget` is below 1; on CUDA also T > 31, C > 32 or
            budget > 511.
    """
    if ids.ndim != 3 or ids.dtype != torch.int64:
        raise ValueError(f"ids must be int64 [bs, T, C], got {ids.dtype} {list(ids.shape)}")
    bs, horizon, width = ids.shape
    if logprobs.shape not in ((bs, horizon, width), (bs, horizon, width, width)):
        raise ValueError(
            f"logprobs must be [bs, T, C] or [bs, T, C, C] for ids {list(ids.shape)},"
            f" got {list(logprobs.shape)}"
        )
    if not logprobs.is_floating_point():
        raise ValueError(f"logprobs must be floating point, got {logprobs.dtype}")
    if root_tokens.shape != (bs,):
        raise ValueError(f"root_tokens must be [bs] = [{bs}], got {list(root_tokens.shape)}")
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")
    if ids.is_cuda:
        return build_tree_triton(logprobs, ids, root_tokens, budget, spine=spine)
    return build_tree_levels(logprobs, ids, root_tokens, budget, spine=spine)
