"""A linear layer on the vectors of an encoder that is not trained, which scikit-learn fits:
logistic regression for classes, and for each of several labels, or ridge regression for numbers.

The two texts of a pair have a vector each, and are compared: reading them together has to be learnt
from thousands of pairs, and the vectors of a model that embeds texts show at once how similar two
texts are.

Legend: n rows, E hidden size, F features (E, of pairs 2 E + 1), C outputs: classes, labels, or a
number.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

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
from bert_recipe.tasks.classification.labels import first_log_odds
from bert_recipe.tasks.embeddings.retrieval import normalized
from bert_recipe.utils.errors import UserError

EPSILON = 1e-5  # of LayerNorm, in sentence-transformers and ModernBERT
ABSENT = -30.0  # logit of a class without a text to learn from
FOLDS, MAX_ROWS, MAX_LABELS = 5, 2000, 10  # of the choice of a regularization
LEAST_SHARE = 1e-6  # of a class or label that is not in the rows of a fold
COPY = 0.999  # cosine of two texts that are the same to the model


@dataclass(frozen=True)
class FrozenEncoder:
    """How texts become vectors, and vectors outputs; the weights [C, F] and biases [C] are None
    until they are fitted.

    compares: whether rows are pairs, whose texts have a vector each.
    """

    settings: EmbeddingSettings
    weight_CF: np.ndarray | None = None
    bias_C: np.ndarray | None = None
    compares: bool = False

    @classmethod
    def of_encoder(cls, folder: Path | None, compares: bool) -> "FrozenEncoder":
        """To be fitted to the vectors of the encoder in `folder`; a layer there is replaced.
        Raises UserError if the folder's way to embed texts is not supported.
        """
        settings = EmbeddingSettings()
        if folder is not None:
            settings = EmbeddingSettings.read(folder, CLASSIFIER_MODULES)
        return cls(settings, compares=compares)

    @classmethod
    def read(cls, folder: Path) -> "FrozenEncoder | None":
        """What a model folder has that `files` has written; None if there is none, or the model's
        own head is the layer.
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
        values: np.ndarray,
        labels: tuple[str, ...],
        balanced: bool = False,
        groups: Sequence[str] = (),
    ) -> "FrozenEncoder":
        """A linear layer on `layer_normalized` vectors, scaled to length 1, or on `compared` ones,
        whose regularization is the best in cross-validation.

        vectors: [n, E], of pairs [2 n, E] or [n, 2 E].
        values: ids [n], multi-hot labels [n, C], or numbers [n] (see label_values).
        labels: the names of the outputs.
        balanced: weight classes, or absent and present labels, by the inverse of their frequency.
        groups: of the rows, if rows of one group are held out together.
        """
        if groups and len(groups) != len(values):
            raise ValueError(f"{len(groups)} groups of {len(values)} rows")
        kind = kind_of(values)
        if kind is CLASSES and not np.ptp(values):
            raise UserError(
                f"all texts to learn from are of class {labels[values[0]]!r}: there must be at "
                f"least two"
            )
        features_nF = self.features(vectors.reshape(len(values), -1))
        scale_F = np.full(features_nF.shape[1], features_nF.shape[1] ** -0.5)  # to length 1
        if self.compares:
            scale_F[:] = 1.0
            scale_F[0] = kind.cosine_scale
        targets_nC = values.reshape(len(values), -1)
        if kind is CLASSES:
            targets_nC = np.eye(len(labels))[values]
        rows = Rows(features_nF * scale_F, targets_nC, row_weights(values, balanced))
        layer = kind.fit(rows, best_strength(kind, rows, groups))
        weight_CF = (layer.weight_CF * scale_F).astype(np.float32)
        return replace(self, weight_CF=weight_CF, bias_C=layer.bias_C.astype(np.float32))

    def features(self, vectors: np.ndarray) -> np.ndarray:
        """The features [n, F] of vectors [n, E], of pairs [n, 2 E]."""
        return compared(*np.hsplit(vectors, 2)) if self.compares else layer_normalized(vectors)

    def logits(self, vectors: np.ndarray) -> np.ndarray:
        """The outputs [n, C] for the encoder's vectors [n, E], of pairs [2 n, E] or [n, 2 E]."""
        if self.weight_CF is None or self.bias_C is None:
            raise ValueError("the layer is not fitted")
        if self.compares:
            vectors = vectors.reshape(-1, self.weight_CF.shape[1] - 1)
        return self.features(vectors) @ self.weight_CF.T + self.bias_C

    def files(self, max_seq_length: int) -> dict[str, bytes]:
        """The files with which sentence-transformers computes the same logits, of pairs the vectors
        of the texts, by name.
        """
        if self.weight_CF is None or self.bias_C is None:
            raise ValueError("the layer is not fitted")
        write = pair_classifier_files if self.compares else classifier_files
        return write(self.settings, self.weight_CF, self.bias_C, max_seq_length)


