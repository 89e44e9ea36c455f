"""A split in several files is read as one file with all rows."""

import json
from pathlib import Path

import pytest
from conftest import VOCAB_FILE

from bert_recipe.tasks.embeddings.files import read_tuples
from bert_recipe.tasks.ner.task import TokenClassificationTask
from bert_recipe.tasks.squad.files import read_squad
from bert_recipe.tokenization.tokenizer import BertTokenizer

TOKENIZER = BertTokenizer(VOCAB_FILE)


def write(folder: Path, rows: list[dict]) -> Path:
    """Writes the rows as one file, and as two in a folder; returns the folder."""
    parts = folder / "parts"
    parts.mkdir(exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    for path, own in (
        (folder / "all.jsonl", lines),
        (parts / "train-0.jsonl", lines[:1]),
        (parts / "train-1.jsonl", lines[1:]),
    ):
        path.write_text("".join(own))
    return parts


@pytest.mark.parametrize("pattern", ["", "train-*.jsonl"])
def test_entities_questions_and_pairs_may_be_in_several_files(tmp_path, pattern):
    tagged = [
        {"text": text, "spans": [{"start": 0, "end": end, "label": kind}]}
        for text, end, kind in (("Anna left", 4, "PER"), ("北京很大", 2, "LOC"), ("Oslo", 4, "LOC"))
    ]
    path = write(tmp_path, tagged) / pattern
    found = []
    for file in (tmp_path / "all.jsonl", path):
        task = TokenClassificationTask(train_file=file, eval_file=file, predict_file=file)
        task, dataset = task.training_set(TOKENIZER)
        sets = [each.dataset.sentences for each in task.prediction_sets(TOKENIZER)]
        found.append((task.labels, dataset.sentences, *sets))
    assert found[0] == found[1] and len(found[0][1]) == 3
    digest = task.development_digest()
    (path.parent if pattern else path).joinpath("train-1.jsonl").write_text(json.dumps(tagged[0]))
    assert task.development_digest() != digest

    answers = {"text": ["Anna"], "answer_start": [0]}
    questions = [
        {"question": f"who {place}?", "context": f"Anna left {place // 2}.", "answers": answers}
        for place in range(3)
    ]
    path = write(tmp_path, questions) / pattern
    one, several = (read_squad(file) for file in (tmp_path / "all.jsonl", path))
    assert (one.contexts, one.questions) == (several.contexts, several.questions)
    assert len(one.questions) == 3

    path = write(tmp_path, [{"a": f"question {place}", "b": f"答え {place}"} for place in range(3)])
    one, several = (
        read_tuples(file, ("a", "b"), None) for file in (tmp_path / "all.jsonl", path / pattern)
    )
    assert one == several and len(one.rows) == 3


def test_articles_of_several_squad_files_are_one_file(tmp_path):
    for name in "ab":
        entry = {"id": name, "question": "who?", "answers": [{"text": "Anna", "answer_start": 0}]}
        paragraph = {"context": f"Anna {name}", "qas": [entry]}
        document = {"version": "1.1", "data": [{"paragraphs": [paragraph]}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    squad = read_squad(tmp_path / "*.json")
    assert squad.contexts == ["Anna a", "Anna b"]
    assert [question.id for question in squad.questions] == ["a", "b"]
