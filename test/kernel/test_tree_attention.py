from __future__ import annotations

import pytest
import torch
from sglang_ddtree_kernel.reference.tree_attention import tree_attention_naive
from sglang_ddtree_kernel.tree_attention import tree_attention
from sglang_ddtree_kernel.tree_types import chain_ancestors, pack_ancestors, unpack_ancestors
from tree_cases import random_tree

# fp32 against float64 on unit-variance inputs; half precision is bounded by the rounding of the output.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make_case(lengths, num_rows, q_heads, kv_heads, d, dv, dtype=torch.float32, invalid=0):
    bs, slots = len(lengths), sum(lengths) + len(lengths) * num_rows + 7
    rng = torch.Generator().manual_seed(slots)
    order = torch.randperm(slots, generator=rng)
    req_to_token = torch.zeros(bs + 3, max(lengths) + num_rows + 5, dtype=torch.int32)
    req_pool_indices = torch.randperm(bs + 3, generator=rng)[:bs]
    taken = 0
    for row, length in zip(req_pool_indices.tolist(), lengths, strict=True):
        req_to_token[row, :length] = order[taken : taken + length]
        taken += length
    return {
        "q": torch.randn(bs, num_rows, q_heads, d, generator=rng).to(dtype),
        "k_pool": torch.randn(slots, kv_heads, d, generator=rng).to(dtype),
        "v_pool": torch.randn(slots, kv_heads, dv, generator=rng).to(dtype),
        "req_to_token": req_to_token,
        "req_pool_indices": req_pool_indices,
        "seq_lens": torch.tensor(lengths),
        "tree_slots": order[taken : taken + bs * num_rows].view(bs, num_rows),
        "ancestors": random_tree(slots, bs, num_rows, 15, invalid=invalid).ancestors,
        "scale": d**-0.5,
    }


def with_window(case, window):
    """Rows of a tree at their depths."""
    num_rows = case["q"].shape[1]
    depths = unpack_ancestors(case["ancestors"], num_rows).sum(-1, dtype=torch.int32) - 1
    return case | {"window": window, "depths": depths}


def as_block(case):
    """Rows in sequence that all see each other, as in a drafter's block."""
    bs, num_rows = case["q"].shape[:2]
    return case | {
        "ancestors": pack_ancestors(torch.ones(bs, num_rows, num_rows, dtype=torch.bool)),
        "depths": torch.arange(num_rows, dtype=torch.int32).repeat(bs, 1),
    }


def assert_matches_naive(case):
    out = tree_attention(**case)
    dtype = case["v_pool"].dtype
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), tree_attention_naive(**case), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [1, 16, 65])
@pytest.mark.parametrize(
    "q_heads,kv_heads,d,dv",
    [(2, 1, 32, 32), (6, 2, 16, 16), (3, 3, 16, 24)],
    ids=["2:1", "6:2", "3:3, dv 24"],
)
def test_mixed_lengths(num_rows, q_heads, kv_heads, d, dv):
    assert_matches_naive(make_case([37, 0, 1, 130], num_rows, q_heads, kv_heads, d, dv, invalid=3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    assert_matches_naive(make_case([19, 64], 16, 4, 2, 32, 32, dtype))


@pytest.mark.parametrize("logit_cap", [1.0, 30.0])
def test_logit_cap(logit_cap):
    assert_matches_naive(make_case([19, 64], 16, 4, 2, 32, 32) | {"logit_cap": logit_cap})


def test_129_rows():
    assert_matches_naive(make_case([5], 129, 2, 1, 16, 16))


def test_rows_see_only_their_branch():
    """Keys and values of rows outside the branch may be anything, infinite logits excepted."""
    case = make_case([12], 16, 2, 1, 16, 16)
    out = tree_attention(**case)
    hidden = ((case["ancestors"][0, 15, 0] >> torch.arange(16)) & 1) == 0
    changed = case["tree_slots"][0, hidden]
    case["k_pool"][changed] = 100.0
    case["v_pool"][changed] = 100.0
    torch.testing.assert_close(tree_attention(**case)[0, 15], out[0, 15], rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [1, 3, 16, 36, 37, 200])
@pytest.mark.parametrize("num_rows", [1, 16, 65])
def test_window(num_rows, window):
    assert_matches_naive(with_window(make_case([37, 0, 1, 130], num_rows, 6, 2, 16, 24, invalid=3), window))


@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize("logit_cap", [0.0, 1.0])
def test_block_of_a_drafter(logit_cap, window):
    case = as_block(make_case([37, 0, 130], 16, 4, 2, 16, 16))
    assert_matches_naive(case | {"window": window, "logit_cap": logit_cap})


@pytest.mark.parametrize("window", [1, 5, 14, 29])
def test_chain_in_a_window_is_sliding_attention(window):
    """Position p sees p - window .. p, by a mask over positions made without depths or ancestors."""
    case = with_window(make_case([12], 16, 2, 1, 16, 16) | {"ancestors": chain_ancestors(1, 16)}, window)
    slots = torch.cat([case["req_to_token"][case["req_pool_indices"][0], :12].long(), case["tree_slots"][0]])
    k, v = (case[pool][slots, 0].expand(2, -1, -1) for pool in ("k_pool", "v_pool"))
    back = torch.arange(12, 28)[:, None] - torch.arange(28)
    q = case["q"][0].transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, (back >= 0) & (back <= window))
    torch.testing.assert_close(tree_attention(**case)[0].transpose(0, 1), expected, rtol=0, atol=5e-6)


def test_chain_is_causal_attention():
    case = make_case([12], 16, 2, 1, 16, 16) | {"ancestors": chain_ancestors(1, 16)}
    slots = torch.cat([case["req_to_token"][case["req_pool_indices"][0], :12].long(), case["tree_slots"][0]])
    k, v = (case[pool][slots, 0].expand(2, -1, -1) for pool in ("k_pool", "v_pool"))
    mask = torch.ones(16, 28, dtype=torch.bool).tril(12)
    expected = torch.nn.functional.scaled_dot_product_attention(case["q"][0].transpose(0, 1), k, v, mask)
    torch.testing.assert_close(tree_attention(**case)[0].transpose(0, 1), expected, rtol=0, atol=5e-6)


def test_padded_request_is_finite():
    case = make_case([9, 0], 16, 2, 1, 16, 16)
    case["tree_slots"][1] = -1
    assert_matches_naive(case)


@pytest.mark.parametrize(
    "argument,change",
    [
        ("q", {"q": torch.zeros(2, 16, 32)}),
        ("k_pool", {"k_pool": torch.zeros(90, 1, 8)}),
        ("v_pool", {"v_pool": torch.zeros(90, 1, 16)}),
        ("seq_lens", {"seq_lens": torch.zeros(1, dtype=torch.int64)}),
        ("req_pool_indices", {"req_pool_indices": torch.zeros(1, dtype=torch.int64)}),
        ("tree_slots", {"tree_slots": torch.zeros(2, 4, dtype=torch.int64)}),
        ("ancestors", {"ancestors": torch.zeros(2, 16, 2, dtype=torch.int64)}),
        ("window", {"window": -1}),
        ("depths", {"window": 4}),
        ("depths", {"window": 4, "depths": torch.zeros(2, 15, dtype=torch.int32)}),
        ("depths", {"window": 4, "depths": torch.zeros(2, 16, dtype=torch.int64)}),
    ],
)
def test_errors_name_the_argument(argument, change):
    with pytest.raises(ValueError, match=f"^{argument} must"):
        tree_attention(**(make_case([9, 0], 16, 2, 1, 16, 16) | change))
