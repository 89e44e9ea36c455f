"""SQuAD's features: each question over each window of its context (Devlin et al., 2018, section 4.2).

Legend: F features, C tokens of a context.
"""

from collections.abc import Sequence

import numpy as np

from tasks.squad_file import Question, Squad, SquadOptions, answer_characters
from tasks.text_sequences import SequenceDataset, encode
from utils.errors import UserError

LABELS = ("start_positions", "end_positions")
DEFAULTS = SquadOptions()


def window_bounds(num_tokens: int, capacity: int, doc_stride: int) -> list[tuple[int, int]]:
    """Windows [start, stop) of at most `capacity` tokens, `doc_stride` apart, that cover `num_tokens` tokens."""
    step = min(capacity, doc_stride)
    count = 1 + -(-max(num_tokens - capacity, 0) // step)
    return [(start, min(start + capacity, num_tokens)) for start in range(0, count * step, step)]


def max_context_bounds(windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each window, the tokens [first, last) for which this window has the maximum context.

    A token's score in a window is min(tokens to its left, tokens to its right) + 0.01 * window length; ties go to the
    first window (Google's `_check_is_max_context`). The tokens of each window are contiguous, and the ranges partition
    the context.
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


class SquadDataset(SequenceDataset):
    """All questions with all windows of their contexts, as `[CLS] question [SEP] window [SEP]`, without padding.

    Contexts and questions are tokenized once. Features are rows of flat arrays: `lengths` [F] tokens of the feature;
    `question_index` [F]; `window_starts` [F] the window's first token in its context; `max_context` [F, 2] positions
    [first, last) for which this window has the most context; for training `start_positions` and `end_positions` [F], 0
    (`[CLS]`) where the answer is not completely in the window or there is none. The features of question q are
    [feature_bounds[q], feature_bounds[q + 1]).

    Training uses the first answer of each question. Raises UserError for a question without an answer (unless
    `options.version_2_with_negative`), and for an answer that is not in its context.
    """

    def __init__(self, squad: Squad, tokenizer, options: SquadOptions = DEFAULTS, training: bool = False):
        special = 2 + tokenizer.num_pair_separators
        if options.max_seq_length <= options.max_query_length + special:
            raise UserError(
                f"--max-seq-length {options.max_seq_length} leaves no room beside a question of --max-query-length "
                f"{options.max_query_length} tokens: raise the first or lower the second"
            )
        self.squad = squad
        question_ids, _ = encode(tokenizer, [question.text for question in squad.questions], "questions")
        context_ids, self.context_characters = encode(tokenizer, squad.contexts, "contexts")
        texts: list[tuple[np.ndarray, np.ndarray]] = []
        rows: list[tuple[int, ...]] = []
        self.feature_bounds = np.zeros(len(squad.questions) + 1, np.int64)
        for index, question in enumerate(squad.questions):
            query = question_ids[index][: options.max_query_length]
            context = context_ids[question.context]
            answer = self.answer_tokens(question, options) if training else None
            windows = window_bounds(len(context), options.max_seq_length - len(query) - special, options.doc_stride)
            for (start, stop), (first, last) in zip(windows, max_context_bounds(windows), strict=True):
                to_position = len(query) + special - 1 - start
                inside = answer is not None and start <= answer[0] and answer[1] < stop
                answer_positions = [token + to_position for token in answer] if inside else [0, 0]
                texts.append((query, context[start:stop]))
                rows.append((index, start, first + to_position, last + to_position, *answer_positions))
            self.feature_bounds[index + 1] = len(rows)

        table = np.array(rows, np.int64)
        self.question_index, self.window_starts = table[:, :2].T
        self.max_context = table[:, 2:4]
        self.start_positions, self.end_positions = table[:, 4:].T
        super().__init__(tokenizer, texts, {name: getattr(self, name) for name in LABELS} if training else {})

    @property
    def num_examples(self) -> int:
        return len(self.squad.questions)

    def answer_tokens(self, question: Question, options: SquadOptions) -> tuple[int, int] | None:
        """First and last token, in the context, of the question's first answer; None if there is no answer."""
        where, context = f"{self.squad.path}: question {question.id}", self.squad.contexts[question.context]
        if not question.answers:
            if options.version_2_with_negative:
                return None
            raise UserError(f"{where} has no answer to train on: add --version-2-with-negative for SQuAD v2.0")
        answer = question.answers[0]
        if (characters := answer_characters(context, answer)) is None:
            place = f"its answer {answer.text!r} is not in its context at character {answer.answer_start}"
            raise UserError(f"{where}: {place}: correct answer_start or remove the question")
        starts_C, stops_C = self.context_characters[question.context].T
        first = int(np.searchsorted(stops_C, characters[0], side="right"))
        last = int(np.searchsorted(starts_C, characters[1], side="left")) - 1
        if first > last:
            raise UserError(f"{where}: its answer {answer.text!r} has no token: remove the question")
        return first, last

    def text(self, feature: int, start: int, end: int) -> str:
        """The original text of the positions `start` to `end` (inclusive) of a feature's sequence."""
        first, stop = self.characters(feature, start, end)
        return self.squad.contexts[self.squad.questions[self.question_index[feature]].context][first:stop]

    def characters(self, feature: int, start: int, end: int) -> tuple[int, int]:
        """The characters [start, stop) of that text in its context, without white space at its ends."""
        context = self.squad.questions[self.question_index[feature]].context
        to_token = int(self.window_starts[feature] - self.second_starts[feature])
        first = int(self.context_characters[context][start + to_token, 0])
        text = self.squad.contexts[context][first : self.context_characters[context][end + to_token, 1]]
        first += len(text) - len(text.lstrip())
        return first, first + len(text.strip())
