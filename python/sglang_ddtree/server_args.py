"""ServerArgs with the DDTREE flags, and every check that can refuse a start before weights load."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING

import torch
from sglang.srt.arg_groups.arg_utils import NS, A, Arg
from sglang.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from sglang.srt.speculative.dflash_utils import DFlashDraftConfig
    from transformers import PretrainedConfig

ALGORITHM = "DDTREE"
DEFAULT_BUDGET = 31  # measured on two cores: README.md
DEFAULT_CAP = 8
DEFAULT_MARKOV_WEIGHT = 1.0
GRAPH_ROWS = 1024  # rows of the largest captured verify forward; SGLang keeps fp32 logits of as many
GPU_ATTENTION_BACKENDS = ("triton", "flashinfer", "fa3")


class DDTreeConfigError(ValueError):
    """A flag or checkpoint that DDTREE cannot serve; the message is one line that names it and the remedy."""


def _whole_number(text: str) -> int | str:
    """argparse type: keeps what is not a number, so that the check below can name the flag in one line."""
    try:
        return int(text)
    except ValueError:
        return text


def _number(text: str) -> float | str:
    """As _whole_number, for a fraction."""
    try:
        return float(text)
    except ValueError:
        return text


@dataclasses.dataclass
class DDTreeServerArgs(ServerArgs):
    speculative_ddtree_budget: A[
        int,
        Arg(
            help="DDTREE: how many draft nodes one verify step checks beside the root (N = budget + 1 rows); "
            "more nodes accept more tokens a step, each costs a row of the verify forward.",
            type_parser=_whole_number,
        ),
        NS("spec"),
    ] = DEFAULT_BUDGET
    speculative_ddtree_topk_cap: A[
        int,
        Arg(
            help="DDTREE: at each depth only this many of the drafter's most probable tokens may become nodes.",
            type_parser=_whole_number,
        ),
        NS("spec"),
    ] = DEFAULT_CAP
    speculative_ddtree_markov: A[
        str | None,
        Arg(
            help="DDTREE: file of bigram factors that order children by their parent (made by `python -m sglang_ddtree "
            "fit-markov`), or off. Default: markov.safetensors beside the drafter's weights, if there is one.",
        ),
        NS("spec"),
    ] = None
    speculative_ddtree_markov_weight: A[
        float,
        Arg(
            help="DDTREE: how far bigram factors count; 0 is off.",
            type_parser=_number,
        ),
        NS("spec"),
    ] = DEFAULT_MARKOV_WEIGHT

    def __post_init__(self):
        if is_ddtree(self):
            check_flags(self)
            draft_config(self)
            if not torch.cuda.is_available():
                self.disable_cuda_graph = True
            elif self.cuda_graph_max_bs_decode is None:
                self.cuda_graph_max_bs_decode = max(1, GRAPH_ROWS // (self.speculative_ddtree_budget + 1))
        super().__post_init__()

    @classmethod
    def from_cli_args(cls, args):
        try:
            return super().from_cli_args(args)
        except DDTreeConfigError as e:
            print(f"error: {e}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None

    def _handle_cpu_backends(self):
        """SGLang would fall back from intel_amx only later, after other fields have been checked against it."""
        super()._handle_cpu_backends()
        if self.device == "cpu" and self.attention_backend == "intel_amx":
            self.attention_backend = "torch_native"

    def _handle_mamba_radix_cache(self, model_arch: str):
        """The prefix cache of a GDN target: snapshots in extra slots, which is what overlap scheduling needs.

        SGLang resolves `auto` by a list of architectures that lacks text-only Qwen3.5.
        """
        from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

        hybrid = hybrid_gdn_config(self.get_model_config()) is not None
        if hybrid and self.mamba_radix_cache_strategy == "auto" and not self.disable_radix_cache:
            self.mamba_radix_cache_strategy = "extra_buffer"
        super()._handle_mamba_radix_cache(model_arch)

    def _validate_mamba_extra_buffer(self, view, model_arch: str):
        if self.device != "cpu":  # its check of the device knows accelerators only
            super()._validate_mamba_extra_buffer(view, model_arch)


def is_ddtree(args: ServerArgs) -> bool:
    return (args.speculative_algorithm or "").upper() == ALGORITHM


def check_flags(args: DDTreeServerArgs) -> None:
    """Checks that need no model. Raises DDTreeConfigError."""
    from sglang_ddtree.operate.drain import drain_limit

    try:
        drain_limit()
    except ValueError as e:
        raise DDTreeConfigError(str(e)) from None
    for flag, value in (
        ("--speculative-ddtree-budget", args.speculative_ddtree_budget),
        ("--speculative-ddtree-topk-cap", args.speculative_ddtree_topk_cap),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DDTreeConfigError(f"{flag}: {value!r} is not a whole number of at least 1")
    weight = args.speculative_ddtree_markov_weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise DDTreeConfigError(
            f"--speculative-ddtree-markov-weight: {weight!r} is not a number of at least 0; 1.0 is usual, 0 is off"
        )
    if args.speculative_draft_model_path is None:
        raise DDTreeConfigError(
            "--speculative-draft-model-path: DDTREE needs a DFlash drafter; name its folder"
        )
    if args.speculative_num_draft_tokens is not None:
        raise DDTreeConfigError(
            "--speculative-num-draft-tokens: DDTREE derives it from --speculative-ddtree-budget; leave it out"
        )
    refused = (
        ("--pp-size", args.pp_size != 1, "use --tp-size"),
        ("--enable-dp-attention", args.enable_dp_attention, "leave it out"),
        ("--enable-lora", bool(args.enable_lora or args.lora_paths), "serve merged weights"),
        ("--page-size", args.page_size not in (None, 1), "use --page-size 1"),
        ("--mamba-ssm-dtype", args.mamba_ssm_dtype not in (None, "float32"), "use float32"),
        (
            "--speculative-eagle-topk",
            args.speculative_eagle_topk not in (None, 1),
            "use --speculative-ddtree-topk-cap",
        ),
        ("--speculative-draft-window-size", args.speculative_draft_window_size is not None, "leave it out"),
        ("--speculative-adaptive", bool(args.speculative_adaptive), "leave it out"),
        (
            "--enable-linear-replayssm",
            args.enable_linear_replayssm,
            "leave it out; DDTREE keeps no snapshots",
        ),
        (
            "--enable-linear-replayssm-spec",
            args.enable_linear_replayssm_spec,
            "leave it out; DDTREE keeps no snapshots",
        ),
        ("--enable-return-hidden-states", args.enable_return_hidden_states, "leave it out"),
        ("--disaggregation-mode", args.disaggregation_mode != "null", "leave it out"),
        (
            "--mamba-radix-cache-strategy",
            args.mamba_radix_cache_strategy not in ("auto", "extra_buffer") and not args.disable_radix_cache,
            "use extra_buffer, or --disable-radix-cache",
        ),
    )
    for flag, is_set, remedy in refused:
        if is_set:
            raise DDTreeConfigError(f"{flag}: not supported with DDTREE; {remedy}")


def check_backends(args: DDTreeServerArgs) -> None:
    """Checks the attention backend and page size that SGLang resolved. Raises DDTreeConfigError."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    view = resolved_view(args)
    supported = ("torch_native",) if args.device == "cpu" else GPU_ATTENTION_BACKENDS
    for backend in {b for b in attention_backends_of(view) if b is not None}:
        if backend not in supported:
            raise DDTreeConfigError(
                f"--attention-backend: {backend} is not supported with DDTREE on {args.device}; "
                f"use {' or '.join(supported)}"
            )
    if view.page_size not in (None, 1):
        raise DDTreeConfigError("--page-size: not supported with DDTREE; use --page-size 1")


