"""Baselines of classification and regression: the most frequent class, and tf-idf.

Legend: n rows, k texts of a row, C labels.
"""

from typing import NamedTuple

import numpy as np

from bert_recipe.tasks.baselines import (
    ROWS,
    Baselines,
    Scores,
    drawn_rows,
    fit_tfidf,
    text_columns,
    tfidf_cosines,
    tfidf_name,
    tfidf_pipeline,
)
from bert_recipe.tasks.classification.files import Examples
from bert_recipe.tasks.classification.scores import score
from bert_recipe.tasks.classification.specs import TaskSpec

MOST_FREQUENT = "most frequent class"


class LabelledTexts(NamedTuple):
    """The rows that baselines learn from. values: see `label_values`; num_rows: of the file."""

    texts_nk: np.ndarray
    values: np.ndarray
    num_rows: int

    @classmethod
    def draw(cls, examples: Examples, values: np.ndarray, num_classes: int) -> "LabelledTexts":
        rows = drawn_rows(len(values), num_classes)
        texts_nk = text_columns(examples.texts, examples.pairs)
        return cls(texts_nk[rows], values[rows], len(values))


def class_baselines(
    train: LabelledTexts, examples: Examples, values: np.ndarray, spec: TaskSpec, set_name: str
) -> Baselines:
    """The scores on `examples` with the labels `values`."""
    texts_nk = text_columns(examples.texts, examples.pairs)

    def scores_of(predicted: np.ndarray) -> Scores:
        logits_nC = as_logits(predicted, spec)
        scores = score(logits_nC, values, spec, set_name)
        return {name: value for name, value in scores.items() if isinstance(value, float)}

    if spec.negatives:
        chance = {"average_precision": float(np.mean(values > 0))}  # of texts in random order
        cosines = tfidf_cosines(fit_tfidf(train.texts_nk), texts_nk)[:, 0]
        scores = {"random order": chance, "tf-idf similarity": scores_of(cosines)}
        return Baselines(scores, "random order", len(values))
    predicted = tfidf_predictions(train, texts_nk, spec)
    method = "ridge regression" if spec.regression else "logistic regression"
    name = tfidf_name(train.texts_nk[:, 0], method)
    tfidf_scores = dict(scores_of(predicted))
    if len(train.values) < train.num_rows:
        tfidf_scores[ROWS] = len(train.values)
    if spec.regression:  # of a constant, no correlation is defined
        return Baselines({name: tfidf_scores}, None, len(values))
    labels, counts = np.unique(train.values, axis=0, return_counts=True)
    constant = np.repeat(labels[[counts.argmax()]], len(values), axis=0)
    chance_name = "most frequent labels" if spec.multi_label else MOST_FREQUENT
    scores = {chance_name: scores_of(constant), name: tfidf_scores}
    return Baselines(scores, chance_name, len(values))


def tfidf_predictions(train: LabelledTexts, texts_nk: np.ndarray, spec: TaskSpec) -> np.ndarray:
    """Predicted values (see `label_values`) for the texts."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    estimator = LogisticRegression()
    if spec.multi_label:
        estimator = OneVsRestClassifier(estimator)
    elif spec.regression:
        estimator = Ridge()
    pipeline = tfidf_pipeline(train.texts_nk, estimator, max(1, len(spec.labels)))
    predicted = pipeline.fit(train.texts_nk, train.values).predict(texts_nk)
    return predicted.reshape(len(texts_nk), -1) if spec.multi_label else predicted


def as_logits(predicted: np.ndarray, spec: TaskSpec) -> np.ndarray:
    """Logits [n, C] with these predictions (see `predictions_of`)."""
    if spec.regression:
        return predicted[:, None]
    if spec.multi_label:
        return predicted - 0.5
    return np.eye(len(spec.labels))[predicted]
