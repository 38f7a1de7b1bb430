"""Other drafters: random weights, one that proposes only tokens the target never says, one with sliding windows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RESERVED = 4032  # ids from here on are in no text


def _write(draft: str, weights: dict[str, torch.Tensor], folder: Path) -> str:
    shutil.copy(Path(draft) / "config.json", folder / "config.json")
    save_file(
        {k: v.contiguous() for k, v in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return str(folder)


def random_drafter(draft: str, target: str, folder: Path) -> str:
    """The drafter's shapes with normal weights; norms stay as they are."""
    generator = torch.Generator().manual_seed(0)
    weights = load_file(Path(draft) / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = (torch.randn(weight.shape, generator=generator) * 0.05).to(weight.dtype)
    return _write(draft, weights, folder)


def adversarial_drafter(draft: str, target: str, folder: Path) -> str:
    """Every layer adds nothing, so a mask position ends as its normalised embedding; the last norm turns that into a
    direction under which the head prefers reserved tokens (fitted), so they are the candidates at every depth."""
    weights = load_file(Path(draft) / "model.safetensors")
    tensors = {}
    for shard in sorted(Path(target).glob("*.safetensors")):
        tensors |= load_file(shard)
    embedding = tensors["model.embed_tokens.weight"][4032].float()
    head = tensors["lm_head.weight"].float()
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weight)
    normed = embedding * torch.rsqrt(embedding.square().mean() + 1e-6)
    direction = head[RESERVED:].mean(0).requires_grad_()
    optimiser = torch.optim.Adam([direction], lr=0.05)
    for _ in range(300):
        logits = head @ direction
        (logits[:RESERVED].logsumexp(0) - logits[RESERVED:].mean()).backward()
        optimiser.step()
        optimiser.zero_grad()
    direction = direction.detach()
    weights["norm.weight"] = direction / normed
    top = (head @ direction).topk(8).indices
    assert bool((top >= RESERVED).all()), "the head cannot tell reserved tokens from the others"
    return _write(draft, weights, folder)


def windowed_drafter(draft: str, folder: Path, window: int) -> str:
    """The drafter's weights, all layers but the last seeing `window` positions, as in published drafters."""
    weights = load_file(Path(draft) / "model.safetensors")
    _write(draft, weights, folder)
    config = json.loads((folder / "config.json").read_text())
    types = ["sliding_attention"] * (config["num_hidden_layers"] - 1) + ["full_attention"]
    config |= dict(layer_types=types, sliding_window=window, use_sliding_window=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
