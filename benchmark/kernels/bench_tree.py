"""Times the draft-tree kernels at the shapes of a 27B hybrid against torch or the stock kernel, on one GPU.

    python benchmark/kernels/bench_tree.py [--json FILE] [--only OP]

Every case is checked against its specification first, on outputs that were poisoned. Large inputs rotate
through more memory than the L2 cache holds. Times are medians of CUDA-graph replays, per call.
"""

from __future__ import annotations

import argparse
import json

import torch
import triton
import triton.language as tl
from sglang_ddtree_kernel.accept_tree import accept_tree, greedy_tokens
from sglang_ddtree_kernel.build_tree import build_tree
from sglang_ddtree_kernel.compact_kv import KvPools, compact_kv
from sglang_ddtree_kernel.condition_children import condition_children
from sglang_ddtree_kernel.reference.accept_tree import accept_tree_walk
from sglang_ddtree_kernel.reference.build_tree import build_tree_heap, build_tree_levels
from sglang_ddtree_kernel.reference.condition_children import condition_children as condition_reference
from sglang_ddtree_kernel.reference.topk_logprobs import topk_logprobs as topk_reference
from sglang_ddtree_kernel.topk_logprobs import merge_topk, topk_logprobs
from sglang_ddtree_kernel.tree_attention import tree_attention
from sglang_ddtree_kernel.tree_types import unpack_ancestors

BYTES_PER_US = 4.3e6  # device-to-device copy of an H200, bytes read and written
FLOPS_PER_US = 790e6  # dense bf16 products of an H200 on random data
ROTATION_BYTES = 256 << 20  # several times the L2 cache
VOCAB, Q_HEADS, KV_HEADS, HEAD_DIM, LAYERS = 248_320, 24, 4, 256, 16
HORIZON, CAP, RANK = 15, 8, 128


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


def candidates(bs: int):
    ids = torch.randint(VOCAB, (bs, HORIZON, CAP), device="cuda")
    logprobs = (
        torch.randn(bs, HORIZON, CAP, device="cuda").mul_(2).log_softmax(-1).sort(-1, descending=True).values
    )
    return logprobs, ids, torch.randint(VOCAB, (bs,), device="cuda")


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


def attention_case(bs: int, context: int, num_rows: int):
    slots = bs * (context + num_rows)
    order = torch.randperm(slots, device="cuda").view(bs, -1)
    tree = build_tree(*candidates(bs), num_rows - 1)
    size = 2 * slots * KV_HEADS * HEAD_DIM * 2
    cases = []
    for _ in range(min(max(2, ROTATION_BYTES // size), 16)):
        k, v = torch.randn(2, slots, KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
        cases.append(
            {
                "q": torch.randn(bs, num_rows, Q_HEADS, HEAD_DIM, device="cuda").bfloat16(),
                "k_pool": k,
                "v_pool": v,
                "req_to_token": order.int(),
                "req_pool_indices": torch.arange(bs, device="cuda"),
                "seq_lens": torch.full((bs,), context, device="cuda"),
                "tree_slots": order[:, context:].contiguous(),
                "ancestors": tree.ancestors,
                "scale": HEAD_DIM**-0.5,
            }
        )
    return cases


def exact_attention(case: dict) -> torch.Tensor:
    """float64, one KV head at a time."""
    bs, num_rows = case["tree_slots"].shape
    context = int(case["seq_lens"][0])
    visible = unpack_ancestors(case["ancestors"], num_rows)
    out = torch.empty(bs, num_rows, Q_HEADS, HEAD_DIM, dtype=torch.float64, device="cuda")
    group = Q_HEADS // KV_HEADS
    for b in range(bs):
        slots = torch.cat([case["req_to_token"][b, :context].long(), case["tree_slots"][b]])
        for h in range(KV_HEADS):
            heads = slice(h * group, (h + 1) * group)
            logits = case["q"][b, :, heads].double() @ case["k_pool"][slots, h].double().T * case["scale"]
            logits[..., context:].masked_fill_(~visible[b, :, None], -torch.inf)
            out[b, :, heads] = logits.softmax(-1) @ case["v_pool"][slots, h].double()
    return out


def stock_attention():
    """A function of a case that runs the stock verify attention, or None where SGLang is not installed."""
    try:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    except ImportError as error:
        print(f"stock attention is left out: {error}")
        return None

    def prepare(case: dict):
        bs, num_rows = case["tree_slots"].shape
        context = int(case["seq_lens"][0])
        visible = unpack_ancestors(case["ancestors"], num_rows)
        mask = torch.nn.functional.pad(visible, (context, 0), value=True).contiguous()
        tree_slots = case["tree_slots"].flatten()
        indptr = torch.arange(bs + 1, dtype=torch.int32, device="cuda")
        q = case["q"].flatten(0, 1)
        out = torch.full_like(q, torch.nan)
        arguments = (
            q,
            case["k_pool"][tree_slots],
            case["v_pool"][tree_slots],
            out,
            case["k_pool"],
            case["v_pool"],
            indptr * num_rows,
            indptr * context,
            case["req_to_token"][:, :context].long().flatten(),
            mask.flatten(),
            True,
            indptr.long() * (num_rows * (num_rows + context)),
            num_rows,
            1.0,
            1.0,
            case["scale"],
        )
        return (lambda: extend_attention_fwd(*arguments)), out.view_as(case["q"])

    return prepare


def bench_attention(report: Report) -> None:
    stock = stock_attention()
    shapes = (
        (1, 1024, 64, 1.5),
        (1, 32_768, 64, 3),
        (1, 1024, 16, None),
        (1, 32_768, 16, None),
        (1, 1024, 128, None),
        (8, 1024, 64, None),
        (8, 4096, 16, None),
    )
    for bs, context, num_rows, bar in shapes:
        cases = attention_case(bs, context, num_rows)
        exact = exact_attention(cases[0])

        def error_of(out, exact=exact):
            return ((out.double() - exact).norm() / exact.norm()).item()

        error = f"{error_of(poisoned(lambda cases=cases: tree_attention(**cases[0]))):.2e}"
        ours = measure([lambda case=case: tree_attention(**case) for case in cases])
        stock_us = None
        if stock is not None:
            calls = [stock(case) for case in cases]
            calls[0][0]()
            error += f" stock {error_of(calls[0][1]):.2e}"
            stock_us = measure([call for call, _ in calls])
        keys = bs * (context + num_rows) * KV_HEADS * HEAD_DIM
        floor = max(4 * keys / BYTES_PER_US, 4 * keys * num_rows * (Q_HEADS // KV_HEADS) / FLOPS_PER_US)
        met = None if bar is None or stock_us is None else stock_us >= bar * ours
        case = f"bs {bs}, ctx {context}, {num_rows} rows"
        report.add(
            "tree_attention",
            case,
            ours,
            stock_us,
            "stock extend",
            floor,
            f">= {bar}x" if bar else "",
            met,
            error,
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
