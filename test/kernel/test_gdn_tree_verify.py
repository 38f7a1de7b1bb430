from __future__ import annotations

import pytest
import torch
from gdn_cases import SMALL, TREES, Draw, Heads
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_ddtree_kernel.gdn_tree_verify import gdn_tree_verify
from sglang_ddtree_kernel.reference.gdn_tree_verify import TreePlan, gdn_tree_verify_replay
from sglang_ddtree_kernel.tree_types import chain_ancestors
from tree_cases import chain_tree, random_tree

# Outputs are of order 1 and sums run over at most 24 terms at 16 levels: a few dozen roundings of 2^-24 in
# fp32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6}


def case(tree, heads: Heads = SMALL, dtype=torch.float32, seed=0, span=1.0):
    bs, num_rows = tree.tokens.shape
    draw = Draw(seed, dtype)
    return dict(
        mixed_qkv=draw.normal(bs, num_rows, heads.dim),
        **dict(
            zip(("a", "b", "A_log", "dt_bias"), draw.gates(bs, num_rows, HV=heads.HV, span=span), strict=True)
        ),
        states=draw.normal(bs + 2, heads.HV, heads.V, heads.K),
        slots=torch.arange(bs).flip(0) + 1,
        ancestors=tree.ancestors,
        num_k_heads=heads.H,
        head_k_dim=heads.K,
    )


def in_float64(inputs):
    return {
        name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in inputs.items()
    }


def error(inputs):
    """Largest difference from the replay in float64, relative to its largest output."""
    want = gdn_tree_verify_replay(**in_float64(inputs))
    got = gdn_tree_verify(**inputs)
    assert got.dtype == inputs["mixed_qkv"].dtype and got.isfinite().all()
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tree", TREES)
def test_equals_replay(tree, dtype):
    assert error(case(TREES[tree](), dtype=dtype)) < TOLERANCE[dtype]


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    bs=st.integers(1, 3),
    num_rows=st.integers(1, 40),
    horizon=st.integers(1, 15),
    invalid=st.integers(0, 8),
)
def test_equals_replay_on_random_trees(seed, bs, num_rows, horizon, invalid):
    tree = random_tree(seed, bs, num_rows, horizon, invalid=invalid)
    assert error(case(tree, Heads(1, 2, 8, 8), seed=seed)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("heads", [Heads(1, 1, 8, 8), Heads(2, 2, 16, 8), Heads(4, 12, 8, 16)], ids=str)
def test_head_layouts(heads):
    assert error(case(random_tree(3, 2, 20, 6), heads)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("span", [0.0, 5.0, 30.0])
def test_extreme_gates(span):
    assert error(case(random_tree(4, 2, 33, 15), span=span)) < TOLERANCE[torch.float32]


def test_strong_decay_near_the_root_keeps_the_digits_of_mild_ones_below():
    inputs = case(chain_tree(1, 16))
    inputs["a"] = torch.full_like(inputs["a"], -4.0)
    inputs["a"][:, 1] = 2000.0
    assert error(inputs) < TOLERANCE[torch.float32]


def test_near_identical_keys_with_beta_near_one():
    """The hardest system to solve: A is close to the all-ones triangle and its powers would grow."""
    inputs = case(chain_tree(1, 64))
    heads, keys = SMALL, slice(SMALL.H * SMALL.K, 2 * SMALL.H * SMALL.K)
    inputs["mixed_qkv"][..., keys] = inputs["mixed_qkv"][:, :1, keys] + 1e-3 * Draw(9).normal(
        1, 64, heads.H * heads.K
    )
    inputs["a"] -= 20.0  # decay near 1
    inputs["b"] += 12.0
    # 64 substitutions in a row, each as exact as fp32, may add up their roundings.
    assert error(inputs) < 64 * 2**-22


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_values_are_rounded_once(dtype):
    inputs = case(random_tree(5, 2, 16, 6))
    inputs["mixed_qkv"] = inputs["mixed_qkv"].to(dtype)
    # q, k, v are exact in fp32, so only the output's rounding (half a unit in the last place) remains.
    assert error(inputs) < torch.finfo(dtype).eps


def test_bf16_pool():
    inputs = case(random_tree(6, 2, 16, 6))
    inputs["states"] = inputs["states"].bfloat16()
    assert error(inputs) < TOLERANCE[torch.float32]


def test_padded_request_starts_from_zeros_and_ignores_the_pool():
    inputs = case(random_tree(7, 3, 16, 6))
    inputs["slots"] = torch.tensor([2, -1, 3])
    inputs["states"][0] = float("nan")
    assert error(inputs) < TOLERANCE[torch.float32]


def test_rows_off_the_path_do_not_matter():
    tree = random_tree(8, 1, 24, 6)
    inputs = case(tree)
    want = gdn_tree_verify(**inputs)
    off = ~TreePlan.from_ancestors(tree.ancestors).ancestors[0, -1].bool()
    inputs["mixed_qkv"][0, off] *= 1e3
    torch.testing.assert_close(gdn_tree_verify(**inputs)[0, -1], want[0, -1], rtol=1e-5, atol=1e-6)


def test_chain_ancestors_on_a_tree_are_not_the_tree():
    inputs = case(random_tree(9, 1, 16, 4))
    exact = gdn_tree_verify(**inputs)
    inputs["ancestors"] = chain_ancestors(1, 16)
    assert error(inputs) < TOLERANCE[torch.float32]
    assert (gdn_tree_verify(**inputs) - exact).abs().max() > 1e-2


def test_shared_plan_and_untouched_pool():
    tree = random_tree(10, 2, 16, 5)
    inputs = case(tree)
    before = inputs["states"].clone()
    plan = TreePlan.from_ancestors(tree.ancestors)
    assert torch.equal(gdn_tree_verify(**inputs, plan=plan), gdn_tree_verify(**inputs))
    assert torch.equal(inputs["states"], before)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixed_qkv", lambda x: x[0]),
        ("mixed_qkv", lambda x: x[..., 1:]),
        ("a", lambda x: x[:, 1:]),
        ("A_log", lambda x: x[1:]),
        ("slots", lambda x: x[:1]),
        ("states", lambda x: x[0]),
        ("ancestors", lambda x: x.int()),
        ("num_k_heads", lambda x: 4),
    ],
)
def test_bad_arguments(name, change):
    inputs = case(random_tree(11, 2, 16, 5))
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=name):
        gdn_tree_verify(**inputs)
