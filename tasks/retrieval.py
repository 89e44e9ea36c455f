"""Search by cosine, and the scores of rankings.

Legend: n queries, m texts of the corpus, E hidden size.
"""

from collections.abc import Sequence

import numpy as np

CUTOFF = 10  # of rankings
RETRIEVAL_SCORES = (f"ndcg@{CUTOFF}", "recall@1", f"recall@{CUTOFF}", f"mrr@{CUTOFF}")


def normalized(vectors_nE: np.ndarray) -> np.ndarray:
    return vectors_nE / np.maximum(np.linalg.norm(vectors_nE, axis=1, keepdims=True), 1e-12)


def nearest(
    queries_nE: np.ndarray, corpus_mE: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows [n, count] of the corpus with the highest products, best first, and the products."""
    found = [np.zeros((0, min(count, len(corpus_mE))), np.int64)]
    for queries in np.array_split(queries_nE, -(-len(queries_nE) // 1024)):
        found.append(np.argsort(-(queries @ corpus_mE.T), axis=1, kind="stable")[:, :count])
    rows = np.concatenate(found)
    return rows, np.einsum("ne,nce->nc", queries_nE, corpus_mE[rows])


def retrieval_scores(
    ranked: Sequence[np.ndarray], relevant: Sequence[set[int]]
) -> dict[str, float]:
    """Mean nDCG, recall and reciprocal rank of rankings of CUTOFF texts, best first; NaN without
    any.
    """
    gains = 1 / np.log2(np.arange(2, CUTOFF + 2))
    totals = np.zeros(4)
    for row, right in zip(ranked, relevant, strict=True):
        hits = np.array([text in right for text in row.tolist()])
        first = np.flatnonzero(hits)
        ndcg = gains[: len(hits)][hits].sum() / gains[: len(right)].sum()
        totals += (
            ndcg,
            hits[:1].sum() / len(right),
            hits.sum() / len(right),
            1 / (first[0] + 1) if len(first) else 0.0,
        )
    means = totals / len(relevant) if relevant else np.full(4, np.nan)
    return dict(zip(RETRIEVAL_SCORES, means.tolist(), strict=True))
