"""Prepares data for pre-training and fine-tuning: from the network or your own text to verified HDF5 shards.

  download    Wikipedia in any language, books from a list, SQuAD, GLUE          -> download/
  format      any source as text, one sentence per line                          -> formatted/
  shard       text shards of equal size, split into training and test            -> sharded/
  vocabulary  a WordPiece vocabulary trained on the text                         -> vocab/
  hdf5        samples of each sequence length, verified                          -> hdf5/
  verify      checks a folder of HDF5 shards and reports what is in it
  repack      converts compressed or chunked HDF5 shards to memory-mapped ones
  all         all of these stages for a data set

Each stage writes a manifest: inputs, counts, sizes, SHA-256, options, versions. A stage that is up to date is skipped.
A run that was killed continues with the same command; a folder has its final name only when it is complete. The result
depends on input, options and seed, not on the number of workers.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils.errors import run_main  # first, because it handles errors of the other imports

# isort: split
from data_preparation import stages
from data_preparation.download import names_of
from data_preparation.executors import open_executor
from data_preparation.options import (
    SPLITTERS,
    FormatOptions,
    TextShardOptions,
    VocabularyOptions,
    add_casing_flag,
    add_executor_flags,
    add_sample_flags,
    add_seed_flag,
    check_sample_flags,
    refuse_workers_of_a_cluster,
    sample_options,
)
from data_preparation.stage_runner import Stage, run, show_plan
from tasks.glue_files import TASKS
from utils.command_line import (
    ArgumentParser,
    Arguments,
    BooleanFlag,
    fraction,
    non_negative_int,
    positive_float,
    positive_int,
)
from utils.errors import UserError
from utils.files import lock_folder, read_json

ROOT = Path(__file__).resolve().parents[1]
PATHS = "files, folders, and addresses that fsspec knows (s3://, gs://, hf://, https://)"
# Sentence parameters ship under the name of the language; trained ones are stored under its code.
LANGUAGE_NAMES = {"en": "english", "simple": "english"}

DEFAULT_OUTPUT_DIR = Path(os.environ.get("BERT_PREP_WORKING_DIR") or ROOT / "data")

Add = Callable[..., Any]  # a parser's add_argument


# From arguments to stages.


def download_stages(args: Arguments, dataset: str) -> list[Stage]:
    if dataset == "wikicorpus":
        return [stages.download_wikipedia(args.output_dir, args.language, args.dump_date, args.mirror)]
    if dataset == "books":
        if args.books is None:
            raise UserError("no books given: use PATH, or --books with a text file that has one address per line")
        return [stages.download_books(args.output_dir, read_lines(args.books, "--books"))]
    if dataset == "glue":
        return [stages.download_glue(args.output_dir, task, args.mirror) for task in args.tasks or TASKS]
    versions = ("1.1", "2.0") if args.squad_version == "both" else (args.squad_version,)
    return [stages.download_squad(args.output_dir, version, args.mirror) for version in versions]


def download_folder(args: Arguments, dataset: str) -> str:
    folder = args.output_dir / "download" / dataset
    return str(folder / args.language / args.dump_date if dataset == "wikicorpus" else folder)


def format_stage(args: Arguments, dataset: str, paths: Sequence[str]) -> Stage:
    options = FormatOptions(
        sentence_splitter=args.sentence_splitter,
        language=LANGUAGE_NAMES.get(args.language, args.language),
        sentence_parameters=args.sentence_parameters,
        text_field=args.text_field,
        empty_line=args.empty_line or ("document" if args.sentence_splitter == "newline" else "paragraph"),
        skip_bad=args.skip_bad,
    )
    name = f"wikicorpus_{args.language}" if dataset == "wikicorpus" else dataset
    return stages.FormatStage(args.output_dir, dataset, name, paths, options)


def shard_stage(args: Arguments, find_folders: Callable[[], list[Path]]) -> Stage:
    options = TextShardOptions(
        args.shard_mb, args.test_fraction, args.random_seed, args.drop_duplicates, tuple(args.weights)
    )
    return stages.ShardStage(args.output_dir, find_folders, options)


def vocabulary_stage(args: Arguments, sharded: Path) -> Stage:
    options = VocabularyOptions(
        size=args.vocab_size,
        do_lower_case=args.do_lower_case,
        alphabet=args.alphabet,
        unused=args.unused,
        reserved=tuple(read_lines(args.reserved_words, "--reserved-words")) if args.reserved_words else (),
        sample_mb=args.sample_mb,
    )
    config = read_json(args.bert_config, "model config")
    return stages.VocabularyStage(args.output_dir, sharded, options, config)


def hdf5_stages(args: Arguments, sharded: Path, train_vocab: bool = False) -> list[Stage]:
    trained = args.output_dir / "vocab" / "vocab.txt"
    vocab_file = args.vocab_file or (trained if train_vocab or trained.exists() else shipped_vocab(args.do_lower_case))
    found = []
    for length, predictions in args.lengths:
        options = sample_options(args, length, predictions)
        # Test samples are only evaluated, so one pass is enough.
        for split, split_options in (("training", options), ("test", replace(options, dupe_factor=1))):
            stage = partial(stages.Hdf5Stage, args.output_dir, sharded, split, vocab_file, args.do_lower_case)
            found.append(stage(split_options))
    return found


def shipped_vocab(do_lower_case: bool) -> Path:
    return ROOT / "vocab" / f"bert-large-{'uncased' if do_lower_case else 'cased'}-vocab.txt"


def all_stages(args: Arguments) -> list[Stage]:
    if args.dataset in ("squad", "glue"):
        return download_stages(args, args.dataset)
    if args.dataset == "corpus" and not args.paths:
        raise UserError("all corpus: name the text: all corpus PATH")
    if args.dataset == "wiki_books" and args.books is None:
        taken = f" ({args.paths[0]} is taken for it)" if args.paths else ""
        raise UserError(
            "all wiki_books: name the books: --books FOLDER, or --books FILE with one address per line; "
            f"PATH is the Wikipedia dump{taken}"
        )
    datasets = {"wiki_only": ["wikicorpus"], "wiki_books": ["wikicorpus", "books"]}.get(args.dataset, [args.dataset])
    downloads, formats = [], []
    for dataset in datasets:
        paths = args.paths if dataset == datasets[0] else []
        if dataset == "books" and not paths and args.books and args.books.is_dir():
            paths = [str(args.books)]
        if not paths:
            downloads += download_stages(args, dataset)
            paths = [download_folder(args, dataset)]
            if dataset == "books":  # the folder may also have the books of an earlier list
                paths = [f"{paths[0]}/{name}" for name in names_of(downloads[-1].options["urls"])]
        formats.append(format_stage(args, dataset, paths))
    if args.dataset in ("wiki_only", "wiki_books") and not args.paths:
        downloads += download_stages(args, "squad")  # for fine-tuning; not where the dump is local, without a network
    shard = shard_stage(args, lambda: [stage.folder for stage in formats])
    vocabulary = [vocabulary_stage(args, shard.folder)] if args.train_vocab else []
    return [*downloads, *formats, shard, *vocabulary, *hdf5_stages(args, shard.folder, args.train_vocab)]


STAGES: dict[str, Callable[[Arguments], list[Stage]]] = {
    "download": lambda args: download_stages(args, args.dataset),
    "format": lambda args: [format_stage(args, args.dataset, args.paths or [download_folder(args, args.dataset)])],
    "shard": lambda args: [shard_stage(args, lambda: args.paths or stages.formatted_folders(args.output_dir))],
    "vocabulary": lambda args: [vocabulary_stage(args, args.sharded or args.output_dir / "sharded")],
    "hdf5": lambda args: hdf5_stages(args, args.sharded or args.output_dir / "sharded"),
    "all": all_stages,
}


def read_lines(path: Path, flag: str) -> list[str]:
    """The lines of a text file, without empty ones and those that start with #."""
    if not path.is_file():
        raise UserError(f"{flag} {path} is not a file: name a text file with one entry per line")
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise UserError(f"{flag} {path} has no entry: write one per line")
    return lines