class Rows(NamedTuple):
    """Rows to learn from, in float64: in float32, numbers far from 0 would lose their differences.

    targets_nC: one-hot classes, multi-hot labels, or numbers [n, 1].
    weights: of the rows [n, 1], or of the labels of each row [n, C].
    """

    features_nF: np.ndarray
    targets_nC: np.ndarray
    weights: np.ndarray

    def part(self, indices: np.ndarray) -> "Rows":
        return Rows(*(array[indices] for array in self))


class LinearLayer(NamedTuple):
    weight_CF: np.ndarray
    bias_C: np.ndarray

    def outputs(self, features_nF: np.ndarray) -> np.ndarray:
        return features_nF @ self.weight_CF.T + self.bias_C


def logistic_layer(rows: Rows, strength: float) -> LinearLayer:
    """The logits of classes. strength: C of scikit-learn."""
    from sklearn.linear_model import LogisticRegression

    labels_n = rows.targets_nC.argmax(axis=1)
    present = np.unique(labels_n)
    num_outputs, num_features = rows.targets_nC.shape[1], rows.features_nF.shape[1]
    layer = LinearLayer(np.zeros((num_outputs, num_features)), np.full(num_outputs, ABSENT))
    layer.bias_C[present] = 0.0
    if len(present) < 2:
        return layer
    model = LogisticRegression(C=strength, max_iter=1000)
    model.fit(rows.features_nF, labels_n, rows.weights[:, 0])
    weights, biases = model.coef_, model.intercept_
    if len(present) == 2:  # one logit, of the second class
        weights = np.concatenate([-weights, weights]) / 2
        biases = np.concatenate([-biases, biases]) / 2
    layer.weight_CF[present], layer.bias_C[present] = weights, biases
    return layer


def logistic_layers(rows: Rows, strength: float) -> LinearLayer:
    """The logits of several labels, each of which is a question of two classes. A label that all
    rows have, or none, has the log-odds of that.
    """
    bias_C = first_log_odds(rows.targets_nC, ())
    weight_CF = np.zeros((len(bias_C), rows.features_nF.shape[1]))
    for label in np.flatnonzero(np.ptp(rows.targets_nC, axis=0)):
        present_n = rows.targets_nC[:, label]
        classes = np.stack([1 - present_n, present_n], axis=1)
        question = Rows(rows.features_nF, classes, rows.weights[:, [label]])
        both = logistic_layer(question, strength)
        weight_CF[label] = both.weight_CF[1] - both.weight_CF[0]
        bias_C[label] = both.bias_C[1] - both.bias_C[0]
    return LinearLayer(weight_CF, bias_C)


def ridge_layer(rows: Rows, strength: float) -> LinearLayer:
    """A number. strength: alpha of scikit-learn."""
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=strength).fit(rows.features_nF, rows.targets_nC)
    return LinearLayer(model.coef_.reshape(1, -1), model.intercept_)


def log_losses(shares: np.ndarray) -> np.ndarray:
    """Of the probabilities that outputs give to what is right."""
    return -np.log(np.maximum(shares, LEAST_SHARE))


def class_losses(logits_nC: np.ndarray, targets_nC: np.ndarray) -> np.ndarray:
    from scipy.special import softmax

    return log_losses((softmax(logits_nC, axis=1) * targets_nC).sum(axis=1, keepdims=True))


def label_losses(logits_nC: np.ndarray, targets_nC: np.ndarray) -> np.ndarray:
    from scipy.special import expit

    return log_losses(expit(np.where(targets_nC > 0, logits_nC, -logits_nC)))


def squared_errors(numbers_n1: np.ndarray, targets_n1: np.ndarray) -> np.ndarray:
    return np.square(numbers_n1 - targets_n1)


