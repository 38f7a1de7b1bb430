"""What operators run, without a server: settings files, the unit's command line, what fits, and clear refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_ddtree.operate import drain, fits, load, sweep, unit
from sglang_ddtree.operate.unit import OperateError, Unit
from support.engines import DRAFT, ROOT, TARGET

EXAMPLES = sorted((ROOT / "scripts/systemd/examples").glob("tp*.env"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_complete_and_serve_as_the_unit_does(path):
    """`arguments` is what set-budget lets the server check: it must be what systemd makes of ExecStart."""
    settings = unit.parse(path.read_text(), path)
    assert settings["DDTREE_TP"] == path.stem.removeprefix("tp")
    text = (ROOT / "scripts/systemd/sglang-ddtree@.service").read_text()
    command = re.search(r"^ExecStart=\S+/bin/sglang serve((?:.*\\\n)*.*)", text, re.MULTILINE)[1]
    expected = []
    for word in command.replace("\\\n", " ").split():
        if braced := re.fullmatch(r"\$\{(\w+)\}", word):
            expected.append(settings[braced[1]])
        elif word.startswith("$"):
            expected += settings[word[1:]].split()
        else:
            expected.append(word)
    assert unit.arguments(settings) == expected


VALUES = st.integers(1, 10**6)


@given(
    VALUES,
    VALUES,
    st.lists(st.sampled_from(["# a comment", "", "DDTREE_BUDGET=7", "OTHER=x y", "DDTREE_CAP=3"])),
)
def test_edit_changes_the_named_values_only(budget, cap, lines):
    changed = unit.edit("\n".join(lines), {"DDTREE_BUDGET": budget, "DDTREE_CAP": cap}).splitlines()
    assert changed.count(f"DDTREE_BUDGET={budget}") == changed.count(f"DDTREE_CAP={cap}") == 1
    others = [line for line in lines if line and not line.startswith("DDTREE_")]
    assert [line for line in changed if line and not line.startswith("DDTREE_")] == others


def test_replace_is_atomic_and_keeps_the_mode(tmp_path, monkeypatch):
    monkeypatch.setattr(unit, "SETTINGS", tmp_path)
    one = Unit("one")
    one.path.write_text("a=1\n")
    one.path.chmod(0o640)
    inode = one.path.stat().st_ino
    one.replace("a=2\n")
    assert one.text() == "a=2\n"
    assert one.path.stat().st_mode & 0o777 == 0o640
    assert one.path.stat().st_ino != inode, "written in place: a reader could see half of it"
    assert [p.name for p in tmp_path.iterdir()] == ["one.env"]


def test_one_change_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(unit, "SETTINGS", tmp_path)
    refused = pytest.raises(OperateError, match="another set-budget or sweep is at work")
    with Unit("one").lock(), refused, Unit("two").lock():
        pass
    with Unit("two").lock():
        pass


def test_an_unknown_name_lists_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(unit, "SETTINGS", tmp_path)
    (tmp_path / "tp1.env").write_text("")
    with pytest.raises(
        OperateError, match=r"NAME tp2: no .*tp2\.env \(there: tp1\); scripts/install_service.sh tp2"
    ):
        Unit("tp2").text()
    with pytest.raises(OperateError, match=r"tp1\.env: DDTREE_MODEL is not set"):
        unit.parse("", Unit("tp1").path)


@pytest.mark.parametrize(
    ("host", "url"), [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1"), ("::1", "http://[::1]:1")]
)
def test_url_is_one_that_answers_here(host, url):
    assert unit.url({"DDTREE_HOST": host, "DDTREE_PORT": "1"}) == url


def test_shapes_of_27b(tmp_path):
    """Qwen3.6-27B: 64 layers, every fourth attention; 0.97 MiB of stash a row (docs/architecture.md)."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    draft.mkdir()
    config = dict(
        num_hidden_layers=64,
        full_attention_interval=4,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        vocab_size=248320,
        dtype="bfloat16",
    )
    (target / "config.json").write_text(json.dumps({"text_config": config}))
    (draft / "config.json").write_text(
        json.dumps(dict(num_hidden_layers=5, num_key_value_heads=8, head_dim=128))
    )
    s = fits.shapes(target, draft, 1)
    assert s.stash_per_row / 2**20 == pytest.approx(0.946, abs=0.03)
    assert s.kv_per_token == 16 * 2 * 4 * 256 * 2 + 5 * 2 * 8 * 128 * 2
    assert s.state_per_request == 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)
    assert fits.shapes(target, draft, 4).state_per_request * 4 == s.state_per_request
    many, few = (s.requests(b, 32768, 96 * fits.GIB, 0.85) for b in (15, 128))
    assert many > few > 0


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "sglang_ddtree", *words], capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("set-budget", "nobody", "--budget", "15"), "error: NAME nobody: no /etc/sglang-ddtree"),
        (("sweep", "nobody", "--budgets", "15,x"), "error: --budgets 15,x: give whole numbers of at least 1"),
        (("set-budget", "x", "--budget", "0"), "Input should be greater than or equal to 1"),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(words, complaint):
    done = run(*words)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "rror: " in line]
    assert done.returncode != 0
    assert len(lines) == 1 and complaint in lines[0], done.stdout + done.stderr


def test_doctor_tells_what_fits():
    done = run(
        "doctor", "--model-path", TARGET, "--draft-model-path", DRAFT, "--gpu-memory", "96", "--tp-size", "1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as pinned" in done.stdout
    assert "requests at a time, 1 GPU of 96 GiB" in done.stdout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("", "each line needs"), ("{}\n", "each line needs"), ("no json\n", "one JSON object a line")],
)
def test_prompts_are_checked(tmp_path, text, complaint):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(OperateError, match=complaint):
        load.read_prompts(path)
    assert load.read_prompts(load.PROMPTS)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "99999"])
def test_drain_limit_is_checked(text, monkeypatch):
    monkeypatch.setenv(drain.LIMIT_VARIABLE, text)
    with pytest.raises(ValueError, match=f"{drain.LIMIT_VARIABLE}: '{text}' is not a number of seconds"):
        drain.drain_limit()


def test_whole_numbers():
    assert sweep.whole_numbers("--caps", "8, 4") == [8, 4]