# The command line.


def length_and_predictions(text: str) -> tuple[int, int]:
    """0 predictions, for --dynamic-masking, if only the length is given."""
    length, separator, predictions = text.partition(":")
    return positive_int(length), positive_int(predictions) if separator else 0


def name_and_weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    return name, positive_float(weight)


def add_common(add: Add) -> None:
    add(
        "--output-dir",
        type=Path,
        default=DEFAULT_OUTPUT_DIR,
        help="folder for download/, formatted/, sharded/, vocab/, hdf5/; $BERT_PREP_WORKING_DIR sets the default",
    )
    add_run(add)


def add_run(add: Add) -> None:
    add_executor_flags(add)
    add("--dry-run", action=BooleanFlag, help="show the stages and whether they are up to date; do nothing")


def add_download(add: Add) -> None:
    add(
        "--mirror",
        action="append",
        default=[],
        help="address to try first, with the files as on the original server; repeatable",
    )
    add("--books", type=Path, help="text file with the address of one book per line; for `all`, or a folder of books")
    add("--squad-version", choices=("1.1", "2.0", "both"), default="both", help="version of SQuAD")
    add("--tasks", nargs="+", choices=tuple(TASKS), metavar="TASK", help="tasks of GLUE; all of them if not given")


def add_language(add: Add) -> None:
    add("--language", default="en", help="language code, as in <code>.wikipedia.org")
    add("--dump-date", default="latest", help="date of the Wikipedia dump: YYYYMMDD or latest")


