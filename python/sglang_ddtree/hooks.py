"""Every contact with SGLang's internals, in one table, checked by signature.

SGLang swallows errors of plugins and hooks, so a changed internal would otherwise show up as a silent fallback or a
wrong token. `check()` compares each row with the installed package; the `doctor` command prints its findings and the
worker refuses to start on any.

Three kinds of row: `patch` (replaced or wrapped through SGLang's HookRegistry), `call` (used by the worker as it
stands) and `attr` (a module or class attribute that is read or set). Rows that only matter on a machine without a
GPU stand in `sglang_ddtree.cpu.contacts`.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from typing import Literal

import torch

S = "sglang.srt."
K = "sglang.kernels.ops."
SGLANG_VERSION = "0.5.17"


@dataclass(frozen=True)
class Contact:
    """One place where this package meets SGLang.

    target: dotted path inside SGLang. parameters: the names of its parameters, in order, as pinned (None: a plain
    attribute, only its existence is checked). hook: dotted path of our function for `patch` rows. why: one line.
    """

    target: str
    parameters: str | None
    why: str
    kind: Literal["replace", "around", "before", "after", "call", "attr"] = "call"
    hook: str | None = None


CONTACTS: tuple[Contact, ...] = (
    # --- flags and algorithm
    Contact(
        S + "server_args.ServerArgs",
        None,
        "two more fields, validation before weights load",
        "replace",
        "sglang_ddtree.server_args.DDTreeServerArgs",
    ),
    Contact(
        S + "server_args.ServerArgs._handle_mamba_radix_cache",
        "self model_arch",
        "overridden: extra_buffer for text-only Qwen3.5",
    ),
    Contact(S + "server_args.ServerArgs._handle_cpu_backends", "self", "overridden: torch_native on CPU"),
    Contact(
        S + "server_args.ServerArgs._validate_mamba_extra_buffer",
        "self view model_arch",
        "overridden: CPU",
    ),
    Contact(
        S + "configs.hybrid_arch.hybrid_gdn_config",
        "model_config",
        "tells GDN targets from others",
    ),
    Contact(
        S + "entrypoints.engine.Engine.server_args_class",
        None,
        "Engine(...) builds its arguments from this class",
        "attr",
    ),
    Contact(
        S + "speculative.spec_info.SpeculativeAlgorithm.register",
        "cls name supports_overlap validate_server_args spec_class",
        "registers DDTREE",
    ),
    Contact(
        S + "arg_groups.speculative_hook._handle_dflash",
        "server_args",
        "stock defaults of the DFLASH family",
    ),
    Contact(
        S + "managers.overlap_utils.FutureMap.__init__",
        "self device spec_algo req_to_token_pool needs_cpu_seq_lens needs_confidence_relay",
        "the scheduler asks the algorithm for its relay buffer",
    ),
    Contact(
        S + "speculative.dflash_utils.validate_dflash_request",
        "req enable_overlap",
        "DDTREE returns log-probs, which stock DFLASH refuses",
        "around",
        "sglang_ddtree.algorithm.validate_request",
    ),
    # --- worker
    Contact(
        S + "speculative.dflash_worker_v2.DFlashWorkerV2.__init__",
        "self server_args gpu_id ps nccl_port target_worker",
        "base class of the worker",
    ),
    Contact(
        S + "speculative.dflash_worker_v2.DFlashWorkerV2.forward_batch_generation",
        "self batch on_publish grammar_barrier",
        "prefill and idle batches are left to it",
    ),
    Contact(
        S + "speculative.dflash_worker_v2.DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
        "self target_hidden cache_loc positions cache_loc_2d commit_lens",
        "accepted features become draft KV",
    ),
    Contact(
        S + "speculative.draft_worker_common.make_draft_input_v2",
        "bonus_tokens new_seq_lens",
        "state carried to the next step",
    ),
    Contact(
        S + "speculative.dflash_info.DFlashVerifyInput.prepare_for_verify",
        "self batch target_worker",
        "packs the verify forward; overridden to skip stock attention metadata",
    ),
    Contact(
        S + "speculative.spec_utils.prepare_mamba_track_for_verify",
        "batch",
        "rebuilds the prefix-cache snapshot slots; stock DFLASH never calls it",
    ),
    Contact(
        S + "speculative.spec_utils.build_grammar_vocab_mask",
        "reqs tree sampling_info device barrier",
        "constrained decoding over the tree",
    ),
    Contact(
        S + "speculative.spec_utils.GrammarTree.from_device",
        "cls retrieve_next_token retrieve_next_sibling draft_token",
        "constrained decoding over the tree",
    ),
    Contact(
        S + "layers.sampler.apply_custom_logit_processor",
        "logits sampling_batch_info num_tokens_in_batch",
        "custom logit processors, per row",
    ),
    Contact(
        S + "layers.sampler.Sampler._sync_token_ids_across_tp",
        "self batch_next_token_ids sampling_info",
        "tensor-parallel ranks agree on the samples",
    ),
    Contact(
        S + "layers.logprob_processor.compute_spec_v2_logprobs",
        "batch logits_output predict accept_index speculative_num_steps",
        "log-probs of the emitted tokens",
    ),
    Contact(
        S + "speculative.dflash_utils.parse_dflash_draft_config",
        "draft_hf_config",
        "block size and mask token of the drafter",
    ),
    Contact(
        S + "mem_cache.memory_pool.HybridReqToTokenPool.get_mamba_indices",
        "self req_indices",
        "state slots of the requests",
    ),
    Contact(
        S + "mem_cache.memory_pool.HybridReqToTokenPool.translate_mamba_indices",
        "self mamba_indices",
        "state slots of the requests",
    ),
    Contact(
        S + "layers.sampler.Sampler._sample_from_probs",
        "self probs sampling_info positions simple_sampling_case",
        "draws every row from the target's adjusted distribution",
    ),
    Contact(
        S + "model_executor.forward_batch_info.ForwardBatch.init_new",
        "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm",
        "packs the verify forward",
    ),
    # --- verify inside the target's layers
    Contact(
        S + "layers.radix_attention.RadixAttention.forward",
        "self q k v forward_batch save_kv_cache key_value_num_tokens kwargs",
        "full attention of a tree, on any backend",
        "around",
        "sglang_ddtree.verify.attention.radix_attention_forward",
    ),
    Contact(
        S + "layers.radix_linear_attention.RadixLinearAttention.forward",
        "self forward_batch mixed_qkv a b",
        "GDN layers of a tree; the pre-conv rows go to the stash",
        "around",
        "sglang_ddtree.verify.gdn.radix_linear_attention_forward",
    ),
    Contact(
        S + "mem_cache.memory_pool.MambaPool.__init__",
        "self size spec_state_size cache_params mamba_layer_ids device enable_memory_saver "
        "speculative_num_draft_tokens speculative_eagle_topk enable_linear_replayssm linear_replayssm_cache_len "
        "envelope_layout enable_linear_replayssm_spec",
        "no state snapshots per row: the stash replaces them",
        "around",
        "sglang_ddtree.verify.stash.mamba_pool_init",
    ),
    Contact(
        S + "mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        "self total_rest_memory",
        "memory of the stash instead of the snapshots",
        "around",
        "sglang_ddtree.verify.stash.handle_max_mamba_cache",
    ),
    Contact(
        S + "mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        "server_args",
        "rows as wide as the reservation of a step, so that a full context cannot spill over",
        "around",
        "sglang_ddtree.verify.stash.req_to_token_extra_context_len",
    ),
    Contact(
        S + "layers.logits_processor.LogitsProcessor._copy_logits_to_buffer",
        "self logits logits_metadata use_buffer",
        "logits of a tree stay in the head's dtype where only their argmax is wanted",
        "around",
        "sglang_ddtree.verify.sample.copy_logits_to_buffer",
    ),
    Contact(
        S + "models.qwen3_5.Qwen3_5GatedDeltaNet.forward",
        "self hidden_states forward_batch",
        "GDN layers of a tree without copies of q|k|v, z, b and a",
        "around",
        "sglang_ddtree.verify.gdn.gated_delta_net_forward",
    ),
    Contact(
        S + "models.qwen3_5.Qwen3_5GatedDeltaNet._forward_input_proj",
        "self hidden_states",
        "projections of the same layers",
    ),
    # --- captured graphs
    Contact(
        S + "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.__init__",
        "self model_runner attn_backend speculative_num_steps speculative_num_draft_tokens",
        "captures without metadata of a stock backend",
        "around",
        "sglang_ddtree.graphs.graph_runner_init",
    ),
    Contact(
        S + "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape",
        "self size forward stream_idx variant_label",
        "captures with the library that is faster for few rows",
        "around",
        "sglang_ddtree.graphs.capture_one_shape",
    ),
    Contact(
        S + "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        "self num_tokens",
        "the captured forward follows a tree",
        "around",
        "sglang_ddtree.graphs.graph_spec_info",
    ),
    Contact(
        S + "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
        "self forward_batch",
        "whether a captured graph serves the verify forward",
    ),
    Contact(
        S + "speculative.dflash_worker_v2.DFlashWorkerV2._maybe_build_draft_sampler",
        "self",
        "head, candidates and tree run inside the draft graph",
    ),
    Contact(
        S + "mem_cache.allocation.alloc_for_spec_decode",
        "tree_cache req_to_token_pool reqs req_pool_indices cur_kv_lens cur_kv_lens_cpu nxt_kv_lens nxt_kv_lens_cpu "
        "num_needed_tokens batch",
        "a step reserves the tree's slots, not twice its rows",
        "around",
        "sglang_ddtree.verify.stash.alloc_for_spec_decode",
    ),
    Contact(
        S + "models.qwen3_5_text.Qwen3_5ForCausalLM.__init__",
        "self config quant_config prefix",
        "text-only Qwen3.5 lacks set_dflash_layers_to_capture; it is added to the class",
    ),
)


def on_cpu() -> bool:
    """True where SGLang runs without an accelerator, so that the rows of `sglang_ddtree.cpu` apply."""
    return not torch.cuda.is_available()


def contacts() -> tuple[Contact, ...]:
    """The rows that apply on this machine."""
    from sglang_ddtree.operate.contacts import OPERATE_CONTACTS

    if not on_cpu():
        return CONTACTS + OPERATE_CONTACTS
    from sglang_ddtree.cpu.contacts import CPU_CONTACTS

    return CONTACTS + OPERATE_CONTACTS + CPU_CONTACTS


def install() -> None:
    """Registers every `patch` row with SGLang's HookRegistry (which applies them after all plugins have loaded)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for c in contacts():
        if c.hook is not None:
            HookRegistry.register(c.target, pkgutil.resolve_name(c.hook), HookType(c.kind))


