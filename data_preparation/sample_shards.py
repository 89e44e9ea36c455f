"""Makes an HDF5 shard of pre-training samples from a text shard; docs/data_creation_speed.md says how fast, and why.

A shard depends on its text, its file name, the options and the seed: not on other shards or the number of workers.
"""

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from data_preparation.corpus import read_corpus
from data_preparation.hdf5_writer import create_hdf5, is_up_to_date, sample_layout, shard_attributes
from data_preparation.masking import choose_positions, mask_tokens
from data_preparation.options import SampleOptions
from data_preparation.sampling import assemble, draw_samples, truncate
from tokenizer import BertTokenizer
from utils.errors import UserError

WRITE_BLOCK = 4096  # samples built at a time: few HDF5 calls, and most of the arrays stay in the cache


@dataclass
class ShardReport:
    """What was done for one text shard; a run prints the sums."""

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


def output_name(text_path: Path) -> str:
    return text_path.name.removesuffix(".gz").removesuffix(".txt") + ".hdf5"


# One tokenizer per process: its cache of words serves all shards.
load_tokenizer = lru_cache(1)(BertTokenizer)


def create_shard_in_worker(
    paths: tuple[Path, Path], vocab_file: Path, do_lower_case: bool, options: SampleOptions, overwrite: bool = False
) -> ShardReport:
    return create_shard(*paths, load_tokenizer(vocab_file, do_lower_case), options, overwrite)


def create_shard(
    text_path: Path, output_path: Path, tokenizer: BertTokenizer, options: SampleOptions, overwrite: bool = False
) -> ShardReport:
    """Makes the HDF5 shard `output_path` of the text in `text_path`, unless it is there already.

    Raises UserError if there is one of other options or another text and not `overwrite`, or if the text is bad."""
    report = ShardReport(text_path, text_path.stat().st_size)
    attributes = shard_attributes(text_path, tokenizer, options)
    if not overwrite and is_up_to_date(output_path, attributes):
        return report
    # Each file name has its own random numbers, whatever other shards there are.
    name_seed = int.from_bytes(hashlib.sha256(os.fsencode(output_path.name)).digest()[:8])
    rng = np.random.Generator(np.random.PCG64([options.random_seed, name_seed]))

    with report.stage("read and tokenize"):
        corpus = read_corpus(text_path, tokenizer)
    with report.stage("sample"):
        samples = np.concatenate([draw_samples(corpus, options, rng) for _ in range(options.dupe_factor)])
        untruncated = int(samples["a_length"].sum() + samples["b_length"].sum())
        truncated = truncate(samples, options, rng)
        rng.shuffle(samples)
    if not len(samples):
        raise UserError(
            f"text {text_path} gives no sample: it is one document of one sentence, and next-sentence prediction needs "
            "two: put an empty line between documents, or use --no-nsp"
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

    windows = np.lib.stride_tricks.sliding_window_view(
        np.pad(corpus.ids, options.sequence_length), options.sequence_length
    )
    continues_word = np.array([token.startswith("##") for token in tokenizer.tokens])
    layout = sample_layout(len(samples), options.sequence_length, options.predictions_per_sequence, corpus.ids.dtype)
    with create_hdf5(output_path, layout, attributes, options.compression) as writer:
        for start in range(0, len(samples), WRITE_BLOCK):
            block = samples[start : start + WRITE_BLOCK]
            with report.stage("assemble"):
                input_ids, input_mask, segment_ids = assemble(windows, block, options, tokenizer)
            with report.stage("mask"):
                positions, predicted = choose_positions(input_ids, block, options, continues_word, rng)
                masked_ids = mask_tokens(input_ids, positions, predicted, tokenizer, rng)
            report.counts["masked"] += int(predicted.sum())
            report.counts["random_next"] += int((block["label"] == 1).sum())
            with report.stage("write"):
                writer.append(input_ids, input_mask, segment_ids, positions, masked_ids, block["label"])
    report.made = True
    return report
