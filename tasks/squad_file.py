"""Reads SQuAD's JSON files, v1.1 and v2.0."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tasks.reading import SkipOptions
from utils.command_line import bounded_int, finite_float, option, optional_path, positive_int
from utils.errors import UserError
from utils.files import from_json, read_json
from utils.progress import print_line

PREDICT = ("--do-eval or --do-predict",)
V2_PREDICT = (*PREDICT, "--version-2-with-negative")
length = bounded_int(1, 2**20)


@dataclass(frozen=True)
class SquadOptions(SkipOptions):
    """How windows are made and answers are chosen."""

    max_seq_length: int = 384
    predict_file: Path | None = option(
        "--predict-file --eval-file --validation-file --test-file",
        optional_path,
        None,
        "file to predict, and with --do-eval to score",
        PREDICT,
    )
    doc_stride: int = option(
        "--doc-stride", positive_int, 128, "tokens between the starts of windows"
    )
    max_query_length: int = option("--max-query-length", length, 64, "maximum tokens of a question")
    n_best_size: int = option(
        "--n-best-size", length, 20, "candidate starts, ends and answers per question", PREDICT
    )
    max_answer_length: int = option(
        "--max-answer-length", positive_int, 30, "maximum tokens of an answer", PREDICT
    )
    version_2_with_negative: bool = option(
        "--version-2-with-negative", bool, False, "SQuAD v2.0: questions may have no answer"
    )
    null_score_diff_threshold: float = option(
        "--null-score-diff-threshold",
        finite_float,
        0.0,
        "v2.0: predict no answer if its score exceeds the best answer's by more than this",
        V2_PREDICT,
    )


@dataclass(frozen=True)
class Answer:
    text: str
    answer_start: int  # in characters of the context


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


@dataclass(frozen=True)
class QuestionEntry:
    """A question as it is in the file."""

    id: str
    question: str
    answers: list[Answer] = field(default_factory=list)  # training and evaluation check for them
    is_impossible: bool | None = None


PARAGRAPH = {"context": str, "qas": list[QuestionEntry]}
ARTICLE = {"paragraphs": list[PARAGRAPH]}
DOCUMENT = {"data": list[ARTICLE]}


def read_squad(path: str | Path) -> Squad:
    """Reads the SQuAD file `path`. Raises UserError naming the file and the bad place in it."""
    path = Path(path)
    raw = read_json(path, "SQuAD file")
    changes = normalize(raw)
    if changes:
        found = ", ".join(f"{count} {what}" for what, count in changes.items())
        print_line(f"note: {path}: {found}")
    document = from_json(DOCUMENT, raw, f"SQuAD file {path}")
    paragraphs = [paragraph for article in document["data"] for paragraph in article["paragraphs"]]
    questions: dict[str, Question] = {}
    version_2 = False
    for index, paragraph in enumerate(paragraphs):
        for entry in paragraph["qas"]:
            if entry.id in questions:
                raise UserError(f"{path}: question {entry.id} is there twice: remove one")
            answers = () if entry.is_impossible else tuple(entry.answers)
            questions[entry.id] = Question(entry.id, entry.question, index, answers)
            version_2 |= entry.is_impossible is not None
    if not questions:
        raise UserError(f"SQuAD file {path} has no questions: check the file")
    return Squad(
        path,
        [paragraph["context"] for paragraph in paragraphs],
        list(questions.values()),
        version_2,
    )


def normalize(document: dict[str, Any]) -> Counter[str]:
    """Changes what annotation tools write in another way: numbers as ids, null for no answers or
    questions, empty answers. Returns what was left out, with counts.
    """
    changes: Counter[str] = Counter()
    articles = document.get("data")
    for article in articles if isinstance(articles, list) else []:
        paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
        for paragraph in paragraphs if isinstance(paragraphs, list) else []:
            if not isinstance(paragraph, dict):
                continue
            if not paragraph.get("qas"):
                paragraph["qas"] = []
                paragraph["context"] = paragraph.get("context") or ""
                changes["paragraphs without questions are left out"] += 1
            for entry in paragraph["qas"] if isinstance(paragraph["qas"], list) else []:
                if isinstance(entry, dict):
                    normalize_question(entry, changes)
    return changes


def normalize_question(entry: dict[str, Any], changes: Counter[str]) -> None:
    if type(entry.get("id")) is int:
        entry["id"] = str(entry["id"])
    if entry.get("answers", ()) is None:
        entry["answers"] = []
    answers = entry.get("answers")
    if isinstance(answers, list):
        kept = [each for each in answers if not (isinstance(each, dict) and each.get("text") == "")]
        if len(kept) < len(answers):
            changes["empty answers count as no answer"] += len(answers) - len(kept)
            entry["answers"] = kept


# Google's SQuAD reader splits words at these characters; U+202F is a narrow no-break space.
WORD = re.compile("[^ \t\r\n\u202f]+")


def answer_characters(context: str, answer: Answer) -> tuple[int, int] | None:
    """The characters [start, stop) of `answer` in `context`, or None if it is not there.

    Like Google's reader, this extends the labelled characters to whole words and compares after
    collapsing white space, so a wrong offset within a word, or a double space, is accepted.
    """
    start, stop = answer.answer_start, answer.answer_start + len(answer.text)
    if start >= 0 and answer.text.strip() and context[start:stop] == answer.text:
        return start, stop
    words = [word.span() for word in WORD.finditer(context)]
    touched = [(first, last) for first, last in words if first < stop and last > start]
    answer_words = WORD.findall(answer.text)
    if not touched or not answer_words:
        return None
    pattern = re.compile("[ \t\r\n\u202f]+".join(map(re.escape, answer_words)))
    match = pattern.search(context, touched[0][0], touched[-1][1])
    return match.span() if match else None
