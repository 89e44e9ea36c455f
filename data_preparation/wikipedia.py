"""Extracts documents of prose from a Wikipedia dump, `pages-articles.xml.bz2`, plain or multistream.

The file is read as a stream. The streams of a multistream dump (or of a file from a parallel compressor) are
decompressed by the workers; a plain dump is decompressed by this process and cleaned by the workers.
"""

import bz2
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from xml.etree import ElementTree

from data_preparation.documents import Document, OnBad, raise_error
from data_preparation.parallel import ordered_map
from data_preparation.wikipedia_names import DISAMBIGUATION, FILE_ALIASES
from data_preparation.wikitext import prose_of

READ_SIZE = 1 << 20
BATCH = 1 << 22  # bytes of XML sent to a worker at a time, or as many compressed bytes as make about that
COMPRESSION_RATIO = 5
# The header of a bzip2 stream and of its first block: occurs by chance once in 10^24 bytes.
STREAM_START = re.compile(rb"BZh[1-9]\x31\x41\x59\x26\x53\x59")
STREAM_HEAD = 10
MULTISTREAM_WITHIN = 16 << 20  # bytes; a multistream dump has a second stream within them
HEAD_READ_SIZE = 1 << 14
MAX_HEAD = 4 << 20  # bytes of XML that must contain the description of the wiki
MAX_PAGE = 64 << 20  # bytes of XML; MediaWiki's own limit for a page's text is 2 MB
PAGE_START, PAGE_END, DUMP_END = b"<page>", b"</page>", b"</mediawiki>"
TRUNCATED = "the dump is truncated or damaged: download it again"

NAMESPACE = re.compile(rb'<namespace key="(-?\d+)"[^>]*>([^<]*)</namespace>')
FILE_NAMESPACE, CATEGORY_NAMESPACE = b"6", b"14"

TEMPLATE_NAME = re.compile(r"\{\{\s*([^{}|\n]{1,60}?)\s*[|}\n]")


class Batch(NamedTuple):
    xml: bytes
    size: int  # of the compressed bytes


class Piece(NamedTuple):
    """The result for a piece of XML: the documents of its complete pages; the bytes before the first and after the last
    of them (`tail` is None and `head` is everything if there is no complete page); bad pages as (where, why)."""

    head: bytes
    documents: list[Document]
    tail: bytes | None
    bad: list[tuple[str, str]]
    size: int = 0  # of the compressed bytes


def extract(
    path: str | Path,
    workers: int,
    progress: Callable[[int], Any] | None = None,
    on_bad: OnBad = raise_error,
) -> Iterator[Document]:
    """The prose of the articles of the dump at `path` in its order: no redirects, no other namespaces, no
    disambiguation pages. The name of a document is the title of the page.

    progress: called with the number of compressed bytes since the last call. on_bad: called with (where, why) for
    malformed and truncated pages, and for a file that is not a dump; if it returns, they are left out.
    """
    path = Path(path)
    hidden = hidden_prefixes(path)
    if hidden is None:
        on_bad(
            f"{path}", f"does not start like a Wikipedia dump (pages-articles.xml.bz2): check the path, or {TRUNCATED}"
        )
        return
    if is_multistream(path):
        pieces = ordered_map(partial(read_streams, path, hidden), stream_spans(path), workers)
    else:
        pieces = ordered_map(partial(read_batch, path, hidden), xml_batches(path, on_bad), workers)
    rest = b""  # the bytes after the last complete page: at most the beginning of one
    for piece in pieces:
        rest += piece.head
        if PAGE_END in rest:
            between = read_xml(path, hidden, rest)
            yield from reported(between, on_bad)
            rest = between.head if between.tail is None else between.tail
        yield from reported(piece, on_bad)
        if piece.tail is not None:
            rest = piece.tail
        if PAGE_START not in rest:
            rest = rest[-64:]
        elif len(rest) > MAX_PAGE:
            on_bad(
                f"{path}", f"a page of more than {MAX_PAGE >> 20} MB: this is not a Wikipedia dump, or it is damaged"
            )
            rest = b""
        if progress:
            progress(piece.size)
    if DUMP_END not in rest:
        on_bad(f"{path}, at the end", TRUNCATED)


def reported(piece: Piece, on_bad: OnBad) -> list[Document]:
    for where, why in piece.bad:
        on_bad(where, why)
    return piece.documents


