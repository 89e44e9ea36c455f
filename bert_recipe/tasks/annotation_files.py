"""Rows of annotation tools, of Hugging Face's data sets and of FlagEmbedding in the forms that are
read here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.tables import Row, not_a_string
from bert_recipe.utils.words import from_utf16, word_spans

WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("ner_tags", "tags", "labels", "ner")
LIST_AS_TEXT = re.compile(r"""\[\s*(['"]).*\1\s*\]""", re.DOTALL)  # as pandas writes it to CSV
TOKENS_FORM = '{"tokens": ["Anna", "lived"], "ner_tags": ["B-PER", "O"]}'


def plain_row(row: Row, needs_spans: bool = False) -> Row:
    """A row of an annotation tool as columns. Of Label Studio's JSON: its data, the choices of each
    control under the control's name, and the spans under `label`. Other rows stay as they are, but
    for `plain_choice`.

    needs_spans: with `label` also where there is no span, and with `text` for a single text in the
        data.

    Raises ValueError if there is not one annotation, or if Prodigy's `answer` is not `accept`.
    """
    if row.get("answer") in ("reject", "ignore") and "_task_hash" in row:
        raise ValueError(f"the answer is {row['answer']!r}, expected 'accept': leave the row out")
    if not isinstance(row.get("data"), dict) or not isinstance(row.get("annotations"), list):
        return {name: plain_choice(value) for name, value in row.items()}
    annotations = objects_in(row, "annotations")
    done = [annotation for annotation in annotations if not annotation.get("was_cancelled")]
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
    """A span of doccano, `[start, end, label]` or with `start_offset` and `end_offset`, or of Label
    Studio, with `labels`, as `{start, end, label}`; anything else as it is. text: of the row.
    """
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
    """Those of a task's files whose spans are counted in UTF-16, in which an emoji is two
    characters. Raises UserError for a span that can be read in both ways, if nothing in the files
    tells which is right.

    Each span that the two ways read differently is evidence for one of them. Clear evidence decides
    for a file: the text of the span where it is given, and an end beyond that of the text. Without
    it, the evidence of all files decides, also that the span begins and ends where words do, and
    that spans which are the same in both ways cover the same string.
    """
    spans_of_file = {
        name: [span for text in texts for span in bounded_spans(text)]
        for name, texts in files.items()
    }
    certain_strings = set()  # what spans cover that are the same in both ways
    for spans in spans_of_file.values():
        for span in spans:
            if span.in_utf16 == span.in_characters and span.ends_in_text(span.in_characters):
                certain_strings.add(span.covered(span.in_characters))

    clear_evidence = {name: [0, 0] for name in files}  # for characters, and for UTF-16
    all_evidence = [0, 0]
    doubtful: dict[str, BoundedSpan] = {}  # of each file the first one
    for name, spans in spans_of_file.items():
        for span in spans:
            is_same = span.in_utf16 == span.in_characters
            if is_same or not span.ends_in_text(span.in_utf16):  # the latter is wrong in both ways
                continue
            doubtful.setdefault(name, span)
            word_edges = {edge for word in word_spans(span.text) for edge in word}
            for way, bounds in enumerate((span.in_characters, span.in_utf16)):
                covered = span.covered(bounds)
                clear = 4 * (covered == span.given_text) + 2 * span.ends_in_text(bounds)
                start, end = bounds
                other = (start in word_edges) + (end in word_edges) + (covered in certain_strings)
                clear_evidence[name][way] += clear
                all_evidence[way] += clear + other

    result = set()
    for name, span in doubtful.items():
        for_characters, for_utf16 = clear_evidence[name]
        if for_characters == for_utf16:
            for_characters, for_utf16 = all_evidence
        if for_characters == for_utf16:
            readings = [span.covered(span.in_characters), span.covered(span.in_utf16)]
            raise UserError(
                f"{span.where}: the span {list(span.in_characters)} is {readings[0]!r}, or "
                f"{readings[1]!r} if its tool counts emojis as two characters (UTF-16), and "
                f"nothing in the files tells which: give each span its 'text', too"
            )
        if for_utf16 > for_characters:
            result.add(name)
    return frozenset(result)


class BoundedSpan(NamedTuple):
    """A span of a text, read in two ways.

    in_characters: start and end as they are in the file.
    in_utf16: the characters that these are if they are counted in UTF-16.
    given_text: the text of the span in the file, if it is there.
    where: the place of the text in errors.
    """

    where: str
    text: str
    in_characters: tuple[int, int]
    in_utf16: tuple[int, int]
    given_text: Any

    def covered(self, bounds: tuple[int, int]) -> str:
        start, end = bounds
        return self.text[start:end]

    def ends_in_text(self, bounds: tuple[int, int]) -> bool:
        return bounds[1] <= len(self.text)


def bounded_spans(text: SpannedText) -> Iterator[BoundedSpan]:
    """The spans of `text` that have a start and an end, if it is a string."""
    if not isinstance(text.text, str):
        return
    for span in text.spans:
        if not isinstance(span, dict):
            continue
        start, end = span.get("start"), span.get("end")
        if type(start) is int and type(end) is int:  # a boolean is none
            in_utf16 = (from_utf16(text.text, start), from_utf16(text.text, end))
            yield BoundedSpan(text.where, text.text, (start, end), in_utf16, span.get("text"))


def texts_in(row: Row, columns: Sequence[str]) -> list[str]:
    """The texts of columns that have one text or, as in FlagEmbedding's files, a list of them.
    Raises ValueError for anything else.
    """
    texts_of_columns: list[str] = []
    for name in columns:
        texts = row[name] if isinstance(row[name], list) else [row[name]]
        if not texts:
            raise ValueError(f"no text in {name!r}: give one")
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(not_a_string(wrong[0], name))
        texts_of_columns += texts
    return texts_of_columns


def check_lists(place: str, row: Row, columns: Sequence[str]) -> None:
    """Raises UserError if a column of a file's first row, at `place`, has a list as text."""
    for name in columns:
        if isinstance(row[name], str) and LIST_AS_TEXT.fullmatch(row[name]):
            raise UserError(
                f"{place}: {name!r} is a list that was written as text, {row[name]!r:.40}: give "
                f"JSON lines (pandas: to_json(FILE, orient='records', lines=True))"
            )
