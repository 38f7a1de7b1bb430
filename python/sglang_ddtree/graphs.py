"""Captured graphs: the draft graph writes its trees where the verify graph reads them.

SGLang's own runner captures and replays both forwards, for each batch size; the hooks below give its capture a tree to
follow in place of a chain, and a backend that prepares nothing, since the tree's kernels read lengths, slots and
ancestors as they lie on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang_ddtree_kernel.build_tree import build_tree
from sglang_ddtree_kernel.tree_types import DraftTree, ancestor_words

from sglang_ddtree.draft.block import DDTreeBlockInput
from sglang_ddtree.verify.input import DDTreeVerifyInput

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_ddtree.draft.head import DraftHead
    from sglang_ddtree.draft.markov import MarkovFactors
    from sglang_ddtree.verify.stash import GdnStash

FEW_ROWS = 256


class TreeAttnBackend(AttentionBackend):
    """Stands for a stock backend in forwards whose attention layers are all served by our kernels.

    Pools and whatever else a model asks its backend for are the stock backend's.
    """

    needs_cpu_seq_lens = False
    # The kernels read req_to_token while the graph runs, so it may be written again only behind the replay.
    use_captured_forward_metadata_for_breakable_cuda_graph = True

    def __init__(self, stock: AttentionBackend, stash: GdnStash | None = None):
        self.stock, self.stash = stock, stash

    def __getattr__(self, name: str):
        if name == "stock":
            raise AttributeError(name)
        return getattr(self.stock, name)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate: no indices of max_num_tokens x context, no masks."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if self.stash is not None:
            self.stash.begin(forward_batch.req_pool_indices)


class StaticTrees:
    """One tree per request, at addresses that both graphs know."""

    def __init__(
        self,
        max_bs: int,
        num_rows: int,
        horizon: int,
        block_input: DDTreeBlockInput,
        stash: GdnStash | None,
        *,
        leaky: bool,
    ):
        device = block_input.whole.device
        parents = torch.full((max_bs, num_rows), -1, dtype=torch.int32, device=device)
        self.tree = DraftTree(
            tokens=torch.zeros(max_bs, num_rows, dtype=torch.int64, device=device),
            parents=parents,
            depths=torch.zeros_like(parents),
            ancestors=ancestor_words(parents, horizon),
            valid_counts=torch.ones(max_bs, dtype=torch.int32, device=device),
        )
        self.block_input, self.stash, self.leaky = block_input, stash, leaky

    def of(self, bs: int) -> DraftTree:
        """The trees of the first bs requests."""
        return DraftTree(**{name: x[:bs] for name, x in vars(self.tree).items()})

    def store(self, tree: DraftTree) -> None:
        mine = self.of(tree.tokens.shape[0])
        torch._foreach_copy_(list(vars(mine).values()), list(vars(tree).values()))

    def verify_input(self, bs: int) -> DDTreeVerifyInput:
        no_lens = torch.zeros(bs, dtype=torch.int64, device=self.tree.depths.device)
        return DDTreeVerifyInput.create(self.of(bs), no_lens, self.stash, leaky=self.leaky)


class TreeSampler:
    """The tail of the draft graph: head, candidates and tree, where stock DFLASH has its argmax."""

    def __init__(
        self,
        head: DraftHead,
        block_size: int,
        budget: int,
        trees: StaticTrees,
        markov: MarkovFactors | None = None,
    ):
        self.head, self.block_size, self.budget = head, block_size, budget
        self.trees, self.markov = trees, markov

    def grow(self, hidden: torch.Tensor, root_tokens: torch.Tensor) -> DraftTree:
        """hidden [bs * block, hidden_size] of the drafter and root_tokens int64 [bs] -> the best tree."""
        bs, horizon = len(root_tokens), self.block_size - 1
        hidden = hidden.view(bs, self.block_size, -1)[:, 1:]
        logprobs, ids = self.head(hidden.flatten(0, 1))
        logprobs, ids = logprobs.view(bs, horizon, -1), ids.view(bs, horizon, -1)
        if self.markov is not None:
            logprobs = self.markov(logprobs, ids)
        return build_tree(logprobs, ids, root_tokens, self.budget)

    def __call__(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> None:
        self.trees.store(self.grow(hidden, input_ids.view(-1, self.block_size)[:, 0]))


def graph_runner_init(original, runner, model_runner, *, attn_backend=None, **kwargs):
    """Hook around DecodeCudaGraphRunner.__init__: target and drafter of DDTREE capture without a stock backend."""
    trees = getattr(model_runner, "ddtree_trees", None)
    if trees is not None and attn_backend is None:
        stash = None if model_runner.is_draft_worker else trees.stash
        attn_backend = TreeAttnBackend(model_runner.attn_backend, stash)
    return original(runner, model_runner, attn_backend=attn_backend, **kwargs)


def capture_one_shape(original, runner, size: int, *args, **kwargs):
    """Hook around DecodeCudaGraphRunner.capture_one_shape: the faster library for products of few rows.

    On an H200, a product with a [5120, 17408] matrix takes 45 us by cuBLASLt and 52 by cuBLAS at 64 rows, and 134 and
    126 at 512; a step has one in every layer.
    """
    if getattr(runner.model_runner, "ddtree_trees", None) is None:
        return original(runner, size, *args, **kwargs)
    before = torch.backends.cuda.preferred_blas_library()
    few = size * runner.captured_req_width <= FEW_ROWS
    torch.backends.cuda.preferred_blas_library("cublaslt" if few else "cublas")
    try:
        return original(runner, size, *args, **kwargs)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def graph_spec_info(original, runner, num_tokens: int):
    """Hook around DecodeCudaGraphRunner.get_spec_info: what the captured forward follows."""
    trees = getattr(runner.model_runner, "ddtree_trees", None)
    if trees is None:
        return original(runner, num_tokens)
    if runner.model_runner.is_draft_worker:
        return trees.block_input
    return trees.verify_input(num_tokens // runner.captured_req_width)
