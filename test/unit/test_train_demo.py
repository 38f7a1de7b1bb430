"""The recipe of the demo pair: every phase at tiny sizes, its export, its resumption, its acceptance figures."""

from __future__ import annotations

import heapq
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from scripts.train_demo.acceptance import Drafts, TreeSetting, stepping
from scripts.train_demo.draft import initial_draft
from scripts.train_demo.evaluate import load_pair
from scripts.train_demo.export import write_draft, write_target
from scripts.train_demo.loop import Loop, linear_decay
from scripts.train_demo.plan import Plan, steps_before
from scripts.train_demo.shapes import DraftShape, TargetShape
from scripts.train_demo.target import initial_target

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
FOLDERS = ("demo-target", "demo-draft")


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape by name, over all files of a folder."""
    found = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as f:
            for key in f.keys():  # noqa: SIM118, not a dict
                part = f.get_slice(key)
                found[key] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def start_recipe(work: Path, log: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "scripts.train_demo", "run", "--plan", "smoke"]
    command += ["--work", str(work), "--out", str(work / "out")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as out:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A smoke run killed as soon as its target is trained, then run again: its output folder and the second log."""
    work = tmp_path_factory.mktemp("train_demo")
    first_log, second_log = work / "first.log", work / "second.log"
    first = start_recipe(work, first_log)
    while not (work / "target.pt").exists() and first.poll() is None:
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL, first_log.read_text()
    assert not (work / "out").exists()
    assert start_recipe(work, second_log).wait() == 0, second_log.read_text()
    return work, second_log.read_text()


def test_an_interrupted_run_goes_on_and_ends(smoke):
    _, log = smoke
    assert "target: taken from" in log
    assert "data:" not in log and "target: step" not in log
    assert "draft at 100%" in log and "done" in log


def test_a_work_folder_of_another_plan_is_refused(smoke, tmp_path):
    work, _ = smoke
    (tmp_path / "plan.json").write_text((work / "plan.json").read_text().replace('"rows": 12', '"rows": 13'))
    log = tmp_path / "log"
    assert start_recipe(tmp_path, log).wait() == 1
    assert "another plan" in log.read_text() and "Traceback" not in log.read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_export_has_the_models_files_keys_and_dtypes(smoke, folder):
    exported, bundled = smoke[0] / "out" / folder, MODELS / folder
    names = {f.name for f in exported.iterdir()}
    assert names - {"model.safetensors"} == {f.name for f in bundled.iterdir() if "safetensors" not in f.name}
    ours, theirs = tensors(exported), tensors(bundled)
    assert ours.keys() == theirs.keys()
    assert {d for d, _ in ours.values()} == {d for d, _ in theirs.values()} == {"BF16"}
    assert {k: len(s) for k, (_, s) in ours.items()} == {k: len(s) for k, (_, s) in theirs.items()}
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (exported, bundled))
    assert ours.keys() == theirs.keys()


@pytest.mark.parametrize("bundled", [False, True], ids=["smoke", "bundled"])
def test_transformers_computes_what_the_recipe_computes(smoke, bundled):
    """An exported target, read by an independent implementation of its architecture."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = MODELS if bundled else smoke[0] / "out"
    target, _ = load_pair(models / "demo-target", models / "demo-draft", "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(models / "demo-target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(models / "demo-target")
    prompt = json.loads((models / "heldout_prompts.json").read_text())["prompts"][0]["text"]
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == prompt
    with torch.no_grad():
        expected, actual = theirs(ids).logits, target.logits(target.hidden(ids))
    torch.testing.assert_close(actual, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


def test_figures_of_the_smoke_run(smoke):
    figures = json.loads((smoke[0] / "out/figures.json").read_text())
    assert figures["decode_agrees_with_forward"] > 0.99
    chain = [r for r in figures["tau"] if r["cap"] == 1 and r["group"] == "greedy"]
    assert 1 <= chain[0]["tau"] <= 16
    assert set(figures["qualities"]) == {"0.25", "0.5"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_full_plan_has_the_bundled_shapes(folder, tmp_path):
    plan, bundled, folder_out = Plan.named("full"), MODELS / folder, tmp_path / folder
    if folder == "demo-target":
        weights = initial_target(plan.target, 0, "cpu")
        write_target(folder_out, plan.target, weights, bundled / "tokenizer.json")
    else:
        weights = initial_draft(plan.draft, 0, "cpu")
        write_draft(folder_out, plan.draft, weights)
    assert tensors(folder_out) == tensors(bundled)
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (folder_out, bundled))
    assert ours == theirs
    files = sorted(folder_out.glob("model*.safetensors"))
    assert [f.name for f in files] == [f.name for f in sorted(bundled.glob("model*.safetensors"))]
    for file in files:
        assert file.stat().st_size < 16 * 2**20
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
    read = {k: v for f in files for k, v in load_file(f).items()}
    for name, w in weights.items():
        torch.testing.assert_close(read[name], w.bfloat16())


def test_shapes_read_back_from_their_configs():
    target, draft = TargetShape(hidden=192, layers=12, gdn_value_heads=8), DraftShape(layers=5, block=8)
    assert TargetShape.from_config(target.config(), target.first_reserved) == target
    assert DraftShape.from_config(draft.config()) == draft


def make_loop(stop_at: int | None = None) -> Loop:
    """Regression onto a fixed matrix; interrupts itself at a step."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        "matrix.weight": torch.randn(48, 40, generator=generator),
        "norm.weight": torch.randn(40, generator=generator),
    }
    inputs = torch.randn(200, 40, generator=generator)
    goal = torch.randn(200, 48, generator=generator)

    def loss(step: torch.Tensor) -> torch.Tensor:
        if stop_at is not None and int(step) == stop_at:
            raise KeyboardInterrupt
        prediction = (inputs[step] * weights["norm.weight"]) @ weights["matrix.weight"].T
        return (prediction - goal[step]).square().mean()

    return Loop("test", weights, loss, weight_decay=0.1, steps=24, checkpoint_every=5)


