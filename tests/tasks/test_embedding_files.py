"""Files of pairs, triplets and lists of texts for sentence embeddings."""

from pathlib import Path

import pytest
from conftest import ROOT, write_json_lines

from bert_recipe.checkpoint.sentence_folders import EmbeddingSettings
from bert_recipe.tasks.embeddings.files import read_tuples
from bert_recipe.tasks.reading import NumberReadingOptions
from bert_recipe.utils.errors import UserError


def test_neighbouring_lines_of_a_text_are_pairs(tmp_path):
    (tmp_path / "a.txt").write_text("One.\nTwo.\nThree.\n\n\nFour.\nOne.\n")
    tuples = read_tuples(tmp_path / "a.txt", (), None, EmbeddingSettings(prompts={"query": "q: "}))
    pairs = [[tuples.texts[index] for index in row] for row in tuples.rows]
    assert pairs == [["q: One.", "Two."], ["q: Two.", "Three."], ["q: Four.", "One."]]


def test_squads_questions_and_paragraphs_are_pairs():
    tuples = read_tuples(ROOT / "data/sample/squad/dev-v1.1.json", (), None)
    assert (len(tuples.rows), len({row[1] for row in tuples.rows})) == (120, 21)


# A row of FlagEmbedding's training files.
GROUPED = {"query": "a", "pos": ["x", "y"], "neg": ["k", "l", "m"], "prompt": "find "}
GROUPED |= {"pos_scores": [3, 2.5], "neg_scores": [1, 0.5, 0]}


def grouped_tuples(path: Path, rows: list[dict], num_negatives: int | None, *teacher: str):
    write_json_lines(path, rows)
    tuples = read_tuples(
        path, ("query", "pos", "neg"), None, teacher=teacher, num_negatives=num_negatives
    )
    texts = [[tuples.texts[index] for index in row] for row in tuples.rows]
    return texts, tuples.teacher_scores


def test_each_positive_of_a_list_is_a_sample_with_so_many_negatives(tmp_path):
    rows = [GROUPED, {**GROUPED, "query": "b", "pos": "x", "neg": ["n", "o"], "pos_scores": 1}]
    rows[1]["neg_scores"] = [-1, -2]
    teacher = ("pos_scores", "neg_scores")
    texts, scores = grouped_tuples(tmp_path / "a.jsonl", rows, 2, *teacher)
    assert texts == [["a", "x", "k", "l"], ["a", "y", "k", "l"], ["b", "x", "n", "o"]]
    assert scores == [[3, 1, 0.5], [2.5, 1, 0.5], [1, -1, -2]]


def test_a_row_can_have_a_prompt_of_its_own(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [GROUPED, {**GROUPED, "query": "b", "prompt": ""}]
    write_json_lines(path, rows)
    settings = EmbeddingSettings(prompts={"query": "q: ", "document": "d: "})
    tuples = read_tuples(path, ("query", "pos"), None, settings, prompt="prompt")
    texts = [[tuples.texts[index] for index in row] for row in tuples.rows]
    assert texts == [[q, d] for q in ("find a", "b") for d in ("d: x", "d: y")]
    assert tuples.originals[0] == "a"


def test_scores_of_pairs_may_have_a_decimal_comma(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a;b;s\nx;y;0,5\nv;w;1.000,25\n")
    reading = NumberReadingOptions(output_dir=tmp_path, decimal=",")
    assert read_tuples(path, ("a", "b"), "s", reading=reading).scores == [0.5, 1000.25]
    with pytest.raises(UserError, match="'s' is '0,5', expected a number: give --decimal ,"):
        read_tuples(path, ("a", "b"), "s")
