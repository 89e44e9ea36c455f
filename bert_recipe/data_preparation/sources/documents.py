"""Reads documents from text files and tables.

A document is a coherent text: next-sentence prediction takes its real pairs from one document.
"""

import re
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from bert_recipe.data_preparation.sources.spans import Span, SpanFile
from bert_recipe.utils.tables import read_rows
from bert_recipe.utils.text_files import TABLES, OnBad, raise_error
from bert_recipe.utils.words import FULL_STOPS, QUOTES, SENTENCE_ENDS

# Characters. Longer documents are cut after a paragraph, a line or a sentence, to bound memory.
MAX_DOCUMENT = 1_000_000
# For regular expressions: what ends a sentence in any script, and what may follow it.
ENDS = SENTENCE_ENDS + FULL_STOPS
CLOSERS = re.escape(QUOTES + ")]」』）》】")
WIKI_EXTRACTOR = re.compile(r'<doc id="[^"]*" .*>|</doc>')  # around its documents


class Document(NamedTuple):
    """`name` says where it came from, for logs. A paragraph may contain line breaks but no empty
    line.
    """

    name: str
    paragraphs: list[str]


def read_documents(
    span: Span,
    text_field: str = "text",
    on_bad: OnBad = raise_error,
    empty_line: str | None = None,
) -> Iterator[Document]:
    """The documents of a span. The text of a .txt file is one document (several if longer than
    `MAX_DOCUMENT`), or with `empty_line="document"` each block between empty lines is one. Each row
    of a table (see utils/tables.py) is a document, with the text in `text_field`. Memory is bounded
    by the longest line or row.

    on_bad: called with (where, why) for text that is not UTF-8, has NUL bytes or lacks the field,
    and for the rest of a truncated file; if it returns, the line is left out.
    """
    file = SpanFile(span, on_bad)
    if file.format not in TABLES:
        yield from read_text(file, 1 if empty_line == "document" else MAX_DOCUMENT)
        return
    for number, row in read_rows(file, [text_field], exact=True):
        text = row.get(text_field)
        if not isinstance(text, str):
            kind = "is missing" if text is None else f"is {type(text).__name__}, not text"
            on_bad(
                file.where(number),
                f"the field {text_field!r} {kind}: give the one with the text as --text-field",
            )
            continue
        paragraphs = split_paragraphs(text)
        if paragraphs:
            yield Document(span.path, paragraphs)


def read_text(lines: SpanFile, max_document: int) -> Iterator[Document]:
    """Documents of whole paragraphs, each ended by the paragraph that makes it `max_document`
    characters long, or by a mark of WikiExtractor. A paragraph longer than `MAX_DOCUMENT` is
    divided after a line.
    """
    paragraphs: list[str] = []  # of the document, without the one that is read
    document_size = 0  # of `paragraphs`, in characters
    paragraph: list[str] = []  # its lines
    paragraph_size = 0
    for line in chain(lines, [""]):
        is_mark = WIKI_EXTRACTOR.fullmatch(line.strip()) is not None
        is_text = not is_mark and bool(line.strip())
        if is_text and paragraph_size < MAX_DOCUMENT:
            paragraph.append(line)
            paragraph_size += len(line)
            continue
        # The paragraph ends before this line, which may begin the next one.
        if paragraph:
            paragraphs.append("".join(paragraph).strip())
            document_size += paragraph_size
        paragraph = [line] if is_text else []
        paragraph_size = len(line) if is_text else 0
        if paragraphs and (is_mark or document_size >= max_document):
            yield Document(lines.path, paragraphs)
            paragraphs = []
            document_size = 0
    if paragraphs:
        yield Document(lines.path, paragraphs)


def split_paragraphs(text: str) -> list[str]:
    """The blocks between blank lines, divided after a sentence, or else a word, where longer than
    `MAX_DOCUMENT`.
    """
    blocks = re.split(r"\n\s*\n", "\n".join(text.splitlines()))
    return [part.strip() for block in blocks for part in divided(block) if part.strip()]


def divided(block: str) -> Iterator[str]:
    """The parts of `block`, of up to MAX_DOCUMENT characters; see `split_paragraphs`."""
    start = 0
    while len(block) - start > MAX_DOCUMENT:
        stop = start + MAX_DOCUMENT
        cut = stop
        for end in (". ", " "):  # of a sentence, else of a word
            position = block.rfind(end, start, stop)
            if position >= 0:
                cut = position + 1
                break
        yield block[start:cut]
        start = cut
    yield block[start:]
