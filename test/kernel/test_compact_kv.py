from __future__ import annotations

import pytest
import torch
from sglang_ddtree_kernel.accept_tree import accept_tree
from sglang_ddtree_kernel.compact_kv import compact_kv
from tree_cases import MOVES, random_tree


def make_pools(slots: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(slots)
    return [
        torch.randn(slots, 2, 8, generator=rng),
        torch.randn(slots, 1, 16, generator=rng).bfloat16(),
        torch.randint(1000, (slots,), generator=rng),
    ]


@pytest.mark.parametrize(("dst", "src"), MOVES.values(), ids=MOVES)
def test_moves_read_before_they_write(dst, src):
    pools = make_pools(9)
    before = [pool.clone() for pool in pools]
    compact_kv(pools, torch.tensor(dst, dtype=torch.int64), torch.tensor(src, dtype=torch.int64))
    for pool, old in zip(pools, before, strict=True):
        for slot in range(9):
            source = src[dst.index(slot)] if slot in dst else slot
            assert torch.equal(pool[slot], old[source])


@pytest.mark.parametrize("seed", range(8))
def test_accepted_path_becomes_contiguous(seed):
    tree = random_tree(seed, 3, 20, 6, vocab=2, invalid=4)
    rng = torch.Generator().manual_seed(seed)
    slots = torch.randperm(64, generator=rng)[:60].view(3, 20)
    accepted = accept_tree(tree, torch.randint(2, (3, 20), generator=rng), slots, horizon=6)
    pools = make_pools(64)
    before = [pool.clone() for pool in pools]
    compact_kv(pools, accepted.dst_slots.flatten(), accepted.src_slots.flatten())
    for b, length in enumerate(accepted.lens.tolist()):
        path = accepted.rows[b, :length].long()
        for pool, old in zip(pools, before, strict=True):
            assert torch.equal(pool[slots[b, :length]], old[slots[b, path]])


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="^dst must"):
        compact_kv([], torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="^src must"):
        compact_kv([], torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
