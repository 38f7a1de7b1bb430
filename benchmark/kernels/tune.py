"""Sweep of launch parameters at served shapes, on one GPU: which defaults should the launchers have?

python -m benchmark.kernels.tune [--only OPERATOR ...]

Candidates stand in rounds; the best of a round, by the geometric mean over the cases, is the base of the next. Every
candidate is checked against the specification first. Times are medians of CUDA-graph replays in microseconds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from sglang_ddtree_kernel._argmax_triton import argmax_triton
from sglang_ddtree_kernel._conv1d_tree_triton import conv1d_tree_triton
from sglang_ddtree_kernel._gdn_commit_triton import gdn_commit_triton
from sglang_ddtree_kernel._topk_logprobs_triton import topk_logprobs_triton
from sglang_ddtree_kernel.reference.conv1d_tree import conv1d_tree as conv_reference
from sglang_ddtree_kernel.reference.gdn_commit import gdn_commit as commit_reference
from sglang_ddtree_kernel.reference.topk_logprobs import topk_logprobs as topk_reference

from benchmark.kernels.bench_gdn import (
    DIM,
    HV,
    LAYERS,
    WIDTH,
    bf16,
    commit_inputs,
    random_parents,
    relative_error,
)
from benchmark.kernels.timing import CAP, ROTATION_BYTES, VOCAB, measure

ROUNDS = {
    "gdn_commit": [
        [{}, dict(stream=True), dict(stream=False)],
        [{}, dict(path_registers=96), dict(path_registers=128)],
        [{}, dict(value_rows=32, num_warps=1), dict(value_rows=32, num_warps=2)],
    ],
    "topk_logprobs": [
        [{}, dict(steps=2), dict(steps=4), dict(steps=8), dict(steps=16)],
        [{}, dict(group=64), dict(group=16)],
    ],
    "greedy_tokens": [
        [
            {},
            dict(block=2048, num_warps=4),
            dict(block=2048, num_warps=2),
            dict(block=1024, num_warps=1),
            dict(block=8192, num_warps=8),
            dict(block=4096, num_warps=8),
        ],
    ],
    "conv1d_tree": [
        [
            {},
            dict(rows=16, channels=64, num_warps=2),
            dict(rows=16, channels=256, num_warps=8),
            dict(rows=8, channels=128, num_warps=2),
            dict(rows=8, channels=128, num_warps=4),
            dict(rows=32, channels=128, num_warps=8),
        ],
    ],
}


def rotating(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Several times what the L2 cache holds, but two tensors at least."""
    first = make()
    size = first.numel() * first.element_size()
    return [first] + [make() for _ in range(max(1, ROTATION_BYTES // size - 1))]


def commit():
    small = commit_inputs(1, 2, 16)
    small["accept_lens"][1] = 5
    small["track_slots"] = torch.tensor([-1, 0], device="cuda")
    small["track_steps"] = torch.tensor([0, 4], device="cuda", dtype=torch.int32)

    def fresh():
        return small | {name: small[name].clone() for name in ("states", "conv_states")}

    want = fresh()
    commit_reference(**want)

    def check(**options):
        got = fresh()
        gdn_commit_triton(**got, **options)
        assert torch.equal(got["conv_states"], want["conv_states"])
        # Values are rounded to bf16 after the convolution, where last bits may differ.
        assert relative_error(got["states"], want["states"].double()) < 2e-3

    cases = {}
    for bs in (1, 8):
        for tokens in (5, 16):
            inputs = commit_inputs(LAYERS, bs, tokens)
            cases[f"bs {bs}, {tokens} tokens"] = lambda inputs=inputs, **options: [
                lambda: gdn_commit_triton(**inputs, **options)
            ]
    return check, cases


def topk():
    small = bf16(15, VOCAB).mul_(3)
    want = topk_reference(small, CAP, 0)

    def check(**options):
        got = topk_logprobs_triton(small, CAP, **options)
        assert torch.equal(got.values, want.values) and torch.equal(got.ids, want.ids)
        assert (got.lse - want.lse).abs().max() < 1e-4

    cases = {}
    for rows in (15, 120, 240):
        sets = rotating(lambda rows=rows: bf16(rows, VOCAB).mul_(3))
        cases[f"{rows} rows"] = lambda sets=sets, **options: [
            lambda x=x: topk_logprobs_triton(x, CAP, **options) for x in sets
        ]
    return check, cases


def greedy():
    small = torch.randn(16, VOCAB, device="cuda").round()  # many ties
    want = (small == small.amax(1, keepdim=True)).int().argmax(1)

    def check(**options):
        assert torch.equal(argmax_triton(small, **options), want)

    cases = {}
    for rows in (16, 64, 512):
        sets = rotating(lambda rows=rows: torch.randn(rows, VOCAB, device="cuda"))
        cases[f"{rows} rows"] = lambda sets=sets, **options: [
            lambda x=x: argmax_triton(x, **options) for x in sets
        ]
    return check, cases


def conv_inputs(bs: int, num_rows: int) -> dict:
    return dict(
        x=bf16(bs, num_rows, DIM),
        conv_states=bf16(bs + 1, DIM, WIDTH - 1),
        slots=torch.arange(1, bs + 1, device="cuda"),
        weight=bf16(DIM, WIDTH),
        bias=None,
        parents=torch.tensor([random_parents(num_rows)] * bs, device="cuda", dtype=torch.int32),
        gates=(bf16(bs, num_rows, HV), bf16(bs, num_rows, HV)),
        stash=(bf16(bs, num_rows, DIM), bf16(bs, num_rows, HV), bf16(bs, num_rows, HV)),
    )


def conv():
    small = conv_inputs(2, 19)
    want = conv_reference(**small)

    def check(**options):
        for kept in small["stash"]:
            kept.fill_(float("nan"))
        assert relative_error(conv1d_tree_triton(**small, **options), want.double()) < 2e-3
        for kept, given in zip(small["stash"], (small["x"], *small["gates"]), strict=True):
            assert torch.equal(kept, given)

    cases = {}
    for bs, num_rows in ((1, 16), (1, 32), (1, 64), (8, 32)):
        inputs = conv_inputs(bs, num_rows)
        cases[f"bs {bs} x {num_rows}"] = lambda inputs=inputs, **options: [
            lambda: conv1d_tree_triton(**inputs, **options)
        ]
    return check, cases


OPERATORS = {"gdn_commit": commit, "topk_logprobs": topk, "greedy_tokens": greedy, "conv1d_tree": conv}


def sweep(name: str) -> None:
    check, cases = OPERATORS[name]()
    print(f"\n{name:40}" + "".join(f"{case:>18}" for case in cases), flush=True)
    best = {}
    for candidates in ROUNDS[name]:
        means = []
        for candidate in candidates:
            options = best | candidate
            check(**options)
            times = [measure(calls(**options), repeats=10) for calls in cases.values()]
            means.append((math.prod(times), options))
            label = ", ".join(f"{option} {value}" for option, value in candidate.items()) or "best so far"
            print(f"  {label:38}" + "".join(f"{time:18.2f}" for time in times), flush=True)
        best = min(means, key=lambda mean: mean[0])[1]
    print(f"  best: {best or 'defaults'}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=OPERATORS, nargs="+", default=list(OPERATORS))
    only = parser.parse_args().only
    if not torch.cuda.is_available():
        raise SystemExit("benchmark/kernels/tune.py: needs an NVIDIA GPU, and none was found")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    for name in OPERATORS:
        if name in only:
            sweep(name)
            torch.cuda.empty_cache()
