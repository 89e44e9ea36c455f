"""The options of each stage with their defaults. A shard's or a stage's content depends on its inputs and these alone.

This module imports nothing heavy, so that `--help` and worker processes start quickly.
"""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from utils.command_line import ArgumentParser, Arguments, BooleanFlag, fraction, non_negative_int, positive_int
from utils.errors import UserError

SPLITTERS = ("fast", "punkt", "newline")
COMPRESSIONS = ("none", "gzip")
MAX_SEQUENCE_LENGTH = (1 << 16) - 1  # masking.py numbers positions in 16 bits, with one value for padding


@dataclass(frozen=True)
class FormatOptions:
    """How documents are read and split into sentences."""

    sentence_splitter: str = "fast"
    language: str = "english"
    sentence_parameters: Path | None = None  # None: the shipped file of the language, else trained on the corpus
    text_field: str = "text"
    empty_line: str = "paragraph"  # what an empty line in a .txt file ends: a "paragraph" or a "document"
    skip_bad: bool = False


@dataclass(frozen=True)
class TextShardOptions:
    """How formatted text is divided into shards and into training and test documents."""

    shard_mb: float = 100.0
    test_fraction: float = 0.05
    random_seed: int = 12345
    drop_duplicates: str = "none"  # or "equal", or "near" (see near_duplicates.py)
    weights: tuple[tuple[str, float], ...] = ()  # name of formatted text, copies of its training documents; else 1


@dataclass(frozen=True)
class VocabularyOptions:
    """What a WordPiece vocabulary consists of."""

    size: int = 30_522
    do_lower_case: bool = True
    alphabet: int = 1_000  # number of characters to keep, most frequent first; words with any other become [UNK]
    unused: int = 99  # [unused0]... for words added in fine-tuning; with 99, [UNK] has id 100 as in Google's files
    reserved: tuple[str, ...] = ()  # words that must be tokens
    sample_mb: int = 1_000  # MB of text to train on, spread evenly over the files


@dataclass(frozen=True)
class SampleOptions:
    """What decides the samples, besides text and vocabulary. Every field becomes an attribute of the HDF5 shards."""

    sequence_length: int = 128
    predictions_per_sequence: int = 20  # 0: without masks, which training draws
    masked_lm_prob: float = 0.15
    short_seq_prob: float = 0.1
    dupe_factor: int = 5
    random_seed: int = 12345
    whole_word_mask: bool = False
    next_sentence_prediction: bool = True
    compression: str = "none"
    pack_documents: bool = False

    def __post_init__(self):
        if self.pack_documents and self.next_sentence_prediction:
            raise UserError("--pack-documents joins documents without sentence pairs: add --no-nsp")
        shortest = self.special_tokens + 2  # two tokens of text
        if not shortest <= self.sequence_length <= MAX_SEQUENCE_LENGTH:
            raise UserError(
                f"sequence length {self.sequence_length} (--max-seq-length, --lengths): "
                f"use {shortest} to {MAX_SEQUENCE_LENGTH}"
            )
        if not 0 <= self.predictions_per_sequence <= self.sequence_length - self.special_tokens:
            raise UserError(
                f"{self.predictions_per_sequence} predictions per sequence (--max-predictions-per-seq, --lengths) do "
                f"not fit sequence length {self.sequence_length}: use 1 to {self.sequence_length - self.special_tokens}"
            )

    def as_dict(self) -> dict[str, Any]:
        """The options, without `pack_documents` if it is not asked for, as before there was such an option."""
        return {name: value for name, value in asdict(self).items() if name != "pack_documents" or value}

    @property
    def special_tokens(self) -> int:
        """[CLS] A [SEP] B [SEP], or [CLS] A [SEP] without next-sentence prediction."""
        return 3 if self.next_sentence_prediction else 2


def add_seed_flag(add) -> None:
    add("--random-seed", type=non_negative_int, default=SampleOptions.random_seed, help="seed of all random choices")


