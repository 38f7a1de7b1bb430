"""Counting of steps: the histogram, tau, and timing that never waits for the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from sglang_ddtree.metrics import SAMPLE, Exporter, PhaseTimer, Recorder


@given(st.lists(st.lists(st.integers(0, 15), max_size=8), max_size=20))
def test_recorder_counts_what_it_was_told(steps):
    recorder = Recorder()
    for accepted in steps:
        recorder.step(accepted, rows=32)
    flat = [n for accepted in steps for n in accepted]
    state = recorder.state()
    assert (state["steps"], state["accepted_drafts"]) == (len(flat), sum(flat))
    assert state["tree_rows"] == 32 * len(flat)
    assert all(n == flat.count(i) for i, n in enumerate(state["accepted_drafts_histogram"]))
    assert state.get("tau") == (pytest.approx(1 + sum(flat) / len(flat)) if flat else None)


@pytest.fixture(scope="module")
def recorder():
    made = Recorder()
    made.exporter = Exporter({"model_name": "unit"}, budget=31, cap=8)
    return made


def observed(phase: str) -> tuple[float, float]:
    labels = {"model_name": "unit", "phase": phase}
    name = "sglang_ddtree_phase_seconds_"
    return tuple(REGISTRY.get_sample_value(name + kind, labels) or 0.0 for kind in ("count", "sum"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_step_of_sixteen_is_timed(recorder, device):
    timer = PhaseTimer(device, recorder)
    before = observed("draft")
    x = torch.ones(256, 256, device=device)
    for _ in range(3 * SAMPLE):
        timer.begin_step()
        with timer.phase("draft"):
            x = x @ x * 0
    if device == "cuda":
        torch.cuda.synchronize()
        timer.begin_step()
    after = observed("draft")
    assert after[0] - before[0] == 3
    assert 0 < after[1] - before[1] < 60


def test_without_an_exporter_nothing_is_timed():
    timer = PhaseTimer("cpu", Recorder())
    timer.begin_step()
    with timer.phase("draft"):
        pass
    assert timer.pending == [] and not timer.sampling
