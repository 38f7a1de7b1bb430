"""The kernel of `compact_kv` against its specification: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from sglang_ddtree_kernel import compact_kv as module
from sglang_ddtree_kernel.compact_kv import KvPools, compact_kv, compact_kv_triton
from test_compact_kv import make_pools
from tree_cases import MOVES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(pools, dst, src):
    pools = [pool.to(DEVICE) for pool in pools]
    dst, src = (torch.tensor(x, dtype=torch.int64, device=DEVICE) for x in (dst, src))
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        pool[dst] = pool[src]
    compact_kv_triton(KvPools(pools), dst, src)
    for pool, wanted in zip(pools, expected, strict=True):
        assert torch.equal(pool, wanted)


@pytest.mark.parametrize(("dst", "src"), MOVES.values(), ids=MOVES)
def test_moves_read_before_they_write(dst, src):
    check(make_pools(9), dst, src)


@pytest.mark.parametrize("tile_bytes", [64, 32 * 1024], ids=["many programs", "one program"])
def test_permutation_of_wide_rows(tile_bytes, monkeypatch):
    monkeypatch.setattr(module, "TILE_BYTES", tile_bytes)
    rng = torch.Generator().manual_seed(0)
    order = torch.randperm(40, generator=rng).tolist()
    pools = [torch.randn(40, 4, 33, generator=rng).half(), torch.randn(40, 2, 8, generator=rng).bfloat16()]
    check(pools, list(range(40)), order)


def test_requests_move_side_by_side():
    rng = torch.Generator().manual_seed(1)
    slots = torch.randperm(60, generator=rng).view(3, 20)
    path = torch.rand(3, 19, generator=rng).topk(7).indices.sort(1).values + 1
    pools = [torch.randn(60, 2, 8, generator=rng)]
    check(pools, slots[:, 1:8].tolist(), slots.gather(1, path).tolist())


def test_bytes_and_padded_pitch():
    """Rows of an odd number of bytes, and rows that lie further apart than they are long."""
    rng = torch.Generator().manual_seed(0)
    odd = torch.randint(100, (12, 7), generator=rng, dtype=torch.int8)
    check([odd], [1, 2, 5], [2, 5, 1])
    wide = torch.randn(12, 16, generator=rng).to(DEVICE)
    before = wide.clone()
    moves = torch.tensor([3, 4], device=DEVICE), torch.tensor([4, 9], device=DEVICE)
    compact_kv_triton(KvPools([wide[:, :8]]), *moves)
    assert torch.equal(wide[:, 8:], before[:, 8:])
    assert torch.equal(wide[[3, 4], :8], before[[4, 9], :8])


def test_cpu_accepts_the_table_too():
    pools = make_pools(9)
    expected = pools[0][5].clone()
    compact_kv(KvPools(pools), torch.tensor([[2]]), torch.tensor([[5]]))
    assert torch.equal(pools[0][2], expected)


def test_most_moves():
    order = torch.randperm(module.MAX_MOVES, generator=torch.Generator().manual_seed(0)).tolist()
    check([torch.arange(module.MAX_MOVES)], list(range(module.MAX_MOVES)), order)


def test_errors():
    with pytest.raises(ValueError, match="^pools must"):
        KvPools([torch.zeros(4, 6)[:, ::2]])
    moves = torch.zeros(module.MAX_MOVES + 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="^dst must"):
        compact_kv_triton(KvPools([torch.zeros(4, 6, device=DEVICE)]), moves, moves)
