"""Spans of input files: a span is one unit's share of a file. It has what starts in it: lines, paragraphs, row groups,
pages.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple

from data_preparation.engine.input_files import DECOMPRESSION_ERRORS, kind_of, open_input, open_text, size_of
from utils.errors import UserError

SPAN_BYTES = 4 << 20  # seconds of work
MAX_SPANS = 20_000  # of a stage; more input makes longer spans
MAX_LINE = 64 << 20  # bytes
BLANK_LINE = re.compile(rb"\n[ \t\r\f\v]*\n")
LOOK_AHEAD = 4 << 20  # bytes in which a document should end; more than one of MAX_DOCUMENT characters


OnBad = Callable[[str, str], Any]  # called with where bad input is, and why


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
    """Spans of files, given with their sizes, in their order. Compressed files other than dumps, .csv files and the
    formats `whole_files` are one span each."""
    length = max(SPAN_BYTES, sum(size for _, size in files) // MAX_SPANS)
    spans = []
    for path, size in files:
        format_, compression = kind_of(path)
        if not size and (compression or format_ == ".parquet"):
            raise UserError(f"{path} is empty, which no such file is: download it again, or remove it")
        divides = (not compression or (format_, compression) == (".xml", ".bz2")) and format_ != ".csv"
        step = length if divides and format_ not in whole_files else max(size, 1)
        spans += [Span(path, start, min(start + step, size)) for start in range(0, size, step)]
    return spans


def find_cut(file: BinaryIO, at: int, size: int) -> int:
    """Where text is divided near byte `at`: after the next blank line; if none is near, after a line or a word."""
    if at == 0 or at >= size:
        return min(at, size)
    file.seek(at)
    window = file.read(LOOK_AHEAD)
    if match := BLANK_LINE.search(window):
        return at + match.end()
    if len(window) < LOOK_AHEAD:
        return size
    cut = window.find(b"\n") + 1 or window.find(b" ") + 1 or len(window)
    return at + cut


def find_line(file: BinaryIO, at: int, size: int) -> int:
    """The start of the first line that starts at byte `at` or later."""
    if at == 0 or at >= size:
        return min(at, size)
    file.seek(at - 1)
    line = file.readline(MAX_LINE)
    return at - 1 + len(line)


def read_text_span(span: Span) -> bytes:
    """The text of whole documents in `span` of a plain text file, with blank lines between documents."""
    with open_input(span.path) as file:
        size = size_of(span.path)
        start, stop = find_cut(file, span.start, size), find_cut(file, span.stop, size)
        file.seek(start)
        return file.read(stop - start)


@lru_cache(1)
def lines_before(path: str, position: int) -> int:
    """The number of lines before byte `position`, for error messages."""
    count = 0
    with open_input(path) as file:
        while position > 0 and (block := file.read(min(1 << 20, position))):
            count += block.count(b"\n")
            position -= len(block)
    return count


def split_documents(text: bytes) -> Iterator[bytes]:
    """The documents of formatted text, without the lines between them. Line ends are one character."""
    for document in BLANK_LINE.split(text.replace(b"\r\n", b"\n")):
        if document := document.strip(b"\n"):
            yield document


class Lines:
    """Iterates over the valid lines of a span."""

    def __init__(self, span: Span, on_bad: OnBad):
        self.span, self.on_bad = span, on_bad
        self.first, self.number = 0, 0  # where the first line starts; the number of the current line in the span

    def where(self) -> str:
        """The current line, for error messages."""
        return f"{self.span.path}:{lines_before(self.span.path, self.first) + self.number}"

    def __iter__(self) -> Iterator[str]:
        try:
            with open_text(self.span.path) as file:
                for raw in self.read(file):
                    self.number += 1
                    if len(raw) > MAX_LINE:
                        self.on_bad(self.where(), f"the line is longer than {MAX_LINE >> 20} MB: divide it")
                        continue
                    try:
                        line = raw.decode("utf-8-sig" if self.number == 1 and self.first == 0 else "utf-8")
                    except UnicodeDecodeError as error:
                        why = f"not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start}): convert it with iconv"
                        self.on_bad(self.where(), why)
                        continue
                    if "\0" in line:
                        self.on_bad(self.where(), "NUL bytes: this is not UTF-8 text; convert or remove it")
                    else:
                        yield line
        except tuple(DECOMPRESSION_ERRORS) as error:
            if getattr(error, "errno", None):
                raise
            why = f"the file is truncated or damaged ({error}): download it again"
            self.on_bad(f"{self.span.path}, after line {self.number}", why)

    def read(self, file: BinaryIO) -> Iterator[bytes]:
        """The lines as bytes; of a longer line `MAX_LINE` + 1 bytes."""
        format_, compression = kind_of(self.span.path)
        left = 1 << 62
        if not compression and format_ != ".csv":
            find, size = find_cut if format_ == ".txt" else find_line, size_of(self.span.path)
            self.first, stop = find(file, self.span.start, size), find(file, self.span.stop, size)
            left = stop - self.first
            file.seek(self.first)
        while raw := file.readline(min(left, MAX_LINE + 1)):
            yield raw
            left -= len(raw)
            while len(raw) > MAX_LINE and left > 0:
                raw = file.readline(min(left, MAX_LINE + 1))
                left -= len(raw)
