"""The sweep's grids, records and clients, the step-cost model, and the report, on runs that real servers made."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from sglang_ddtree.operate.streams import Answer
from typer.testing import CliRunner

from benchmark import cost_model
from benchmark.report import __main__ as report
from benchmark.report.series import groups, survival
from benchmark.serving import acceptance, records, sweep
from benchmark.serving.grids import BUDGETS, CHAIN, GRIDS, LEAKY, METHODS, PLAIN, TREE, Start
from benchmark.serving.loads import LoadError, read_bench
from benchmark.serving.prompts import read_rows, write_custom_dataset
from benchmark.serving.servers import Pair, arguments, command
from benchmark.step_cost import Draft, Target
from benchmark.step_files import StepFileError, read_steps
from benchmark.steps.shapes import TARGET

RESULTS = Path(__file__).resolve().parents[2] / "benchmark/results"
RUNS, BENCH = RESULTS / "cpu_smoke.jsonl", RESULTS / "cpu_smoke.bench.jsonl"
PAIR = Pair("models/demo-target", "models/demo-draft", ("--context-length", "4096"))


@pytest.fixture(scope="module")
def runs() -> list[records.Run]:
    """A real `--grid smoke` on two CPU cores."""
    return records.read(RUNS)


# Grids


def test_full_grid_has_every_axis():
    starts = GRIDS["full"].starts()
    assert len(starts) == len(set(starts)) == 3 * (2 + 7 * 3 + 7)
    assert {s.method for s in starts} == set(METHODS)
    assert {(s.budget, s.cap, s.tp) for s in starts if s.method == TREE} == {
        (b, c, t) for b in BUDGETS for c in (4, 8, 16) for t in (1, 2, 4)
    }
    loads = GRIDS["full"].loads(starts[0])
    assert {(x.temperature, x.concurrency) for x in loads} == {
        (t, c) for t in (0, 0.7) for c in (1, 4, 8, 16)
    }
    assert GRIDS["full"].runs() == len(starts) * 9
    assert all(x.requests % x.concurrency == 0 for x in loads)  # no repetition ends with a half-empty batch


def test_quick_grid_fits_ten_minutes():
    """Requests alone take five minutes, which leaves as much for seven starts and bench_serving's own time."""
    quick = GRIDS["quick"]
    assert [s.method for s in quick.starts()] == [PLAIN, CHAIN, TREE, TREE, TREE, LEAKY, LEAKY]
    # Milliseconds a step with one and with eight requests, and tokens a step at T 0, about those of an H200 on eight
    # prompts; a prefill takes 90 ms.
    cost = {PLAIN: (14.4, 16, 1), CHAIN: (20.2, 29, 6), TREE: (17.3, 33, 7.1), LEAKY: (18, 35, 3)}
    seconds = 0.0
    for start in quick.starts():
        alone, crowded, tau = cost[start.method]
        for x in quick.loads(start):
            steps = x.tokens / (tau if x.temperature == 0 else min(tau, 3))
            turn = steps * (alone if x.concurrency == 1 else crowded) / 1e3 + 0.09
            seconds += (quick.repeats * x.requests + x.warm_up) / x.concurrency * turn
    assert seconds < 310


def test_thrifty_loads():
    """What a method's figure does not need is left out; no comparison of the report may lose a side."""
    quick, full = GRIDS["quick"], GRIDS["full"]
    loads = {
        s.method: [(x.client, x.temperature, x.concurrency) for x in quick.loads(s)] for s in quick.starts()
    }
    assert loads[PLAIN] == [("bench_serving", 0, 1), ("bench_serving", 0, 8)]
    assert loads[LEAKY] == [("bench_serving", 0, 1)]
    assert loads[CHAIN] == loads[TREE] and len(loads[TREE]) == 4
    assert len({len(full.loads(s)) for s in full.starts()}) == 1


@pytest.mark.parametrize("grid", GRIDS)
def test_every_tree_has_what_it_is_compared_with(grid):
    starts = GRIDS[grid].starts()
    for tp in {s.tp for s in starts}:
        assert Start(PLAIN, tp=tp) in starts and Start(CHAIN, 15, 1, tp) in starts
    for leaky in (s for s in starts if s.method == LEAKY):
        assert replace(leaky, method=TREE) in starts


