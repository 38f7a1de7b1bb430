"""Does the wide pair compute what the small one computes? Proven layer by layer, on whatever device there is.

    python -m benchmark.widen.verify --shape 27b [--layers 8] [--tokens 64] [--dtype bfloat16]

One layer is made, run and dropped at a time, and the head in parts: a layer of the 27B shape takes 2 GiB on a CPU, the
interpreter included. Both models run in plain PyTorch on the same held-out prompts. Printed: how far the residual
stream is from the small model's after every layer; then, target and drafter, the rms difference of the logits, how
often the best token agrees, and how far the padding of the vocabulary stays below. The exit status is 1 if a bound is
broken; with --layers nothing is bounded.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from benchmark.widen.folders import wide_model
from benchmark.widen.padding import MARGIN
from benchmark.widen.shapes import WIDENINGS, SmallPair
from benchmark.widen.texts import heldout_ids
from scripts.train_demo.draft import Draft
from scripts.train_demo.layers import rms_norm, rotary_table
from scripts.train_demo.shapes import DraftShape, TargetShape
from scripts.train_demo.target import (
    ATTENTION_INPUT,
    ATTENTION_OUTPUT,
    GDN_INPUT,
    GDN_OUTPUT,
    Target,
)

console = Console(width=120, highlight=False)
HEAD_ROWS = 16_384
# fp32: sums of up to 17,408 products in another order. The middle shape comes to 2e-6 on a CPU.
FP32_RMS = 1e-3
# bf16: both models round; the small one's own distance from fp32 is what rounding costs, and two of them add up.
BF16_NOISES = 2.0


class LayerByLayer:
    """The target's forward in a chosen dtype over any mapping of weights, read one layer at a time."""

    def __init__(self, shape: TargetShape, weights, dtype: torch.dtype, device: str):
        self.shape, self.weights, self.dtype = shape, weights, dtype
        self.math = Target(
            shape, {"lm_head.weight": torch.empty(0, device=device)}
        )  # only its layers are used

    def layer(self, i: int, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Vectors in fp32: the zero-centred norms must not be rounded once more when 1 is added."""
        found = (self.weights[f"model.layers.{i}.{name}"] for name in names)
        return [w.float() if w.dim() == 1 else w for w in found]

    def __call__(self, x: torch.Tensor, layers: int):
        """x [B, T, hidden], embedded: yields the residual stream after each of the first `layers` layers."""
        s = self.shape
        table = rotary_table(
            torch.arange(x.shape[1], device=x.device), s.rotary_dim, s.rope_theta, self.dtype
        )
        for i in range(layers):
            if s.is_attention(i):
                x = self.math.attention_layer(x, *table, *self.layer(i, ATTENTION_INPUT + ATTENTION_OUTPUT))
            else:
                *rule, z = self.math.gdn_input(x, *self.layer(i, GDN_INPUT))
                x = self.math.gdn_output(x, delta_rule(*rule), z, *self.layer(i, GDN_OUTPUT))
            yield x


def delta_rule(q, k, v, g, beta) -> torch.Tensor:
    """o [B, T, HV, V] by transformers' PyTorch form, on any device. Shapes as in scripts/train_demo/kernels.py."""
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


@dataclass
class States:
    """What a pair makes of the prompts, in its own width."""

    layers: list[torch.Tensor]  # the residual stream after every target layer
    target: torch.Tensor | None = None  # [B, T, hidden] before the head
    draft: torch.Tensor | None = None  # [B, A, horizon, hidden] before the head


def run_draft(shape: DraftShape, weights, layers, ids, anchors, embedding, dtype) -> torch.Tensor:
    """The drafter's normed states from the target's residual streams; embedding: the rows of the small vocabulary."""
    draft = Draft(shape, weights, embedding, embedding)
    draft.dtype = dtype
    features = torch.cat([layers[i] for i in shape.target_layers], dim=-1)
    return rms_norm(draft.hidden(features, ids, anchors), weights["norm.weight"], shape.eps)


def run_small(pair: SmallPair, ids, anchors, dtype: torch.dtype) -> tuple[States, torch.Tensor, torch.Tensor]:
    """States, and the logits of target and drafter, fp32."""
    w, device = pair.target_weights, ids.device
    embedding, head = w["model.embed_tokens.weight"], w["lm_head.weight"]
    forward = LayerByLayer(pair.target, w, dtype, str(device))
    states = States(list(forward(F.embedding(ids, embedding).to(dtype), pair.target.layers)))
    states.target = rms_norm(states.layers[-1], 1 + w["model.norm.weight"].float(), pair.target.eps)
    states.draft = run_draft(pair.draft, pair.draft_weights, states.layers, ids, anchors, embedding, dtype)
    return states, *(F.linear(x, head.to(dtype)).float() for x in (states.target, states.draft))


class Logits:
    """Logits of some states over the wide vocabulary, gathered in parts of the head."""

    def __init__(self, states: torch.Tensor, small_vocab: int):
        self.states, self.small_vocab, self.kept, self.padding = states, small_vocab, [], []

    def add(self, first: int, rows: torch.Tensor) -> None:
        """rows: the head's from `first` on."""
        part = F.linear(self.states, rows.to(self.states.dtype)).float()
        inside = max(0, self.small_vocab - first)
        self.kept.append(part[..., :inside])
        if inside < part.shape[-1]:
            self.padding.append(part[..., inside:].amax(-1))

    def compare(self, name: str, expected: torch.Tensor, noise: torch.Tensor, exact: bool) -> bool:
        """Prints one line; True if the bounds hold. noise: the small pair's logits in fp32."""
        logits = torch.cat(self.kept, -1)
        best, ids = logits.max(-1)
        difference, floor = rms(logits - expected), rms(expected - noise)
        agree = (ids == expected.argmax(-1)).float().mean().item()
        margin = (best - torch.stack(self.padding).amax(0)).min().item()
        bound = FP32_RMS if exact else BF16_NOISES * floor
        console.print(
            f"{name}: {ids.numel()} positions, rms logit difference {difference:.2e} (at most {bound:.2e}), best token "
            f"agrees at {agree:.2%}, padding at least {margin:.1f} nats below it (at least {MARGIN:.0f})"
        )
        return difference <= bound and margin >= MARGIN and (agree == 1 or not exact)


def rms(x: torch.Tensor) -> float:
    return x.float().square().mean().sqrt().item()


@torch.no_grad()
def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(WIDENINGS)}")] = "27b",
    layers: Annotated[int | None, typer.Option(min=1, help="only so many layers; no logits then")] = None,
    prompts: Annotated[int, typer.Option(min=1, max=64)] = 1,
    tokens: Annotated[int, typer.Option(min=32, max=192, help="of each prompt")] = 64,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
):
    if shape not in WIDENINGS:
        raise typer.BadParameter(f"{shape!r} is not one of {', '.join(WIDENINGS)}", param_hint="--shape")
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"{dtype!r} is not float32 or bfloat16", param_hint="--dtype")
    widening, exact, kind = WIDENINGS[shape], dtype == "float32", getattr(torch, dtype)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wide, started = widening.target, time.perf_counter()
    pair = SmallPair.load(device)
    ids = heldout_ids()[:prompts, -tokens:].to(device)
    anchors = torch.arange(8, tokens, 8, device=device).expand(prompts, -1)
    small, *expected = run_small(pair, ids, anchors, kind)
    noise = expected if exact else run_small(pair, ids, anchors, torch.float32)[1:]

    target = wide_model(shape, "target", device)
    embedding = target.part("model.embed_tokens.weight", slice(pair.target.vocab))
    streams: dict[int, torch.Tensor] = {}
    depth = min(layers or wide.layers, wide.layers)
    forward = LayerByLayer(wide, target, kind, device)
    for i, x in enumerate(forward(F.embedding(ids, embedding).to(kind), depth)):
        if i in widening.draft.target_layers:
            streams[i] = x
        source = sum(at <= i for at in widening.placed) - 1
        same = small.layers[source].repeat(1, 1, wide.hidden // pair.target.hidden)
        added = "" if i in widening.placed else ", added"
        console.print(
            f"layer {i} (small {source}{added}): {rms(x - same) / rms(same):.2e} from the small one's, relative; "
            f"{time.perf_counter() - started:.0f} s"
        )
    if depth < wide.layers:
        return
    found = [Logits(rms_norm(x, 1 + target["model.norm.weight"].float(), wide.eps), pair.target.vocab)]
    weights = wide_model(shape, "draft", device)
    drafted = run_draft(widening.draft, weights, streams, ids, anchors, embedding, kind)
    found.append(Logits(drafted, pair.target.vocab))
    for first in range(0, wide.vocab, HEAD_ROWS):
        rows = target.part("lm_head.weight", slice(first, first + HEAD_ROWS))
        for logits in found:
            logits.add(first, rows)
    names = ("target", "drafter")
    fine = [f.compare(n, e, z, exact) for f, n, e, z in zip(found, names, expected, noise, strict=True)]
    console.print(f"{shape}, {dtype}, {device}: {time.perf_counter() - started:.0f} s")
    if not all(fine):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
