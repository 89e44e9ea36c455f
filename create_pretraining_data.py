"""Creates HDF5 shards of BERT pre-training samples, one per text shard.

Input: one sentence per line, an empty line between documents. Existing shards of the same text and
options are kept: after an interruption, rerun the same command to resume.
"""

import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from bert_recipe.utils.errors import UserError, handle_uncaught_errors, print_error, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.config.foreign_flags import DATA, foreign_flags
from bert_recipe.data_preparation.options import (
    CASING,
    DYNAMIC_MASKING,
    EXECUTOR_FLAGS,
    SampleOptions,
    sample_options,
)
from bert_recipe.data_preparation.samples.corpus import find_text
from bert_recipe.data_preparation.samples.create_shards import (
    create_shards,
    lost_share,
    shard_units,
)
from bert_recipe.data_preparation.samples.sample_statistics import SampleStatistics, doubts
from bert_recipe.tokenization.tokenizer import load_tokenizer
from bert_recipe.utils.command_line import REQUIRED, ArgumentParser, Flag, flags_of, positive_int
from bert_recipe.utils.files import file_digest, lock_folder
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.work_units.executors import open_executor
from bert_recipe.utils.work_units.units import Record, WorkUnit, is_done, read_record

# Below bert_recipe/: `create_shard` of data_preparation/samples/create_shards.py makes a shard from
# a text. Its pairs are drawn by samples/drawing.py, masked by data_loading/masking.py, and written
# by samples/hdf5_writer.py.

FLAGS = (
    Flag(
        "--input-file --input-dir",
        Path,
        REQUIRED,
        "text, one sentence per line, an empty line between documents: a file, or a folder of "
        ".txt, .txt.gz files",
        options={"dest": "input_path"},
    ),
    Flag("--output-dir", Path, REQUIRED, "folder for the shards, one .hdf5 file per text file"),
    Flag("--vocab-file", Path, REQUIRED, "vocabulary with one token per line, or a tokenizer.json"),
    CASING,
    Flag("--max-seq-length", positive_int, SampleOptions.sequence_length, "tokens per sample"),
    Flag(
        "--max-predictions-per-seq",
        positive_int,
        SampleOptions.predictions_per_sequence,
        "maximum number of masked tokens per sample",
        excludes=("--dynamic-masking",),
    ),
    DYNAMIC_MASKING,
    *flags_of(SampleOptions),
    *EXECUTOR_FLAGS,
    Flag(
        "--overwrite",
        bool,
        False,
        "replace shards that were made from other text or with other options",
    ),
)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", FLAGS)
    parser.foreign = foreign_flags(DATA)
    args = parser.parse_args(argv)
    parser.check_flags(args)
    options = sample_options(args, args.max_seq_length, args.max_predictions_per_seq)
    tokenizer = load_tokenizer(args.vocab_file, args.do_lower_case)
    texts = find_text(args.input_path)
    start = time.perf_counter()
    with (
        closing(lock_folder(args.output_dir)),
        open_executor(args.scheduler, args.num_workers) as executor,
    ):
        for leftover in args.output_dir.glob("*.hdf5.tmp-*"):  # of a killed run
            leftover.unlink()
        described = [
            {"path": str(path), "bytes": path.stat().st_size, "sha256": digest}
            for path, digest in zip(texts, executor.map(file_digest, texts), strict=True)
        ]
        units = shard_units(described, tokenizer, options)
        present = {path.name for path in args.output_dir.glob("*.hdf5")}
        if others := sorted(present - {unit.output for unit in units}):
            print_error(
                f"warning: {args.output_dir} also has {others[0]}, not of this text: training "
                "reads both"
            )
        to_do = [unit for unit in units if not is_made(args.output_dir, unit, args.overwrite)]
        records, statistics = create_shards(args.output_dir, units, executor, "samples")
    seconds = time.perf_counter() - start
    print_line(f"{len(to_do)} shards made, {len(units) - len(to_do)} were complete already")
    print_line(summary(records, statistics, options))
    megabytes = sum(unit.size for unit in to_do) / 1e6
    print_line(f"{megabytes / seconds:.1f} MB/s of text, {seconds:.1f} s")
    shares = lost_share(records), statistics.unknown_share, statistics.random_next_share
    for doubt in doubts(args.max_seq_length, *shares):
        print_error(f"warning: {doubt}")


def is_made(folder: Path, unit: WorkUnit, overwrite: bool) -> bool:
    """Whether the shard of `unit` exists. Raises UserError if another one has its name, unless
    `overwrite`.
    """
    path = folder / unit.output
    old = read_record(folder, unit.output)
    if is_done(old, unit):
        return True
    if path.exists() and not overwrite:
        then, now = old.identity if old else unit.identity, unit.identity
        changes = [
            f"{name} {then.get(name)}, not {now.get(name)}"
            for name in {**now, **then}
            if then.get(name) != now.get(name)
        ]
        reason = f"was made with {changes[0]}" if changes else "has no record, or has changed since"
        raise UserError(
            f"{path} {reason}: choose another --output-dir, or use --overwrite to make it again"
        )
    return False


def summary(records: list[Record], statistics: SampleStatistics, options: SampleOptions) -> str:
    """What the shards contain, and what truncation and padding cost."""
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(
            {name: value for name, value in record.counts.items() if isinstance(value, int)}
        )
    share = f"{statistics.masked_share:.1%} of their tokens masked"
    masked = share if statistics.masked else "masked when they are read"
    dropped = counts["truncated"] / counts["untruncated"]
    return (
        f"{counts['documents']:,} documents, {counts['sentences']:,} sentences, "
        f"{counts['corpus_tokens']:,} tokens -> {statistics.samples:,} samples\n"
        f"{lost_share(records):.1%} of the text's tokens are in no sample; truncation drops "
        f"{dropped:.1%} of the tokens of each pass; samples are filled to {statistics.fill:.1%}; "
        f"{masked}; "
        f"{statistics.random_next_share:.1%} with a random next"
    )


if __name__ == "__main__":
    run_main(main)
