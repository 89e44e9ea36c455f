"""Checks every row of HDF5 shards, this project's and NVIDIA's, and reports what is in them, with a
few samples.

Legend: n rows, S sequence length, P masked tokens of a sequence at most, M masked tokens.
"""

from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import numpy as np

from bert_recipe.data_loading.hdf5_shards import KEYS, SHARD_SUFFIXES, Shard, find_shards
from bert_recipe.data_loading.row_rules import check_agreement, check_rows, read_rows, refuse
from bert_recipe.data_preparation.engine.runner import PARTIAL
from bert_recipe.data_preparation.samples.sample_statistics import SampleStatistics, count_samples
from bert_recipe.tokenization.files import TOKENIZER_JSON, VOCAB_FILE
from bert_recipe.tokenization.tokenizer import Tokenizer, load_tokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import TEMPORARY_SUFFIX, files_below, write_atomically
from bert_recipe.utils.progress import print_line, progress_bar
from bert_recipe.utils.resources import resource_folder

BLOCK_ROWS = 2048  # rows examined at a time, so that memory is bounded
SHOWN_SAMPLES = 3


def report_on_folders(root: Path, vocab_file: Path | None, executor: Executor) -> None:
    """Verifies every folder of HDF5 shards below `root`, and prints a report with some samples."""
    for folder in shard_folders(root):
        tokenizer = load_tokenizer(vocab_file or find_vocabulary(folder))
        statistics = verify_folder(folder, tokenizer, executor)
        lines = [f"{folder}: every row is valid", *report_lines(statistics, tokenizer)]
        print_line("\n".join([*lines, "", *sample_lines(folder, tokenizer), ""]))


def verify_folder(folder: Path, tokenizer: Tokenizer, executor: Executor) -> SampleStatistics:
    """Reads every shard in `folder`. UserError names the first invalid shard and row."""
    paths = find_shards(folder)
    shards = [Shard(path) for path in paths]
    check_agreement(shards)
    first = shards[0]
    made_with = first.attributes.get("vocab_sha256")
    if made_with and made_with != tokenizer.vocab_sha256:
        raise UserError(
            f"shard {first.path} was made with another vocabulary (SHA-256 {made_with[:12]}...) "
            f"than {tokenizer.vocab_file} ({tokenizer.vocab_sha256[:12]}...): use the one it was "
            "made with"
        )
    examine = partial(
        examine_shard,
        mask_and_unknown=(tokenizer.mask_token_id, tokenizer.unk_token_id),
        special_ids=(tokenizer.cls_token_id, tokenizer.sep_token_id),
        vocab_size=tokenizer.vocab_size,
    )
    statistics = []
    with progress_bar(len(paths), "verify", "shard") as bar:
        for of_shard in executor.map(examine, [path.absolute() for path in paths]):
            statistics.append(of_shard)
            bar.update()
    total = SampleStatistics.total(statistics)
    if total.samples == 0:
        raise UserError(f"the shards in {folder} contain no sample: make them from more text")
    return total


def examine_shard(
    path: Path,
    mask_and_unknown: tuple[int, int],
    special_ids: tuple[int, int],
    vocab_size: int,
) -> SampleStatistics:
    """Verifies all rows of a shard, and returns its statistics. Raises UserError if one is damaged.

    mask_and_unknown: ids of the tokens that are counted, [MASK] and [UNK].
    special_ids: of [CLS] and [SEP].
    """
    shard = Shard(path)
    shard.verify_checksums()
    no_lengths = [0] * (shard.sequence_length + 1)
    of_shard = SampleStatistics(
        shards=1, checksummed=int(shard.has_checksums), labels=[0] * 3, lengths=no_lengths
    )
    statistics = [of_shard]
    for rows in shard.blocks(BLOCK_ROWS):
        block = read_rows(shard, rows)
        check_rows(shard, rows, block, vocab_size)
        check_samples(shard, rows, block, special_ids)
        lengths = np.count_nonzero(block["input_mask"], axis=1)
        of_block = count_samples(
            block["input_ids"],
            lengths,
            block["masked_lm_positions"],
            block["masked_lm_ids"],
            block["next_sentence_labels"],
            *mask_and_unknown,
        )
        statistics.append(of_block)
    return SampleStatistics.total(statistics)


def check_samples(
    shard: Shard,
    rows: np.ndarray,
    values: dict[str, np.ndarray],
    special_ids: tuple[int, int],
) -> None:
    """Raises UserError for rows that training would read, but that are no samples."""
    ids_nS, positions_nP = values["input_ids"], values["masked_lm_positions"]
    lengths_n = np.count_nonzero(values["input_mask"], axis=1)
    masked_nP = positions_nP > 0
    sorted_nP = np.sort(positions_nP, axis=1)
    is_twice_n = ((np.diff(sorted_nP, axis=1) == 0) & (sorted_nP[:, 1:] > 0)).any(axis=1)
    refuse(shard, rows, lengths_n < 3, "the sample is shorter than [CLS] x [SEP]")
    refuse(shard, rows, is_twice_n, "masked_lm_positions has a position twice")
    # Whole words may all be longer than what may be masked of a short sample.
    if masked_nP.shape[1] and not shard.attributes.get("whole_word_mask"):
        refuse(shard, rows, ~masked_nP.any(axis=1), "nothing is masked")
    cls_id, sep_id = special_ids
    last_ids_n = ids_nS[np.arange(len(rows)), lengths_n - 1]
    has_ends_n = (ids_nS[:, 0] == cls_id) & (last_ids_n == sep_id)
    refuse(shard, rows, ~has_ends_n, "the sample does not begin with [CLS] and end with [SEP]")
    is_special_n = (masked_nP & np.isin(values["masked_lm_ids"], special_ids)).any(axis=1)
    refuse(shard, rows, is_special_n, "[CLS] or [SEP] is masked")


