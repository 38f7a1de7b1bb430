"""What the kernel benchmarks share: the chip's rates, medians of CUDA-graph replays, poisoned outputs, the table."""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

BYTES_PER_US = 4.3e6  # device-to-device copy of an H200, bytes read and written
FLOPS_PER_US = 790e6  # dense bf16 products of an H200 on random data
ROTATION_BYTES = 256 << 20  # several times the L2 cache
VOCAB, HORIZON, CAP = 248_320, 15, 8  # of the drafts


def measure(calls: list, repeats: int = 25) -> float:
    """Median microseconds of one call, from a graph of all of them (at least 16) in order."""
    calls = calls * max(1, -(-16 // len(calls)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return sorted(times)[len(times) // 2]


def poisoned(call):
    """The result of a call whose fresh outputs start as NaN or the greatest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


class Report:
    def __init__(self, path: str | None):
        self.file = open(path, "a") if path else None  # noqa: SIM115
        self.lines = []

    def add(self, op, case, ours, baseline, against, floor, bar, met, error=None):
        self.lines.append((op, case, ours, baseline, against, floor, bar, met, error))
        names = ("op", "case", "us", "baseline_us", "baseline", "floor_us", "bar", "met", "error")
        if self.file:
            self.file.write(json.dumps(dict(zip(names, self.lines[-1], strict=True))) + "\n")
            self.file.flush()

    def show(self):
        row = "{:<15}{:<26}{:>9}{:>11}  {:<22}{:>7}{:>9}  {:<26}{:<5}{}"
        print(
            row.format(
                "op", "case", "ours us", "baseline", "(which)", "ratio", "floor us", "bar", "met", " error"
            )
        )
        for op, case, ours, baseline, against, floor, bar, met, error in self.lines:
            ratio = f"{baseline / ours:.2f}" if baseline else "-"
            base = f"{baseline:.1f}" if baseline else "-"
            met = {True: "yes", False: "NO", None: "-"}[met]
            error = "" if error is None else f" {error}"
            print(row.format(op, case, f"{ours:.1f}", base, against, ratio, f"{floor:.1f}", bar, met, error))


@triton.jit
def _read_kernel(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.max(tl.load(x + at, mask=at < size, other=0).to(tl.float32)))


def read_once(x: torch.Tensor) -> None:
    """Reads x and writes a maximum per 8192 elements: the cost of one pass, launch included."""
    out = x.new_empty(triton.cdiv(x.numel(), 8192), dtype=torch.float32)
    _read_kernel[(len(out),)](x, out, x.numel(), BLOCK=8192, num_warps=8)


@triton.jit
def _rewrite_kernel(x, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, -tl.load(x + at, mask=at < size), mask=at < size)


def rewrite_once(x: torch.Tensor) -> None:
    """Reads contiguous x and writes it in its place, negated: the cost of one pass, launch included."""
    _rewrite_kernel[(triton.cdiv(x.numel(), 4096),)](x, x.numel(), BLOCK=4096, num_warps=4)


def candidates(bs: int):
    ids = torch.randint(VOCAB, (bs, HORIZON, CAP), device="cuda")
    logprobs = (
        torch.randn(bs, HORIZON, CAP, device="cuda").mul_(2).log_softmax(-1).sort(-1, descending=True).values
    )
    return logprobs, ids, torch.randint(VOCAB, (bs,), device="cuda")
