"""The two model cards: templates in `cards/`, filled in with the recipe's figures."""

from __future__ import annotations

import textwrap
from pathlib import Path

from scripts.train_demo.acceptance import BUDGETS, CAPS
from scripts.train_demo.corpus import HELD_OUT
from scripts.train_demo.plan import Plan

TEMPLATES = Path(__file__).parent / "cards"
GROUPS = ("greedy", "greedy, less repetitive half", "sampled")
NAMED_FROM_MB = 0.5


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def taus(part: dict) -> dict[tuple, float]:
    """tau by (budget, cap, spine, group)."""
    return {(r["budget"], r["cap"], r["spine"], r["group"]): r["tau"] for r in part["tau"]}


def title(group: str, temperature: float) -> str:
    return f"T = {temperature}" if group == "sampled" else group


def acceptance_tables(figures: dict) -> str:
    """A table per group: the chain, then every cap with and without spine, over the budgets."""
    found, parts = taus(figures), []
    for group in GROUPS:
        name = title(group, figures["temperature"])
        chain = f"**{name}**, chain of 15: {found[15, 1, False, group]:.2f}"
        rows = [
            [f"cap {cap}{', spine' if spine else ''}"]
            + [f"{found[budget, cap, spine, group]:.2f}" for budget in BUDGETS]
            for spine in (False, True)
            for cap in CAPS
        ]
        parts.append(f"{chain}\n\n" + table(["budget", *map(str, BUDGETS)], rows))
    return "\n\n".join(parts)


def hits_table(figures: dict) -> str:
    depths = range(1, len(figures["hits"]["greedy"]["top1"]) + 1)
    rows = [
        [f"{title(group, figures['temperature'])}, top {best}"]
        + [f"{share:.2f}" for share in figures["hits"][group][f"top{best}"]]
        for group in GROUPS
        for best in (1, 8)
    ]
    return table(["depth", *map(str, depths)], rows)


def qualities_table(figures: dict) -> str:
    """Chain and budgets 15, 31, 64 of every quality: greedy, less repetitive half, sampled."""
    settings = {"chain of 15": (15, 1), "budget 15": (15, 8), "budget 31": (31, 8), "budget 64": (64, 8)}
    rows = []
    for quality, part in [*figures["qualities"].items(), ("1", {**figures, **figures["draft"]})]:
        found = taus(part)
        cells = [" / ".join(f"{found[b, c, False, g]:.2f}" for g in GROUPS) for b, c in settings.values()]
        rows.append([f"{float(quality):.0%}", f"{part['steps']:,}", f"{part['loss']:.3f}", *cells])
    groups = " / ".join(("greedy", "less repetitive", title("sampled", figures["temperature"])))
    return f"Cells: {groups}.\n\n" + table(["training", "steps", "loss", *settings], rows)


def fill(template: str, **values: object) -> str:
    return (TEMPLATES / template).read_text().format(**values)


def target_card(plan: Plan, figures: dict) -> str:
    data = figures["data"]
    packages = [
        f"{top} ({p['licence']})"
        for top, p in data["packages"].items()
        if top not in HELD_OUT and p["mb"] >= NAMED_FROM_MB
    ]
    return fill(
        "demo-target.md",
        **{k: v for k, v in figures.items() if k != "plan"},
        shape=plan.target,
        plan=plan,
        parameters=figures["target_parameters"] / 1e6,
        train_tokens=data["train_tokens"] / 1e6,
        heldout_tokens=data["heldout_tokens"] / 1e6,
        trained_tokens=figures["target"]["tokens"] / 1e6,
        held_out=" and ".join(HELD_OUT),
        last_id=plan.target.vocab - 1,
        margin=-figures["reserved_margin"]["target"],
        packages=textwrap.fill(", ".join(packages) + ".", 120),
    )


def draft_card(plan: Plan, figures: dict) -> str:
    repeated = figures["repetition"]
    errors = {
        r["group"]: r["error"]
        for r in figures["tau"]
        if (r["budget"], r["cap"], r["spine"]) == (64, 8, False)
    }
    return fill(
        "demo-draft.md",
        **{k: v for k, v in figures.items() if k not in ("plan", "hits", "qualities")},
        shape=plan.draft,
        plan=plan,
        parameters=figures["draft_parameters"] / 1e6,
        target_layers=", ".join(map(str, plan.draft.target_layers)),
        sequences=plan.rounds * plan.rows - 2 * plan.prompts,
        margin=-figures["reserved_margin"]["draft"],
        less_repeated=repeated["greedy, less repetitive half"],
        repeated=repeated["greedy"],
        sampled_repeated=repeated["sampled"],
        error_greedy=errors["greedy"],
        error_sampled=errors["sampled"],
        tables=acceptance_tables(figures),
        hits=hits_table(figures),
        qualities=qualities_table(figures),
    )


def write_cards(target_folder: Path, draft_folder: Path, plan: Plan, figures: dict) -> None:
    (target_folder / "README.md").write_text(target_card(plan, figures))
    (draft_folder / "README.md").write_text(draft_card(plan, figures))