def test_a_loop_resumes_at_its_checkpoint_and_ends_with_the_same_weights(tmp_path, capsys):
    factors, checkpoint = linear_decay(24, 0.5), tmp_path / "steps.pt"
    straight = make_loop()
    straight.run(0, factors)
    with pytest.raises(KeyboardInterrupt):
        make_loop(stop_at=17).run(0, factors, checkpoint)
    resumed = make_loop()
    resumed.run(0, factors, checkpoint)
    assert "resumed at step 15" in capsys.readouterr().out
    for a, b in zip(straight.tensors(), resumed.tensors(), strict=True):
        assert torch.equal(a, b)


def test_deadlines_shorten_a_schedule_only_when_it_would_not_end():
    from scripts.train_demo.report import elapsed

    assert steps_before(elapsed() + 100, 50, 1.0, "test") == 50
    assert 18 <= steps_before(elapsed() + 20, 50, 1.0, "test") <= 20
    with pytest.raises(SystemExit, match="deadline"):
        steps_before(elapsed() - 1, 50, 1.0, "test")


def best_first_tree(logprobs: list, setting: TreeSetting) -> set[tuple[int, ...]]:
    """The tree as paths of ranks, grown node by node: the spine if asked for, then always the best child in reach."""
    horizon, tree, heap = len(logprobs), {()}, []

    def score(path):
        return sum(logprobs[depth][rank] for depth, rank in enumerate(path))

    def add(path):
        tree.add(path)
        if len(path) < horizon:
            for rank in range(setting.cap):
                heapq.heappush(heap, (-score(path + (rank,)), path + (rank,)))

    add(())
    if setting.spine:
        for depth in range(1, min(horizon, setting.budget) + 1):
            add((0,) * depth)
    while len(tree) <= setting.budget and heap:
        path = heapq.heappop(heap)[1]
        if path not in tree:
            add(path)
    return tree


def walk(drafts: Drafts, row: int, setting: TreeSetting) -> tuple[int, int]:
    """Tokens committed and steps taken along one continuation."""
    _, places, horizon, _ = drafts.ids.shape
    tokens, at, steps = drafts.tokens[row].tolist(), 0, 0
    while at < places:
        tree = best_first_tree(drafts.logprobs[row, at].tolist(), setting)
        ids, path = drafts.ids[row, at].tolist(), ()
        while len(path) < horizon:
            wanted = tokens[at + 1 + len(path)]
            ranks = [r for r in range(setting.cap) if ids[len(path)][r] == wanted]
            if not ranks or path + (ranks[0],) not in tree:
                break
            path += (ranks[0],)
        at, steps = at + len(path) + 1, steps + 1
    return at, steps


@pytest.mark.parametrize(
    "setting",
    [
        TreeSetting(5, 1),
        TreeSetting(3, 4),
        TreeSetting(12, 2),
        TreeSetting(12, 4),
        TreeSetting(40, 4),
        TreeSetting(5, 4, spine=True),
        TreeSetting(12, 4, spine=True),
    ],
    ids=lambda s: f"b{s.budget}-cap{s.cap}{'-spine' if s.spine else ''}",
)
def test_stepping_equals_a_walk_through_heap_grown_trees(setting):
    n, places, horizon, candidates, vocab = 6, 20, 5, 4, 7
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(n, places, horizon, vocab, generator=generator)
    tokens = torch.randint(vocab, (n, places + horizon + 1), generator=generator)
    # Likely enough to be drafted that paths of every length are accepted.
    windows = tokens.unfold(1, horizon, 1)[:, 1 : places + 1]
    logits.scatter_add_(3, windows.unsqueeze(-1), torch.full((n, places, horizon, 1), 1.5))
    best = logits.log_softmax(-1).topk(candidates, dim=-1)
    drafts = Drafts(best.values, best.indices, tokens)
    committed, steps = stepping(drafts, setting)
    expected = [walk(drafts, row, setting) for row in range(n)]
    assert list(zip(committed.tolist(), steps.tolist(), strict=True)) == expected
    assert (steps < committed).all() and (steps > places // (horizon + 1)).all()
