"""A classifier on the vectors of an encoder that is not trained: logistic regression of
scikit-learn.

The two texts of a pair have a vector each, and are compared: reading them together has to be learnt
from thousands of pairs, and the vectors of a model that embeds texts show at once how similar two
texts are.

Legend: n rows, E hidden size, F features (E, of pairs 2 E + 1), C classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bert_recipe.checkpoint.model_card import CLASSIFIER
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.sentence_folders import (
    CLASSIFIER_MODULES,
    EmbeddingSettings,
    classifier_files,
    pair_classifier_files,
    read_classifier,
    read_pair_classifier,
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
    """How texts become vectors, and vectors logits; the weights [C, F] and biases [C] are None
    until they are fitted.

    compares: whether rows are pairs, whose texts have a vector each.
    """

    settings: EmbeddingSettings
    weight_CF: np.ndarray | None = None
    bias_C: np.ndarray | None = None
    compares: bool = False

    @classmethod
    def of_encoder(cls, folder: Path | None, compares: bool) -> "FrozenEncoder":
        """To be fitted to the vectors of the encoder in `folder`; a classifier there is replaced.
        Raises UserError if the folder's way to embed texts is not supported.
        """
        settings = EmbeddingSettings()
        if folder is not None:
            settings = EmbeddingSettings.read(folder, CLASSIFIER_MODULES)
        return cls(settings, compares=compares)

    @classmethod
    def read(cls, folder: Path) -> "FrozenEncoder | None":
        """The classifier in a model folder that `files` has written; None if there is none, or the
        model's own head is it.
        """
        if (ModelFolder(folder).architecture or "").endswith(CLASSIFIER):
            return None
        if (content := read_pair_classifier(folder)) is not None:
            return cls(*content, compares=True)
        content = read_classifier(folder)
        return None if content is None else cls(*content)

    def prompted(
        self, texts: list[str], pairs: list[str] | None
    ) -> tuple[list[str], list[str] | None]:
        """Texts as they are tokenized: those of pairs one after the other, or, for a
        classifier that version 1.0.0 has fitted, together and without a prompt.
        """
        settings = self.settings
        if self.compares and pairs is not None:
            texts = [text for row in zip(texts, pairs, strict=True) for text in row]
            pairs = None
        if pairs is not None:
            settings = replace(settings, default_prompt=None)
            pairs = [settings.prompted(None, text) for text in pairs]
        return [settings.prompted(None, text) for text in texts], pairs

    def fit(
        self,
        vectors: np.ndarray,
        labels_n: np.ndarray,
        labels: tuple[str, ...],
        balanced: bool = False,
        groups: Sequence[str] = (),
    ) -> "FrozenEncoder":
        """Logistic regression on `normalized` vectors of length 1, or on `compared` ones, whose
        regularization is the best of STRENGTHS in cross-validation.

        vectors: [n, E], of pairs [2 n, E] or [n, 2 E].
        labels_n: the ids of the classes, whose names are `labels`.
        balanced: weight classes by the inverse of their frequency.
        groups: of the rows, if rows of one group are held out together.
        """
        from sklearn.utils.class_weight import compute_sample_weight

        if groups and len(groups) != len(labels_n):
            raise ValueError(f"{len(groups)} groups of {len(labels_n)} rows")
        present = np.unique(labels_n)
        if len(present) < 2:
            raise UserError(
                f"all texts to learn from are of class {labels[present[0]]!r}: there must be at "
                f"least two"
            )
        features_nF = self.features(vectors.reshape(len(labels_n), -1))
        # The length of a normalized vector.
        scale = 1.0 if self.compares else features_nF.shape[1] ** 0.5
        weights_n = compute_sample_weight("balanced" if balanced else None, labels_n)
        classifier = fitted(features_nF / scale, labels_n, weights_n, groups)
        coefficients, intercepts = classifier.coef_ / scale, classifier.intercept_
        if len(present) == 2:  # one logit, of the second class
            coefficients = np.concatenate([-coefficients, coefficients]) / 2
            intercepts = np.concatenate([-intercepts, intercepts]) / 2
        weight_CF = np.zeros((len(labels), features_nF.shape[1]), np.float32)
        bias_C = np.full(len(labels), ABSENT, np.float32)
        weight_CF[present], bias_C[present] = coefficients, intercepts
        return replace(self, weight_CF=weight_CF, bias_C=bias_C)

    def features(self, vectors: np.ndarray) -> np.ndarray:
        """The features [n, F] of vectors [n, E], of pairs [n, 2 E]."""
        return compared(*np.hsplit(vectors, 2)) if self.compares else normalized(vectors)

    def logits(self, vectors: np.ndarray) -> np.ndarray:
        """The logits [n, C] of the encoder's vectors [n, E], of pairs [2 n, E] or [n, 2 E]."""
        if self.weight_CF is None or self.bias_C is None:
            raise ValueError("the classifier is not fitted")
        if self.compares:
            vectors = vectors.reshape(-1, self.weight_CF.shape[1] - 1)
        return self.features(vectors) @ self.weight_CF.T + self.bias_C

    def files(self, max_seq_length: int) -> dict[str, bytes]:
        """The files with which sentence-transformers computes the same logits, of pairs the vectors
        of the texts, by name.
        """
        if self.weight_CF is None or self.bias_C is None:
            raise ValueError("the classifier is not fitted")
        write = pair_classifier_files if self.compares else classifier_files
        return write(self.settings, self.weight_CF, self.bias_C, max_seq_length)


