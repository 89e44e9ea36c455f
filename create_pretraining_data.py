"""Text shards to HDF5 shards of pre-training samples: `docs/data_creation_speed.md` says how fast, and why.

Input: one sentence a line, an empty line between documents. Output: one file for each text shard, with NVIDIA's six
keys (see pretraining_dataset.py) and the options as attributes. A shard depends on its text, its file name, the
options and the seed: not on other shards or the number of workers. It is written under another name and renamed when
it is whole, so a run that was killed is rerun with the same command and makes only what is missing.

The algorithm is Google's (`create_samples` in benchmarks/data_creation.py is its readable form, and the tests hold this
module to it). It is vectorized by two observations. A sample is fully described by where its two segments lie in the
shard's tokens, so sentences are never copied until the last gather. And since the samples of a pass start at ever later
sentences, random numbers can be drawn for each sentence instead of each sample: the sample that would start there is
worked out for all sentences at once, and following "where the next one starts" picks those that do.

Legend: T tokens of the shard, L its sentences, D its documents, n samples, S sequence length, P predictions a sequence.
"""

import gzip
import hashlib
import io
import os
import shutil
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import h5py
import numpy as np
from tqdm import tqdm

from data.parallel import ordered_map
from tokenizer import BertTokenizer
from utils.command_line import ArgumentParser, Arguments, BooleanFlag, fraction, non_negative_int, positive_int
from utils.errors import UserError, run_main
from utils.progress import progress_bar

SCHEMA_VERSION = 2  # counts changes of the format, and of what the same options draw
TEMPORARY_SUFFIX = ".tmp"
TEXT_SUFFIXES = (".txt", ".txt.gz")
READ_BLOCK = 1 << 17  # bytes of text tokenized at a time: a word repeated in the block that first has it costs more
WRITE_BLOCK = 4096  # samples built at a time: few calls of HDF5, and most of what is worked on stays in the cache
NO_LABEL = -1  # next_sentence_labels where there is no next-sentence prediction

# Where the segments of a sample lie in the shard's tokens.
SAMPLE = np.dtype([("a_start", "i8"), ("a_length", "i4"), ("b_start", "i8"), ("b_length", "i4"), ("label", "i1")])


@dataclass(frozen=True)
class SampleOptions:
    """What decides the samples, besides text and vocabulary. Every field is an attribute of the shards."""

    sequence_length: int = 128
    predictions_per_sequence: int = 20
    masked_lm_prob: float = 0.15
    short_seq_prob: float = 0.1
    dupe_factor: int = 5
    random_seed: int = 12345
    whole_word_mask: bool = False
    next_sentence_prediction: bool = True
    compression: str = "none"

    def __post_init__(self):
        if self.sequence_length < self.special_tokens + 2:
            raise UserError(
                f"--max-seq-length {self.sequence_length} leaves no room for text beside {self.special_tokens} "
                f"special tokens: use {self.special_tokens + 2} or more"
            )
        if not 1 <= self.predictions_per_sequence <= self.sequence_length - self.special_tokens:
            raise UserError(
                f"--max-predictions-per-seq {self.predictions_per_sequence} does not fit --max-seq-length "
                f"{self.sequence_length}: use 1 to {self.sequence_length - self.special_tokens}"
            )

    @property
    def special_tokens(self) -> int:
        """[CLS] A [SEP] B [SEP], or [CLS] A [SEP] without next-sentence prediction."""
        return 3 if self.next_sentence_prediction else 2


@dataclass(frozen=True)
class Corpus:
    """A shard's tokens, and where its sentences and documents begin; no sentence and no document is empty."""

    ids: np.ndarray  # [T]
    sentence_starts: np.ndarray  # [L + 1], the last is T
    document_starts: np.ndarray  # [D + 1] sentences, the last is L


@dataclass
class ShardReport:
    """What became of one text shard; the sums of these are printed at the end of a run."""

    path: Path
    text_bytes: int
    made: bool = False  # False: it was there already, from the same text and options
    counts: Counter = field(default_factory=Counter)
    seconds: Counter = field(default_factory=Counter)
    warning: str = ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


# Text to tokens.


