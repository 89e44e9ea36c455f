"""Makes an HDF5 shard of pre-training samples from a text shard. Speed:
benchmarks/what_was_tried.md.

A shard depends on its text, its file name, the options and the seed: not on other shards or the
number of workers.
"""

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import numpy as np

from bert_recipe.data_loading.masking import (
    MaskRule,
    choose_positions,
    mask_tokens,
    num_random,
    text_tokens,
)
from bert_recipe.data_preparation.engine.runner import read_manifest
from bert_recipe.data_preparation.engine.versions import run_units
from bert_recipe.data_preparation.options import SampleOptions
from bert_recipe.data_preparation.samples.corpus import Corpus, read_corpus
from bert_recipe.data_preparation.samples.drawing import (
    NO_LABEL,
    assemble,
    assemble_packed,
    count_covered,
    draw_samples,
    pack_documents,
    truncate,
)
from bert_recipe.data_preparation.samples.hdf5_writer import (
    sample_layout,
    shard_attributes,
    write_hdf5,
)
from bert_recipe.data_preparation.samples.sample_statistics import (
    SampleStatistics,
    count_samples,
)
from bert_recipe.tokenization.files import MAX_CHARACTERS_PER_WORD, MAX_UNKNOWN
from bert_recipe.tokenization.layouts import bert_layout
from bert_recipe.tokenization.tokenizer import Tokenizer, load_tokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject
from bert_recipe.utils.progress import progress_bar
from bert_recipe.utils.work_units.units import Record, WorkUnit

# samples built at a time: few HDF5 calls, and most of the arrays stay in the cache
WRITE_BLOCK = 4096


def check_layout(tokenizer: Tokenizer, has_pairs: bool) -> None:
    """Raises UserError unless the tokenizer puts around texts what samples have."""
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    if has_pairs and tokenizer.layout(2).parts == (cls, None, sep, sep, None, sep):
        raise UserError(
            f"{tokenizer.vocab_file} is of RoBERTa's kind, which has no next-sentence prediction: "
            "add --no-nsp"
        )
    num_texts = 2 if has_pairs else 1
    if tokenizer.layout(num_texts).parts != bert_layout(cls, sep, num_texts).parts:
        what = "[CLS] first [SEP] second [SEP]" if has_pairs else "[CLS] text [SEP]"
        raise UserError(
            f"{tokenizer.vocab_file} puts other special tokens around texts than {what}, which "
            f"samples have: correct its post_processor{', or add --no-nsp' if has_pairs else ''}"
        )


def shard_units(
    texts: Sequence[JsonObject], tokenizer: Tokenizer, options: SampleOptions
) -> list[WorkUnit]:
    """The units that make an HDF5 shard of each text. texts: path, size and SHA-256 of each."""
    check_layout(tokenizer, options.next_sentence_prediction)
    units = []
    for text in texts:
        path = Path(text["path"]).absolute()
        attributes = shard_attributes(text["sha256"], tokenizer, options)
        name = path.name.removesuffix(".gz").removesuffix(".txt") + ".hdf5"
        arguments = (path, name, tokenizer.vocab_file.absolute(), options, attributes)
        units.append(WorkUnit(name, create_shard, arguments, text["bytes"], attributes))
    names = Counter(unit.output for unit in units)
    if len(names) < len(units):
        raise UserError(
            f"two of the text files would both make {names.most_common(1)[0][0]}: rename one"
        )
    return units


def create_shards(
    folder: Path, units: list[WorkUnit], executor: Executor, title: str
) -> tuple[list[Record], SampleStatistics]:
    """Makes the shards in `folder`. Returns their records and sums. units: see `shard_units`."""
    with progress_bar(sum(unit.size for unit in units), title) as bar:
        records = run_units(folder, units, executor, bar.update)
    statistics = [SampleStatistics(**record.counts["statistics"]) for record in records]
    return records, SampleStatistics.total(statistics)


@lru_cache(1)
def load_once(
    vocab_file: Path, do_lower_case: bool, strip_accents: bool | None, sha256: str
) -> Tokenizer:
    """One tokenizer per process: its cache of words serves all shards."""
    tokenizer = load_tokenizer(vocab_file, do_lower_case, strip_accents)
    if tokenizer.vocab_sha256 != sha256:
        raise UserError(f"{vocab_file} has changed since the start: rerun the same command")
    return tokenizer


