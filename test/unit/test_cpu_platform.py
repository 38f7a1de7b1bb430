"""Pieces of the CPU platform against independent arithmetic."""

from __future__ import annotations

import torch
from sglang_ddtree.cpu.ops import assign_req_to_token_pool
from sglang_ddtree.cpu.patches import murmur_hash32


def murmur3(words: list[int]) -> int:
    """MurmurHash3_x86_32 of 32-bit words, seed 0, on Python integers."""
    mask, h = 0xFFFFFFFF, 0
    for k in words:
        k = k * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        h = (h * 5 + 0xE6546B64) & mask
    h ^= 4 * len(words)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def test_noise_of_seeded_sampling():
    seeds, positions, columns = [0, 7, 2**63 + 12345], [0, 31, 2**31 + 5], [0, 1, 4095]
    got = murmur_hash32(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for j, column in enumerate(columns):
            assert int(got[i, j]) == murmur3([seed & 0xFFFFFFFF, seed >> 32, position, column])


def test_new_slots_go_to_their_requests():
    table = torch.zeros(4, 10, dtype=torch.int32)
    start, end = torch.tensor([2, 0, 5]), torch.tensor([4, 0, 8])
    assign_req_to_token_pool(torch.tensor([3, 1, 2]), table, start, end, torch.arange(100, 105), 10)
    assert table[3, 2:4].tolist() == [100, 101]
    assert table[2, 5:8].tolist() == [102, 103, 104]
    assert table.sum() == sum(range(100, 105))