def add_format(add: Add) -> None:
    default = FormatOptions
    add("--sentence-splitter", choices=SPLITTERS, default=default.sentence_splitter, help="how to find sentences")
    add(
        "--sentence-parameters",
        type=Path,
        help="file of Punkt parameters; if not given, the shipped ones of the language, or else trained on the text",
    )
    add("--text-field", default=default.text_field, help="field of .jsonl and .parquet files that holds the text")
    add(
        "--empty-line",
        choices=("paragraph", "document"),
        help="what an empty line in a .txt file ends; if not given, document for the splitter newline, else paragraph",
    )
    add("--skip-bad", action=BooleanFlag, help="leave out bad documents, count them and list them in skipped.log")


def add_shard(add: Add) -> None:
    default = TextShardOptions
    add("--shard-mb", type=positive_float, default=default.shard_mb, help="size of a text shard in MB")
    add(
        "--test-fraction", type=fraction, default=default.test_fraction, help="fraction of documents for the test split"
    )

    add(
        "--drop-duplicates",
        choices=("none", "equal", "near"),
        default=default.drop_duplicates,
        help="keep one of several documents that are equal, or nearly so",
    )
    add(
        "--weights",
        nargs="+",
        type=name_and_weight,
        default=[],
        metavar="NAME=WEIGHT",
        help="copies of the training documents of formatted/NAME, such as books=2 wikicorpus_en=0.5",
    )


def add_sharded(add: Add) -> None:
    add("--sharded", type=Path, help="folder of text shards; if not given, sharded/ in the output folder")


def add_vocabulary(add: Add) -> None:
    default = VocabularyOptions
    add("--vocab-size", type=positive_int, default=default.size, help="number of tokens, special ones included")
    add("--alphabet", type=positive_int, default=default.alphabet, help="maximum number of single characters")
    add("--unused", type=non_negative_int, default=default.unused, help="number of [unused...] tokens to reserve")
    add("--reserved-words", type=Path, help="text file with one word per line that must become a token")
    add("--sample-mb", type=positive_int, default=default.sample_mb, help="MB of text to train the vocabulary on")
    config = ROOT / "bert_configs" / "bert-base-uncased.json"
    add("--bert-config", type=Path, default=config, help="model config to copy with the size of the vocabulary")


def add_hdf5(add: Add) -> None:
    add("--vocab-file", type=Path, help="WordPiece vocabulary; if not given, the one trained here, or a shipped one")
    add(
        "--lengths",
        nargs="+",
        type=length_and_predictions,
        default=[(128, 20), (512, 80)],
        metavar="LENGTH:PREDICTIONS",
        help="tokens per sample, and maximum number of masked tokens, such as 128:20; with --dynamic-masking, only "
        "the tokens per sample",
    )
    add_sample_flags(add)


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="STAGE")

    def command(name: str, description: str, *groups: Callable[[Add], None]) -> Add:
        sub = commands.add_parser(name, help=description, description=description)
        for group in groups:
            group(sub.add_argument)
        return sub.add_argument

    add = command("download", "Downloads a data set and verifies it.", add_common, add_language, add_download)
    add("dataset", choices=("wikicorpus", "books", "squad", "glue"), help="data set to download")

    add = command("format", "Writes a source as one sentence per line.", add_common, add_language, add_format)
    add("dataset", choices=tuple(stages.SOURCE_FORMATS), help="Wikipedia dump, books to clean, or text used as it is")
    add("paths", nargs="*", metavar="PATH", help=f"{PATHS}; if not given, what was downloaded")

    add = command("shard", "Makes training and test shards of text.", add_common, add_seed_flag, add_shard)
    add("paths", nargs="*", type=Path, metavar="FOLDER", help="formatted text; if not given, all in formatted/")

    command("vocabulary", "Trains a WordPiece vocabulary.", add_common, add_sharded, add_casing_flag, add_vocabulary)
    command(
        "hdf5", "Makes samples and verifies them.", add_common, add_sharded, add_casing_flag, add_seed_flag, add_hdf5
    )

    add = command("verify", "Checks every row of HDF5 shards and reports what is in them.", add_run)
    add("folder", type=Path, help="folder of HDF5 shards, or one that contains such folders")
    add("--vocab-file", type=Path, help="vocabulary; if not given, found by its SHA-256")
    add("--samples", type=non_negative_int, default=3, help="number of samples to print")

    add = command("repack", "Converts gzip or chunked HDF5 shards to memory-mapped ones.", add_run)
    add("folder", type=Path, help="folder of HDF5 shards, or one that contains such folders")
    add("--output-dir", type=Path, help="folder for the converted shards; if not given, the shards are replaced")

    groups = (add_common, add_language, add_download, add_format, add_seed_flag, add_shard, add_casing_flag)
    add = command("all", "Runs every stage for a data set.", *groups, add_vocabulary, add_hdf5)
    datasets = ("wiki_only", "wiki_books", "books", "corpus", "squad", "glue")
    add("dataset", choices=datasets, help="corpus: any text as it is")
    add("paths", nargs="*", metavar="PATH", help=f"text, books, or a dump that was downloaded before: {PATHS}")
    add("--train-vocab", action=BooleanFlag, help="train a vocabulary on the text")
    args = parser.parse_args(argv)
    check_effects(args, parser)
    check_lengths(args, parser)
    refuse_workers_of_a_cluster(args, parser)
    return args


