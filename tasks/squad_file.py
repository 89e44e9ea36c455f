"""Reads SQuAD's JSON files, v1.1 and v2.0."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from utils.command_line import bounded_int, finite_float, option, positive_int
from utils.errors import UserError
from utils.files import read_json

PREDICT = ("--do-eval or --do-predict",)
V2_PREDICT = (*PREDICT, "--version-2-with-negative")
length = bounded_int(1, 2**20)


# fmt: off
@dataclass(frozen=True)
class SquadOptions:
    """How windows are made and answers are chosen."""

    max_seq_length: int = 384
    doc_stride: int = option("--doc-stride", positive_int, 128, "tokens between the starts of windows")
    max_query_length: int = option("--max-query-length", length, 64, "maximum tokens of a question")
    n_best_size: int = option("--n-best-size", length, 20, "candidate starts, ends and answers per question", PREDICT)
    max_answer_length: int = option("--max-answer-length", positive_int, 30, "maximum tokens of an answer", PREDICT)
    version_2_with_negative: bool = option("--version-2-with-negative", bool, False,
        "SQuAD v2.0: questions may have no answer")
    null_score_diff_threshold: float = option("--null-score-diff-threshold", finite_float, 0.0,
        "v2.0: predict no answer if its score exceeds the best answer's by more than this", V2_PREDICT)
# fmt: on


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
    """A SQuAD file: all contexts, and all questions in the file's order."""

    path: Path
    contexts: list[str]
    questions: list[Question]
    version_2: bool  # the questions have an `is_impossible` key


KIND_NAMES = {str: "a string", int: "a whole number", list: "a list", dict: "an object", bool: "true or false"}


def field(entry: Any, key: str, kind: type, where: str) -> Any:
    """Returns `entry[key]`. Raises UserError if it is missing or not of type `kind`. `where` names the entry."""
    if not isinstance(entry, dict):
        raise UserError(f"{where} is not a JSON object: check the file")
    if key not in entry:
        raise UserError(f"{where} has no {key!r}: is this a SQuAD file?")
    value = entry[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where}: {key!r} is not {KIND_NAMES[kind]}: check the file")
    return value


def read_squad(path: str | Path) -> Squad:
    """Reads the SQuAD file `path`. Raises UserError naming the file and the bad article, paragraph or question."""
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
    # Answers are optional for prediction; training and evaluation check for them.
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


# Google's SQuAD reader splits words at these characters; U+202F is a narrow no-break space.
WORD = re.compile("[^ \t\r\n\u202f]+")


def answer_characters(context: str, answer: Answer) -> tuple[int, int] | None:
    """The characters [start, stop) of `answer` in `context`, or None if it is not there.

    Like Google's reader, this extends the labelled characters to whole words and compares after collapsing white space,
    so a wrong offset within a word, or a double space, is accepted.
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
