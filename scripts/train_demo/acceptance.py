"""Acceptance as a server would see it: draft, build the tree, walk the target's known text, go on from there."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from sglang_ddtree_kernel.reference.accept_tree import accept_tree_walk
from sglang_ddtree_kernel.reference.build_tree import build_tree_levels

BUDGETS = (15, 31, 63, 64, 127, 255)
CAPS = (4, 8, 16)


@dataclass(frozen=True)
class TreeSetting:
    """A chain is a tree of one candidate per depth."""

    budget: int
    cap: int
    spine: bool = False


CHAIN = TreeSetting(15, 1)
MAIN = [CHAIN, *(TreeSetting(b, 8) for b in BUDGETS)]
GRID = [CHAIN, *(TreeSetting(b, c, s) for s in (False, True) for c in CAPS for b in BUDGETS)]


@dataclass
class Drafts:
    """The drafter's best candidates at every place of known continuations.

    Place a is the step whose bonus token is continuation token a: it drafts the tokens a + 1 and on.
    """

    logprobs: torch.Tensor  # fp32 [n, places, horizon, candidates]
    ids: torch.Tensor  # int64, the same shape
    tokens: torch.Tensor  # int64 [n, >= places + horizon], the continuations


def stepping(drafts: Drafts, setting: TreeSetting) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens committed and steps taken, int64 [n] each, until every continuation has passed its last place."""
    n, places, horizon, _ = drafts.ids.shape
    rows = torch.arange(n, device=drafts.ids.device)
    at = torch.zeros_like(rows)
    committed, steps = torch.zeros_like(rows), torch.zeros_like(rows)
    while bool((active := at < places).any()):
        here = at.clamp(max=places - 1)
        tree = build_tree_levels(
            drafts.logprobs[rows, here, :, : setting.cap],
            drafts.ids[rows, here, :, : setting.cap],
            drafts.tokens[rows, here],
            setting.budget,
            spine=setting.spine,
        )
        # The target's token after a row of the true path; off it the walk never arrives.
        after = (here.unsqueeze(1) + tree.depths + 1).clamp(max=drafts.tokens.shape[1] - 1)
        lens = accept_tree_walk(tree, drafts.tokens.gather(1, after), None, horizon).lens.long()
        lens = torch.where(active, lens, 0)
        committed += lens
        steps += active
        at = at + lens
    return committed, steps


def taus(drafts: Drafts, settings: list[TreeSetting], groups: dict[str, torch.Tensor]) -> list[dict]:
    """Per setting and group of rows (bool [n]): tau, its standard error over prompts, and the served tau.

    tau counts every committed token. A server cuts a text at its length, so that the last step of each request
    commits less: `served` is its (tokens - 1) / steps, for `places` = tokens - 1.
    """
    out, places = [], drafts.ids.shape[1]
    for setting in settings:
        committed, steps = stepping(drafts, setting)
        for group, members in groups.items():
            c, s = committed[members].double(), steps[members].double()
            ratio = c / s
            out.append(
                {
                    **asdict(setting),
                    "group": group,
                    "tau": (c.sum() / s.sum()).item(),
                    "error": (ratio.std(correction=0) / len(ratio) ** 0.5).item(),
                    "served": (places * len(s) / s.sum()).item(),
                }
            )
    return out


def hits_by_depth(drafts: Drafts, candidates: int) -> list[float]:
    """Share of places at which the true token at each depth is among the best `candidates`."""
    _, places, horizon, _ = drafts.ids.shape
    windows = drafts.tokens.unfold(1, horizon, 1)[:, 1 : places + 1]
    hit = (drafts.ids[..., :candidates] == windows.unsqueeze(-1)).any(-1)
    return hit.double().mean(dim=(0, 1)).tolist()