def add_executor_flags(add) -> None:
    add(
        "--num-workers",
        "--workers",
        type=positive_int,
        default=len(os.sched_getaffinity(0)),
        help="number of processes on this machine",
    )
    add(
        "--scheduler",
        default="local",
        help="where tasks run: local (processes); dask (a Dask cluster on this machine); or a running Dask cluster, as "
        "tls://HOST:8786 or a scheduler file",
    )


def refuse_workers_of_a_cluster(args: Arguments, parser: ArgumentParser) -> None:
    needed = "--scheduler local or dask"
    parser.refuse_without_effect(args, [(("num_workers",), args.scheduler in ("local", "dask"), needed)])


def add_casing_flag(add) -> None:
    add(
        "--do-lower-case",
        action=BooleanFlag,
        default=VocabularyOptions.do_lower_case,
        help="lower-case the text and strip accents (for uncased vocabularies)",
    )


def add_sample_flags(add) -> None:
    """The flags of `SampleOptions` that `create_pretraining_data.py` and `data/prepare.py` share."""
    default = SampleOptions
    add(
        "--dynamic-masking",
        action=BooleanFlag,
        default=False,
        help="make shards without masks, a fifth of the size: training draws new masks in every epoch",
    )
    add("--masked-lm-prob", type=fraction, default=default.masked_lm_prob, help="fraction of tokens to mask")
    add(
        "--short-seq-prob",
        type=fraction,
        default=default.short_seq_prob,
        help="fraction of documents whose samples get a random shorter target length",
    )
    add(
        "--dupe-factor",
        type=positive_int,
        default=default.dupe_factor,
        help="passes over the training text, each with different samples and masks; 1 with --dynamic-masking",
    )
    add("--whole-word-mask", action=BooleanFlag, default=default.whole_word_mask, help="mask whole words")
    add(
        "--nsp",
        action=BooleanFlag,
        default=default.next_sentence_prediction,
        help="next-sentence prediction; with --no-nsp a sample is one segment and its label is -1",
    )
    add(
        "--pack-documents",
        action=BooleanFlag,
        default=default.pack_documents,
        help="with --no-nsp: fill every sample with several documents; attention stays inside each",
    )
    add(
        "--compression",
        choices=COMPRESSIONS,
        default=default.compression,
        help="storage of the shards: none can be memory-mapped, gzip is for archives",
    )


def check_sample_flags(args: Arguments, parser: ArgumentParser, names: tuple[str, ...]) -> None:
    """Refuses flags that contradict each other. names: the flags that say how to mask; with --dynamic-masking, masks
    are settings of the training."""
    if args.pack_documents and args.given("short_seq_prob"):
        parser.error("--short-seq-prob cannot be combined with --pack-documents: all samples are full")
    if args.dynamic_masking and (given := [name for name in names if args.given(name)]):
        flag = f"--{given[0].replace('_', '-')}"
        parser.error(f"{flag} cannot be combined with --dynamic-masking: give it to run_pretraining.py")


def sample_options(args: Arguments, length: int, predictions: int) -> SampleOptions:
    """The options that the flags of `add_sample_flags` and `add_seed_flag` give."""
    options = SampleOptions(
        sequence_length=length,
        predictions_per_sequence=predictions,
        masked_lm_prob=args.masked_lm_prob,
        short_seq_prob=0.0 if args.pack_documents else args.short_seq_prob,
        dupe_factor=args.dupe_factor,
        random_seed=args.random_seed,
        whole_word_mask=args.whole_word_mask,
        next_sentence_prediction=args.nsp,
        compression=args.compression,
        pack_documents=args.pack_documents,
    )
    if not args.dynamic_masking:
        return options
    dupe_factor = args.dupe_factor if args.given("dupe_factor") else 1
    return replace(options, predictions_per_sequence=0, masked_lm_prob=0.0, dupe_factor=dupe_factor)
