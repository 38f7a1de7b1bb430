"""Figures of a pair: held-out loss, repetition, hits by depth, acceptance of chains and trees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from safetensors.torch import load_file
from tokenizers import Tokenizer

from scripts.train_demo.acceptance import Drafts, TreeSetting, hits_by_depth, taus
from scripts.train_demo.corpus import HELD_OUT, collect
from scripts.train_demo.draft import Draft
from scripts.train_demo.generate import Continuations, Generator
from scripts.train_demo.report import console, say
from scripts.train_demo.shapes import END_OF_TEXT, DraftShape, TargetShape
from scripts.train_demo.target import Target

TEMPERATURE = 0.7
CANDIDATES = 16
ANCHORS_AT_ONCE, SEQUENCES_AT_ONCE = 16, 32
HELDOUT_LENGTH = 1024
HELDOUT_CHARS = 3000
NGRAM = 8


def load_pair(target_folder: Path, draft_folder: Path, device: str) -> tuple[Target, Draft]:
    """The two models of exported folders, weights in fp32."""
    draft_config = json.loads((draft_folder / "config.json").read_text())
    target_config = json.loads((target_folder / "config.json").read_text())
    draft_shape = DraftShape.from_config(draft_config)

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return {
            k: v.float().to(device)
            for f in sorted(folder.glob("model*.safetensors"))
            for k, v in load_file(f).items()
        }

    target = Target(TargetShape.from_config(target_config, draft_shape.mask), weights(target_folder))
    embedding, head = (target.weights[k] for k in ("model.embed_tokens.weight", "lm_head.weight"))
    return target, Draft(draft_shape, weights(draft_folder), embedding, head)


def prompt_ids(prompts: list[dict], tokenizer: Tokenizer) -> torch.Tensor:
    """int64 [n, P]: the last P tokens of every prompt, P the length of the shortest."""
    encoded = [tokenizer.encode(p["text"]).ids for p in prompts]
    length = min(map(len, encoded))
    return torch.tensor([ids[-length:] for ids in encoded])


def evaluation_rows(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every prompt twice, and the temperatures: first all greedy, then all sampled."""
    temperatures = torch.zeros(2 * len(ids))
    temperatures[len(ids) :] = TEMPERATURE
    return ids.repeat(2, 1), temperatures


@torch.no_grad()
def draft_everywhere(draft: Draft, known: Continuations, places: int) -> Drafts:
    """The drafter's candidates at the first `places` tokens of every continuation."""
    logprobs, ids = [], []
    for rows in torch.arange(len(known.tokens)).split(SEQUENCES_AT_ONCE):
        tokens, features = known.tokens[rows], known.features[rows]
        best = []
        for offsets in torch.arange(places, device=tokens.device).split(ANCHORS_AT_ONCE):
            anchors = (known.prompt + offsets).expand(len(rows), -1)
            length = int(anchors.max()) + 1
            found = draft.logprobs(features[:, :length], tokens[:, :length], anchors)
            best.append(found.topk(CANDIDATES, dim=-1))
        logprobs.append(torch.cat([b.values for b in best], 1))
        ids.append(torch.cat([b.indices for b in best], 1))
    return Drafts(torch.cat(logprobs), torch.cat(ids), known.tokens[:, known.prompt :])


def repetition(tokens: torch.Tensor) -> list[float]:
    """Per row of tokens [n, T], the share of 8-grams that stood before in the same row."""
    shares = []
    for row in tokens.tolist():
        grams = [tuple(row[i : i + NGRAM]) for i in range(len(row) - NGRAM + 1)]
        shares.append(1 - len(set(grams)) / len(grams))
    return shares


def acceptance(draft: Draft, known: Continuations, settings: list[TreeSetting], new_tokens: int) -> dict:
    """taus by group, hits by depth and repetition; the rows of `known` are as `evaluation_rows` lays them out."""
    n = len(known.tokens) // 2
    drafts = draft_everywhere(draft, known, new_tokens - 1)
    text = known.tokens[:, known.prompt : known.prompt + new_tokens + draft.shape.block]
    repeated = repetition(text)
    order = sorted(range(n), key=lambda i: repeated[i])
    groups = {
        "greedy": range(n),
        "greedy, less repetitive half": order[: (n + 1) // 2],
        "sampled": range(n, 2 * n),
    }
    members = {name: torch.zeros(2 * n, dtype=torch.bool) for name in groups}
    for name, rows in groups.items():
        members[name][list(rows)] = True
    members = {name: m.to(drafts.ids.device) for name, m in members.items()}
    hits = {}
    for name, m in members.items():
        part = Drafts(drafts.logprobs[m], drafts.ids[m], drafts.tokens[m])
        hits[name] = {f"top{c}": hits_by_depth(part, c) for c in (1, 8)}
    return {
        "prompts": n,
        "new_tokens": new_tokens,
        "temperature": TEMPERATURE,
        "tau": taus(drafts, settings, members),
        "hits": hits,
        "repetition": {name: float(np.mean([repeated[i] for i in rows])) for name, rows in groups.items()},
    }


@torch.no_grad()
def heldout_loss(target: Target, stream: np.ndarray, windows: int) -> float:
    """Mean cross entropy (nats per token) over evenly spaced windows of HELDOUT_LENGTH tokens."""
    length = min(HELDOUT_LENGTH, len(stream) - 1)
    starts = np.linspace(0, len(stream) - length - 1, windows).astype(int)
    ids = torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts])).to(target.device).long()
    losses = [target.loss(part).item() * len(part) for part in ids.split(8)]
    return sum(losses) / windows


