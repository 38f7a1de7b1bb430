"""What a step should cost: formulas fitted to measured steps of one chip, and a prediction for another.

    python -m benchmark.cost_model [--steps FILE] [--json FILE]

A step's time is modelled as

    max(flops / rate,  bytes / bandwidth + overlap x flops / rate) + launches x launch + serial x wait + all-reduces

with bytes, flops, launches and serial steps from `benchmark.step_cost`. Bandwidth and rate are measured
(docs/kernels.md). Three numbers are fitted by least squares on relative errors: the share of arithmetic that does not
hide behind memory, the price of a kernel, and that of a step which waits for the one before. Fitted and predicted
figures are printed as such.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from benchmark.step_cost import Cost, Draft, Target, chain, plain, tree
from benchmark.step_files import Step, StepFileError, read_steps
from benchmark.steps.shapes import DRAFT, TARGET

console = Console(width=130, highlight=False)
H200_STEPS = Path(__file__).with_name("results") / "h200_steps.jsonl"
# Dummy weights accept next to nothing, so a measured step committed one token a request; a drafter's one, several.
COMMITTED_MEASURED, COMMITTED_PREDICTED = 1, 6
LATENCIES = (10e-6, 30e-6)  # seconds of a small all-reduce over PCIe: assumed, a low and a high guess


@dataclass(frozen=True)
class Chip:
    """bandwidth: bytes/s; rate: dense bf16 FLOP/s; link: bytes/s to the other GPUs, one direction; source: of these."""

    name: str
    bandwidth: float
    rate: float
    memory_gb: int
    link: float
    source: str


# What a copy and a large product reach on an H200 (docs/kernels.md) of its datasheet's 4.8 TB/s and 989 TFLOP/s.
REACHED_BANDWIDTH, REACHED_RATE = 4.3 / 4.8, 790 / 989
H200 = Chip("NVIDIA H200", 4.3e12, 790e12, 141, 450e9, "measured: docs/kernels.md; link: datasheet")
RTX_PRO_6000 = Chip(
    "RTX PRO 6000 Blackwell",
    1.792e12 * REACHED_BANDWIDTH,
    500e12 * REACHED_RATE,
    96,
    64e9,
    "NVIDIA's datasheet of the Workstation Edition: 1,792 GB/s, PCIe 5.0 x16, 4,000 TOPS of sparse FP4, of which dense "
    "bf16 is an eighth; times what an H200 reaches of its own datasheet (0.90 and 0.80)",
)
# The first port of DDTree to a hybrid, on one RTX PRO 6000: published tokens/s, and its own estimates of the step.
PUBLISHED_PLAIN = 26
PUBLISHED = {15: dict(tok_s=173, step_ms=87), 32: dict(tok_s=92, step_ms=80), 64: dict(tok_s=64, step_ms=77)}


@dataclass(frozen=True)
class Prices:
    """Fitted. overlap: share of arithmetic time added to memory time; launch, wait: seconds; reached: share of the
    chip's rate that steps bound by arithmetic reach."""

    overlap: float
    launch: float
    wait: float
    reached: float


FITTED = len(fields(Prices))


def cost(kind: str, rows: int, requests: int, context: int, tp: int = 1, committed: int = 1) -> Cost:
    """Of one step at the 27B shape. kind: plain, chain or tree; rows: of one request."""
    target, draft = Target.from_config(TARGET), Draft.from_config(DRAFT)
    if kind == "plain":
        return plain(target, requests, context, tp)
    if kind == "chain":
        return chain(target, draft, requests, context, committed, tp)
    return tree(target, draft, rows - 1, requests, context, committed, tp)


def floor_s(c: Cost, chip: Chip) -> float:
    """The roofline: seconds that memory or arithmetic alone must take."""
    return max(c.bytes / chip.bandwidth, c.flops / chip.rate)


