"""A training loop whose whole step (batch, forward, backward, update) is one CUDA graph on a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from scripts.train_demo.optimizer import Optimizer
from scripts.train_demo.report import progress, say

WARMUP_STEPS = 100
REPORT_EVERY = 250
SPARE_STEPS = 64  # that preparing a loop may take beyond its schedule


def warmup(step: int) -> float:
    return min(1.0, (step + 1) / WARMUP_STEPS)


def linear_decay(steps: int, share: float) -> list[float]:
    """Warm-up, constant, and a linear decay to zero over the last `share` of the steps."""
    return [warmup(i) * min(1.0, (steps - i) / (share * steps)) for i in range(steps)]


def cooldown(steps: int) -> list[float]:
    """Decay by 1 - sqrt(progress): the cooldown that matched full schedules in arXiv 2405.18392."""
    return [1 - math.sqrt((i + 0.5) / steps) for i in range(steps)]


def save_whole(value: object, path: Path) -> None:
    """torch.save that leaves either the whole file or none, so that a run may be killed at any time."""
    partial = path.with_suffix(".partial")
    torch.save(value, partial)
    partial.replace(path)


class Loop:
    """Trains `parameters` on `loss(step)`; `step` is an int64 tensor [1] on the device, below steps + SPARE_STEPS.

    The learning rates' factors are read from the device by step, so a captured step serves every schedule.
    """

    def __init__(
        self,
        name: str,
        parameters: dict[str, torch.Tensor],
        loss: Callable[[torch.Tensor], torch.Tensor],
        *,
        weight_decay: float,
        steps: int,
        checkpoint_every: int,
    ):
        self.name, self.loss_of, self.checkpoint_every = name, loss, checkpoint_every
        self.parameters = list(parameters.values())
        for p in self.parameters:
            p.requires_grad_()
        self.optimizer = Optimizer(parameters, weight_decay)
        device = self.parameters[0].device
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)
        self.factors = torch.zeros(steps + SPARE_STEPS, device=device)
        self.loss = torch.zeros((), device=device)
        self.graph = None
        self.done = 0

    def _step(self) -> None:
        loss = self.loss_of(self.step_index)
        loss.backward()
        self.optimizer.step(self.factors.index_select(0, self.step_index).squeeze(0))
        self.loss.copy_(loss.detach())
        self.step_index += 1

    def _eager_step(self) -> None:
        for p in self.parameters:
            p.grad = None
        self._step()

    def tensors(self) -> list[torch.Tensor]:
        """Everything that a checkpoint holds."""
        return [*self.parameters, *self.optimizer.state(), self.step_index]

    def snapshot(self) -> list[torch.Tensor]:
        return [t.detach().clone() for t in self.tensors()]

    @torch.no_grad()
    def restore(self, snapshot: list[torch.Tensor]) -> None:
        for t, saved in zip(self.tensors(), snapshot, strict=True):
            t.copy_(saved)
        self.done = int(self.step_index.item())

    def prepare(self) -> float:
        """Compiles and captures a step; the weights stay as they were. Returns seconds per step."""
        before = self.snapshot()
        cuda = self.factors.is_cuda
        if cuda:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._eager_step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            for p in self.parameters:
                p.grad = None
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
        trials = 8 if cuda else 1
        self._advance()
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(trials):
            self._advance()
        if cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / trials
        self.restore(before)
        return seconds

    def _advance(self) -> None:
        if self.graph is None:
            self._eager_step()
        else:
            self.graph.replay()

    def run(self, first: int, factors: list[float], checkpoint: Path | None = None) -> float:
        """Steps first .. first + len(factors) - 1, or what is left of them after a restore.

        With `checkpoint`, the state is written there now and then, and taken from there if it exists.

        Returns:
            The mean loss of the last REPORT_EVERY steps, or of all if there are fewer.
        """
        if checkpoint is not None and checkpoint.exists():
            saved = torch.load(checkpoint, map_location=self.loss.device)
            if first <= int(saved[-1].item()) < first + len(factors):
                self.restore(saved)
                say(f"{self.name}: resumed at step {self.done}")
        end = first + len(factors)
        self.factors[first:end] = torch.tensor(factors, device=self.factors.device)
        total, counted = torch.zeros_like(self.loss), 0
        with progress(self.name, end - first) as tick:
            while self.done < end:
                self._advance()
                self.done += 1
                tick(self.done - first)
                total += self.loss
                counted += 1
                if (end - self.done) % REPORT_EVERY == 0:
                    mean = (total / counted).item()
                    if not math.isfinite(mean):
                        raise SystemExit(f"{self.name}: the loss is {mean} at step {self.done}")
                    say(f"{self.name}: step {self.done}/{end}, loss {mean:.4f}")
                    total.zero_()
                    counted = 0
                if checkpoint is not None and self.done % self.checkpoint_every == 0 and self.done < end:
                    save_whole(self.tensors(), checkpoint)
        return mean
