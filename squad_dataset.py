"""SQuAD v1.1 and v2.0: the JSON read strictly, and each question laid over its context in windows of tokens.

Shape legend: F features (one question over one window of its context), C tokens of a context, N sequences of a
stream, T tokens of a stream.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.errors import UserError
from utils.files import read_json
from utils.progress import progress_bar

TEXTS_AT_A_TIME = 4096  # between two looks at the progress bar


class Answer(NamedTuple):
    text: str
    start: int  # in characters of the context


class Question(NamedTuple):
    id: str
    text: str
    context: int  # index into Squad.contexts
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Squad:
    """A SQuAD file: every context once, every question in the file's order."""

    path: Path
    contexts: list[str]
    questions: list[Question]
    version_2: bool  # the questions say whether they are impossible


KIND_NAMES = {str: "a text", int: "a whole number", list: "a list", dict: "an object", bool: "true or false"}


def field(entry: Any, key: str, kind: type, where: str) -> Any:
    """`entry[key]`, which has to be there and of type `kind`; `where` names the entry in the error."""
    if not isinstance(entry, dict):
        raise UserError(f"{where} is not a JSON object: check the file")
    if key not in entry:
        raise UserError(f"{where} has no {key!r}: is this a SQuAD file?")
    value = entry[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where}: {key!r} is not {KIND_NAMES[kind]}: check the file")
    return value


def read_squad(path: str | Path) -> Squad:
    """The SQuAD file `path`; raises `UserError` naming the file and the article, paragraph or question at fault."""
    path = Path(path)
    contexts: list[str] = []
    questions: list[Question] = []
    seen: set[str] = set()
    version_2 = False
    for a, article in enumerate(field(read_json(path, "SQuAD file"), "data", list, f"SQuAD file {path}")):
        for p, paragraph in enumerate(field(article, "paragraphs", list, f"{path}: article {a + 1}")):
            where = f"{path}: article {a + 1}, paragraph {p + 1}"
            contexts.append(field(paragraph, "context", str, where))
            for entry in field(paragraph, "qas", list, where):
                question = read_question(entry, len(contexts) - 1, where, path)
                if question.id in seen:
                    raise UserError(f"{path}: question {question.id} is there twice: remove one")
                seen.add(question.id)
                questions.append(question)
                version_2 |= "is_impossible" in entry
    if not questions:
        raise UserError(f"SQuAD file {path} has no questions: check the file")
    return Squad(path, contexts, questions, version_2)


def read_question(entry: Any, context: int, where: str, path: Path) -> Question:
    question_id = field(entry, "id", str, f"{where}: a question")
    where = f"{path}: question {question_id}"
    text = field(entry, "question", str, where)
    # A file to predict for may come without answers; training and evaluation look for them.
    answers = field(entry, "answers", list, where) if "answers" in entry else []
    if "is_impossible" in entry and field(entry, "is_impossible", bool, where):
        answers = []
    return Question(
        question_id,
        text,
        context,
        tuple(
            Answer(field(answer, "text", str, where), field(answer, "answer_start", int, where)) for answer in answers
        ),
    )


# What separates words in Google's reader of SQuAD; U+202F is a narrow no-break space.
WORD = re.compile("[^ \t\r\n\u202f]+")


def answer_characters(context: str, answer: Answer) -> tuple[int, int] | None:
    """First character and one past the last of `answer` in `context`, or None where it is not there.

    Google's reader takes the whole words that the labelled characters touch, and accepts an answer that these
    contain when each run of white space counts as one space; so an offset that is off inside a word, and a doubled
    space, do no harm.
    """
    stop = answer.start + len(answer.text)
    if answer.start >= 0 and answer.text.strip() and context[answer.start : stop] == answer.text:
        return answer.start, stop
    words = [word.span() for word in WORD.finditer(context)]
    touched = [(first, last) for first, last in words if first < stop and last > answer.start]
    answer_words = WORD.findall(answer.text)
    if not touched or not answer_words:
        return None
    pattern = re.compile("[ \t\r\n\u202f]+".join(map(re.escape, answer_words)))
    match = pattern.search(context, touched[0][0], touched[-1][1])
    return match.span() if match else None