def seconds(c: Cost, chip: Chip, prices: Prices, tp: int = 1, latency: float = 0.0) -> float:
    """Modelled time. A ring all-reduce sends 2 (tp - 1) / tp of its bytes; latency: of one, in seconds."""
    arithmetic = c.flops / chip.rate
    products = max(arithmetic / prices.reached, c.bytes / chip.bandwidth + prices.overlap * arithmetic)
    reduce = latency + 2 * (tp - 1) / tp * c.reduced / chip.link if tp > 1 else 0.0
    return products + c.launches * prices.launch + c.serial * prices.wait + c.all_reduces * reduce


def fit(steps: list[Step], chip: Chip) -> Prices:
    """Least squares on relative errors, prices not below zero, shares not above one. Raises StepFileError."""
    if len(steps) < FITTED or len({s.kind for s in steps}) < 2:
        raise StepFileError(
            f"--steps: {len(steps)} points; {FITTED} prices need as many, of two kinds of step"
        )
    costs = [cost(s.kind, s.rows, s.requests, s.context, s.tp, COMMITTED_MEASURED) for s in steps]

    def prices(x) -> Prices:
        return Prices(float(x[0]), 1e-6 * float(x[1]), 1e-6 * float(x[2]), float(x[3]))

    def errors(x):
        pairs = zip(steps, costs, strict=True)
        return [1e3 * seconds(c, chip, prices(x), s.tp) / s.ms - 1 for s, c in pairs]

    bounds = ([0, 0, 0, 0.1], [1, 1e3, 1e3, 1])
    found = least_squares(
        errors, (0.4, 3, 4, 0.7), bounds=bounds, x_scale=(0.1, 1, 1, 0.1), xtol=1e-14, ftol=1e-14
    )
    return prices(found.x)


def modelled_ms(step: Step, chip: Chip, prices: Prices) -> float:
    c = cost(step.kind, step.rows, step.requests, step.context, step.tp, COMMITTED_MEASURED)
    return 1e3 * seconds(c, chip, prices, step.tp)


def residuals(steps: list[Step], chip: Chip) -> list[dict]:
    """Per point: its residual in the fit of all, and its error when the fit has not seen it."""
    prices, rows = fit(steps, chip), []
    for i, step in enumerate(steps):
        row = dict(step=str(step), measured_ms=step.ms, modelled_ms=modelled_ms(step, chip, prices))
        c = cost(step.kind, step.rows, step.requests, step.context, step.tp, COMMITTED_MEASURED)
        row |= dict(
            floor_ms=1e3 * floor_s(c, chip), gb=c.bytes / 1e9, tflop=c.flops / 1e12, launches=c.launches
        )
        row |= dict(serial=c.serial, residual=row["modelled_ms"] / step.ms - 1, unseen=None)
        others = steps[:i] + steps[i + 1 :]
        if len(others) >= FITTED:
            row["unseen"] = modelled_ms(step, chip, fit(others, chip)) / step.ms - 1
        rows.append(row)
    return rows


def predictions(
    chip: Chip, prices: Prices, context: int, tps=(1, 4, 8), budgets=(15, 31, 32, 64, 128)
) -> list[dict]:
    """Per method, one request: [low, high] modelled ms by tp, for the low and the high guess of an all-reduce."""
    rows = []
    for name, kind, n in [("plain", "plain", 1), *((f"tree, budget {b}", "tree", b + 1) for b in budgets)]:
        row = dict(name=name, rows=n, ms={})
        for tp in tps:
            c = cost(kind, n, 1, context, tp, COMMITTED_PREDICTED)
            row["ms"][tp] = [1e3 * seconds(c, chip, prices, tp, latency) for latency in LATENCIES]
        rows.append(row)
    return rows


