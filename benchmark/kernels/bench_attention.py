"""tree_attention at the attention layers of a 27B hybrid against SGLang's stock verify attention; see bench_tree."""

from __future__ import annotations

import torch
from sglang_ddtree_kernel.build_tree import build_tree
from sglang_ddtree_kernel.tree_attention import tree_attention
from sglang_ddtree_kernel.tree_types import unpack_ancestors

from benchmark.kernels.timing import (
    BYTES_PER_US,
    FLOPS_PER_US,
    ROTATION_BYTES,
    Report,
    candidates,
    measure,
    poisoned,
)

Q_HEADS, KV_HEADS, HEAD_DIM = 24, 4, 256


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
