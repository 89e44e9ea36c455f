"""SQuAD v1.1 and v2.0 (Devlin et al., 2018, section 4.2): the span task, its features and
prediction files.

A feature is a question with a window of its context. Answers are decoded as in Google's BERT.
Legend: F features, C tokens of a context, T tokens of all features end to end, K candidate starts
or ends of a feature, P candidate spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor, nn

from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.loss import span_sum
from bert_recipe.model.token_stream import MicroBatch, TokenStream
from bert_recipe.tasks.baselines import (
    BASELINES,
    WARNING,
    Baselines,
    chance_line,
    comparison_line,
    percent,
)
from bert_recipe.tasks.fine_tuning import FineTuningTask
from bert_recipe.tasks.mistakes import Mistake, most_confident
from bert_recipe.tasks.predicted_rows import PredictedRows, Prediction, write_predicted
from bert_recipe.tasks.splits import Split
from bert_recipe.tasks.squad.baseline import SENTENCE, sentence_f1
from bert_recipe.tasks.squad.files import Question, Squad, answer_characters, read_squad
from bert_recipe.tasks.squad.options import DOC_STRIDE, SquadOptions, SquadTaskOptions
from bert_recipe.tasks.squad.scores import check_scored, evaluate, question_scores
from bert_recipe.tasks.task import PredictionSet, SeparableTask
from bert_recipe.tasks.text_sequences import SequenceDataset, encode
from bert_recipe.utils.bad_rows import BadRows
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.json_files import JsonObject, write_json
from bert_recipe.utils.output_tables import encode_table, names_like
from bert_recipe.utils.progress import print_line, print_once
from bert_recipe.utils.tables import Row

if TYPE_CHECKING:
    from bert_recipe.tokenization.tokenizer import Tokenizer

DEFAULTS = SquadOptions()
SCORED_FILE, NO_ANSWER = "eval_predictions.jsonl", "(no answer)"
PREDICTED = "predictions"  # the table, without the extension
EMPTY = "empty answer"  # to each question
PERFECT = 100.0  # the official scores are percentages
PREDICTION_FILES = ("predictions.json", "nbest_predictions.json", "null_odds.json")


@dataclass(frozen=True)
class SquadTask(FineTuningTask, SeparableTask):
    """SQuAD's span task."""

    options: SquadTaskOptions
    max_seq_length: int = SquadOptions.max_seq_length

    name = "squad"
    head = "question_answering"
    logits_axis = "token"
    defaults_kind = counted = "questions"
    perfect_score = PERFECT
    result_files = (*PREDICTION_FILES, SCORED_FILE, *names_like(PREDICTED))

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        spans = model(TokenStream.from_batch(micro_batch, self.max_seq_length))
        loss = span_sum(
            spans.start_logits,
            spans.end_logits,
            micro_batch["start_positions"],
            micro_batch["end_positions"],
            micro_batch["cu_seqlens"],
            self.max_seq_length,
            self.options.label_smoothing,
        )
        return {"loss": loss}

    @property
    def scored_files(self) -> tuple[Path, ...]:
        path = self.options.predict_file
        return (path,) if self.options.do_eval and path is not None else ()

    @classmethod
    def learning(
        cls,
        options: SquadTaskOptions,
        tokenizer: "Tokenizer",
        start: Path | None = None,
        split: Split | None = None,
    ) -> tuple["SquadTask", "SquadDataset"]:
        bad = options.bad_rows(options.training_file)
        squad = read_squad(options.training_file, bad)
        if not any(question.answers for question in squad.questions):
            raise UserError(
                f"{squad.path}: no question has an answer to learn: give `answers` with `text` and "
                f"`answer_start`"
            )
        dataset = SquadDataset(squad, tokenizer, options, training=True, bad=bad)
        dataset.say_what_is_cut()
        return cls(options, options.max_seq_length), dataset

    @classmethod
    def fine_tuned(
        cls, options: SquadTaskOptions, max_seq_length: int, config: ModelConfig, folder: Path
    ) -> "SquadTask":
        return cls(replace(options, max_seq_length=max_seq_length), max_seq_length)

    def prediction_sets(self, tokenizer: "Tokenizer") -> list[PredictionSet]:
        options = self.options
        path, is_scored = options.predict_file, options.do_eval
        if path is None:
            return []
        bad = options.bad_rows(path, is_predicted=not is_scored)
        squad = read_squad(path, bad, keeps_empty=not is_scored)
        bad.finish()
        if is_scored:
            check_scored(squad)
            if options.version_2_with_negative and not squad.version_2:
                advice = "leave out --version-2-with-negative, or give a v2.0 file"
                raise UserError(
                    f"{squad.path} is SQuAD v1.1, where each question has an answer: {advice}"
                )
            if not options.version_2_with_negative and not all(
                question.answers for question in squad.questions
            ):
                raise UserError(
                    f"{squad.path} has questions without an answer: add --version-2-with-negative"
                )
            # Files of v2.0 without such questions have the scores of v1.1 without the flag.
            squad = replace(squad, version_2=options.version_2_with_negative)
        dataset = SquadDataset(squad, tokenizer, options, bad=bad)
        dataset.say_what_is_cut()
        return [PredictionSet(dataset, partial(self.finish, dataset), is_scored)]

    def finish(
        self, dataset: "SquadDataset", logits_T2: np.ndarray, folder: Path | None
    ) -> JsonObject:
        predictions = decode(dataset, logits_T2, self.options)
        if folder is not None:
            path = write_predictions(folder, predictions)
            print_line(f"answers to {len(predictions.answers)} questions in {path}")
        if not self.options.do_eval:
            if folder is not None:
                squad, stem = dataset.squad, folder / PREDICTED
                write_predicted(stem, squad.table(), answers_of(squad, predictions), squad.path)
            return {}
        # Those before the threshold, which is applied here: of those after it, no threshold above
        # it would be the best.
        answers = {
            question: next((entry["text"] for entry in entries if entry["text"]), "")
            for question, entries in predictions.nbest.items()
        }
        threshold = self.options.null_score_diff_threshold
        scores: JsonObject = evaluate(
            dataset.squad, answers, predictions.null_odds, na_prob_thresh=threshold
        )
        if folder is None:  # one of many evaluations
            return scores
        scores |= most_confident(write_scored(folder / SCORED_FILE, dataset.squad, predictions))
        if self.options.train_file is not None:
            scores |= self.beside_baselines(dataset, scores)
        return scores

    def beside_baselines(self, dataset: "SquadDataset", scores: JsonObject) -> JsonObject:
        """The scores of empty answers and of whole sentences, which are printed, and a warning if
        those of the trained model are no better.
        """
        total = len(dataset.squad.questions)
        baselines = {SENTENCE: {"f1": sentence_f1(dataset.squad)}}
        if num_empty := scores.get("NoAns_total", 0):
            baselines[EMPTY] = {"f1": num_empty / total}
        value = scores["f1"] / PERFECT
        print_line(comparison_line("f1", percent(value), baselines))
        best = max(baselines, key=lambda name: baselines[name]["f1"])
        beside: JsonObject = {
            BASELINES: {name: {"f1": PERFECT * row["f1"]} for name, row in baselines.items()}
        }
        warning = chance_line("f1", value, Baselines(baselines, best, total), self.advice)
        return beside if warning is None else beside | {WARNING: warning}


