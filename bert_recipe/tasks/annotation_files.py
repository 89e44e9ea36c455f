"""Rows of annotation tools, of Hugging Face's data sets and of FlagEmbedding in the forms that are
read here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.tables import Row, not_a_string
from bert_recipe.utils.words import from_utf16, word_spans

WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("ner_tags", "tags", "labels", "ner")
LIST_AS_TEXT = re.compile(r"""\[\s*(['"]).*\1\s*\]""", re.DOTALL)  # as pandas writes it to CSV
TOKENS_FORM = '{"tokens": ["Anna", "lived"], "ner_tags": ["B-PER", "O"]}'


def plain_row(row: Row, needs_spans: bool = False) -> Row:
    """A row of Label Studio's JSON as columns, with the choices of each control under its name, and
    the spans under `label`, needs_spans: also without any; other rows as they are. A single text
    in the data is `text`. Raises ValueError if there is not one annotation, or if Prodigy's
    `answer` is not `accept`.
    """
    if row.get("answer") in ("reject", "ignore") and "_task_hash" in row:
        raise ValueError(f"the answer is {row['answer']!r}, expected 'accept': leave the row out")
    if not isinstance(row.get("data"), dict) or not isinstance(row.get("annotations"), list):
        return {name: plain_choice(value) for name, value in row.items()}
    done = [each for each in objects_in(row, "annotations") if not each.get("was_cancelled")]
    if len(done) != 1:
        advice = "keep one" if done else "label it"
        raise ValueError(f"{len(done)} annotations, expected one: {advice}")
    columns: Row = dict(row["data"])
    texts = [value for value in columns.values() if isinstance(value, str)]
    if needs_spans and len(texts) == 1:
        columns.setdefault("text", texts[0])
    for result in objects_in(done[0], "result"):
        if result.get("type") == "relation":  # between two spans
            continue
        value = result.get("value")
        if not isinstance(value, dict):
            raise ValueError(f"'value' is {value!r}, expected an object: export the file again")
        if isinstance(value.get("choices"), list) and isinstance(result.get("from_name"), str):
            columns.setdefault(result["from_name"], []).extend(value["choices"])
        elif "labels" in value:
            columns.setdefault("label", []).append(value)
    if needs_spans:
        columns.setdefault("label", [])
    return columns


def objects_in(row: Row, name: str) -> list[dict[str, Any]]:
    """The list of objects `name`. Raises ValueError for anything else."""
    values = row.get(name, [])
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise ValueError(f"{name!r} is {values!r}, expected a list of objects: export it again")
    return values


def plain_choice(value: Any) -> Any:
    """The labels of Label Studio's JSON-MIN, where several are `{"choices": [...]}`."""
    if isinstance(value, dict) and isinstance(value.get("choices"), list):
        return value["choices"]
    return value


def spans_of(row: Row) -> Any:
    """The column `spans`, or the spans in `label`, `labels` or `entities` of doccano and Label
    Studio.
    """
    names = ("spans", "label", "labels", "entities")
    spans = next((row[name] for name in names if name in row), None)
    return (
        [plain_span(span, row.get("text")) for span in spans] if isinstance(spans, list) else spans
    )


def plain_span(span: Any, text: Any) -> Any:
    if isinstance(span, list) and len(span) == 3:
        return dict(zip(("start", "end", "label"), span, strict=True))
    if isinstance(span, dict) and "start_offset" in span:
        start, end, label = (span.get(name) for name in ("start_offset", "end_offset", "label"))
        return {"start": start, "end": end, "label": label}
    if not (isinstance(span, dict) and isinstance(span.get("labels"), list)):
        return span
    if len(span["labels"]) != 1 or not isinstance(text, str):
        return span
    start, end = span.get("start"), span.get("end")
    if type(start) is not int or type(end) is not int:
        return span
    return {"start": start, "end": end, "label": span["labels"][0], "text": span.get("text")}


class SpannedText(NamedTuple):
    """A text of a file with its spans, {start, end}. where: its place in errors."""

    where: str
    text: Any
    spans: Sequence[Any]


def files_in_utf16(files: Mapping[str, Sequence[SpannedText]]) -> frozenset[str]:
    """Those of a task's files whose spans are counted in UTF-16. What tells is the text of a span
    where it is given, and spans beyond the end of the text; else, of all files together, also words
    that a span would divide, and what the spans of other texts cover. Raises UserError for a span
    that nothing tells how to read.
    """
    bounds_of = {
        name: [(text, span, bounds) for text in texts for span, bounds in bounds_in(text)]
        for name, texts in files.items()
    }
    known = {
        text.text[slice(*bounds)]
        for found in bounds_of.values()
        for text, _, bounds in found
        if in_characters(text.text, bounds) == bounds and bounds[1] <= len(text.text)
    }
    clear = {name: [0, 0] for name in files}  # for characters, and for UTF-16
    total = [0, 0]
    doubtful: dict[str, tuple[SpannedText, tuple[int, int]]] = {}
    for name, found in bounds_of.items():
        for text, span, bounds in found:
            other = in_characters(text.text, bounds)
            if other == bounds or other[1] > len(text.text):  # the latter is in neither
                continue
            doubtful.setdefault(name, (text, bounds))
            edges = {edge for word in word_spans(text.text) for edge in word}
            for place, (start, end) in enumerate((bounds, other)):
                covered = text.text[start:end]
                sure = 4 * (covered == span.get("text")) + 2 * (end <= len(text.text))
                clear[name][place] += sure
                total[place] += sure + (start in edges) + (end in edges) + (covered in known)
    result = set()
    for name, (text, bounds) in doubtful.items():
        in_chars, in_utf16 = total if clear[name][0] == clear[name][1] else clear[name]
        if in_chars == in_utf16:
            readings = [
                text.text[slice(*each)] for each in (bounds, in_characters(text.text, bounds))
            ]
            raise UserError(
                f"{text.where}: the span {list(bounds)} is {readings[0]!r}, or {readings[1]!r} if "
                f"its tool counts emojis as two characters (UTF-16), and nothing in the files "
                f"tells which: give each span its 'text', too"
            )
        if in_utf16 > in_chars:
            result.add(name)
    return frozenset(result)


def bounds_in(text: SpannedText) -> Iterator[tuple[dict[str, Any], tuple[int, int]]]:
    """The spans with a start and an end, if there is a text."""
    for span in text.spans if isinstance(text.text, str) else ():
        bounds = (span.get("start"), span.get("end")) if isinstance(span, dict) else ()
        if list(map(type, bounds)) == [int, int]:
            yield span, cast(tuple[int, int], bounds)


def in_characters(text: str, bounds: tuple[int, int]) -> tuple[int, int]:
    """`bounds` that are counted in UTF-16 in characters."""
    return from_utf16(text, bounds[0]), from_utf16(text, bounds[1])


def texts_in(row: Row, columns: Sequence[str]) -> list[str]:
    """The texts of columns that have one text or, as in FlagEmbedding's files, a list of them.
    Raises ValueError for anything else.
    """
    found: list[str] = []
    for name in columns:
        texts = row[name] if isinstance(row[name], list) else [row[name]]
        if not texts:
            raise ValueError(f"no text in {name!r}: give one")
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(not_a_string(wrong[0], name))
        found += texts
    return found


def check_lists(place: str, row: Row, columns: Sequence[str]) -> None:
    """Raises UserError if a column of a file's first row, at `place`, has a list as text."""
    for name in columns:
        if isinstance(row[name], str) and LIST_AS_TEXT.fullmatch(row[name]):
            raise UserError(
                f"{place}: {name!r} is a list that was written as text, {row[name]!r:.40}: give "
                f"JSON lines (pandas: to_json(FILE, orient='records', lines=True))"
            )