def test_methods_differ_in_their_own_flags_only():
    plain, chain, tree, leaky = (
        arguments(s, PAIR, True, 8)
        for s in (Start(PLAIN), Start(CHAIN, 15, 1), Start(TREE, 31, 8), Start(LEAKY, 31, 8))
    )
    assert tree == leaky
    assert set(plain) < set(tree) and set(plain) < set(chain)
    assert chain[chain.index("--speculative-algorithm") + 1] == "DFLASH"
    on_cpu = arguments(Start(CHAIN, 15, 1), PAIR, False, 8)
    assert on_cpu[on_cpu.index("--speculative-algorithm") + 1] == "DDTREE"
    assert on_cpu[on_cpu.index("--speculative-ddtree-topk-cap") + 1] == "1"
    assert all(x[-2:] == ["--context-length", "4096"] for x in (plain, chain, tree))


# Records


def test_a_run_survives_its_line(runs, tmp_path):
    path = tmp_path / "runs.jsonl"
    for run in runs:
        records.append(path, run)
    assert records.read(path) == runs


def test_a_sweep_goes_on_where_it_stopped(runs, tmp_path, monkeypatch):
    hardware, commit = runs[0].hardware, runs[0].commit
    monkeypatch.setattr(sweep.machine, "hardware", lambda tp: hardware)
    monkeypatch.setattr(sweep.machine, "gpus", tuple)
    pair = Pair(runs[0].target, runs[0].draft)
    grid = GRIDS["smoke"]
    out = tmp_path / "runs.jsonl"

    def missing(commit: str) -> int:
        started = sweep.Sweep(grid, pair, runs[0].prompts, ["x"], out, commit, tmp_path)
        started.bench.close()
        return sum(len(started.missing(start)) for start in grid.starts())

    assert missing(commit) == grid.runs() == len(runs)
    for done, run in enumerate(runs, 1):
        records.append(out, run)
        assert missing(commit) == grid.runs() - done
    assert missing("another") == grid.runs()


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text(RUNS.read_text().splitlines()[0] + '\n{"commit": "x"}\n')
    with pytest.raises(records.RecordError, match="line 2"):
        records.read(path)


def test_folders_without_weights_have_a_server_that_makes_them(tmp_path):
    from benchmark.widen.folders import write_folders

    wide = Pair(*map(str, write_folders("mid", tmp_path)))
    gated, gate = ["-m", "benchmark.serving.gated", "--gate", "x.gate"], Path("x.gate")
    assert command(wide, gate)[1:] == [*gated, "--widened", "--"]
    assert command(PAIR, gate)[1:] == [*gated, "--"]


@pytest.mark.parametrize(
    ("arguments_", "said"),
    [
        (["--grid", "huge"], "--grid huge: choose one of"),
        (["--model-path", "nowhere"], "--model-path nowhere: no config.json"),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl"),
    ],
)
def test_a_sweep_refuses_in_one_line(arguments_, said):
    app = sweep.typer.Typer()
    app.command()(sweep.main)
    done = CliRunner().invoke(app, arguments_)
    assert done.exit_code == 2
    assert said in done.stdout.replace("\n", " ")


# Clients


def test_bench_serving_output_is_read():
    """Lines of a real run: counts and times that the tool states itself must follow from its details."""
    rows = [json.loads(line) for line in BENCH.read_text().splitlines()]
    assert rows
    for row in rows:
        read = read_bench(row)
        assert (read.tokens, read.requests) == (row["total_output_tokens"], row["completed"])
        assert read.tok_s == pytest.approx(row["output_throughput"])
        assert len(read.gaps_ms) <= read.tokens - read.requests  # nothing for a token of the first chunk
        gaps = records.median_and_p99(read.gaps_ms)
        # The tool interpolates between neighbours, we take a value that was there.
        assert gaps["median"] == pytest.approx(row["median_itl_ms"], rel=0.02)
        assert 0 < read.decode_s < read.seconds * row["max_concurrency"]


def test_a_failed_request_is_an_error():
    row = json.loads(BENCH.read_text().splitlines()[0])
    row["errors"][0] = "Traceback:\n  ...\nConnectionError: gone"
    with pytest.raises(LoadError, match="ConnectionError: gone"):
        read_bench(row | {"completed": row["completed"] - 1})


def test_tokens_that_come_together_share_the_time():
    answer = Answer([(0.5, 1), (0.7, 5), (0.8, 6)])
    assert (answer.tokens, answer.first_s, answer.last_s) == (6, 0.5, 0.8)
    assert answer.gaps_ms() == pytest.approx([50, 50, 50, 50, 100])
    nothing = Answer(seconds=0.3)  # the end of text came first
    assert (nothing.tokens, nothing.first_s, nothing.gaps_ms()) == (0, 0.3, [])


def test_prompts_are_spread_over_the_file(tmp_path):
    texts = [str(i) for i in range(64)]
    started = sweep.Sweep(GRIDS["smoke"], PAIR, "prompts", texts, tmp_path / "runs.jsonl", "none", tmp_path)
    assert started.spread(4) == ["0", "16", "32", "48"]
    assert sorted(started.spread(64)) == sorted(texts)
    assert len(started.spread(100)) == 100 and set(started.spread(100)) == set(texts)
    started.bench.close()


