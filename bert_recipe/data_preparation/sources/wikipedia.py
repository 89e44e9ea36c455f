"""Extracts documents of prose from a Wikipedia dump, `pages-articles.xml.bz2`, plain or
multistream, or `.xml`.

A span of the file is read by itself: it has the pages that start in it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from bert_recipe.data_preparation.sources.bzip2 import read_blocks
from bert_recipe.data_preparation.sources.documents import Document
from bert_recipe.data_preparation.sources.spans import Span
from bert_recipe.data_preparation.sources.wikipedia_names import DISAMBIGUATION, FILE_ALIASES
from bert_recipe.data_preparation.sources.wikitext import prose_of
from bert_recipe.utils.text_files import OnBad

READ_SIZE = 1 << 20
BZIP2_START = b"BZh"
MAX_HEAD = 4 << 20  # bytes of XML that must contain the description of the wiki
MAX_PAGE = 64 << 20  # bytes of XML; MediaWiki's own limit for a page's text is 2 MB
PAGE_START, PAGE_END, DUMP_END = b"<page>", b"</page>", b"</mediawiki>"
# The start of a page, or the first bytes of one.
MAY_HAVE_PAGE = re.compile(rb"<page>|<(?:p(?:a(?:ge?)?)?)?\Z")
TAIL = 64  # bytes after the last page that may contain a tag or its beginning
TRUNCATED = "the dump is truncated or damaged: download it again"
NOT_A_DUMP = (
    f"does not start like a Wikipedia dump (pages-articles.xml.bz2): check the path, or {TRUNCATED}"
)

NAMESPACE = re.compile(rb'<namespace key="(-?\d+)"[^>]*>([^<]*)</namespace>')
FILE_NAMESPACE, CATEGORY_NAMESPACE = b"6", b"14"

TEMPLATE_NAME = re.compile(r"\{\{\s*([^{}|\n]{1,60}?)\s*[|}\n]")


def read_dump(span: Span, on_bad: OnBad) -> Iterator[Document]:
    """The prose of the articles that start in `span`, named by title: no redirects, no other
    namespaces, no disambiguation. on_bad: called with (where, why) for bad pages and for a file
    that is not a dump; if it returns, they are left out.
    """
    hidden = hidden_prefixes(span.path)
    if hidden is None:
        if span.start == 0:
            on_bad(span.path, NOT_A_DUMP)
        return
    for xml in read_pages(span, on_bad):
        try:
            document = read_page(xml, hidden)
        except ElementTree.ParseError as error:
            title = re.search(rb"<title>([^<]*)", xml)
            name = title[1].decode("utf-8", "replace") if title else "without a title"
            on_bad(f"{span.path}, page {name}", f"malformed XML ({error})")
        else:
            if document:
                yield document


def read_pages(span: Span, on_bad: OnBad) -> Iterator[bytes]:
    """The XML of each page that starts in `span`, from its start tag to its end tag, which may be
    after the span. on_bad: see `read_dump`.
    """
    buffer = b""  # XML that is read and may contain, or begin, a page that was not yielded
    span_bytes = 0  # the first bytes of `buffer`, which are in the span; the others are after it
    is_in_span = False
    for position, xml in read_xml(span):
        is_in_span = position < span.stop
        if not is_in_span and not MAY_HAVE_PAGE.search(buffer[:span_bytes]):
            return  # all pages that start in the span have been yielded
        if xml is None or len(buffer) > MAX_PAGE:
            on_bad(f"{span.path}, byte {position}", TRUNCATED)
            buffer = b""
            span_bytes = 0
            continue
        buffer += xml
        if is_in_span:
            span_bytes = len(buffer)
        kept_from = 0  # the first byte of `buffer` that is still needed
        while page := find_page(buffer, kept_from, span_bytes):
            yield buffer[page]
            kept_from = page.stop
        is_page_open = 0 <= buffer.find(PAGE_START, kept_from) < span_bytes
        if not is_page_open:
            kept_from = max(kept_from, len(buffer) - TAIL)
        buffer = buffer[kept_from:]
        span_bytes = max(span_bytes - kept_from, 0)
    # The end of the file. The last tag may start in the span before.
    has_end = DUMP_END in buffer or DUMP_END.endswith(buffer.strip())
    is_page_open = PAGE_START in buffer[:span_bytes]
    if is_page_open or (is_in_span and not has_end):
        on_bad(f"{span.path}, at the end", TRUNCATED)


def find_page(data: bytes, first: int, stop: int) -> slice | None:
    """Where the next page is in `data`: one that starts at a byte from `first` to before `stop`;
    None if there is none, or its end tag is missing.
    """
    start = data.find(PAGE_START, first)
    if not 0 <= start < stop:
        return None
    end = data.find(PAGE_END, start)
    return None if end < 0 else slice(start, end + len(PAGE_END))


def read_xml(span: Span) -> Iterator[tuple[int, bytes | None]]:
    """The XML from `span.start` to the end of the file: where each piece starts in the file, and
    its text, or None if it is damaged. No piece is both in the span and after it.
    """
    with Path(span.path).open("rb") as file:
        if file.read(len(BZIP2_START)) == BZIP2_START:
            yield from read_blocks(file, span.start)
            return
        position = file.seek(span.start)
        while True:
            is_inside = position < span.stop
            xml = file.read(min(READ_SIZE, span.stop - position) if is_inside else READ_SIZE)
            if not xml:
                return
            yield position, xml
            position += len(xml)


def hidden_prefixes(path: str) -> frozenset[str] | None:
    """The prefixes, in lower case, of links that show no text: files and categories, in English and
    in the language of the wiki. None if the file is not a dump.
    """
    head = b""
    for _, xml in read_xml(Span(path, 0, MAX_HEAD)):
        head += xml or b""
        if xml is None or b"</siteinfo>" in head or len(head) > MAX_HEAD:
            break
    if b"<mediawiki" not in head or b"</siteinfo>" not in head:
        return None
    names = dict(NAMESPACE.findall(head))
    local_names = {
        names.get(key, b"").decode("utf-8", "replace").lower()
        for key in (FILE_NAMESPACE, CATEGORY_NAMESPACE)
    }
    return frozenset({"file", "category"} | FILE_ALIASES | local_names)


def read_page(xml: bytes, hidden: frozenset[str]) -> Document | None:
    """The document of one page; None if it is not an article or has no prose."""
    # XML that starts with <page> cannot declare entities.
    page = ElementTree.fromstring(xml)  # noqa: S314
    title, text = page.findtext("title"), page.findtext("revision/text")
    if title is None or page.findtext("ns") is None or page.find("revision/text") is None:
        raise ElementTree.ParseError("no title, namespace or text")
    is_article = page.findtext("ns") == "0" and page.find("redirect") is None
    if not is_article or not text or page.findtext("revision/model", "wikitext") != "wikitext":
        return None
    paragraphs = [] if is_disambiguation(text) else prose_of(text, hidden)
    return Document(title, paragraphs) if paragraphs else None


def is_disambiguation(text: str) -> bool:
    names = {name.lower().replace("_", " ") for name in TEMPLATE_NAME.findall(text)}
    is_marked = "__DISAMBIG__" in text or any(name.endswith(" disambiguation") for name in names)
    return is_marked or not names.isdisjoint(DISAMBIGUATION)
