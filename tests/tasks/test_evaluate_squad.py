"""evaluate_squad.py against published scores, and its rules on cases computed by hand."""

import json
from pathlib import Path

import pytest
from conftest import SHARED, needs_shared_data, run_program

from bert_recipe.tasks.squad.files import Answer, Question, Squad, read_squad
from bert_recipe.tasks.squad.scores import evaluate
from bert_recipe.utils.errors import UserError

BIDAF = {
    "exact": 68.2365,
    "f1": 70.6570,
    "total": 1911,
    "HasAns_exact": 60.4233,
    "HasAns_f1": 65.3180,
}
BIDAF |= {"HasAns_total": 945, "NoAns_exact": 75.8799, "NoAns_f1": 75.8799, "NoAns_total": 966}
PUBLISHED = [
    ("dev-v1.1", "logistic-regression", {"exact_match": 40.3807, "f1": 51.6883}),
    ("dev-v1.1", "match-lstm", {"exact_match": 68.2463, "f1": 76.5750}),
    ("dev-v2.0", "bidaf", BIDAF),
]


@needs_shared_data
@pytest.mark.parametrize(("dataset", "system", "scores"), PUBLISHED)
def test_published_predictions_get_the_official_scores(dataset, system, scores):
    files = (
        SHARED / "squad" / f"{name}.json" for name in (dataset, f"predictions-{dataset}-{system}")
    )
    done = run_program("evaluate_squad.py", *files)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert list(printed) == list(scores)
    assert {key: round(value, 4) for key, value in printed.items()} == scores


def squad_of(*answers_by_question, version_2):
    questions = [
        Question(f"q{index}", "?", 0, tuple(Answer(text, 0) for text in answers))
        for index, answers in enumerate(answers_by_question)
    ]
    return Squad(Path("squad.json"), ["context"], questions, version_2)


@pytest.mark.parametrize(
    ("answers", "prediction", "exact", "f1"),
    [
        (["Anna"], "anna", 1, 1),
        (["The Beatles!"], "beatles", 1, 1),
        (["an apple"], "a, apple", 1, 1),
        (["theatre"], "atre", 0, 0),  # an article is a whole word
        (["a-b"], "ab", 1, 1),  # punctuation goes without leaving a space
        (["“Anna”"], "Anna", 0, 0),  # only ASCII punctuation goes
        (["big red dog"], "red dog", 0, 0.8),
        (["red red dog"], "red cat", 0, 0.4),  # words count as often as they occur
        (["no", "big dog", "dog"], "the dog", 1, 1),  # the best of the answers
    ],
)
def test_normalization_and_f1(answers, prediction, exact, f1):
    scores = evaluate(squad_of(answers, version_2=False), {"q0": prediction})
    assert scores == {"exact_match": 100 * exact, "f1": pytest.approx(100 * f1)}
    scores = evaluate(squad_of(answers, version_2=True), {"q0": prediction})
    assert (scores["exact"], scores["f1"]) == (100 * exact, pytest.approx(100 * f1))


def test_texts_of_answers_suffice(tmp_path):
    """As for the official script."""
    answers = [{"text": "Anna"}, {"text": "the Anna", "answer_start": None}]
    question = {"id": "q1", "question": "Who?", "answers": answers}
    paragraphs = [{"context": "Anna sang.", "qas": [question]}]
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    assert evaluate(read_squad(path), {"q1": "anna"}) == {"exact_match": 100.0, "f1": 100.0}


def test_v11_scores_missing_and_empty_answers_as_zero():
    squad = squad_of(["Anna"], ["the"], version_2=False)
    assert evaluate(squad, {"q1": "a"}) == {"exact_match": 50.0, "f1": 0.0}


def test_v20_scores_questions_without_an_answer():
    """Answers that normalization empties are none, unless a question has no other."""
    squad = squad_of([], [], ["the"], ["Anna"], ["the", "Anna"], version_2=True)
    scores = evaluate(squad, {"q0": "", "q1": "Anna", "q2": "", "q3": "", "q4": ""})
    assert (scores["exact"], scores["NoAns_f1"]) == (40.0, 50.0)
    assert scores["HasAns_exact"] == pytest.approx(100 / 3)
    assert (scores["total"], scores["HasAns_total"], scores["NoAns_total"]) == (5, 3, 2)


def test_best_threshold_has_the_highest_score_of_all_thresholds():
    squad = squad_of(["Anna"], [], ["big dog"], [], ["cat"], version_2=True)
    predictions = {"q0": "Anna", "q1": "x", "q2": "dog", "q3": "y", "q4": "z"}
    odds = {"q0": -3.0, "q1": -1.0, "q2": -2.0, "q3": 4.0, "q4": 0.5}
    scores = evaluate(squad, predictions, odds)
    for name in ("exact", "f1"):
        by_threshold = {
            threshold: evaluate(squad, predictions, odds, na_prob_thresh=threshold)[name]
            for threshold in [*odds.values(), -10.0]
        }
        assert scores[f"best_{name}"] == pytest.approx(max(by_threshold.values()))
        assert by_threshold[scores[f"best_{name}_thresh"]] == pytest.approx(scores[f"best_{name}"])
    assert scores["best_exact_thresh"] == -3.0
    assert scores["best_f1_thresh"] == -2.0
    # With the official default threshold of 1.0, only q3 becomes no answer, which is right.
    assert scores["exact"] == 40.0


def test_predictions_of_another_data_set_are_named(capsys):
    squad = squad_of(["Anna"], ["Bob"], version_2=False)
    assert evaluate(squad, {"q0": "Anna", "x9": "y"})["f1"] == 50
    assert capsys.readouterr().err.splitlines() == ["1 of 2 questions are unanswered and score 0"]
    with pytest.raises(
        UserError, match=r"the predictions lack 1 of the 2 questions of .*, q1 the first"
    ):
        evaluate(squad_of(["Anna"], [], version_2=True), {"q0": "Anna"})