class Kind(NamedTuple):
    """How a layer for one kind of labels is fitted.

    method: its name.
    strengths: of the regularization, of which one is chosen, the strongest first.
    cosine_scale: of the cosine of pairs among the features.
    fit: to rows, with a strength.
    losses: of outputs for targets, [n, 1] or [n, C].
    """

    method: str
    strengths: tuple[float, ...]
    cosine_scale: float
    fit: Callable[[Rows, float], LinearLayer]
    losses: Callable[[np.ndarray, np.ndarray], np.ndarray]


LOGISTIC = (1.0, 3.0, 10.0, 30.0, 100.0)  # C of scikit-learn
RIDGE = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03)  # alpha of scikit-learn
CLASSES = Kind("logistic regression", LOGISTIC, 1.0, logistic_layer, class_losses)
LABELS = Kind("logistic regression for each label", LOGISTIC, 1.0, logistic_layers, label_losses)
NUMBERS = Kind("ridge regression", RIDGE, 3.0, ridge_layer, squared_errors)


def kind_of(values: np.ndarray) -> Kind:
    """values: see label_values."""
    if values.dtype.kind == "f":
        return NUMBERS
    return CLASSES if values.ndim == 1 else LABELS


def row_weights(values: np.ndarray, balanced: bool) -> np.ndarray:
    """See Rows."""
    from sklearn.utils.class_weight import compute_sample_weight

    columns = values.reshape(len(values), -1).T
    weight = "balanced" if balanced else None
    return np.stack([compute_sample_weight(weight, column) for column in columns], axis=1)


def best_strength(kind: Kind, rows: Rows, groups: Sequence[str]) -> float:
    """The strength whose loss on held-out rows is the least: with the one of scikit-learn, 1, a
    classifier of few vectors of length 1 is far too unsure. Several labels share it. groups: see
    FrozenEncoder.fit.
    """
    if kind is LABELS:  # the most frequent ones tell it
        chosen = np.argsort(-rows.targets_nC.sum(axis=0), kind="stable")[:MAX_LABELS]
        targets, weights = rows.targets_nC[:, chosen], rows.weights[:, chosen]
        rows = rows._replace(targets_nC=targets, weights=weights)
    indices = np.random.default_rng(0).permutation(len(rows.features_nF))[:MAX_ROWS]
    # With copies of held-out rows in training, the weakest regularization would seem the best.
    units_nF = normalized(rows.features_nF[indices])
    is_copy_nn = units_nF @ units_nF.T >= COPY
    indices = indices[np.unique(is_copy_nn.argmax(axis=1))]
    losses = dict.fromkeys(kind.strengths, 0.0)
    for train, held_out in folds_of(indices, groups):
        training, scored = rows.part(train), rows.part(held_out)
        for strength in kind.strengths:
            outputs = kind.fit(training, strength).outputs(scored.features_nF)
            losses_nC = scored.weights * kind.losses(outputs, scored.targets_nC)
            losses[strength] += float(losses_nC.sum())
    return min(kind.strengths, key=losses.__getitem__)


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


def layer_normalized(vectors_nE: np.ndarray) -> np.ndarray:
    """LayerNorm without weights: the mean of each vector is 0, and its variance 1."""
    centred_nE = vectors_nE - vectors_nE.mean(axis=1, keepdims=True)
    return centred_nE / np.sqrt(centred_nE.var(axis=1, keepdims=True) + EPSILON)


def compared(first_nE: np.ndarray, second_nE: np.ndarray) -> np.ndarray:
    """The features [n, 2 E + 1] of the vectors of two texts, divided by their lengths: cosine,
    products and absolute differences (as InferSent has: Conneau et al., 2017). Products, which are
    small, are scaled to a length of about 1/3, and differences by 1/3, so that the cosine counts
    most, and LOGISTIC and RIDGE have the right strengths.
    """
    first_nE, second_nE = normalized(first_nE), normalized(second_nE)
    products_nE = first_nE * second_nE
    cosines_n1 = products_nE.sum(axis=1, keepdims=True)
    differences_nE = np.abs(first_nE - second_nE)
    scale = products_nE.shape[1] ** 0.5
    return np.hstack([cosines_n1, scale / 3 * products_nE, differences_nE / 3])
