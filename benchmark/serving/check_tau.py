"""Does a server accept as much as the recipe's evaluation says? The demo pair, served and offline, on the same prompts.

    .venv/bin/python benchmark/serving/check_tau.py [--count 16] [--json FILE]

Serves the first prompts of models/heldout_prompts.json greedily with `sglang.Engine` on the CPU, in fp32, once per
budget; then steps offline through the target's own continuations of those prompts, in fp32 as well. tau is
(tokens - 1) / steps over all prompts: the first token comes from prefill, and the last step is cut at the length.
The exit status is 1 if any budget's two taus differ by more than 3 %.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# Engines are forked (see sglang_ddtree/cpu/patches.py): nothing parallel may run in this process before they have.
os.environ.setdefault("SGLANG_DDTREE_FORK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support.engines import DRAFT, TARGET, engine, greedy, tau  # noqa: E402

BUDGETS, CAP = (15, 31, 64), 8
TOGETHER = 4
ALLOWED = 0.03


def serve(prompts: list[str], budget: int, new_tokens: int) -> tuple[float, list[list[int]]]:
    """tau of a served engine and its tokens, `TOGETHER` requests at a time."""
    outputs = []
    # Without bigram factors, of which the recipe's evaluation knows nothing.
    with engine(budget, CAP, disable_radix_cache=True, speculative_ddtree_markov="off") as running:
        for i in range(0, len(prompts), TOGETHER):
            outputs += running.generate(prompts[i : i + TOGETHER], greedy(new_tokens))
    return tau(outputs, new_tokens), [o["output_ids"] for o in outputs]


def offline(prompts: list[dict], new_tokens: int) -> tuple[list[float], list[list[int]]]:
    """The recipe's tau at each budget, cut as a server cuts it, and the continuations it stepped through."""
    import torch
    from tokenizers import Tokenizer

    from scripts.train_demo.acceptance import TreeSetting, taus
    from scripts.train_demo.evaluate import draft_everywhere, load_pair, prompt_ids
    from scripts.train_demo.generate import Generator

    target, draft = load_pair(Path(TARGET), Path(DRAFT), "cpu")
    ids = prompt_ids(prompts, Tokenizer.from_file(f"{TARGET}/tokenizer.json"))
    length = new_tokens + draft.shape.block
    generator = Generator(target, draft.shape.target_layers, len(ids), ids.shape[1], length)
    known = generator(ids, torch.zeros(len(ids)))
    drafts = draft_everywhere(draft, known, new_tokens - 1)
    everyone = {"greedy": torch.ones(len(ids), dtype=torch.bool)}
    rows = taus(drafts, [TreeSetting(b, CAP) for b in BUDGETS], everyone)
    return [row["served"] for row in rows], drafts.tokens[:, :new_tokens].tolist()


def main(
    count: Annotated[int, typer.Option(min=1, max=64, help="so many of the 64 prompts")] = 16,
    json_file: Annotated[Path | None, typer.Option("--json", help="the figures")] = None,
):
    """Compares the two taus at each budget (about three minutes for 16 prompts on two cores)."""
    saved = json.loads((ROOT / "models/heldout_prompts.json").read_text())
    prompts, new_tokens = saved["prompts"][:count], saved["new_tokens"]
    console, started = Console(width=100), time.perf_counter()
    served = []
    for budget in BUDGETS:
        served.append(serve([p["text"] for p in prompts], budget, new_tokens))
        console.print(f"budget {budget} served after {time.perf_counter() - started:.0f} s")
    expected, texts = offline(prompts, new_tokens)
    table = Table(title=f"tau, {count} prompts x {new_tokens} tokens, cap {CAP}")
    for column in ("budget", "served", "offline", "difference", "texts equal"):
        table.add_column(column, justify="right")
    rows = []
    for budget, (seen, tokens), wanted in zip(BUDGETS, served, expected, strict=True):
        equal = sum(a == b for a, b in zip(tokens, texts, strict=True))
        row = dict(
            budget=budget, served=seen, offline=wanted, difference=seen / wanted - 1, equal=equal, count=count
        )
        rows.append(row)
        cells = (
            str(budget),
            f"{seen:.3f}",
            f"{wanted:.3f}",
            f"{row['difference']:+.2%}",
            f"{equal} / {count}",
        )
        table.add_row(*cells)
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")
    apart = [r["budget"] for r in rows if abs(r["difference"]) > ALLOWED]
    if apart:
        console.print(
            f"served and offline differ by more than {ALLOWED:.0%} at budget {', '.join(map(str, apart))}"
        )
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
