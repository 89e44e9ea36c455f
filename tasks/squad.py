"""SQuAD v1.1 and v2.0 (Devlin et al., 2018, section 4.2): the span task, its scores and prediction files.

Answers are decoded from start and end logits as in Google's BERT.
Legend: T tokens of all features end to end, K candidate starts or ends of a feature, P candidate spans.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from loss import span_sum
from tasks import FineTuningTask, PredictionSet, SeparableTask
from tasks.squad_features import DEFAULTS, LABELS, SquadDataset
from tasks.squad_file import SquadOptions, read_squad
from tasks.squad_scores import check_scored, evaluate
from token_stream import MicroBatch, TokenStream
from utils.errors import UserError
from utils.files import write_json
from utils.progress import print_line

PREDICTION_FILES = ("predictions.json", "nbest_predictions.json", "null_odds.json")


@dataclass(frozen=True)
class SquadTask(SquadOptions, FineTuningTask, SeparableTask):
    """SQuAD's span task. scores: whether `predict_file` has answers to score."""

    train_file: Path | None = None
    scores: bool = False

    name = "squad"
    head = "question_answering"
    logits_axis = "token"
    metric = "f1"
    result_files = PREDICTION_FILES

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        output = model(TokenStream.from_batch(micro_batch, self.max_seq_length))
        labels = [micro_batch[name] for name in LABELS]
        return {"loss": span_sum(*output, *labels, micro_batch["cu_seqlens"], self.max_seq_length)}

    @property
    def scored_files(self) -> tuple[Path, ...]:
        return (self.predict_file,) if self.scores and self.predict_file is not None else ()

    def training_set(self, tokenizer) -> tuple["SquadTask", SquadDataset]:
        return self, SquadDataset(read_squad(self.train_file), tokenizer, self, training=True)

    def prediction_sets(self, tokenizer) -> list[PredictionSet]:
        if self.predict_file is None:
            return []
        squad = read_squad(self.predict_file)
        if self.scores:
            check_scored(squad)
            if self.version_2_with_negative and not squad.version_2:
                advice = "leave out --version-2-with-negative, or give a v2.0 file"
                raise UserError(f"{squad.path} is SQuAD v1.1, where each question has an answer: {advice}")
        dataset = SquadDataset(squad, tokenizer, self)
        return [PredictionSet(dataset, partial(self.finish, dataset), self.scores)]

    def finish(self, dataset: SquadDataset, logits_T2: np.ndarray, folder: Path | None) -> dict[str, float]:
        predictions = decode(dataset, logits_T2, self)
        if folder is not None:
            path = write_predictions(folder, predictions)
            print_line(f"answers to {len(predictions.answers)} questions in {path}")
        if not self.scores:
            return {}
        # The threshold on the null odds was applied when the answers were chosen.
        return evaluate(dataset.squad, predictions.answers, predictions.null_odds, na_prob_thresh=math.inf)


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


def decode(dataset: SquadDataset, logits_T2: np.ndarray, options: SquadOptions = DEFAULTS) -> Predictions:
    """Decodes the start and end logits [T, 2] of all features, concatenated in the data set's order.

    Candidates are pairs of the `n_best_size` best starts and ends of a window that span at most `max_answer_length`
    tokens of the context and start where the window has the maximum context. The `n_best_size` candidates with the
    highest sums of logits are kept, without duplicate texts. v2.0 adds the empty answer, whose score is the lowest sum
    at `[CLS]` over the windows. It is predicted if its score exceeds the best answer's by more than the threshold.
    """
    found = Predictions({}, {}, {} if options.version_2_with_negative else None, {})
    for index, question in enumerate(dataset.squad.questions):
        spans: list[np.ndarray] = []
        nulls: list[Candidate] = []
        for feature in range(*dataset.feature_bounds[index : index + 2]):
            logits_S2 = logits_T2[slice(*dataset.token_bounds[feature : feature + 2])]
            nulls.append(Candidate("", *logits_S2[0].tolist()))
            spans.append(feature_spans(dataset, feature, *logits_S2.T, options))
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

    def best_positions(logits: np.ndarray, first: int, stop: int) -> np.ndarray:
        """Those with the highest logits, best first; ties in order of position."""
        return first + np.argsort(-logits[first:stop], kind="stable")[: options.n_best_size]

    start_K = best_positions(start_logits, *dataset.max_context[feature])
    end_K = best_positions(end_logits, int(dataset.second_starts[feature]), int(dataset.lengths[feature]) - 1)
    length_KK = end_K[None, :] - start_K[:, None] + 1
    starts, ends = np.nonzero((length_KK >= 1) & (length_KK <= options.max_answer_length))
    start_P, end_P = start_K[starts], end_K[ends]
    return np.stack([np.full(len(start_P), feature), start_P, end_P, start_logits[start_P], end_logits[end_P]])


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
        {"text": each.text, "probability": value, "start_logit": each.start_logit, "end_logit": each.end_logit}
        for each, value in zip(candidates, (weights / weights.sum()).tolist(), strict=True)
    ]


def write_predictions(folder: Path, predictions: Predictions) -> Path:
    """Writes PREDICTION_FILES to `folder`, each atomically, and returns the first path. The last file is for v2.0 only;
    otherwise an old one is removed."""
    contents = predictions.answers, predictions.nbest, predictions.null_odds
    for name, content in zip(PREDICTION_FILES, contents, strict=True):
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            write_json(folder / name, content, indent=4)
    return folder / PREDICTION_FILES[0]