def read_blocks(path: Path) -> Iterator[bytes]:
    """The content of `path` in blocks that end after a line; a line longer than a block is cut after a space."""
    rest: list[bytes] = []
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while block := file.read(READ_BLOCK):
                cut = block.rfind(b"\n") + 1 or block.rfind(b" ") + 1
                if cut:
                    yield b"".join([*rest, block[:cut]])
                    rest.clear()
                rest.append(block[cut:])
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"text {path} is damaged or cut off ({error}): make or fetch it again") from error
    if any(rest):
        yield b"".join(rest)


def read_corpus(path: Path, tokenizer: BertTokenizer) -> Corpus:
    """The tokens of the text in `path`. Raises UserError if it is not UTF-8 or holds no word."""
    ids, line_lengths, blank_lines = [], [], []
    lines_read, line_goes_on = 0, False
    for block in read_blocks(path):
        try:
            block_ids, offsets = tokenizer.encode_lines(block)
        except UnicodeDecodeError as error:
            line = lines_read + block.count(b"\n", 0, error.start) + 1
            raise UserError(f"text {path}, line {line}: not UTF-8: convert the file to UTF-8") from error
        lines_read += len(offsets) - 2
        lengths = np.diff(offsets)
        blank = is_blank(block, lengths)
        if line_goes_on:
            line_lengths[-1][-1] += lengths[0]
            blank_lines[-1][-1] &= blank[0]
            lengths, blank = lengths[1:], blank[1:]
        # After a whole line split() leaves an empty string, which the next block's first line completes.
        line_goes_on = True
        ids.append(block_ids.astype(id_type(tokenizer.vocab_size)))
        if len(lengths):
            line_lengths.append(lengths)
            blank_lines.append(blank)
    lengths = np.concatenate(line_lengths) if line_lengths else np.zeros(0, np.int64)
    is_sentence = lengths > 0
    if not is_sentence.any():
        raise UserError(f"text {path} holds no word: remove the file or fill it")
    document_of_L = np.cumsum(np.concatenate(blank_lines))[is_sentence]
    new_documents = np.flatnonzero(np.diff(document_of_L)) + 1
    return Corpus(
        ids=np.concatenate(ids),
        sentence_starts=np.concatenate([[0], np.cumsum(lengths[is_sentence])]),
        document_starts=np.concatenate([[0], new_documents, [len(document_of_L)]]),
    )


def is_blank(block: bytes, lengths: np.ndarray) -> np.ndarray:
    """Which of the lines of `block`, of `lengths` tokens [L], are empty or hold nothing but white space."""
    blank = lengths == 0
    lines = block.split(b"\n")
    for line in np.flatnonzero(blank):
        # Not each line without tokens is blank: it may hold a zero-width space.
        blank[line] = not lines[line] or lines[line].decode("utf-8").isspace()
    return blank


def id_type(vocab_size: int) -> np.dtype:
    """The smallest unsigned integer that holds every id."""
    return np.min_scalar_type(vocab_size - 1) if vocab_size > 256 else np.dtype(np.uint16)


# Tokens to samples.


