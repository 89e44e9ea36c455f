"""The probability above which a text has a label, for each of several labels.

Legend: n samples, C labels.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import read_json

THRESHOLDS_FILE = "label_thresholds.json"  # in a model folder
DEFAULT = 0.5


def label_probabilities(logits_nC: np.ndarray) -> np.ndarray:
    """In float64, which tells probabilities near 1 apart."""
    return 1 / (1 + np.exp(-logits_nC.astype(np.float64)))


def labels_above(logits_nC: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """Whether each sample has each label [n, C], as 0 and 1. No thresholds: DEFAULT for all."""
    if not len(thresholds):
        return (logits_nC > 0).astype(np.int64)
    return (label_probabilities(logits_nC) > np.array(thresholds)).astype(np.int64)


def best_thresholds(logits_nC: np.ndarray, values_nC: np.ndarray) -> tuple[float, ...]:
    """The thresholds with the highest F1 of each label; DEFAULT where no other is better."""
    probability_nC = label_probabilities(logits_nC)
    pairs = zip(probability_nC.T, values_nC.T, strict=True)
    return tuple(best_threshold(probability_n, value_n) for probability_n, value_n in pairs)


def best_threshold(probability_n: np.ndarray, value_n: np.ndarray) -> float:
    """Candidates are the middles between neighbouring probabilities. F1 is 2 TP / (found + true);
    of equal ones, the threshold nearest to DEFAULT is chosen.
    """
    order = np.argsort(-probability_n, kind="stable")
    sorted_n = probability_n[order]
    found_n = np.arange(1, len(order) + 1)
    f1_n = 2 * value_n[order].cumsum() / (found_n + value_n.sum())
    middle_n = (sorted_n + np.append(sorted_n[1:], 0.0)) / 2
    is_between_n = middle_n < sorted_n  # not between equal probabilities
    is_found_n = probability_n > DEFAULT
    at_default = 2 * value_n[is_found_n].sum() / max(is_found_n.sum() + value_n.sum(), 1)
    candidates = [(at_default, 0.0, DEFAULT)]
    for f1, middle in zip(f1_n[is_between_n], middle_n[is_between_n], strict=True):
        candidates.append((float(f1), -abs(middle - DEFAULT), float(middle)))
    return max(candidates)[2]


def read_thresholds(folder: Path, labels: Sequence[str]) -> tuple[float, ...]:
    """The thresholds in a model folder, in the order of `labels`; none without the file. Raises
    UserError if a label has none.
    """
    path = folder / THRESHOLDS_FILE
    if not path.is_file():
        return ()
    found = read_json(path, "the thresholds", dict[str, float])
    if missing := [label for label in labels if label not in found]:
        raise UserError(f"{path} has no threshold of {missing[0]!r}: add it, or remove the file")
    return tuple(found[label] for label in labels)
