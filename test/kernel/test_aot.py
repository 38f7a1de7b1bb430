"""Every launch at served shapes, compiled for three generations of GPUs: shared memory and spills."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Bytes of a thread's stack, by dtype of the first argument: what spills is read back once a step at most.
STACK_BOUNDS = {"bfloat16": 128, "int64": 128}
ATTENTION_BOUNDS = {"bfloat16": 640, "float32": 640}  # its accumulators leave no registers to spare
# (inputs, pool). The first is what is served. The others have its tiles on every chip, so the chip with the least
# shared memory decides; fp32, for tests alone, holds operands twice and may spill.
FLOATS = [("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")]
CAPABILITIES, TIGHTEST = (90, 100, 120), 120
REPOSITORY = Path(__file__).parents[2]


def empty(*shape, dtype="bfloat16"):
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def ints(*shape):
    return empty(*shape, dtype="int32")


def longs(*shape):
    return empty(*shape, dtype="int64")


def fp32(*shape):
    return empty(*shape, dtype="float32")


def launch_gdn(capability: int) -> None:
    """The GatedDeltaNet operators at 27B shapes."""
    from sglang_ddtree_kernel import _gdn_tree_verify_triton
    from sglang_ddtree_kernel._conv1d_tree_triton import conv1d_tree_triton
    from sglang_ddtree_kernel._gated_norm_triton import gated_norm_triton
    from sglang_ddtree_kernel._gdn_commit_triton import gdn_commit_triton

    H, HV, K, V = 16, 48, 128, 128
    dim = 2 * H * K + HV * V
    _gdn_tree_verify_triton._supports_dependent_launch = lambda device: True
    for dtype, pool in FLOATS if capability == TIGHTEST else FLOATS[:1]:
        for bs in (1, 8):
            for n in (16, 17, 32, 33, 64, 65, 96, 128, 129, 512):
                gates = empty(bs, n, HV, dtype=dtype)
                _gdn_tree_verify_triton.gdn_tree_verify_triton(
                    empty(bs, n, dim, dtype=dtype), gates, gates, fp32(HV), fp32(HV),
                    empty(bs, HV, V, K, dtype=pool), ints(bs), longs(bs, n, -(-n // 64)), H, K,
                )  # fmt: skip
    for pool in ("float32", "bfloat16"):
        for track, bs in ((None, 8), (ints(8), 8), (None, 1)):
            gates = empty(48, bs, 16, HV)
            gdn_commit_triton(
                empty(48, bs, 16, dim), gates, gates, empty(48, dim, 4), None, fp32(48, HV), fp32(48, HV),
                empty(48, 9, HV, V, K, dtype=pool), empty(48, 9, dim, 3), ints(bs), ints(bs, 16), ints(bs),
                H, K, track, track,
            )  # fmt: skip
    for n in (16, 64):
        inputs = empty(9, dim, 3), ints(8), empty(dim, 4), None, ints(8, n)
        conv1d_tree_triton(empty(8, n, dim), *inputs)
        x, _, a, b = empty(8, n, dim + HV * (V + 2)).split([dim, HV * V, HV, HV], 2)  # of one projection
        stash = empty(8, n, dim), empty(8, n, HV), empty(8, n, HV)
        conv1d_tree_triton(x, *inputs, gates=(a, b), stash=stash)
    for n in (1, 8, 64):
        gated_norm_triton(empty(n, HV, V), empty(n, HV * V), empty(V), 1e-6, "silu")


def launch_attention(capability: int) -> None:
    """Every tile that can be picked; 6 query heads to a KV head. fp32, for tests, in its plainest form."""
    from sglang_ddtree_kernel._tree_attention_triton import pick_tile, tree_attention_triton
    from sglang_ddtree_kernel.tree_types import num_words

    for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
        for d in (64, 128, 256):
            tiles = {
                pick_tile(capability, d, itemsize, stacked) for stacked in (1, 16, 17, 64, 65, 384, 4096)
            }
            for tile in tiles:
                forms = [(64, {})]
                if dtype == "bfloat16":
                    forms += [(64, dict(window=2047, depths=ints(1, 64))), (128, {})]
                for n, options in forms:
                    tree_attention_triton(
                        empty(1, n, 24, d, dtype=dtype), empty(4096, 4, d, dtype=dtype),
                        empty(4096, 4, d, dtype=dtype), ints(8, 32_768), longs(1), longs(1), longs(1, n),
                        longs(1, n, num_words(n)), d**-0.5, 30.0 if d == 128 else 0.0, tile=tile, **options,
                    )  # fmt: skip


def launch_tree() -> None:
    from sglang_ddtree_kernel._argmax_triton import argmax_triton
    from sglang_ddtree_kernel._build_tree_triton import build_tree_triton
    from sglang_ddtree_kernel._condition_children_triton import condition_children_triton
    from sglang_ddtree_kernel._topk_logprobs_triton import merge_topk_triton, topk_logprobs_triton
    from sglang_ddtree_kernel.accept_tree import accept_tree_triton
    from sglang_ddtree_kernel.compact_kv import MAX_MOVES, KvPools, compact_kv_triton

    for dtype in ("float32", "bfloat16", "float16"):
        argmax_triton(empty(64, 248_320, dtype=dtype))
    for k in (1, 8, 32):
        for dtype in ("bfloat16", "float32"):
            for rows in (15, 240):
                topk_logprobs_triton(empty(rows, 248_320, dtype=dtype), k)
        merge_topk_triton(fp32(8, 15, k), longs(8, 15, k), fp32(8, 15))
    for width in (8, 16, 32):
        for rank, dtype in ((64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (128, "float32")):
            factors = empty(248_320, rank, dtype=dtype)
            condition_children_triton(fp32(2, 15, width), longs(2, 15, width), factors, factors, 1.0)
    for rows in (16, 128, 512):
        for lead, spine in (((), False), ((8,), True)):
            tree = build_tree_triton(fp32(2, 15, 8, *lead), longs(2, 15, 8), longs(2), rows - 1, spine=spine)
        accept_tree_triton(tree, longs(2, rows), longs(2, rows), 15)
    pools = KvPools([empty(4096, 4, 256)])
    for moves in (15, 512, MAX_MOVES):
        compact_kv_triton(pools, longs(2, moves), longs(2, moves))


def report(capability: int) -> list[str]:
    """A line for every kernel that does not fit."""
    from aot import SHARED_MEMORY, compile_launch, record_launches

    with record_launches() as launches:
        launch_gdn(capability)
        launch_tree()
        launch_attention(capability)
    faults, seen = [], set()
    for kernel, args, kwargs in launches:
        found = compile_launch(kernel, args, kwargs, capability)
        if found in seen:
            continue
        seen.add(found)
        dtype = str(args[0].dtype).removeprefix("torch.")
        print(capability, dtype, found, flush=True)
        bounds = ATTENTION_BOUNDS if "_tree_attention" in kernel.fn.__module__ else STACK_BOUNDS
        if found.shared > SHARED_MEMORY[capability] or found.stack > bounds.get(dtype, found.stack):
            faults.append(f"{found} {kwargs}")
    return faults


def test_kernels_name_nothing_of_the_triton_module():
    """SGLang replaces triton.next_power_of_2 by what a kernel may not call: tests pass, a server does not start."""
    seen = 0
    for path in (REPOSITORY / "sgl-kernel/sglang_ddtree_kernel").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and "triton.jit" in map(
                ast.unparse, function.decorator_list
            ):
                seen += 1
                names = [ast.unparse(x) for part in function.body for x in ast.walk(part)]
                assert not [x for x in names if x.startswith("triton.")], f"{path.name}: {function.name}"
    assert seen > 50


@pytest.mark.slow
def test_every_launch_fits():
    """All chips at once, each in a process that was not told to interpret."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [Path(__file__).parent, REPOSITORY / "sgl-kernel"]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    runs = [
        subprocess.Popen([sys.executable, __file__, str(c)], env=environment, **pipes) for c in CAPABILITIES
    ]
    outputs = [run.communicate()[0] for run in runs]
    for run, output in zip(runs, outputs, strict=True):
        assert run.returncode == 0, output[-4000:]


if __name__ == "__main__":
    problems = report(int(sys.argv[1]))
    sys.exit("\n".join(problems) if problems else 0)
