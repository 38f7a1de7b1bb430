"""The DDTREE worker: draft a block, grow a tree, verify it in one forward, commit the accepted path.

One worker for CPU and GPU. A step runs on the device from front to back: no host read of a device value and no Python
loop over requests or nodes (on CPU the lengths are on the host anyway, and padding is cut where that saves work).
"""

from __future__ import annotations

import logging
import os
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    prepare_mamba_track_for_verify,
)
from sglang_ddtree_kernel.accept_tree import accept_tree
from sglang_ddtree_kernel.compact_kv import KvPools, compact_kv

from sglang_ddtree import hooks
from sglang_ddtree.draft import markov
from sglang_ddtree.draft.block import DDTreeBlockInput, draft_block_batch
from sglang_ddtree.draft.head import DraftHead
from sglang_ddtree.graphs import StaticTrees, TreeAttnBackend, TreeSampler
from sglang_ddtree.metrics import PhaseTimer
from sglang_ddtree.server_args import markov_file
from sglang_ddtree.verify.grammar import tree_links
from sglang_ddtree.verify.input import DDTreeVerifyInput
from sglang_ddtree.verify.penalties import OutputPenalties, is_penalised
from sglang_ddtree.verify.sample import adjust_logits, reads_only_argmax, target_tokens
from sglang_ddtree.verify.stash import GdnStash

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang_ddtree_kernel.reference.accept_tree import Accepted
    from sglang_ddtree_kernel.tree_types import DraftTree

    from sglang_ddtree.server_args import DDTreeServerArgs

