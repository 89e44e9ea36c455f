"""Reads documents from .txt, .jsonl (both also .gz) and .parquet files.

A document is a connected text; next-sentence prediction takes real pairs from one document.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from utils.errors import UserError

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")

# Characters. A .txt file does not say where documents end; a longer one is cut after a paragraph, to bound memory.
MAX_DOCUMENT = 1_000_000

LONE_SURROGATE = re.compile("[\ud800-\udfff]")

OnBad = Callable[[str, str], Any]


class Document(NamedTuple):
    """`name` says where it came from, for logs. A paragraph may contain line breaks but no empty line."""

    name: str
    paragraphs: list[str]


def raise_error(where: str, why: str) -> NoReturn:
    """The default `on_bad`."""
    raise UserError(f"{where}: {why}")


def is_supported(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def read_documents(
    path: str | Path,
    text_field: str = "text",
    on_bad: OnBad = raise_error,
    empty_line: str = "paragraph",
) -> Iterator[Document]:
    """The documents of one file. A .txt file is one document (several if it is longer than `MAX_DOCUMENT`), or with
    `empty_line="document"` each block between empty lines is one. In .jsonl files each line is a document, and in
    .parquet files each row, with the text in `text_field`. Memory is bounded by the longest line, row or document.

    on_bad: called with (where, why) for text that is not UTF-8, has NUL bytes or lacks the field, and for the rest of
    a truncated file; if it returns, the line is left out.
    """
    path = Path(path)
    name = path.name.lower()
    if not is_supported(path):
        raise UserError(f"{path}: unknown file extension: use one of {', '.join(SUFFIXES)}")
    if name.endswith(".parquet"):
        yield from read_parquet(path, text_field, on_bad)
        return
    lines = read_lines(path, on_bad)
    if name.endswith((".jsonl", ".jsonl.gz")):
        yield from read_jsonl(path, lines, text_field, on_bad)
    else:
        yield from read_text(path, lines, MAX_DOCUMENT if empty_line == "paragraph" else 1)


def read_lines(path: Path, on_bad: OnBad) -> Iterator[tuple[int, str]]:
    """The valid lines with their numbers, from 1."""
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    number = 0
    try:
        with opener(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    byte = raw[error.start]
                    on_bad(f"{path}:{number}", f"not UTF-8 (byte 0x{byte:02x} at {error.start}): convert it with iconv")
                    continue
                if "\0" in line:
                    on_bad(f"{path}:{number}", "NUL bytes: this is not UTF-8 text; convert or remove it")
                    continue
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        on_bad(f"{path}, after line {number}", f"the gzip file is truncated or damaged ({error}): download it again")


def read_text(path: Path, lines: Iterator[tuple[int, str]], max_document: int) -> Iterator[Document]:
    """Documents of whole paragraphs, each ended by the paragraph that makes it `max_document` characters long."""
    paragraphs: list[str] = []
    paragraph: list[str] = []
    size = count = 0
    for _, line in lines:
        if line.strip():
            paragraph.append(line)
            continue
        if paragraph:
            paragraphs.append("".join(paragraph).strip())
            size += len(paragraphs[-1])
            paragraph = []
        if size >= max_document:
            count += 1
            yield Document(f"{path}#{count}", paragraphs)
            paragraphs, size = [], 0
    if paragraph:
        paragraphs.append("".join(paragraph).strip())
    if paragraphs:
        yield Document(f"{path}#{count + 1}", paragraphs)


def read_jsonl(path: Path, lines: Iterator[tuple[int, str]], text_field: str, on_bad: OnBad) -> Iterator[Document]:
    for number, line in lines:
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line, parse_int=ignore_integer)
        except (ValueError, RecursionError) as error:
            on_bad(where, f"not valid JSON ({error}): a .jsonl file has one JSON object per line")
            continue
        text = record.get(text_field) if isinstance(record, dict) else None
        yield from one_document(where, text, text_field, on_bad)


def ignore_integer(digits: str) -> int:
    """A replacement for int(), which refuses thousands of digits. No integer in a record is used."""
    return 0


def read_parquet(path: Path, text_field: str, on_bad: OnBad) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow, or convert to .jsonl") from None
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                on_bad(
                    str(path),
                    f"no column {text_field!r} (columns: {', '.join(file.schema_arrow.names)}): use --text-field",
                )
                return
            for batch in file.iter_batches(batch_size=256, columns=[text_field]):
                for value in batch.column(0):
                    row += 1
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError:
                        on_bad(f"{path}, row {row}", "not UTF-8: convert it")
                        continue
                    yield from one_document(f"{path}, row {row}", text, text_field, on_bad)
    except (pyarrow.ArrowException, OSError) as error:
        on_bad(f"{path}, after row {row}", f"the parquet file is truncated or damaged ({error}): download it again")


def one_document(where: str, text: Any, text_field: str, on_bad: OnBad) -> Iterator[Document]:
    """The document of one record; nothing if it is empty."""
    if not isinstance(text, str):
        kind = "is missing" if text is None else f"is {type(text).__name__}, not text"
        on_bad(where, f"the field {text_field!r} {kind}: name the field that contains the text")
    elif "\0" in text:
        on_bad(where, "NUL characters in the text: convert or remove it")
    elif LONE_SURROGATE.search(text):
        on_bad(where, "half of a surrogate pair in the text, which is not valid Unicode: remove it")
    elif paragraphs := split_paragraphs(text):
        yield Document(where, paragraphs)


def split_paragraphs(text: str) -> list[str]:
    """The blocks between blank lines."""
    paragraphs: list[str] = []
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip():
            lines.append(line)
        elif lines:
            paragraphs.append("\n".join(lines).strip())
            lines = []
    return paragraphs
