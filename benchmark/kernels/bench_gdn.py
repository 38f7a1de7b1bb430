"""GatedDeltaNet operators at 27B shapes against SGLang's stock kernels and the memory floor, on one GPU.

python -m benchmark.kernels.bench_gdn [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable

import torch
from sglang_ddtree_kernel.conv1d_tree import conv1d_tree
from sglang_ddtree_kernel.gated_norm import gated_norm
from sglang_ddtree_kernel.gdn_commit import gdn_commit
from sglang_ddtree_kernel.gdn_tree_verify import gdn_tree_verify
from sglang_ddtree_kernel.reference import conv1d_tree as conv_reference
from sglang_ddtree_kernel.reference import gated_norm as norm_reference
from sglang_ddtree_kernel.reference import gdn_commit as commit_reference
from sglang_ddtree_kernel.reference.gdn_tree_verify import TreePlan, gdn_tree_verify_wy
from sglang_ddtree_kernel.tree_types import ancestor_words
from triton.testing import do_bench_cudagraph

from benchmark.kernels.timing import BYTES_PER_US, rewrite_once

H, HV, K, V, WIDTH, LAYERS = 16, 48, 128, 128, 4, 48
DIM = 2 * H * K + HV * V
VERIFY_BARS = {(1, 16): 6, (1, 64): 12, (1, 128): 15, (8, 16): 6, (8, 64): 8}
ERROR_BAR = 1.3  # times the stock kernel's error


def microseconds(run: Callable[[], object]) -> float:
    return 1e3 * do_bench_cudagraph(run, rep=20, return_mode="median")


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.isfinite().all()
    return ((got.double() - want).norm() / want.norm()).item()


def in_float64(inputs: dict) -> dict:
    return {
        name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in inputs.items()
    }


def poison_free_memory() -> None:
    """What the caching allocator hands out next holds NaN, so an output nobody wrote shows."""
    blocks = [
        torch.full((1 << size,), float("nan"), device="cuda") for size in range(10, 27) for _ in range(2)
    ]
    del blocks


def random_parents(num_rows: int, horizon: int = 15) -> list[int]:
    """A tree in depth order, narrow enough to reach the horizon once there are rows enough."""
    rng = random.Random(num_rows)
    parents, depths = [-1], [0]
    for row in range(1, num_rows):
        parent = rng.randrange(max(0, row - 12), row)
        while depths[parent] >= horizon:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    order = sorted(range(num_rows), key=lambda row: depths[row])
    place = {row: i for i, row in enumerate(order)}
    return [place.get(parents[row], -1) for row in order]


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def gates(*lead: int) -> dict[str, torch.Tensor]:
    per_head = (*lead[:-2], HV)
    return dict(
        a=bf16(*lead, HV),
        b=bf16(*lead, HV),
        A_log=torch.log(torch.rand(per_head, device="cuda") * 8 + 0.5),
        dt_bias=torch.rand(per_head, device="cuda") * 3 - 2,
    )


def row(
    op: str, case: str, ours: float, stock: float, floor: float, errors: tuple, bar: str, met: bool
) -> dict:
    return dict(
        op=op, case=case, ours_us=ours, stock_us=stock, floor_us=floor, errors=errors, bar=bar, met=met
    )


def verify_case(bs: int, num_rows: int) -> dict:
    from sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent import (
        fused_sigmoid_gating_delta_rule_update,
    )

    parents = torch.tensor([random_parents(num_rows)] * bs, device="cuda")
    inputs = dict(
        mixed_qkv=bf16(bs, num_rows, DIM),
        **gates(bs, num_rows),
        states=torch.randn(bs + 1, HV, V, K, device="cuda") * 0.3,
        slots=torch.arange(1, bs + 1, device="cuda"),
        ancestors=ancestor_words(parents, 16),
        num_k_heads=H,
        head_k_dim=K,
    )
    plan = TreePlan.from_ancestors(inputs["ancestors"])
    exact = {name: x for name, x in in_float64(inputs).items() if name != "ancestors"}
    want = gdn_tree_verify_wy(**exact, plan=plan)

    q, k, v = inputs["mixed_qkv"].view(1, bs * num_rows, DIM).split([H * K, H * K, HV * V], 2)
    stock_inputs = dict(
        A_log=inputs["A_log"],
        a=inputs["a"].view(-1, HV),
        dt_bias=inputs["dt_bias"],
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=q.unflatten(2, (H, K)),
        k=k.unflatten(2, (H, K)),
        v=v.unflatten(2, (HV, V)),
        b=inputs["b"].view(-1, HV),
        initial_state_source=inputs["states"],
        initial_state_indices=inputs["slots"].int(),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(0, bs * num_rows + 1, num_rows, device="cuda", dtype=torch.int32),
        disable_state_update=True,
        intermediate_states_buffer=torch.zeros(bs, num_rows, HV, V, K, device="cuda"),
        intermediate_state_indices=torch.arange(bs, device="cuda", dtype=torch.int32),
        cache_steps=num_rows,
        retrieve_parent_token=parents.clamp(min=0),
    )

    def ours():
        return gdn_tree_verify(**inputs)

    def stock():
        return fused_sigmoid_gating_delta_rule_update(**stock_inputs)

    poison_free_memory()
    errors = relative_error(ours(), want), relative_error(stock().view_as(want), want)
    floor = (bs * HV * V * K * 4 + bs * num_rows * (DIM + HV * V) * 2) / BYTES_PER_US
    times = microseconds(ours), microseconds(stock)
    bar = VERIFY_BARS.get((bs, num_rows))
    met = errors[0] <= ERROR_BAR * errors[1] and (bar is None or times[1] >= bar * times[0])
    return row(
        "gdn_tree_verify", f"bs {bs} x {num_rows}", *times, floor, errors, f"{bar}x" if bar else "-", met
    )


def conv_case(bs: int, num_rows: int) -> dict:
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    parent_rows = random_parents(num_rows)
    parents = torch.tensor([parent_rows] * bs, device="cuda", dtype=torch.int32)
    inputs = dict(
        x=bf16(bs, num_rows, DIM),
        conv_states=bf16(bs + 1, DIM, WIDTH - 1),
        slots=torch.arange(1, bs + 1, device="cuda"),
        weight=bf16(DIM, WIDTH),
        bias=None,
        parents=parents,
    )
    want = conv_reference.conv1d_tree(**in_float64(inputs))
    child, sibling = [-1] * num_rows, [-1] * num_rows
    for above in range(num_rows):
        children = [i for i, parent in enumerate(parent_rows) if parent == above]
        child[above] = children[0] if children else -1
        for left, right in zip(children, children[1:], strict=False):
            sibling[left] = right
    child, sibling = (torch.tensor([x] * bs, device="cuda") for x in (child, sibling))
    windows = torch.zeros(bs, num_rows, DIM, WIDTH - 1, device="cuda", dtype=torch.bfloat16)
    indices, slots = torch.arange(bs, device="cuda", dtype=torch.int32), inputs["slots"].int()
    columns, pool = inputs["x"].transpose(1, 2), inputs["conv_states"].clone()
    found = torch.empty_like(child)

    def ours():
        return conv1d_tree(**inputs)

    def stock():
        return causal_conv1d_update(
            columns,
            pool,
            inputs["weight"],
            None,
            "silu",
            conv_state_indices=slots,
            intermediate_conv_window=windows,
            intermediate_state_indices=indices,
            retrieve_next_token=child,
            retrieve_next_sibling=sibling,
            retrieve_parent_token=found,
        )

    poison_free_memory()
    # The stock kernel moves the window that it reads: its first run is the one to compare.
    errors = relative_error(ours(), want), relative_error(stock().transpose(1, 2), want)
    floor = bs * DIM * 2 * (2 * num_rows + WIDTH - 1) / BYTES_PER_US
    times = microseconds(ours), microseconds(stock)
    bar = 4 if (bs, num_rows) == (1, 64) else None
    met = errors[0] <= ERROR_BAR * errors[1] and (bar is None or times[1] >= bar * times[0])
    return row("conv1d_tree", f"bs {bs} x {num_rows}", *times, floor, errors, f"{bar}x" if bar else "-", met)


def norm_case(bs: int, num_rows: int) -> dict:
    """The stock module norms a copy of the gate, as its model makes one."""
    from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm

    rows = bs * num_rows
    x, projected = bf16(rows, HV, V), bf16(rows, DIM + HV * V)
    gate = projected[:, DIM:]
    norm = RMSNorm(V, eps=1e-6, device="cuda", dtype=torch.bfloat16)
    norm.weight.data.normal_()
    want = norm_reference.gated_norm(x.double(), gate.double(), norm.weight.double(), norm.eps, "silu")

    def ours():
        return gated_norm(x, gate, norm.weight, norm.eps)

    @torch.no_grad()
    def stock():
        return norm(x.view(-1, V), gate.reshape(-1, V)).view(rows, -1)

    poison_free_memory()
    errors = relative_error(ours(), want), relative_error(stock(), want)
    times = microseconds(ours), microseconds(stock)
    met = errors[0] <= ERROR_BAR * errors[1]
    floor = 3 * rows * HV * V * 2 / BYTES_PER_US
    return row("gated_norm", f"bs {bs} x {num_rows}", *times, floor, errors, "-", met)


def commit_inputs(layers: int, bs: int, accepted: int, num_rows: int = 16) -> dict:
    return dict(
        mixed_qkv=bf16(layers, bs, num_rows, DIM),
        **gates(layers, bs, num_rows),
        conv_weight=bf16(layers, DIM, WIDTH) * 0.5,
        conv_bias=None,
        states=torch.randn(layers, bs + 1, HV, V, K, device="cuda") * 0.3,
        conv_states=bf16(layers, bs + 1, DIM, WIDTH - 1),
        slots=torch.arange(1, bs + 1, device="cuda"),
        accepted_rows=torch.arange(num_rows, device="cuda", dtype=torch.int32).repeat(bs, 1),
        accept_lens=torch.full((bs,), accepted, device="cuda", dtype=torch.int32),
        num_k_heads=H,
        head_k_dim=K,
    )


def commit_errors(accepted: int) -> tuple[float, float]:
    """Of one layer's states against float64: the commit's, and those of stock one-token decoding."""
    from sglang.kernels.ops.attention.fla.fused_recurrent import (
        fused_recurrent_gated_delta_rule_packed_decode,
    )
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    inputs = commit_inputs(1, 4, accepted)
    exact, ours, stock = in_float64(inputs), dict(inputs), dict(inputs)
    for copy in (ours, stock):
        copy["states"], copy["conv_states"] = inputs["states"].clone(), inputs["conv_states"].clone()
    commit_reference.gdn_commit(**exact)
    gdn_commit(**ours)
    slots = inputs["slots"].int()
    for step in range(accepted):
        y = causal_conv1d_update(
            inputs["mixed_qkv"][0, :, step].contiguous(),
            stock["conv_states"][0],
            inputs["conv_weight"][0],
            None,
            "silu",
            conv_state_indices=slots,
        )
        fused_recurrent_gated_delta_rule_packed_decode(
            y,
            inputs["a"][0, :, step].contiguous(),
            inputs["b"][0, :, step].contiguous(),
            inputs["A_log"][0],
            inputs["dt_bias"][0],
            K**-0.5,
            stock["states"][0],
            y.new_empty(4, 1, HV, V),
            slots,
            use_qk_l2norm_in_kernel=True,
        )
    assert torch.equal(ours["conv_states"], stock["conv_states"])
    return tuple(relative_error(x["states"], exact["states"]) for x in (ours, stock))


def commit_case(bs: int, accepted: int) -> dict:
    inputs = commit_inputs(LAYERS, bs, accepted)
    states = torch.randn(LAYERS, bs, HV, V, K, device="cuda")
    floor = 2 * states.numel() * 4 / BYTES_PER_US
    errors = commit_errors(accepted)
    ours, once = microseconds(lambda: gdn_commit(**inputs)), microseconds(lambda: rewrite_once(states))
    met = ours < 2 * once and errors[0] <= ERROR_BAR * errors[1]
    return row("gdn_commit", f"bs {bs}, {accepted} tokens", ours, once, floor, errors, "< 2x once", met)


def show(r: dict) -> None:
    """In place of a stock kernel, a commit is compared with reading and writing its states once."""
    stock, ratio = f"{r['stock_us']:9.1f}", f"{r['stock_us'] / r['ours_us']:6.2f}x"
    errors = "{:.2e} / {:.2e}".format(*r["errors"])
    print(
        f"{r['op']:16} {r['case']:16} {r['ours_us']:9.1f} {stock} {ratio} {r['floor_us']:8.1f}  {errors}  "
        f"{r['bar']:>8}  {'yes' if r['met'] else 'NO'}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="append one JSON line per row to this file")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    print(
        f"{'op':16} {'case':16} {'ours us':>9} {'stock us':>9} {'ratio':>7} {'floor us':>8}  "
        f"{'error ours / stock':19}  {'bar':>8}  met"
    )
    cases = [(verify_case, x) for x in [(1, 16), (1, 32), (1, 64), (1, 128), (1, 256), (8, 16), (8, 64)]]
    cases += [(conv_case, x) for x in [(1, 16), (1, 64), (8, 16)]]
    cases += [(norm_case, x) for x in [(1, 16), (1, 64), (8, 16), (8, 64)]]
    cases += [(commit_case, x) for x in [(1, 5), (1, 16), (8, 5), (8, 16)]]
    for case, arguments in cases:
        result = case(*arguments)
        torch.cuda.empty_cache()
        show(result)
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
