"""Baselines: what simple methods score beside a model, and who reads them."""

import csv
import json
import math
import random
import re

import numpy as np
import pytest
from conftest import fine_tuning_words, read_json
from glue_runs import own_files, run, scores_in, words
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import average_precision_score

import compare
import report
import run_embeddings
import run_glue
import run_ner
from bert_recipe.tasks import baselines
from bert_recipe.tasks.baselines import FROZEN, Baselines, chance_line, frozen_line

COMMON = ["the", "ship", "river", "stone", "house", "cloud"]
CHINESE = "山水人大小上下左右天地日月火木金土"


def texts(count: int, seed: int, alphabet: str = "") -> list[tuple[str, int]]:
    """Texts of three classes, which a word or a character tells most of the time."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        label = rng.choice((0, 0, 1, 2))
        marks = alphabet[:3] or ("great", "poor", "plain")
        others = list(alphabet[3:]) or COMMON
        chosen = [marks[label if rng.random() < 0.8 else 0], *rng.sample(others, 4)]
        rng.shuffle(chosen)
        rows.append(("".join(chosen) if alphabet else " ".join(chosen), label))
    return rows


def write_rows(path, header, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def train_on(folder, header, train, dev, *flags):
    """The baselines of a run on tables of a text (and maybe a pair) and a label."""
    paths = [
        write_rows(folder / f"{name}.csv", header, rows)
        for name, rows in (("train", train), ("dev", dev))
    ]
    columns = ["--text-column", "text", "--label-column", "label"]
    if "pair" in header:
        columns += ["--pair-column", "pair"]
    files = ("--train-file", paths[0], "--eval-file", paths[1])
    (folder / "config.json").write_text((folder.parent / "config.json").read_text())
    output = folder / "results"
    training = ("--do-train", "--do-eval", "--max-steps", 1)
    assert run_glue.main(words(folder, output, *training, *files, *columns, *flags)) == 0
    (scores,) = output.glob("*/*/scores.json")
    return read_json(scores)["baselines"]


@pytest.fixture
def folder(glue_files, tmp_path):
    (tmp_path / "config.json").write_text((glue_files / "config.json").read_text())
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_classes_are_those_of_scikit_learn_on_the_same_rows(folder, capsys):
    train, dev = texts(90, 0), texts(60, 1)
    scores = train_on(folder, ("text", "label"), train, dev)
    truths = np.array([label for _, label in dev])
    vectorizer = TfidfVectorizer().fit([text for text, _ in train])
    classifier = LogisticRegression().fit(
        vectorizer.transform([text for text, _ in train]), [label for _, label in train]
    )
    predicted = classifier.predict(vectorizer.transform([text for text, _ in dev]))
    assert list(scores) == ["most frequent class", "tf-idf + logistic regression"]
    frequent, tfidf = (values["accuracy"] for values in scores.values())
    assert frequent == np.mean(truths == 0) and tfidf == np.mean(truths == predicted)
    shown = [f"{100 * value:.1f}" for value in (frequent, tfidf)]
    line = f"(most frequent class {shown[0]}, tf-idf + logistic regression {shown[1]})"
    (printed,) = [row for row in capsys.readouterr().out.splitlines() if line in row]
    assert printed.startswith("accuracy ")


def test_texts_without_spaces_are_told_by_their_characters(folder):
    scores = train_on(folder, ("text", "label"), texts(90, 0, CHINESE), texts(60, 1, CHINESE))
    assert scores["tf-idf of characters + logistic regression"]["accuracy"] > 0.7


def test_pairs_are_told_by_their_similarity_too(folder):
    rng = random.Random(0)
    rows = []
    for _ in range(120):
        first = " ".join(rng.sample(COMMON, 3))
        other = " ".join(rng.sample(COMMON, 3))
        label = rng.randrange(2)
        rows.append((first, first if label else other, label))
    scores = train_on(folder, ("text", "pair", "label"), rows[:80], rows[80:])
    assert scores["tf-idf + logistic regression"]["accuracy"] > 0.8


def test_numbers_are_those_of_ridge_regression(folder):
    train, dev = texts(90, 0), texts(60, 1)
    scores = train_on(folder, ("text", "label"), train, dev, "--regression")
    vectorizer = TfidfVectorizer().fit([text for text, _ in train])
    features = vectorizer.transform([text for text, _ in train])
    model = Ridge().fit(features, [label for _, label in train])
    predicted = model.predict(vectorizer.transform([text for text, _ in dev]))
    pearson = np.corrcoef(predicted, [label for _, label in dev])[0, 1]
    assert list(scores) == ["tf-idf + ridge regression"]
    assert scores["tf-idf + ridge regression"]["pearson"] == pytest.approx(pearson, abs=1e-3)


def test_several_labels_are_one_question_each(folder):
    train, dev = ([(text, "a|b" if label else "a") for text, label in texts(90, s)] for s in (0, 1))
    scores = train_on(folder, ("text", "label"), train, dev, "--task-name", "multi-label")
    frequent, tfidf = scores["most frequent labels"], scores["tf-idf + logistic regression"]
    assert frequent["exact_match"] == np.mean([label == "a" for _, label in dev])
    assert tfidf["exact_match"] > frequent["exact_match"]


def test_a_large_file_is_learnt_in_part_which_is_said(folder, monkeypatch, capsys):
    monkeypatch.setattr(baselines, "MAX_ROWS", 40)
    scores = train_on(folder, ("text", "label"), texts(90, 0), texts(60, 1))
    assert scores["tf-idf + logistic regression"]["training_rows"] == 40
    assert "tf-idf + logistic regression of 40 rows" in capsys.readouterr().out


def test_texts_without_words_cost_the_baseline_only(folder, capsys):
    rows = [("?" * (1 + number % 3), number % 2) for number in range(12)]
    with pytest.raises(KeyError, match="baselines"):
        train_on(folder, ("text", "label"), rows, rows)
    assert "note: no baseline beside the scores: empty vocabulary" in capsys.readouterr().out


def test_rerankers_are_beside_the_cosine_of_tfidf(glue_files, tmp_path):
    rng = random.Random(0)
    rows = []
    for _ in range(30):
        query, other = (" ".join(rng.sample(COMMON, 3)) for _ in range(2))
        rows.append({"text": query, "good": f"{query} {rng.choice(COMMON)}", "bad": other})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--text-column", "text", "--pair-column", "good", "--negative-columns", "bad")
    flags += ("--train-file", file, "--eval-file", file, "--max-steps", 1)
    assert run(glue_files, tmp_path / "results", "--do-train", "--do-eval", *flags) == 0
    (scores,) = tmp_path.glob("results/*/*/scores.json")
    stored = read_json(scores)["baselines"]
    texts_of_rows = [text for row in rows for text in (row["text"], row["good"], row["bad"])]
    vectors = TfidfVectorizer().fit_transform(texts_of_rows).toarray().reshape(30, 3, -1)
    cosines = (vectors[:, :1] * vectors[:, 1:]).sum(axis=2)
    expected = average_precision_score([1, 0] * 30, cosines.ravel())
    assert stored["random order"]["average_precision"] == 0.5
    assert stored["tf-idf similarity"]["average_precision"] == pytest.approx(expected, abs=0.02)


def train_tags(glue_files, folder, train, dev):
    paths = []
    for name, sentences in (("train", train), ("dev", dev)):
        blocks = ["\n".join(f"{word} {tag}" for word, tag in sentence) for sentence in sentences]
        paths.append(folder / f"{name}.conll")
        paths[-1].write_text("\n\n".join(blocks) + "\n")
    flags = ("--do-train", "--train-file", paths[0], "--do-eval", "--eval-file", paths[1])
    flags += ("--max-seq-length", 16, "--max-steps", 1, "--epochs", 1)
    command = fine_tuning_words(glue_files / "config.json", folder / "results", *flags)
    assert run_ner.main(command) == 0
    return read_json(folder / "results/custom/ner/scores.json")["baselines"]


def test_entities_are_the_words_that_had_one_tag(glue_files, tmp_path):
    train = [
        [("anna", "B-PER"), ("saw", "O"), ("paris", "B-LOC")],
        [("paris", "B-PER"), ("saw", "O"), ("rome", "B-LOC")],
    ]
    # Right: anna. Missed: paris, which had two tags, and peter, which is new. Wrong: rome.
    dev = [[("anna", "B-PER"), ("paris", "B-LOC"), ("rome", "O"), ("peter", "B-PER")]]
    scores = train_tags(glue_files, tmp_path, train, dev)
    assert scores == {
        "words seen with one tag in training": {
            "accuracy": 0.25,
            "precision": 1 / 2,
            "recall": 1 / 3,
            "f1": 2 / 5,
        }
    }


def test_classes_of_words_are_the_most_frequent_ones(glue_files, tmp_path):
    train = [
        [("run", "VERB"), ("run", "VERB"), ("run", "NOUN"), ("dog", "NOUN"), ("cat", "NOUN")],
    ]
    dev = [[("run", "VERB"), ("cat", "NOUN"), ("new", "NOUN"), ("sees", "VERB")]]
    scores = train_tags(glue_files, tmp_path, train, dev)
    assert scores == {
        "most frequent class": {"accuracy": 0.5},
        "most frequent tag of each word": {"accuracy": 0.75},
    }


def test_embeddings_are_beside_the_retrieval_of_tfidf(glue_files, tmp_path):
    rng = random.Random(0)
    pairs = [[" ".join(rng.sample(COMMON, 3)) for _ in range(2)] for _ in range(12)]
    pairs = [(f"{first} q{n}", f"{second} d{n}") for n, (first, second) in enumerate(pairs)]
    file = write_rows(tmp_path / "pairs.csv", ("a", "b"), pairs)
    flags = ("--do-train", "--train-file", file, "--do-eval", "--eval-file", file)
    flags += ("--text-column", "a", "--pair-column", "b", "--max-seq-length", 16)
    flags += ("--max-steps", 1, "--epochs", 1)
    command = fine_tuning_words(glue_files / "config.json", tmp_path / "results", *flags)
    assert run_embeddings.main(command) == 0
    (scores,) = read_json(tmp_path / "results/custom/embedding/scores.json")["baselines"].values()
    every_text = [text for pair in pairs for text in pair]
    vectors = TfidfVectorizer().fit_transform(every_text).toarray()
    products = vectors[::2] @ vectors[1::2].T
    right = [row.argmax() == place for place, row in enumerate(products)]
    assert scores["recall@1"] == pytest.approx(np.mean(right))


def test_seeds_share_the_baselines_and_every_reader_skips_them(
    glue_files, tmp_path, monkeypatch, capsys
):
    computed = []
    original = baselines.tfidf_pipeline

    def counted(*args):
        computed.append(args)
        return original(*args)

    monkeypatch.setattr("bert_recipe.tasks.classification.baselines.tfidf_pipeline", counted)
    flags = (*own_files(glue_files, "--do-train", "--do-eval"), "--num-seeds", 2, "--max-steps", 2)
    for name, more in (("a", ()), ("b", ("--no-baseline",))):
        log = ("--report-file", tmp_path / name / "log.json")
        assert run(glue_files, tmp_path / name, *flags, *log, *more) == 0
    assert len(computed) == 1
    folders = [tmp_path / name / "custom" / "classification" for name in "ab"]
    with_baselines, without = (read_json(folder / "scores.json") for folder in folders)
    assert with_baselines.pop("baselines").keys() == {
        "most frequent class",
        "tf-idf + logistic regression",
    }
    assert with_baselines == without
    assert scores_in(folders[0] / "seed-42") == scores_in(folders[1] / "seed-42")
    capsys.readouterr()
    compare.main([*map(str, folders)])
    assert "tf-idf" not in capsys.readouterr().out
    report.main([str(tmp_path / "a"), "--output", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Beside simple methods" in page and "tf-idf + logistic regression" in page


def test_folds_have_their_own_baselines(glue_files, tmp_path, capsys):
    flags = [*own_files(glue_files, "--do-train"), "--do-eval", "--num-folds", 2, "--max-steps", 1]
    assert run(glue_files, tmp_path, *flags) == 0
    folder = tmp_path / "custom" / "classification"
    stored = [read_json(folder / name / "scores.json") for name in ("fold-1", "fold-2", ".")]
    first, second, mean = (scores["baselines"]["most frequent class"] for scores in stored)
    assert mean["accuracy"] == pytest.approx((first["accuracy"] + second["accuracy"]) / 2)
    assert " ± " in capsys.readouterr().out.splitlines()[-1]


BESIDE = {"most frequent class": {"accuracy": 0.5}}


@pytest.mark.parametrize(
    ("name", "value", "chance", "says"),
    [
        ("accuracy", 0.52, BESIDE, "(50.0) by more than its own error (2.2)"),
        ("accuracy", 0.53, BESIDE, None),
        ("accuracy", 0.2, BESIDE, "accuracy 20.0 is not above that of the most frequent class"),
        ("pearson", 0.03, {}, "is not above 0 by more than its own error (4.5)"),
        ("pearson", 0.1, {}, None),
        ("pearson", math.nan, {}, None),
        ("f1", 0.0, {}, "f1 0.0 is not above 0"),
        ("f1", 0.01, {}, None),
    ],
)
def test_a_score_that_is_not_above_chance_is_named(name, value, chance, says):
    beside = Baselines(chance, next(iter(chance), None), 500)
    line = chance_line(name, value, beside, "more --epochs")
    assert (line is None) == (says is None)
    assert says is None or says in line


@pytest.mark.parametrize(
    ("value", "frozen", "is_said"),
    [
        (0.7, 0.75, True),
        (0.7, 0.72, False),
        (0.7, math.nan, False),
        (math.nan, 0.1, True),  # all rows have the same prediction
        (math.nan, 0.04, False),
        (math.nan, math.nan, False),
    ],
)
def test_a_frozen_encoder_is_named_if_it_is_ahead_by_more_than_the_error(value, frozen, is_said):
    beside = Baselines({FROZEN: {"pearson": frozen}}, None, 500)
    assert (frozen_line("pearson", value, beside) is not None) == is_said


@pytest.mark.parametrize(
    ("confusion", "says"),
    [
        ([[423, 9], [35, 13]], "of 22 rows for which it predicts rarer classes 13 are right"),
        ([[50, 30], [4, 16]], "of 46 rows for which it predicts rarer classes 16 are right"),
        ([[380, 70], [10, 40]], "40 are right, and 11.0 would be by chance"),
        ([[440, 10, 0], [30, 0, 10], [0, 0, 10]], "of 30 rows"),
        ([[449, 1], [49, 1]], None),  # as likely as not by chance
        ([[440, 10], [48, 2]], None),
        ([[450, 0], [50, 0]], None),
        ([[130, 120], [125, 125]], None),
    ],
)
def test_rare_classes_that_are_learnt_are_no_reason_to_drop_a_model(confusion, says):
    chance = {"most frequent class": {"accuracy": 0.9}}
    beside = Baselines(chance, "most frequent class", 500)
    line = chance_line("accuracy", 0.9, beside, "more --epochs", confusion)
    assert ("do not use" in line) == (says is None)
    assert says is None or says in line


def test_one_class_for_all_rows_is_said_of_each_file(glue_files, tmp_path, capsys):
    mnli = ("--task-name", "MNLI", "--data-dir", glue_files / "MNLI", "--do-train", "--do-eval")
    assert run(glue_files, tmp_path, *mnli, "--max-steps", 1, "--learning-rate", 1) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "same prediction" in line]
    assert re.match(r"warning: matched: all \d+ rows .*; mismatched: all \d+ rows have", line)
