"""Development samples from the training file, against scikit-learn's stratified folds."""

from collections import Counter

import numpy as np
import pytest
from sklearn.model_selection import StratifiedKFold

from bert_recipe.tasks.splits import Split
from bert_recipe.utils.errors import UserError

CLASSES = np.repeat(["a", "b", "c", "single"], [50, 13, 4, 1])
KEYS = [f"text {row}" for row in range(len(CLASSES))]


def test_folds_hold_out_each_sample_once_and_share_classes_as_scikit_learns():
    folds = [Split(None, 5, 0, fold).held_out(KEYS, CLASSES) for fold in range(5)]
    assert (np.sum(folds, axis=0) == 1).all()
    for label in set(CLASSES):
        ours = sorted((CLASSES[fold] == label).sum() for fold in folds)
        with pytest.warns(UserWarning, match="least populated"):
            parts = list(StratifiedKFold(5).split(KEYS, CLASSES))
        theirs = sorted((CLASSES[held_out] == label).sum() for _, held_out in parts)
        assert ours == theirs
    sizes = [fold.sum() for fold in folds]
    assert max(sizes) - min(sizes) <= 1


def test_a_fraction_takes_its_share_of_each_class_and_the_seed_draws_it():
    held_out = Split(0.2, None, 0).held_out(KEYS, CLASSES)
    counts = Counter(CLASSES[held_out])
    assert counts["a"] == 10 and counts["b"] in (2, 3) and counts["c"] in (0, 1)
    assert counts["single"] == 0  # nothing would be left to learn
    assert (held_out == Split(0.2, None, 0).held_out(KEYS, CLASSES)).all()
    assert (held_out != Split(0.2, None, 1).held_out(KEYS, CLASSES)).any()


def test_equal_texts_are_on_one_side():
    keys = [f"text {row // 2}" for row in range(40)]
    held_out = Split(0.25, None, 3).held_out(keys, ["a"] * 40)
    assert (held_out[::2] == held_out[1::2]).all() and held_out.sum() == 10
    with pytest.raises(UserError, match="--eval-fraction holds out none of 2 samples"):
        Split(0.25, None, 3).held_out(["a", "b"], ["x", "y"])
