"""Prepares data for pre-training and fine-tuning: from the network or your own text to verified
HDF5 shards.

  download    Wikipedia in any language, SQuAD, GLUE                             -> download/
  format      any source as text, one sentence per line                          -> formatted/
  shard       text shards of equal size, split into training and test            -> sharded/
  vocabulary  a tokenizer trained on the text: WordPiece, BPE or Unigram         -> vocab/
  hdf5        samples of each sequence length, verified                          -> hdf5/
  verify      checks a folder of HDF5 shards and reports what is in it
  repack      converts compressed or chunked HDF5 shards to contiguous ones
  all         all of these stages for a data set

Each stage writes a manifest: inputs, counts, sizes, SHA-256, options, versions. A stage that is up
to date is skipped. If interrupted, rerun the same command to resume; a folder has its final name
only when it is complete. The result depends on input, options and seed, not on the number of
workers.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bert_recipe.utils.errors import handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.data_preparation import stages
from bert_recipe.data_preparation.commands import changes_model, stages_of
from bert_recipe.data_preparation.engine.runner import run, show_plan
from bert_recipe.data_preparation.options import (
    CASING,
    DYNAMIC_MASKING,
    EXECUTOR_FLAGS,
    FormatOptions,
    ModelVocabularyOptions,
    SampleOptions,
    TextShardOptions,
    VocabularyOptions,
)
from bert_recipe.tasks.classification.specs import TASKS
from bert_recipe.utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Arguments,
    Flag,
    flags_of,
    plain_name,
    positive_int,
)
from bert_recipe.utils.files import lock_folder
from bert_recipe.utils.work_units.executors import open_executor

ROOT = Path(__file__).resolve().parents[1]


def length_and_max_masked(text: str) -> tuple[int, int]:
    """0 masked tokens, for --dynamic-masking, if only the length is given."""
    length, separator, max_masked = text.partition(":")
    return positive_int(length), positive_int(max_masked) if separator else 0


RUN = [
    *EXECUTOR_FLAGS,
    Flag("--dry-run", bool, False, "show the stages and whether they are up to date; do nothing"),
]
LANGUAGE = [
    Flag("--language", plain_name, "en", "language code, as in <code>.wikipedia.org"),
    Flag("--dump-date", str, "latest", "date of the Wikipedia dump: YYYYMMDD or latest"),
]
DOWNLOAD = [
    Flag(
        "--mirror",
        str,
        [],
        "address to try first, with the files as on the original server; repeatable",
        options={"action": "append"},
    ),
    Flag("--squad-version", ("1.1", "2.0", "both"), "both", "version of SQuAD"),
    Flag(
        "--tasks",
        tuple(TASKS),
        None,
        "tasks of GLUE; all if not given",
        options={"nargs": "+", "metavar": "TASK"},
    ),
]
BOOKS = Flag("--books", Path, None, "folder of books, for wiki_books")
FORMAT = flags_of(FormatOptions)
SHARD = flags_of(TextShardOptions)
SHARDED = Flag(
    "--sharded",
    Path,
    None,
    "folder of text shards, those to hold out in its folder test; if not given, sharded/ in the "
    "output folder",
)
CONFIG = ROOT / "bert_configs" / "bert-base-uncased.json"
OWN_VOCABULARY = [  # besides --do-lower-case
    *flags_of(VocabularyOptions),
    Flag("--bert-config", Path, CONFIG, "model config to copy with the size of the vocabulary"),
]
HDF5 = [
    CASING,
    Flag(
        "--vocab-file",
        Path,
        None,
        "vocabulary or tokenizer.json; if not given, the one trained here, or a shipped one",
    ),
    Flag(
        "--lengths",
        length_and_max_masked,
        [(128, 20), (512, 80)],
        "tokens per sample, and maximum number of masked tokens, such as 128:20; with "
        "--dynamic-masking, only the tokens per sample",
        options={"nargs": "+", "metavar": "LENGTH:PREDICTIONS"},
    ),
    DYNAMIC_MASKING,
    *flags_of(SampleOptions),
]
VERIFY = [
    Flag(
        "--vocab-file",
        Path,
        None,
        "vocabulary; if not given, the one that the shards name, or the one beside them",
    ),
]
REPACKED = Flag(
    "--output-dir", Path, None, "folder for the converted shards; if not given, they are replaced"
)
TRAIN_VOCAB = Flag(
    "--train-vocab",
    bool,
    False,
    "train a tokenizer on the text",
    excludes=("--extend", "--replace"),
)


def dataset_flag(choices: tuple[str, ...], help_text: str) -> Flag:
    return Flag("dataset", choices, REQUIRED, help_text)


def paths_flag(help_text: str) -> Flag:
    return Flag("paths", str, None, help_text, options={"nargs": "*", "metavar": "PATH"})


ALL = """Runs every stage for a data set.