def _original(target: str):
    """The object at a dotted path, below the wrappers that HookRegistry put around it."""
    owner, _, name = target.rpartition(".")
    obj = pkgutil.resolve_name(owner)
    found = inspect.getattr_static(obj, name) if isinstance(obj, type) else getattr(obj, name)
    found = getattr(found, "__func__", found)
    return inspect.unwrap(found) if callable(found) else found


def check(*, applied: bool = False) -> list[str]:
    """One line for each row that the installed SGLang does not honour; an empty list means all is well.

    applied: also require that each patch is in force in this process (for workers, after plugins have loaded).
    """
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry

    problems = []
    if sglang.__version__ != SGLANG_VERSION:
        problems.append(f"sglang: version {sglang.__version__} is installed, {SGLANG_VERSION} is required")
    for c in contacts():
        try:
            found = _original(c.target)
        except Exception as e:
            problems.append(f"{c.target}: not found ({type(e).__name__}: {e}); needed: {c.why}")
            continue
        if c.parameters is not None:
            have = " ".join(inspect.signature(found).parameters)
            if have != c.parameters:
                problems.append(f"{c.target}: takes ({have}), pinned as ({c.parameters}); needed: {c.why}")
        if applied and c.hook is not None and c.target not in HookRegistry._patched:
            problems.append(f"{c.target}: hook {c.hook} is not in force; needed: {c.why}")
    return problems
