"""The page's contents: figures with captions, tables as text, and sentences made of the runs themselves."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import jinja2

from benchmark import cost_model
from benchmark.report import plots
from benchmark.report.series import BENCH, Group, label, losses, one
from benchmark.serving.grids import CHAIN, LEAKY, PLAIN, TREE
from benchmark.serving.records import Run
from benchmark.step_files import Step

HERE = Path(__file__).resolve().parent


class Pictures:
    """Writes figures beside the page and gives their bytes for the page itself."""

    def __init__(self, out: Path):
        self.out, self.paths = out, []

    def __call__(self, name: str, figure) -> str:
        path = plots.save(figure, self.out.with_name(f"{self.out.stem}-{name}.png"))
        self.paths.append(path)
        return base64.b64encode(path.read_bytes()).decode()


def render(groups: list[Group], steps: list[Step], command: str, pictures: Pictures) -> str:
    """The page as one HTML text that needs no other file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    prices = cost_model.fit(steps, cost_model.H200)
    parts = [group_part(g, i, pictures) for i, g in enumerate(groups, 1)]
    commands = [
        "python -m benchmark.serving.sweep --grid quick|greedy|full|cpu|smoke --out RUNS.jsonl",
        command,
        "python -m benchmark.steps --profile --json STEPS.jsonl       # step times, needs a GPU",
        "python -m benchmark.cost_model --steps STEPS.jsonl           # fit, residuals, prediction",
    ]
    return environment.get_template("page.html").render(
        title="DDTREE: speed and acceptance",
        subtitle="Speculative decoding of hybrid language models with draft trees, in SGLang: what was measured, on "
        "what, and what is only modelled.",
        groups=parts,
        steps=steps_part(steps, prices, pictures),
        prediction=prediction_part(steps, prices),
        commands=commands,
    )


def group_part(group: Group, number: int, pictures: Pictures) -> dict:
    def figure(name: str, title: str, drawn, caption: str) -> dict:
        return dict(title=title, data=pictures(f"{number}-{name}", drawn), caption=caption)

    key = "Blue: exact trees. Orange: the same trees with leaky branches. Dashed green: the chain. Dotted grey: plain "
    warning = busy(group)
    timed = [] if warning else group.temperatures
    figures = [
        figure(
            f"speed-t{t:g}",
            f"Tokens per second against the budget, {plots.how(t)}",
            plots.speed(group, t),
            key + "decoding. Figures at the right are the last point of a line.",
        )
        for t in timed
    ]
    figures.append(
        figure("tau", "Tokens per step against the budget", plots.tau(group), key + "decoding, which has 1.")
    )
    figures.append(
        figure(
            "depth",
            "Acceptance by depth",
            plots.by_depth(group),
            "Share of verify steps in which at least so many drafts were accepted. A curve's values add up to the mean "
            "number of accepted drafts.",
        )
    )
    if not warning:
        figures.append(
            figure(
                "steps",
                "What rows cost here",
                plots.served_steps(group),
                "Greedy; time between a request's first and last token, over its steps. Square: plain decoding.",
            )
        )
    return dict(
        name=group.name,
        cards=cards(group),
        busy=warning,
        figures=figures,
        losses=["Not to be said from these runs: times are needed."] if warning else losses(group),
        rows=[dict(kind=kind(r), name=label(r), cells=cells(r, group)) for r in in_order(group)],
        agreement=agreement(group),
        facts=facts(group),
    )


def kind(run: Run) -> str:
    return {TREE: "exact", LEAKY: "leaky"}.get(run.method, run.method)


def in_order(group: Group) -> list[Run]:
    order = (PLAIN, CHAIN, TREE, LEAKY)
    return sorted(
        group.runs,
        key=lambda r: (
            r.temperature,
            r.concurrency,
            r.client,
            order.index(r.method),
            r.budget or 0,
            r.cap or 0,
        ),
    )


def cells(r: Run, group: Group) -> list[str]:
    plain = one(group.at(r.temperature, r.concurrency, r.client), PLAIN)
    ratio = f"{r.tok_s / plain.tok_s:.2f}" if plain is not None and not busy(group) else ""
    memory = r.memory.get("gpu_gib", r.memory.get("resident_gib", 0.0))
    return [
        *(f"{r.temperature:g}", str(r.concurrency), r.client, f"{r.tok_s:.1f}", ratio),
        *(f"{r.tau:.2f}", f"{r.tau_responses:.2f}", f"{r.step_ms:.1f}"),
        *(f"{r.itl_ms['median']:.1f}", f"{r.itl_ms['p99']:.1f}", f"{r.ttft_ms:.0f}", f"{memory:.1f}"),
    ]


