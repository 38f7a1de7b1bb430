"""The verify forward's input: a draft tree per request, and where its rows live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang_ddtree_kernel.reference.gdn_tree_verify import TreePlan
from sglang_ddtree_kernel.tree_types import DraftTree, chain_ancestors

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker

    from sglang_ddtree.verify.stash import GdnStash


@dataclass(kw_only=True)
class DDTreeVerifyInput(DFlashVerifyInput):
    """One TARGET_VERIFY forward of N rows per request.

    The hooks on the attention and GDN layers recognise this type: every layer of the target then follows the tree,
    whatever attention backend serves prefill.
    """

    tree: DraftTree
    stash: GdnStash | None  # None for a target without GDN layers
    gdn_parents: torch.Tensor  # the tree that the GDN layers follow: int32 [bs, N]
    gdn_ancestors: torch.Tensor  # and its bit words, int64 [bs, N, W]; the draft tree's own unless leaky
    plan: TreePlan | None  # on CPU: gdn_ancestors unpacked once for all GDN layers of the step

    @classmethod
    def create(
        cls, tree: DraftTree, seq_lens: torch.Tensor, stash: GdnStash | None, *, leaky: bool = False
    ) -> DDTreeVerifyInput:
        """Rows at positions seq_lens + depth. seq_lens: int [bs], committed tokens.

        leaky: GDN layers run the rows as one chain, as if siblings were successors (benchmarks only).
        """
        bs, num_rows = tree.tokens.shape
        parents, ancestors = tree.parents, tree.ancestors
        if leaky:
            parents = torch.arange(-1, num_rows - 1, dtype=torch.int32, device=parents.device).expand(bs, -1)
            ancestors = chain_ancestors(bs, num_rows, parents.device)
        return cls(
            draft_token=tree.tokens.reshape(-1),
            positions=(seq_lens[:, None] + tree.depths).reshape(-1),
            draft_token_num=num_rows,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            tree=tree,
            stash=stash,
            gdn_parents=parents,
            gdn_ancestors=ancestors,
            plan=TreePlan.from_ancestors(ancestors) if stash is not None and not ancestors.is_cuda else None,
        )

    @property
    def depths(self) -> torch.Tensor:
        return self.tree.depths

    def visible(self, layer, bs: int) -> torch.Tensor:
        """Bit words int64 [bs, N, W]: rows see their ancestors and themselves."""
        return self.tree.ancestors

    def prepare_for_verify(
        self, batch: ScheduleBatch, target_worker: TpModelWorker
    ) -> tuple[ForwardBatch, bool]:
        """Packs the forward; True with it if a captured graph serves it.

        No attention metadata of the stock backends: their verify kernels are not used.
        """
        batch.input_ids = self.draft_token
        batch.spec_info = self
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        runner = target_worker.model_runner
        forward_batch = ForwardBatch.init_new(
            batch,
            runner,
            capture_hidden_mode=self.capture_hidden_mode,
            return_hidden_states_before_norm=False,
        )
        graphs = runner.decode_cuda_graph_runner
        return forward_batch, bool(graphs and graphs.can_run_graph(forward_batch))