def plan_pass(corpus: Corpus, options: SampleOptions, rng: np.random.Generator) -> np.ndarray:
    """The samples of one pass over the corpus, in its order and not yet truncated [n] SAMPLE.

    As many whole sentences as reach the target length make a chunk, which ends with its document at the latest. The
    first U[1, sentences - 1] of them are A. B is the rest of the chunk; or, half of the time and where the chunk has
    one sentence only, sentences of another document from a random one on until the target is reached, and the next
    chunk begins with the unused rest. Without next-sentence prediction A is the whole chunk.

    A corpus of one document has no other document to draw from: all its samples have the real next, and chunks of
    one sentence make none.
    """
    starts, documents = corpus.sentence_starts, corpus.document_starts
    sentences_D = np.diff(documents)
    document_of_L = np.repeat(np.arange(len(sentences_D)), sentences_D)

    longest = options.sequence_length - options.special_tokens
    is_short_D = rng.random(len(sentences_D)) < options.short_seq_prob
    target_D = np.where(is_short_D, rng.integers(2, longest, len(sentences_D), endpoint=True), longest)

    # The chunk that would begin with each sentence.
    begin_L = np.arange(len(document_of_L))
    end_L = np.searchsorted(starts, starts[:-1] + target_D[document_of_L])
    end_L = np.minimum(end_L, documents[document_of_L + 1])
    if not options.next_sentence_prediction:
        chosen = follow(end_L)
        samples = np.zeros(len(chosen), SAMPLE)
        samples["a_start"], samples["label"] = starts[chosen], NO_LABEL
        samples["a_length"] = starts[end_L[chosen]] - starts[chosen]
        return samples

    sentences_L = end_L - begin_L
    a_end_L = begin_L + 1 + (rng.random(len(begin_L)) * (sentences_L - 1)).astype(np.int64)
    if len(sentences_D) > 1:
        is_random_L = (sentences_L == 1) | (rng.random(len(begin_L)) < 0.5)
        chosen = follow(np.where(is_random_L, a_end_L, end_L))
    else:
        is_random_L = np.zeros(len(begin_L), bool)
        chosen = follow(end_L)
        chosen = chosen[sentences_L[chosen] > 1]

    samples = np.zeros(len(chosen), SAMPLE)
    samples["label"] = is_random = is_random_L[chosen]
    samples["a_start"] = starts[chosen]
    samples["a_length"] = starts[a_end_L[chosen]] - starts[chosen]
    b_begin, b_end = a_end_L[chosen], end_L[chosen]
    if is_random.any():
        document = document_of_L[chosen[is_random]]
        other = rng.integers(0, len(sentences_D) - 1, len(document))
        other += other >= document
        begin = documents[other] + (rng.random(len(other)) * sentences_D[other]).astype(np.int64)
        wanted = np.maximum(target_D[document] - samples["a_length"][is_random], 1)
        b_begin[is_random] = begin
        b_end[is_random] = np.minimum(np.searchsorted(starts, starts[begin] + wanted), documents[other + 1])
    samples["b_start"] = starts[b_begin]
    samples["b_length"] = starts[b_end] - starts[b_begin]
    return samples


def follow(next_L: np.ndarray) -> np.ndarray:
    """0, next_L[0], next_L[next_L[0]] and so on while it is below len(next_L)."""
    next_one, here, visited = next_L.tolist(), 0, []
    while here < len(next_one):
        visited.append(here)
        here = next_one[here]
    return np.array(visited)