def window_bounds(num_tokens: int, capacity: int, doc_stride: int | None) -> list[tuple[int, int]]:
    """Windows [start, stop) of at most `capacity` tokens, `doc_stride` apart, that cover
    `num_tokens` tokens. Raises UserError if tokens between windows would be left out.
    """
    if num_tokens <= capacity:
        return [(0, num_tokens)]
    step = min(capacity, DOC_STRIDE) if doc_stride is None else doc_stride
    if step > capacity:
        raise UserError(
            f"--doc-stride {step} is above the {capacity} tokens of a window that "
            f"--max-seq-length leaves beside a question: give at most {capacity}, or leave it out"
        )
    count = 1 + -(-(num_tokens - capacity) // step)
    return [(start, min(start + capacity, num_tokens)) for start in range(0, count * step, step)]


def max_context_bounds(windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each window, the tokens [first, last) of which it has the maximum context. These
    partition the context.

    A token's score in a window is min(tokens to its left, tokens to its right) + 0.01 * window
    length; ties go to the first window (Google's `_check_is_max_context`). The tokens of each
    window are contiguous.
    """
    if len(windows) == 1:
        return list(windows)
    best_C = np.full(windows[-1][1], -1.0)
    owner_C = np.zeros(windows[-1][1], np.int64)
    for index, (start, stop) in enumerate(windows):
        offset = np.arange(stop - start)
        score = np.minimum(offset, offset[::-1]) + 0.01 * (stop - start)
        is_better = score > best_C[start:stop]
        best_C[start:stop][is_better] = score[is_better]
        owner_C[start:stop][is_better] = index
    firsts = np.searchsorted(owner_C, np.arange(len(windows) + 1))
    return list(zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True))


class Feature(NamedTuple):
    """A question with a window of its context; positions are in the sequence.

    first, last: of the tokens [first, last) for which the window has the most context.
    start_position, end_position: of the answer, 0 if it is not in the window.
    """

    question: int
    window_start: int
    first: int
    last: int
    start_position: int
    end_position: int


def window_features(
    question: int,
    windows: Sequence[tuple[int, int]],
    window_position: int,
    answer: tuple[int, int] | None,
) -> list[Feature]:
    """The features of a question.

    window_position: where a window begins in its sequence.
    answer: its first and last token in the context, or None.
    """
    features = []
    for (start, stop), (first, last) in zip(windows, max_context_bounds(windows), strict=True):
        to_position = window_position - start
        answer_positions = (0, 0)
        if answer is not None and start <= answer[0] and answer[1] < stop:
            answer_positions = (answer[0] + to_position, answer[1] + to_position)
        bounds = (first + to_position, last + to_position)
        features.append(Feature(question, start, *bounds, *answer_positions))
    return features


class SquadDataset(SequenceDataset):
    """All questions with all windows of their contexts, as `[CLS] question [SEP] window [SEP]`,
    without padding.

    Contexts and questions are tokenized once. Features are rows of flat arrays: `lengths` [F]
    tokens of the feature; `question_index` [F]; `window_starts` [F] the window's first token in its
    context; `max_context` [F, 2] positions [first, last) for which this window has the most
    context; for training `start_positions` and `end_positions` [F], 0 (`[CLS]`) where the answer is
    not completely in the window or there is none. The features of question q are
    [feature_bounds[q], feature_bounds[q + 1]).

    Training uses the first answer of each question. Raises UserError for a question without an
    answer (unless `options.version_2_with_negative`), and for an answer that is not in its context,
    unless these are left out (`options.skip_bad`). bad: where these are added to; may have what
    read_squad has found.
    """

    def __init__(
        self,
        squad: Squad,
        tokenizer: "Tokenizer",
        options: SquadOptions = DEFAULTS,
        training: bool = False,
        bad: BadRows | None = None,
    ):
        layout = tokenizer.layout(2)
        special, self.num_after = layout.num_special, layout.num_after
        if options.max_seq_length <= options.query_length + special:
            room = f"--max-seq-length {options.max_seq_length} leaves no room beside a question of"
            raise UserError(
                f"{room} --max-query-length {options.query_length} tokens: change one of them"
            )
        self.squad = squad
        question_ids, _ = encode(
            tokenizer, [question.text for question in squad.questions], "questions"
        )
        self.max_query_length = options.query_length
        self.num_cut = sum(len(ids) > options.query_length for ids in question_ids)
        context_ids, self.context_characters = encode(tokenizer, squad.contexts, "contexts")
        texts: list[tuple[np.ndarray, np.ndarray]] = []
        features: list[Feature] = []
        self.feature_bounds = np.zeros(len(squad.questions) + 1, np.int64)
        bad = options.bad_rows(squad.path) if bad is None else bad
        for index, question in enumerate(squad.questions):
            self.feature_bounds[index + 1] = len(features)  # of a bad question
            query = question_ids[index][: options.query_length]
            context = context_ids[question.context]
            try:
                answer = self.answer_tokens(question, options) if training else None
            except ValueError as error:
                bad.add(f"{squad.path}: question {question.id}", str(error))
                continue
            capacity = options.max_seq_length - len(query) - special
            windows = window_bounds(len(context), capacity, options.doc_stride)
            texts += [(query, context[start:stop]) for start, stop in windows]
            features += window_features(index, windows, len(query) + layout.num_before(1), answer)
            self.feature_bounds[index + 1] = len(features)
        bad.finish(num_kept=len(features))
        if not features:
            raise UserError(f"SQuAD file {squad.path} has no good question: check the file")
        # The columns are the fields of Feature.
        features_F6 = np.array(features, np.int64)
        self.question_index, self.window_starts, *_ = features_F6.T
        self.max_context = features_F6[:, 2:4]
        self.start_positions, self.end_positions = features_F6[:, 4:].T
        labels = {}
        if training:
            labels = {"start_positions": self.start_positions, "end_positions": self.end_positions}
        super().__init__(tokenizer, texts, labels)

    def say_what_is_cut(self) -> None:
        """Says how many questions the model does not see wholly."""
        if self.num_cut:
            print_once(
                f"note: {self.squad.path}: {self.num_cut} questions are longer than "
                f"{self.max_query_length} tokens, and are cut: --max-query-length changes that"
            )

    @property
    def num_examples(self) -> int:
        return len(self.squad.questions)

    def answer_tokens(self, question: Question, options: SquadOptions) -> tuple[int, int] | None:
        """First and last token, in the context, of the question's first answer; None if there is no
        answer. Raises ValueError if it cannot be trained on.
        """
        context = self.squad.contexts[question.context]
        if not question.answers:
            if options.version_2_with_negative:
                return None
            raise ValueError(
                "it has no answer to train on: add --version-2-with-negative for SQuAD v2.0"
            )
        answer = question.answers[0]
        if answer.answer_start is None:
            raise ValueError(f"its answer {answer.text!r} has no answer_start: add that to train")
        if (characters := answer_characters(context, answer)) is None:
            raise ValueError(
                f"its answer {answer.text!r} is not in its context at character "
                f"{answer.answer_start}: correct answer_start or remove the question"
            )
        starts_C, stops_C = self.context_characters[question.context].T
        first = int(np.searchsorted(stops_C, characters[0], side="right"))
        last = int(np.searchsorted(starts_C, characters[1], side="left")) - 1
        if first > last:
            raise ValueError(f"its answer {answer.text!r} has no token: remove the question")
        return first, last

    def span_text(self, feature: int, start: int, end: int) -> str:
        """The text of a feature's positions `start` to `end` (inclusive), stripped."""
        context = self.squad.questions[self.question_index[feature]].context
        to_token = int(self.window_starts[feature] - self.second_starts[feature])
        first = self.context_characters[context][start + to_token, 0]
        stop = self.context_characters[context][end + to_token, 1]
        return self.squad.contexts[context][first:stop].strip()


@dataclass(frozen=True)
class Predictions:
    """By question id: the answer (empty for none), the n best candidates with probabilities, for
    v2.0 the null score minus the best answer's score.
    """

    answers: dict[str, str]
    nbest: dict[str, list[JsonObject]]
    null_odds: dict[str, float] | None


class Candidate(NamedTuple):
    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


def decode(
    dataset: SquadDataset, logits_T2: np.ndarray, options: SquadOptions = DEFAULTS
) -> Predictions:
    """Decodes the start and end logits [T, 2] of all features, concatenated in the data set's
    order.

    Candidates are pairs of the `n_best_size` best starts and ends of a window that span at most
    `max_answer_length` tokens of the context and start where the window has the maximum context.
    The `n_best_size` candidates with the highest sums of logits are kept, without duplicate texts.
    v2.0 adds the empty answer, whose score is the lowest sum at `[CLS]` over the windows. It is
    predicted if its score exceeds the best answer's by more than the threshold.
    """
    answers: dict[str, str] = {}
    nbest: dict[str, list[JsonObject]] = {}
    null_odds: dict[str, float] = {}
    for index, question in enumerate(dataset.squad.questions):
        spans: list[np.ndarray] = []
        nulls: list[Candidate] = []
        first, stop = dataset.feature_bounds[index : index + 2].tolist()
        for feature in range(first, stop):
            first_token, stop_token = dataset.token_bounds[feature : feature + 2]
            start_logits, end_logits = logits_T2[first_token:stop_token].T
            nulls.append(Candidate("", float(start_logits[0]), float(end_logits[0])))
            spans.append(feature_spans(dataset, feature, start_logits, end_logits, options))
        candidates = distinct_texts(dataset, np.concatenate(spans, axis=1), options.n_best_size)
        best = candidates[0] if candidates else None
        if options.version_2_with_negative:
            null = min(nulls, key=lambda candidate: candidate.score)
            null_odds[question.id] = null.score - (best.score if best else 0.0)
            if null_odds[question.id] > options.null_score_diff_threshold:
                best = None
            candidates = sorted([*candidates, null], key=lambda candidate: -candidate.score)
        answers[question.id] = best.text if best else ""
        nbest[question.id] = with_probabilities(candidates or [Candidate("", 0.0, 0.0)])
    return Predictions(answers, nbest, null_odds if options.version_2_with_negative else None)


def answers_of(squad: Squad, predictions: Predictions) -> list[Prediction]:
    """The answer to each question, empty for none, and its probability."""
    results = []
    for question in squad.questions:
        answer = predictions.answers[question.id]
        best = [(entry["probability"], entry["text"]) for entry in predictions.nbest[question.id]]
        probability = next(share for share, text in best if text == answer)
        results.append(Prediction({"answer": answer, "probability": probability}, [best]))
    return results


def questions_to_predict(
    tokenizer: "Tokenizer", rows: Sequence[Row], options: SquadOptions
) -> PredictedRows:
    """rows: with `question` and `context`."""
    questions = [Question(str(i), row["question"], i, ()) for i, row in enumerate(rows)]
    contexts = [row["context"] for row in rows]
    squad = Squad(Path(), contexts, questions, options.version_2_with_negative)
    dataset = SquadDataset(squad, tokenizer, options)

    def predict(logits_T2: np.ndarray) -> list[Prediction]:
        return answers_of(squad, decode(dataset, logits_T2, options))

    return PredictedRows(dataset, predict)


def feature_spans(
    dataset: SquadDataset,
    feature: int,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    options: SquadOptions,
) -> np.ndarray:
    """The candidate spans of one window: feature, start, end, start logit and end logit, [5, P]
    float64.
    """

    def best_positions(logits: np.ndarray, first: int, stop: int) -> np.ndarray:
        """Those with the highest logits, best first; ties in order of position."""
        return first + np.argsort(-logits[first:stop], kind="stable")[: options.n_best_size]

    start_K = best_positions(start_logits, *dataset.max_context[feature])
    end_K = best_positions(
        end_logits,
        int(dataset.second_starts[feature]),
        int(dataset.lengths[feature]) - dataset.num_after,
    )
    length_KK = end_K[None, :] - start_K[:, None] + 1
    starts, ends = np.nonzero((length_KK >= 1) & (length_KK <= options.max_answer_length))
    start_P, end_P = start_K[starts], end_K[ends]
    return np.stack(
        [np.full(len(start_P), feature), start_P, end_P, start_logits[start_P], end_logits[end_P]]
    )


def distinct_texts(
    dataset: SquadDataset, spans_5P: np.ndarray, n_best_size: int
) -> list[Candidate]:
    """The texts of the `n_best_size` best spans, best first; each text appears once, with its best
    span.
    """
    candidates: dict[str, Candidate] = {}
    for place in np.argsort(-(spans_5P[3] + spans_5P[4]), kind="stable"):
        feature, start, end, *logits = spans_5P[:, place].tolist()
        text = dataset.span_text(int(feature), int(start), int(end))
        if text and text not in candidates:
            candidates[text] = Candidate(text, *logits)
        if len(candidates) == n_best_size:
            break
    return list(candidates.values())


def with_probabilities(candidates: list[Candidate]) -> list[JsonObject]:
    """`candidates` as entries of nbest_predictions.json. Probabilities are the softmax of the
    scores.
    """
    scores = np.array([candidate.score for candidate in candidates])
    weights = np.exp(scores - scores.max())
    return [
        {
            "text": candidate.text,
            "probability": value,
            "start_logit": candidate.start_logit,
            "end_logit": candidate.end_logit,
        }
        for candidate, value in zip(candidates, (weights / weights.sum()).tolist(), strict=True)
    ]


def write_scored(path: Path, squad: Squad, predictions: Predictions) -> list[Mistake]:
    """Writes each question with its answers, the predicted one and its scores; returns the answers
    without a word in common with the true ones.
    """
    by_question = question_scores(squad, predictions.answers)
    rows: list[Row] = []
    mistakes = []
    for question, prediction in zip(squad.questions, answers_of(squad, predictions), strict=True):
        answer, probability = prediction.columns["answer"], prediction.columns["probability"]
        answers = list(dict.fromkeys(truth.text for truth in question.answers))
        scores = {name: values[question.id] for name, values in by_question.items()}
        row: Row = {"id": question.id, "question": question.text, "answers": answers}
        row |= {"prediction": answer, "probability": probability, **scores}
        rows.append(row | {"context": squad.contexts[question.context]})
        if not scores["f1"]:
            truth = " | ".join(answers) or NO_ANSWER
            mistakes.append(Mistake(question.text, truth, answer or NO_ANSWER, probability))
    write_atomically(path, encode_table(path, rows))
    return mistakes


def write_predictions(folder: Path, predictions: Predictions) -> Path:
    """Writes PREDICTION_FILES to `folder` and returns the first path. Without v2.0 an old last file
    is removed.
    """
    contents = predictions.answers, predictions.nbest, predictions.null_odds
    for name, content in zip(PREDICTION_FILES, contents, strict=True):
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            write_json(folder / name, content, indent=4)
    return folder / PREDICTION_FILES[0]
