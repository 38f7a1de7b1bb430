"""Chunked GatedDeltaNet prefill over packed prompts: the WY form of `gdn_tree_verify` on chains."""

from __future__ import annotations

import torch

from sglang_ddtree_kernel.reference.gdn_math import compute_dtype, l2_normalise

CHUNKS_AT_ONCE = 8  # so that the temporaries stay in cache, whatever the length


def gdn_chunk_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    chunk: int = 64,
    *,
    use_qk_l2norm: bool = True,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run packed sequences through one layer and write their final states (CPU only).

    Args:
        q, k: [T, H, K], not yet scaled; normalised here unless `use_qk_l2norm` is False.
        v: [T, HV, V]. g: [T, HV], log decay <= 0. beta: [T, HV].
        states: [slots, HV, V, K]; each sequence starts from its slot and leaves its final state there.
        slots: [sequences]; < 0 starts from zeros and writes nothing.
        cu_seqlens: [sequences + 1], offsets into T.
    Returns:
        o [T, HV, V] in v's dtype, and the states before each chunk [chunks, HV, V, K] in fp32:
        sequences in order, ceil(length / chunk) chunks each.
    Source: gated delta rule in chunks, arXiv 2412.06464.
    """
    dtype = compute_dtype(v)
    out, starts = torch.empty_like(v), []
    bounds = cu_seqlens.tolist()
    for i, slot in enumerate(slots.tolist()):
        S = torch.zeros_like(states[0], dtype=dtype) if slot < 0 else states[slot].to(dtype)
        for begin in range(bounds[i], bounds[i + 1], CHUNKS_AT_ONCE * chunk):
            rows = slice(begin, min(begin + CHUNKS_AT_ONCE * chunk, bounds[i + 1]))
            q_rows, k_rows = q[rows].to(dtype), k[rows].to(dtype)
            if use_qk_l2norm:
                q_rows, k_rows = l2_normalise(q_rows, eps), l2_normalise(k_rows, eps)
            q_rows = q_rows * k.shape[2] ** -0.5
            out[rows], block_starts, S = _run_chunks(
                q_rows, k_rows, v[rows].to(dtype), g[rows], beta[rows].to(dtype), S, min(chunk, len(q_rows))
            )
            starts.append(block_starts.float())
        if slot >= 0:
            states[slot] = S
    if not starts:
        return out, torch.zeros(0, *states.shape[1:])
    return out, torch.cat(starts)


def _run_chunks(q, k, v, g, beta, S, chunk):
    """Consecutive chunks of one sequence (T' tokens) from state S: outputs, start states, final state."""
    T, H, K = k.shape
    HV, V = v.shape[1:]
    n, group = -(-T // chunk), HV // H

    def by_chunk(x: torch.Tensor) -> torch.Tensor:  # [T', heads, ...] -> [n, heads, chunk, ...]
        # Tokens that fill up the last chunk are all zero: no decay, beta 0.
        padding = x.new_zeros(n * chunk - T, *x.shape[1:])
        return torch.cat([x, padding]).unflatten(0, (n, chunk)).transpose(1, 2)

    q, k, v = by_chunk(q).unsqueeze(2), by_chunk(k).unsqueeze(2), by_chunk(v).unflatten(1, (H, group))
    beta = by_chunk(beta).reshape(n, H, group, chunk, 1)

    # Differences of summed decays in float64, and clamped, for the reasons given in gdn_tree_verify.
    G = by_chunk(g.double()).cumsum(2).view(n, H, group, chunk)
    D = (G.unsqueeze(4) - G.unsqueeze(3)).to(S.dtype).clamp_(max=0).exp_().tril_()
    eG = G.exp().to(S.dtype).unsqueeze(4)
    to_end = (G[..., -1:] - G).exp().to(S.dtype).unsqueeze(4)

    # What a chunk writes is U - W S^T, S its start state, with (I + A) [U | W] = diag(beta) [V | diag(e^G)
    # K].
    A = ((k @ k.transpose(3, 4)) * D).mul_(beta)
    rhs = torch.cat([v * beta, k * (eG * beta)], -1)
    solved = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True).view(n, HV, chunk, V + K)
    U, W = solved.split([V, K], -1)
    k_end = (k * to_end).reshape(n, HV, chunk, K)
    decay = eG[:, :, :, -1].reshape(n, HV, 1, 1)

    starts, written = S.new_empty(n, *S.shape), S.new_empty(n, HV, chunk, V)
    for c in range(n):
        starts[c] = S
        torch.baddbmm(U[c], W[c], S.transpose(1, 2), alpha=-1, out=written[c])
        S = torch.baddbmm(S * decay[c], written[c].transpose(1, 2), k_end[c])

    scores = ((q @ k.transpose(3, 4)) * D).view(n * HV, chunk, chunk)
    out = torch.bmm((q * eG).reshape(n * HV, chunk, K), starts.view(n * HV, V, K).transpose(1, 2))
    out.baddbmm_(scores, written.view(n * HV, chunk, V))
    return out.view(n, HV, chunk, V).transpose(1, 2).reshape(n * chunk, HV, V)[:T], starts, S
