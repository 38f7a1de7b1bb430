"""The drafter's training, and on the way those of lesser quality: each branches off the constant phase."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from scripts.train_demo.acceptance import GRID, MAIN
from scripts.train_demo.draft import Draft, initial_draft
from scripts.train_demo.evaluate import acceptance, print_table, reserved_margins
from scripts.train_demo.generate import Continuations
from scripts.train_demo.loop import SPARE_STEPS, Loop, cooldown, warmup
from scripts.train_demo.plan import Plan, steps_before
from scripts.train_demo.report import elapsed, say
from scripts.train_demo.target import Target


def batches(plan: Plan, known: Continuations) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows int64 [steps, batch] of `known`, epoch by epoch, and anchors int16 [steps, batch, anchors] in them."""
    count, total = known.tokens.shape
    device, steps = known.tokens.device, plan.draft_steps + SPARE_STEPS
    draw = torch.Generator(device).manual_seed(12)
    epochs = -(-steps * plan.draft_batch // count)
    rows = torch.cat([torch.randperm(count, generator=draw, device=device) for _ in range(epochs)])
    anchors = torch.randint(
        known.prompt,
        total - plan.draft.block,
        (steps, plan.draft_batch, plan.anchors),
        generator=draw,
        device=device,
        dtype=torch.int16,
    )
    return rows[: steps * plan.draft_batch].view(steps, plan.draft_batch), anchors


def train_draft(
    target: Target,
    plan: Plan,
    work: Path,
    known: Continuations,
    evaluated: Continuations,
    warm: Callable[[Draft], None],
) -> tuple[dict[str, torch.Tensor], dict]:
    """The finished drafter's weights (bf16 values in fp32), and the figures of all qualities.

    Args:
        known: what to train on; evaluated: the continuations of the evaluation prompts.
        warm: called before the first step, to make compiled code ready.
    """
    embedding, head = (target.weights[k] for k in ("model.embed_tokens.weight", "lm_head.weight"))
    weights = initial_draft(plan.draft, 1, str(target.device))
    rows, anchors = batches(plan, known)
    draft = Draft(plan.draft, weights, embedding, head, compiled=target.device.type == "cuda")

    def loss(step: torch.Tensor) -> torch.Tensor:
        chosen = rows[step].view(-1)
        return draft.loss(
            known.features.index_select(0, chosen),
            known.tokens.index_select(0, chosen).long(),
            anchors[step].squeeze(0).long(),
        )

    loop = Loop(
        "draft",
        weights,
        loss,
        weight_decay=0.05,
        steps=plan.draft_steps,
        checkpoint_every=plan.checkpoint_every,
    )
    warm(draft)
    seconds = loop.prepare()
    began = elapsed()
    # A step of the full schedule carries its share of the lesser ones' cooldowns.
    extra = 1 + plan.cooldown_share * sum(q for q in plan.qualities if q < 1)
    steps = steps_before(plan.draft_deadline, plan.draft_steps, seconds * extra, "draft")
    say(f"draft: {seconds * 1e3:.1f} ms a step, {steps} steps")

    figures: dict = {"draft_parameters": sum(w.numel() for w in weights.values()), "qualities": {}}
    for quality in plan.qualities:
        last = int(quality * steps)
        branch = int((1 - plan.cooldown_share) * last)
        constant = [warmup(i) for i in range(loop.done, branch)]
        loop.run(loop.done, constant, work / f"draft.{quality}.pt")
        trunk = loop.snapshot()
        mean = loop.run(branch, cooldown(last - branch))
        rounded = {k: w.detach().bfloat16().float() for k, w in weights.items()}
        loop.restore(trunk)
        finished = Draft(plan.draft, rounded, embedding, head)
        part = acceptance(finished, evaluated, GRID if quality == 1 else MAIN, plan.new_tokens)
        say(f"draft at {quality:.0%}: loss {mean:.4f}, greedy chain {part['tau'][0]['tau']:.2f}")
        if quality < 1:
            figures["qualities"][str(quality)] = {"steps": last, "loss": mean, **part}
    figures["draft"] = {"steps": steps, "seconds": elapsed() - began, "loss": mean}
    figures.update(part)
    figures["reserved_margin"] = reserved_margins(target, finished, evaluated)
    print_table(part)
    say(f"reserved margins: {figures['reserved_margin']}")
    return rounded, figures
