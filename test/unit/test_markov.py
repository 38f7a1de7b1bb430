"""Bigram factors: the counts and their fit, the file and its checks, the command and the flags around it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sglang.srt.plugins import load_plugins
from sglang_ddtree.__main__ import app
from sglang_ddtree.draft import markov
from sglang_ddtree.operate import bigrams
from support.engines import DRAFT, ROOT, TARGET
from typer.testing import CliRunner

load_plugins()

PAIR = ["--model-path", TARGET, "--device", "cpu", "--dtype", "float32"]
PAIR += ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", DRAFT]


def draw_text(length: int, vocab: int, seed: int = 0) -> np.ndarray:
    """A random chain in which a token is mostly followed by one of three others."""
    rng = np.random.default_rng(seed)
    successors = rng.integers(vocab, size=(vocab, 3))
    text = [0]
    for choice in rng.integers(4, size=length - 1):
        text.append(int(successors[text[-1], choice] if choice < 3 else rng.integers(vocab)))
    return np.array(text)


def log_odds(counts: np.ndarray, alpha: float) -> np.ndarray:
    """log B(c | a) / u(c) of the whole table, from the formula in the module's docstring."""
    unigram = (counts.sum(0) + 0.5) / (counts.sum(0) + 0.5).sum()
    smoothed = (counts + alpha * unigram) / (counts.sum(1, keepdims=True) + alpha)
    return np.log(smoothed / unigram)


def test_counts():
    counts = bigrams.count([np.array([1, 2, 1, 2]), np.array([0]), np.array([2, 2])], 4)
    expected = np.zeros((4, 4))
    expected[1, 2], expected[2, 1], expected[2, 2] = 2, 1, 1
    assert np.array_equal(counts.todense(), expected)
    assert bigrams.count([], 4).nnz == 0


def test_full_rank_is_the_whole_table():
    counts = bigrams.count([draw_text(3000, 24)], 24)
    left, right = bigrams.factorise(counts, 24, 5.0, seed=0)
    np.testing.assert_allclose(left @ right.T, log_odds(counts.todense(), 5.0), atol=1e-3)


def test_low_rank_is_the_best_of_its_rank():
    """Against a dense SVD of the weighted table."""
    counts, alpha, rank = bigrams.count([draw_text(20_000, 60)], 60), 20.0, 8
    table = np.asarray(counts.todense())
    rows, columns = table.sum(1) + alpha, table.sum(0) + 0.5
    weight = np.sqrt(rows / rows.sum())[:, None] * np.sqrt(columns / columns.sum())
    wanted = np.linalg.svd(weight * log_odds(table, alpha))[1][rank:]
    left, right = bigrams.factorise(counts, rank, alpha, seed=0)
    error = np.linalg.norm(weight * (left @ right.T - log_odds(table, alpha)))
    assert left.shape == right.shape == (60, rank)
    assert error == pytest.approx(np.linalg.norm(wanted), rel=1e-3)


def test_a_large_vocabulary_needs_no_table_of_its_square():
    """248,320 tokens: the table alone would take 230 GiB."""
    counts = bigrams.count([draw_text(5000, 2000) * 124], 248_320)
    left, right = bigrams.factorise(counts, 4, 20.0, seed=0)
    assert left.shape == (248_320, 4) and np.isfinite(left).all() and np.isfinite(right).all()


def factors(vocab: int = 4096, rank: int = 4, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    left, right = torch.randn(2, vocab, rank, generator=torch.Generator().manual_seed(0)).to(dtype)
    return {markov.LEFT: left.contiguous(), markov.RIGHT: right.contiguous()}


def test_save_and_load(tmp_path):
    tensors = factors(9)
    markov.save(tmp_path / "m", *(x.float() for x in tensors.values()), {"alpha": 2.5})
    loaded = markov.load(tmp_path / "m", 9, 0.5, "cpu")
    assert torch.equal(loaded.left, tensors[markov.LEFT])
    assert torch.equal(loaded.right, tensors[markov.RIGHT])
    assert str(loaded) == "rank 4, weight 0.5, 0.0 MiB"
    with safe_open(tmp_path / "m", framework="pt") as file:
        assert json.loads(file.metadata()[markov.SETTINGS]) == {"alpha": 2.5}


def parse(*flags: str):
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args([*PAIR, *flags])


def refusal(capsys, *flags: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(*flags)
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (factors(4000), "is of a vocabulary of 4000 tokens, the target's has 4096"),
        (factors(dtype=torch.float16), "not two bf16"),
        (factors(rank=257), "rank 257, not one of 1 to 256"),
        ({"other": torch.zeros(3)}, "does not contain tensor markov.left"),
        ({k: v * torch.nan for k, v in factors().items()}, "not finite"),
        ({k: v - torch.inf for k, v in factors().items()}, "not finite"),
    ],
    ids=["vocabulary", "dtype", "rank", "other-tensors", "nan", "infinity"],
)
def test_files_that_are_refused(tensors, reason, tmp_path, capsys):
    path = str(tmp_path / "markov.safetensors")
    save_file(tensors, path)
    line = refusal(capsys, "--speculative-ddtree-markov", path)
    assert line.startswith(f"error: --speculative-ddtree-markov: {path} ")
    assert reason in line and line.endswith("or use off")