def hidden_prefixes(path: Path) -> frozenset[str] | None:
    """The prefixes, in lower case, of links that show no text: files and categories, in English and in the language of
    the wiki. None if the file is not a dump."""
    head = b""
    try:
        with open_dump(path) as file:
            while b"</siteinfo>" not in head and len(head) < MAX_HEAD and (chunk := file.read1(HEAD_READ_SIZE)):
                head += chunk
    except (EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
    if b"<mediawiki" not in head or b"</siteinfo>" not in head:
        return None
    names = dict(NAMESPACE.findall(head))
    own = {names.get(key, b"").decode("utf-8", "replace").lower() for key in (FILE_NAMESPACE, CATEGORY_NAMESPACE)}
    return frozenset({"file", "category"} | FILE_ALIASES | own)


def open_dump(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        is_compressed = STREAM_START.match(file.read(STREAM_HEAD))
    return bz2.open(path) if is_compressed else path.open("rb")


def is_multistream(path: Path) -> bool:
    with path.open("rb") as file:
        return len(STREAM_START.findall(file.read(MULTISTREAM_WITHIN))) > 1


def stream_spans(path: Path) -> Iterator[tuple[int, int]]:
    """(start, end) of runs of complete bzip2 streams in the file, each but the last of `BATCH` / 5 bytes or more."""
    start = position = 0
    overlap = b""
    with path.open("rb") as file:
        while chunk := file.read(READ_SIZE):
            window = overlap + chunk
            for found in STREAM_START.finditer(window):
                at = position - len(overlap) + found.start()
                if at - start >= BATCH // COMPRESSION_RATIO:
                    yield start, at
                    start = at
            position += len(chunk)
            overlap = window[-(STREAM_HEAD - 1) :]
    yield start, position


def read_streams(path: Path, hidden: frozenset[str], span: tuple[int, int]) -> Piece:
    start, end = span
    with path.open("rb") as file:
        file.seek(start)
        compressed = file.read(end - start)
    xml: list[bytes] = []
    bad = []
    while compressed:
        decompressor = bz2.BZ2Decompressor()
        try:
            xml.append(decompressor.decompress(compressed))
        except OSError:
            bad.append((f"{path}, bytes {start} to {end}", TRUNCATED))
            break
        if not decompressor.eof:
            bad.append((f"{path}, byte {end}", TRUNCATED))
            break
        compressed = decompressor.unused_data
    piece = read_xml(path, hidden, b"".join(xml))
    return piece._replace(bad=piece.bad + bad, size=end - start)


def xml_batches(path: Path, on_bad: OnBad) -> Iterator[Batch]:
    """The XML in batches, which need not end with a page."""
    done = 0
    with path.open("rb") as raw, bz2.open(raw) if STREAM_START.match(raw.peek(STREAM_HEAD)) else raw as file:
        while True:
            chunks, size = [], 0
            try:
                while size < BATCH and (chunk := file.read1(READ_SIZE)):
                    chunks.append(chunk)
                    size += len(chunk)
            except (EOFError, OSError) as error:
                if isinstance(error, OSError) and error.errno:
                    raise
                on_bad(f"{path}, after byte {done}", TRUNCATED)
            if not chunks:
                return
            position = raw.tell()
            yield Batch(b"".join(chunks), position - done)
            done = position


def read_batch(path: Path, hidden: frozenset[str], batch: Batch) -> Piece:
    return read_xml(path, hidden, batch.xml)._replace(size=batch.size)


def read_xml(path: Path, hidden: frozenset[str], xml: bytes) -> Piece:
    """The documents of the complete pages in `xml`, which may begin and end inside a page."""
    first, last = xml.find(PAGE_START), xml.rfind(PAGE_END)
    if first < 0 or last < first:
        return Piece(xml, [], None, [])
    last += len(PAGE_END)
    documents, bad = [], []
    position = first
    while position >= 0 and position < last:
        end = xml.find(PAGE_END, position) + len(PAGE_END)
        try:
            document = read_page(xml[position:end], hidden)
        except ElementTree.ParseError as error:
            bad.append((f"{path}, page {title_of(xml[position:end])}", f"malformed XML ({error})"))
        else:
            if document is not None:
                documents.append(document)
        position = xml.find(PAGE_START, end)
    return Piece(xml[:first], documents, xml[last:], bad)


def read_page(xml: bytes, hidden: frozenset[str]) -> Document | None:
    """The document of one page; None if it is not an article or has no prose."""
    page = ElementTree.fromstring(xml)  # noqa: S314 - XML that starts with <page> cannot declare entities
    title, text = page.findtext("title"), page.findtext("revision/text")
    if title is None or page.findtext("ns") is None or page.find("revision/text") is None:
        raise ElementTree.ParseError("no title, namespace or text")
    is_article = page.findtext("ns") == "0" and page.find("redirect") is None
    if not is_article or not text or page.findtext("revision/model", "wikitext") != "wikitext":
        return None
    if is_disambiguation(text):
        return None
    paragraphs = prose_of(text, hidden)
    return Document(title, paragraphs) if paragraphs else None


def is_disambiguation(text: str) -> bool:
    names = {name.lower().replace("_", " ") for name in TEMPLATE_NAME.findall(text)}
    return (
        not names.isdisjoint(DISAMBIGUATION)
        or any(name.endswith(" disambiguation") for name in names)
        or "__DISAMBIG__" in text
    )


def title_of(xml: bytes) -> str:
    title = re.search(rb"<title>([^<]*)", xml)
    return title[1].decode("utf-8", "replace") if title else "without a title"
