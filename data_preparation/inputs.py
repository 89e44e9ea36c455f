"""Input files: local paths and the addresses that fsspec knows (s3://, gs://, hf://, https://), in spans of bytes.

A span is one task's share of a file. It has what starts in it: lines, paragraphs, row groups, pages.
"""

import bz2
import contextlib
import gzip
import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from utils.errors import UserError
from utils.files import file_digest

# What reading a truncated or damaged compressed file raises; an OSError only without `errno`.
DECOMPRESSION_ERRORS = [EOFError, zlib.error, OSError]
with contextlib.suppress(ImportError):
    from zstandard import ZstdError

    DECOMPRESSION_ERRORS.append(ZstdError)
SPAN_BYTES = 4 << 20  # seconds of work
MAX_SPANS = 20_000  # of a stage; more input makes longer spans
MAX_LINE = 64 << 20  # bytes
FORMATS = (".txt", ".jsonl", ".csv", ".parquet", ".xml")
COMPRESSIONS = (".gz", ".bz2", ".zst")
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


def kind_of(path: str) -> tuple[str, str]:
    """Format and compression, as file extensions; empty if there is none that is known."""
    name = path.lower()
    compression = next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")
    name = name.removesuffix(compression)
    if compression and name.endswith(".json"):  # as in C4: one object per line
        return ".jsonl", compression
    return next((suffix for suffix in FORMATS if name.endswith(suffix)), ""), compression


def is_remote(path: str) -> bool:
    return "://" in path


def filesystem(path: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(path)
    except ImportError as error:
        raise UserError(f"{path} needs a package ({error}): pip install fsspec and the one of the protocol") from error
    except ValueError as error:
        raise UserError(f"{path} is no address that fsspec knows ({error}): check it") from error


def open_input(path: str) -> BinaryIO:
    """The bytes of a file as they are stored."""
    if not is_remote(path):
        return Path(path).open("rb")
    system, name = filesystem(path)
    return system.open(name, "rb")


def open_text(path: str) -> BinaryIO:
    """The decompressed bytes of a file."""
    file, compression = open_input(path), kind_of(path)[1]
    if compression == ".zst":
        return io.BufferedReader(ZstdFile(file))
    return {".gz": gzip.open, ".bz2": bz2.open}[compression](file) if compression else file


class ZstdFile(io.RawIOBase):
    """The decompressed bytes of a .zst file. zstandard's own reader takes a truncated file for a complete one."""

    def __init__(self, file: BinaryIO):
        from zstandard import ZstdDecompressor

        self.file, self.new_frame = file, ZstdDecompressor().decompressobj
        self.frame: Any = None  # that is being read
        self.stored = self.text = b""  # not decompressed yet; not returned yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.text:
            if not (stored := self.stored or self.file.read(1 << 14)):
                if self.frame:
                    raise EOFError("the file ends inside a frame")
                return 0
            self.frame = self.frame or self.new_frame()
            self.text, self.stored = self.frame.decompress(stored), self.frame.unused_data
            self.frame = None if self.frame.eof else self.frame
        count = min(len(buffer), len(self.text))
        buffer[:count], self.text = self.text[:count], self.text[count:]
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


def size_of(path: str) -> int:
    if not is_remote(path):
        return Path(path).stat().st_size
    system, name = filesystem(path)
    return system.size(name) or 0


def identity_of(path: str) -> str:
    """Identifies the content of a file: its SHA-256, or the version (ETag, date, size) of a remote file."""
    if not is_remote(path):
        return file_digest(path)
    system, name = filesystem(path)
    keys = ("size", "ETag", "etag", "LastModified", "mtime", "md5Hash", "blob_id")
    return str({key: str(value) for key in keys if (value := system.info(name).get(key)) is not None})


def find_files(paths: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """The files of the formats `suffixes` that `paths` (files, folders, addresses, patterns of addresses) name or
    contain, in an order that depends only on their names."""
    files: list[str] = []
    for path in paths:
        names = list_remote(path) if is_remote(path) else list_local(Path(path).absolute())
        found = [name for name in names if kind_of(name)[0] in suffixes]
        if not found:
            raise UserError(f"{path} contains no {', '.join(suffixes)} file: check the path")
        files += found
    if len(set(files)) < len(files):
        raise UserError(f"{Counter(files).most_common(1)[0][0]} is named twice: name each file once")
    return files


def list_local(path: Path) -> list[str]:
    if not path.exists():
        raise UserError(f"{path} does not exist: check the path, or run the download stage first")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is not a regular file or folder: check the path")
    return [str(path)] if path.is_file() else [str(file) for file in sorted(walk(path))]


def walk(folder: Path, above: Sequence[str] = ()) -> Iterator[Path]:
    """The files in a folder and its folders. Links are followed, except to a folder that contains them."""
    above = [*above, os.path.realpath(folder)]
    for path in folder.iterdir():
        if path.is_file():
            yield path
        elif path.is_dir() and os.path.realpath(path) not in above:
            yield from walk(path, above)


def list_remote(path: str) -> list[str]:
    system, name = filesystem(path)
    try:
        if "*" in name:
            names = system.glob(name)
        else:
            names = system.find(name) if system.isdir(name) else [name] * system.exists(name)
    except Exception as error:  # each protocol has its own errors
        raise UserError(f"{path} cannot be listed ({error}): check the address and the access to it") from error
    return sorted(system.unstrip_protocol(name) for name in names)


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
