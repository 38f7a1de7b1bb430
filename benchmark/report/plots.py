"""The figures. Colours are Okabe and Ito's, which colour-blind readers can tell apart; every kind of line also has its
own marker or dash, and a label at its end."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from benchmark.cost_model import COMMITTED_MEASURED, H200, Prices, cost, floor_s, seconds  # noqa: E402
from benchmark.report.series import Group, lines, one, survival, usual_cap  # noqa: E402
from benchmark.serving.grids import CHAIN, LEAKY, PLAIN, TREE  # noqa: E402
from benchmark.serving.records import Run  # noqa: E402
from benchmark.step_files import Step  # noqa: E402

COLOURS = {PLAIN: "#555555", CHAIN: "#007a5e", TREE: "#0072b2", LEAKY: "#d55e00"}
MARKERS = {PLAIN: "s", CHAIN: "D", TREE: "o", LEAKY: "X"}
MOST_ROWS = 512  # of a modelled step; beyond, arithmetic alone decides
STYLE = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
}


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    plt.close(figure)
    return path


def label_ends(ax: Axes, ends: list[tuple[float, float, str, str]], gap: float = 0.06) -> None:
    """Writes (x, y, text, colour) to the right of the axes at height y, moved apart where they would overlap.

    gap: least distance of two labels, as a share of the axis. Limits of the axes must be final.
    """
    low, high = ax.get_ylim()
    places: list[float] = []
    ordered = sorted(ends, key=lambda e: e[1])
    for _, y, _, _ in ordered:
        place = (y - low) / (high - low)
        places.append(max(place, places[-1] + gap) if places else place)
    over = max(0.0, places[-1] - 1.0) if places else 0.0
    for i in range(len(places) - 1, -1, -1):  # the topmost must fit; those below give way
        ceiling = 1.0 if i == len(places) - 1 else places[i + 1] - gap
        places[i] = min(places[i], ceiling) if over else places[i]
    for place, (x, y, text, colour) in zip(places, ordered, strict=True):
        ax.annotate(
            text,
            (x, y),
            xytext=(1.02, place),
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops=dict(arrowstyle="-", color=colour, linewidth=0.6, alpha=0.5, shrinkA=0, shrinkB=3),
        )


def budget_ticks(ax: Axes, values: list[int]) -> None:
    """A logarithmic axis with a tick at each value, but for those too near the tick before to be read (16 after 15)."""
    ticks: list[int] = []
    for value in values:
        if not ticks or value > 1.2 * ticks[-1]:
            ticks.append(value)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, map(str, ticks))
    ax.minorticks_off()
    ax.set_xlim(values[0] / 1.12, values[-1] * 1.12)


def speed(group: Group, temperature: float) -> Figure:
    """Tokens per second against the budget; one panel per concurrency, two beside each other."""
    found = group.concurrencies(temperature)
    high = (len(found) + 1) // 2
    wide = min(2, len(found))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(high, wide, figsize=(1.6 + 4.6 * wide, 0.4 + 3.4 * high), squeeze=False)
        for ax, concurrency in zip(axes.flat, found, strict=False):
            _budget_panel(ax, group.at(temperature, concurrency), "tok_s")
            ax.set_title("one request" if concurrency == 1 else f"{concurrency} requests at a time")
            ax.set_xlabel("budget: draft nodes per step")
            ax.set_ylabel("tokens per second")
        for ax in axes.flat[len(found) :]:
            ax.axis("off")
    return figure


def tau(group: Group) -> Figure:
    """Tokens per step against the budget at the lowest concurrency; one panel per temperature."""
    wide = len(group.temperatures)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, wide, figsize=(1.6 + 4.6 * wide, 3.8), squeeze=False)
        for ax, temperature in zip(axes[0], group.temperatures, strict=True):
            _budget_panel(ax, group.at(temperature, group.concurrencies(temperature)[0]), "tau")
            ax.set_title(how(temperature))
            ax.set_xlabel("budget: draft nodes per step")
            ax.set_ylabel("tau: tokens per step")
    return figure


def how(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"sampled, T = {temperature:g}"


def _budget_panel(ax: Axes, runs: list[Run], field: str) -> None:
    budgets = sorted({r.budget for r in runs if r.method in (TREE, LEAKY)})
    ax.set_ylim(0, 1.12 * max(getattr(r, field) for r in runs))
    if budgets:
        budget_ticks(ax, budgets)
    ends = []
    for method, name, dash in ((PLAIN, "plain", (0, (1, 2))), (CHAIN, "chain", (0, (5, 2)))):
        if (run := one(runs, method)) is not None:
            value = getattr(run, field)
            ax.axhline(value, color=COLOURS[method], linewidth=1.6, linestyle=dash)
            ends.append((ax.get_xlim()[1], value, f"{name} {_short(value)}", COLOURS[method]))
    found = lines(runs)
    for (method, cap), rows in found.items():
        main = cap == usual_cap(rows[0].method, runs)
        style = dict(markersize=6, linewidth=2) if main else dict(markersize=4, linewidth=1, alpha=0.55)
        x, y = [r.budget for r in rows], [getattr(r, field) for r in rows]
        ax.plot(x, y, color=COLOURS[method], marker=MARKERS[method], **style)
        name = f"{'exact' if method == TREE else 'leaky'} {_short(y[-1])}" if main else f"cap {cap}"
        ends.append((x[-1], y[-1], name, COLOURS[method]))
    label_ends(ax, ends, gap=0.075)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.2f}"


def by_depth(group: Group) -> Figure:
    """Share of steps that accepted at least d drafts; one panel per temperature, at the lowest concurrency."""
    wide = len(group.temperatures)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, wide, figsize=(1.2 + 4.9 * wide, 4.0), squeeze=False, sharey=True)
        for ax, temperature in zip(axes[0], group.temperatures, strict=True):
            runs = [r for r in group.at(temperature, group.concurrencies(temperature)[0]) if any(r.histogram)]
            _depth_panel(ax, runs)
            ax.set_title(how(temperature))
            ax.set_xlabel("depth: at least so many drafts accepted")
        axes[0][0].set_ylabel("share of steps")
    return figure


def _depth_panel(ax: Axes, runs: list[Run]) -> None:
    """The chain, and the smallest, the middle and the largest budget of either kind of tree."""
    ax.set_ylim(0, 1)
    ax.set_xlim(0.7, 15.3)
    ax.set_xticks(range(1, 16, 2))
    ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    for method, name in ((TREE, "exact, budget"), (CHAIN, "chain of"), (LEAKY, "leaky, budget")):
        rows = sorted((r for r in runs if r.method == method), key=lambda r: r.budget)
        rows = [r for r in rows if r.cap == usual_cap(method, runs)]
        if len(rows) > 3:
            rows = [rows[0], rows[len(rows) // 2], rows[-1]]
        for i, r in reversed(list(enumerate(rows))):
            shares = survival(r.histogram)
            ax.plot(
                range(1, len(shares) + 1),
                shares,
                linestyle="--" if method == CHAIN else "-",
                color=COLOURS[method],
                marker=MARKERS[method],
                markersize=4,
                alpha=1.0 - 0.3 * (len(rows) - 1 - i),
                label=f"{name} {r.budget}",
            )
    ax.legend(frameon=False, fontsize=9, loc="upper right")


def served_steps(group: Group) -> Figure:
    """Milliseconds per step against rows of a request, as served; one line per concurrency, greedy."""
    temperature = group.temperatures[0]
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(7.4, 4.0))
        ends = []
        for i, concurrency in enumerate(group.concurrencies(temperature)):
            runs = group.at(temperature, concurrency)
            rows = sorted(
                (r for r in runs if r.method in (TREE, PLAIN) and r.cap in (None, 8)), key=lambda r: r.rows
            )
            alpha = 1.0 if i == 0 else 0.55
            x, y = [r.rows for r in rows], [r.step_ms for r in rows]
            ax.plot(x, y, color=COLOURS[TREE], alpha=alpha, linewidth=2)
            for r in rows:
                ax.plot(
                    r.rows, r.step_ms, MARKERS[r.method], color=COLOURS[r.method], alpha=alpha, markersize=7
                )
            streams = "one request" if concurrency == 1 else f"{concurrency} at a time"
            ends.append((x[-1], y[-1], f"{streams}: {y[-1]:.0f} ms", COLOURS[TREE]))
        budget_ticks(ax, sorted({r.rows for r in group.runs if r.method in (TREE, PLAIN)}))
        ax.set_ylim(bottom=0)
        ax.set_xlabel("rows of one request in a step (1: plain decoding)")
        ax.set_title("milliseconds per step, as served")
        label_ends(ax, ends)
    return figure


def roofline(steps: list[Step], prices: Prices) -> Figure:
    """Measured steps beside the modelled time and the roofline; one column per number of requests."""
    columns = sorted({s.requests for s in steps})
    context, tp = steps[0].context, steps[0].tp
    with plt.rc_context(STYLE):
        wide = len(columns)
        figure, axes = plt.subplots(1, wide, figsize=(1.6 + 4.9 * wide, 4.2), squeeze=False, sharey=True)
        top, labels = 0.0, []
        for ax, requests in zip(axes[0], columns, strict=True):
            rows = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n * requests <= MOST_ROWS]
            costs = [cost("tree", n, requests, context, tp, COMMITTED_MEASURED) for n in rows]
            floor = [1e3 * floor_s(c, H200) for c in costs]
            model = [1e3 * seconds(c, H200, prices, tp) for c in costs]
            ax.fill_between(rows, floor, color="#000000", alpha=0.06, linewidth=0)
            ax.plot(rows, floor, color="#888888", linewidth=1.2)
            ax.plot(rows, model, color=COLOURS[TREE], linestyle=(0, (4, 2)), linewidth=1.6)
            ends = [(rows[-1], floor[-1], "roofline (modelled)", "#666666")]
            ends.append((rows[-1], model[-1], "tree (modelled)", COLOURS[TREE]))
            labels.append((ax, ends))
            for s in (s for s in steps if s.requests == requests):
                _measured_point(ax, s)
            top = max(top, *model, *(s.ms for s in steps))
            budget_ticks(ax, rows)
            ax.set_title("one request" if requests == 1 else f"{requests} requests")
            ax.set_xlabel("rows of one request in a step")
        axes[0][0].set_ylabel("milliseconds per step")
        axes[0][0].set_ylim(0, 1.08 * top)
        for ax, ends in labels:
            label_ends(ax, ends)
    return figure


def _measured_point(ax: Axes, step: Step) -> None:
    ax.plot(step.rows, step.ms, MARKERS[step.kind], color=COLOURS[step.kind], markersize=8, zorder=3)
    ax.annotate(
        f"{step.kind} {step.ms:.1f}",
        (step.rows, step.ms),
        xytext=(3 if step.rows == 1 else 0, 9 if step.kind == CHAIN else -19),
        textcoords="offset points",
        ha="left" if step.rows == 1 else "center",
        fontsize=9,
        color=COLOURS[step.kind],
        bbox=dict(facecolor="white", edgecolor="none", alpha=0.75, pad=1),
        zorder=4,
    )
