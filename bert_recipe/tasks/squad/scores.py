"""Exact match and F1 of SQuAD predictions, computed as in the official evaluation scripts of v1.1
and v2.0.
"""

import collections
import re
import string
from collections.abc import Callable, Collection, Container
from functools import partial
from typing import Any

from bert_recipe.tasks.doubtful_rows import MAX_PLACES
from bert_recipe.tasks.squad.files import Question, Squad
from bert_recipe.utils.errors import UserError, listed, one_line, print_error

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(text: str) -> str:
    """Lower-cases `text`, removes ASCII punctuation and English articles, and collapses white
    space.
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    return float(normalized(prediction) == normalized(answer))


def f1(prediction: str, answer: str, empty_equals_empty: bool) -> float:
    """Harmonic mean of precision and recall over the bag of words. If both are empty after
    normalization, v2.0 (`empty_equals_empty`) gives 1 and v1.1 gives 0.
    """
    predicted_words, answer_words = normalized(prediction).split(), normalized(answer).split()
    if empty_equals_empty and not (predicted_words and answer_words):
        return float(predicted_words == answer_words)
    common_words = collections.Counter(predicted_words) & collections.Counter(answer_words)
    common = common_words.total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted_words), common / len(answer_words)
    return 2 * precision * recall / (precision + recall)


def evaluate(
    squad: Squad,
    predictions: dict[str, str],
    na_probs: dict[str, float] | None = None,
    na_prob_thresh: float = 1.0,
) -> dict[str, Any]:
    """The official scores in percent, with the official keys. v1.1: `exact_match` and `f1`. v2.0:
    `exact`, `f1`, `total`, and these for questions with (`HasAns_`) and without (`NoAns_`) an
    answer.

    A question without a prediction scores 0 in v1.1 and is an error in v2.0. na_probs (v2.0):
    probability of no answer by question; above `na_prob_thresh` the prediction counts as no answer.
    Adds the best scores over all thresholds (`best_exact`, `best_exact_thresh`, `best_f1`,
    `best_f1_thresh`).
    """
    check_predictions(squad, predictions, na_probs)
    raw_scores = question_scores(squad, predictions)
    if not squad.version_2:
        return {name: mean_percent(scores.values()) for name, scores in raw_scores.items()}
    answerable = {question.id: bool(question.answers) for question in squad.questions}
    if na_probs is None:
        return grouped_means(raw_scores, answerable)
    unanswered = {key for key, value in na_probs.items() if value > na_prob_thresh}
    scores = {
        name: with_unanswered(by_question, unanswered, answerable)
        for name, by_question in raw_scores.items()
    }
    result = grouped_means(scores, answerable)
    for name, by_question in raw_scores.items():
        best, threshold = best_threshold(by_question, predictions, na_probs, answerable)
        result[f"best_{name}"], result[f"best_{name}_thresh"] = best, threshold
    return result


def question_scores(squad: Squad, predictions: dict[str, str]) -> dict[str, dict[str, float]]:
    """The scores from 0 to 1 by metric and question: the best over the question's answers; 0
    without a prediction.
    """
    metrics: dict[str, Callable[[str, str], float]] = {
        "exact" if squad.version_2 else "exact_match": exact_match,
        "f1": partial(f1, empty_equals_empty=squad.version_2),
    }
    scores: dict[str, dict[str, float]] = {name: {} for name in metrics}
    for question in squad.questions:
        prediction = predictions.get(question.id)
        for name, metric in metrics.items():
            best = 0.0
            if prediction is not None:
                answers = gold_answers(question, squad)
                best = max((metric(prediction, answer) for answer in answers), default=0.0)
            scores[name][question.id] = best
    return scores


def with_unanswered(
    scores: dict[str, float], unanswered: Container[str], answerable: dict[str, bool]
) -> dict[str, float]:
    """`scores`, but for the `unanswered` questions 1 where there is no answer, else 0."""
    return {
        key: float(not answerable[key]) if key in unanswered else score
        for key, score in scores.items()
    }


def grouped_means(
    scores: dict[str, dict[str, float]], answerable: dict[str, bool]
) -> dict[str, Any]:
    """The means in percent of all questions, and of those with and without an answer."""
    groups = {
        "": list(answerable),
        "HasAns_": [key for key, has_answer in answerable.items() if has_answer],
        "NoAns_": [key for key, has_answer in answerable.items() if not has_answer],
    }
    result: dict[str, Any] = {}
    for prefix, group in groups.items():
        if not group:
            continue
        for name, by_question in scores.items():
            result[prefix + name] = mean_percent([by_question[key] for key in group])
        result[prefix + "total"] = len(group)
    return result


def mean_percent(scores: Collection[float]) -> float:
    return 100.0 * sum(scores) / len(scores)


def check_scored(squad: Squad) -> None:
    """Raises UserError for a v1.1 file with questions that have no answers."""
    questions = () if squad.version_2 else squad.questions
    lacking = [question.id for question in questions if not question.answers]
    if lacking:
        share = f"{len(lacking)} of the {len(questions)} questions have"
        raise UserError(
            f"{squad.path}: {share} no answers to compare with: "
            f"{one_line(listed(lacking, MAX_PLACES))}: "
            f"give them answers, or leave them out"
        )


def check_predictions(
    squad: Squad, predictions: dict[str, str], na_probs: dict[str, float] | None
) -> None:
    """Raises UserError for predictions that cannot be those of `squad`."""
    check_scored(squad)
    if not squad.version_2 and na_probs is not None:
        raise UserError(
            f"{squad.path} is SQuAD v1.1, where each question has an answer: leave out "
            f"--na-prob-file"
        )
    ids = {question.id: None for question in squad.questions}  # in the file's order
    for what, values in (("predictions", predictions), ("no-answer probabilities", na_probs)):
        if values is None:
            continue
        missing = [id_ for id_ in ids if id_ not in values]
        if missing and squad.version_2:
            lack = f"the {what} lack {len(missing)} of the {len(ids)} questions of {squad.path}"
            raise UserError(f"{lack}, {missing[0]} the first: SQuAD v2.0 wants one for each")
        if missing:
            print_error(f"{len(missing)} of {len(ids)} questions are unanswered and score 0")


def gold_answers(question: Question, squad: Squad) -> list[str]:
    """The texts that a prediction is compared with, as in the official scripts. v2.0 leaves out
    answers that normalization empties, such as "the", and gives a question without an answer the
    answer "".
    """
    texts = [answer.text for answer in question.answers]
    if not squad.version_2:
        return texts
    texts = [text for text in texts if normalized(text)]
    return texts or [""]


def best_threshold(
    scores: dict[str, float],
    predictions: dict[str, str],
    na_probs: dict[str, float],
    answerable: dict[str, bool],
) -> tuple[float, float]:
    """The best mean score in percent over all thresholds on `na_probs`, and its threshold.

    Starts with all questions unanswered, then answers them one by one, by increasing probability of
    no answer.
    """
    best = current = float(sum(not has_answer for has_answer in answerable.values()))
    threshold = 0.0
    for key in sorted(na_probs, key=lambda key: na_probs[key]):
        if key not in scores:
            continue
        if answerable[key]:
            current += scores[key]
        elif predictions[key]:
            current -= 1
        if current > best:
            best, threshold = current, na_probs[key]
    return 100.0 * best / len(scores), threshold