def test_a_truncated_or_absent_file_is_refused(tmp_path, capsys):
    path = tmp_path / "markov.safetensors"
    assert str(path) in refusal(capsys, "--speculative-ddtree-markov", str(path))
    save_file(factors(), path)
    path.write_bytes(path.read_bytes()[:-100])
    assert str(path) in refusal(capsys, "--speculative-ddtree-markov", str(path))


@pytest.mark.parametrize("weight", ["-0.5", "nan", "inf", "much"])
def test_weights_that_are_refused(weight, capsys):
    line = refusal(capsys, f"--speculative-ddtree-markov-weight={weight}")
    assert "--speculative-ddtree-markov-weight" in line and "0 is off" in line


def test_which_file_is_served(tmp_path):
    """Beside the drafter by default; another by name; none with off, with weight 0, or where there is none."""
    from sglang_ddtree.server_args import markov_file

    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(DRAFT) / name, tmp_path)
    draft = ["--speculative-draft-model-path", str(tmp_path)]
    assert markov_file(parse(*draft)) is None
    beside, other = tmp_path / markov.FILE_NAME, tmp_path / "other.safetensors"
    save_file(factors(), beside)
    save_file(factors(rank=2), other)
    assert markov_file(parse(*draft)) == str(beside)
    assert markov_file(parse(*draft, "--speculative-ddtree-markov", str(other))) == str(other)
    assert markov_file(parse(*draft, "--speculative-ddtree-markov", "off")) is None
    assert markov_file(parse(*draft, "--speculative-ddtree-markov-weight", "0")) is None


def test_the_demo_drafter_has_its_factors():
    loaded = markov.load(Path(DRAFT) / markov.FILE_NAME, 4096, 1.0, "cpu")
    assert loaded.left.shape == (4096, 64)


def test_fit_repeats_bit_for_bit(tmp_path):
    for kind in ("py", "md"):  # a copy, so that nobody edits it between the two runs
        text = "".join(
            p.read_text() for p in sorted((ROOT / {"py": "test", "md": "docs"}[kind]).rglob(f"*.{kind}"))
        )
        (tmp_path / f"text.{kind}").write_text(text)
    texts = ["--texts", str(tmp_path / "*.py"), "--texts", str(tmp_path / "text.md")]
    command = [sys.executable, "-m", "sglang_ddtree", "fit-markov", "--model", TARGET, "--rank", "8", *texts]
    for name in ("a", "b"):
        done = subprocess.run(
            [*command, "--out", str(tmp_path / name)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    markov.read(tmp_path / "a", 4096)
    with safe_open(tmp_path / "a", framework="pt") as file:
        settings = json.loads(file.metadata()[markov.SETTINGS])
    assert settings["rank"] == 8 and settings["pairs"] > 10_000


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "give either --texts or --from-target"),
        (("--texts", "x", "--from-target", "9"), "give either --texts or --from-target"),
        (("--texts", "/nowhere/*.txt"), "--texts /nowhere/*.txt: no such file"),
        (("--texts", "README.md", "--budgets", "x"), "--budgets x: give whole numbers"),
        (("--texts", "README.md", "--model", "/nowhere"), "--model /nowhere: "),
        (("--texts", "README.md", "--out", "/nowhere/m"), "--out /nowhere/m: no folder /nowhere"),
        (("--texts", "/dev/null"), "--texts /dev/null: no such file"),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(words, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["fit-markov", "--model", TARGET, "--out", str(tmp_path / "m"), *words]
    done = CliRunner().invoke(app, words)
    lines = [line for line in done.output.splitlines() if "error: " in line]
    assert done.exit_code == 1
    assert len(lines) == 1 and complaint in lines[0], done.output
    assert not (tmp_path / "m").exists()
