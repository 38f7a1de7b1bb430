"""Bigram statistics of token sequences, and their log-odds as factors of low rank. No V x V matrix is ever built.

With counts n(a, c) of c after a, n(a) of a and the unigram u, the smoothed bigram is

    B(c | a) = (n(a, c) + alpha u(c)) / (n(a) + alpha),

so its log-odds log B(c | a) / u(c) are log(alpha / (n(a) + alpha)), a number for each row, plus
log(1 + n(a, c) / (alpha u(c))), which is 0 where a pair was never seen: a sparse matrix. A truncated singular value
decomposition of their sum needs products with it only (Halko, Martinsson, Tropp, arXiv 0909.4061).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import scipy.sparse as sp

OVERSAMPLING, POWER_ITERATIONS = 16, 4


def count(sequences: Iterable[np.ndarray], vocab_size: int) -> sp.csr_array:
    """n(a, c) as float64 [V, V]. sequences: token ids of one document each, integer [length], 0 <= id < V."""
    shape = (vocab_size, vocab_size)
    total, pending, size = sp.csr_array(shape), [], 0

    def add(total, pending):
        pairs = np.concatenate([s[:-1] for s in pending]), np.concatenate([s[1:] for s in pending])
        return total + sp.coo_array((np.ones(len(pairs[0])), pairs), shape=shape).tocsr()

    for sequence in sequences:
        pending.append(sequence)
        size += len(sequence)
        if size > 1 << 22:
            total, pending, size = add(total, pending), [], 0
    return add(total, pending) if pending else total


def factorise(counts: sp.csr_array, rank: int, alpha: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """left, right fp32 [V, rank]: left[a] . right[c] is near the log-odds of c after a.

    The squared error of a pair counts u(a) u(c), its share of the pairs of a text without bigrams: an unweighted fit
    spends its rank on rare tokens (on the demo pair rank 64 so fitted loses nothing to the whole table).
    """
    vocab_size = counts.shape[0]
    row_counts, column_counts = counts.sum(1), counts.sum(0)
    unigram = (column_counts + 0.5) / (column_counts + 0.5).sum()
    row_weight = np.sqrt((row_counts + alpha) / (row_counts + alpha).sum()).astype(np.float32)
    column_weight = np.sqrt(unigram).astype(np.float32)

    seen = counts.tocoo()
    log_odds = np.log1p(seen.data / (alpha * unigram[seen.col]))
    log_odds = (row_weight[seen.row] * log_odds * column_weight[seen.col]).astype(np.float32)
    seen = sp.coo_array((log_odds, (seen.row, seen.col)), shape=counts.shape).tocsr()
    unseen = row_weight * np.log(alpha / (row_counts + alpha)).astype(np.float32)

    def times(x):
        return seen @ x + np.outer(unseen, column_weight @ x)

    def transposed_times(x):
        return seen.T @ x + np.outer(column_weight, unseen @ x)

    columns = min(rank + OVERSAMPLING, vocab_size)
    basis = np.random.default_rng(seed).standard_normal((vocab_size, columns), dtype=np.float32)
    for _ in range(POWER_ITERATIONS):
        basis = np.linalg.qr(transposed_times(np.linalg.qr(times(basis))[0]))[0]
    left, singular, right = np.linalg.svd(times(basis), full_matrices=False)
    scale = np.sqrt(singular[:rank])
    left = left[:, :rank] * scale / row_weight[:, None]
    right = basis @ right[:rank].T * scale / column_weight[:, None]
    return left, right
