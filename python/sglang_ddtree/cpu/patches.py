"""Where SGLang 0.5.17 assumes a GPU on the path that DDTREE takes on CPU. Each function is a row of `contacts.py`."""

from __future__ import annotations

import torch


def install_constants() -> None:
    """Module constants that are computed at import and have no function to hook."""
    import sglang.kernels.ops.attention.fla.layernorm_gated as layernorm_gated
    import sglang.srt.layers.attention.attention_registry as registry
    import sglang.srt.speculative.draft_worker_common as draft_worker_common

    from sglang_ddtree.cpu.attention import create_backend

    # True only with AMX there, although the operator behind it is ours; the other branch is a Triton kernel.
    layernorm_gated._use_cpu = True
    # The drafter's backend; the one below serves its block forward.
    draft_worker_common._SUPPORTED_DRAFT_BACKENDS += ("torch_native",)
    registry.ATTENTION_BACKENDS["torch_native"] = create_backend
    # The scheduler pins small tensors and records streams without asking whether there is a device.
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None


def handle_dflash(original, server_args):
    """The stock defaults refuse every device but CUDA and NPU, and have no torch_native for the drafter."""
    device, server_args.device = server_args.device, "npu"
    try:
        original(server_args)
    finally:
        server_args.device = device
    server_args.speculative_draft_attention_backend = "torch_native"


def use_fork(_result, server_args):
    """Forked children skip two re-imports of SGLang. Safe without CUDA: the parent has run no parallel torch code."""
    import torch.multiprocessing as mp

    mp.set_start_method("fork", force=True)


def keep_embedding_dtype(kwargs, runner, forward_batch, *_):
    """The runner casts input embeddings to bf16, which an fp32 drafter must not see."""
    if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        kwargs["input_embeds"] = forward_batch.input_embeds
    return kwargs


def init_kv_copy(pool):
    """KV rows are moved by indexing; the stock set-up warms up a copy kernel that has no CPU form in this wheel."""
    pool.use_native_move_kv_cache, pool._kv_copy_config = True, None


def set_mamba_track_indices(batch, track_positions=None):
    """Snapshot slot of each request from its ping-pong pair; the stock function pins memory."""
    pairs = batch.req_to_token_pool.req_index_to_mamba_ping_pong_track_buffer_mapping[batch.req_pool_indices]
    if track_positions is None:
        track_positions = [req.mamba_next_track_idx or 0 for req in batch.reqs]
    batch.mamba_track_indices = pairs.gather(1, torch.tensor(track_positions).unsqueeze(1)).squeeze(1).long()


def track_states(conv_states, ssm_states, cache_indices, mask, track_indices, batch_size, check_freed_slots=False):
    """One layer's decode snapshot: pool[dst] = pool[src] for the requests in mask. The stock one is a Triton kernel."""
    keep = mask[:batch_size].bool()
    src, dst = cache_indices[:batch_size][keep].long(), track_indices[:batch_size][keep].long()
    for pool in (conv_states, ssm_states):
        pool[dst] = pool[src]


def track_states_all_layers(conv_states, ssm_states, cache_indices, mask, track_indices, batch_size, check_freed_slots=False):
    """The same for pools with a leading layer dimension."""
    track_states(
        conv_states.transpose(0, 1), ssm_states.transpose(0, 1), cache_indices, mask, track_indices, batch_size
    )


def pynccl_init(original, self, group, device, *args, **kwargs):
    """The CUDA wheel of torch carries libnccl, so pynccl believes itself usable on CPU tensors."""
    if str(device).startswith("cpu"):
        self.available, self.disabled = False, True
        return
    original(self, group, device, *args, **kwargs)


def all_gather_into_tensor(original, group, output, input):
    """The registered operator exists for the CUDA key only; gloo serves the plain call."""
    if output.device.type == "cpu":
        group._all_gather_into_tensor(output, input)
    else:
        original(group, output, input)