def create_shard(
    output: Path,
    text_path: Path,
    name: str,
    vocab_file: Path,
    options: SampleOptions,
    attributes: JsonObject,
) -> JsonObject:
    """Writes the samples of the text in `text_path` to `output`. Returns counts, statistics and the
    data sets.

    name: of the shard; it decides the random numbers. Raises UserError if the text is bad or gives
    no sample.
    """
    tokenizer = load_once(
        vocab_file,
        attributes["do_lower_case"],
        attributes.get("strip_accents"),
        attributes["vocab_sha256"],
    )
    # Each name has its own random numbers, whatever other shards there are.
    name_seed = int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8])
    rng = np.random.Generator(np.random.PCG64([options.random_seed, name_seed]))
    corpus = read_corpus(text_path, tokenizer)
    if options.next_sentence_prediction and len(corpus.document_starts) == 2:
        raise UserError(
            f"text {text_path} is one document, and next-sentence prediction draws random "
            "sentences from another one: give more documents, with an empty line between them "
            "(data/prepare.py format: --empty-line document), or use --no-nsp"
        )
    draw = draw_packed_blocks if options.pack_documents else draw_blocks
    samples, untruncated, truncated, covered, unmasked = draw(corpus, options, tokenizer, rng)
    layout = sample_layout(
        samples, options.sequence_length, options.predictions_per_sequence, corpus.ids.dtype
    )
    word_starts = tokenizer.word_starts() if options.whole_word_mask else None
    rule = MaskRule(options.masked_lm_prob, options.predictions_per_sequence, word_starts)
    statistics = []
    ids_of_interest = tokenizer.mask_token_id, tokenizer.unk_token_id

    def masked_blocks() -> Iterator[tuple[np.ndarray, ...]]:
        for input_ids, input_mask, segment_ids, labels in unmasked:
            positions, masked_ids = draw_masks(input_ids, input_mask, rule, tokenizer, rng)
            yield input_ids, input_mask, segment_ids, positions, masked_ids, labels
            lengths = np.count_nonzero(input_mask, axis=1)
            statistics.append(
                count_samples(input_ids, lengths, positions, masked_ids, labels, *ids_of_interest)
            )

    write_hdf5(output, layout, attributes, masked_blocks())
    total = SampleStatistics.total(statistics)
    if total.unknown_share > MAX_UNKNOWN:
        raise UserError(
            f"text {text_path}: {total.unknown_share:.0%} of the tokens are [UNK]: the vocabulary "
            f"or its casing does not fit the text; {unknown_advice(vocab_file)}"
        )
    total.shards = total.checksummed = 1
    return {
        "documents": len(corpus.document_starts) - 1,
        "sentences": len(corpus.sentence_starts) - 1,
        "corpus_tokens": len(corpus.ids),
        "covered_tokens": covered,
        "untruncated": untruncated,
        "truncated": truncated,
        "statistics": asdict(total),
    }


def unknown_advice(vocab_file: Path) -> str:
    """What to do about unknown words."""
    if read_manifest(vocab_file.parent) is None:
        return "choose another --vocab-file or casing, or train one (data/prepare.py vocabulary)"
    return (
        f"{vocab_file} was trained on other text, or lacks characters, or words have more than "
        f"{MAX_CHARACTERS_PER_WORD}: train it on this text with --tokenizer bpe, which knows all "
        "words"
    )


def lost_share(records: Sequence[Record]) -> float:
    """The share of the text's tokens that are in no sample."""
    covered = sum(record.counts["covered_tokens"] for record in records)
    return 1 - covered / sum(record.counts["corpus_tokens"] for record in records)


# Number of samples; tokens before and removed by truncation; tokens of the corpus in samples;
# blocks of input_ids, input_mask, segment_ids, labels.
Drawn = tuple[int, int, int, int, Iterator[tuple[np.ndarray, ...]]]


def draw_blocks(
    corpus: Corpus, options: SampleOptions, tokenizer: Tokenizer, rng: np.random.Generator
) -> Drawn:
    """Samples of one or two segments."""
    samples = np.concatenate(
        [draw_samples(corpus, options, rng) for _ in range(options.dupe_factor)]
    )
    untruncated = int(samples["a_length"].sum() + samples["b_length"].sum())
    truncated = truncate(samples, options, rng)
    rng.shuffle(samples)
    windows = np.lib.stride_tricks.sliding_window_view(
        np.pad(corpus.ids, options.sequence_length), options.sequence_length
    )
    parts = (samples[start : start + WRITE_BLOCK] for start in range(0, len(samples), WRITE_BLOCK))
    blocks = ((*assemble(windows, part, options, tokenizer), part["label"]) for part in parts)
    return len(samples), untruncated, truncated, count_covered(samples), blocks


def draw_packed_blocks(
    corpus: Corpus, options: SampleOptions, tokenizer: Tokenizer, rng: np.random.Generator
) -> Drawn:
    """Samples of several documents, which are not truncated."""
    passes = [pack_documents(corpus, options, rng) for _ in range(options.dupe_factor)]
    for previous, pieces in itertools.pairwise(passes):
        pieces["row"] += previous["row"][-1] + 1  # rows are counted on
    pieces = np.concatenate(passes)
    num_samples = int(pieces["row"][-1]) + 1
    first_rows = [*range(0, num_samples, WRITE_BLOCK), num_samples]
    bounds = np.searchsorted(pieces["row"], first_rows)  # of the pieces of each block

    def blocks() -> Iterator[tuple[np.ndarray, ...]]:
        for start, stop in itertools.pairwise(bounds):
            arrays = assemble_packed(corpus.ids, pieces[start:stop], options, tokenizer)
            labels = np.full(len(arrays[0]), NO_LABEL, np.int8)
            yield *arrays, labels

    return num_samples, int(pieces["length"].sum()), 0, len(corpus.ids), blocks()


def draw_masks(
    input_ids: np.ndarray,
    input_mask: np.ndarray,
    rule: MaskRule,
    tokenizer: Tokenizer,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Masks `input_ids` [n, S] in place. Returns masked_lm_positions and masked_lm_ids [n, P]."""
    rows, length = input_ids.shape
    if not rule.max_masked:
        nothing = np.zeros((rows, 0), input_ids.dtype)
        return nothing, nothing
    is_real = input_mask > 0
    is_text = text_tokens(input_ids, is_real, (tokenizer.cls_token_id, tokenizer.sep_token_id))
    random = rng.integers(0, 1 << 64, (rows, num_random(length)), np.uint64)
    positions, counts = choose_positions(input_ids, is_text, is_real.sum(axis=1), rule, random)
    action = rng.random(positions.shape, np.float32)
    random_ids = rng.integers(0, tokenizer.vocab_size, positions.shape, np.uint32)
    return positions, mask_tokens(
        input_ids, positions, counts, tokenizer.mask_token_id, action, random_ids
    )