def test_prompts_reach_bench_serving(tmp_path):
    texts = [row["prompt"] for row in read_rows(None)]
    assert len(texts) == 64
    path = tmp_path / "prompts.jsonl"
    write_custom_dataset(texts, path)
    first = json.loads(path.read_text().splitlines()[0])["conversations"]
    assert first[0]["content"] == texts[0] and len(first) == 2


def test_counts_and_responses_must_agree():
    text = (
        'sglang:num_requests_total{m="a"} 2.0\nsglang:generation_tokens_total{m="a",is_streaming="true"} 30.0\n'
        'sglang:generation_tokens_total{m="a",is_streaming="false"} 10.0\nsglang:spec_verify_calls_total{m="a"} 8.0\n'
    )
    seen = acceptance.read(text)
    assert (seen.requests, seen.tokens, seen.steps, seen.accepted) == (2, 40, 8, None)
    assert seen.tau == 38 / 8
    metas = [
        dict(
            completion_tokens=20, spec_verify_ct=4, spec_num_correct_drafts=n, spec_accept_histogram=[1, 0, 3]
        )
        for n in (6, 6)
    ]
    told = acceptance.add_up(iter(metas))
    assert told.histogram == [2, 0, 6] and told.tau == seen.tau
    assert acceptance.disagreement(seen, told) is None
    assert "steps 7 in /metrics, 8 in the responses" in acceptance.disagreement(replace(seen, steps=7), told)
    assert "accepted drafts" in acceptance.disagreement(replace(seen, accepted=11), told)
    plain = acceptance.read(text.replace("sglang:spec_verify_calls_total", "sglang:other_total"))
    assert (plain.decode_steps, plain.tau) == (38, 1.0)


# The real run


def test_the_real_run_says_what_it_should(runs):
    """tau does not depend on the machine: at T = 0 the timed requests accept what the warm-up's did."""
    assert {r.method for r in runs} == set(METHODS)
    assert all(r.agree for r in runs)
    for r in runs:
        assert r.tau == pytest.approx(r.tau_responses, rel=1e-4)  # six digits are stored
        assert r.tok_s > 0 and r.step_ms > 0
        assert sum(r.histogram) > 0 if r.method != PLAIN else not r.histogram
    tau = {(r.method, r.budget): r.tau for r in runs if r.client == "bench_serving"}
    assert tau[PLAIN, None] == 1
    assert tau[LEAKY, 31] < tau[CHAIN, 15] < tau[TREE, 15] < tau[TREE, 31]


# The cost model


def test_target_parameters_are_those_of_transformers():
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**TARGET))
    counted = Target.from_config(TARGET)
    assert sum(p.numel() for p in model.parameters()) == counted.parameters
    by_layer = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    norms = 2 * counted.hidden
    gdn = counted.gdn_products + counted.mlp + norms + counted.qkv * 4 + 2 * 48 + 128
    assert (by_layer[0], by_layer[3]) == (gdn, counted.attention_products + counted.mlp + norms + 2 * 256)


def test_draft_parameters_are_those_of_its_recipe():
    from scripts.train_demo.draft import initial_draft
    from scripts.train_demo.shapes import DraftShape

    small = DraftShape()
    weights = initial_draft(small, 0, "cpu")
    assert sum(w.numel() for w in weights.values()) == Draft.from_config(small.config()).parameters


def test_bytes_of_plain_decoding():
    """Everything but the embedding once, in bf16; KV of 16 layers; 48 layers' states read and written in fp32."""
    step = cost_model.cost("plain", 1, 1, 1024)
    weights = 2 * (Target.from_config(TARGET).parameters - 248_320 * 5120)
    kv, states = 16 * 1024 * 2 * 4 * 256 * 2, 2 * 48 * 48 * 128 * 128 * 4
    assert weights == pytest.approx(51.25e9, rel=0.01)
    assert step.bytes == pytest.approx(
        weights + kv + states, rel=0.001
    )  # the rest is one row's activations and logits
    halved = cost_model.cost("plain", 1, 1, 1024, tp=2)
    assert halved.bytes == step.bytes / 2 and halved.all_reduces == 128


def test_the_stash_of_a_row():
    """docs/architecture.md: 0.97 MiB a row; a and b are kept wider than counted here."""
    assert Target.from_config(TARGET).stash_bytes / 2**20 == pytest.approx(0.97, abs=0.03)


