"""Scores of ONNX files beside those of the model, with stand-ins for both."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import VOCAB_FILE
from transformers import BertTokenizerFast

from benchmarks.common.worker import THIS_PROJECT
from benchmarks.onnx_scores import compared_scores, onnx_tags, tag_scores
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


def test_tags_are_those_of_the_first_tokens_of_words():
    """Words that are cut off have none, and tags become IOB2."""
    tokenizer = BertTokenizerFast(str(VOCAB_FILE))
    labels = ("O", "B-X", "I-X")
    label_of = {tokenizer.convert_tokens_to_ids(word): 2 for word in ("sea", "ship")}

    def run(_, feed: dict) -> list[np.ndarray]:
        ids = [[label_of.get(token, 0) for token in row] for row in feed["input_ids"].tolist()]
        return [np.eye(len(labels))[ids]]

    args = SimpleNamespace(batch_size=2, max_seq_length=6)
    session = SimpleNamespace(run=run)
    runtime = SimpleNamespace(args=args, session=session, tokenizer=tokenizer, inputs=["input_ids"])
    sentences = [["the", "sea", "ship"], ["a", "sea-ship", "the", "ship"], ["ship"]]
    tags = [["O", "B-X", "I-X"], ["O", "B-X", "O", "O"], ["B-X"]]
    assert onnx_tags(runtime, sentences, labels) == tags
    scores = tag_scores(tags, [["O", "O", "O"], *tags[1:]], tags)
    assert (scores["precision"], scores["recall"], scores["equal_tags"]) == (1.0, 2 / 3, 6 / 8)


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
