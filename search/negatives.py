"""Hard negatives: texts that a model finds for a query, and that are not its answer."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from search.vectors import CorpusVectors

CANDIDATES = 100  # nearest texts of a query, among which its negatives are


class MinedNegatives(NamedTuple):
    """rows: of the corpus, for each pair, best first. too_similar: number of texts that were left
    out, because they are as similar to the query as its answer, and may be answers, too.
    """

    rows: list[list[int]]
    too_similar: int


def mine_negatives(
    queries: Sequence[str],
    positives: Sequence[str],
    query_vectors_nE: np.ndarray,
    positive_vectors_nE: np.ndarray,
    texts: Sequence[str],
    vectors: CorpusVectors,
    count: int,
    margin: float,
) -> MinedNegatives:
    """For each pair the `count` texts of the corpus that are nearest to the query. Left out are all
    positives of an equal query, the query itself, and texts whose cosine is above (1 - margin)
    times the positive's (Moreira et al., 2024, NV-Retriever).
    """
    known: dict[str, set[str]] = {}
    for query, positive in zip(queries, positives, strict=True):
        known.setdefault(query, {query}).add(positive)
    found, cosines = vectors.nearest(query_vectors_nE, CANDIDATES)
    limits = (query_vectors_nE * positive_vectors_nE).sum(axis=1) * (1 - margin)
    rows, too_similar = [], 0
    for number, query in enumerate(queries):
        chosen: list[int] = []
        seen = set(known[query])
        for row, cosine in zip(found[number].tolist(), cosines[number], strict=True):
            if texts[row] in seen or len(chosen) == count:
                continue
            if cosine > limits[number]:
                too_similar += 1
                continue
            seen.add(texts[row])
            chosen.append(row)
        rows.append(chosen)
    return MinedNegatives(rows, too_similar)