def write_report(folder: Path, statistics: SampleStatistics, tokenizer: Tokenizer) -> None:
    """Writes the report on new shards beside them."""
    lines = [*report_lines(statistics, tokenizer), "", *sample_lines(folder, tokenizer), ""]
    write_atomically(folder / "report.txt", "\n".join(lines))


def shard_folders(root: Path) -> list[Path]:
    folders = sorted({path.parent for path in files_below(root, SHARD_SUFFIXES)})
    unfinished = (PARTIAL, f"{TEMPORARY_SUFFIX}-")  # or replaced, of interrupted runs
    folders = [folder for folder in folders if not folder.suffix.startswith(unfinished)]
    if not folders:
        raise UserError(f"{root} contains no HDF5 shard: check the path")
    return folders


def find_vocabulary(folder: Path) -> Path:
    """The vocabulary of the shards in `folder`: a file beside them, or one that ships with the
    program. It must have the SHA-256 that the shards name; if they name none, it is the file beside
    them. Raises UserError if there is no such file.
    """
    expected = Shard(find_shards(folder)[0]).attributes.get("vocab_sha256")
    paths = [folder / VOCAB_FILE, folder / TOKENIZER_JSON]
    if expected is not None:
        paths += sorted(resource_folder("vocab").glob("*.txt"))
    for path in paths:
        if path.is_file() and (expected is None or load_tokenizer(path).vocab_sha256 == expected):
            return path
    raise UserError(f"the vocabulary of the shards in {folder} is not here: give --vocab-file")


def report_lines(statistics: SampleStatistics, tokenizer: Tokenizer) -> list[str]:
    """The numbers. "expected" refers to BERT's recipe; other recipes have other numbers."""
    f = statistics
    lengths = np.searchsorted(np.cumsum(f.lengths), np.array([0.1, 0.5, 0.9]) * f.samples)
    deciles = ", ".join(map(str, lengths))
    lines = [
        f"samples           {f.samples:,} of length {f.sequence_length} in {f.shards} shards",
        f"fill              {f.fill:.1%}; lengths: mean {f.tokens / f.samples:.1f}, deciles 1, 5, "
        f"9: {deciles}",
    ]
    if f.masked:
        kinds = (
            f"{f.masked_as_mask / f.masked:.1%} [MASK], {f.masked_as_itself / f.masked:.1%} kept, "
            f"{f.masked_as_other / f.masked:.1%} random"
        )
        lines += [
            f"masked            {f.masked_share:.2%} of {f.tokens:,} tokens (expected 15%)",
            f"masked tokens     {kinds} (expected 80, 10, 10)",
        ]
    else:
        lines.append(f"masked            none of {f.tokens:,} tokens: training draws the masks")
    if f.labels[0] == f.samples:
        lines.append("next sentence     no labels")
    else:
        lines.append(f"next sentence     {f.random_next_share:.1%} random (expected 50%)")
    vocabulary = f"of {tokenizer.vocab_size} in {tokenizer.vocab_file.name}"
    return [
        *lines,
        f"unknown           {f.unknown_share:.2%} of the tokens are [UNK]",
        f"ids               up to {f.highest_id} {vocabulary}",
        f"checksums         valid; {f.checksummed} of {f.shards} shards have them",
    ]


def sample_lines(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Some samples with their masks, from different shards and rows."""
    lines = ["samples, with masked tokens as {original -> replacement} and kept ones as {original}"]
    paths = find_shards(folder)
    for number in range(SHOWN_SAMPLES):
        shard = Shard(paths[number * len(paths) // SHOWN_SAMPLES])
        if not len(shard):
            continue
        row = (2 * number + 1) * len(shard) // (2 * SHOWN_SAMPLES)
        values = {key: shard.read(key, np.array([row]))[0].astype(np.int64) for key in KEYS}
        length = int(np.count_nonzero(values["input_mask"]))
        label = {0: "B follows A", 1: "B is random"}.get(
            int(values["next_sentence_labels"]), "no next sentence"
        )
        lines.append(f"{shard.path.name}, row {row}, {length} tokens, {label}:")
        lines.append("  " + decode(values, length, tokenizer))
    return lines


def decode(values: dict[str, np.ndarray], length: int, tokenizer: Tokenizer) -> str:
    name = tokenizer.text_of
    words = list(map(name, values["input_ids"][:length].tolist()))
    for position, original in zip(
        values["masked_lm_positions"], values["masked_lm_ids"].tolist(), strict=True
    ):
        if position > 0:
            was = name(original)
            now = words[position]
            words[position] = f"{{{was}}}" if now == was else f"{{{was} -> {now}}}"
    return tokenizer.join(words)
