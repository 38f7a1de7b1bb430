"""GatedDeltaNet outputs of every row of a draft tree: the specification (replay) and the tree-WY form.

Per value head, with S [V, K] and p = parent(i):
S_i = e^{g_i} S_p + u_i k_i^T,  u_i = beta_i (v_i - e^{g_i} S_p k_i),  o_i = S_i q_i.
Mathematics: gated delta rule, arXiv 2412.06464; WY form on a tree, arXiv 2608.20961 and 2505.14969.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ddtree_kernel.reference.gdn_math import compute_dtype, gdn_gates, read_slots, split_heads
from sglang_ddtree_kernel.tree_types import unpack_ancestors


@dataclass
class TreePlan:
    """What all GDN layers of one step need to know about the tree; made once a step."""

    ancestors: torch.Tensor  # float64 [bs, N, N], 1 where row j is an ancestor of row i or i itself
    visible: torch.Tensor  # the same in fp32 [bs, 1, N, N], to broadcast over heads

    @classmethod
    def from_ancestors(cls, ancestors: torch.Tensor) -> TreePlan:
        visible = unpack_ancestors(ancestors, ancestors.shape[1])
        return cls(visible.double(), visible.float().unsqueeze(1))


def gdn_tree_verify_replay(
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
) -> torch.Tensor:
    """The specification: every row replays its own path from the committed state; float64 stays float64."""
    num_v_heads = a.shape[-1]
    q, k, v = split_heads(mixed_qkv, num_k_heads, head_k_dim, num_v_heads, eps)
    q, k = (x.repeat_interleave(num_v_heads // num_k_heads, -2) for x in (q, k))  # [bs, N, HV, K]
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    visible = unpack_ancestors(ancestors, ancestors.shape[1])
    out = torch.zeros_like(v)
    for i, slot in enumerate(slots.tolist()):
        for row in range(mixed_qkv.shape[1]):
            S = torch.zeros_like(states[0], dtype=v.dtype) if slot < 0 else states[slot].to(v.dtype)
            for j in visible[i, row].nonzero().flatten().tolist():
                S = S * g[i, j].exp()[:, None, None]
                u = beta[i, j][:, None] * (v[i, j] - torch.einsum("hvk,hk->hv", S, k[i, j]))
                S = S + u[:, :, None] * k[i, j][:, None, :]
            out[i, row] = torch.einsum("hvk,hk->hv", S, q[i, row])
    return out.to(mixed_qkv.dtype)


def gdn_tree_verify_wy(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    plan: TreePlan,
    num_k_heads: int,
    head_k_dim: int,
    *,
    eps: float = 1e-6,
) -> torch.Tensor:
    """All rows at once. G_i is the log decay summed along root..i, D_ij = e^{G_i - G_j} for ancestors j of i:

    (I + A) U = R,  A = diag(beta) (K K^T * D) below the diagonal,  R = diag(beta) (V - diag(e^G) K S_0^T),
    O = diag(e^G) Q S_0^T + (Q K^T * D) U.
    """
    bs, num_rows, _ = mixed_qkv.shape
    H, K, HV = num_k_heads, head_k_dim, a.shape[-1]
    group, V = HV // H, states.shape[-2]
    dtype = compute_dtype(mixed_qkv)

    q, k, v = split_heads(mixed_qkv, H, K, HV, eps)
    v = v.transpose(1, 2).unflatten(1, (H, group))  # [bs, H, group, N, V]
    k = k.transpose(1, 2)
    qk = torch.cat([q.transpose(1, 2), k], 2)  # [bs, H, 2N, K]

    # Sums along paths and their differences in float64: a strong decay near the root must not cost the
    # digits of the mild ones below it. Along a path the differences are <= 0: clamping off it only keeps
    # exp from overflowing (-inf there would do too, but is five times slower on CPU).
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    G = torch.bmm(plan.ancestors, g.double()).transpose(1, 2)  # [bs, HV, N]
    D = (G.unsqueeze(3) - G.unsqueeze(2)).to(dtype).clamp_(max=0).exp_().mul_(plan.visible)
    D = D.unflatten(1, (H, group))
    eG = G.to(dtype).exp().view(bs, H, group, num_rows, 1)
    beta = beta.transpose(1, 2).reshape(bs, H, group, num_rows, 1)

    # All value heads of a key head in one product: S_0 is read once, never repeated.
    S = read_slots(states[None], slots)[0].to(dtype).view(bs, H, group * V, K)
    from_state = (qk @ S.transpose(2, 3)).view(bs, H, 2, num_rows, group, V).transpose(3, 4)
    from_rows = (qk @ k.transpose(2, 3)).view(bs, H, 2, 1, num_rows, num_rows)

    A = (from_rows[:, :, 1] * D).mul_(beta)  # unitriangular: the solver ignores the diagonal
    R = (v - eG * from_state[:, :, 1]).mul_(beta)
    U = torch.linalg.solve_triangular(A, R, upper=False, unitriangular=True)
    out = (eG * from_state[:, :, 0]).add_((from_rows[:, :, 0] * D) @ U)
    return out.view(bs, HV, num_rows, V).transpose(1, 2).to(mixed_qkv.dtype)
