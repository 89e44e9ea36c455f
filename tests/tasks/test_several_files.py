"""A split in several files is read as one file with all rows."""

import json
from pathlib import Path

import pytest
from conftest import VOCAB_FILE

from bert_recipe.tasks.embeddings.files import read_tuples
from bert_recipe.tasks.ner.files import read_sentences
from bert_recipe.tasks.ner.options import TokenClassificationOptions
from bert_recipe.tasks.ner.task import TokenClassificationTask
from bert_recipe.tasks.reading import ReadingOptions
from bert_recipe.tasks.squad.files import read_squad
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.text_files import table_parts

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
    counts = []
    for file in (tmp_path / "all.jsonl", path):
        options = TokenClassificationOptions(train_file=file, eval_file=file, predict_file=file)
        task, dataset = TokenClassificationTask.learning(options, TOKENIZER)
        sets = [scored_set.dataset.sentences for scored_set in task.prediction_sets(TOKENIZER)]
        counts.append((task.labels, dataset.sentences, *sets))
    assert counts[0] == counts[1] and len(counts[0][1]) == 3
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


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        ("reviews.csv reviews_test.csv", "reviews.csv .without the word.* and reviews_test.csv"),
        ("reviews.csv dev.csv", "dev.csv .of development. and|and dev.csv|reviews.csv"),
        ("train.csv validation.csv", "validation.csv .of development. and train.csv"),
        ("reviewsTrain.csv reviewsTest.csv", "of test. and reviewsTrain.csv .of train"),
        ("trainset.csv devset.csv", "devset.csv .of development. and trainset.csv .of train"),
        ("reviews.csv reviews_holdout.csv", "without the word.* and reviews_holdout.csv .of test"),
        ("reviews.csv predictions.csv", "predictions.csv .of predictions"),
        ("train_dev.csv", "of development. and train_dev.csv .of train"),
        ("a_2.csv a_TEST2.csv", "without the word of a split. and a_TEST2.csv .of test"),
        ("reviews.csv testdata.csv", "reviews.csv .without the word.* and testdata.csv .of test"),
        ("TESTdata.csv Trainingsdaten.csv", "TESTdata.csv .of test. and Trainingsdaten.csv .of tr"),
        ("a.csv a_held-out.csv", "a.csv .without the word.* and a_held-out.csv .of test"),
        ("entraînement.csv validação.csv", "validação.csv .of development. and entra.* .of train"),
        ("评论_测试集.csv 训练集.csv", "评论_测试集.csv .of test. and 训练集.csv .of train"),
        ("détest.csv utest.csv 评论.csv", None),
        ("latest.csv retrained.csv", None),  # words, not parts of words
        ("train-00000-of-00002.csv train-00001-of-00002.csv", None),
        ("valid1.csv val_2.csv DEV.csv", None),
        ("part1.csv part2.csv", None),
        ("contest.csv developer.csv validity.csv", None),
        ("a.csv a.csv.gz", "a.csv.gz and the same without compression"),
    ],
)
@pytest.mark.parametrize("pattern", ["", "*"])
def test_files_of_one_split_are_read_and_named(names, refused, pattern, tmp_path, capsys):
    folder = tmp_path / "train_and_test"  # only the names of files count
    folder.mkdir()
    for name in names.split():
        (folder / name).touch()
    if refused is not None:
        with pytest.raises(UserError, match=refused):
            table_parts(folder / pattern)
        return
    assert [part.name for part in table_parts(folder / pattern)] == sorted(names.split())
    assert f": reads {', '.join(sorted(names.split()))}\n" in capsys.readouterr().out


def test_bad_bytes_end_the_sentence_and_separate_neighbouring_lines(tmp_path):
    skipping = ReadingOptions(skip_bad=True, output_dir=tmp_path)
    words = tmp_path / "words.conll"
    words.write_bytes(b"Anna B-PER\nleft O\n\nin O\nK\xf6ln B-LOC\nnow O\n\nOslo B-LOC\nis O\n")
    sentences = read_sentences(words, True, skipping)
    assert [sentence.words for sentence in sentences] == [["Anna", "left"], ["Oslo", "is"]]
    lines = tmp_path / "lines.txt"
    lines.write_bytes(b"one\ntwo\n\xff\nthree\nfour\n")
    tuples = read_tuples(lines, (), None, reading=skipping)
    pairs = [[tuples.texts[index] for index in row] for row in tuples.rows]
    assert pairs == [["one", "two"], ["three", "four"]]
