"""A classifier on the vectors of an encoder that is not trained: logistic regression of
scikit-learn.

Legend: n texts, E hidden size, C classes.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bert_recipe.checkpoint.model_card import CLASSIFIER
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.sentence_folders import (
    EmbeddingSettings,
    classifier_files,
    read_classifier,
)
from bert_recipe.utils.errors import UserError

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

EPSILON = 1e-5  # of LayerNorm, in sentence-transformers and ModernBERT
ABSENT = -30.0  # the logit of a class without a text to learn from
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0)  # C of scikit-learn, of which one is chosen
FOLDS, MAX_ROWS = 5, 2000  # of the choice
LEAST_SHARE = 1e-6  # of a class that is not in the rows of a fold
COPY = 0.999  # cosine of two texts that are the same to the model


@dataclass(frozen=True)
class FrozenEncoder:
    """How texts become vectors, and vectors logits; the weights [C, E] and biases [C] are None
    until they are fitted.
    """

    settings: EmbeddingSettings
    weight_CE: np.ndarray | None = None
    bias_C: np.ndarray | None = None

    @classmethod
    def read(cls, folder: Path) -> "FrozenEncoder | None":
        """The classifier in a model folder that `files` has written; None if there is none, or the
        model's own head is it.
        """
        if (ModelFolder(folder).architecture or "").endswith(CLASSIFIER):
            return None
        content = read_classifier(folder)
        return None if content is None else cls(*content)

    def prompted(
        self, texts: list[str], pairs: list[str] | None
    ) -> tuple[list[str], list[str] | None]:
        """Texts as they are tokenized. Pairs have no prompt."""
        settings = self.settings
        if pairs is not None:
            settings = replace(settings, default_prompt=None)
            pairs = [settings.prompted(None, text) for text in pairs]
        return [settings.prompted(None, text) for text in texts], pairs

    def fit(
        self,
        vectors_nE: np.ndarray,
        labels_n: np.ndarray,
        labels: tuple[str, ...],
        balanced: bool = False,
    ) -> "FrozenEncoder":
        """Logistic regression on `normalized` vectors of length 1, whose regularization is the best
        of STRENGTHS in cross-validation, as weights of normalized vectors.

        labels_n: the ids of the classes, whose names are `labels`.
        balanced: weight classes by the inverse of their frequency.
        """
        from sklearn.utils.class_weight import compute_sample_weight

        present = np.unique(labels_n)
        if len(present) < 2:
            raise UserError(
                f"all texts to learn from are of class {labels[present[0]]!r}: there must be at "
                f"least two"
            )
        scale = vectors_nE.shape[1] ** 0.5  # the length of a normalized vector
        weights_n = compute_sample_weight("balanced" if balanced else None, labels_n)
        classifier = fitted(normalized(vectors_nE) / scale, labels_n, weights_n)
        coefficients, intercepts = classifier.coef_ / scale, classifier.intercept_
        if len(present) == 2:  # one logit, of the second class
            coefficients = np.concatenate([-coefficients, coefficients]) / 2
            intercepts = np.concatenate([-intercepts, intercepts]) / 2
        weight_CE = np.zeros((len(labels), vectors_nE.shape[1]), np.float32)
        bias_C = np.full(len(labels), ABSENT, np.float32)
        weight_CE[present], bias_C[present] = coefficients, intercepts
        return FrozenEncoder(self.settings, weight_CE, bias_C)

    def logits(self, vectors_nE: np.ndarray) -> np.ndarray:
        """The logits [n, C] of the encoder's vectors."""
        if self.weight_CE is None or self.bias_C is None:
            raise ValueError("the classifier is not fitted")
        return normalized(vectors_nE) @ self.weight_CE.T + self.bias_C

    def files(self, max_seq_length: int) -> dict[str, bytes]:
        """The files with which sentence-transformers computes the same logits, by name."""
        if self.weight_CE is None or self.bias_C is None:
            raise ValueError("the classifier is not fitted")
        return classifier_files(self.settings, self.weight_CE, self.bias_C, max_seq_length)


def fitted(
    vectors_nE: np.ndarray, labels_n: np.ndarray, weights_n: np.ndarray
) -> "LogisticRegression":
    """Logistic regression with the strength whose loss on held-out rows is the least: with that of
    scikit-learn, 1, a classifier of few vectors of length 1 is far too unsure.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import KFold

    rows = np.random.default_rng(0).permutation(len(labels_n))[:MAX_ROWS]
    # With copies of held-out rows in training, the weakest regularization would seem the best.
    cosines_nn = vectors_nE[rows] @ vectors_nE[rows].T
    is_copy_nn = cosines_nn >= COPY * cosines_nn.diagonal()[:, None]
    rows = rows[np.unique(is_copy_nn.argmax(axis=1))]
    losses = dict.fromkeys(STRENGTHS, 0.0)
    folds = KFold(min(FOLDS, len(rows))).split(rows) if len(rows) > 1 else ()
    for train, held_out in folds:
        train, held_out = rows[train], rows[held_out]
        for strength in STRENGTHS:
            if len(np.unique(labels_n[train])) < 2:
                continue
            model = LogisticRegression(C=strength, max_iter=1000)
            model.fit(vectors_nE[train], labels_n[train], weights_n[train])
            is_right_nC = model.classes_ == labels_n[held_out, None]
            shares_n = (model.predict_proba(vectors_nE[held_out]) * is_right_nC).sum(axis=1)
            losses[strength] -= weights_n[held_out] @ np.log(np.maximum(shares_n, LEAST_SHARE))
    best = min(STRENGTHS, key=losses.__getitem__)
    return LogisticRegression(C=best, max_iter=1000).fit(vectors_nE, labels_n, weights_n)


def normalized(vectors_nE: np.ndarray) -> np.ndarray:
    """LayerNorm without weights: the mean of each vector is 0, and its variance 1."""
    centred_nE = vectors_nE - vectors_nE.mean(axis=1, keepdims=True)
    return centred_nE / np.sqrt(centred_nE.var(axis=1, keepdims=True) + EPSILON)
