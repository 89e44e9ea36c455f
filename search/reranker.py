"""Cross-encoders: models of pairs of texts that say how well a text answers a query."""

from collections.abc import Sequence

import numpy as np

from tasks.glue import check_pairs
from tasks.labels import listed
from tasks.predictors import ClassPredictor
from utils.errors import UserError

POSITIVE_LABELS = ("1", "true", "yes", "relevant")


class Reranker:
    """Orders the texts that a search found, by a model of `run_glue.py --regression`, or of classes
    of pairs. Pairs that are too long are cut.

    label: the class of texts that answer a query; by default one of POSITIVE_LABELS, of two.
    """

    def __init__(self, predictor: ClassPredictor, label: str | None = None):
        self.predictor = predictor
        folder, config = predictor.folder, predictor.config
        num_labels = predictor.model.num_outputs
        labels = config.labels or tuple(f"LABEL_{index}" for index in range(num_labels))
        check_pairs(config, folder, True)
        if config.multi_label:
            raise UserError(f"--rerank {folder} predicts several labels: give a model of one class")
        self.positive: int | None = None
        if num_labels == 1 and label is not None:
            raise UserError(f"--rerank-label has no effect on {folder}, which predicts a number")
        if num_labels == 1:
            return
        names = [name for name in labels if name.lower() in POSITIVE_LABELS]
        if label is not None:
            names = [name for name in labels if name == label]
        elif len(labels) != 2:
            names = []
        if len(names) != 1:
            found = "is no label of" if label is not None else "is needed for"
            raise UserError(
                f"--rerank-label {found} {folder}, which predicts {listed(labels)}: "
                f"give the label of texts that answer a query"
            )
        self.positive = labels.index(names[0])

    def scores(self, queries: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """The score of each text for its query: the model's number, or the log odds of the class
        of texts that answer a query, which of two classes is the difference of their logits.
        """
        rows = [{"text": query, "pair": text} for query, text in zip(queries, texts, strict=True)]
        dataset = self.predictor.text_dataset(list(queries), rows)
        logits_nC = self.predictor.logits(dataset, "sequence")
        if self.positive is None:
            return logits_nC[:, 0]
        others_nC = np.delete(logits_nC, self.positive, axis=1)
        return logits_nC[:, self.positive] - np.logaddexp.reduce(others_nC, axis=1)

    def rerank(
        self, query: str, texts: Sequence[str], rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`rows` in the order of their scores, best first, and the scores.

        texts: those of `rows`.
        """
        scores = self.scores([query] * len(texts), texts)
        order = np.argsort(-scores, kind="stable")
        return rows[order], scores[order]
