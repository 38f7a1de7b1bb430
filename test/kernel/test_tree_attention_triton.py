"""The kernels of `tree_attention` against float64: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from sglang_ddtree_kernel import _tree_attention_triton as kernels
from sglang_ddtree_kernel._tree_attention_triton import Tile, pick_splits, tree_attention_triton
from sglang_ddtree_kernel.reference.tree_attention import tree_attention_naive
from sglang_ddtree_kernel.tree_types import chain_ancestors
from test_tree_attention import TOLERANCE, as_block, make_case, with_window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's products of bf16 are wrong: it multiplies their bits.
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16
SMALL = Tile(16, 16, 4, 1)


def check(case, tile=SMALL, splits=None):
    case = {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in case.items()}
    out = tree_attention_triton(**case, tile=tile, splits=splits)
    dtype = case["v_pool"].dtype
    assert out.dtype == dtype
    expected = tree_attention_naive(**case)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [1, 16, 33] if DEVICE == "cpu" else [1, 16, 65, 200])
@pytest.mark.parametrize(
    "q_heads,kv_heads,d,dv",
    [(2, 1, 32, 32), (6, 2, 16, 16), (3, 3, 16, 24)],
    ids=["2:1", "6:2", "3:3, dv 24"],
)
def test_mixed_lengths(num_rows, q_heads, kv_heads, d, dv):
    check(make_case([37, 0, 1, 130], num_rows, q_heads, kv_heads, d, dv, invalid=3))


@pytest.mark.parametrize("splits", [1, 2, 5, 31])
def test_splits(splits, monkeypatch):
    monkeypatch.setattr(kernels, "MIN_SHARE", 16)
    check(make_case([15, 16, 17, 159], 5, 4, 2, 16, 16), splits=splits)


@pytest.mark.parametrize("dtype", [torch.float16] if DEVICE == "cpu" else [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    check(make_case([19, 64], 16, 4, 2, 32, 32, dtype))


def test_fp32_queries_over_a_bf16_pool():
    case = make_case([19, 64], 16, 4, 2, 32, 32, torch.bfloat16)
    check(case | {"q": case["q"].float()})


@pytest.mark.parametrize("logit_cap", [1.0, 30.0])
def test_logit_cap(logit_cap):
    check(make_case([19, 64], 16, 4, 2, 32, 32) | {"logit_cap": logit_cap})


@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_129_rows(block_n):
    check(make_case([5], 129, 2, 1, 16, 16), Tile(64, block_n, 4, 1))


def test_rows_under_other_branches_may_be_infinite():
    """A hidden row's value must not leak even as 0 x inf: it may hold anything that a real value may."""
    case = make_case([12], 16, 2, 1, 16, 16)
    hidden = ((case["ancestors"][0, 15, 0] >> torch.arange(16)) & 1) == 0
    case["k_pool"][case["tree_slots"][0, hidden]] = 1e4
    case["v_pool"][case["tree_slots"][0, hidden]] = 1e4
    case = {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in case.items()}
    out, expected = tree_attention_triton(**case, tile=SMALL), tree_attention_naive(**case)
    torch.testing.assert_close(out[0, 15].double(), expected[0, 15], rtol=0, atol=1e-5)


def test_chain_and_padded_request():
    case = make_case([12, 0], 16, 2, 1, 16, 16) | {"ancestors": chain_ancestors(2, 16)}
    case["tree_slots"][1] = -1
    check(case)


@pytest.mark.parametrize("window", [1, 36, 37, 200])
@pytest.mark.parametrize("num_rows", [1, 16] if DEVICE == "cpu" else [1, 16, 65, 200])
def test_window(num_rows, window):
    check(with_window(make_case([37, 0, 1, 130], num_rows, 6, 2, 16, 24, invalid=3), window))


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("window", [15, 16, 40])
def test_splits_of_a_window(window, splits, monkeypatch):
    monkeypatch.setattr(kernels, "MIN_SHARE", 16)
    check(with_window(make_case([15, 16, 17, 159], 5, 4, 2, 16, 16), window), splits=splits)


def test_keys_before_the_window_are_not_read():
    """Their slots may be given to others by then."""
    case = with_window(make_case([40, 70], 16, 4, 2, 16, 16), 20)
    for row, length in zip(case["req_pool_indices"].tolist(), case["seq_lens"].tolist(), strict=True):
        case["k_pool"][case["req_to_token"][row, : length - 20].long()] = float("nan")
        case["v_pool"][case["req_to_token"][row, : length - 20].long()] = float("nan")
    check(case)


@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize("lengths,num_rows", [([37, 0, 60], 16), ([5], 70)], ids=["16 rows", "70 rows"])
def test_block_of_a_drafter(lengths, num_rows, window):
    """Every tile of stacked rows sees the rows of later tiles too."""
    heads = (6, 2) if num_rows == 16 else (1, 1)
    check(as_block(make_case(lengths, num_rows, *heads, 16, 16)) | {"window": window})


def test_padded_request_in_a_window():
    case = with_window(make_case([9, 0], 16, 2, 1, 16, 16), 4)
    case["tree_slots"][1] = -1
    check(case)


def test_int32_lengths_and_strided_queries():
    case = make_case([9, 40], 7, 4, 2, 16, 16)
    q = torch.randn(2, 7, 4, 48)
    check(case | {"q": q[..., 16:32], "seq_lens": case["seq_lens"].int()})
    check(case | {"q": q.transpose(0, 1).contiguous().transpose(0, 1)[..., :16]})


def test_the_picked_tile_at_served_head_sizes():
    lengths = [70] if DEVICE == "cpu" else [70, 1, 0, 5000]
    for d in (64, 128, 256):
        for num_rows in (2, 16) if DEVICE == "cpu" else (1, 2, 16, 65):
            check(make_case(lengths, num_rows, 12, 2, d, d, HALF, invalid=1), tile=None)
        check(make_case(lengths, 5, 12, 2, d, d), tile=None)
    if DEVICE == "cuda":
        check(make_case([70], 512, 2, 1, 256, 256, HALF, invalid=1), tile=None)


def test_split_counts_follow_from_shapes():
    def splits(tiles, tile, max_ctx):
        return pick_splits(tiles, 132, tile, max_ctx)[0]

    assert splits(12, Tile(128, 64, 8, 2), 1 << 18) == 10
    assert splits(12, Tile(128, 64, 8, 2), 300) == 3
    assert splits(96, Tile(128, 64, 8, 2), 1 << 18) == 4
    assert splits(1, Tile(16, 64, 4, 2), 1 << 18) == 31
    assert splits(10_000, Tile(128, 64, 8, 2), 1 << 18) == 1
