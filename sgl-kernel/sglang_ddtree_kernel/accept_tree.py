"""Walk the draft tree along the target's tokens."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel.reference.accept_tree import Accepted, accept_tree_walk
from sglang_ddtree_kernel.tree_types import DraftTree


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Argmax token int64 [R] of every row of logits [R, V]; ties go to the smaller id."""
    if logits.ndim != 2:
        raise ValueError(f"logits must be [R, V], got {list(logits.shape)}")
    return logits.max(-1).indices  # the first one, as argmax, but three times as fast on a CPU


def accept_tree(
    tree: DraftTree,
    target_tokens: torch.Tensor,
    out_slots: torch.Tensor | None = None,
    horizon: int | None = None,
) -> Accepted:
    """Accept drafts from the root down while the target's token at a row is one of the row's children.

    The first token without a child is the bonus. With argmaxes this is greedy verification; with one sample
    of the target's own (adjusted) distribution per row, the output has exactly the target's distribution, as
    each emitted token is such a sample given the tokens before it. Should two siblings hold one token, the
    first row wins.

    Args:
        tree: N rows per request.
        target_tokens: int64 [bs, N], the target's token after each row.
        out_slots: int64 [bs, N], KV slot of each row; if given, the moves that make the accepted KV
            contiguous are returned.
        horizon: most drafts to accept, at least 1 (default N - 1); P = horizon + 1 columns come back,
            whatever N is.

    Returns:
        Accepted, see its fields.

    Raises:
        ValueError: a shape or dtype does not fit, or `horizon` is below 1.
    """
    shape = tree.tokens.shape
    if target_tokens.shape != shape or target_tokens.dtype != torch.int64:
        raise ValueError(
            f"target_tokens must be int64 {list(shape)},"
            f" got {target_tokens.dtype} {list(target_tokens.shape)}"
        )
    if out_slots is not None and (out_slots.shape != shape or out_slots.dtype != torch.int64):
        raise ValueError(
            f"out_slots must be int64 {list(shape)}, got {out_slots.dtype} {list(out_slots.shape)}"
        )
    if horizon is None:
        horizon = max(shape[1] - 1, 1)
    if horizon < 1:
        raise ValueError(f"horizon must be at least 1, got {horizon}")
    return accept_tree_walk(tree, target_tokens, out_slots, horizon)
