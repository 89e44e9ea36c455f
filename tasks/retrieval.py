"""Search by cosine, and the scores of rankings.

Legend: n queries, m texts of the corpus, k results, E hidden size.
"""

from collections.abc import Mapping, Sequence

import numpy as np

CUTOFF = 10  # of rankings
RETRIEVAL_SCORES = (f"ndcg@{CUTOFF}", "recall@1", f"recall@{CUTOFF}", f"mrr@{CUTOFF}")
QUERIES_AT_ONCE = 1024  # so that the products with a corpus take bounded memory


def normalized(vectors_nE: np.ndarray) -> np.ndarray:
    return vectors_nE / np.maximum(np.linalg.norm(vectors_nE, axis=1, keepdims=True), 1e-12)


def nearest(queries_nE: np.ndarray, corpus_mE: np.ndarray, count: int) -> np.ndarray:
    """The rows [n, k] of the corpus with the highest products, best first."""
    found = [np.zeros((0, min(count, len(corpus_mE))), np.int64)]
    for first in range(0, len(queries_nE), QUERIES_AT_ONCE):
        queries = queries_nE[first : first + QUERIES_AT_ONCE]
        best = NearestRows(len(queries), count)
        best.add(queries @ corpus_mE.T)
        found.append(best.rows)
    return np.concatenate(found)


class NearestRows:
    """The `count` highest scores of each query, over all texts that were added, and their rows."""

    def __init__(self, num_queries: int, count: int):
        self.count, self.num_columns = count, 0
        self.rows = np.zeros((num_queries, 0), np.int64)
        self.scores = np.zeros((num_queries, 0), np.float32)

    def add(self, scores_nm: np.ndarray) -> None:
        """scores: of the next m texts."""
        first = self.num_columns
        self.num_columns += scores_nm.shape[1]
        queries, columns = np.nonzero(self.may_be_kept(scores_nm))
        if not len(queries):
            return
        num_queries, num_kept = self.rows.shape
        query = np.concatenate([np.repeat(np.arange(num_queries), num_kept), queries])
        rows = np.concatenate([self.rows.ravel(), first + columns])
        scores = np.concatenate([self.scores.ravel(), scores_nm[queries, columns]])
        order = np.lexsort((rows, -scores, query))
        # Each query has a range of `order`, of which the first ones are its best.
        starts = np.searchsorted(query[order], np.arange(num_queries))
        places_nk = starts[:, None] + np.arange(min(self.count, self.num_columns))
        self.rows, self.scores = rows[order[places_nk]], scores[order[places_nk]]

    def may_be_kept(self, scores_nm: np.ndarray) -> np.ndarray:
        """Which of the scores [n, m] can be among the best. Later parts rarely have one."""
        if self.rows.shape[1] == self.count:
            return scores_nm > self.scores[:, -1:]
        if scores_nm.shape[1] <= self.count:
            return np.ones(scores_nm.shape, bool)
        return scores_nm >= np.partition(scores_nm, -self.count, axis=1)[:, -self.count, None]


def retrieval_scores(
    rankings: Sequence[Sequence[int]],
    relevance: Sequence[Mapping[int, float]],
    recall_cutoffs: Sequence[int],
) -> dict[str, float]:
    """Means over queries, at least one, of `ranking_scores`."""
    scores = []
    for ranked, grades in zip(rankings, relevance, strict=True):
        scores.append(ranking_scores(ranked, grades, recall_cutoffs))
    return {name: float(np.mean([each[name] for each in scores])) for name in scores[0]}


def ranking_scores(
    ranked: Sequence[int], grades: Mapping[int, float], recall_cutoffs: Sequence[int]
) -> dict[str, float]:
    """nDCG@10 and MRR@10, and the recall among the first texts, of a query's ranking, as BEIR
    defines them: the gain of a text is its grade.

    ranked: texts, best first. grades: of the relevant texts.
    """
    is_hit = np.array([text in grades for text in ranked], bool)
    hits = np.flatnonzero(is_hit[:CUTOFF])
    gain = discounted_gain([grades.get(text, 0.0) for text in ranked])
    best_gain = discounted_gain(sorted(grades.values(), reverse=True))
    scores = {
        f"ndcg@{CUTOFF}": gain / best_gain,
        f"mrr@{CUTOFF}": 1 / (hits[0] + 1) if len(hits) else 0.0,
    }
    for cutoff in recall_cutoffs:
        scores[f"recall@{cutoff}"] = is_hit[:cutoff].sum() / len(grades)
    return scores


def discounted_gain(grades: Sequence[float]) -> float:
    """Discounted cumulative gain of the first ten grades."""
    first = np.array(grades[:CUTOFF])
    return float((first / np.log2(np.arange(2, len(first) + 2))).sum())
