"""Cross-encoders: models of pairs of texts that say how well a text answers a query."""

from collections.abc import Sequence

import numpy as np

from tasks.glue import check_pairs
from tasks.predictors import ClassPredictor
from utils.errors import UserError

POSITIVE_LABELS = ("1", "true", "yes", "relevant")


class Reranker:
    """Orders the texts that a search found, by a model of `run_glue.py --task-name regression`, or
    of pairs with the classes 0 and 1. Pairs that are too long are cut.
    """

    def __init__(self, predictor: ClassPredictor):
        self.predictor = predictor
        config = predictor.config
        check_pairs(config, predictor.folder, True)
        labels = [label.lower() for label in config.labels or ()]
        self.positive = next((row for row, name in enumerate(labels) if name in POSITIVE_LABELS), 1)
        is_known = len(labels) == 2 and labels[self.positive] in POSITIVE_LABELS
        if predictor.model.num_outputs != 1 and not is_known:
            raise UserError(
                f"--rerank {predictor.folder} has the labels {', '.join(labels) or 'of no name'}: "
                f"give a model of scores (--task-name regression), or of the classes 0 and 1"
            )

    def scores(self, queries: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """The score of each text for its query: the model's number, or the logit of the positive
        class less the other's.
        """
        rows = [{"text": query, "pair": text} for query, text in zip(queries, texts, strict=True)]
        dataset = self.predictor.text_dataset(list(queries), rows)
        logits_nC = self.predictor.logits(dataset, "sequence")
        if logits_nC.shape[1] == 1:
            return logits_nC[:, 0]
        return logits_nC[:, self.positive] - logits_nC[:, 1 - self.positive]

    def rerank(
        self, query: str, texts: Sequence[str], rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`rows` in the order of their scores, best first, and the scores.

        texts: those of `rows`.
        """
        scores = self.scores([query] * len(texts), texts)
        order = np.argsort(-scores, kind="stable")
        return rows[order], scores[order]
