"""Decodes start and end logits to n-best answers, as in Google's BERT, and writes the prediction files.

Legend: T tokens of all features end to end, K candidate starts or ends of a feature, P candidate spans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from utils.errors import UserError
from utils.files import write_json

if TYPE_CHECKING:
    from tasks.squad import SquadDataset

PREDICTION_FILES = ("predictions.json", "nbest_predictions.json", "null_odds.json")


@dataclass(frozen=True)
class Predictions:
    """By question id: the answer (empty for none), the n best candidates with probabilities, for v2.0 the null score
    minus the best answer's score, and the answer's characters [start, stop) in its context, if any."""

    answers: dict[str, str]
    nbest: dict[str, list[dict[str, Any]]]
    null_odds: dict[str, float] | None
    characters: dict[str, tuple[int, int]] = field(default_factory=dict)


# A candidate span: positions in the sequence of a feature, with their logits.
SPAN = np.dtype([("feature", "i8"), ("start", "i8"), ("end", "i8"), ("start_logit", "f8"), ("end_logit", "f8")])


class Candidate(NamedTuple):
    text: str
    start_logit: float
    end_logit: float
    characters: tuple[int, int] | None = None

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


def decode(
    dataset: SquadDataset,
    start_logits_T: np.ndarray,
    end_logits_T: np.ndarray,
    *,
    n_best_size: int = 20,
    max_answer_length: int = 30,
    version_2_with_negative: bool = False,
    null_score_diff_threshold: float = 0.0,
) -> Predictions:
    """Decodes the logits [T] of all features, concatenated in the data set's order.

    Candidates are pairs of the `n_best_size` best starts and ends of a window that span at most `max_answer_length`
    tokens of the context and start where the window has the maximum context. The `n_best_size` candidates with the
    highest sums of logits are kept, without duplicate texts. v2.0 adds the empty answer, whose score is the lowest sum
    at `[CLS]` over the windows. It is predicted if its score exceeds the best answer's by more than the threshold.
    """
    answers: dict[str, str] = {}
    nbest: dict[str, list[dict[str, Any]]] = {}
    null_odds: dict[str, float] = {}
    characters: dict[str, tuple[int, int]] = {}
    for index, question in enumerate(dataset.squad.questions):
        spans: list[np.ndarray] = []
        nulls: list[Candidate] = []
        for feature in range(dataset.feature_bounds[index], dataset.feature_bounds[index + 1]):
            tokens = slice(dataset.token_bounds[feature], dataset.token_bounds[feature + 1])
            start_logits, end_logits = start_logits_T[tokens], end_logits_T[tokens]
            nulls.append(Candidate("", float(start_logits[0]), float(end_logits[0])))
            spans.append(feature_spans(dataset, feature, start_logits, end_logits, n_best_size, max_answer_length))
        candidates = distinct_texts(dataset, np.concatenate(spans), n_best_size)
        best = candidates[0] if candidates else None
        if version_2_with_negative:
            null = min(nulls, key=lambda candidate: candidate.score)
            null_odds[question.id] = null.score - (best.score if best else 0.0)
            if null_odds[question.id] > null_score_diff_threshold:
                best = None
            candidates = sorted([*candidates, null], key=lambda candidate: -candidate.score)
        answers[question.id] = best.text if best else ""
        if best:
            characters[question.id] = best.characters
        nbest[question.id] = with_probabilities(candidates or [Candidate("", 0.0, 0.0)])
    return Predictions(answers, nbest, null_odds if version_2_with_negative else None, characters)


def feature_spans(
    dataset: SquadDataset,
    feature: int,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    n_best_size: int,
    max_answer_length: int,
) -> np.ndarray:
    """The candidate spans of one window; [P] `SPAN`."""
    window = int(dataset.query_lengths[feature]) + 2, int(dataset.lengths[feature]) - 1
    start_K = best_positions(start_logits, *dataset.max_context[feature], n_best_size)
    end_K = best_positions(end_logits, *window, n_best_size)
    length_KK = end_K[None, :] - start_K[:, None] + 1
    start_P, end_P = np.nonzero((length_KK >= 1) & (length_KK <= max_answer_length))
    spans_P = np.empty(len(start_P), SPAN)
    spans_P["feature"] = feature
    spans_P["start"] = start_K[start_P]
    spans_P["end"] = end_K[end_P]
    spans_P["start_logit"] = start_logits[spans_P["start"]]
    spans_P["end_logit"] = end_logits[spans_P["end"]]
    return spans_P


def best_positions(logits: np.ndarray, first: int, stop: int, count: int) -> np.ndarray:
    """The `count` positions in [first, stop) with the highest logits, best first; ties in order of position."""
    return first + np.argsort(-logits[first:stop], kind="stable")[:count]


def distinct_texts(dataset: SquadDataset, spans_P: np.ndarray, n_best_size: int) -> list[Candidate]:
    """The texts of the `n_best_size` best spans, best first; each text appears once, with its best span."""
    candidates: dict[str, Candidate] = {}
    for place in np.argsort(-(spans_P["start_logit"] + spans_P["end_logit"]), kind="stable"):
        feature, start, end, start_logit, end_logit = spans_P[place].item()
        text = dataset.text(feature, start, end)
        if text not in candidates:
            candidates[text] = Candidate(text, start_logit, end_logit, dataset.characters(feature, start, end))
        if len(candidates) == n_best_size:
            break
    return list(candidates.values())


def with_probabilities(candidates: list[Candidate]) -> list[dict[str, Any]]:
    """`candidates` as entries of nbest_predictions.json. Probabilities are the softmax of the scores."""
    scores = np.array([candidate.score for candidate in candidates])
    weights = np.exp(scores - scores.max())
    probabilities = weights / weights.sum()
    return [
        {
            "text": candidate.text,
            "probability": float(probability),
            "start_logit": candidate.start_logit,
            "end_logit": candidate.end_logit,
        }
        for candidate, probability in zip(candidates, probabilities, strict=True)
    ]


def write_predictions(folder: str | Path, predictions: Predictions) -> Path:
    """Writes PREDICTION_FILES to `folder`, each atomically, and returns the first path. The last file is for v2.0 only;
    otherwise an old one is removed."""
    answers_file, nbest_file, null_odds_file = PREDICTION_FILES
    files = {nbest_file: predictions.nbest, answers_file: predictions.answers}
    if predictions.null_odds is not None:
        files[null_odds_file] = predictions.null_odds
    else:
        (Path(folder) / null_odds_file).unlink(missing_ok=True)
    for name, content in files.items():
        path = Path(folder) / name
        try:
            write_json(path, content, indent=4)
        except OSError as error:
            raise UserError(f"cannot write {path} ({error.strerror}): make room or choose another folder") from error
    return Path(folder) / answers_file
