"""Any source into formatted text: a sentence on each line, an empty line between documents.

Documents are read in order by this process and split into sentences by others, a batch at a time; books are also
cleaned there. What comes back is written in the order of the input, so that the number of workers changes nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from data.books import clean_book
from data.documents import Document, read_documents, read_lines
from data.parallel import ordered_map
from data.sentences import PARAMETERS_FOLDER, Splitter, get_splitter, save_punkt, train_punkt
from utils.errors import UserError

BATCH = 1 << 18  # characters that go to a worker at a time
PART_BYTES = 256 << 20  # formatted text goes into files of about this size


class FormatOptions(NamedTuple):
    sentence_splitter: str = "punkt"
    language: str = "english"
    sentence_parameters: str | None = None  # a file; None: shipped for the language, else trained on the corpus
    text_field: str = "text"
    empty_line: str = "paragraph"  # what an empty line in a .txt ends: a "paragraph" or a "document"


class Formatted(NamedTuple):
    """Documents ready to be written, with what is wrong with those that are not: (where, why)."""

    text: bytes = b""
    documents: int = 0
    sentences: int = 0
    words: int = 0
    without_text: int = 0
    bad: tuple[tuple[str, str], ...] = ()


class BadDocuments:
    """What happens to a bad document: an error, or with `skip` a line in the log and a place in the count."""

    def __init__(self, log: Path, skip: bool):
        self.log, self.skip, self.count = log, skip, 0

    def __call__(self, where: str, why: str) -> None:
        if not self.skip:
            raise UserError(f"{where}: {why}; or leave out what is bad with --skip-bad")
        self.count += 1
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{where}: {why}\n")

    def forget(self) -> None:
        self.count = 0
        self.log.unlink(missing_ok=True)


def format_text(
    dataset: str,
    paths: Sequence[Path],
    folder: Path,
    options: FormatOptions,
    workers: int,
    skip_bad: bool,
    progress: Callable[[int], Any],
) -> dict[str, int]:
    """Formats the documents of `paths` into `part-*.txt` in `folder` and returns what it counted.

    `progress` gets the bytes of text written. Also writes `skipped.log` where documents were bad and skipped, and
    the sentence parameters where it trained some.
    """
    on_bad = BadDocuments(folder / "skipped.log", skip_bad)
    parameters = options.sentence_parameters or find_parameters(dataset, paths, folder, options, workers, on_bad)
    set_up = (options.sentence_splitter, options.language, parameters)
    if dataset == "books":
        results = ordered_map(partial(format_book, options=options), paths, workers, set_splitter, set_up)
    else:
        documents = read_source(dataset, paths, options, workers, on_bad)
        results = ordered_map(format_documents, batches(documents), workers, set_splitter, set_up)
    counts = dict.fromkeys(("documents", "sentences", "words", "without_text"), 0)
    with PartWriter(folder) as writer:
        for result in results:
            for where, why in result.bad:
                on_bad(where, why)
            for name in counts:
                counts[name] += getattr(result, name)
            writer.write(result.text)
            progress(len(result.text))
    if counts["documents"] == 0:
        raise UserError(f"no document with text in {', '.join(map(str, paths[:3]))}: check the input")
    return counts | {"bad_skipped": on_bad.count}


def read_source(
    dataset: str, paths: Sequence[Path], options: FormatOptions, workers: int, on_bad: Callable[[str, str], Any]
) -> Iterator[Document]:
    if dataset == "wikicorpus":
        from data.wikipedia import extract

        return chain.from_iterable(extract(path, workers, on_bad=on_bad) for path in paths)
    return chain.from_iterable(read_documents(path, options.text_field, on_bad, options.empty_line) for path in paths)


def find_parameters(
    dataset: str,
    paths: Sequence[Path],
    folder: Path,
    options: FormatOptions,
    workers: int,
    on_bad: BadDocuments,
) -> Path | None:
    """Trains the splitter's parameters on the corpus itself where none ship for its language."""
    if options.sentence_splitter == "newline" or (PARAMETERS_FOLDER / f"{options.language}.json").is_file():
        return None
    path = folder / f"sentences-{options.language}.json"
    print(f"format: no sentence parameters ship for {options.language}: learning them from the corpus", flush=True)
    documents = read_source("corpus" if dataset == "books" else dataset, paths, options, workers, on_bad)
    params = train_punkt(chain.from_iterable(document.paragraphs for document in documents))
    on_bad.forget()  # the formatting itself meets and names the same documents
    save_punkt(params, path, f"learnt from the corpus for {options.language}")
    return path


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document.paragraphs))
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_splitter: Splitter  # of this process


def set_splitter(name: str, language: str, parameters: Path | None) -> None:
    global _splitter
    _splitter = get_splitter(name, language, parameters)


def format_documents(documents: Iterable[Document]) -> Formatted:
    texts, sentence_count, word_count, without_text = [], 0, 0, 0
    for document in documents:
        sentences = list(chain.from_iterable(map(_splitter.split, document.paragraphs)))
        if not sentences:
            without_text += 1
            continue
        text = "\n".join(sentences)
        texts.append(text)
        sentence_count += len(sentences)
        word_count += text.count(" ") + len(sentences)
    content = "".join(f"{text}\n\n" for text in texts).encode()
    return Formatted(content, len(texts), sentence_count, word_count, without_text)


def format_book(path: Path, options: FormatOptions) -> Formatted:
    """A .txt is one book; other files have one a record."""
    bad: list[tuple[str, str]] = []

    def on_bad(where: str, why: str) -> None:
        bad.append((where, why))

    if path.name.lower().endswith((".txt", ".txt.gz")):
        books = [(str(path), "".join(line for _, line in read_lines(path, on_bad)))]
    else:
        documents = read_documents(path, options.text_field, on_bad)
        books = ((document.name, "\n\n".join(document.paragraphs)) for document in documents)
    formatted = format_documents(chain.from_iterable(clean_book(text, name) for name, text in books))
    return formatted._replace(bad=tuple(bad), without_text=formatted.without_text + (formatted.documents == 0))


class PartWriter:
    """Formatted text into files of about `PART_BYTES`; documents whole, an empty line between them, none at an end."""

    def __init__(self, folder: Path):
        self.folder, self.file, self.count = folder, None, 0

    def write(self, text: bytes) -> None:
        """`text`: documents with an empty line after each."""
        if not text:
            return
        if self.file is None:
            self.file = (self.folder / f"part-{self.count:05d}.txt").open("wb")
            self.count += 1
        else:
            self.file.write(b"\n")
        self.file.write(text[:-1])
        if self.file.tell() >= PART_BYTES:
            self.close()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self.file = None

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
