"""The target's own continuations: what the drafter is trained and evaluated on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from scripts.train_demo.evaluate import evaluation_rows, prompt_ids, repetition
from scripts.train_demo.generate import Continuations, Generator
from scripts.train_demo.plan import Plan
from scripts.train_demo.report import elapsed, say
from scripts.train_demo.target import Target

LOOK = 64  # tokens searched for the beginning of a line


class TrainingPrompts:
    """Draws prompts that begin at a line of the training stream."""

    def __init__(self, stream: torch.Tensor, tokenizer: Tokenizer, length: int):
        self.stream, self.length, device = stream, length, stream.device
        ends_line = ["\n" in tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
        self.ends_line = torch.tensor(ends_line, device=device)
        self.random = torch.Generator(device).manual_seed(11)
        self.ahead = torch.arange(LOOK, device=device)
        self.window = torch.arange(length, device=device)

    def draw(self, rows: int) -> torch.Tensor:
        """int64 [rows, length]."""
        high, device = len(self.stream) - self.length - LOOK, self.stream.device
        starts = torch.randint(high, (rows, 1), generator=self.random, device=device)
        ends = self.ends_line[self.stream[starts + self.ahead].long()]
        starts = starts + ends.long().argmax(1, keepdim=True) + 1
        return self.stream[starts + self.window].long()


@torch.no_grad()
def continue_prompts(target: Target, plan: Plan, work: Path) -> tuple[Continuations, Continuations, dict]:
    """Continuations to train on, those of the evaluation prompts, and figures."""
    began, device = elapsed(), target.device
    generator = Generator(target, plan.draft.target_layers, plan.rows, plan.prompt_tokens, plan.continuation)
    generator.capture()
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    prompts = json.loads((work / "prompts.json").read_text())
    held, held_temperatures = (x.to(device) for x in evaluation_rows(prompt_ids(prompts, tokenizer)))
    stream = torch.from_numpy(np.load(work / "train.npy")).to(device)
    training = TrainingPrompts(stream, tokenizer, plan.prompt_tokens)
    temperatures = torch.zeros(plan.rows, device=device)
    temperatures[int(plan.rows * (1 - plan.sampled_share)) :] = plan.sampled_temperature

    kept, total = plan.rounds * plan.rows - len(held), plan.prompt_tokens + plan.continuation
    tokens = torch.empty(kept, total, dtype=torch.int16, device=device)
    width = generator.features.shape[-1]
    features = torch.empty(kept, total, width, dtype=target.dtype, device=device)
    torch.manual_seed(11)
    # The evaluation prompts take the first rows of the first round.
    mixed = temperatures.clone()
    mixed[: len(held)] = held_temperatures
    out = generator(torch.cat([held, training.draw(plan.rows)[len(held) :]]), mixed)
    known = Continuations(out.tokens[: len(held)].clone(), out.features[: len(held)].clone(), out.prompt)
    at = plan.rows - len(held)
    tokens[:at], features[:at] = out.tokens[len(held) :], out.features[len(held) :]
    for _ in range(1, plan.rounds):
        out = generator(training.draw(plan.rows), temperatures)
        tokens[at : at + plan.rows], features[at : at + plan.rows] = out.tokens, out.features
        at += plan.rows
    figures = {"generation_seconds": elapsed() - began}
    say(f"continuations: {kept} sequences")
    following = [tokenizer.encode(p["following"]).ids[: plan.new_tokens // 2] for p in prompts]
    figures["repetition_of_source"] = float(np.mean(repetition(torch.tensor(following))))
    figures["decode_agrees_with_forward"] = agreement(target, known, len(prompts))
    show_samples(known, tokenizer, (0, 1, len(prompts)))
    return Continuations(tokens, features, plan.prompt_tokens), known, figures


def agreement(target: Target, known: Continuations, rows: int) -> float:
    """Share of the first `rows` continuations' tokens that a whole forward would choose greedily too, among the ids
    that decoding may choose (training has not yet driven the reserved ones down in a short run)."""
    logits = target.logits(target.hidden(known.tokens[:rows]))[..., : target.shape.first_reserved]
    same = logits.argmax(-1)[:, known.prompt - 1 : -1] == known.tokens[:rows, known.prompt :]
    share = same.float().mean().item()
    say(f"decoding agrees with the whole forward at {share:.4f} of the greedy tokens")
    return share


def show_samples(known: Continuations, tokenizer: Tokenizer, rows: tuple[int, ...]) -> None:
    for row in rows:
        tokens = known.tokens[row].tolist()
        end = tokenizer.decode(tokens[known.prompt - 48 : known.prompt])
        say(f"sample, prompt's end: {end!r}\n{tokenizer.decode(tokens[known.prompt :][:120])}")
