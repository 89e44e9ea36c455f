"""The search itself: nearest texts of queries, in the order of a reranker where there is one."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from search.corpus import Benchmark, Corpus
from search.reranker import Reranker
from search.vectors import CorpusVectors, TextEmbedder
from tasks.retrieval import CUTOFF, retrieval_scores
from utils.progress import progress_bar

QUERIES_AT_ONCE = 1024


class SearchEngine:
    """Finds texts of `corpus` by cosine. reranker: orders the nearest `rerank_top` of them; the
    others follow, with their cosines.
    """

    def __init__(
        self,
        embedder: TextEmbedder,
        corpus: Corpus,
        reranker: Reranker | None = None,
        rerank_top: int = 100,
    ):
        self.embedder, self.corpus = embedder, corpus
        self.reranker, self.rerank_top = reranker, rerank_top

    @cached_property
    def vectors(self) -> CorpusVectors:
        return CorpusVectors.make(self.embedder, self.corpus)

    def find(
        self, queries: Sequence[str], places: Sequence[str], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows [n, k] of the best texts, best first, and their scores. places: names of the
        queries in errors. All queries are checked before the corpus is embedded.
        """
        query_vectors = self.embedder.prepare("query", queries, places)
        vectors = self.vectors
        queries_nE = query_vectors()
        nearest_count = count if self.reranker is None else max(count, self.rerank_top)
        found = [
            vectors.nearest(queries_nE[first : first + QUERIES_AT_ONCE], nearest_count)
            for first in range(0, len(queries), QUERIES_AT_ONCE)
        ]
        rows, scores = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        if self.reranker is not None:
            top = slice(self.rerank_top)
            rows[:, top], scores[:, top] = self.rerank(queries, rows[:, top])
        return rows[:, :count], scores[:, :count]

    def rerank(self, queries: Sequence[str], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`rows` in the order of their scores, and these."""
        rows, scores = rows.copy(), np.zeros(rows.shape, np.float32)
        with progress_bar(len(queries), "reranking", "query", delay=1) as bar:
            for number, query in enumerate(queries):
                texts = [self.corpus.texts[row] for row in rows[number]]
                rows[number], scores[number] = self.reranker.rerank(query, texts, rows[number])
                bar.update()
        return rows, scores


def score_benchmark(engine: SearchEngine, benchmark: Benchmark, count: int) -> dict[str, float]:
    """Mean nDCG@10, MRR@10, recall@10 and recall@`count` over the queries. A text that is the query
    itself is left out, as BEIR does.
    """
    queries = benchmark.queries
    rows, _ = engine.find(queries.texts, queries.places, count + 1)
    rankings = []
    for number, own_name in enumerate(queries.names):
        found = rows[number].tolist()
        others = [row for row in found if benchmark.corpus.names[row] != own_name]
        rankings.append(others[:count])
    return retrieval_scores(rankings, benchmark.relevance, (CUTOFF, count))