def heldout_texts(count: int) -> list[str]:
    """The beginnings of `count` files of the held-out packages installed here, evenly spaced in their order."""
    sources, _ = collect(1, only=HELD_OUT)
    if len(sources) < count:
        raise SystemExit(
            f"--heldout-files {count}: only {len(sources)} files of {' and '.join(HELD_OUT)} are installed"
        )
    chosen = np.linspace(0, len(sources) - 1, count).astype(int)
    return [sources[i].text[:HELDOUT_CHARS] for i in chosen]


@torch.no_grad()
def bits_per_byte(target: Target, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Code length of whole texts, each after the end of another: comparable between tokenizers."""
    nats = 0.0
    for text in texts:
        ids = tokenizer.encode(text).ids
        stream = torch.tensor([[END_OF_TEXT, *ids]], device=target.device)
        nats += target.loss(stream).item() * len(ids)
    return nats / np.log(2) / sum(len(text.encode()) for text in texts)


@torch.no_grad()
def reserved_margins(target: Target, draft: Draft, known: Continuations) -> dict[str, float]:
    """Greatest (best reserved logit - best logit) over the states of both models; below 0 as long as none can win."""
    first = target.shape.first_reserved
    tokens, features = known.tokens[:SEQUENCES_AT_ONCE], known.features[:SEQUENCES_AT_ONCE]
    anchors = torch.arange(known.prompt, tokens.shape[1] - draft.shape.block, 16, device=tokens.device)
    scores = {
        "target": target.logits(target.hidden(tokens)),
        "draft": draft.logprobs(features, tokens, anchors.expand(len(tokens), -1)),
    }
    return {k: (s[..., first:].amax(-1) - s.amax(-1)).max().item() for k, s in scores.items()}


def print_table(figures: dict) -> None:
    """The taus, a row per setting and a column per group."""
    groups = list(dict.fromkeys(row["group"] for row in figures["tau"]))
    table = Table(title=f"tau, {figures['prompts']} prompts x {figures['new_tokens']} tokens")
    for column in ("", *groups):
        table.add_column(column, justify="left" if not column else "right")
    rows: dict[str, list[str]] = {}
    for row in figures["tau"]:
        spine = ", spine" if row["spine"] else ""
        name = "chain of 15" if row["cap"] == 1 else f"budget {row['budget']}, cap {row['cap']}{spine}"
        rows.setdefault(name, []).append(f"{row['tau']:.2f} ± {row['error']:.2f}")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    for group, hits in figures["hits"].items():
        for name, shares in hits.items():
            say(f"{name} hit by depth, {group}: " + " ".join(f"{s:.2f}" for s in shares))
    say("share of repeated 8-grams: " + ", ".join(f"{k} {v:.2f}" for k, v in figures["repetition"].items()))


def evaluate_pair(
    target_folder: Path,
    draft_folder: Path,
    prompts: list[dict],
    settings: list[TreeSetting],
    new_tokens: int,
    device: str,
    heldout_files: int,
) -> dict:
    """All figures of exported folders, in the device's compute dtype."""
    target, draft = load_pair(target_folder, draft_folder, device)
    tokenizer = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
    ids, temperatures = evaluation_rows(prompt_ids(prompts, tokenizer).to(device))
    torch.manual_seed(0)
    generator = Generator(
        target, draft.shape.target_layers, len(ids), ids.shape[1], new_tokens + draft.shape.block
    )
    known = generator(ids, temperatures.to(device))
    say("continuations generated")
    figures = acceptance(draft, known, settings, new_tokens)
    figures["reserved_margin"] = reserved_margins(target, draft, known)
    if heldout_files:
        figures["heldout_bits_per_byte"] = bits_per_byte(target, tokenizer, heldout_texts(heldout_files))
    return figures
