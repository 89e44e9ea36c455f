"""Reads documents from .txt, .jsonl, .csv and .parquet files.

A document is a coherent text: next-sentence prediction takes its real pairs from one document.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple, NoReturn

from data_preparation.engine.input_files import kind_of, open_input
from data_preparation.sources.spans import MAX_LINE, Lines, OnBad, Span
from utils.errors import UserError

# Characters. Longer documents are cut after a paragraph, a line or a sentence, to bound memory.
MAX_DOCUMENT = 1_000_000

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Document(NamedTuple):
    """`name` says where it came from, for logs. A paragraph may contain line breaks but no empty line."""

    name: str
    paragraphs: list[str]


def raise_error(where: str, why: str) -> NoReturn:
    """The default `on_bad`."""
    raise UserError(f"{where}: {why}")


def read_documents(
    span: Span, text_field: str = "text", on_bad: OnBad = raise_error, empty_line: str = "paragraph"
) -> Iterator[Document]:
    """The documents of a span. The text of a .txt file is one document (several if longer than `MAX_DOCUMENT`), or with
    `empty_line="document"` each block between empty lines is one. In .jsonl files each line is a document, and in .csv
    and .parquet files each row, with the text in `text_field`. Memory is bounded by the longest line or row.

    on_bad: called with (where, why) for text that is not UTF-8, has NUL bytes or lacks the field, and for the rest of
    a truncated file; if it returns, the line is left out.
    """
    read_records = {".parquet": read_parquet, ".csv": read_csv, ".jsonl": read_jsonl}.get(kind_of(span.path)[0])
    if read_records is None:
        yield from read_text(Lines(span, on_bad), MAX_DOCUMENT if empty_line == "paragraph" else 1)
        return
    for where, text in read_records(span, text_field, on_bad):
        if not isinstance(text, str):
            kind = "is missing" if text is None else f"is {type(text).__name__}, not text"
            on_bad(where(), f"the field {text_field!r} {kind}: name the field that contains the text")
        elif len(text) > MAX_LINE:
            on_bad(where(), f"the text is longer than {MAX_LINE >> 20} MB: divide it")
        elif "\0" in text:
            on_bad(where(), "NUL characters in the text: convert or remove it")
        elif LONE_SURROGATE.search(text):
            on_bad(where(), "half of a surrogate pair in the text, which is not valid Unicode: remove it")
        elif paragraphs := split_paragraphs(text):
            yield Document(span.path, paragraphs)


def read_text(lines: Lines, max_document: int) -> Iterator[Document]:
    """Documents of whole paragraphs, each ended by the paragraph that makes it `max_document` characters long. A
    paragraph longer than `MAX_DOCUMENT` is divided after a line."""
    paragraphs: list[str] = []
    paragraph: list[str] = []
    size = in_paragraph = 0
    for line in chain(lines, [""]):
        if line.strip() and in_paragraph < MAX_DOCUMENT:
            paragraph.append(line)
            in_paragraph += len(line)
            continue
        if paragraph:
            paragraphs.append("".join(paragraph).strip())
            size += in_paragraph
        paragraph, in_paragraph = ([line], len(line)) if line.strip() else ([], 0)
        if size >= max_document:
            yield Document(lines.span.path, paragraphs)
            paragraphs, size = [], 0
    if paragraphs:
        yield Document(lines.span.path, paragraphs)


Records = Iterator[tuple[Callable[[], str], Any]]  # what names a record in messages, and its text field


def read_jsonl(span: Span, text_field: str, on_bad: OnBad) -> Records:
    lines = Lines(span, on_bad)
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_int=float)  # int() refuses thousands of digits
        except (ValueError, RecursionError) as error:
            on_bad(lines.where(), f"not valid JSON ({error}): a .jsonl file has one JSON object per line")
            continue
        yield lines.where, record.get(text_field) if isinstance(record, dict) else None


def read_csv(span: Span, text_field: str, on_bad: OnBad) -> Records:
    csv.field_size_limit(MAX_LINE)
    lines = Lines(span, on_bad)
    try:
        rows = csv.DictReader(lines, strict=True)
        names = list(rows.fieldnames or ())
        if names.count(text_field) != 1:
            found = "two columns" if text_field in names else "no column"
            on_bad(span.path, f"{found} {text_field!r} (columns: {', '.join(names)}): use --text-field")
            return
        for row in rows:
            if None in row:
                on_bad(lines.where(), f'more fields than the {len(names)} columns: quote fields with commas with "')
                continue
            yield lines.where, row[text_field]
    except csv.Error as error:
        on_bad(lines.where(), f'not valid CSV ({error}): quote fields with " and double quotes inside them')


def read_parquet(span: Span, text_field: str, on_bad: OnBad) -> Records:
    """The rows of the row groups whose text starts in the span."""
    import pyarrow.parquet

    path, row = span.path, 0

    def where() -> str:
        return f"{path}, row {row}"

    try:
        with open_input(path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                if span.start == 0:
                    on_bad(path, f"no column {text_field!r} (columns: {', '.join(names)}): use --text-field")
                return
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                columns = (group.column(index) for index in range(group.num_columns))
                column = next(column for column in columns if column.path_in_schema.split(".")[0] == text_field)
                if not span.start <= (column.dictionary_page_offset or column.data_page_offset) < span.stop:
                    row += group.num_rows
                    continue
                for batch in file.iter_batches(batch_size=256, row_groups=[number], columns=[text_field]):
                    for value in batch.column(0):
                        row += 1
                        try:
                            text = value.as_py()
                        except UnicodeDecodeError:
                            on_bad(where(), "not UTF-8: convert it")
                            continue
                        yield where, text
    except (pyarrow.ArrowException, OSError) as error:
        on_bad(f"{path}, after row {row}", f"the parquet file is truncated or damaged ({error}): download it again")


def split_paragraphs(text: str) -> list[str]:
    """The blocks between blank lines."""
    blocks = re.split(r"\n\s*\n", "\n".join(text.splitlines()))
    return [block.strip() for block in blocks if block.strip()]