TEXT_FLAGS = ("language", "sentence_splitter", "sentence_parameters", "text_field", "empty_line", "skip_bad")
SAMPLE_FLAGS = (
    *(
        "random_seed",
        "shard_mb",
        "test_fraction",
        "drop_duplicates",
        "weights",
        "do_lower_case",
        "vocab_file",
        "lengths",
        "masked_lm_prob",
        "dynamic_masking",
    ),
    *("short_seq_prob", "dupe_factor", "whole_word_mask", "nsp", "pack_documents", "compression", "train_vocab"),
)
VOCABULARY_FLAGS = ("vocab_size", "alphabet", "unused", "reserved_words", "sample_mb", "bert_config")


def check_effects(args: Arguments, parser: ArgumentParser) -> None:
    """Refuses flags that this stage would ignore for this data set."""
    if args.command not in ("download", "format", "all"):
        return
    command, dataset = args.command, args.dataset
    is_local = command == "format" or (command == "all" and bool(args.paths))
    has_wikipedia = dataset in ("wikicorpus", "wiki_only", "wiki_books")
    fetches_wikipedia, fetches_squad = has_wikipedia and not is_local, dataset in ("squad", "wiki_only", "wiki_books")
    effects = [
        (("mirror",), fetches_wikipedia or dataset == "glue" or (fetches_squad and not is_local), "a known download"),
        (("dump_date",), has_wikipedia and not getattr(args, "paths", []), "a Wikipedia dump to find"),
        (("books",), dataset == "wiki_books" or (dataset == "books" and not is_local), "books to download"),
        (("squad_version",), fetches_squad and not is_local, "a download of SQuAD"),
        (("tasks",), dataset == "glue", "a download of GLUE"),
    ]
    if command == "download":
        effects.append((("language",), has_wikipedia, "a download of Wikipedia"))
    else:
        has_plain_text = dataset not in ("wikicorpus", "wiki_only")
        effects += [
            ((*TEXT_FLAGS, *SAMPLE_FLAGS), dataset not in ("squad", "glue"), "text to prepare"),
            (("sentence_parameters",), args.sentence_splitter != "newline", "--sentence-splitter fast or punkt"),
            (("text_field", "empty_line"), has_plain_text, "a corpus or books"),
        ]
    if command == "all":
        effects.append((VOCABULARY_FLAGS, args.train_vocab, "--train-vocab"))
    parser.refuse_without_effect(args, effects)


def check_lengths(args: Arguments, parser: ArgumentParser) -> None:
    if not hasattr(args, "lengths"):
        return
    check_sample_flags(args, parser, ("masked_lm_prob", "whole_word_mask"))
    for length, predictions in args.lengths if args.given("lengths") else ():
        if args.dynamic_masking == bool(predictions):
            wanted = f"{length}" if args.dynamic_masking else f"{length}:{max(1, length * 16 // 100)}"
            parser.error(
                f"--lengths {length}{f':{predictions}' if predictions else ''}: give the predictions per sequence "
                f"without --dynamic-masking, and only then: {wanted}"
            )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.dry_run and args.command in STAGES:
        show_plan(STAGES[args.command](args))
        return
    with open_executor(args.scheduler, args.num_workers) as executor:
        if args.command == "verify":
            from data_preparation.verify_report import report_on_folders, show_folders

            if args.dry_run:
                show_folders(args.folder)
            else:
                report_on_folders(args.folder, args.vocab_file, args.samples, executor)
        elif args.command == "repack":
            from data_preparation.repack import repack_folders

            repack_folders(args.folder, args.output_dir, executor, args.dry_run)
        else:
            with closing(lock_folder(args.output_dir)):
                for stage in STAGES[args.command](args):
                    run(stage, executor)


if __name__ == "__main__":
    run_main(main)
