"""First-child and next-sibling links of a tree, the form in which SGLang's grammar code walks it."""

from __future__ import annotations

import torch
from sglang_ddtree_kernel.tree_types import DraftTree


def tree_links(tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor]:
    """next_token int64 [bs, N] (first child) and next_sibling int64 [bs, N], -1 where there is none."""
    parents = tree.parents.long()
    num_rows = parents.shape[1]
    rows = torch.arange(num_rows, device=parents.device)
    is_child = parents[:, None, :] == rows[:, None]  # [bs, parent, child]
    first = is_child.long().argmax(-1)
    next_token = torch.where(is_child.any(-1), first, -1)
    is_later = (
        (parents[:, :, None] == parents[:, None, :]) & (rows[:, None] < rows) & (parents[:, :, None] >= 0)
    )
    next_sibling = torch.where(is_later.any(-1), is_later.long().argmax(-1), -1)
    return next_token, next_sibling
