"""Spans of input files: a unit's share of a file, with the lines, paragraphs, row groups or pages
that start in it.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.text_files import MAX_LINE, OnBad, TextFile, kind_of, raise_error

SPAN_BYTES = 4 << 20  # seconds of work
PARQUET_FACTOR = 4  # longer spans of Parquet, because each unit reads the file's list of row groups
MAX_SPANS = 20_000  # of a stage; more input makes longer spans
WHOLE_FILES = (".csv", ".tsv")  # formats with a header
BLANK_LINE = re.compile(rb"\n[ \t\r\f\v]*\n")
# Bytes in which a document should end; more than one of MAX_DOCUMENT characters.
LOOK_AHEAD = 4 << 20


class Span(NamedTuple):
    path: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def total_size(spans: Sequence[Span]) -> int:
    return sum(span.size for span in spans)


def plan_spans(files: Sequence[tuple[str, int]], whole_files: Sequence[str] = ()) -> list[Span]:
    """Spans of files, given with their sizes, in their order. Compressed files other than dumps,
    WHOLE_FILES and the formats `whole_files` are one span each.
    """
    length = max(SPAN_BYTES, sum(size for _, size in files) // MAX_SPANS)
    spans = []
    for path, size in files:
        format_, compression = kind_of(path)
        if not size and (compression or format_ == ".parquet"):
            raise UserError(
                f"{path} is empty, which no such file is: download it again, or remove it"
            )
        is_dump = format_ == ".xml" and compression == ".bz2"
        is_whole = format_ in (*WHOLE_FILES, *whole_files) or (compression and not is_dump)
        if is_whole:
            step = max(size, 1)
        elif format_ == ".parquet":
            step = length * PARQUET_FACTOR
        else:
            step = length
        spans += [Span(path, start, min(start + step, size)) for start in range(0, size, step)]
    return spans


def find_cut(file: BinaryIO, at: int, size: int) -> int:
    """Where text is divided near byte `at`: after the next blank line; if none is near, after a
    line or a word.
    """
    if at == 0:
        return 0
    if at >= size:
        return size
    file.seek(at)
    window = file.read(LOOK_AHEAD)
    blank_line = BLANK_LINE.search(window)
    if blank_line:
        return at + blank_line.end()
    if len(window) < LOOK_AHEAD:
        return size
    for separator in (b"\n", b" "):
        position = window.find(separator)
        if position >= 0:
            return at + position + 1
    return at + len(window)


def find_line(file: BinaryIO, at: int, size: int) -> int:
    """The position of the first line of `file` that starts at byte `at` or later; `size`, that of
    the file, if there is none.
    """
    if at == 0:
        return 0
    if at >= size:
        return size
    # From the byte before, since a line may start at `at` itself.
    file.seek(at - 1)
    rest_of_line = file.readline(MAX_LINE)
    return at - 1 + len(rest_of_line)


def read_text_span(span: Span) -> bytes:
    """The text of whole documents in `span` of a plain text file, with blank lines between
    documents, without a byte order mark.
    """
    with Path(span.path).open("rb") as file:
        size = Path(span.path).stat().st_size
        start, stop = find_cut(file, span.start, size), find_cut(file, span.stop, size)
        file.seek(start)
        return file.read(stop - start).removeprefix(b"" if start else BOM_UTF8)


@lru_cache(1)
def lines_before(path: str, position: int) -> int:
    """The number of lines before byte `position`, for error messages."""
    count = 0
    with Path(path).open("rb") as file:
        while position > 0 and (block := file.read(min(1 << 20, position))):
            count += block.count(b"\n")
            position -= len(block)
    return count


def split_documents(text: bytes) -> Iterator[bytes]:
    """The documents of formatted text, without the empty lines. Line ends are one character."""
    for document in BLANK_LINE.split(text.replace(b"\r\n", b"\n")):
        if document := document.strip(b"\n"):
            yield document


class SpanFile(TextFile):
    """The lines or rows that start in a span."""

    def __init__(self, span: Span, on_bad: OnBad = raise_error):
        super().__init__(span.path, on_bad)
        self.span = span

    def open_lines(self) -> tuple[BinaryIO, int]:
        file, size = super().open_lines()
        if self.compression or self.format in WHOLE_FILES:
            return file, size
        find = find_cut if self.format == ".txt" else find_line
        size = Path(self.path).stat().st_size
        self.first, stop = find(file, self.span.start, size), find(file, self.span.stop, size)
        file.seek(self.first)
        return file, stop - self.first

    def lines_before(self) -> int:
        return lines_before(self.path, self.first)

    def includes(self, position: int) -> bool:
        return self.span.start <= position < self.span.stop
