"""Bigram factors of a target, with which the tree's children know their parent: the file, its checks, its use.

SGLang reads every safetensors file beside a drafter's weights and ignores what it does not know, so the names of the
tensors are none that a drafter has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from sglang_ddtree_kernel.condition_children import condition_children

FILE_NAME = "markov.safetensors"
LEFT, RIGHT, SETTINGS = "markov.left", "markov.right", "fit-markov"
MAX_RANK = 256  # of the kernel


class MarkovError(ValueError):
    """A file that holds no factors for this target; the message is one line that names it and the remedy."""


@dataclass
class MarkovFactors:
    """left[a] . right[c] is log B(c | a) / u(c) of the target's language; `condition_children` has the formula."""

    left: torch.Tensor  # bf16 [V, R]
    right: torch.Tensor  # bf16 [V, R]
    weight: float

    def __call__(self, logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """logprobs fp32, ids int64 [bs, T, C] -> fp32 [bs, T, C, C], children by parent."""
        return condition_children(logprobs, ids, self.left, self.right, self.weight)

    def __str__(self) -> str:
        size = 2 * self.left.numel() * self.left.itemsize
        return f"rank {self.left.shape[1]}, weight {self.weight:g}, {size / 2**20:.1f} MiB"


def beside(draft_path: str, revision: str | None) -> str | None:
    """The file next to a drafter's weights, in a folder or in a repository of the hub; None if there is none."""
    from transformers.utils import cached_file

    return cached_file(
        draft_path,
        FILE_NAME,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def read(path: str | Path, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """left and right, bf16 [V, R] on the CPU. Raises MarkovError unless both are there, of this V, and finite."""
    remedy = "make it with: python -m sglang_ddtree fit-markov"
    try:
        with safe_open(path, framework="pt") as file:
            left, right = file.get_tensor(LEFT), file.get_tensor(RIGHT)
    except (OSError, SafetensorError) as e:
        reason = str(e).strip().splitlines()[0]
        raise MarkovError(f"{path} holds no bigram factors ({reason}); {remedy}") from None
    shape = list(left.shape)
    if left.ndim != 2 or right.shape != left.shape or {left.dtype, right.dtype} != {torch.bfloat16}:
        raise MarkovError(
            f"{path} holds {left.dtype} {shape} and {right.dtype} {list(right.shape)}, not two bf16 [V, R]; {remedy}"
        )
    if shape[0] != vocab_size:
        raise MarkovError(
            f"{path} is of a vocabulary of {shape[0]} tokens, the target's has {vocab_size}; {remedy}"
        )
    if not 1 <= shape[1] <= MAX_RANK:
        raise MarkovError(f"{path} has rank {shape[1]}, not one of 1 to {MAX_RANK}; {remedy}")
    if not (_finite(left) and _finite(right)):
        raise MarkovError(f"{path} holds factors that are not finite; {remedy}")
    return left, right


def _finite(x: torch.Tensor) -> bool:
    """Of bf16, by its exponent bits in numpy: on a CPU the launcher reads the file before it forks the schedulers, and
    torch would start OpenMP threads, which a fork does not survive."""
    bits = x.view(torch.int16).numpy()
    return not ((bits & 0x7F80) == 0x7F80).any()


def load(path: str | Path, vocab_size: int, weight: float, device: torch.device | str) -> MarkovFactors:
    """Raises MarkovError as `read` does."""
    left, right = read(path, vocab_size)
    return MarkovFactors(left.to(device), right.to(device), weight)


def save(path: str | Path, left: torch.Tensor, right: torch.Tensor, settings: dict[str, object]) -> None:
    """Writes factors [V, R] as bf16, with the settings they were made with: JSON under one key, as safetensors keeps
    several in no fixed order and equal fits should be equal files."""
    tensors = {LEFT: left.bfloat16().contiguous(), RIGHT: right.bfloat16().contiguous()}
    Path(path).write_bytes(
        serialize(tensors, metadata={SETTINGS: json.dumps(settings)})
    )  # save_file's mode is 600