def test_fit_is_close_and_says_how_close():
    steps = read_steps(cost_model.H200_STEPS)
    rows = cost_model.residuals(steps, cost_model.H200)
    assert len(rows) == 10
    # 7 %: what four prices leave on these ten points, which are medians of passes that differ by about 1 %.
    assert all(abs(r["residual"]) < 0.07 for r in rows)
    assert max(abs(r["unseen"]) for r in rows) > max(abs(r["residual"]) for r in rows)
    assert all(r["floor_ms"] < r["measured_ms"] for r in rows)


def test_fit_finds_prices_that_made_the_steps():
    true = cost_model.Prices(overlap=0.3, launch=3e-6, wait=5e-6, reached=0.7)
    measured = read_steps(cost_model.H200_STEPS)
    made = [replace(s, ms=cost_model.modelled_ms(s, cost_model.H200, true)) for s in measured]
    assert asdict(cost_model.fit(made, cost_model.H200)) == pytest.approx(asdict(true), rel=1e-6)


def test_lines_of_benchmark_steps_are_read(tmp_path):
    """The tool's own rows: one JSON line each, all passes, requests as text keys."""
    path = tmp_path / "steps.jsonl"
    about = dict(hardware="1 x NVIDIA H200", context=1024, tp=1)
    rows = [dict(name="plain", start_s=9.0, step_ms={1: [14.0, 15.0, 14.5]}, idle={}, kernels={}) | about]
    rows.append(
        dict(name="tree, 64 rows", start_s=9.0, step_ms={1: [18.0], 8: [30.0]}, idle={}, kernels={}) | about
    )
    rows[1] |= dict(context=512, tp=2)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    read = read_steps(path)
    assert [(s.kind, s.rows, s.requests, s.ms) for s in read] == [
        ("plain", 1, 1, 14.5),
        ("tree", 64, 1, 18.0),
        ("tree", 64, 8, 30.0),
    ]
    assert [(s.context, s.tp) for s in read] == [(1024, 1), (512, 2), (512, 2)]
    for line in ('{"name": "what", "step_ms": {"1": [1.0]}}', "no JSON", '{"name": "plain", "step_ms": {}}'):
        path.write_text(line + "\n")
        with pytest.raises(StepFileError, match="line 1: none of"):
            read_steps(path)


def test_prediction_is_near_the_published_plain_decoding():
    """26 tokens a second were published for this card. 15 %: the fit's own error at points it has not seen."""
    prices = cost_model.fit(read_steps(cost_model.H200_STEPS), cost_model.H200)
    rows = cost_model.predictions(cost_model.RTX_PRO_6000, prices, 1024)
    assert 1e3 / rows[0]["ms"][1][0] == pytest.approx(cost_model.PUBLISHED_PLAIN, rel=0.15)
    for row in rows:
        assert row["ms"][1][0] > row["ms"][4][1] > row["ms"][8][1]


# The report


def test_survival():
    assert survival([1, 1, 2]) == [0.75, 0.5]
    assert survival([]) == []


def page_of(path: Path, out: Path) -> str:
    app = report.typer.Typer()
    app.command()(report.main)
    done = CliRunner().invoke(app, [str(path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out.read_text()


def test_report_of_the_real_run(runs, tmp_path):
    """The machine had other work, as the page must say: it draws acceptance, and compares no times."""
    page, pictures = page_of(RUNS, tmp_path / "report.html"), sorted(tmp_path.glob("report-*.png"))
    assert [p.stem for p in pictures] == ["report-1-depth", "report-1-tau", "report-roofline"]
    assert len(pictures) == page.count("data:image/png;base64,")
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)
    words = re.sub(r"base64,[^\"]+", "", page)
    assert not re.search(r"<script|<link|https?:|@import|url\(", words)  # nothing is fetched
    assert words.count("<tr class=") == len(runs)
    for run in runs:
        assert f"{run.tok_s:.1f}" in words and f"{run.tau:.2f}" in words
    assert "This machine had other work" in words and "predicted, not measured" in words
    assert len(groups(runs)) == 1


def test_report_compares_times_of_a_quiet_machine(runs, tmp_path):
    path = tmp_path / "quiet.jsonl"
    for run in runs:
        records.append(path, replace(run, load_average=1.0))
    page = page_of(path, tmp_path / "report.html")
    assert "other work" not in page and "tokens per second of plain decoding" in page
    assert len(list(tmp_path.glob("report-*.png"))) == page.count("data:image/png;base64,") == 5


def test_report_without_runs_is_refused(tmp_path):
    app = report.typer.Typer()
    app.command()(report.main)
    done = CliRunner().invoke(app, [str(tmp_path / "none.jsonl")])
    assert done.exit_code == 2 and "no run there" in done.stdout
