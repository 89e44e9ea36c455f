"""Makes HDF5 shards of BERT pre-training samples from text shards, one for each.

Input: one sentence per line, an empty line between documents. Existing shards that were made from the same text with
the same options are kept, so a run that was killed continues with the same command.
"""

from utils.errors import run_main  # first, because it handles errors of the other imports

# isort: split
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

from tqdm import tqdm

from data_preparation.corpus import find_text
from data_preparation.options import SampleOptions, add_casing_flag, add_sample_flags, add_seed_flag, sample_options
from data_preparation.parallel import ordered_map
from data_preparation.sample_shards import ShardReport, create_shard_in_worker, load_tokenizer, output_name
from utils.command_line import ArgumentParser, Arguments, BooleanFlag, positive_int
from utils.errors import UserError
from utils.progress import progress_bar


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description="Makes HDF5 shards of BERT pre-training samples from text shards.")
    add = parser.add_argument
    add(
        "--input-file",
        "--input-dir",
        dest="input_path",
        type=Path,
        required=True,
        help="text, one sentence per line, an empty line between documents: a file, or a folder of .txt, .txt.gz files",
    )
    add("--output-dir", type=Path, required=True, help="folder for the shards, one .hdf5 file per text file")
    add("--vocab-file", type=Path, required=True, help="vocabulary file, one token per line")
    add_casing_flag(add)
    add("--max-seq-length", type=positive_int, default=SampleOptions.sequence_length, help="tokens per sample")
    add(
        "--max-predictions-per-seq",
        type=positive_int,
        default=SampleOptions.predictions_per_sequence,
        help="maximum number of masked tokens per sample",
    )
    add_sample_flags(add)
    add_seed_flag(add)
    add("--num-workers", type=positive_int, default=len(os.sched_getaffinity(0)), help="number of processes")
    add("--overwrite", action=BooleanFlag, help="replace shards that were made from other text or with other options")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    options = sample_options(args, args.max_seq_length, args.max_predictions_per_seq)
    load_tokenizer(args.vocab_file, args.do_lower_case)  # a bad vocabulary is an error before anything is made
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
    reports = []
    with progress_bar(sum(text.stat().st_size for text in texts), "samples") as bar:
        for report in ordered_map(create, paths, min(args.num_workers, len(paths))):
            reports.append(report)
            bar.update(report.text_bytes)
            if report.warning:
                tqdm.write(f"warning: {report.warning}", file=sys.stderr)
    print(summary(reports, options, time.perf_counter() - start), file=sys.stderr)


def summary(reports: list[ShardReport], options: SampleOptions, seconds: float) -> str:
    """What a run made, its speed, and what truncation and padding cost."""
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