def window_bounds(num_tokens: int, capacity: int, doc_stride: int) -> list[tuple[int, int]]:
    """Windows [start, stop) of at most `capacity` tokens, `doc_stride` apart, that cover `num_tokens` tokens."""
    start = 0
    windows = []
    while True:
        stop = min(start + capacity, num_tokens)
        windows.append((start, stop))
        if stop == num_tokens:
            return windows
        start += min(capacity, doc_stride)


def max_context_bounds(windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each window the tokens [first, last) that no other window shows with more context.

    A token's score in a window is min(tokens to its left, tokens to its right) + 0.01 * window length, and the first
    of equal windows has it (Google's `_check_is_max_context`). Scores rise and fall by one a token and a later
    window peaks later, so each window's tokens are one run, and the runs cut the context into parts.
    """
    if len(windows) == 1:
        return list(windows)
    token_C = np.arange(windows[-1][1])
    best_C = np.full(len(token_C), -1.0)
    owner_C = np.zeros(len(token_C), np.int64)
    for index, (start, stop) in enumerate(windows):
        score_C = np.minimum(token_C - start, stop - 1 - token_C) + 0.01 * (stop - start)
        better_C = (token_C >= start) & (token_C < stop) & (score_C > best_C)
        best_C[better_C] = score_C[better_C]
        owner_C[better_C] = index
    firsts = np.searchsorted(owner_C, np.arange(len(windows) + 1))
    return list(zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True))


class SquadDataset:
    """Every question over every window of its context, as `[CLS] question [SEP] window [SEP]`, without padding.

    A context and a question are tokenized once; features are rows of flat arrays:
    `lengths` [F] tokens of each feature; `query_lengths` [F] tokens of its question; `question_index` [F];
    `window_starts` [F] the window's first token in its context; `max_context` [F, 2] the positions [first, last) in
    the sequence whose token no other window shows with more context; for training `start_positions` and
    `end_positions` [F], positions in the sequence, 0 (`[CLS]`) where the answer is not wholly in the window or
    there is none. `feature_bounds` [questions + 1] says which features are a question's.

    `tokenizer` is a `BertTokenizer`. Training takes a question's first answer, and raises `UserError` for a question
    that has none (unless `version_2_with_negative`) or whose answer is not in its context.
    """

    def __init__(
        self,
        squad: Squad,
        tokenizer,
        *,
        max_seq_length: int = 384,
        doc_stride: int = 128,
        max_query_length: int = 64,
        training: bool = False,
        version_2_with_negative: bool = False,
    ):
        if max_seq_length < max_query_length + 4:
            raise UserError(
                f"--max-seq-length {max_seq_length} leaves no room for the context beside a question of "
                f"--max-query-length {max_query_length} tokens: raise the first or lower the second"
            )
        self.squad = squad
        self.training = training
        question_ids, _ = encode(tokenizer, [question.text for question in squad.questions], "questions")
        context_ids, self.context_characters = encode(tokenizer, squad.contexts, "contexts")
        cls, sep = np.array([tokenizer.cls_token_id]), np.array([tokenizer.sep_token_id])

        pieces: list[np.ndarray] = []
        rows: list[tuple[int, ...]] = []
        self.feature_bounds = np.zeros(len(squad.questions) + 1, np.int64)
        for index, question in enumerate(squad.questions):
            query = question_ids[index][:max_query_length]
            context = context_ids[question.context]
            answer = self.answer_tokens(question, version_2_with_negative) if training else None
            windows = window_bounds(len(context), max_seq_length - len(query) - 3, doc_stride)
            for (start, stop), (first, last) in zip(windows, max_context_bounds(windows), strict=True):
                to_position = len(query) + 2 - start
                inside = answer is not None and start <= answer[0] and answer[1] < stop
                answer_positions = [token + to_position for token in answer] if inside else [0, 0]
                pieces += [cls, query, sep, context[start:stop], sep]
                rows.append((index, len(query), start, first + to_position, last + to_position, *answer_positions))
            self.feature_bounds[index + 1] = len(rows)

        table = np.array(rows, np.int64)
        self.question_index, self.query_lengths, self.window_starts = table[:, :3].T
        self.max_context = table[:, 3:5]
        self.start_positions, self.end_positions = table[:, 5:].T
        self.lengths = np.array([len(piece) for piece in pieces]).reshape(-1, 5).sum(axis=1)
        self.token_bounds = np.concatenate([[0], np.cumsum(self.lengths)])
        self.input_ids = np.concatenate(pieces).astype(np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def answer_tokens(self, question: Question, version_2_with_negative: bool) -> tuple[int, int] | None:
        """First and last token, in its context, of the question's first answer; None where it has none."""
        where = f"{self.squad.path}: question {question.id}"
        if not question.answers:
            if version_2_with_negative:
                return None
            raise UserError(f"{where} has no answer to train on: add --version-2-with-negative for SQuAD v2.0")
        answer = question.answers[0]
        characters = answer_characters(self.squad.contexts[question.context], answer)
        if characters is None:
            raise UserError(
                f"{where}: its answer {answer.text!r} is not in its context at character {answer.start}: "
                "correct answer_start or remove the question"
            )
        starts_C, stops_C = self.context_characters[question.context].T
        first = int(np.searchsorted(stops_C, characters[0], side="right"))
        last = int(np.searchsorted(starts_C, characters[1], side="left")) - 1
        if first > last:
            raise UserError(f"{where}: its answer {answer.text!r} has no token: remove the question")
        return first, last

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """Tokens and masked tokens (none) of the features `indices` [N, 2]."""
        return np.stack([self.lengths[indices], np.zeros(len(indices), np.int64)], axis=1)

    def stream(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The features `indices` [N] end to end: `input_ids`, `token_type_ids`, `position_ids` [T] int64, `cu_seqlens`
        [N+1] int32; for training `start_positions` and `end_positions` [N] int64."""
        length_N = self.lengths[indices]
        cu_seqlens = np.concatenate([[0], np.cumsum(length_N)])
        position_T = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], length_N)
        stream = {
            "input_ids": self.input_ids[self.token_places(indices)].astype(np.int64),
            "token_type_ids": (position_T >= np.repeat(self.query_lengths[indices] + 2, length_N)).astype(np.int64),
            "position_ids": position_T,
            "cu_seqlens": cu_seqlens.astype(np.int32),
        }
        if self.training:
            stream["start_positions"] = self.start_positions[indices]
            stream["end_positions"] = self.end_positions[indices]
        return stream

    def token_places(self, indices: np.ndarray) -> np.ndarray:
        """Where the tokens of `stream(indices)` are among the tokens of all features [T]."""
        length_N = self.lengths[indices]
        cu_seqlens = np.concatenate([[0], np.cumsum(length_N)])
        return np.arange(cu_seqlens[-1]) + np.repeat(self.token_bounds[indices] - cu_seqlens[:-1], length_N)

    def text(self, feature: int, start: int, end: int) -> str:
        """The context's own text from position `start` to `end`, both included, of the sequence `feature`."""
        context = self.squad.questions[self.question_index[feature]].context
        to_token = int(self.window_starts[feature] - self.query_lengths[feature] - 2)
        character_C2 = self.context_characters[context]
        return self.squad.contexts[context][character_C2[start + to_token, 0] : character_C2[end + to_token, 1]]


def encode(tokenizer, texts: Sequence[str], what: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each text's token ids [C] and the characters [C, 2] (start, stop) that each token stands for."""
    ids: list[np.ndarray] = []
    characters: list[np.ndarray] = []
    with progress_bar(len(texts), f"tokenizing {what}", "text") as bar:
        for first in range(0, len(texts), TEXTS_AT_A_TIME):
            id_T, character_T2, bounds = tokenizer.encode_batch_with_offsets(texts[first : first + TEXTS_AT_A_TIME])
            ids += np.split(id_T, bounds[1:-1])
            characters += np.split(character_T2, bounds[1:-1])
            bar.update(len(ids) - bar.n)
    return ids, characters