data sets:
  wiki_only    a Wikipedia (--language, --dump-date) and SQuAD, downloaded; or the dump in PATH
  wiki_books   the same, with the books of --books
  books        books in .txt below PATH: chapters of prose
  corpus       any text: files and folders
  squad        SQuAD v1.1 and v2.0, downloaded
  glue         the tasks of GLUE and SuperGLUE, downloaded

examples:
  prepare.py all corpus /my/texts --train-vocab --no-do-lower-case --output-dir data/my
  prepare.py all wiki_only --language de --lengths 128:20 --dry-run
"""


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__)
    output_dir = Flag(
        "--output-dir",
        Path,
        Path(os.environ.get("BERT_PREP_WORKING_DIR") or ROOT / "data"),
        "folder for all results; $BERT_PREP_WORKING_DIR sets the default",
    )
    common = [output_dir, *RUN]
    commands = parser.add_subparsers(dest="stage", required=True, metavar="STAGE", help="see above")

    def command(name: str, description: str, *flags: Flag) -> ArgumentParser:
        sub = commands.add_parser(name, description=description)
        sub.add_flags("flags", flags)
        return sub

    command(
        "download",
        "Downloads a data set and verifies it.",
        dataset_flag(("wikicorpus", "squad", "glue"), "data set to download"),
        *common,
        *LANGUAGE,
        *DOWNLOAD,
    )
    formats = tuple(stages.SOURCE_FORMATS)
    command(
        "format",
        "Writes a source as one sentence per line.",
        dataset_flag(formats, "Wikipedia dump, books to clean, or text used as it is"),
        paths_flag("files and folders; if not given, what was downloaded"),
        *common,
        *LANGUAGE,
        *FORMAT,
    )
    formatted = Flag(
        "paths",
        Path,
        None,
        "formatted text; if not given, all in formatted/",
        options={"nargs": "*", "metavar": "FOLDER"},
    )
    command("shard", "Makes training and test shards of text.", formatted, *common, *SHARD)
    about = (
        "Trains a tokenizer: vocab.txt for WordPiece, else tokenizer.json. Or changes the "
        "vocabulary of a model."
    )
    command(
        "vocabulary",
        about,
        *common,
        SHARDED,
        CASING,
        *OWN_VOCABULARY,
        *flags_of(ModelVocabularyOptions),
    )
    command("hdf5", "Makes samples and verifies them.", *common, SHARDED, *HDF5)
    folder = Flag(
        "folder", Path, REQUIRED, "folder of HDF5 shards, or one that contains such folders"
    )
    about = "Checks every row of HDF5 shards and reports what is in them."
    command("verify", about, folder, *EXECUTOR_FLAGS, *VERIFY)
    about = "Converts gzip or chunked HDF5 shards to contiguous ones."
    command("repack", about, folder, *RUN, REPACKED)
    data_sets = ("wiki_only", "wiki_books", "books", "corpus", "squad", "glue")
    whole = command(
        "all", ALL, dataset_flag(data_sets, "see above"), paths_flag("see above"), *common
    )
    parts = {"download": [*LANGUAGE, *DOWNLOAD, BOOKS], "format": FORMAT, "shard": SHARD}
    model_vocabulary = flags_of(ModelVocabularyOptions)
    parts |= {"vocabulary": [TRAIN_VOCAB, *OWN_VOCABULARY, *model_vocabulary], "hdf5": HDF5}
    for stage, flags in parts.items():
        whole.add_flags(
            f"flags of the stage {stage}", [flag for flag in flags if flag.name not in whole.flags]
        )
    args = parser.parse_args(argv)
    commands.choices[args.stage].check_flags(args)
    if "dataset" in args:
        if args.dataset in ("books", "corpus") and not args.paths:
            dataset = f"{args.stage} {args.dataset}"
            parser.error(f"{dataset}: name the text: {dataset} PATH")
        check_effects(args, parser)
    if "lengths" in args:
        check_lengths(args, parser)
    return args


def check_effects(args: Arguments, parser: ArgumentParser) -> None:
    """Refuses flags that this stage would ignore for this data set."""
    dataset = args.dataset
    paths = args.get("paths")
    downloads = args.stage == "download" or (args.stage == "all" and not paths)
    is_wikipedia = dataset.startswith("wiki")
    has_squad = dataset in ("squad", "wiki_only", "wiki_books")
    has_text = args.stage == "download" or dataset not in ("squad", "glue")

    def names(flags: Iterable[Flag]) -> list[str]:
        return [flag.name for flag in flags]

    effects = [
        (["mirror"], downloads, "a known download"),
        (["dump_date"], is_wikipedia and not paths, "a Wikipedia dump to find"),
        (["books"], dataset == "wiki_books", "the data set wiki_books"),
        (["squad_version"], has_squad and downloads, "a download of SQuAD"),
        (["tasks"], dataset == "glue", "a download of GLUE"),
        (["language"], is_wikipedia or args.stage != "download", "a download of Wikipedia"),
        (names([LANGUAGE[0], *FORMAT, *SHARD, *HDF5, TRAIN_VOCAB]), has_text, "text to prepare"),
        (["extend", "replace"], has_text, "text to prepare"),
        (
            ["text_field", "empty_line"],
            dataset not in ("wikicorpus", "wiki_only"),
            "a corpus or books",
        ),
        (
            names(OWN_VOCABULARY),
            args.get("train_vocab") or changes_model(args),
            "--train-vocab, --extend or --replace",
        ),
    ]
    parser.refuse_without_effect(args, effects)
    if args.get("vocab_file") and (args.get("train_vocab") or changes_model(args)):
        parser.error(
            "--vocab-file cannot be combined with --train-vocab, --extend or --replace, which make "
            "the vocabulary: leave it out"
        )


def check_lengths(args: Arguments, parser: ArgumentParser) -> None:
    for length, max_masked in args.lengths if args.given("lengths") else ():
        if args.dynamic_masking == bool(max_masked):
            parser.error(
                "--lengths: give either the number of masked tokens, such as "
                f"{length}:{max(1, length * 16 // 100)}, or only {length} and --dynamic-masking, "
                "with which training draws the masks"
            )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    chosen = stages_of(args)
    if chosen and args.dry_run:
        show_plan(chosen)
        return
    with open_executor(args.scheduler, args.num_workers) as executor:
        if args.stage == "verify":
            from bert_recipe.data_preparation.samples.verify import report_on_folders

            report_on_folders(args.folder, args.vocab_file, executor)
        elif args.stage == "repack":
            from bert_recipe.data_preparation.samples.repack import repack_folders

            repack_folders(args.folder, args.output_dir, executor, args.dry_run)
        else:
            with closing(lock_folder(args.output_dir)):
                run(chosen, executor)


if __name__ == "__main__":
    run_main(main)
