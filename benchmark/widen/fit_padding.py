"""Fits the padding of the vocabulary for the pair in models/, and checks it.

    python -m benchmark.widen.fit_padding        # about a minute and a half on one core

The direction is fitted to the last states of both models on code, corrupted code, random ids and repeated ids, and has
to stay 30 nats below the best logit on others: 87, 96, 129 and 94 for the shipped pair (fp32, 20,748 states). The
result is the small file beside this module.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save

from benchmark.widen.padding import FILE, MARGIN
from benchmark.widen.shapes import DRAFT, TARGET, SmallPair
from benchmark.widen.texts import heldout_ids, project_ids
from scripts.train_demo.draft import Draft
from scripts.train_demo.evaluate import load_pair
from scripts.train_demo.generate import Generator
from scripts.train_demo.layers import rms_norm
from scripts.train_demo.target import Target

ROW_NORM = 48.0  # of the first row, the second's is twice that; the head's own have norms around 2
NEW_TOKENS, ANCHOR_STEP = 16, 12
SHARPNESS = (0.3, 1.0, 3.0)  # of the soft maximum that the fit lowers, one after another


@torch.no_grad()
def states(target: Target, draft: Draft, ids: torch.Tensor) -> torch.Tensor:
    """Normed last states [n, hidden] of both models over prompts ids [B, P] and the target's continuations of them,
    half of these greedy and half sampled at temperature 1."""
    layers = (*draft.shape.target_layers, target.shape.layers - 1)
    generator = Generator(target, layers, len(ids), ids.shape[1], NEW_TOKENS)
    known = generator(ids, (torch.arange(len(ids)) % 2).float())
    *features, last = known.features.split(target.shape.hidden, dim=-1)
    anchors = torch.arange(8, known.tokens.shape[1], ANCHOR_STEP).expand(len(ids), -1)
    drafted = draft.hidden(torch.cat(features, dim=-1), known.tokens, anchors)
    eps = target.shape.eps
    return torch.cat(
        [
            rms_norm(last, 1 + target.weights["model.norm.weight"], eps).flatten(0, 1),
            rms_norm(drafted, draft.weights["norm.weight"], eps).flatten(0, 2),
        ]
    )


def prompts(texts: torch.Tensor, vocab: int, seed: int) -> dict[str, torch.Tensor]:
    """Kinds of prompts, int64 [B, P] each: the texts [n, P] and three that are none. Each id has states of its own when
    it is all there is, so of those there are many and short ones."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randint(vocab, texts.shape, generator=g)
    corrupted = torch.where(torch.rand(texts.shape, generator=g) < 0.3, noise, texts)
    repeated = torch.randint(vocab, (4 * len(texts), 1), generator=g).expand(-1, 48)
    return {
        "code": texts,
        "30 % corrupted": corrupted,
        "random ids": noise[:, :96],
        "one id repeated": repeated,
    }


def fit(x: torch.Tensor) -> torch.Tensor:
    """The unit vector [hidden] whose greatest product with the rows of x [n, hidden] is as low as can be."""
    direction = -x.mean(0)
    direction.requires_grad_()
    for sharpness in SHARPNESS:
        lower_soft_maximum(x, direction, sharpness)
    return F.normalize(direction.detach(), dim=0)


def lower_soft_maximum(x: torch.Tensor, direction: torch.Tensor, sharpness: float) -> None:
    """Turns `direction` in place."""
    optimiser = torch.optim.LBFGS([direction], max_iter=60, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        products = x @ F.normalize(direction, dim=0) * ROW_NORM
        soft_maximum = torch.logsumexp(sharpness * products, 0) / sharpness
        soft_maximum.backward()
        return soft_maximum

    optimiser.step(loss)


def margin(x: torch.Tensor, head: torch.Tensor, rows: torch.Tensor) -> float:
    """The least distance (nats) of the best padding logit below the best logit over the states x."""
    parts = [((p @ head.T).amax(-1) - (p @ rows.float().T).amax(-1)).min() for p in x.split(8192)]
    return torch.stack(parts).min().item()


def main():
    """Fits, checks on other states, and writes the file beside this module."""
    torch.manual_seed(0)
    console, started = Console(width=100), time.perf_counter()
    target, draft = load_pair(TARGET, DRAFT, "cpu")
    held_out = heldout_ids()
    length, vocab = held_out.shape[1], target.shape.first_reserved
    texts = torch.cat([project_ids(length, 16), held_out[:8]])
    x = torch.cat([states(target, draft, ids) for ids in prompts(texts, vocab, 1).values()])
    console.print(f"{len(x)} states after {time.perf_counter() - started:.0f} s")
    direction = fit(x)
    rows = (direction * ROW_NORM * torch.tensor([[1.0], [2.0]])).bfloat16()

    head = target.weights["lm_head.weight"]
    table = Table(title=f"least distance below the best logit; at least {MARGIN:.0f} is needed")
    table.add_column("states")
    table.add_column("nats", justify="right")
    least = {"those fitted to": margin(x, head, rows)}
    for kind, ids in prompts(held_out[8:20], vocab, 2).items():
        least[f"others, {kind}"] = margin(states(target, draft, ids), head, rows)
    for kind, nats in least.items():
        table.add_row(kind, f"{nats:.1f}")
    console.print(table)
    if min(least.values()) < MARGIN:
        console.print(
            f"the padding comes closer than {MARGIN:.0f} nats to the best logit; {FILE.name} is left as it was"
        )
        raise typer.Exit(1)
    FILE.write_bytes(save({"padding": rows}, metadata={"pair": SmallPair.load().digest()}))
    console.print(f"{FILE} written after {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    typer.run(main)
