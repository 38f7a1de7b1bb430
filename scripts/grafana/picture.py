"""Draws the dashboard without Grafana: each panel's own queries, answered by a Prometheus that scraped real servers.

    python scripts/grafana/picture.py --prometheus http://127.0.0.1:9090 --minutes 20 --out docs/dashboard.png

Needs matplotlib (not a dependency of the project).
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated

import matplotlib
import requests
import typer

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).resolve().parent
STEP, WINDOW = (
    5,
    "30s",
)  # seconds between points; what Grafana would put for $__rate_interval at this scrape interval


def ask(prometheus: str, expr: str, end: float, minutes: float) -> list[dict]:
    """Series of one query: [{"metric": labels, "values": [[seconds, text], ...]}, ...]."""
    expr = expr.replace("$__rate_interval", WINDOW).replace("$instance", ".*")
    params = {"query": expr, "start": end - minutes * 60, "end": end, "step": STEP}
    answer = requests.get(prometheus + "/api/v1/query_range", params=params, timeout=30)
    answer.raise_for_status()
    return answer.json()["data"]["result"]


def legend(template: str, metric: dict[str, str]) -> str:
    for name, value in metric.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def draw(ax, panel: dict, prometheus: str, end: float, minutes: float) -> int:
    """Draws one panel; returns how many series have a point."""
    times = [end - minutes * 60 + i * STEP for i in range(int(minutes * 60 / STEP) + 1)]
    ago = [(x - end) / 60 for x in times]
    lines = []
    for target in panel["targets"]:
        for series in ask(prometheus, target["expr"], end, minutes):
            points = {float(x): float(y) for x, y in series["values"]}
            lines.append(
                (legend(target["legendFormat"], series["metric"]), [points.get(x, math.nan) for x in times])
            )
    if panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal":
        ax.stackplot(ago, [y for _, y in lines], labels=[name for name, _ in lines], alpha=0.8)
    else:
        for name, y in lines:
            ax.plot(ago, y, label=name, linewidth=1.3)
    if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
        ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    ax.set_title(panel["title"], fontsize=10, loc="left")
    ax.set_ylim(bottom=0)
    ax.set_xlim(-minutes, 0)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7, loc="lower left", ncol=4, frameon=False)
    return sum(any(map(math.isfinite, y)) for _, y in lines)


def main(
    prometheus: Annotated[str, typer.Option(help="its URL")] = "http://127.0.0.1:9090",
    minutes: Annotated[int, typer.Option(min=1, help="how far back")] = 20,
    end: Annotated[float | None, typer.Option(help="seconds since 1970; left out: now")] = None,
    out: Path = HERE.parents[1] / "docs/dashboard.png",
) -> None:
    """Draws every panel of ddtree.json; exits 1 where one has no data."""
    end = (time.time() if end is None else end) // STEP * STEP
    panels = json.loads((HERE / "ddtree.json").read_text())["panels"]
    rows = math.ceil(len(panels) / 3)
    figure, axes = plt.subplots(rows, 3, figsize=(16, 3.2 * rows), constrained_layout=True)
    empty = [
        p["title"]
        for ax, p in zip(axes.flat, panels, strict=False)
        if not draw(ax, p, prometheus, end, minutes)
    ]
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    figure.supxlabel("minutes", fontsize=9)
    figure.savefig(out, dpi=80)
    print(f"{out}: {len(panels)} panels" + (f"; without data: {', '.join(empty)}" if empty else ""))
    raise typer.Exit(1 if empty else 0)


if __name__ == "__main__":
    typer.run(main)
