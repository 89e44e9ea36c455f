"""The reader of SQuAD's JSON files: every damaged file is an error that names the file and the place."""

import json

import pytest
from conftest import VOCAB_FILE

from tasks.squad_features import SquadDataset
from tasks.squad_file import read_squad
from tokenizer import BertTokenizer
from utils.errors import UserError

TOKENIZER = BertTokenizer(VOCAB_FILE, do_lower_case=True)


def entry(**changes):
    values = {"id": "q1", "question": "Who?", "answers": [{"text": "Anna", "answer_start": 0}], **changes}
    return {key: value for key, value in values.items() if value is not None}


def document(*entries, **paragraph):
    paragraphs = [{"context": "Anna sang.", "qas": list(entries), **paragraph}]
    return {"version": "1.1", "data": [{"title": "Anna", "paragraphs": paragraphs}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(document(entry()))[:-9], "not valid JSON"),
        (json.dumps([1]), "not a JSON object"),
        (json.dumps({"version": "1.1"}), "has no 'data'"),
        (json.dumps({"data": []}), "has no questions"),
        (json.dumps({"data": [{"title": "Anna"}]}), "article 1 has no 'paragraphs'"),
        (json.dumps(document(entry(), context=5)), "article 1, paragraph 1: 'context' is not a string"),
        (json.dumps(document(entry(id=None))), "a question has no 'id'"),
        (json.dumps(document(entry(question=None))), "question q1 has no 'question'"),
        (json.dumps(document(entry(answers="Anna"))), "question q1: 'answers' is not a list"),
        (json.dumps(document(entry(answers=[{"text": "Anna"}]))), "question q1 has no 'answer_start'"),
        (json.dumps(document(entry(answers=[{"text": "Anna", "answer_start": "0"}]))), "is not a whole number"),
        (json.dumps(document(entry(), entry())), "question q1 is there twice"),
        (
            json.dumps(document(entry(answers=[{"text": "Anne", "answer_start": 0}]))),
            "question q1: its answer 'Anne'",
        ),
        (
            json.dumps(document(entry(answers=[{"text": "Anna", "answer_start": 5}]))),
            "not in its context at character 5",
        ),
        (json.dumps(document(entry(answers=[{"text": "Anna", "answer_start": 500}]))), "at character 500"),
        (json.dumps(document(entry(answers=[{"text": "Anna", "answer_start": -4}]))), "at character -4"),
        (json.dumps(document(entry(answers=[{"text": " ", "answer_start": 4}]))), "question q1: its answer ' '"),
        (json.dumps(document(entry(answers=[]))), "question q1 has no answer to train on"),
    ],
)
def test_bad_training_file_is_an_error_that_names_the_place(tmp_path, content, message):
    path = tmp_path / "train.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as error:
        SquadDataset(read_squad(path), TOKENIZER, training=True)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_missing_file_is_named():
    with pytest.raises(UserError, match=r"nowhere\.json does not exist"):
        read_squad("nowhere.json")


def test_file_to_predict_needs_no_answers(tmp_path):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(document(entry(answers=None))), encoding="utf-8")
    assert len(SquadDataset(read_squad(path), TOKENIZER)) == 1
