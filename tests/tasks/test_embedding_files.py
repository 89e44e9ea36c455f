"""Files without columns for sentence embeddings."""

from conftest import ROOT

from bert_recipe.checkpoint.sentence_folders import EmbeddingSettings
from bert_recipe.tasks.embeddings.files import read_tuples


def test_neighbouring_lines_of_a_text_are_pairs(tmp_path):
    (tmp_path / "a.txt").write_text("One.\nTwo.\nThree.\n\n\nFour.\nOne.\n")
    found = read_tuples(tmp_path / "a.txt", (), None, EmbeddingSettings(prompts={"query": "q: "}))
    pairs = [[found.texts[index] for index in row] for row in found.rows]
    assert pairs == [["q: One.", "Two."], ["q: Two.", "Three."], ["q: Four.", "One."]]


def test_squads_questions_and_paragraphs_are_pairs():
    found = read_tuples(ROOT / "data/sample/squad/dev-v1.1.json", (), None)
    assert (len(found.rows), len({row[1] for row in found.rows})) == (120, 21)