def truncate(samples: np.ndarray, options: SampleOptions, rng: np.random.Generator) -> int:
    """Shortens `samples` in place to the sequence length and returns the number of tokens that this costs.

    Google takes one token after another off the longer segment (off B when they are equal), each from its front or its
    back with probability 1/2: that is, first the difference, then from both in turn, beginning with B; and of the cut
    tokens a binomial number come off the front."""
    excess = samples["a_length"] + samples["b_length"] - (options.sequence_length - options.special_tokens)
    excess = np.maximum(excess, 0)
    difference = samples["a_length"] - samples["b_length"]
    until_equal = np.minimum(excess, np.abs(difference))
    in_turn = excess - until_equal
    for side, own_part, in_turn_part in (
        ("a", difference > 0, in_turn // 2),
        ("b", difference <= 0, in_turn - in_turn // 2),
    ):
        cut = np.where(own_part, until_equal, 0) + in_turn_part
        samples[f"{side}_start"] += rng.binomial(cut, 0.5)
        samples[f"{side}_length"] -= cut
    return int(excess.sum())


def assemble(
    windows: np.ndarray, samples: np.ndarray, options: SampleOptions, tokenizer: BertTokenizer
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """input_ids [n, S] with nothing masked, input_mask and segment_ids [n, S] of `samples`; `windows` [T + S + 1, S]
    are the S tokens from each one on, from S before the shard's first."""
    column = np.arange(options.sequence_length, dtype=np.int32)
    second = samples["a_length"][:, None] + 2  # B's first column; [SEP] stands before it
    last = second + samples["b_length"][:, None]
    if not options.next_sentence_prediction:
        last -= 1
    in_b = column >= second
    input_mask = column <= last
    # The windows that have A, and B, at its columns: whole rows are copied many times faster than single tokens.
    input_ids = windows[samples["a_start"] - 1 + options.sequence_length]
    np.copyto(input_ids, windows[samples["b_start"] - second[:, 0] + options.sequence_length], where=in_b)
    np.putmask(input_ids, ~input_mask, tokenizer.pad_token_id)
    input_ids[:, 0] = tokenizer.cls_token_id
    np.put_along_axis(input_ids, second - 1, tokenizer.sep_token_id, axis=1)
    np.put_along_axis(input_ids, last, tokenizer.sep_token_id, axis=1)
    return input_ids, input_mask.view(np.int8), (in_b & input_mask).view(np.int8)


def choose_positions(
    input_ids: np.ndarray,
    samples: np.ndarray,
    options: SampleOptions,
    continues_word: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of each row to predict: positions [n, P], ascending, zero-padded, and how many are real [n].

    min(P, max(1, round(prob * length))) of the tokens that are not special, all sets being equally likely. With
    whole-word masking, words in a random order as long as they fit; `continues_word` [V] tells the ids that begin with
    "##", and a segment begins with a word of its own."""
    rows, length = input_ids.shape
    column = np.arange(length, dtype=np.int32)
    second = samples["a_length"][:, None] + 2
    text_length = samples["a_length"] + samples["b_length"]
    is_text = (column > 0) & (column < second + samples["b_length"][:, None]) & (column != second - 1)
    wanted = np.rint(options.masked_lm_prob * (text_length + options.special_tokens)).astype(np.int64)
    wanted = np.minimum(np.clip(wanted, 1, options.predictions_per_sequence), text_length)

    # Random numbers with the column in their low bits: sorting them shuffles the columns, those left out come last.
    low_bits = np.uint32((1 << (length - 1).bit_length()) - 1)
    left_out = ~low_bits | column.astype(np.uint32)
    keys = rng.integers(0, 1 << 64, (rows, (length + 1) // 2), np.uint64).view(np.uint32)[:, :length]  # two at a time
    keys |= low_bits
    keys &= left_out
    if options.whole_word_mask:
        begins_word = ~continues_word[input_ids] | (column == 1) | (column == second)
        begins_word &= is_text
        order = np.sort(np.where(begins_word, keys, left_out), axis=1) & low_bits
        is_text = choose_words(order, begins_word, is_text, wanted)
        wanted = is_text.sum(axis=1)
    np.copyto(keys, left_out, where=~is_text)
    keys.sort(axis=1)
    positions = (keys[:, : options.predictions_per_sequence] & low_bits).astype(np.uint16)
    is_real = np.arange(options.predictions_per_sequence) < wanted[:, None]
    positions[~is_real] = length
    positions.sort(axis=1)
    positions[~is_real] = 0
    return positions, wanted


def choose_words(order: np.ndarray, begins_word: np.ndarray, is_text: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The tokens [n, S] of the words that fit into `wanted` tokens [n], tried in `order`: the columns [n, S] where
    words begin, shuffled, and then the other columns."""
    rows, length = order.shape
    word_of_column = np.maximum.accumulate(np.where(begins_word, np.arange(length), 0), axis=1)
    word_of_token = (word_of_column + np.arange(rows)[:, None] * length)[is_text]
    sizes = np.bincount(word_of_token, minlength=rows * length).reshape(rows, length)
    sizes = np.take_along_axis(sizes, order, axis=1)
    fits = np.zeros((rows, length), bool)
    left = wanted.copy()
    for place in range(begins_word.sum(axis=1).max()):
        fits[:, place] = sizes[:, place] <= left
        left -= sizes[:, place] * fits[:, place]
    is_chosen = np.zeros_like(fits)
    np.put_along_axis(is_chosen, order, fits, axis=1)
    return np.take_along_axis(is_chosen, word_of_column, axis=1) & is_text


def mask_tokens(
    input_ids: np.ndarray,
    positions: np.ndarray,
    predictions: np.ndarray,
    tokenizer: BertTokenizer,
    rng: np.random.Generator,
) -> np.ndarray:
    """Hides the tokens at `positions` [n, P] of `input_ids` in place and returns what stood there [n, P], zero-padded:
    80% become [MASK], 10% a random id of the whole vocabulary, 10% stay. `predictions` [n] are real in each row."""
    places = positions + np.arange(0, input_ids.size, input_ids.shape[1])[:, None]  # counted through all rows
    originals = input_ids.take(places)
    how = rng.random(positions.shape, np.float32)
    random_ids = rng.integers(0, tokenizer.vocab_size, positions.shape, np.uint32).astype(input_ids.dtype)
    hidden = np.where(how < 0.8, input_ids.dtype.type(tokenizer.mask_token_id), random_ids)
    is_real = np.arange(positions.shape[1]) < predictions[:, None]
    # The padding positions are 0, where [CLS] stands and has to stay.
    input_ids.put(places, np.where((how < 0.9) & is_real, hidden, originals))
    originals[~is_real] = 0
    return originals


# Samples to a shard.


def shard_attributes(text_path: Path, tokenizer: BertTokenizer, options: SampleOptions) -> dict:
    """All that decides a shard's content: two shards with the same attributes and file name are the same."""
    with text_path.open("rb") as file:
        input_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return asdict(options) | {
        "schema_version": SCHEMA_VERSION,
        "vocab_sha256": tokenizer.vocab_sha256,
        "vocab_size": tokenizer.vocab_size,
        "do_lower_case": tokenizer.do_lower_case,
        "input_sha256": input_sha256,
    }


def is_made(path: Path, attributes: dict) -> bool:
    """Whether the shard at `path` is there with these attributes. Raises UserError for a shard with others."""
    if not path.exists():
        return False
    try:
        with h5py.File(path) as file:
            found = {name: file.attrs.get(name) for name in attributes}
    except OSError as error:
        raise UserError(f"{path} is no readable HDF5 file ({error}): delete it or use --overwrite") from error
    for name, value in attributes.items():
        if found[name] != value:
            raise UserError(
                f"{path} was made with {name} {found[name]}, not {value}: "
                "choose another --output-dir, or use --overwrite to make it again"
            )
    return True


class ShardFile(io.FileIO):
    """The file below HDF5, which cannot give up on one that it fails to write (it fails again at each later close, and
    prints pages about it): the first failure is kept in `error` for the caller, and what follows is not written."""

    error: OSError | None = None

    def write(self, data) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and not self.error:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        return super().truncate(size) if not self.error else size or 0

    def raise_failure(self) -> None:
        if self.error:
            raise OSError(self.error.errno, self.error.strerror, str(self.name).removesuffix(TEMPORARY_SUFFIX))


@contextmanager
def new_shard(path: Path) -> Iterator[tuple[h5py.File, ShardFile]]:
    """An HDF5 file that appears at `path` when all of it is on disk, and not at all after an error."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with ShardFile(temporary, "w+") as disk:
            # One format version, no time stamps (h5py's default): the same samples are the same bytes. Aligned: a
            # reader may map the data sets as arrays.
            with h5py.File(
                disk, "w", libver=("earliest", "v110"), alignment_threshold=64, alignment_interval=64
            ) as file:
                yield file, disk
            disk.raise_failure()
            os.fsync(disk.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def create_shard(
    text_path: Path, output_path: Path, tokenizer: BertTokenizer, options: SampleOptions, overwrite: bool = False
) -> ShardReport:
    """Makes the HDF5 shard `output_path` of the text in `text_path`, unless it is there already.

    Raises UserError if there is one of other options or another text and not `overwrite`, or if the text is bad."""
    report = ShardReport(text_path, text_path.stat().st_size)
    attributes = shard_attributes(text_path, tokenizer, options)
    if not overwrite and is_made(output_path, attributes):
        return report
    # The file's name makes the random numbers of each shard its own, whichever others there are.
    name_seed = int.from_bytes(hashlib.sha256(output_path.name.encode()).digest()[:8])
    rng = np.random.Generator(np.random.PCG64([options.random_seed, name_seed]))

    with report.stage("read and tokenize"):
        corpus = read_corpus(text_path, tokenizer)
    with report.stage("plan"):
        samples = np.concatenate([plan_pass(corpus, options, rng) for _ in range(options.dupe_factor)])
        untruncated = int(samples["a_length"].sum() + samples["b_length"].sum())
        truncated = truncate(samples, options, rng)
        rng.shuffle(samples)
    if not len(samples):
        raise UserError(
            f"text {text_path} makes no sample: it is one document of one sentence, and a next sentence needs two; "
            "put an empty line between documents, or use --no-nsp"
        )
    report.counts.update(
        documents=len(corpus.document_starts) - 1,
        sentences=len(corpus.sentence_starts) - 1,
        tokens=len(corpus.ids),
        samples=len(samples),
        untruncated=untruncated,
        truncated=truncated,
    )
    if options.next_sentence_prediction and len(corpus.document_starts) == 2:
        report.warning = (
            f"{text_path} is one document, so all its samples have their real next sentence (label 0): "
            "put an empty line between documents, or use --no-nsp"
        )
    write_samples(output_path, attributes, corpus, samples, options, tokenizer, rng, report)
    report.made = True
    return report


def write_samples(
    output_path: Path,
    attributes: dict,
    corpus: Corpus,
    samples: np.ndarray,
    options: SampleOptions,
    tokenizer: BertTokenizer,
    rng: np.random.Generator,
    report: ShardReport,
) -> None:
    """Builds, masks and writes `samples` block by block."""
    rows, length, predictions = len(samples), options.sequence_length, options.predictions_per_sequence
    layout = {
        "input_ids": ((rows, length), corpus.ids.dtype),
        "input_mask": ((rows, length), np.int8),
        "segment_ids": ((rows, length), np.int8),
        "masked_lm_positions": ((rows, predictions), np.min_scalar_type(length - 1)),
        "masked_lm_ids": ((rows, predictions), corpus.ids.dtype),
        "next_sentence_labels": ((rows,), np.int8),
    }
    size = sum(np.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout.values())
    free = shutil.disk_usage(output_path.parent).free
    if options.compression == "none" and size > free:
        raise UserError(f"{output_path} needs {size:,} bytes and the disk has {free:,} free: free some space")
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(corpus.ids, length), length)
    continues_word = np.array([token.startswith("##") for token in tokenizer.tokens])
    with new_shard(output_path) as (file, disk):
        file.attrs.update(attributes)
        datasets = []
        for name, (shape, dtype) in layout.items():
            storage = {}
            if options.compression == "gzip":
                storage = {"compression": "gzip", "shuffle": True, "chunks": (min(rows, 1024), *shape[1:])}
            datasets.append(file.create_dataset(name, shape, dtype, **storage))
        for begin in range(0, rows, WRITE_BLOCK):
            block = samples[begin : begin + WRITE_BLOCK]
            with report.stage("assemble"):
                input_ids, input_mask, segment_ids = assemble(windows, block, options, tokenizer)
            with report.stage("mask"):
                positions, predicted = choose_positions(input_ids, block, options, continues_word, rng)
                masked_ids = mask_tokens(input_ids, positions, predicted, tokenizer, rng)
            report.counts["masked"] += int(predicted.sum())
            report.counts["random_next"] += int((block["label"] == 1).sum())
            values = (input_ids, input_mask, segment_ids, positions, masked_ids, block["label"])
            with report.stage("write"):
                for dataset, value in zip(datasets, values, strict=True):
                    dataset[begin : begin + len(block)] = value
            disk.raise_failure()


# The command line.


def find_text(path: Path) -> list[Path]:
    """The text shards that `path` names: itself, or the .txt and .txt.gz files in it, in the order of their names."""
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        paths = sorted(file for file in path.iterdir() if file.name.endswith(TEXT_SUFFIXES) and file.is_file())
        if not paths:
            raise UserError(
                f"input folder {path} holds no {' or '.join('*' + suffix for suffix in TEXT_SUFFIXES)} file"
            )
    else:
        raise UserError(f"input {path} does not exist: check --input-file")
    for file in paths:
        if file.stat().st_size == 0:
            raise UserError(f"text {file} is empty: remove the file or fill it")
    return paths


def output_name(text_path: Path) -> str:
    return text_path.name.removesuffix(".gz").removesuffix(".txt") + ".hdf5"


# One tokenizer a process: what it has learnt about words serves all shards.
load_tokenizer = lru_cache(1)(BertTokenizer)


def create_shard_in_worker(
    paths: tuple[Path, Path], vocab_file: Path, do_lower_case: bool, options: SampleOptions, overwrite: bool
) -> ShardReport:
    return create_shard(*paths, load_tokenizer(vocab_file, do_lower_case), options, overwrite)


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description="Makes HDF5 shards of BERT pre-training samples from text shards.")
    add = parser.add_argument
    add(
        "--input-file",
        "--input-dir",
        dest="input_path",
        type=Path,
        required=True,
        help="text with one sentence a line and an empty line between documents: a file, or a folder of .txt, .txt.gz",
    )
    add("--output-dir", type=Path, required=True, help="folder for the shards, one .hdf5 for each text file")
    add("--vocab-file", type=Path, required=True, help="vocabulary, one token a line")
    add("--do-lower-case", action=BooleanFlag, default=True, help="lower-case and strip accents (uncased vocabulary)")
    add("--max-seq-length", type=positive_int, default=128, help="tokens a sample, special tokens included")
    add("--max-predictions-per-seq", type=positive_int, default=20, help="most masked tokens a sample")
    add("--masked-lm-prob", type=fraction, default=0.15, help="share of tokens to mask")
    add("--short-seq-prob", type=fraction, default=0.1, help="share of documents whose samples are made shorter")
    add("--dupe-factor", type=positive_int, default=5, help="passes over the text, each with other samples and masks")
    add("--random-seed", type=non_negative_int, default=12345, help="seed of all random choices")
    add("--whole-word-mask", action=BooleanFlag, help="mask all pieces of a word or none")
    add(
        "--nsp",
        action=BooleanFlag,
        default=True,
        help="next-sentence prediction; with --no-nsp a sample is one segment and its label -1",
    )
    add("--compression", choices=("none", "gzip"), default="none", help="gzip for archives; none can be mapped")
    add("--num-workers", type=positive_int, default=len(os.sched_getaffinity(0)), help="processes, a shard each")
    add("--overwrite", action=BooleanFlag, help="make again what was made from another text or with other options")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    options = SampleOptions(
        sequence_length=args.max_seq_length,
        predictions_per_sequence=args.max_predictions_per_seq,
        masked_lm_prob=args.masked_lm_prob,
        short_seq_prob=args.short_seq_prob,
        dupe_factor=args.dupe_factor,
        random_seed=args.random_seed,
        whole_word_mask=args.whole_word_mask,
        next_sentence_prediction=args.nsp,
        compression=args.compression,
    )
    load_tokenizer(args.vocab_file, args.do_lower_case)  # raises for a bad vocabulary before anything is made
    texts = find_text(args.input_path)
    names = Counter(map(output_name, texts))
    if len(names) < len(texts):
        raise UserError(f"two files in {args.input_path} would both make {names.most_common(1)[0][0]}: rename one")
    args.output_dir.mkdir(parents=True, exist_ok=True)

    start = time.perf_counter()
    create = partial(
        create_shard_in_worker,
        vocab_file=args.vocab_file,
        do_lower_case=args.do_lower_case,
        options=options,
        overwrite=args.overwrite,
    )
    paths = [(text, args.output_dir / output_name(text)) for text in texts]
    total = sum(text.stat().st_size for text in texts)
    reports = []
    with progress_bar(total, "samples") as bar:
        for report in ordered_map(create, paths, min(args.num_workers, len(paths))):
            reports.append(report)
            bar.update(report.text_bytes)
            if report.warning:
                tqdm.write(f"warning: {report.warning}", file=sys.stderr)
    print(summary(reports, options, time.perf_counter() - start), file=sys.stderr)


def summary(reports: list[ShardReport], options: SampleOptions, seconds: float) -> str:
    """What a run made, how fast, and what truncation and padding cost."""
    made = [report for report in reports if report.made]
    lines = [f"{len(made)} shards made, {len(reports) - len(made)} were complete already"]
    if made:
        counts = sum((report.counts for report in made), Counter())
        real = counts["untruncated"] - counts["truncated"] + options.special_tokens * counts["samples"]
        megabytes = sum(report.text_bytes for report in made) / 1e6
        lines += [
            f"{counts['documents']:,} documents, {counts['sentences']:,} sentences, {counts['tokens']:,} tokens "
            f"-> {counts['samples']:,} samples",
            f"{megabytes / seconds:.1f} MB/s of text, {counts['samples'] / seconds:,.0f} samples/s, {seconds:.1f} s",
            f"truncation drops {counts['truncated'] / counts['untruncated']:.1%} of the tokens; "
            f"samples are filled to {real / counts['samples'] / options.sequence_length:.1%}; "
            f"{counts['masked'] / real:.1%} of their tokens masked; "
            f"{counts['random_next'] / counts['samples']:.1%} with a random next",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