def fitted(
    features_nF: np.ndarray,
    labels_n: np.ndarray,
    weights_n: np.ndarray,
    groups: Sequence[str] = (),
) -> "LogisticRegression":
    """Logistic regression with the strength whose loss on held-out rows is the least: with that of
    scikit-learn, 1, a classifier of few vectors of length 1 is far too unsure. groups: see
    FrozenEncoder.fit.
    """
    from sklearn.linear_model import LogisticRegression

    rows = np.random.default_rng(0).permutation(len(labels_n))[:MAX_ROWS]
    # With copies of held-out rows in training, the weakest regularization would seem the best.
    units_nF = of_length_1(features_nF[rows])
    is_copy_nn = units_nF @ units_nF.T >= COPY
    rows = rows[np.unique(is_copy_nn.argmax(axis=1))]
    losses = dict.fromkeys(STRENGTHS, 0.0)
    for train, held_out in folds_of(rows, groups):
        if len(np.unique(labels_n[train])) < 2:
            continue
        for strength in STRENGTHS:
            model = LogisticRegression(C=strength, max_iter=1000)
            model.fit(features_nF[train], labels_n[train], weights_n[train])
            is_right_nC = model.classes_ == labels_n[held_out, None]
            shares_n = (model.predict_proba(features_nF[held_out]) * is_right_nC).sum(axis=1)
            losses[strength] -= weights_n[held_out] @ np.log(np.maximum(shares_n, LEAST_SHARE))
    best = min(STRENGTHS, key=losses.__getitem__)
    return LogisticRegression(C=best, max_iter=1000).fit(features_nF, labels_n, weights_n)


def folds_of(rows: np.ndarray, groups: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The rows to learn from and those held out, of each fold. Rows of one of the `groups`, if
    there are any, are in one fold. No folds of a single row or group.
    """
    from sklearn.model_selection import GroupKFold, KFold

    names = np.array(groups)[rows] if groups else None
    count = min(FOLDS, len(rows) if names is None else len(np.unique(names)))
    if count < 2:
        return
    kind = KFold if names is None else GroupKFold
    for train, held_out in kind(count).split(rows, groups=names):
        yield rows[train], rows[held_out]


def normalized(vectors_nE: np.ndarray) -> np.ndarray:
    """LayerNorm without weights: the mean of each vector is 0, and its variance 1."""
    centred_nE = vectors_nE - vectors_nE.mean(axis=1, keepdims=True)
    return centred_nE / np.sqrt(centred_nE.var(axis=1, keepdims=True) + EPSILON)


def of_length_1(vectors_nE: np.ndarray) -> np.ndarray:
    return vectors_nE / np.maximum(np.linalg.norm(vectors_nE, axis=1, keepdims=True), EPSILON)


def compared(first_nE: np.ndarray, second_nE: np.ndarray) -> np.ndarray:
    """The features [n, 2 E + 1] of the vectors of two texts, divided by their lengths: cosine,
    products and absolute differences (as InferSent has: Conneau et al., 2017). Products, which are
    small, are scaled to a length of about 1/3, and differences by 1/3, so that the cosine counts
    most, and STRENGTHS are the right ones.
    """
    first_nE, second_nE = of_length_1(first_nE), of_length_1(second_nE)
    products_nE = first_nE * second_nE
    cosines_n1 = products_nE.sum(axis=1, keepdims=True)
    differences_nE = np.abs(first_nE - second_nE)
    scale = products_nE.shape[1] ** 0.5
    return np.hstack([cosines_n1, scale / 3 * products_nE, differences_nE / 3])
