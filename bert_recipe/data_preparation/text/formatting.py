"""Writes any source as text with one sentence or passage per line and an empty line between
documents.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from bert_recipe.data_preparation.options import FormatOptions
from bert_recipe.data_preparation.sources.books import clean_book
from bert_recipe.data_preparation.sources.documents import (
    MAX_DOCUMENT,
    Document,
    read_documents,
    read_text,
)
from bert_recipe.data_preparation.sources.spans import Span, SpanFile
from bert_recipe.data_preparation.text.sentences import (
    PARAMETERS_FOLDER,
    SentenceSplitter,
    Splitter,
    load_punkt,
    save_punkt,
    split_lines,
)
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.text_files import MAX_LINE, OnBad, kind_of
from bert_recipe.utils.words import join_lines

# characters for the parameters of the splitter: half a minute, 1 GB of memory
MAX_TRAINING_TEXT = 10_000_000
MIN_PASSAGE = 200  # characters
COUNTS = ("documents", "sentences", "words", "without_text")


def format_span(
    output: Path,
    dataset: str,
    span: Span,
    options: FormatOptions,
    parameters: Path | None,
) -> dict[str, Any]:
    """Writes the documents of `span` to `output`. Returns counts, and the bad documents as [where,
    why] (`options.skip_bad`; else the first one is an error).
    """
    split = get_splitter(options.sentence_splitter, options.language, parameters)
    counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    bad: list[tuple[str, str]] = []

    def on_bad(where: str, why: str) -> None:
        if not options.skip_bad:
            raise UserError(f"{where}: {why}; or leave out bad documents with --skip-bad")
        bad.append((where, why))

    with output.open("wb") as file:
        for document in read_source(dataset, span, options, on_bad):
            sentences = list(chain.from_iterable(map(split, document.paragraphs)))
            if options.sentence_splitter == "passage":
                sentences = passages(sentences)
            if not sentences:
                counts["without_text"] += 1
            for lines in bounded(sentences):
                if counts["documents"]:
                    file.write(b"\n")  # an empty line between documents
                file.write("".join(f"{line}\n" for line in lines).encode())
                counts["documents"] += 1
                counts["sentences"] += len(lines)
                counts["words"] += sum(line.count(" ") + 1 for line in lines)
    return counts | {"bad": bad}


@lru_cache(1)
def get_splitter(
    name: str = "fast", language: str = "english", parameters: Path | None = None
) -> Splitter:
    """The splitter `name` of options.SPLITTERS, with `parameters`, else those of `language`."""
    if name == "newline":
        return split_lines
    return SentenceSplitter(load_punkt(parameters or PARAMETERS_FOLDER / f"{language}.json")).split


def passages(sentences: Sequence[str]) -> list[str]:
    """Neighbouring sentences joined to at least `MIN_PASSAGE` characters; the rest belongs to the
    last passage.
    """
    joined: list[str] = []
    for sentence in sentences:
        if joined and len(joined[-1]) < MIN_PASSAGE:
            joined[-1] = join_lines(f"{joined[-1]}\n{sentence}")
        else:
            joined.append(sentence)
    if len(joined) > 1 and len(joined[-1]) < MIN_PASSAGE:
        rest = joined.pop()
        joined[-1] = join_lines(f"{joined[-1]}\n{rest}")
    return joined


def bounded(sentences: Sequence[str]) -> Iterator[Sequence[str]]:
    """`sentences` in parts of about `MAX_DOCUMENT` characters."""
    start = size = 0
    for index, sentence in enumerate(sentences):
        size += len(sentence)
        if size >= MAX_DOCUMENT or index + 1 == len(sentences):
            yield sentences[start : index + 1]
            start = index + 1
            size = 0


def read_source(
    dataset: str, span: Span, options: FormatOptions, on_bad: OnBad
) -> Iterator[Document]:
    """dataset: `wikicorpus`, `books` or `corpus`."""
    if dataset == "wikicorpus":
        from bert_recipe.data_preparation.sources.wikipedia import read_dump

        yield from read_dump(span, on_bad)
        return
    documents: Iterable[Document]
    if dataset == "books" and kind_of(span.path)[0] == ".txt":  # the whole file is one
        documents = read_text(SpanFile(span, on_bad), MAX_LINE)
    else:
        documents = read_documents(span, options.text_field, on_bad, options.empty_line)
    if dataset != "books":
        yield from documents
        return
    for book in documents:
        chapters = list(clean_book("\n\n".join(book.paragraphs), book.name))
        if chapters:
            yield from chapters
        else:
            yield Document(span.path, [])  # counted as a document without text


def train_parameters(
    output: Path, dataset: str, spans: Sequence[Span], options: FormatOptions
) -> dict[str, Any]:
    """Trains the sentence splitter's parameters on equal amounts of text of `spans`."""

    def paragraphs(span: Span) -> Iterator[str]:
        left = MAX_TRAINING_TEXT // len(spans)
        for document in read_source(dataset, span, options, lambda where, why: None):
            for paragraph in document.paragraphs:
                if left > 0:
                    yield paragraph
                    left -= len(paragraph)
            if left <= 0:
                return

    from bert_recipe.data_preparation.text.nltk_sentences import train_punkt

    params = train_punkt(chain.from_iterable(map(paragraphs, spans)))
    save_punkt(params, output, f"trained on the corpus for {options.language}")
    return {}
