"""Launches the Triton kernels of `gdn_tree_verify`, which `_gdn_tree_verify_tiles` explains."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from sglang_ddtree_kernel._gdn_tree_verify_rows import rows_kernel
from sglang_ddtree_kernel._gdn_tree_verify_tiles import SCALARS, scalars_kernel, tiles_kernel

FEW_HEADS = 132  # hardly a program for each multiprocessor
COLUMNS = 64  # value columns of a program


@dataclass(frozen=True)
class Walk:
    """Rows of a block, warps of a program, and how many blocks' results its registers hold."""

    rows: int
    warps: int
    group: int = 1


def pick_walk(num_rows: int, heads: int) -> Walk:
    """The fastest on an H200. With many heads a program must leave room for others on its multiprocessor."""
    if num_rows <= 16:
        return Walk(16, 4)
    if heads > FEW_HEADS:
        return Walk(32, 4, 2 if num_rows <= 64 else 1)
    return Walk(32, 4 if num_rows <= 32 else 8, 4 if num_rows <= 128 else 2)


@functools.cache
def _supports_dependent_launch(device: torch.device) -> bool:
    """May a launch start, and read what is older, while the one before it runs?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def gdn_tree_verify_triton(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    ancestors: torch.Tensor,
    num_k_heads: int,
    head_k_dim: int,
    *,
    eps: float = 1e-6,
    walk: Walk | None = None,
    one_block: bool = True,
    root_alone: bool | None = None,
) -> torch.Tensor:
    """`gdn_tree_verify` for up to 17 rows in one launch, beyond in three.

    Workspace of the three, per request and value head: 8 bytes for each pair of rows, 4 V for each row.
    Tests choose the walk (blocks of 16 or 32 rows), whether so few rows may take one launch, and whether the root is
    a block of its own.
    """
    mixed_qkv, a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (mixed_qkv, a, b))
    if states.stride(3) != 1:
        raise ValueError(f"states must be contiguous along K, got strides {states.stride()}")
    bs, N, _ = mixed_qkv.shape
    HV, V, words = states.shape[1], states.shape[2], ancestors.shape[2]
    out = mixed_qkv.new_empty(bs, N, HV, V)
    heads = bs * HV
    if heads * N == 0:
        return out
    if root_alone is None:  # where one row would begin another block: at budgets of 16, 32, 64 ...
        root_alone = N > 1 and (N - 1) % (walk or pick_walk(N - 1, heads)).rows == 0
    blocked = N - root_alone
    walk = walk or pick_walk(blocked, heads)
    B, BV = walk.rows, min(COLUMNS, max(16, triton.next_power_of_2(V)))
    blocks = triton.cdiv(blocked, B)
    group = triton.cdiv(blocks, triton.cdiv(blocks, walk.group))  # no larger than even shares need
    blocks = triton.cdiv(blocks, group) * group
    one_block = one_block and blocked <= 16
    precision = "tf32x3" if mixed_qkv.dtype == torch.float32 else "bf16x3"
    if triton.knobs.runtime.interpret:
        precision = "ieee"
    pdl = not one_block and _supports_dependent_launch(mixed_qkv.device)
    inputs = (mixed_qkv, a, b, A_log.contiguous(), dt_bias.contiguous())
    strides = (*mixed_qkv.stride()[:2], *a.stride()[:2], *b.stride()[:2])
    common = dict(
        H=num_k_heads,
        HV=HV,
        K=head_k_dim,
        K_PAD=max(16, triton.next_power_of_2(head_k_dim)),
        WORDS=words,
        FIRST=int(root_alone),
        B=B,
        LOG_B=B.bit_length() - 1,
        PRECISION=precision,
        PDL=pdl,
        num_stages=1,
    )
    ancestors, scale = ancestors.contiguous(), head_k_dim**-0.5
    scalars = tiles = updates = None
    dependent = dict(launch_pdl=True) if pdl else {}
    if not one_block:
        padded, halves = blocks * B, precision == "bf16x3"
        workspace = dict(dtype=torch.bfloat16 if halves else torch.float32)
        tiles = out.new_empty(heads, 4 if halves else 2, padded, padded, **workspace)
        scalars = out.new_empty(heads, SCALARS.value, padded, dtype=torch.float32)
        updates = out.new_empty(heads, 2 if halves else 1, padded, triton.cdiv(V, BV) * BV, **workspace)
        scalars_kernel[(heads, blocks)](
            *inputs, ancestors, scalars, N, eps, scale, *strides, **common, num_warps=4
        )
        tiles_kernel[(heads, blocks + 1, blocks)](
            mixed_qkv,
            ancestors,
            scalars,
            tiles,
            N,
            *strides[:2],
            **common,
            num_warps=B // 16,
            **dependent,
        )
    rows_kernel[(triton.cdiv(V, BV), heads)](
        *inputs,
        states,
        slots,
        ancestors,
        scalars,
        tiles,
        updates,
        out,
        N,
        eps,
        scale,
        *strides,
        *states.stride()[:3],
        V=V,
        BV=BV,
        ONE_BLOCK=one_block,
        BLOCKS=blocks,
        GROUP=group,
        **common,
        num_warps=walk.warps,
        **dependent,
    )
    return out
