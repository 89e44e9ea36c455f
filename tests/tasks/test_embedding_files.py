"""Files of pairs, triplets and lists of texts for sentence embeddings."""

import json
from pathlib import Path

import pytest
from conftest import ROOT

from bert_recipe.checkpoint.sentence_folders import EmbeddingSettings
from bert_recipe.tasks.classification.files import read_examples
from bert_recipe.tasks.classification.specs import custom_spec
from bert_recipe.tasks.embeddings.files import read_tuples
from bert_recipe.utils.errors import UserError


def test_neighbouring_lines_of_a_text_are_pairs(tmp_path):
    (tmp_path / "a.txt").write_text("One.\nTwo.\nThree.\n\n\nFour.\nOne.\n")
    found = read_tuples(tmp_path / "a.txt", (), None, EmbeddingSettings(prompts={"query": "q: "}))
    pairs = [[found.texts[index] for index in row] for row in found.rows]
    assert pairs == [["q: One.", "Two."], ["q: Two.", "Three."], ["q: Four.", "One."]]


def test_paragraphs_between_empty_lines_are_no_neighbours(tmp_path):
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n\nThree.\n")
    with pytest.raises(UserError, match="an empty line ends a document: remove those"):
        read_tuples(tmp_path / "a.txt", (), None)


def test_squads_questions_and_paragraphs_are_pairs():
    found = read_tuples(ROOT / "data/sample/squad/dev-v1.1.json", (), None)
    assert (len(found.rows), len({row[1] for row in found.rows})) == (120, 21)


# A row of FlagEmbedding's training files.
GROUPED = {"query": "a", "pos": ["x", "y"], "neg": ["k", "l", "m"], "prompt": "find "}
GROUPED |= {"pos_scores": [3, 2.5], "neg_scores": [1, 0.5, 0]}


def grouped_tuples(path: Path, rows: list[dict], num_negatives: int | None, *teacher: str):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_tuples(
        path, ("query", "pos", "neg"), None, teacher=teacher, num_negatives=num_negatives
    )
    texts = [[found.texts[index] for index in row] for row in found.rows]
    return texts, found.teacher_scores


def test_each_positive_of_a_list_is_a_sample_with_so_many_negatives(tmp_path):
    rows = [GROUPED, {**GROUPED, "query": "b", "pos": "x", "neg": ["n", "o"], "pos_scores": 1}]
    rows[1]["neg_scores"] = [-1, -2]
    teacher = ("pos_scores", "neg_scores")
    texts, scores = grouped_tuples(tmp_path / "a.jsonl", rows, 2, *teacher)
    assert texts == [["a", "x", "k", "l"], ["a", "y", "k", "l"], ["b", "x", "n", "o"]]
    assert scores == [[3, 1, 0.5], [2.5, 1, 0.5], [1, -1, -2]]
    for changed, num_negatives, says in (
        ({}, None, "its rows have lists of 2 to 3 negatives: .* --num-negatives 2"),
        ({}, 3, ":2: 2 negatives, fewer than --num-negatives 3"),
        ({"neg": []}, 2, ":2: no text in 'neg'"),
        ({"neg": ["n", 5]}, 2, ":2: 'neg' is 5, expected a string"),
        ({"neg_scores": [1]}, 2, ":2: 1 numbers in neg_scores and 2 texts"),
    ):
        with pytest.raises(UserError, match=says):
            bad = [rows[0], rows[1] | changed]
            grouped_tuples(tmp_path / "a.jsonl", bad, num_negatives, *teacher)


def test_a_row_can_have_a_prompt_of_its_own(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [GROUPED, {**GROUPED, "query": "b", "prompt": ""}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = EmbeddingSettings(prompts={"query": "q: ", "document": "d: "})
    found = read_tuples(path, ("query", "pos"), None, settings, prompt="prompt")
    texts = [[found.texts[index] for index in row] for row in found.rows]
    assert texts == [[q, d] for q in ("find a", "b") for d in ("d: x", "d: y")]
    assert found.originals[0] == "a"
    path.write_text(json.dumps({**GROUPED, "prompt": None}) + "\n")
    with pytest.raises(UserError, match=":1: 'prompt' is None, expected a string"):
        read_tuples(path, ("query", "pos"), None, settings, prompt="prompt")


def test_lists_that_pandas_has_written_to_a_csv_file_are_not_taken_for_texts(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("query,pos,neg\na,\"['x', 'y']\",\"['k']\"\n")
    says = ":2: 'pos' is a list that was written as text, .*: give JSON lines"
    with pytest.raises(UserError, match=says):
        read_tuples(path, ("query", "pos", "neg"), None)
    with pytest.raises(UserError, match=says):
        read_examples(path, custom_spec("query", "pos", "", negatives=("neg",)), labelled=True)
