"""The kernels of `gdn_tree_verify` against the replay in float64: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from gdn_cases import SMALL, TREES, Draw, Heads
from sglang_ddtree_kernel._gdn_tree_verify_triton import Walk, gdn_tree_verify_triton, pick_walk
from sglang_ddtree_kernel.reference.gdn_tree_verify import gdn_tree_verify_replay
from sglang_ddtree_kernel.tree_types import chain_ancestors
from test_gdn_tree_verify import case, in_float64
from tree_cases import chain_tree, random_tree, star_tree

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter multiplies in fp32; a GPU in three tf32 products, whose error is a few times fp32's.
TOLERANCE = 2e-5 if ON_GPU else 4e-6
TWO_HEADS = Heads(1, 2, 32, 16)


def on_device(inputs):
    return {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in inputs.items()}


def error(inputs, **options):
    """Largest difference from the replay in float64, relative to its largest output."""
    want = gdn_tree_verify_replay(**in_float64(inputs))
    before = inputs["states"].clone()
    inputs = on_device(inputs)
    got = gdn_tree_verify_triton(**inputs, **options).cpu()
    assert got.dtype == inputs["mixed_qkv"].dtype and got.isfinite().all()
    torch.testing.assert_close(inputs["states"].cpu(), before, rtol=0, atol=0, equal_nan=True)
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("block_rows", [16, 32])
@pytest.mark.parametrize("tree", TREES)
def test_equals_replay(tree, block_rows):
    assert error(case(TREES[tree]()), walk=Walk(block_rows, 4, 2)) < TOLERANCE


@pytest.mark.parametrize("group", [1, 2, 3, 5])
def test_groups_of_blocks(group):
    """Five blocks one by one, by twos and by threes with a block to spare, and all at once."""
    assert error(case(random_tree(12, 2, 70, 9), TWO_HEADS), walk=Walk(16, 4, group)) < TOLERANCE


def test_many_heads_hold_fewer_blocks():
    """Their programs leave room for each other; a tree of more than four blocks never is one group."""
    assert [pick_walk(n, 48).group for n in (16, 64, 128, 129)] == [1, 4, 4, 2]
    assert [pick_walk(n, 384).group for n in (16, 64, 65, 512)] == [1, 2, 1, 1]


@pytest.mark.parametrize(
    "num_rows,block_rows,group",
    [(2, 16, 1), (16, 16, 1), (17, 16, 1), (33, 16, 2), (64, 32, 2), (65, 32, 2), (129, 32, 4)],
)
@pytest.mark.parametrize("one_block", [True, False])
def test_root_alone(num_rows, block_rows, group, one_block):
    """The root as a block of its own: the others begin at row 1, so their bits straddle words."""
    shapes = [random_tree(num_rows, 2, num_rows, 15, invalid=num_rows // 8), chain_tree(2, num_rows)]
    for tree in shapes:
        inputs = case(tree, TWO_HEADS)
        walk = Walk(block_rows, 4, group)
        assert error(inputs, walk=walk, one_block=one_block, root_alone=True) < TOLERANCE
        inputs["states"] = inputs["states"].bfloat16()
        assert error(inputs, walk=walk, one_block=one_block, root_alone=True) < TOLERANCE


def test_root_alone_with_strong_decays_and_padding():
    """Below a root that forgets nearly everything, and one whose decay alone would overflow."""
    for a, A_log in ((2000.0, 0.0), (1e30, 80.0)):
        inputs = case(random_tree(8, 2, 33, 9), TWO_HEADS)
        inputs["a"][:, 0] = a
        inputs["A_log"][0] = A_log
        assert error(inputs) < TOLERANCE
        inputs["slots"][-1] = -1
        assert error(inputs) < TOLERANCE


@pytest.mark.parametrize("num_rows", [1, 5, 16, 20, 32])
def test_three_launches_for_one_block(num_rows):
    inputs = case(random_tree(num_rows, 2, num_rows, 9), TWO_HEADS)
    assert error(inputs, walk=Walk(32, 4), one_block=False) < TOLERANCE


@pytest.mark.parametrize("num_rows", [1, 2, 15, 17, 33, 63, 64, 66])
@pytest.mark.parametrize("shape", [chain_tree, star_tree, lambda bs, n: random_tree(n, bs, n, 31, invalid=3)])
def test_sizes_and_shapes(shape, num_rows):
    assert error(case(shape(2, num_rows), TWO_HEADS)) < TOLERANCE


@pytest.mark.parametrize(
    "heads", [Heads(1, 1, 8, 8), Heads(2, 2, 16, 8), Heads(2, 6, 20, 40), Heads(1, 2, 64, 64)], ids=str
)
def test_head_layouts(heads):
    assert error(case(random_tree(3, 2, 20, 6), heads)) < TOLERANCE


@pytest.mark.parametrize("span", [0.0, 5.0, 30.0])
@pytest.mark.parametrize("num_rows", [16, 40])
def test_extreme_gates(num_rows, span):
    assert error(case(random_tree(4, 2, num_rows, 15), span=span)) < TOLERANCE


def test_decay_that_overflows_fp32_forgets_everything():
    inputs = case(chain_tree(1, 20))
    inputs["a"][:, 7] = 1e30
    inputs["A_log"][:] = 80.0
    assert error(inputs) < TOLERANCE


@pytest.mark.parametrize("num_rows", [16, 48])
def test_strong_decay_near_the_root_keeps_the_digits_of_mild_ones_below(num_rows):
    inputs = case(chain_tree(1, num_rows))
    inputs["a"] = torch.full_like(inputs["a"], -4.0)
    inputs["a"][:, 1] = 2000.0
    assert error(inputs) < TOLERANCE


@pytest.mark.parametrize("block_rows", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_near_identical_keys_with_beta_near_one(dtype, block_rows):
    """The hardest system to solve: A is close to the all-ones triangle and its powers would grow."""
    inputs = case(chain_tree(1, 64))
    heads, keys = SMALL, slice(SMALL.H * SMALL.K, 2 * SMALL.H * SMALL.K)
    inputs["mixed_qkv"][..., keys] = inputs["mixed_qkv"][:, :1, keys] + 1e-3 * Draw(9).normal(
        1, 64, heads.H * heads.K
    )
    inputs["a"] -= 20.0  # decay near 1
    inputs["b"] += 12.0
    inputs["mixed_qkv"] = inputs["mixed_qkv"].to(dtype)
    # 64 substitutions in a row may add up their roundings; bf16 rounds the output last.
    tolerance = 64 * 2**-22 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert error(inputs, walk=Walk(block_rows, 4, 2)) < tolerance * (
        5 if ON_GPU and dtype == torch.float32 else 1
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_precision_values_are_rounded_once(dtype, pool_dtype):
    for num_rows in (16, 70):
        inputs = case(random_tree(5, 2, num_rows, 12), Heads(1, 3, 64, 32))
        for name in ("mixed_qkv", "a", "b"):
            inputs[name] = inputs[name].to(dtype)
        inputs["states"] = inputs["states"].to(pool_dtype)
        assert error(inputs) < torch.finfo(dtype).eps


def test_padded_request_starts_from_zeros_and_ignores_the_pool():
    inputs = case(random_tree(7, 3, 40, 6), TWO_HEADS)
    inputs["slots"] = torch.tensor([2, -1, 3], dtype=torch.int32)
    inputs["states"][0] = float("nan")
    assert error(inputs) < TOLERANCE


def test_strided_inputs_and_a_pool_that_is_one_layer_of_many():
    inputs = case(random_tree(8, 2, 20, 6), TWO_HEADS)
    wide = torch.randn(2, 20, TWO_HEADS.dim + 5)
    wide[..., : TWO_HEADS.dim] = inputs["mixed_qkv"]
    layers = torch.randn(inputs["states"].shape[0], 3, *inputs["states"].shape[1:])
    layers[:, 1] = inputs["states"]
    inputs |= {"mixed_qkv": wide[..., : TWO_HEADS.dim], "states": layers[:, 1]}
    assert error(inputs) < TOLERANCE


def test_chain_ancestors_on_a_tree():
    inputs = case(random_tree(9, 1, 40, 4), TWO_HEADS)
    inputs["ancestors"] = chain_ancestors(1, 40)
    assert error(inputs) < TOLERANCE


def test_a_pool_with_scattered_keys_is_refused():
    inputs = case(random_tree(10, 1, 8, 4), TWO_HEADS)
    inputs["states"] = inputs["states"].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="states"):
        gdn_tree_verify_triton(**inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "bs,num_rows", [(1, 16), (1, 17), (1, 32), (1, 64), (2, 65), (3, 100), (1, 129), (1, 512), (9, 16)]
)
def test_served_sizes(bs, num_rows, pool_dtype):
    inputs = case(random_tree(1, bs, num_rows, 31), Heads(4, 12, 128, 128))
    for name in ("mixed_qkv", "a", "b"):
        inputs[name] = inputs[name].bfloat16()
    inputs["states"] = inputs["states"].to(pool_dtype)
    assert error(inputs) < torch.finfo(torch.bfloat16).eps
