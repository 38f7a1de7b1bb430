"""The rows of the hook table that apply on CPU only."""

from __future__ import annotations

from sglang_ddtree.hooks import Contact, K, S

P = "sglang_ddtree.cpu.patches."

CPU_CONTACTS: tuple[Contact, ...] = (
    Contact(
        S + "arg_groups.speculative_hook._handle_dflash",
        "server_args",
        "refuses CPU",
        "around",
        P + "handle_dflash",
    ),
    Contact(
        S + "entrypoints.engine._set_envs_and_config",
        "server_args",
        "children are spawned and import SGLang again",
        "after",
        P + "use_fork",
    ),
    Contact(
        S + "model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        "self forward_batch pp_proxy_tensors",
        "casts embeddings to bf16",
        "after",
        P + "keep_embedding_dtype",
    ),
    Contact(
        S + "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        "self",
        "warms up a copy kernel without a CPU form",
        "replace",
        P + "init_kv_copy",
    ),
    Contact(
        S + "constrained.xgrammar_backend._allocate_token_bitmask",
        "vocab_size batch_size",
        "pins memory, which needs a driver",
        "replace",
        P + "allocate_token_bitmask",
    ),
    Contact(
        S + "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        "self logits vocab_mask",
        "knows accelerators only",
        "replace",
        P + "apply_token_bitmask",
    ),
    Contact(
        K + "sampling.murmur_hash.murmur_hash32",
        "seed positions col_indices",
        "Triton kernel; noise of seeded sampling",
        "replace",
        P + "murmur_hash32",
    ),
    Contact(
        S + "batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
        "enable_bmm",
        "needs an accelerator",
        "replace",
        P + "enable_batch_invariant_mode",
    ),
    Contact(
        S + "managers.schedule_batch.set_mamba_track_indices_from_reqs",
        "batch track_positions",
        "pins memory, which needs a driver",
        "replace",
        P + "set_mamba_track_indices",
    ),
    Contact(
        K + "mamba.mamba_state_scatter_triton.track_mamba_states_if_needed",
        "conv_states ssm_states cache_indices mamba_track_mask mamba_track_indices batch_size check_freed_slots",
        "Triton kernel",
        "replace",
        P + "track_states",
    ),
    Contact(
        K + "mamba.mamba_state_scatter_triton.track_mamba_states_all_layers",
        "conv_states_pool ssm_states_pool cache_indices mamba_track_mask mamba_track_indices batch_size "
        "check_freed_slots",
        "Triton kernel",
        "replace",
        P + "track_states_all_layers",
    ),
    Contact(
        S + "utils.numa_utils.init_threads_binding",
        "tp_rank tp_size",
        "wants a NUMA node for each tensor-parallel rank",
        "replace",
        P + "init_threads_binding",
    ),
    Contact(
        S + "distributed.device_communicators.pynccl.PyNcclCommunicator.__init__",
        "self group device library_path is_symmetric_memory_enabled",
        "believes itself usable on CPU",
        "around",
        P + "pynccl_init",
    ),
    Contact(
        S + "distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
        "self output input",
        "its operator is registered for CUDA only",
        "around",
        P + "all_gather_into_tensor",
    ),
    Contact(K + "attention.fla.layernorm_gated._use_cpu", None, "True only with AMX", "attr"),
    Contact(
        S + "speculative.draft_worker_common._SUPPORTED_DRAFT_BACKENDS",
        None,
        "lacks torch_native",
        "attr",
    ),
    Contact("sgl_kernel.mamba.chunk_gated_delta_rule_cpu", None, "returns no chunk states", "attr"),
)
