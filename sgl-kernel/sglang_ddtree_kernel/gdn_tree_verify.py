"""GatedDeltaNet outputs for every row of a draft tree from one committed state, which stays as it is."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel._gdn_tree_verify_triton import gdn_tree_verify_triton
from sglang_ddtree_kernel.reference.gdn_tree_verify import TreePlan, gdn_tree_verify_wy
from sglang_ddtree_kernel.tree_types import num_words


def gdn_tree_verify(
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
    plan: TreePlan | None = None,
) -> torch.Tensor:
    """Each row's output is what the gated delta rule gives after the tokens on its own path, and no others.

    Args:
        mixed_qkv: [bs, N, D], D = 2 H K + HV V, after convolution and activation: q, k, then v heads.
        a, b: [bs, N, HV]. A_log, dt_bias: [HV]. Log decay g = -exp(A_log) softplus(a + dt_bias) and
            beta = sigmoid(b).
        states: [slots, HV, V, K]. slots: int [bs]; < 0 for padded requests, whose state counts as zeros.
        ancestors: int64 [bs, N, ceil(N / 64)], parents before children, see `tree_types.DraftTree`.
        num_k_heads, head_k_dim: H and K; value head h uses key head h // (HV / H).
        eps: added to the squared norm of q and k.
        plan: `TreePlan.from_ancestors(ancestors)`, which all layers of a step can share; made here if None.
            Only the reference wants it: the kernel reads the words of `ancestors`.

    Returns:
        o [bs, N, HV, V] in mixed_qkv's dtype, computed in fp32.

    Raises:
        ValueError: a shape or dtype does not fit.

    Mathematics: gated delta rule, arXiv 2412.06464; WY form on trees, arXiv 2608.20961 and 2505.14969.
    """
    if mixed_qkv.ndim != 3:
        raise ValueError(f"mixed_qkv must be [bs, N, D], got {list(mixed_qkv.shape)}")
    bs, num_rows, dim = mixed_qkv.shape
    if states.ndim != 4 or states.shape[3] != head_k_dim:
        raise ValueError(f"states must be [slots, HV, V, {head_k_dim}], got {list(states.shape)}")
    num_v_heads, head_v_dim = states.shape[1:3]
    if num_k_heads < 1 or num_v_heads % num_k_heads:
        raise ValueError(f"num_k_heads must divide the {num_v_heads} value heads, got {num_k_heads}")
    if dim != 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim:
        raise ValueError(f"mixed_qkv has {dim} columns, which do not hold the q, k and v heads")
    for name, x in (("a", a), ("b", b)):
        if x.shape != (bs, num_rows, num_v_heads):
            raise ValueError(f"{name} must be [{bs}, {num_rows}, {num_v_heads}], got {list(x.shape)}")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x.shape != (num_v_heads,):
            raise ValueError(f"{name} must be [{num_v_heads}], got {list(x.shape)}")
    if slots.shape != (bs,):
        raise ValueError(f"slots must be [{bs}], got {list(slots.shape)}")
    words = (bs, num_rows, num_words(num_rows))
    if ancestors.shape != words or ancestors.dtype != torch.int64:
        raise ValueError(f"ancestors must be int64 {words}, got {ancestors.dtype} {list(ancestors.shape)}")
    if mixed_qkv.is_cuda and mixed_qkv.dtype != torch.float64:
        return gdn_tree_verify_triton(
            mixed_qkv, a, b, A_log, dt_bias, states, slots, ancestors, num_k_heads, head_k_dim, eps=eps
        )
    if plan is None:
        plan = TreePlan.from_ancestors(ancestors)
    return gdn_tree_verify_wy(
        mixed_qkv, a, b, A_log, dt_bias, states, slots, plan, num_k_heads, head_k_dim, eps=eps
    )
