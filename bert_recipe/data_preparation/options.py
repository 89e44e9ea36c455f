"""The options of each stage with their flags and defaults. A shard's or a stage's content depends
on its inputs and these alone.

This module imports nothing heavy, so that `--help` and worker processes start quickly.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bert_recipe.tokenization.files import Casing
from bert_recipe.utils.command_line import (
    Arguments,
    Flag,
    flags_of,
    fraction,
    fraction_below_one,
    from_flags,
    non_negative_int,
    option,
    plain_name,
    positive_float,
    positive_int,
)
from bert_recipe.utils.errors import UserError

SAMPLE_MB = 1_000  # of text that a vocabulary is trained on, evenly from all files
MIN_ALPHABET, ALPHABET_COVERAGE = 1_000, 0.9995  # characters of a vocabulary, and their share
SPLITTERS = ("fast", "newline", "passage")
LEAST_MASKED = 0.9  # of the tokens that --masked-lm-prob takes of a full sample
# masking.py numbers positions in 16 bits, with one value for padding.
MAX_SEQUENCE_LENGTH = (1 << 16) - 1

CASING = Flag(
    "--do-lower-case",
    bool,
    None,
    "lower-case the text and strip accents, unless the tokenizer keeps them; by default if the "
    "vocabulary has no capital letters; a tokenizer.json says it itself; a new tokenizer does by "
    "default",
)
TOKENIZERS = ("wordpiece", "bpe", "unigram")
SEED = ("--random-seed", non_negative_int, 12345, "seed of all random choices")
EXECUTOR_FLAGS = (
    Flag(
        "--num-workers --workers",
        positive_int,
        len(os.sched_getaffinity(0)),
        "number of processes on this machine",
        needs=("--scheduler local",),
    ),
    Flag(
        "--scheduler",
        str,
        "local",
        "where tasks run: local (processes), or a running Dask cluster, as tls://HOST:8786 or a "
        "scheduler file",
    ),
)
DYNAMIC_MASKING = Flag(
    "--dynamic-masking",
    bool,
    False,
    "make shards without masks, a fifth of the size: training draws new masks in every epoch, as "
    "its own flags say",
)


def name_and_weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    return name, positive_float(weight)


@dataclass(frozen=True)
class FormatOptions:
    """How documents are read and split into sentences."""

    sentence_splitter: str = option(
        "--sentence-splitter",
        SPLITTERS,
        "fast",
        "how to divide documents into lines: sentences by Punkt's rules (fast), lines as they are, "
        "or passages of neighbouring sentences, for sentence embeddings",
    )
    language: str = "english"
    text_field: str = option("--text-field", str, "text", "column of a table with the text")
    skip_bad: bool = option(
        "--skip-bad",
        bool,
        False,
        "leave out bad documents, in .txt bad lines, count them and list them in skipped.log",
    )
    empty_line: str | None = option(
        "--empty-line",
        ("paragraph", "document"),
        None,
        "what an empty line in a .txt file ends; if not given, document for the splitter newline, "
        "else paragraph",
    )


@dataclass(frozen=True)
class TextShardOptions:
    """How formatted text is divided into shards and into training and test documents."""

    shard_mb: float | None = option(
        "--shard-mb",
        positive_float,
        None,
        "size of a text shard in MB; if not given, 100, or less for text under 6.4 GB, so that 64 "
        "cores have one each, but at least 1",
    )
    test_fraction: float = option(
        "--test-fraction", fraction_below_one, 0.05, "fraction of documents for the test split"
    )
    random_seed: int = option(*SEED)
    drop_duplicates: str = option(
        "--drop-duplicates",
        ("none", "equal"),
        "none",
        "keep one of several documents that are equal",
    )
    weights: Sequence[tuple[str, float]] = option(
        "--weights",
        name_and_weight,
        (),
        "copies of the training documents of formatted/NAME, such as books=2 wikicorpus_en=0.5",
        options={"nargs": "+", "metavar": "NAME=WEIGHT"},
    )
    max_document_kb: float | None = option(
        "--max-document-kb",
        positive_float,
        None,
        "divide longer documents at ends of sentences, so that few long ones, such as books, are "
        "held out in part",
    )

    def shard_bytes(self, total: int) -> int:
        """The size of a shard of a text of `total` bytes."""
        megabytes = min(100, max(1, total / 64e6)) if self.shard_mb is None else self.shard_mb
        return max(1, round(megabytes * 1_000_000))


@dataclass(frozen=True)
class VocabularyOptions:
    """What the vocabulary of a tokenizer consists of."""

    tokenizer: str = option(
        "--tokenizer",
        TOKENIZERS,
        "wordpiece",
        "kind of tokenizer: BERT's WordPiece, byte-level BPE, or Unigram",
    )
    size: int = option(
        "--vocab-size", positive_int, 30_522, "number of tokens, special ones included"
    )
    do_lower_case: bool = True
    strip_accents: bool | None = option(
        "--strip-accents",
        bool,
        None,
        "strip accents from the text; by default if it is lower-cased",
    )
    alphabet: int | None = option(
        "--alphabet",
        positive_int,
        None,
        "maximum number of single characters, most frequent first; words with any other become "
        f"[UNK]; by default {MIN_ALPHABET}, or as many as make up {100 * ALPHABET_COVERAGE:.2f} "
        "percent of the text",
        needs=("--tokenizer wordpiece",),
    )
    # With 99, [UNK] has id 100 as in Google's files.
    unused: int = option(
        "--unused", non_negative_int, 99, "number of [unused...] tokens to reserve"
    )

    @property
    def casing(self) -> Casing:
        strip_accents = self.strip_accents
        return Casing(
            self.do_lower_case, self.do_lower_case if strip_accents is None else strip_accents
        )

    def values(self) -> dict[str, Any]:
        """The options as manifests have them."""
        values = asdict(self) | {"sample_mb": SAMPLE_MB}
        del values["strip_accents"]
        return values | self.casing.settings()


@dataclass(frozen=True)
class ModelVocabularyOptions:
    """Another vocabulary for the model in a folder."""

    extend: Path | None = option(
        "--extend",
        Path,
        None,
        "model folder whose vocabulary gets words of the text; makes a model folder in vocab/",
        excludes=(
            "--replace",
            *(flag.names[0] for flag in flags_of(VocabularyOptions)),
            "--do-lower-case",
            "--bert-config",
        ),
    )
    replace: Path | None = option(
        "--replace",
        Path,
        None,
        "model folder whose vocabulary becomes the one trained here; makes a model folder in "
        "vocab/",
        excludes=("--bert-config",),
    )
    add: int = option(
        "--add", positive_int, 1_000, "maximum number of words to add", needs=("--extend",)
    )
    model_name: str | None = option(
        "--model-name",
        plain_name,
        None,
        "name of that model folder; if not given, the model's, a hyphen, and that of --output-dir",
        needs=("--extend or --replace",),
    )


@dataclass(frozen=True)
class SampleOptions:
    """What decides the samples, besides text and vocabulary. Every field becomes an attribute of
    the HDF5 shards.
    """

    sequence_length: int = 128
    # masked tokens at most; 0: without masks, which training draws
    predictions_per_sequence: int = 20
    masked_lm_prob: float = option(
        "--masked-lm-prob",
        fraction,
        0.15,
        "fraction of tokens to mask",
        excludes=("--dynamic-masking",),
    )
    short_seq_prob: float = option(
        "--short-seq-prob",
        fraction,
        0.1,
        "fraction of documents whose samples get a random shorter target length; with --no-nsp "
        "only their first sample does",
        excludes=("--pack-documents",),
    )
    dupe_factor: int = option(
        "--dupe-factor",
        positive_int,
        5,
        "passes over the training text, each with other samples and masks; 1 with "
        "--dynamic-masking",
    )
    random_seed: int = option(*SEED)
    whole_word_mask: bool = option(
        "--whole-word-mask", bool, False, "mask whole words", excludes=("--dynamic-masking",)
    )
    next_sentence_prediction: bool = option(
        "--nsp",
        bool,
        True,
        "next-sentence prediction; with --no-nsp a sample is one segment, documents are cut where "
        "it is full, and its label is -1",
    )
    pack_documents: bool = option(
        "--pack-documents",
        bool,
        False,
        "fill samples with several documents, which attention keeps apart; needs --no-nsp",
    )

    def __post_init__(self) -> None:
        if self.pack_documents and self.next_sentence_prediction:
            raise UserError("--pack-documents joins documents without sentence pairs: add --no-nsp")
        shortest = self.special_tokens + 2  # two tokens of text
        if not shortest <= self.sequence_length <= MAX_SEQUENCE_LENGTH:
            raise UserError(
                f"sequence length {self.sequence_length} (--max-seq-length, --lengths): use "
                f"{shortest} to {MAX_SEQUENCE_LENGTH}"
            )
        if not 0 <= self.predictions_per_sequence <= self.sequence_length - self.special_tokens:
            raise UserError(
                f"{self.predictions_per_sequence} masked tokens per sequence "
                "(--max-predictions-per-seq, --lengths) do not fit sequence length "
                f"{self.sequence_length}: use 1 to {self.sequence_length - self.special_tokens}"
            )

    @property
    def special_tokens(self) -> int:
        """[CLS] A [SEP] B [SEP], or [CLS] A [SEP] without next-sentence prediction."""
        return 3 if self.next_sentence_prediction else 2


def sample_options(args: Arguments, length: int, max_masked: int) -> SampleOptions:
    """The options that the flags give, for samples of `length` tokens."""
    chosen: dict[str, Any] = {"sequence_length": length, "predictions_per_sequence": max_masked}
    if args.pack_documents:
        chosen["short_seq_prob"] = 0.0
    if args.dynamic_masking:
        chosen |= {"predictions_per_sequence": 0, "masked_lm_prob": 0.0}
        if not args.given("dupe_factor"):
            chosen["dupe_factor"] = 1
    options = from_flags(SampleOptions, args, **chosen)
    wanted = round(options.masked_lm_prob * length)
    if options.predictions_per_sequence < LEAST_MASKED * wanted:
        raise UserError(
            f"--masked-lm-prob {options.masked_lm_prob} of {length} tokens takes {wanted} masked "
            f"tokens, and at most {max_masked} are allowed (--max-predictions-per-seq, --lengths): "
            f"allow {wanted}, or lower --masked-lm-prob"
        )
    return options
