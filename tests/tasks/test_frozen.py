"""Linear layers on the vectors of an encoder: the fits of --frozen-encoder."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, KFold

from bert_recipe.tasks.classification.frozen import FrozenEncoder

pytestmark = pytest.mark.fast

ALPHAS = [10, 3, 1, 0.3, 0.1, 0.03]


def test_a_class_that_is_not_in_the_training_rows_is_not_predicted():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(30, 8)) + np.arange(30)[:, None] % 2 * np.eye(8)[0] * 5
    labels = np.where(np.arange(30) % 2, 3, 1)
    fitted = FrozenEncoder(None).fit(vectors, labels, ("a", "b", "c", "d"))
    logits = fitted.logits(vectors)
    assert set(logits.argmax(axis=1)) <= {1, 3} and (logits.argmax(axis=1) == labels).mean() > 0.9


def test_the_regularization_follows_the_rows():
    """Vectors that tell the classes apart have large weights, and noise has small ones."""
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 2
    classes = np.where(labels, 1, -1)[:, None] * np.eye(16)[0]
    lengths = []
    for vectors in (0.3 * rng.normal(size=(120, 16)) + classes, rng.normal(size=(120, 16))):
        fitted = FrozenEncoder(None).fit(vectors, labels, ("a", "b"))
        lengths.append(np.linalg.norm(fitted.weight_CF))
    assert lengths[0] > 5 * lengths[1]


def test_copies_of_rows_are_no_reason_for_large_weights():
    """Held-out copies of training rows would be right with the largest ones."""
    noise, labels = np.random.default_rng(0).normal(size=(60, 64)), np.arange(60) % 2
    lengths = []
    for copies in (1, 3):
        rows = np.tile(np.arange(60), copies)
        fitted = FrozenEncoder(None).fit(noise[rows], labels[rows], ("a", "b"))
        lengths.append(np.linalg.norm(fitted.weight_CF))
    assert lengths[1] < 6 * lengths[0]
    same = FrozenEncoder(None).fit(np.tile(noise[0], (4, 1)), labels[:4], ("a", "b"))
    assert np.isfinite(same.weight_CF).all()


def test_groups_that_are_held_out_together_choose_the_regularization():
    """Each group has its own vector and one label: other groups tell nothing about that."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 5)
    vectors = rng.normal(size=(20, 64))[groups] + 0.3 * rng.normal(size=(100, 64))
    lengths = []
    for names in ((), tuple(map(str, groups))):
        fitted = FrozenEncoder(None).fit(vectors, groups % 2, ("a", "b"), groups=names)
        lengths.append(np.linalg.norm(fitted.weight_CF))
    assert lengths[0] > 3 * lengths[1]


def test_groups_of_other_rows_are_refused():
    vectors = np.random.default_rng(0).normal(size=(8, 4))
    with pytest.raises(ValueError, match="9 groups of 8 rows"):
        FrozenEncoder(None).fit(vectors, np.arange(8) % 2, ("a", "b"), groups=tuple("aabbccdde"))


def test_numbers_of_pairs_are_those_of_ridge_regression_whose_cosine_counts_three_times():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(50, 2, 8))
    units = vectors / np.linalg.norm(vectors, axis=2, keepdims=True)
    products = units.prod(axis=1)
    parts = [3 * products.sum(axis=1, keepdims=True), 8**0.5 / 3 * products]
    features = np.hstack([*parts, np.abs(units[:, 0] - units[:, 1]) / 3])
    numbers = 5 * products.sum(axis=1) + 0.5 * rng.normal(size=50)
    fitted = FrozenEncoder(None, compares=True).fit(vectors.reshape(100, 8), numbers, ("score",))
    rows = np.random.default_rng(0).permutation(50)
    folds = [(rows[train], rows[held_out]) for train, held_out in KFold(5).split(rows)]
    search = GridSearchCV(Ridge(), {"alpha": ALPHAS}, scoring="neg_mean_squared_error", cv=folds)
    expected = search.fit(features, numbers).predict(features)
    outputs = fitted.logits(vectors.reshape(100, 8))
    np.testing.assert_allclose(outputs[:, 0], expected, atol=1e-5)


@given(st.integers(1, 30), st.floats(-1e4, 1e4), st.floats(0.01, 1e4), st.booleans())
@settings(max_examples=20, deadline=None)
def test_numbers_in_other_units_have_the_same_fit_in_these(num_rows, shift, factor, compares):
    rng = np.random.default_rng(num_rows)
    vectors = rng.normal(size=(num_rows * (1 + compares), 6))
    numbers = rng.normal(size=num_rows)
    plain, other = (
        FrozenEncoder(None, compares=compares).fit(vectors, values, ("score",)).logits(vectors)
        for values in (numbers, shift + factor * numbers)
    )
    tolerance = 1e-5 * (abs(shift) + factor)
    np.testing.assert_allclose(other, shift + factor * plain, atol=tolerance)


def test_equal_numbers_are_predicted_for_all_texts():
    vectors = np.random.default_rng(0).normal(size=(9, 4))
    fitted = FrozenEncoder(None).fit(vectors, np.full(9, 7.25), ("score",))
    np.testing.assert_allclose(fitted.logits(vectors), 7.25, rtol=1e-6)


@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 99), st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_order_of_labels_is_that_of_the_outputs(num_rows, num_labels, seed, balanced):
    """Also of labels that all rows have, or none, whose output is the log-odds of that."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(num_rows, 6))
    values = (rng.random((num_rows, num_labels)) < rng.random(num_labels)).astype(np.int64)
    order = rng.permutation(num_labels)
    names = tuple(map(str, range(num_labels)))
    plain, other = (
        FrozenEncoder(None).fit(vectors, labels, names, balanced).logits(vectors)
        for labels in (values, values[:, order])
    )
    np.testing.assert_allclose(other, plain[:, order], atol=1e-3)
    certainty = np.log(2 * num_rows + 1)
    for label in np.flatnonzero(np.ptp(values, axis=0) == 0):
        expected = certainty if values[0, label] else -certainty
        np.testing.assert_allclose(plain[:, label], expected, rtol=1e-5)
