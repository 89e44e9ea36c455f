"""The nearest texts by cosine, and the scores of rankings.

Legend: n queries, m texts of the corpus, k results, E hidden size.
"""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

CUTOFF = 10  # of rankings
RETRIEVAL_SCORES = (f"ndcg@{CUTOFF}", "recall@1", f"recall@{CUTOFF}", f"mrr@{CUTOFF}")
QUERIES_AT_ONCE, PRODUCTS_AT_ONCE = 1024, 2**26  # so that they take bounded memory

Vectors = Any  # dense [n, E], or a sparse matrix of SciPy


def normalized(vectors_nE: np.ndarray) -> np.ndarray:
    return vectors_nE / np.maximum(np.linalg.norm(vectors_nE, axis=1, keepdims=True), 1e-12)


def pair_cosines(vectors_nE: Vectors, rows_n2: np.ndarray) -> np.ndarray:
    """The products [n] of pairs of normalized vectors. rows_n2: which ones."""
    first, second = vectors_nE[rows_n2[:, 0]], vectors_nE[rows_n2[:, 1]]
    if isinstance(vectors_nE, np.ndarray):
        return (first * second).sum(axis=1)
    return np.asarray(first.multiply(second).sum(axis=1)).ravel()


def nearest(queries_nE: Vectors, corpus_mE: Vectors, count: int) -> np.ndarray:
    """The rows [n, k] of the corpus with the highest products, best first; of equal ones, the first
    one comes first.
    """
    num_queries, num_texts = queries_nE.shape[0], corpus_mE.shape[0]
    count = min(count, num_texts)
    rows_nk = np.empty((num_queries, count), np.int64)
    at_once = max(1, min(QUERIES_AT_ONCE, PRODUCTS_AT_ONCE // num_texts))
    for first in range(0, num_queries, at_once):
        products = queries_nE[first : first + at_once] @ corpus_mE.T
        if not isinstance(products, np.ndarray):
            products = products.toarray()
        for number, scores_m in enumerate(products, first):
            lowest = np.partition(scores_m, -count)[-count]
            candidates = np.flatnonzero(scores_m >= lowest)  # more than `count` if some are equal
            order = np.argsort(-scores_m[candidates], kind="stable")
            rows_nk[number] = candidates[order[:count]]
    return rows_nk


def mean_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The means over queries of their `ranking_scores`; NaN without any."""
    return {
        name: float(np.mean([row[name] for row in rows])) if rows else math.nan
        for name in RETRIEVAL_SCORES
    }


def ranking_scores(ranked: Sequence[int], relevant: Set[int]) -> dict[str, float]:
    """nDCG@10, MRR@10, and the recall among the first text and among ten, of a query's ranking, as
    BEIR defines them.

    ranked: texts, best first.
    relevant: those that are to be found, at least one.
    """
    discounts = 1 / np.log2(np.arange(2, CUTOFF + 2))
    is_hit = np.array([text in relevant for text in ranked[:CUTOFF]], bool)
    hits = np.flatnonzero(is_hit)
    return {
        f"ndcg@{CUTOFF}": float(discounts[hits].sum() / discounts[: len(relevant)].sum()),
        f"mrr@{CUTOFF}": 1 / (int(hits[0]) + 1) if len(hits) else 0.0,
        "recall@1": int(is_hit[:1].sum()) / len(relevant),
        f"recall@{CUTOFF}": int(is_hit.sum()) / len(relevant),
    }
