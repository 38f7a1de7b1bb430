"""Flags: what is accepted, and what is refused in one line before anything loads."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
from sglang.srt.plugins import load_plugins
from support.engines import DRAFT, TARGET

load_plugins()

BASE = ["--model-path", TARGET, "--device", "cpu", "--dtype", "float32"]
PAIR = [*BASE, "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", DRAFT]


def parse(*argv: str):
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(list(argv))


def test_defaults_and_derived_fields():
    args = parse(*PAIR)
    assert (args.speculative_ddtree_budget, args.speculative_ddtree_topk_cap) == (31, 8)
    assert (args.speculative_dflash_block_size, args.speculative_num_draft_tokens) == (16, 32)
    assert not args.disable_overlap_schedule
    assert args.enable_mamba_extra_buffer()


@pytest.mark.parametrize(("budget", "reserved"), [(1, 16), (15, 16), (16, 17), (255, 256)])
def test_budget_and_horizon_are_independent(budget, reserved):
    args = parse(*PAIR, "--speculative-ddtree-budget", str(budget))
    assert args.speculative_num_draft_tokens == reserved
    assert args.speculative_dflash_block_size == 16


def test_arguments_travel_to_a_spawned_process():
    args = pickle.loads(pickle.dumps(parse(*PAIR, "--speculative-ddtree-budget", "31")))
    assert args.speculative_ddtree_budget == 31


def test_other_algorithms_are_left_alone():
    assert parse(*BASE).speculative_algorithm is None


@pytest.mark.parametrize(
    ("flags", "named", "remedy"),
    [
        ("--speculative-ddtree-budget 0", "--speculative-ddtree-budget", "at least 1"),
        ("--speculative-ddtree-budget -3", "--speculative-ddtree-budget", "at least 1"),
        ("--speculative-ddtree-budget many", "--speculative-ddtree-budget", "whole number"),
        ("--speculative-ddtree-budget 1.5", "--speculative-ddtree-budget", "whole number"),
        ("--speculative-ddtree-budget 32768", "--speculative-ddtree-budget", "smaller budget"),
        ("--speculative-ddtree-budget 300", "--mamba-track-interval", "use at least that"),
        ("--speculative-ddtree-topk-cap 0", "--speculative-ddtree-topk-cap", "at least 1"),
        ("--speculative-ddtree-topk-cap 4097", "--speculative-ddtree-topk-cap", "vocabulary size 4096"),
        (
            "--speculative-draft-model-path /nowhere",
            "--speculative-draft-model-path",
            "name a drafter's folder",
        ),
        ("--speculative-num-draft-tokens 16", "--speculative-num-draft-tokens", "leave it out"),
        ("--speculative-dflash-block-size 8", "--speculative-dflash-block-size", "leave it out"),
        ("--speculative-eagle-topk 4", "--speculative-eagle-topk", "--speculative-ddtree-topk-cap"),
        ("--speculative-draft-window-size 64", "--speculative-draft-window-size", "leave it out"),
        ("--page-size 16", "--page-size", "--page-size 1"),
        ("--attention-backend triton", "--attention-backend", "torch_native"),
        ("--pp-size 2", "--pp-size", "--tp-size"),
        ("--enable-dp-attention --dp-size 2 --tp-size 2", "--enable-dp-attention", "leave it out"),
        ("--enable-lora", "--enable-lora", "merged weights"),
        ("--mamba-radix-cache-strategy no_buffer", "--mamba-radix-cache-strategy", "extra_buffer"),
        ("--mamba-radix-cache-strategy extra_buffer_lazy", "--mamba-radix-cache-strategy", "extra_buffer"),
        ("--enable-return-hidden-states", "--enable-return-hidden-states", "leave it out"),
    ],
)
def test_refused_in_one_line(flags, named, remedy, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*PAIR, *flags.split())
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert named in lines[0] and remedy in lines[0]


def test_no_draft_path(capsys):
    with pytest.raises(SystemExit):
        parse(*BASE, "--speculative-algorithm", "DDTREE")
    assert "error: --speculative-draft-model-path:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": None}, "no block_size"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 5, 6]}}, "mask_token_id"),
        ({"hidden_size": 512}, "hidden_size 512"),
        ({"vocab_size": 5000}, "vocab_size 5000"),
    ],
)
def test_drafter_that_does_not_fit(change, message, tmp_path, capsys):
    config = json.loads((Path(DRAFT) / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    shutil.copy(Path(DRAFT) / "model.safetensors", tmp_path)
    with pytest.raises(SystemExit):
        parse(*PAIR, "--speculative-draft-model-path", str(tmp_path))
    assert message in capsys.readouterr().err


def test_engine_raises_instead_of_exiting():
    from sglang_ddtree.server_args import DDTreeConfigError, DDTreeServerArgs

    with pytest.raises(DDTreeConfigError, match="--speculative-ddtree-budget"):
        DDTreeServerArgs(
            model_path=TARGET,
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=DRAFT,
            speculative_ddtree_budget=0,
        )
