"""Thresholds of several labels against scikit-learn's F1."""

import numpy as np
import pytest
from sklearn.metrics import f1_score

from bert_recipe.tasks.classification.label_thresholds import (
    best_thresholds,
    label_probabilities,
    labels_above,
    read_thresholds,
)
from bert_recipe.utils.errors import UserError


def test_no_threshold_has_a_better_f1_than_the_chosen_one():
    random = np.random.default_rng(0)
    values = (random.random((60, 3)) < (0.1, 0.4, 0.9)).astype(np.int64)
    logits = (2 * values + random.normal(-2, 1.5, (60, 3))).round(1)  # with ties
    thresholds = best_thresholds(logits, values)
    found = labels_above(logits, thresholds)
    for column in range(3):
        true = values[:, column]
        probability = label_probabilities(logits[:, column])
        candidates = [0.0, 0.5, *probability]
        every = [f1_score(true, probability > each, zero_division=0) for each in candidates]
        assert f1_score(true, found[:, column]) == pytest.approx(max(every))
        assert max(every) > every[1]  # the default is worse


def test_thresholds_stay_in_the_middle_where_nothing_is_better():
    logits = np.array([[-3.0, 2.0], [4.0, -1.0]])
    assert best_thresholds(logits, np.array([[0, 0], [1, 0]])) == (0.5, 0.5)
    assert labels_above(logits, ()).tolist() == labels_above(logits, (0.5, 0.5)).tolist()


def test_a_model_without_the_threshold_of_a_label_is_refused(tmp_path):
    assert read_thresholds(tmp_path, ("a",)) == ()
    (tmp_path / "label_thresholds.json").write_text('{"b": 0.25, "a": 0.5}')
    assert read_thresholds(tmp_path, ("a", "b")) == (0.5, 0.25)
    with pytest.raises(UserError, match="no threshold of 'c': add it"):
        read_thresholds(tmp_path, ("a", "c"))