def cards(group: Group) -> list[dict]:
    """The best tree at the first traffic of the grid beside plain decoding, the chain and the leaky tree.

    Best by tokens per second; by tau alone where the machine's other work makes times worthless.
    """
    temperature = group.temperatures[0]
    runs = group.at(temperature, group.concurrencies(temperature)[0], BENCH)
    trees = [r for r in runs if r.method == TREE]
    if not trees:
        return []
    timed = busy(group) is None
    best = max(trees, key=lambda r: r.tok_s if timed else r.tau)
    name = f"exact tree, budget {best.budget}, cap {best.cap}"
    found = [dict(value=f"tau {best.tau:.2f}", text=f"tokens per step of the {name}")]
    if timed:
        found.insert(0, dict(value=f"{best.tok_s:.0f} tok/s", text=f"of the fastest {name}"))
    for method, other_name in ((PLAIN, "plain decoding"), (CHAIN, "the chain")):
        if (other := one(runs, method)) is None:
            continue
        if timed:
            found.append(
                dict(value=f"{best.tok_s / other.tok_s:.2f} x", text=f"tokens per second of {other_name}")
            )
        elif method == CHAIN:
            found.append(dict(value=f"{other.tau:.2f}", text=f"tau of {other_name}"))
    twin = next((r for r in runs if r.method == LEAKY and r.budget == best.budget), None)
    if twin is not None:
        found.append(dict(value=f"{twin.tau:.2f}", text="tau of the same tree with leaky branches"))
    return found


def busy(group: Group) -> str | None:
    """A warning where runs shared their cores with other work."""
    if "no GPU" not in group.hardware:
        return None
    cores = int(re.search(r"(\d+) CPU cores", group.hardware)[1])
    loads = [r.load_average for r in group.runs]
    if max(loads) <= cores + 1:  # the server's threads, and the client that waits for them
        return None
    return (
        f"This machine had other work: {min(loads):.1f} to {max(loads):.1f} processes wanted one of its {cores} cores "
        "when these runs were timed. Their tokens per second and milliseconds are listed but not drawn or compared; "
        "tau does not depend on it."
    )


def agreement(group: Group) -> str:
    wrong = [r for r in group.runs if not r.agree]
    if not wrong:
        return (
            f"In all {len(group.runs)} runs the responses' own figures (requests, tokens, steps, accepted drafts) "
            "equal what /metrics counted."
        )
    return f"/metrics and the responses disagree in {len(wrong)} of {len(group.runs)} runs: " + "; ".join(
        f"{label(r)}, T {r.temperature:g}, {r.concurrency} at a time" for r in wrong
    )


def facts(group: Group) -> list[tuple[str, str]]:
    first = group.runs[0]
    commits = sorted({r.commit for r in group.runs})
    sizes = sorted({(r.requests, r.tokens, r.repeats) for r in group.runs})
    loads = "; ".join(f"{n} requests of {t} tokens, {k} repetition{'s' * (k > 1)}" for n, t, k in sizes)
    days = sorted(r.when[:10] for r in group.runs)
    return [
        ("hardware", group.hardware + (f", tensor parallel over {group.tp}" if group.tp > 1 else "")),
        ("models", f"{first.target}, {first.draft}"),
        ("load", f"{loads}; prompts from {', '.join(sorted({r.prompts for r in group.runs}))}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in first.versions.items())),
        ("commit", ", ".join(commits)),
        ("date", days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"),
        (
            "server start",
            f"{min(r.start_s for r in group.runs):.0f} to {max(r.start_s for r in group.runs):.0f} s",
        ),
    ]


def steps_part(steps: list[Step], prices: cost_model.Prices, pictures: Pictures) -> dict:
    rows = []
    for r in cost_model.residuals(steps, cost_model.H200):
        unseen = "" if r["unseen"] is None else f"{r['unseen']:+.1%}"
        ms = [f"{r[k]:.2f}" for k in ("measured_ms", "modelled_ms")]
        rows.append([r["step"], *ms, f"{r['residual']:+.1%}", unseen, f"{r['floor_ms']:.2f}"])
    return dict(
        data=pictures("roofline", plots.roofline(steps, prices)),
        rows=rows,
        text=f"{steps[0].hardware}, Qwen3.6-27B shape with dummy weights, bf16, context {steps[0].context}. Four "
        f"prices are fitted to {len(steps)} points, so the fit proves little by itself; “left out of the fit” "
        "is the error at a point that the fit has not seen. The model's form was chosen with these points in view, so "
        "even that error flatters. Trees wider than those measured are extrapolated.",
        caption=f"Grey: below this no step can be, by memory ({cost_model.H200.bandwidth / 1e12:.1f} TB/s) or "
        f"arithmetic ({cost_model.H200.rate / 1e12:.0f} TFLOP/s). Dashed: the model. Markers: measured.",
    )


def prediction_part(steps: list[Step], prices: cost_model.Prices) -> dict:
    chip, rows = cost_model.RTX_PRO_6000, []
    low, high = (1e6 * x for x in cost_model.LATENCIES)
    for r in cost_model.predictions(chip, prices, steps[0].context):
        known = cost_model.PUBLISHED.get(r["rows"] - 1, {})
        tok_s = cost_model.PUBLISHED_PLAIN if r["name"] == "plain" else known.get("tok_s", "")
        ms = [f"{a:.1f}" if b - a < 0.05 else f"{a:.1f} to {b:.1f}" for a, b in r["ms"].values()]
        name = "plain decoding" if r["name"] == "plain" else r["name"]
        rows.append([name, *ms, tok_s, known.get("step_ms", "")])
    text = (
        f"The same formulas with this chip's figures ({chip.source}); an all-reduce is assumed to take {low:.0f} to "
        f"{high:.0f} microseconds over PCIe. The first port's figures are those it published for one card; only plain "
        "decoding did the same work."
    )
    return dict(chip=chip.name, rows=rows, text=text)
