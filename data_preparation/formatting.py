"""Formats any source as text with one sentence per line and an empty line between documents.

This process reads the documents in order, and workers split batches of them into sentences (and clean books). Results
are written in the order of the input, so the number of workers does not change the output.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from data_preparation.books import clean_book
from data_preparation.documents import Document, read_documents, read_lines
from data_preparation.options import FormatOptions
from data_preparation.parallel import ordered_map
from data_preparation.sentences import PARAMETERS_FOLDER, Splitter, get_splitter, save_punkt, train_punkt
from utils.errors import UserError

BATCH = 1 << 18  # characters sent to a worker at a time
PART_BYTES = 256 << 20  # approximate size of the files of formatted text
# Bytes of formatted text per byte of file, roughly; 1 for other files. Used for progress bars.
TEXT_PER_BYTE = {".bz2": 0.7, ".gz": 2.7, ".parquet": 1.7}


class Formatted(NamedTuple):
    """Formatted documents, and the bad ones as (where, why)."""

    text: bytes = b""
    documents: int = 0
    sentences: int = 0
    words: int = 0
    without_text: int = 0
    bad: tuple[tuple[str, str], ...] = ()


class BadDocuments:
    """Called for every bad document: raises an error, or with `skip` counts and logs it."""

    def __init__(self, log: Path, skip: bool):
        self.log, self.skip, self.count = log, skip, 0

    def __call__(self, where: str, why: str) -> None:
        if not self.skip:
            raise UserError(f"{where}: {why}; or leave out bad documents with --skip-bad")
        self.count += 1
        with self.log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{where}: {why}\n")

    def reset(self) -> None:
        self.count = 0
        self.log.unlink(missing_ok=True)


def format_text(
    dataset: str,
    paths: Sequence[Path],
    folder: Path,
    options: FormatOptions,
    workers: int,
    progress: Callable[[int], Any],
) -> dict[str, int]:
    """Formats the documents of `paths` as `part-*.txt` in `folder` and returns counts.

    progress: called with the number of bytes of text written. Also writes `skipped.log` if bad documents were skipped,
    and the sentence parameters if it trained them.
    """
    on_bad = BadDocuments(folder / "skipped.log", options.skip_bad)
    parameters = options.sentence_parameters or find_parameters(dataset, paths, folder, options, workers, on_bad)
    splitter_arguments = (options.sentence_splitter, options.language, parameters)
    if dataset == "books":
        results = ordered_map(partial(format_book, options=options), paths, workers, set_splitter, splitter_arguments)
    else:
        documents = read_source(dataset, paths, options, workers, on_bad)
        results = ordered_map(format_documents, batches(documents), workers, set_splitter, splitter_arguments)
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


def expected_text_bytes(paths: Sequence[Path]) -> float:
    """Approximate size of the formatted text of these files."""
    return sum(path.stat().st_size * TEXT_PER_BYTE.get(path.suffix.lower(), 1.0) for path in paths)


def read_source(
    dataset: str, paths: Sequence[Path], options: FormatOptions, workers: int, on_bad: Callable[[str, str], Any]
) -> Iterator[Document]:
    if dataset == "wikicorpus":
        from data_preparation.wikipedia import extract

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
    """Trains the parameters of the splitter on the corpus if none ship for its language."""
    if options.sentence_splitter == "newline" or (PARAMETERS_FOLDER / f"{options.language}.json").is_file():
        return None
    path = folder / f"sentences-{options.language}.json"
    print(f"format: no sentence parameters ship for {options.language}: training them on the corpus", flush=True)
    documents = read_source("corpus" if dataset == "books" else dataset, paths, options, workers, on_bad)
    params = train_punkt(chain.from_iterable(document.paragraphs for document in documents))
    on_bad.reset()  # formatting will find the same documents again
    save_punkt(params, path, f"trained on the corpus for {options.language}")
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


_splitter: Splitter  # of this worker process


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
    """A .txt file is one book; other files have one book per record."""
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
    """Writes formatted text to files of about `PART_BYTES`: whole documents with an empty line between them."""

    def __init__(self, folder: Path):
        self.folder, self.file, self.count = folder, None, 0

    def write(self, text: bytes) -> None:
        """text: documents, each followed by an empty line."""
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