def show_fit(steps: list[Step], chip: Chip, prices: Prices, rows: list[dict]) -> None:
    where = f"{steps[0].hardware}, context {steps[0].context}"
    table = Table(title=f"Fit: {len(steps)} measured steps, {where}; {FITTED} fitted prices")
    for column in (
        "step",
        "GB",
        "TFLOP",
        "kernels",
        "serial",
        "floor ms",
        "measured ms",
        "modelled ms",
        "residual",
        "unseen",
    ):
        table.add_column(column, justify="left" if column == "step" else "right")
    for r in rows:
        unseen = "" if r["unseen"] is None else f"{r['unseen']:+.1%}"
        cells = [f"{r['gb']:.1f}", f"{r['tflop']:.2f}", f"{r['launches']:.0f}", f"{r['serial']:.0f}"]
        cells += [
            f"{r['floor_ms']:.2f}",
            f"{r['measured_ms']:.2f}",
            f"{r['modelled_ms']:.2f}",
            f"{r['residual']:+.1%}",
        ]
        table.add_row(r["step"], *cells, unseen)
    console.print(table)
    console.print(
        f"overlap {prices.overlap:.2f} of arithmetic beside memory, {1e6 * prices.launch:.2f} us a kernel, "
        f"{1e6 * prices.wait:.2f} us a waiting step, {prices.reached:.0%} of the rate where arithmetic decides. "
        f"Bandwidth and rate: {chip.source}.\n"
        f"{len(steps)} points and {FITTED} prices leave {len(steps) - FITTED} degrees of freedom: `unseen` is the "
        "error at a point when it is left out of the fit. The form of the model was chosen with these points in view "
        "and kernels are estimated, not counted, so even that error flatters.\n"
    )


def show_prediction(chip: Chip, rows: list[dict], context: int) -> None:
    low, high = (f"{1e6 * x:.0f}" for x in LATENCIES)
    table = Table(title=f"PREDICTION, not measured: {chip.name}, one request, context {context}")
    for column in (
        "",
        "TP 1: ms",
        "TP 4: ms",
        "TP 8: ms",
        "tok/s per unit of tau, TP 1",
        "first port: ms (its estimate)",
        "tok/s",
    ):
        table.add_column(column, justify="right" if column else "left")
    for r in rows:
        budget = r["rows"] - 1
        known = PUBLISHED.get(budget, {})
        port = [str(known.get("step_ms", "")), str(known.get("tok_s", ""))]
        if r["name"] == "plain":
            port = ["", str(PUBLISHED_PLAIN)]
        ms = [f"{a:.1f}" if abs(a - b) < 0.05 else f"{a:.1f} - {b:.1f}" for a, b in r["ms"].values()]
        table.add_row(r["name"], *ms, f"{1e3 / r['ms'][1][0]:.1f}", *port)
    console.print(table)
    console.print(
        f"Chip: {chip.source}.\nKernels and waiting steps at the H200's prices; an all-reduce at {low} to {high} us "
        "(assumed) and PCIe's rate. Plain decoding is the only line that did the same work as a published one; "
        "tokens a second of a tree are the column times the tau that the traffic gives.\n"
        f"A rank holds 1/tp of the weights: TP 1 needs {2 * Target.from_config(TARGET).parameters / 1e9:.0f} GB of "
        f"{chip.memory_gb} GB for the target alone."
    )


def main(
    steps: Annotated[Path, typer.Option(help="a file of `benchmark.steps --json`")] = H200_STEPS,
    json_file: Annotated[Path | None, typer.Option("--json", help="fit, residuals and prediction")] = None,
) -> None:
    """Fits the H200's steps, prints residuals, and predicts the RTX PRO 6000's."""
    try:
        measured = read_steps(steps)
        prices = fit(measured, H200)
        rows = residuals(measured, H200)
    except StepFileError as e:
        console.print("error:", str(e), markup=False)
        raise typer.Exit(2) from None
    show_fit(measured, H200, prices, rows)
    predicted = predictions(RTX_PRO_6000, prices, measured[0].context)
    show_prediction(RTX_PRO_6000, predicted, measured[0].context)
    if json_file is not None:
        out = dict(prices=asdict(prices), fit=rows, prediction=predicted, chip=asdict(RTX_PRO_6000))
        json_file.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
