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
        ("[" * 200_000, "not valid JSON"),
        ('{"data": ' + "9" * 5000 + "}", "not valid JSON"),
        ("NaN", "is nan, expected an object"),
        ('{"data": [[[]]]}', "data[0] is [[]], expected an object"),
        (json.dumps([1]), "is [1], expected an object"),
        (json.dumps({"version": "1.1"}), "data is None, expected a list"),
        (json.dumps({"data": []}), "has no questions"),
        (json.dumps({"data": [{"title": "Anna"}]}), "data[0]: paragraphs is None, expected a list"),
        (json.dumps(document(entry(), context=5)), "data[0]: paragraphs[0]: context is 5, expected a string"),
        (json.dumps(document(entry(id=None))), "qas[0]: id is missing"),
        (json.dumps(document(entry(question=None))), "qas[0]: question is missing"),
        (json.dumps(document(entry(answers="Anna"))), "answers is 'Anna', expected a list"),
        (json.dumps(document(entry(answers=[{"text": "Anna"}]))), "answers[0]: answer_start is missing"),
        (json.dumps(document(entry(answers=[{"text": "Anna", "answer_start": "0"}]))), "expected a whole number"),
        (json.dumps(document(entry(), entry())), "question q1 is there twice"),
        (json.dumps(document(entry(answers=[{"text": "Anne", "answer_start": 0}]))), "question q1: its answer 'Anne'"),
        (
            json.dumps(document(entry(answers=[{"text": "Anna", "answer_start": 5}]))),
            "not in its context at character 5",
        ),
        (json.dumps(document(entry(answers=[{"text": "Anna", "answer_start": 10**18}]))), "at character 1000000000"),
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


def test_file_to_predict_needs_no_answers(tmp_path):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(document(entry(answers=None))), encoding="utf-8")
    assert len(SquadDataset(read_squad(path), TOKENIZER)) == 1
