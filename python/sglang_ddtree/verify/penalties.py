"""Frequency, presence and repetition penalties and min_new_tokens, exact on every row of the tree.

SGLang keeps what a request has already said on the host and, in speculative decoding, never updates it. Here it is
counted on the device, per request slot, and each row adds the tokens of its own branch; so a penalised text is the
one that decoding token by token gives. Nothing is allocated until a request with a penalty arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang_ddtree_kernel.tree_types import unpack_ancestors

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang_ddtree_kernel.reference.accept_tree import Accepted
    from sglang_ddtree_kernel.tree_types import DraftTree


def is_penalised(req: Req) -> bool:
    p = req.sampling_params
    return (
        p.frequency_penalty != 0.0
        or p.presence_penalty != 0.0
        or p.repetition_penalty != 1.0
        or p.min_new_tokens > 0
    )


def stop_tokens(req: Req) -> list[int]:
    tokenizer, ids = req.tokenizer, set(req.sampling_params.stop_token_ids or ())
    if tokenizer is not None:
        ids |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
        ids |= {tokenizer.eos_token_id} - {None}
    return sorted(ids)


class OutputPenalties:
    """counts int32 [slots, V]: how often each request slot has said each token. Strengths are fp32 [slots]."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str):
        self.counts = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self.stops = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)
        self.said = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.min_new = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.frequency = torch.zeros(num_slots, device=device)
        self.presence = torch.zeros(num_slots, device=device)
        self.repetition = torch.ones(num_slots, device=device)

    def begin(self, batch: ScheduleBatch, first_tokens: torch.Tensor) -> None:
        """Starts the requests of a prefill batch over: what they have said so far, and first_tokens int64 [bs]."""
        for i, req in enumerate(batch.reqs):
            slot, p = req.req_pool_idx, req.sampling_params
            self.frequency[slot], self.presence[slot] = p.frequency_penalty, p.presence_penalty
            self.repetition[slot], self.min_new[slot] = p.repetition_penalty, p.min_new_tokens
            if not is_penalised(req):
                continue
            said = first_tokens[i : i + 1].long()
            if req.output_ids:  # retracted earlier: its output is prefilled again
                said = torch.cat([torch.tensor(req.output_ids, device=said.device), said])
            self.counts[slot] = 0
            self.counts[slot].index_add_(0, said, torch.ones_like(said, dtype=torch.int32))
            self.said[slot] = len(said)
            self.stops[slot] = False
            self.stops[slot, stop_tokens(req)] = True

    def apply(self, logits: torch.Tensor, tree: DraftTree, slots: torch.Tensor) -> None:
        """Penalises logits [bs * N, V] in place. slots int64 [bs], request slots.

        The root is counted already (it is the last token said); a row adds its ancestors below the root and itself.
        """
        bs, num_rows = tree.tokens.shape
        rows = logits.view(bs, num_rows, -1)
        branch = unpack_ancestors(tree.ancestors, num_rows)[..., 1:].int()
        counts = self.counts[slots].unsqueeze(1).repeat(1, num_rows, 1)
        counts.scatter_add_(2, tree.tokens[:, None, 1:].expand_as(branch), branch)
        strength = lambda x: x[slots].view(bs, 1, 1)  # noqa: E731
        rows.sub_(strength(self.frequency) * counts + strength(self.presence) * (counts > 0))
        too_short = (self.said[slots].unsqueeze(1) + tree.depths) < self.min_new[slots].unsqueeze(1)
        rows.masked_fill_(too_short.unsqueeze(2) & self.stops[slots].unsqueeze(1), float("-inf"))
        scale = torch.where(counts > 0, strength(self.repetition), 1.0)
        rows.copy_(torch.where(rows < 0, rows * scale, rows / scale))

    def advance(self, accepted: Accepted, slots: torch.Tensor) -> None:
        """Counts the tokens of a step. Columns past a request's path add zero."""
        width = accepted.tokens.shape[1]
        said = torch.arange(width, device=slots.device) < accepted.lens.unsqueeze(1)
        rows = slots.unsqueeze(1).expand_as(accepted.tokens)
        self.counts.index_put_((rows, accepted.tokens), said.int(), accumulate=True)
        self.said.index_add_(0, slots, accepted.lens.to(torch.int32))
