"""Times the draft-tree kernels at the shapes of a 27B hybrid against torch or the stock kernel, on one GPU.

    python -m benchmark.kernels.bench_tree [--json FILE] [--only OP]

Every case is checked against its specification first, on outputs that were poisoned. Large inputs rotate
through more memory than the L2 cache holds. Times are medians of CUDA-graph replays, per call.
"""

from __future__ import annotations

import argparse

import torch
from sglang_ddtree_kernel.accept_tree import accept_tree, greedy_tokens
from sglang_ddtree_kernel.build_tree import build_tree
from sglang_ddtree_kernel.compact_kv import KvPools, compact_kv
from sglang_ddtree_kernel.condition_children import condition_children
from sglang_ddtree_kernel.reference.accept_tree import accept_tree_walk
from sglang_ddtree_kernel.reference.build_tree import build_tree_heap, build_tree_levels
from sglang_ddtree_kernel.reference.condition_children import condition_children as condition_reference
from sglang_ddtree_kernel.reference.topk_logprobs import topk_logprobs as topk_reference
from sglang_ddtree_kernel.topk_logprobs import merge_topk, topk_logprobs

from benchmark.kernels.bench_attention import bench_attention
from benchmark.kernels.timing import (
    BYTES_PER_US,
    CAP,
    HORIZON,
    ROTATION_BYTES,
    VOCAB,
    Report,
    candidates,
    measure,
    poisoned,
    read_once,
)

KV_HEADS, HEAD_DIM, LAYERS, RANK = 4, 256, 16, 128


