"""Scores of ONNX files beside those of the model, with stand-ins for both."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.common.worker import THIS_PROJECT
from benchmarks.onnx_scores import compared_scores
from utils.errors import UserError


def stand_in(outputs: dict[str, list[float]]) -> SimpleNamespace:
    return SimpleNamespace(predict=lambda texts: [outputs[text] for text in texts])


def arguments(pair_column: str | None) -> SimpleNamespace:
    names = {"text_column": "a", "pair_column": pair_column, "label_column": "truth"}
    return SimpleNamespace(input="dev.csv", **names)


def test_classes_are_compared_with_labels_and_with_those_of_this_project():
    rows = [{"a": text, "truth": truth} for text, truth in zip("uvwx", "nyny", strict=True)]
    own = stand_in({"u": [2, 1], "v": [0, 1], "w": [3, 0], "x": [1, 0]})
    other = stand_in({"u": [0, 1], "v": [0, 1], "w": [3, 0], "x": [1, 0]})
    implementations = {THIS_PROJECT: own, "other": other}
    scores = compared_scores(arguments(None), ("n", "y"), implementations, rows)
    assert [scores[name]["accuracy"] for name in implementations] == [0.75, 0.5]
    assert scores["other"]["equal_classes"] == 0.75
    with pytest.raises(UserError, match="does not know the class 'y'"):
        compared_scores(arguments(None), ("n", "z"), implementations, rows)


def test_cosines_of_pairs_are_compared_with_their_scores():
    from scipy.stats import spearmanr

    random = np.random.default_rng(0)
    outputs = {text: random.standard_normal(4).tolist() for text in "stuvwxyz"}
    rows = [{"a": a, "b": b, "truth": str(n)} for n, (a, b) in enumerate(["st", "uv", "wx", "yz"])]
    found = compared_scores(arguments("b"), (), {THIS_PROJECT: stand_in(outputs)}, rows)
    cosines = []
    for row in rows:
        a, b = (np.array(outputs[row[name]]) for name in "ab")
        cosines.append(a @ b / np.sqrt((a @ a) * (b @ b)))
    expected = spearmanr(cosines, range(4))[0]
    assert found[THIS_PROJECT]["spearman"] == pytest.approx(expected)
