"""The phases, top to bottom: data and compilation, target, continuations, drafter, export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from scripts.train_demo import kernels
from scripts.train_demo.card import write_cards
from scripts.train_demo.continue_prompts import continue_prompts
from scripts.train_demo.draft import Draft
from scripts.train_demo.export import write_draft, write_prompts, write_target
from scripts.train_demo.plan import Plan
from scripts.train_demo.report import elapsed, say
from scripts.train_demo.target import Target, initial_target
from scripts.train_demo.train_draft import train_draft
from scripts.train_demo.train_target import finish_target, train_target
from scripts.train_demo.warm import draft_step

HELPERS = 3  # processes that compile kernels


class Recipe:
    """One run. An interrupted one goes on in its work folder: with the data, the trained target, the last checkpoints.

    Continuations (tens of GB) are not kept; they are made again from the same seeds.
    """

    def __init__(self, plan: Plan, work: Path):
        self.plan, self.work = plan, work
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.cuda = self.device == "cuda"
        self.children: dict[str, subprocess.Popen] = {}

    def run(self, target_folder: Path, draft_folder: Path) -> None:
        """Trains both models and writes them, their cards, and `figures.json` and the prompts beside the folders."""
        plan, work = self.plan, self.work
        self.claim_work()
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            self.start_children()
            target = self.compile()
            self.wait("data")
            figures = {
                "plan": plan.name,
                "device": torch.cuda.get_device_name() if self.cuda else "a CPU",
                "precision": "bf16 on a GPU" if self.cuda else "fp32 on a CPU",
                "target_parameters": sum(w.numel() for w in target.weights.values()),
                "data": json.loads((work / "data.json").read_text()),
            }
            figures["target"] = train_target(target, plan, work)
            target, worth = finish_target(target, plan, work, figures["data"]["heldout_bytes_per_token"])
            torch.cuda.empty_cache()
            known, evaluated, generation = continue_prompts(target, plan, work)
            torch.cuda.empty_cache()
            draft, drafting = train_draft(target, plan, work, known, evaluated, self.warm_draft)
        finally:
            for child in self.children.values():
                if child.poll() is None:
                    child.kill()
        figures |= worth | generation | drafting | {"seconds": elapsed()}
        write_target(target_folder, plan.target, target.weights, work / "tokenizer.json")
        write_draft(draft_folder, plan.draft, draft)
        write_cards(target_folder, draft_folder, plan, figures)
        write_prompts(target_folder.parent, plan, json.loads((work / "prompts.json").read_text()))
        (target_folder.parent / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        say("done")

    def claim_work(self) -> None:
        """Refuses a work folder that belongs to another plan."""
        self.work.mkdir(parents=True, exist_ok=True)
        mark, ours = self.work / "plan.json", json.dumps(self.plan.identity(), indent=1)
        if mark.exists() and mark.read_text() != ours:
            raise SystemExit(f"--work {self.work}: holds the results of another plan; choose an empty folder")
        mark.write_text(ours)

    def start_children(self) -> None:
        def start(name: str, module: str, *args: str) -> None:
            command = [sys.executable, "-m", f"scripts.train_demo.{module}", *args]
            self.children[name] = subprocess.Popen(command)

        if not (self.work / "data.json").exists():
            start("data", "data", str(self.work), self.plan.name)
        if self.cuda:
            for i in range(1, HELPERS + 1):
                start(f"kernels {i}", "warm", self.plan.name, "kernels", str(i))
            start("draft", "warm", self.plan.name, "draft")

    def wait(self, name: str) -> None:
        child = self.children.get(name)
        if child is not None and child.wait() != 0:
            raise SystemExit(
                f"the process '{name}' failed with status {child.returncode}; its message is above"
            )

    def compile(self) -> Target:
        """The untrained target; on a GPU its regions compile here while children compile the kernels."""
        plan = self.plan
        target = Target(plan.target, initial_target(plan.target, 0, self.device), compiled=self.cuda)
        if not self.cuda:
            return target
        kernels.prepare()
        for w in target.weights.values():
            w.requires_grad_()
        shape = (plan.target_batch, plan.target_length + 1)
        ids = torch.randint(plan.target.first_reserved, shape, device=self.device)
        target.loss(ids, kernels.surrogate_rule).backward()
        say("target: regions compiled")
        for i in range(1, HELPERS + 1):
            self.wait(f"kernels {i}")
        loss = target.loss(ids)
        loss.backward()
        say(f"target: first real step, loss {loss.item():.3f}")
        for w in target.weights.values():
            w.grad = None
        return target

    def warm_draft(self, draft: Draft) -> None:
        """On a GPU: the drafter's regions from the cache that a child has filled."""
        if self.cuda:
            self.wait("draft")
            draft_step(self.plan, draft)
            say("draft: regions compiled")


def set_caches(work: Path) -> None:
    """One Triton and one Inductor cache for all processes; Inductor would move Triton's otherwise."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(work / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(work / "inductor"))