def bench_topk(report: Report) -> None:
    for rows in (15, 120, 240):
        size = rows * VOCAB * 2
        sets = [
            torch.randn(rows, VOCAB, device="cuda").mul_(3).bfloat16()
            for _ in range(max(2, ROTATION_BYTES // size))
        ]
        got, wanted = poisoned(lambda sets=sets: topk_logprobs(sets[0], CAP)), topk_reference(sets[0], CAP, 0)
        assert torch.equal(got.values, wanted.values) and torch.equal(got.ids, wanted.ids)
        error = (got.lse.double() - sets[0].double().logsumexp(1)).abs().max().item()
        ours = measure([lambda x=x: topk_logprobs(x, CAP) for x in sets])
        stock = measure([lambda x=x: (x.topk(CAP), x.logsumexp(1)) for x in sets])
        once = measure([lambda x=x: read_once(x) for x in sets])
        floor = size / BYTES_PER_US
        case = f"{rows} x {VOCAB} bf16, k {CAP}"
        report.add(
            "topk_logprobs",
            case,
            ours,
            stock,
            "torch.topk + lse",
            floor,
            ">= 4x",
            stock >= 4 * ours,
            f"{error:.1e}",
        )
        report.add("topk_logprobs", case, ours, once, "one read", floor, "under 2 reads", ours < 2 * once)
    parts = [topk_logprobs(x, CAP) for x in sets[:2]]
    fields = [torch.stack(field) for field in zip(*parts, strict=True)]
    report.add(
        "merge_topk", "2 shards, 240 rows", measure([lambda: merge_topk(*fields)]), None, "", 0.0, "", None
    )


def bench_greedy(report: Report) -> None:
    for rows in (16, 64, 512):
        size = rows * VOCAB * 4
        sets = [torch.randn(rows, VOCAB, device="cuda") for _ in range(max(2, ROTATION_BYTES // size))]
        ties = sets[0].round()
        first = (ties == ties.amax(1, keepdim=True)).int().argmax(1)
        assert torch.equal(poisoned(lambda ties=ties: greedy_tokens(ties)), first)
        ours = measure([lambda x=x: greedy_tokens(x) for x in sets])
        stock = measure([lambda x=x: torch.argmax(x, -1) for x in sets])
        once = measure([lambda x=x: read_once(x) for x in sets])
        floor = size / BYTES_PER_US
        case = f"{rows} x {VOCAB} fp32"
        report.add("greedy_tokens", case, ours, stock, "torch.argmax", floor, "", None)
        report.add("greedy_tokens", case, ours, once, "one read", floor, "", None)


def bench_build(report: Report) -> None:
    for bs, budget, bar in (
        (1, 64, 60),
        (32, 64, 100),
        (1, 15, None),
        (1, 127, None),
        (32, 127, None),
        (1, 511, None),
    ):
        case = candidates(bs)
        got, wanted = (
            poisoned(lambda case=case, budget=budget: build_tree(*case, budget)),
            build_tree_heap(*case, budget),
        )
        for name in ("tokens", "parents", "depths", "ancestors", "valid_counts"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name
        ours = measure([lambda case=case, budget=budget: build_tree(*case, budget)])
        torch_us = measure([lambda case=case, budget=budget: build_tree_levels(*case, budget)])
        met = None if bar is None else ours < bar
        report.add(
            "build_tree",
            f"bs {bs}, B {budget}",
            ours,
            torch_us,
            "torch, by levels",
            0.0,
            f"< {bar} us" if bar else "",
            met,
        )


def bench_condition(report: Report) -> None:
    """What conditioned children add to a tree of 63 nodes; every case gathers other rows of the factors."""
    left, right = torch.randn(2, VOCAB, RANK, device="cuda").mul_(0.3).bfloat16()
    for bs, bar in ((1, 40), (32, 100)):
        cases = [candidates(bs) for _ in range(16)]

        def conditioned(logprobs, ids, roots):
            return build_tree(condition_children(logprobs, ids, left, right, 1.0), ids, roots, 63)

        logprobs, ids, roots = cases[0]
        got = poisoned(lambda: condition_children(logprobs, ids, left, right, 1.0))  # noqa: B023
        wanted = condition_reference(logprobs, ids, left, right, 1.0)
        error = (got - wanted).abs().max().item()
        assert error < 1e-4
        tree, heap = conditioned(*cases[0]), build_tree_heap(got, ids, roots, 63)
        for name in ("tokens", "parents", "depths", "ancestors", "valid_counts"):
            assert torch.equal(getattr(tree, name), getattr(heap, name)), name
        both = measure([lambda case=case: conditioned(*case) for case in cases])
        plain = measure([lambda case=case: build_tree(*case, 63) for case in cases])
        alone = measure([lambda case=case: condition_children(*case[:2], left, right, 1.0) for case in cases])
        floor = 2 * bs * HORIZON * CAP * RANK * 2 / BYTES_PER_US
        case, met = f"bs {bs}, R {RANK}, B 63", both - plain < bar
        report.add("condition+build", case, both, plain, "build_tree", 0.0, f"< {bar} us more", met)
        report.add("condition", case, alone, None, "", floor, "", None, f"{error:.1e}")


def bench_accept(report: Report) -> None:
    for bs in (1, 32):
        _bench_accept(report, bs)


def _bench_accept(report: Report, bs: int) -> None:
    tree = build_tree(*candidates(bs), 63)
    # Targets that follow the best child, so that the whole depth is walked.
    targets = torch.zeros(bs, 64, dtype=torch.int64, device="cuda")
    for row in range(63, 0, -1):
        targets.scatter_(1, tree.parents[:, row : row + 1].long().clamp(min=0), tree.tokens[:, row : row + 1])
    slots = torch.randperm(bs * 64, device="cuda").view(bs, 64)
    got = poisoned(lambda: accept_tree(tree, targets, slots, HORIZON))
    for a, b in zip(got, accept_tree_walk(tree, targets, slots, HORIZON), strict=True):
        assert torch.equal(a, b)
    ours = measure([lambda: accept_tree(tree, targets, slots, HORIZON)])
    torch_us = measure([lambda: accept_tree_walk(tree, targets, slots, HORIZON)])
    case = f"bs {bs}, 64 rows, len {got.lens.float().mean().item():.0f}"
    report.add("accept_tree", case, ours, torch_us, "torch", 0.0, "", None)


def bench_compact(report: Report) -> None:
    for bs in (1, 32):
        pools = [torch.randn(65_536, KV_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2 * LAYERS)]
        order = torch.randperm(65_536, device="cuda")[: bs * 64].view(bs, 64)
        path = torch.rand(bs, 63, device="cuda").topk(HORIZON).indices.sort(1).values + 1
        src, dst = order.gather(1, path), order[:, 1 : HORIZON + 1].contiguous()
        before = [pool.clone() for pool in pools]
        table = KvPools(pools)
        compact_kv(table, dst, src)
        for pool, old in zip(pools, before, strict=True):
            old[dst] = old[src]
            assert torch.equal(pool, old)

        def by_torch(pools=pools, dst=dst, src=src):
            for pool in pools:
                pool[dst] = pool[src]

        ours = measure([lambda table=table, dst=dst, src=src: compact_kv(table, dst, src)])
        floor = 2 * bs * HORIZON * KV_HEADS * HEAD_DIM * 2 * len(pools) / BYTES_PER_US
        report.add(
            "compact_kv",
            f"bs {bs}, {len(pools)} pools",
            ours,
            measure([by_torch]),
            "torch, per pool",
            floor,
            "",
            None,
        )


BENCHES = {
    "topk_logprobs": bench_topk,
    "greedy_tokens": bench_greedy,
    "build_tree": bench_build,
    "condition_children": bench_condition,
    "accept_tree": bench_accept,
    "compact_kv": bench_compact,
    "tree_attention": bench_attention,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="append one JSON line per row to this file")
    parser.add_argument("--only", choices=BENCHES)
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report(options.json)
    for name, bench in BENCHES.items():
        if options.only in (None, name):
            bench(report)
    print(torch.cuda.get_device_name())
    report.show()