def draft_config(args: DDTreeServerArgs) -> tuple[PretrainedConfig, DFlashDraftConfig]:
    """The drafter's config as transformers and as SGLang read it. Raises DDTreeConfigError."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = args.speculative_draft_model_path
    try:
        config = get_config(
            path, trust_remote_code=args.trust_remote_code, revision=args.speculative_draft_model_revision
        )
        return config, parse_dflash_draft_config(draft_hf_config=config)
    except Exception as e:
        reason = str(e).strip().splitlines()[0]
        raise DDTreeConfigError(
            f"--speculative-draft-model-path: no usable DFlash config in {path} ({reason}); name a drafter's folder"
        ) from e


def check_pair(args: DDTreeServerArgs) -> DFlashDraftConfig:
    """Checks the drafter's config against the target's; returns the drafter's. Raises DDTreeConfigError."""
    flag, path = "--speculative-draft-model-path", args.speculative_draft_model_path
    hf_draft, draft = draft_config(args)
    dflash = getattr(hf_draft, "dflash_config", None) or {}
    target = args.get_model_config()
    draft_text = getattr(hf_draft, "text_config", None) or hf_draft
    if draft.block_size is None or draft.block_size < 2:
        raise DDTreeConfigError(
            f"{flag}: config of {path} has no block_size of at least 2; use a DFlash drafter"
        )
    if dflash.get("mask_token_id") is None and dflash.get("mask_token") is None:
        raise DDTreeConfigError(
            f"{flag}: config of {path} names no dflash_config.mask_token_id; use a DFlash drafter"
        )
    if args.speculative_dflash_block_size not in (None, draft.block_size):
        raise DDTreeConfigError(
            f"--speculative-dflash-block-size: {args.speculative_dflash_block_size} differs from the drafter's "
            f"{draft.block_size}; leave it out"
        )
    for field, have, want in (
        ("hidden_size", draft_text.hidden_size, target.hf_text_config.hidden_size),
        ("vocab_size", draft_text.vocab_size, target.vocab_size),
    ):
        if have != want:
            raise DDTreeConfigError(
                f"{flag}: {field} {have} of {path} differs from the target's {want}; use its own drafter"
            )
    cap, rows = args.speculative_ddtree_topk_cap, args.speculative_ddtree_budget + 1
    if cap > target.vocab_size:
        raise DDTreeConfigError(
            f"--speculative-ddtree-topk-cap: {cap} is above the vocabulary size {target.vocab_size}; use at most that"
        )
    if rows > target.context_len:
        raise DDTreeConfigError(
            f"--speculative-ddtree-budget: budget + 1 = {rows} rows exceed the context length {target.context_len}; "
            "use a smaller budget"
        )
    check_markov(args, target.vocab_size)
    return draft


def markov_file(args: DDTreeServerArgs) -> str | None:
    """The bigram factors to serve with: those named, or those beside the drafter; None for none."""
    from sglang_ddtree.draft import markov

    if args.speculative_ddtree_markov == "off" or args.speculative_ddtree_markov_weight == 0:
        return None
    if args.speculative_ddtree_markov is not None:
        return args.speculative_ddtree_markov
    return markov.beside(args.speculative_draft_model_path, args.speculative_draft_model_revision)


def check_markov(args: DDTreeServerArgs, vocab_size: int) -> None:
    """Checks that the bigram factors are the target's, and whole. Raises DDTreeConfigError."""
    from sglang_ddtree.draft import markov

    path = markov_file(args)
    if path is None:
        return
    try:
        markov.read(path, vocab_size)
    except markov.MarkovError as e:
        raise DDTreeConfigError(f"--speculative-ddtree-markov: {e}, or use off") from None
