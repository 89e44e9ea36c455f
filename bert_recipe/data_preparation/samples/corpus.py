"""Reads a text shard as token ids: one sentence per line, an empty line between documents.

Legend: T tokens of the shard, L its sentences (lines with tokens), D its documents.
"""

import gzip
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_recipe.tokenization.tokenizer import Tokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import is_hidden
from bert_recipe.utils.text_files import kind_of

TEXT_SUFFIXES = (".txt", ".txt.gz")
READ_BLOCK = 1 << 17  # bytes of text tokenized at a time


@dataclass(frozen=True)
class Corpus:
    """Token ids with sentence and document boundaries; no sentence and no document is empty."""

    ids: np.ndarray  # [T]
    sentence_starts: np.ndarray  # [L + 1], in tokens; the last is T
    document_starts: np.ndarray  # [D + 1], in sentences; the last is L


def find_text(path: Path) -> list[Path]:
    """The text shards that `path` names: the file itself, or the .txt and .txt.gz files in the
    folder, by name.
    """
    if path.is_file():
        if not path.name.endswith(TEXT_SUFFIXES) and any(kind_of(path.name)):
            raise UserError(
                f"input {path} is not plain text: run data/prepare.py format corpus on it first"
            )
        paths = [path]
    else:
        paths = sorted(
            file
            for file in path.iterdir()
            if file.name.endswith(TEXT_SUFFIXES) and file.is_file() and not is_hidden(file)
        )
        if not paths:
            suffixes = " or ".join(f"*{suffix}" for suffix in TEXT_SUFFIXES)
            raise UserError(f"input folder {path} contains no {suffixes} file: check --input-dir")
    return paths


def read_blocks(path: Path) -> Iterator[bytes]:
    """The lines of `path`, in blocks of about `READ_BLOCK` bytes, without a byte order mark."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            if file.read(len(BOM_UTF8)) != BOM_UTF8:
                file.seek(0)
            while lines := file.readlines(READ_BLOCK):
                yield b"".join(lines)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"text {path} is damaged or truncated ({error}): make or download it again"
        ) from error


def read_corpus(path: Path, tokenizer: Tokenizer) -> Corpus:
    """The tokens of the text in `path`. Raises UserError if it is not UTF-8 or contains no word."""
    ids, line_lengths, blank_lines = [], [], []
    lines_read, continues_document = 0, False
    for block in read_blocks(path):
        block = block.removesuffix(b"\n")
        if (position := block.find(b"\0")) >= 0:
            line = lines_read + block.count(b"\n", 0, position) + 1
            raise UserError(
                f"text {path}, line {line}: NUL bytes: this is not UTF-8 text; convert or remove it"
            )
        if continues_document:
            block = b" " + block  # see HuggingFaceTokenizer.encode_lines
        try:
            block_ids, offsets = tokenizer.encode_lines(block)
        except UnicodeDecodeError as error:
            line = lines_read + block.count(b"\n", 0, error.start) + 1
            raise UserError(
                f"text {path}, line {line}: not UTF-8: convert the file to UTF-8"
            ) from error
        ids.append(block_ids.astype(id_dtype(tokenizer.vocab_size)))
        line_lengths.append(np.diff(offsets))
        blank_lines.append(find_blank_lines(block, line_lengths[-1]))
        lines_read += len(line_lengths[-1])
        continues_document = not blank_lines[-1][-1]
    if not any(map(len, ids)):
        raise UserError(f"text {path} contains no word: remove the file or fill it")
    lengths = np.concatenate(line_lengths)
    is_sentence = lengths > 0
    document_of_L = np.cumsum(np.concatenate(blank_lines))[is_sentence]
    new_documents = np.flatnonzero(np.diff(document_of_L)) + 1
    return Corpus(
        ids=np.concatenate(ids),
        sentence_starts=np.concatenate([[0], np.cumsum(lengths[is_sentence])]),
        document_starts=np.concatenate([[0], new_documents, [len(document_of_L)]]),
    )


def find_blank_lines(block: bytes, lengths: np.ndarray) -> np.ndarray:
    """Which lines of `block` are empty or only white space. `lengths`: tokens per line."""
    blank = lengths == 0
    lines = block.split(b"\n")
    for line in np.flatnonzero(blank):
        # A line without tokens need not be blank: it may contain a zero-width space.
        blank[line] = not lines[line] or lines[line].decode("utf-8").isspace()
    return blank


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integer type that can hold every id, but at least 16 bits."""
    return np.min_scalar_type(vocab_size - 1) if vocab_size > 256 else np.dtype(np.uint16)