LEAKY = "SGLANG_DDTREE_LEAKY"
CHECK_SYNC = "SGLANG_DDTREE_CHECK_SYNC"
logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):
    """Speculative worker of SGLang's spec-v2 contract (overlap scheduling) for the algorithm DDTREE."""

    def __init__(self, server_args: DDTreeServerArgs, gpu_id, ps, nccl_port, target_worker):
        problems = hooks.check(applied=True)
        if problems:
            raise RuntimeError("sglang-ddtree does not fit the installed SGLang:\n  " + "\n  ".join(problems))
        self.budget = server_args.speculative_ddtree_budget
        self.num_rows = self.budget + 1
        self.width = server_args.speculative_num_draft_tokens
        self.leaky = os.environ.get(LEAKY) == "1"
        self.check_sync = os.environ.get(CHECK_SYNC) == "1" and torch.cuda.is_available()
        own = deepcopy(server_args)
        own.override("ddtree.draft", speculative_num_draft_tokens=server_args.speculative_dflash_block_size)
        super().__init__(own, gpu_id, ps, nccl_port, target_worker)
        self.horizon = self.block_size - 1
        self.timer = PhaseTimer(self.device)
        model = self.model_runner.model
        self._refuse_sliding_window(model)
        self.head = DraftHead(model.lm_head, server_args.speculative_ddtree_topk_cap, get_tp_group())
        self.markov = self._load_markov(server_args)
        self.stash: GdnStash | None = None
        self.trees: StaticTrees | None = None
        self.penalties: OutputPenalties | None = None
        self._offsets = torch.arange(self.width, device=self.device)

    @staticmethod
    def _refuse_sliding_window(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, RadixAttention) and module.sliding_window_size > 0:
                raise ValueError(
                    "--model-path: DDTREE does not support a target with sliding-window attention"
                )

    def _load_markov(self, server_args: DDTreeServerArgs) -> markov.MarkovFactors | None:
        """Bigram factors, whole on every rank, so that every rank builds the same tree."""
        path = markov_file(server_args)
        if path is None:
            return None
        vocab_size = self.model_runner.model_config.vocab_size
        return markov.load(path, vocab_size, server_args.speculative_ddtree_markov_weight, self.device)

    def init_attention_backends(self):
        """Buffers of the step, once the pools exist and before SGLang captures its graphs."""
        super().init_attention_backends()
        target, draft = self.model_runner, self.draft_model_runner
        pool = target.token_to_kv_pool
        pool = getattr(pool, "full_kv_pool", pool)
        self.kv_pools = KvPools([*pool.k_buffer, *pool.v_buffer])
        max_bs = target.req_to_token_pool.size
        on_gpu = torch.device(self.device).type == "cuda"
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if getattr(target.req_to_token_pool, "mamba_pool", None) is not None:
            self.stash = GdnStash(target, self.num_rows)
        self.block_input = DDTreeBlockInput.create(max_bs, self.block_size, self.device)
        self.trees = StaticTrees(
            max_bs, self.num_rows, self.horizon, self.block_input, self.stash, leaky=self.leaky
        )
        self.sampler = TreeSampler(self.head, self.block_size, self.budget, self.trees, self.markov)
        if on_gpu:
            draft.attn_backend = TreeAttnBackend(draft.attn_backend)
            draft.ddtree_trees = target.ddtree_trees = self.trees
            if self.stash is not None:
                self.stash.reserve(max_bs)
        if self.ps.tp_rank == 0:
            self._log_memory(max_bs, torch.cuda.memory_allocated() - before if on_gpu else None)

    def _log_memory(self, max_bs: int, taken: int | None) -> None:
        """One line. taken: bytes that the allocator gave out for the step's buffers (None on CPU: they grow)."""
        rows = self.num_rows * max_bs
        if taken is None:
            taken = rows * (self.stash.row_bytes if self.stash is not None else 0)
        logger.info(
            "DDTREE: budget %d (%d rows), top-k cap %d; buffers of %.2f GiB for %d requests, %.3f MiB a row; a running "
            "request holds %d KV slots beyond its text, of %d in all; bigram factors: %s",
            self.budget,
            self.num_rows,
            self.head.cap,
            taken / 2**30,
            max_bs,
            taken / rows / 2**20,
            self.width + self.block_size,
            self.model_runner.max_total_num_tokens,
            "none" if self.markov is None else self.markov,
        )

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """On a GPU no forward of a step wants lengths on the host, so the scheduler need not wait for them."""
        draft = self.draft_model_runner.attn_backend
        return (draft,) if isinstance(draft, TreeAttnBackend) else super().spec_v2_attn_backends

    def _maybe_build_draft_sampler(self):
        return self.sampler

    def forward_batch_generation(self, batch: ScheduleBatch, on_publish=None, grammar_barrier=None):
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        if batch.forward_mode.is_idle() or batch.spec_info is None:
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)
        if not self.check_sync:
            return self._decode(batch, on_publish, grammar_barrier)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._decode(batch, on_publish, grammar_barrier)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _prefill(self, batch: ScheduleBatch, on_publish) -> GenerationBatchResult:
        """Target prefill; the prompt's target features become draft KV at once, before the radix cache may share it."""
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        positions = torch.cat(
            [torch.arange(p, p + n) for p, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        )
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=result.logits_output.hidden_states,
            cache_loc=batch.out_cache_loc,
            positions=positions,
        )
        result.logits_output.hidden_states = None  # the scheduler would copy it to the host
        self._begin_penalties(batch, result.next_token_ids)
        result.next_draft_input = self._make_next_draft_input_prefill(
            bonus_tokens=result.next_token_ids, seq_lens=batch.seq_lens
        )
        return result

    def _decode(self, batch: ScheduleBatch, on_publish, grammar_barrier) -> GenerationBatchResult:
        seq_lens = batch.seq_lens
        seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        # One snapshot of the reserved slots: once told that it was read, the scheduler may rewrite req_to_token.
        req_to_token = self.model_runner.req_to_token_pool.req_to_token
        slots = req_to_token[batch.req_pool_indices[:, None], seq_lens[:, None] + self._offsets].long()

        self.timer.begin_step()
        with self.timer.phase("draft"):
            tree = self._draft(batch, slots[:, : self.block_size])
        verify_input, verify_batch, in_graph = self._prepare_verify(batch, tree, slots[:, : self.num_rows])
        grammar_tree = GrammarTree.from_device(*tree_links(tree), tree.tokens) if batch.has_grammar else None
        if not in_graph:
            verify_batch.mark_forward_metadata_ready()
        with self.timer.phase("verify"):
            out = self.target_worker.forward_batch_generation(
                batch=None, forward_batch=verify_batch, is_verify=True
            ).logits_output

        tokens = self._target_tokens(batch, out, verify_input, grammar_tree, grammar_barrier)
        accepted = accept_tree(tree, tokens, slots[:, : self.num_rows].contiguous(), self.horizon)
        if batch.return_logprob:
            self._logprobs(batch, out, tokens, accepted)
        with self.timer.phase("commit"):
            self._commit_target(batch, accepted)
        if self.penalties is not None:
            self.penalties.advance(accepted, batch.req_pool_indices.long())
        new_seq_lens = seq_lens + accepted.lens
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._commit_draft(out.hidden_states, accepted, seq_lens, slots)
        out.hidden_states = None
        return GenerationBatchResult(
            logits_output=out,
            next_token_ids=accepted.tokens.reshape(-1),
            accept_lens=accepted.lens,
            can_run_cuda_graph=in_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=accepted.tokens.shape[1],
            new_seq_lens=new_seq_lens,
            extra_keep_alive_refs=[verify_batch],
        )

    def _draft(self, batch: ScheduleBatch, slots: torch.Tensor) -> DraftTree:
        """One drafter forward, then the tree of its best paths (inside the forward's graph, where there is one)."""
        draft_input = batch.spec_info
        known = batch.seq_lens_cpu is not None
        seq_lens_cpu = batch.seq_lens_cpu + self.block_size if known else draft_input.reserved_seq_lens_cpu
        forward_batch = draft_block_batch(
            bonus_tokens=draft_input.bonus_tokens,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=seq_lens_cpu.to(torch.int32),
            req_pool_indices=batch.req_pool_indices,
            slots=slots,
            mask_token_id=self._mask_token_id,
            embed=self.model_runner.model.get_input_embeddings(),
            spec_info=self.block_input,
        )
        with torch.inference_mode():
            out = self.draft_model_runner.forward(forward_batch)
            if out.can_run_graph:
                return self.trees.of(len(slots))
            return self.sampler.grow(out.logits_output.hidden_states, draft_input.bonus_tokens)

    def _prepare_verify(self, batch: ScheduleBatch, tree: DraftTree, slots: torch.Tensor):
        """Packs the verify forward; host lengths are restored, since the batch belongs to the scheduler."""
        if self.stash is not None:
            # Stock DFLASH omits this, so that GDN checkpoints of the prefix cache go stale during decode.
            prepare_mamba_track_for_verify(batch)
            self.stash.reserve(len(slots))
            self.stash.begin(batch.req_pool_indices)
        verify_input = DDTreeVerifyInput.create(tree, batch.seq_lens, self.stash, leaky=self.leaky)
        reserved = batch.spec_info
        host_lens = batch.seq_lens_cpu, batch.seq_lens_sum
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + self.num_rows
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        else:
            batch.seq_lens_cpu, batch.seq_lens_sum = (
                reserved.reserved_seq_lens_cpu,
                reserved.reserved_seq_lens_sum,
            )
        batch.out_cache_loc = slots.reshape(-1)
        verify_batch, in_graph = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = host_lens
        if in_graph and tree.tokens.data_ptr() != self.trees.tree.tokens.data_ptr():
            self.trees.store(tree)  # grown outside the draft graph
        return verify_input, verify_batch, in_graph

    def _begin_penalties(self, batch: ScheduleBatch, first_tokens: torch.Tensor) -> None:
        if self.penalties is None:
            if not any(map(is_penalised, batch.reqs)):
                return
            num_slots = self.model_runner.req_to_token_pool.req_to_token.shape[0]
            vocab_size = self.model_runner.model_config.vocab_size
            self.penalties = OutputPenalties(num_slots, vocab_size, self.device)
        self.penalties.begin(batch, first_tokens)

    def _target_tokens(self, batch, out, verify_input, grammar_tree, grammar_barrier) -> torch.Tensor:
        """The target's token after every row, int64 [bs, N]; logits that are more than their argmax become fp32."""
        info = batch.sampling_info
        penalised = self.penalties is not None and any(map(is_penalised, batch.reqs))
        if penalised or not reads_only_argmax(batch):
            out.next_token_logits = out.next_token_logits.float()
        logits = out.next_token_logits
        if penalised:
            self.penalties.apply(logits, verify_input.tree, batch.req_pool_indices.long())
        if grammar_tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=info,
                device=logits.device,
                barrier=grammar_barrier,
            )
            if mask is not None:
                mask.apply(logits)
        adjust_logits(logits, info, self.num_rows)
        return target_tokens(logits, info, verify_input.positions, self.num_rows, self.model_runner.sampler)

    def _logprobs(self, batch, out, tokens: torch.Tensor, accepted: Accepted) -> None:
        """Log-probs of the emitted tokens, read at the rows they follow."""
        first = torch.arange(len(tokens), device=tokens.device)[:, None] * self.num_rows
        rows = accepted.rows.clamp(min=0) + first
        compute_spec_v2_logprobs(batch, out, tokens.reshape(-1), rows, self.horizon)

    def _commit_target(self, batch: ScheduleBatch, accepted: Accepted) -> None:
        """KV of the accepted rows moves to the committed slots; conv and recurrent state fold along the path."""
        compact_kv(self.kv_pools, accepted.dst_slots, accepted.src_slots)
        if self.stash is None:
            return
        track_steps = None
        if batch.mamba_track_indices is not None:
            interval = get_exec().mamba.mamba_track_interval
            before, after = batch.seq_lens, batch.seq_lens + accepted.lens
            boundary = after // interval * interval
            track_steps = torch.where(boundary > before, boundary - before, 0).to(torch.int32)
        self.stash.commit(accepted, batch.mamba_track_indices, track_steps)

    def _commit_draft(
        self, hidden: torch.Tensor, accepted: Accepted, seq_lens: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Target features of the accepted rows become draft KV at the committed positions.

        Columns past a request's path write to slots of uncommitted positions, which the next block overwrites before
        anything reads them; so the shape is fixed and nothing waits for the lengths.
        """
        path = accepted.rows.shape[1]
        if hidden.device.type == "cpu":
            path = int(accepted.lens.max())
        rows = accepted.rows[:, :path].clamp(min=0).long()
        hidden = hidden.view(len(rows), self.num_rows, -1)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1])).flatten(0, 1),
            cache_loc=slots[:, :path].reshape(-1),
            positions=(seq_lens[:, None].long() + self._offsets[:path]).reshape(-1),
        )
