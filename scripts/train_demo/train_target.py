"""The target's training, and the weights as they will be served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from scripts.train_demo.evaluate import heldout_loss
from scripts.train_demo.loop import SPARE_STEPS, Loop, linear_decay, save_whole
from scripts.train_demo.plan import Plan, steps_before
from scripts.train_demo.report import elapsed, say
from scripts.train_demo.target import Target

DECAY_SHARE = 0.6


def window_starts(stream_length: int, window: int, steps: int, batch: int) -> np.ndarray:
    """int64 [steps, batch]: every epoch cuts the stream at new places and shuffles the windows."""
    draw, starts = np.random.default_rng(0), []
    while sum(map(len, starts)) < steps * batch:
        offset = int(draw.integers(window))
        starts.append(draw.permutation((stream_length - 1 - offset) // window) * window + offset)
    return np.concatenate(starts)[: steps * batch].reshape(steps, batch)


def train_target(target: Target, plan: Plan, work: Path) -> dict:
    """Trains `target.weights` in place, or takes them from the work folder; returns the figures of the training."""
    done, weights, device = work / "target.pt", target.weights, target.device
    if done.exists():
        saved = torch.load(done, map_location=device)
        with torch.no_grad():
            for name, w in weights.items():
                w.copy_(saved["weights"][name])
        say(f"target: taken from {done}")
        return saved["figures"]
    stream = torch.from_numpy(np.load(work / "train.npy")).to(device)
    starts = window_starts(
        len(stream), plan.target_length, plan.target_steps + SPARE_STEPS, plan.target_batch
    )
    starts = torch.from_numpy(starts).to(device)
    window = torch.arange(plan.target_length + 1, device=device)

    def loss(step: torch.Tensor) -> torch.Tensor:
        return target.loss(stream[starts[step].view(-1, 1) + window].long())

    loop = Loop(
        "target",
        weights,
        loss,
        weight_decay=0.1,
        steps=plan.target_steps,
        checkpoint_every=plan.checkpoint_every,
    )
    seconds = loop.prepare()
    began = elapsed()
    steps = steps_before(plan.target_deadline, plan.target_steps, seconds, "target")
    tokens = plan.target_batch * plan.target_length
    say(f"target: {seconds * 1e3:.1f} ms a step, {tokens / seconds / 1e6:.2f} M tokens/s; {steps} steps")
    mean = loop.run(0, linear_decay(steps, DECAY_SHARE), work / "target.steps.pt")
    figures = {"steps": steps, "tokens": steps * tokens, "seconds": elapsed() - began, "loss": mean}
    save_whole({"weights": weights, "figures": figures}, done)
    return figures


@torch.no_grad()
def finish_target(target: Target, plan: Plan, work: Path, bytes_per_token: float) -> tuple[Target, dict]:
    """The target with its weights as they will be served (bf16 values), and what it is worth on held-out source."""
    shape = plan.target
    weights = {k: w.detach().clone() for k, w in target.weights.items()}
    # The mask token was never seen: give it an embedding of ordinary size.
    embedding = weights["model.embed_tokens.weight"]
    ordinary = embedding[: shape.first_reserved].norm(dim=1).median()
    reserved = embedding[shape.first_reserved :]
    reserved *= ordinary / reserved.norm(dim=1, keepdim=True)
    finished = Target(shape, {k: w.bfloat16().float() for k, w in weights.items()})
    loss = heldout_loss(finished, np.load(work / "heldout.npy"), plan.heldout_windows)
    per_byte = loss / np.log(2) / bytes_per_token
    say(f"target: held-out loss {loss:.4f} nats a token, {per_byte:.4f} bits a byte")
    return finished, {"heldout_loss": loss, "heldout_bits_per_byte": per_byte}
