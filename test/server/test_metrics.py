"""Acceptance as /metrics, /server_info, each response and SGLang's own load tool report it: one and the same."""

from __future__ import annotations

import json
import re

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from support.bench import bench_serving, samples
from support.engines import ROOT
from support.prompts import PROMPTS
from support.servers import Server

BUDGET, CAP, BLOCK = 12, 4, 16


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = (
        "--enable-metrics",
        "--speculative-ddtree-budget",
        str(BUDGET),
        "--speculative-ddtree-topk-cap",
        str(CAP),
    )
    running = Server(tmp_path_factory.mktemp("metrics") / "log", *flags)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.end()


def generate(server: Server, prompts: list[str], tokens: int = 64) -> list[dict]:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"text": prompts, "sampling_params": params}
    return [a["meta_info"] for a in requests.post(server.base + "/generate", json=body, timeout=120).json()]


def test_metrics_are_the_sum_of_the_responses(server):
    generate(server, PROMPTS[:1], 4)
    before = samples(server.base)
    metas = generate(server, PROMPTS[:6])
    after = samples(server.base)
    grown = {k: v - before.get(k, 0) for k, v in after.items()}
    steps, accepted = (sum(m[k] for m in metas) for k in ("spec_verify_ct", "spec_num_correct_drafts"))
    assert grown["sglang_ddtree_accepted_drafts_count"] == steps
    assert grown["sglang_ddtree_accepted_drafts_sum"] == accepted
    assert grown["sglang_ddtree_tree_rows_total"] == steps * (BUDGET + 1)
    assert steps / 6 <= grown["sglang_ddtree_verify_forwards_total"] < steps
    histogram = [0] * BLOCK
    for meta in metas:
        for i, n in enumerate(meta["spec_accept_histogram"]):
            histogram[i] += n
    for i in range(BLOCK):
        assert grown[f"sglang_ddtree_accepted_drafts_bucket|{float(i)}"] == sum(histogram[: i + 1])
    assert (after["sglang_ddtree_budget"], after["sglang_ddtree_topk_cap"]) == (BUDGET, CAP)


def test_a_response_tells_what_was_proposed_and_accepted(server):
    meta = generate(server, PROMPTS[:1])[0]
    steps, histogram = meta["spec_verify_ct"], meta["spec_accept_histogram"]
    assert sum(histogram) == steps
    assert sum(i * n for i, n in enumerate(histogram)) == meta["spec_num_correct_drafts"]
    assert meta["spec_num_proposed_drafts"] == steps * BUDGET
    assert meta["spec_accept_rate"] == pytest.approx(meta["spec_num_correct_drafts"] / (steps * BUDGET))
    assert meta["spec_accept_length"] == pytest.approx(64 / steps)


def test_phases_are_sampled(server):
    generate(server, PROMPTS[:2], 256)
    now = samples(server.base)
    for phase in ("draft", "verify", "commit"):
        count, total = (now[f"sglang_ddtree_phase_seconds_{k}|{phase}"] for k in ("count", "sum"))
        assert count >= 2
        assert 0 < total / count < 5
    assert now["sglang_ddtree_phase_seconds_sum|verify"] > now["sglang_ddtree_phase_seconds_sum|commit"]


SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)?\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')


def dashboard_selectors() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """("panel: selector", [(label, operator, value)]) of every query; the metric's name is the label __name__, and the
    labels that Prometheus adds when it scrapes are left out."""
    found = []
    for panel in json.loads((ROOT / "scripts/grafana/ddtree.json").read_text())["panels"]:
        for target in panel["targets"]:
            for name, inside in SELECTOR.findall(target["expr"]):
                matchers = [m for m in MATCHER.findall(inside) if m[0] != "instance"]
                matchers += [("__name__", "=", name)] if name else []
                found.append((f"{panel['title']}: {name}{{{inside}}}", matchers))
    return found


def test_every_query_of_the_dashboard_finds_what_the_server_exports(server):
    generate(server, PROMPTS[:2])
    text = requests.get(server.base + "/metrics", timeout=30).text
    exported = [
        s.labels | {"__name__": s.name} for f in text_string_to_metric_families(text) for s in f.samples
    ]

    def picks(matchers, labels: dict[str, str]) -> bool:
        return all(
            labels.get(label) == value if operator == "=" else re.fullmatch(value, labels.get(label, ""))
            for label, operator, value in matchers
        )

    selectors = dashboard_selectors()
    assert len(selectors) > 20
    empty = [what for what, matchers in selectors if not any(picks(matchers, labels) for labels in exported)]
    assert not empty


def test_bench_serving_reports_the_acceptance_of_metrics(server, tmp_path):
    reported, tau = bench_serving(server.base, tmp_path)
    assert reported == pytest.approx(tau, abs=1e-9)
