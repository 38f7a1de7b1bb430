"""Where SGLang 0.5.17 assumes a GPU on the path that DDTREE takes on CPU. Each function is a row of `contacts.py`."""

from __future__ import annotations

import ctypes
import os
import sys

import torch
import xgrammar

from sglang_ddtree.server_args import is_ddtree

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # malloc.h
KEEP_BYTES = 1 << 30
WORD = 0xFFFFFFFF


def tune_process() -> None:
    """States decay into denormals, which cost ten times the time of a normal product; and glibc would give every
    large temporary back to the kernel, to fault it in again at the next step."""
    torch.set_flush_denormal(True)
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)


def install_constants() -> None:
    """Module constants that are computed at import and have no function to hook."""
    import sglang.kernels.ops.attention.fla.layernorm_gated as layernorm_gated
    import sglang.srt.server_args as server_args
    import sglang.srt.speculative.draft_worker_common as draft_worker_common

    # True only with AMX there, although the operator behind it is ours; the other branch is a Triton kernel.
    layernorm_gated._use_cpu = True
    # The drafter's backend: its block forward is served by our hook on RadixAttention.
    draft_worker_common._SUPPORTED_DRAFT_BACKENDS += ("torch_native",)
    # Seeds are honoured under --enable-deterministic-inference, which asks for one of these.
    server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")
    # The scheduler pins small tensors and records streams without asking whether there is a device.
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None


def handle_dflash(original, server_args):
    """The stock defaults refuse every device but CUDA and NPU, and have no torch_native for the drafter.

    Stock DFLASH itself is not served on CPU: it keeps its refusal.
    """
    if not is_ddtree(server_args):
        return original(server_args)
    device, server_args.device = server_args.device, "npu"
    server_args.speculative_draft_attention_backend = "triton"
    try:
        original(server_args)
    finally:
        server_args.device = device
    server_args.speculative_draft_attention_backend = "torch_native"


def use_fork(_result, server_args):
    """Forked children skip two re-imports of SGLang (20 s each).

    Safe in the launcher, which has run no parallel torch code (OpenMP threads do not survive a fork). A program that
    embeds `sglang.Engine` may have, so there it is opt-in: SGLANG_DDTREE_FORK=1, together with OMP_NUM_THREADS=1.
    """
    import torch.multiprocessing as mp

    launcher = os.path.basename(sys.argv[0]) in ("sglang", "launch_server.py")
    if launcher or os.environ.get("SGLANG_DDTREE_FORK") == "1":
        mp.set_start_method("fork", force=True)


def keep_embedding_dtype(kwargs, runner, forward_batch, *_):
    """The runner casts input embeddings to bf16, which an fp32 drafter must not see."""
    if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        kwargs["input_embeds"] = forward_batch.input_embeds
    return kwargs


def init_kv_copy(pool):
    """KV rows are moved by indexing; the stock set-up warms up a copy kernel that has no CPU form in this wheel."""
    pool.use_native_move_kv_cache, pool._kv_copy_config = True, None


def allocate_token_bitmask(vocab_size, batch_size):
    """xgrammar's bitmask, all tokens allowed; the stock function pins it."""
    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def apply_token_bitmask(grammar, logits, vocab_mask):
    """The stock method knows accelerators only; xgrammar itself has the CPU form."""
    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def murmur_hash32(seed, positions, col_indices):
    """MurmurHash3 of the 32-bit words (seed low, seed high, position, column), as SGLang's Triton kernel computes it.

    seed [n], positions [n], col_indices [m] -> uint32 [n, m]. Source of the mathematics: MurmurHash3_x86_32.
    """

    def rotl(x, r):
        return ((x << r) | (x >> (32 - r))) & WORD

    def mix(h, k):
        k = rotl(k * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        return (rotl(h ^ k, 13) * 5 + 0xE6546B64) & WORD

    # int64 holds 32 x 32 bit products modulo 2^64, of which the low word is what counts.
    seed, positions, column = (
        x.view(torch.int64) if x.dtype == torch.uint64 else x.long() for x in (seed, positions, col_indices)
    )
    h = mix(mix(mix(torch.zeros_like(seed), seed & WORD), seed >> 32 & WORD), positions & WORD)
    h = mix(h[:, None], column & WORD) ^ 16
    h = (h ^ h >> 16) * 0x85EBCA6B & WORD
    h = (h ^ h >> 13) * 0xC2B2AE35 & WORD
    return (h ^ h >> 16).to(torch.uint32)


def enable_batch_invariant_mode(*args, **kwargs):
    """Swaps CUDA operators for Triton ones; there are none here. Seeds work, batch invariance is not promised."""


def set_mamba_track_indices(batch, track_positions=None):
    """Snapshot slot of each request from its ping-pong pair; the stock function pins memory."""
    pairs = batch.req_to_token_pool.req_index_to_mamba_ping_pong_track_buffer_mapping[batch.req_pool_indices]
    if track_positions is None:
        track_positions = [req.mamba_next_track_idx or 0 for req in batch.reqs]
    batch.mamba_track_indices = pairs.gather(1, torch.tensor(track_positions).unsqueeze(1)).squeeze(1).long()


def track_states(
    conv_states, ssm_states, cache_indices, mask, track_indices, batch_size, check_freed_slots=False
):
    """One layer's decode snapshot: pool[dst] = pool[src] for the requests in mask. The stock one is a Triton kernel."""
    keep = mask[:batch_size].bool()
    src, dst = cache_indices[:batch_size][keep].long(), track_indices[:batch_size][keep].long()
    for pool in (conv_states, ssm_states):
        pool[dst] = pool[src]


def track_states_all_layers(
    conv_states, ssm_states, cache_indices, mask, track_indices, batch_size, check_freed_slots=False
):
    """The same for pools with a leading layer dimension."""
    track_states(
        conv_states.transpose(0, 1),
        ssm_states.transpose(0, 1),
        cache_indices,
        mask,
        track_indices,
        batch_size,
    )


def init_threads_binding(*, tp_rank, tp_size):
    """Ranks share the cores evenly; the stock function wants a NUMA node per rank, for kernels that are not here."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // tp_size))


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
