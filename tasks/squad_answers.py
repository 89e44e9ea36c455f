"""Decodes start and end logits to n-best answers, as in Google's BERT.

Legend: T tokens of all features end to end, K candidate starts or ends of a feature, P candidate spans.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tasks.squad_features import DEFAULTS, SquadDataset
from tasks.squad_file import SquadOptions


@dataclass(frozen=True)
class Predictions:
    """By question id: the answer (empty for none), the n best candidates with probabilities, for v2.0 the null score
    minus the best answer's score, and the answer's characters [start, stop) in its context, if any."""

    answers: dict[str, str]
    nbest: dict[str, list[dict[str, Any]]]
    null_odds: dict[str, float] | None
    characters: dict[str, tuple[int, int]]


class Candidate(NamedTuple):
    text: str
    start_logit: float
    end_logit: float
    characters: tuple[int, int] | None = None

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


def decode(
    dataset: SquadDataset, start_logits_T: np.ndarray, end_logits_T: np.ndarray, options: SquadOptions = DEFAULTS
) -> Predictions:
    """Decodes the logits [T] of all features, concatenated in the data set's order.

    Candidates are pairs of the `n_best_size` best starts and ends of a window that span at most `max_answer_length`
    tokens of the context and start where the window has the maximum context. The `n_best_size` candidates with the
    highest sums of logits are kept, without duplicate texts. v2.0 adds the empty answer, whose score is the lowest sum
    at `[CLS]` over the windows. It is predicted if its score exceeds the best answer's by more than the threshold.
    """
    found = Predictions({}, {}, {} if options.version_2_with_negative else None, {})
    for index, question in enumerate(dataset.squad.questions):
        spans: list[np.ndarray] = []
        nulls: list[Candidate] = []
        for feature in range(dataset.feature_bounds[index], dataset.feature_bounds[index + 1]):
            tokens = slice(dataset.token_bounds[feature], dataset.token_bounds[feature + 1])
            start_logits, end_logits = start_logits_T[tokens], end_logits_T[tokens]
            nulls.append(Candidate("", float(start_logits[0]), float(end_logits[0])))
            spans.append(feature_spans(dataset, feature, start_logits, end_logits, options))
        candidates = distinct_texts(dataset, np.concatenate(spans, axis=1), options.n_best_size)
        best = candidates[0] if candidates else None
        if options.version_2_with_negative:
            null = min(nulls, key=lambda candidate: candidate.score)
            found.null_odds[question.id] = null.score - (best.score if best else 0.0)
            if found.null_odds[question.id] > options.null_score_diff_threshold:
                best = None
            candidates = sorted([*candidates, null], key=lambda candidate: -candidate.score)
        found.answers[question.id] = best.text if best else ""
        if best:
            found.characters[question.id] = best.characters
        found.nbest[question.id] = with_probabilities(candidates or [Candidate("", 0.0, 0.0)])
    return found


def feature_spans(
    dataset: SquadDataset, feature: int, start_logits: np.ndarray, end_logits: np.ndarray, options: SquadOptions
) -> np.ndarray:
    """The candidate spans of one window: feature, start, end, start logit and end logit, [5, P] float64."""
    window = int(dataset.query_lengths[feature]) + 2, int(dataset.lengths[feature]) - 1
    start_K = best_positions(start_logits, *dataset.max_context[feature], options.n_best_size)
    end_K = best_positions(end_logits, *window, options.n_best_size)
    length_KK = end_K[None, :] - start_K[:, None] + 1
    starts, ends = np.nonzero((length_KK >= 1) & (length_KK <= options.max_answer_length))
    start_P, end_P = start_K[starts], end_K[ends]
    return np.stack([np.full(len(start_P), feature), start_P, end_P, start_logits[start_P], end_logits[end_P]])


def best_positions(logits: np.ndarray, first: int, stop: int, count: int) -> np.ndarray:
    """The `count` positions in [first, stop) with the highest logits, best first; ties in order of position."""
    return first + np.argsort(-logits[first:stop], kind="stable")[:count]


def distinct_texts(dataset: SquadDataset, spans_5P: np.ndarray, n_best_size: int) -> list[Candidate]:
    """The texts of the `n_best_size` best spans, best first; each text appears once, with its best span."""
    candidates: dict[str, Candidate] = {}
    for place in np.argsort(-(spans_5P[3] + spans_5P[4]), kind="stable"):
        feature, start, end, *logits = spans_5P[:, place].tolist()
        span = int(feature), int(start), int(end)
        text = dataset.text(*span)
        if text and text not in candidates:
            candidates[text] = Candidate(text, *logits, dataset.characters(*span))
        if len(candidates) == n_best_size:
            break
    return list(candidates.values())


def with_probabilities(candidates: list[Candidate]) -> list[dict[str, Any]]:
    """`candidates` as entries of nbest_predictions.json. Probabilities are the softmax of the scores."""
    scores = np.array([candidate.score for candidate in candidates])
    weights = np.exp(scores - scores.max())
    return [
        {"text": text, "probability": probability, "start_logit": start_logit, "end_logit": end_logit}
        for (text, start_logit, end_logit, _), probability in zip(
            candidates, (weights / weights.sum()).tolist(), strict=True
        )
    ]
