"""Reads SQuAD's JSON files, v1.1 and v2.0."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bert_recipe.utils.bad_rows import BadRows
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject, from_json, parse_json, read_json
from bert_recipe.utils.known_tools import DATA, refuse_known
from bert_recipe.utils.tables import Row, absent_column, read_rows
from bert_recipe.utils.text_files import TABLES, TextFile, table_parts
from bert_recipe.utils.words import from_utf16, spaced_spans


@dataclass(frozen=True)
class Answer:
    text: str
    answer_start: int | None = None  # in characters of the context; only training needs it


class Question(NamedTuple):
    id: str
    text: str
    context: int  # index into Squad.contexts
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Squad:
    """A SQuAD file: all contexts, and all questions in the file's order.

    version_2: the questions have an `is_impossible` key.
    rows: of a table, one for each question, with all columns.
    """

    path: Path
    contexts: list[str]
    questions: list[Question]
    version_2: bool
    rows: Sequence[Row] = field(default=(), compare=False, repr=False)

    def table(self) -> Sequence[Row]:
        """A row for each question: that of the file, or the question with its context."""
        if len(self.rows) == len(self.questions):
            return self.rows
        rows = []
        for question in self.questions:
            context = self.contexts[question.context]
            rows.append({"id": question.id, "question": question.text, "context": context})
        return rows


@dataclass(frozen=True)
class QuestionEntry:
    """A question as it is in the file."""

    id: str
    question: str
    answers: list[Answer] = field(default_factory=list)  # training and evaluation check for them
    is_impossible: bool | None = None


# As `datasets` and pandas write them to CSV.
WRITTEN_ANSWERS = re.compile(r"""\{['"](text|answer_start)['"]: |\[['"{].*\]$""", re.DOTALL)
JSON_KINDS = dict[str, Any] | list[Any]
DOCUMENT = {"data": list[Any]}
ARTICLE = {"paragraphs": list[Any]}
PARAGRAPH = {"context": str, "qas": list[Any]}


def read_squad(path: str | Path, bad: BadRows | None = None, keeps_empty: bool = False) -> Squad:
    """Reads the SQuAD file `path`, or a question per row as in Hugging Face's data set: `data` of a
    JSON file, or a table; also compressed; or the files that `table_parts` finds. bad: takes the
    articles, paragraphs and questions that are not as expected; by default UserError names them.
    keeps_empty: a row of a table with empty cells only is a question, too, since its file is
    written again with answers. Raises UserError if no question is left.
    """
    path = Path(path)
    bad_rows = BadRows(path) if bad is None else bad
    parts = table_parts(path)
    raw = read_document(parts[0], bad_rows, keeps_empty)
    for part in parts[1:]:
        raw = from_json(DOCUMENT, raw, f"SQuAD file {parts[0]}")
        content = read_document(part, bad_rows, keeps_empty)
        more = from_json(DOCUMENT, content, f"SQuAD file {part}")
        raw = {"data": raw["data"] + more["data"]}
    articles = from_json(DOCUMENT, nested_rows(raw, path), f"SQuAD file {path}")["data"]
    contexts: list[str] = []
    questions: dict[str, Question] = {}
    version_2 = False
    for place, paragraph in paragraphs_of(articles, f"{path}: ", bad_rows):
        for index, value in enumerate(paragraph["qas"]):
            where = f"{place}: qas[{index}]"
            if (entry := checked(QuestionEntry, plain_question(value), where, bad_rows)) is None:
                continue
            if entry.id in questions:
                bad_rows.add(where, f"question {entry.id} is there twice: remove one")
                continue
            answers = () if entry.is_impossible else tuple(entry.answers)
            questions[entry.id] = Question(entry.id, entry.question, len(contexts), answers)
            version_2 |= entry.is_impossible is not None
        contexts.append(paragraph["context"])
    if bad is None or not questions:
        bad_rows.finish()
    if not questions:
        raise UserError(f"SQuAD file {path} has no questions: check the file")
    rows = raw["data"] if all(map(is_flat, raw["data"])) else ()
    return Squad(path, contexts, list(questions.values()), version_2, rows)


def read_document(path: Path, bad: BadRows, keeps_empty: bool) -> Any:
    """The content of one file, with its articles or rows in `data`."""
    file = TextFile(path, bad.add)
    is_document = path.name.lower().removesuffix(file.compression).endswith(".json")
    if file.format in TABLES and not is_document:
        rows = read_rows(file, exact=True, keeps_empty=keeps_empty)
        return {"data": [row for _, row in rows]}
    refuse_known(path, DATA)
    if file.compression:
        content = parse_json("".join(TextFile(path)).encode(), f"SQuAD file {path}", JSON_KINDS)
    else:
        content = read_json(path, "SQuAD file", JSON_KINDS)
    return {"data": content} if isinstance(content, list) else content


def paragraphs_of(
    articles: list[Any], start: str, bad: BadRows
) -> Iterator[tuple[str, JsonObject]]:
    """The paragraphs with their places, which begin with `start`."""
    for number, value in enumerate(articles):
        where = f"{start}data[{number}]"
        article = checked(ARTICLE, value, where, bad)
        for index, paragraph_values in enumerate(article["paragraphs"] if article else []):
            place = f"{where}: paragraphs[{index}]"
            if paragraph := checked(PARAGRAPH, paragraph_values, place, bad):
                yield place, paragraph


def nested_rows(document: Any, path: Path) -> Any:
    """Rows of one question each, as `datasets` has them, in the nested form of SQuAD's files; other
    documents as they are. Without an `id`, a question has its row's number as `id`. If some
    questions have no answers, they are SQuAD v2.0's. Raises UserError, naming `path`, for other
    rows.
    """
    rows = document.get("data") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return document
    if not any("paragraphs" in row for row in rows):
        lacking = (absent_column(row, ("question", "context")) for row in rows)
        if problem := next(filter(None, lacking), None):
            raise UserError(f"{path}: {problem}")
    if not all(map(is_flat, rows)):
        return document
    questions = []
    for number, row in enumerate(rows):
        try:
            answers = answers_of(row)
        except ValueError as error:
            raise UserError(f"{path}: data[{number}]: {error}") from error
        name = row.get("id", number)
        if name == row["question"] == "":  # of a row with empty cells only
            name = f"empty row {number}"
        questions.append({"id": name, "question": row["question"], "answers": answers})
    have_answers = [bool(question["answers"]) for question in questions]
    if any(have_answers) and not all(have_answers):
        for question in questions:
            question["is_impossible"] = not question["answers"]
    # Neighbouring rows with one context are one paragraph.
    articles: list[JsonObject] = []
    previous_context = None
    for row, question in zip(rows, questions, strict=True):
        if not articles or row["context"] != previous_context:
            previous_context = row["context"]
            articles.append({"paragraphs": [{"context": previous_context, "qas": []}]})
        articles[-1]["paragraphs"][0]["qas"].append(question)
    return {"data": articles}


def is_flat(row: Any) -> bool:
    """Whether a row has a question and its context, as transformers' run_qa.py reads them."""
    return isinstance(row, dict) and {"context", "question"} <= row.keys()


def answers_of(row: JsonObject) -> list[JsonObject]:
    """The answers of a row in `answers`, or in `answer` or `answer_text` and `answer_start`. Raises
    ValueError for those that were written as text.
    """
    given = row.get("answers")
    if given is None:
        given = row.get("answer", row.get("answer_text"))
    if isinstance(given, str) and WRITTEN_ANSWERS.match(given):
        raise ValueError(
            f"answers is text of Python, {given!r:.40}: give JSON lines (datasets: to_json(FILE); "
            "pandas: to_json(FILE, orient='records', lines=True))"
        )
    if isinstance(given, list) and given and all(isinstance(answer, dict) for answer in given):
        return given
    if not isinstance(given, dict):
        given = {"text": given or None, "answer_start": row.get("answer_start")}
    texts, starts = as_list(given.get("text")), as_list(given.get("answer_start"))
    return [
        {"text": text, "answer_start": whole_number(start)}
        for text, start in itertools.zip_longest(texts, starts if texts else [])
    ]


def whole_number(value: Any) -> Any:
    """A number as CSV has it, or as pandas writes it where others are missing. Other values stay as
    they are.
    """
    if isinstance(value, str) and re.fullmatch(r"[0-9]+(\.0)?", value):
        value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def checked(kind: Any, value: Any, where: str, bad: BadRows) -> Any:
    """`value` as `kind`; None if it is not of that type, which `bad` takes."""
    try:
        return from_json(kind, value, "it")
    except UserError as error:
        bad.add(where, str(error).removeprefix("it: "))
        return None


def plain_question(entry: Any) -> Any:
    """A question as annotation tools write it, with a number as its id, null for no answers, and
    empty answers, as SQuAD has it.
    """
    if not isinstance(entry, dict):
        return entry
    entry = dict(entry)
    if type(entry.get("id")) is int:
        entry["id"] = str(entry["id"])
    answers = entry.get("answers") or []
    if isinstance(answers, list):
        entry["answers"] = [
            answer
            for answer in answers
            if not (isinstance(answer, dict) and answer.get("text") == "")
        ]
    return entry


def answer_characters(context: str, answer: Answer) -> tuple[int, int] | None:
    """The characters [start, stop) of `answer` in `context`, or None if it is not there.

    Like Google's reader, this accepts a wrong offset within a word, and a double space: if the
    answer is not at its offset, also counted in UTF-16, it is the nearest occurrence that
    overlaps the labelled characters, extended to whole words.
    """
    start, words = answer.answer_start, answer.text.split()
    if start is None or start < 0 or not words:
        return None
    for first in (start, from_utf16(context, start)):
        if context.startswith(answer.text, first):
            return first, first + len(answer.text)
    stop = start + len(answer.text)
    labelled = [span for span in spaced_spans(context) if span[0] < stop and span[1] > start]
    if not labelled:
        return None
    occurrences = [
        match.span()
        for match in re.finditer(r"\s+".join(map(re.escape, words)), context)
        if match.start() < labelled[-1][1] and match.end() > labelled[0][0]
    ]
    return min(occurrences, key=lambda span: abs(span[0] - start), default=None)
