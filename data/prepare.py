"""Data for pre-training and fine-tuning, from what is on the network or on disk to verified HDF5 shards.

  download    Wikipedia in any language, books from a list of addresses, SQuAD   -> download/
  format      any source as text: a sentence a line, documents apart             -> formatted/
  shard       text shards of one size, training and test apart                   -> sharded/
  vocabulary  a WordPiece vocabulary of one's own                                -> vocab/
  hdf5        samples of each wanted length, verified                            -> hdf5/
  verify      what is in a folder of HDF5 shards
  all         the stages above for a whole data set

Each stage leaves a manifest: inputs, counts, sizes, SHA-256, options, versions. A stage whose manifest fits is skipped;
one that was killed goes on, or starts again, with the same command, and its folder has its final name only when it is
complete. The result depends on input, options and seed, not on the number of workers.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from data import download, manifest
from data.documents import SUFFIXES
from data.stages import Stage, empty, in_bytes, in_time, only_one_in, run, show
from utils.command_line import (
    ArgumentParser,
    Arguments,
    BooleanFlag,
    fraction,
    non_negative_int,
    positive_float,
    positive_int,
)
from utils.errors import UserError, run_main
from utils.files import read_json
from utils.progress import progress_bar

# What needs nltk, h5py or tokenizers is imported where it is used: --help and the start of a worker are quick.

ROOT = Path(__file__).resolve().parents[1]
MB = 1_000_000
SOURCE_SUFFIXES = {"wikicorpus": (".xml.bz2", ".xml"), "books": SUFFIXES, "corpus": SUFFIXES}
# Sentence parameters ship under the language's name; others are learnt, and kept under the code.
LANGUAGE_NAMES = {"en": "english", "simple": "english"}
# Starting a worker takes as long as working through so many bytes.
BYTES_WORTH_A_WORKER = 4 * MB

# For dry runs: MB of text that a core gets through in a second, as measured in docs/data.md, and sizes.
FORMAT_RATE = {"wikicorpus": 0.9, "books": 1.2, "corpus": 1.9}
SHARD_RATE = 100.0  # one process
VOCABULARY_RATE = 3.6
VERIFY_RATE = 100.0  # of shards
PASS_RATE = 35.0  # text times passes over it, verification included
TOKENS_A_BYTE = 0.3  # a pass, special tokens and random next sentences included
FILL = 0.85
# Formatted text by size of file, where it is not 1; for dumps a guess, as they hold much that is no prose.
TEXT_PER_BYTE = {".bz2": 0.7, ".gz": 2.7, ".parquet": 1.7}
ENGLISH_DUMP_BYTES = 24_000 * MB
DOWNLOAD_RATE = 5.0  # MB/s, a guess


# The stages.


def download_stages(args: Arguments, dataset: str) -> list[Stage]:
    if dataset == "wikicorpus":
        options = {"language": args.language, "date": args.dump_date}
        mirrors = [*args.mirror, *download.WIKIMEDIA_MIRRORS]
        fetch = partial(download.fetch_wikipedia, args.language, date=args.dump_date, mirrors=mirrors)
        size = ENGLISH_DUMP_BYTES if args.language == "en" else 0
        return [download_stage(download_folder(args, dataset), dataset, options, fetch, size)]
    if dataset == "books":
        if args.books is None:
            raise UserError("name the books: PATH, or --books with a text file that has an address on each line")
        urls = read_lines(args.books, "--books")
        fetch = partial(download.fetch_books, urls)
        return [download_stage(download_folder(args, dataset), dataset, {"urls": urls}, fetch, len(urls) * MB // 2)]
    stages = []
    for version in ("1.1", "2.0") if args.squad_version == "both" else (args.squad_version,):
        folder = download_folder(args, dataset) / f"v{version}"
        size = sum(size for name, (size, _) in download.SQUAD_FILES.items() if version in name)
        fetch = partial(download.fetch_squad, f"v{version}")
        stages.append(download_stage(folder, f"{dataset} {version}", {"version": version}, fetch, size))
    return stages


def download_stage(folder: Path, name: str, options: dict[str, Any], fetch: Callable, size: float) -> Stage:
    def make(folder: Path) -> dict[str, Any]:
        fetch(folder=folder)
        return {"files": sum(path.name != manifest.FILE_NAME for path in folder.iterdir())}

    seconds = size / MB / DOWNLOAD_RATE
    return Stage(f"download {name}", folder, options, list, make, size, seconds, in_place=True)


def download_folder(args: Arguments, dataset: str) -> Path:
    folder = args.output_dir / "download" / dataset
    return folder / args.language / args.dump_date if dataset == "wikicorpus" else folder


def format_stage(args: Arguments, dataset: str, paths: Sequence[Path]) -> Stage:
    """`paths`: files, and folders with files in them."""
    name = f"wikicorpus_{args.language}" if dataset == "wikicorpus" else dataset
    language = LANGUAGE_NAMES.get(args.language, args.language)
    parameters = args.sentence_parameters
    options = {
        "dataset": dataset,
        "sentence_splitter": args.sentence_splitter,
        "language": language,
        "sentence_parameters": read_json(parameters, "sentence parameters") if parameters else None,
        "text_field": args.text_field,
        "empty_line": args.empty_line or ("document" if args.sentence_splitter == "newline" else "paragraph"),
        "skip_bad": args.skip_bad,
    }
    expected = expected_text(args, dataset, paths)

    def make(folder: Path) -> dict[str, Any]:
        from data.formatting import FormatOptions, format_text

        empty(folder)
        format_options = FormatOptions(
            args.sentence_splitter, language, parameters, args.text_field, options["empty_line"]
        )
        files = source_files(dataset, paths)
        size = expected_text(args, dataset, files)
        with progress_bar(size, f"format {name}") as bar:
            workers = useful_workers(args, size)
            return format_text(dataset, files, folder, format_options, workers, args.skip_bad, bar.update)

    return Stage(
        f"format {name}",
        args.output_dir / "formatted" / name,
        options,
        lambda: source_files(dataset, paths),
        make,
        expected,
        expected / MB / FORMAT_RATE[dataset] / args.num_workers,
    )


def source_files(dataset: str, paths: Sequence[Path]) -> list[Path]:
    """The files that `paths` name or have in them, in an order that depends on their names alone."""
    suffixes = SOURCE_SUFFIXES[dataset]
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist: check the path, or run the download stage first")
        found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        found = [file for file in found if file.name.lower().endswith(suffixes)]
        if not found:
            raise UserError(f"{path} holds no {', '.join(suffixes)} file: check the path")
        files += found
    return files


def expected_text(args: Arguments, dataset: str, paths: Sequence[Path]) -> float:
    """Bytes of formatted text that will come of `paths`, roughly; 0 where nothing is known."""
    try:
        files = source_files(dataset, paths)
    except UserError:  # still to be downloaded, or wrong, which the stage itself will say
        is_english = dataset == "wikicorpus" and args.language == "en"
        return ENGLISH_DUMP_BYTES * TEXT_PER_BYTE[".bz2"] if is_english else 0.0
    return sum(file.stat().st_size * TEXT_PER_BYTE.get(file.suffix.lower(), 1.0) for file in files)


def useful_workers(args: Arguments, size: float) -> int:
    return min(args.num_workers, 1 + int(size / BYTES_WORTH_A_WORKER))


def text_files(folder: Path, maker: str) -> list[Path]:
    """The text that the stage `maker`, or the user, left in `folder` and in its folders training and test."""
    made = manifest.read(folder)
    if made is None:
        files = sorted(path for pattern in ("*.txt", "t*/*.txt") for path in folder.glob(pattern))
        if not files:
            raise UserError(f"no text in {folder}: run the {maker} stage first, or check the path")
        return files
    entries = [entry for entry in made["outputs"] if entry["path"].endswith(".txt")]
    for entry in entries:
        path = folder / entry["path"]
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise UserError(f"{path} is gone or has changed: run the {maker} stage again")
    return [folder / entry["path"] for entry in entries]


def text_identity(folder: Path, maker: str) -> list[Path]:
    """The files whose sums say which text is in `folder`: a stage's manifest has those of all its files."""
    files = text_files(folder, maker)
    return [folder / manifest.FILE_NAME] if manifest.read(folder) else files


def shard_stage(args: Arguments, folders: Callable[[], list[Path]], expected: float) -> Stage:
    options = {"shard_mb": args.shard_mb, "test_fraction": args.test_fraction, "random_seed": args.random_seed}

    def make(folder: Path) -> dict[str, Any]:
        from data.shards import write_shards

        empty(folder)
        files = [path for source in folders() for path in text_files(source, "format")]
        with progress_bar(sum(path.stat().st_size for path in files), "shard") as bar:
            shard_bytes = max(1, round(args.shard_mb * MB))
            splits = write_shards(files, folder, shard_bytes, args.test_fraction, args.random_seed, bar.update)
        counts: dict[str, Any] = {}
        for side, split in splits.items():
            counts |= {f"{side}_documents": split.documents, f"{side}_shards": len(split.files)}
        return counts

    def inputs() -> list[Path]:
        return [path for source in folders() for path in text_identity(source, "format")]

    return Stage("shard", args.output_dir / "sharded", options, inputs, make, expected, expected / MB / SHARD_RATE)


def formatted_folders(args: Arguments) -> list[Path]:
    folders = sorted(path.parent for path in args.output_dir.glob(f"formatted/*/{manifest.FILE_NAME}"))
    folders = [folder for folder in folders if folder.suffix not in (".partial", ".old")]
    if not folders:
        raise UserError(f"no text in {args.output_dir / 'formatted'}: run the format stage first")
    return folders


def side_of(path: Path) -> str:
    return "test" if path.parent.name == "test" else "training"


def shards_of(sharded: Path, side: str) -> list[Path]:
    return [path for path in text_files(sharded, "shard") if side_of(path) == side]


def vocabulary_stage(args: Arguments, sharded: Path, expected: float) -> Stage:
    reserved = read_lines(args.reserved_words, "--reserved-words") if args.reserved_words else []
    options = {
        "size": args.vocab_size,
        "do_lower_case": args.do_lower_case,
        "alphabet": args.alphabet,
        "unused": args.unused,
        "reserved": reserved,
        "sample_mb": args.sample_mb,
    }
    config = read_json(args.bert_config, "model config")

    def make(folder: Path) -> dict[str, Any]:
        from data.vocabulary import VocabularyOptions, train_vocabulary

        empty(folder)
        files = shards_of(sharded, "training")
        size = min(args.sample_mb * MB, sum(path.stat().st_size for path in files))
        with progress_bar(2 * size, "vocabulary") as bar:
            vocabulary_options = VocabularyOptions(**options | {"reserved": tuple(reserved)})
            tokens = train_vocabulary(files, vocabulary_options, bar.update)
        (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
        fitting = json.dumps(config | {"vocab_size": len(tokens)}, indent=2)
        (folder / "config.json").write_text(fitting + "\n", encoding="utf-8")
        return {"tokens": len(tokens)}

    return Stage(
        "vocabulary",
        args.output_dir / "vocab",
        options | {"bert_config": config},
        lambda: text_identity(sharded, "shard"),
        make,
        args.vocab_size * 8,
        min(args.sample_mb, expected / MB) / VOCABULARY_RATE,
    )


def vocabulary_file(args: Arguments, is_trained: bool) -> Path:
    """The one that was named, else the one that is trained here, else the shipped one of the casing."""
    trained = args.output_dir / "vocab" / "vocab.txt"
    if args.vocab_file:
        return args.vocab_file
    if is_trained or trained.exists():
        return trained
    return ROOT / "vocab" / f"bert-large-{'uncased' if args.do_lower_case else 'cased'}-vocab.txt"


def hdf5_stages(args: Arguments, sharded: Path, vocab_file: Path, expected: float) -> list[Stage]:
    return [
        hdf5_stage(args, sharded, vocab_file, expected, length, predictions, side)
        for length, predictions in args.lengths
        for side in ("training", "test")
    ]


def hdf5_stage(
    args: Arguments, sharded: Path, vocab_file: Path, expected: float, length: int, predictions: int, side: str
) -> Stage:
    # Held-out samples are measured and not trained on: one pass is enough.
    passes = args.dupe_factor if side == "training" else 1
    options = {
        "sequence_length": length,
        "predictions_per_sequence": predictions,
        "masked_lm_prob": args.masked_lm_prob,
        "short_seq_prob": args.short_seq_prob,
        "dupe_factor": passes,
        "random_seed": args.random_seed,
        "whole_word_mask": args.whole_word_mask,
        "next_sentence_prediction": args.nsp,
        "compression": args.compression,
    }
    casing = {"do_lower_case": args.do_lower_case}
    name = f"seq_{length}_pred_{predictions}"

    def inputs() -> list[Path]:
        check_casing(vocab_file, args.do_lower_case)
        return [*text_identity(sharded, "shard"), vocab_file]

    def make(folder: Path) -> dict[str, Any]:
        from create_pretraining_data import SampleOptions, create_shard_in_worker, load_tokenizer, output_name
        from data.parallel import ordered_map

        tokenizer = load_tokenizer(vocab_file, args.do_lower_case)  # a bad vocabulary stops here, before any worker
        keep_only_if_begun_with(folder, options | casing, inputs())
        create = partial(
            create_shard_in_worker,
            vocab_file=vocab_file,
            do_lower_case=args.do_lower_case,
            options=SampleOptions(**options),
            overwrite=False,
        )
        texts = shards_of(sharded, side)
        size = sum(path.stat().st_size for path in texts)
        workers = min(len(texts), useful_workers(args, size * passes))
        with progress_bar(size, f"hdf5 {name} {side}") as bar:
            for report in ordered_map(create, [(path, folder / output_name(path)) for path in texts], workers):
                bar.update(report.text_bytes)
                if report.warning:
                    tqdm.write(f"warning: {report.warning}", file=sys.stderr)
        shutil.copyfile(vocab_file, folder / "vocab.txt")
        return check_shards(folder, tokenizer, workers)

    share = args.test_fraction if "test_fraction" in args else 0.05
    text = expected * (share if side == "test" else 1 - share)
    samples = text * passes * TOKENS_A_BYTE / FILL / length
    return Stage(
        f"hdf5 {length} {side}",
        args.output_dir / "hdf5" / name / side,
        options | casing,
        inputs,
        make,
        samples * (4 * length + 3 * predictions + 1),
        text * passes / MB / PASS_RATE / args.num_workers,
        skip=lambda: None if shards_of(sharded, side) else f"there is no {side} text",
    )


def check_casing(vocab_file: Path, do_lower_case: bool) -> None:
    """A vocabulary that was trained here knows its casing."""
    made = manifest.read(vocab_file.parent)
    trained = made["options"].get("do_lower_case", do_lower_case) if made else do_lower_case
    if trained != do_lower_case:
        raise UserError(f"{vocab_file} was trained with --do-lower-case {trained}: say the same here")


def keep_only_if_begun_with(folder: Path, options: dict[str, Any], inputs: Sequence[Path]) -> None:
    """Empties `folder` unless a killed run began it with these options and inputs; its whole shards then stay."""
    note = folder / ".begun"
    content = json.dumps([options, [manifest.file_digest(path) for path in inputs]])
    if not note.exists() or note.read_text() != content:
        empty(folder)
        manifest.write_atomically(note, content.encode())


def check_shards(folder: Path, tokenizer: Any, workers: int) -> dict[str, Any]:
    """Verifies new shards before their folder gets its name, and leaves the report and the picture with them."""
    from data import verify

    findings = verify.verify_folder(folder, tokenizer, workers)
    lines = [*verify.report_lines(findings, tokenizer), "", *verify.sample_lines(folder, tokenizer, 3)]
    (folder / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    verify.draw(findings, folder / verify.PICTURE)
    (folder / ".begun").unlink()
    return {
        "samples": findings.samples,
        "shards": findings.shards,
        "%_full": round(100 * findings.fill, 1),
        "%_masked": round(100 * findings.masked_share, 1),
        "%_random_next": round(100 * findings.random_next_share, 1),
    }


def verify_folders(args: Arguments) -> None:
    """Reports on every folder of HDF5 shards in the one given."""
    from data import verify
    from pretraining_dataset import SHARD_SUFFIXES
    from tokenizer import BertTokenizer

    folders = sorted({path.parent for path in args.folder.rglob("*") if path.suffix in SHARD_SUFFIXES})
    if not folders:
        raise UserError(f"{args.folder} holds no HDF5 shard: check the path")
    if args.dry_run:
        show_verification(folders, args.num_workers)
        return
    for folder in folders:
        vocab_file = args.vocab_file or verify.find_vocabulary(folder, ROOT / "vocab")
        tokenizer = BertTokenizer(vocab_file) if vocab_file else None
        findings = verify.verify_folder(folder, tokenizer, args.num_workers)
        print(f"{folder}: every row can be right")
        print("\n".join(verify.report_lines(findings, tokenizer)))
        drawn = verify.draw(findings, folder / verify.PICTURE)
        print(f"picture           {folder / verify.PICTURE if drawn else 'left out: matplotlib is not installed'}")
        if args.samples:
            print("\n".join(["", *verify.sample_lines(folder, tokenizer, args.samples)]))
        print(flush=True)


def show_verification(folders: Sequence[Path], workers: int) -> None:
    """What there is to read, and how long that would take by the rate that was measured."""
    from pretraining_dataset import find_shards

    print(f"{'shards':>8} {'bytes':>9} {'time':>7}  folder")
    totals = (0, 0, 0.0)
    for folder in folders:
        sizes = [path.stat().st_size for path in find_shards(folder)]
        row = (len(sizes), sum(sizes), sum(sizes) / MB / VERIFY_RATE / min(workers, len(sizes)))
        totals = tuple(map(sum, zip(totals, row, strict=True)))
        print(f"{row[0]:>8} {in_bytes(row[1]):>9} {in_time(row[2]):>7}  {folder}")
    shards, size, seconds = totals
    print(f"{shards:>8} {in_bytes(size):>9} {in_time(seconds):>7}  estimated in all (dry run: nothing was done)")


def read_lines(path: Path, flag: str) -> list[str]:
    """The lines of a text file, without empty ones and those that begin with #."""
    if not path.is_file():
        raise UserError(f"{flag} {path} is no file: name a text file with one entry a line")
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise UserError(f"{flag} {path} has no entry: give one a line")
    return lines


def whole_plan(args: Arguments) -> list[Stage]:
    """The stages of `all`."""
    if args.dataset == "squad":
        return download_stages(args, "squad")
    if args.dataset == "corpus" and not args.paths:
        raise UserError("all corpus: name the text: all corpus PATH")
    datasets = {"wiki_only": ["wikicorpus"], "wiki_books": ["wikicorpus", "books"]}.get(args.dataset, [args.dataset])
    downloads, formats = [], []
    for dataset in datasets:
        paths = args.paths if dataset == datasets[0] else []
        if dataset == "books" and not paths and args.books and args.books.is_dir():
            paths = [args.books]
        if not paths:
            downloads += download_stages(args, dataset)
            paths = [download_folder(args, dataset)]
            if dataset == "books":  # the folder may also have the books of an earlier list
                paths = [paths[0] / name for name in download.names_of(downloads[-1].options["urls"])]
        formats.append(format_stage(args, dataset, paths))
    expected = sum(stage.expected_bytes for stage in formats)
    stages = [*downloads, *formats, shard_stage(args, lambda: [stage.folder for stage in formats], expected)]
    sharded = stages[-1].folder
    if args.train_vocab:
        stages.append(vocabulary_stage(args, sharded, expected))
    return stages + hdf5_stages(args, sharded, vocabulary_file(args, args.train_vocab), expected)


# The command line.


def plan(args: Arguments) -> list[Stage]:
    if args.command == "all":
        return whole_plan(args)
    if args.command == "download":
        return download_stages(args, args.dataset)
    if args.command == "format":
        return [format_stage(args, args.dataset, args.paths or [download_folder(args, args.dataset)])]
    if args.command == "shard":
        return [
            shard_stage(args, lambda: args.paths or formatted_folders(args), text_size(args.output_dir / "formatted"))
        ]
    sharded = args.sharded or args.output_dir / "sharded"
    if args.command == "vocabulary":
        return [vocabulary_stage(args, sharded, text_size(sharded))]
    return hdf5_stages(args, sharded, vocabulary_file(args, is_trained=False), text_size(sharded))


def text_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.txt"))


def length_and_predictions(text: str) -> tuple[int, int]:
    length, _, predictions = text.partition(":")
    return positive_int(length), positive_int(predictions)


Add = Callable[..., Any]  # a parser's add_argument


def add_common(add: Add) -> None:
    add("--output-dir", type=Path, default=ROOT / "data", help="holds download/, formatted/, sharded/, vocab/, hdf5/")
    add_run(add)


def add_run(add: Add) -> None:
    add("--num-workers", type=positive_int, default=len(os.sched_getaffinity(0)), help="processes")
    add("--dry-run", action=BooleanFlag, help="show what would be done, how many bytes and how long")


def add_download(add: Add) -> None:
    add("--mirror", action="append", default=[], help="address of a Wikimedia dumps mirror to try first; repeatable")
    add("--books", type=Path, help="text file with the address of a book on each line; for all also a folder of books")
    add("--squad-version", choices=("1.1", "2.0", "both"), default="both", help="version of SQuAD")


def add_language(add: Add) -> None:
    add("--language", default="en", help="code of the language, as in <code>.wikipedia.org")
    add("--dump-date", default="latest", help="Wikipedia dump to take: YYYYMMDD or latest")


def add_format(add: Add) -> None:
    add("--sentence-splitter", choices=("punkt", "fast", "newline"), default="punkt", help="how to find sentences")
    add("--sentence-parameters", type=Path, help="Punkt's parameters; else the shipped ones, else learnt from the text")
    add("--text-field", default="text", help="field of .jsonl and .parquet that holds the text")
    add("--empty-line", choices=("paragraph", "document"), help="what ends there in a .txt; else as the splitter wants")
    add("--skip-bad", action=BooleanFlag, help="leave out bad documents, count them and name them in skipped.log")


def add_seed(add: Add) -> None:
    add("--random-seed", type=non_negative_int, default=12345, help="seed of the split and of the samples")


def add_shard(add: Add) -> None:
    add("--shard-mb", type=positive_float, default=100.0, help="size of a text shard in MB")
    add("--test-fraction", type=fraction, default=0.05, help="share of the documents kept from training")


def add_sharded(add: Add) -> None:
    add("--sharded", type=Path, help="folder of text shards; else sharded/ in the output folder")


def add_casing(add: Add) -> None:
    add("--do-lower-case", action=BooleanFlag, default=True, help="lower-case and strip accents")


def add_vocabulary(add: Add) -> None:
    add("--vocab-size", type=positive_int, default=30_522, help="tokens, special ones included")
    add("--alphabet", type=positive_int, default=1_000, help="the most frequent characters to keep")
    add("--unused", type=non_negative_int, default=99, help="[unused...] tokens to reserve")
    add("--reserved-words", type=Path, help="text file with a word on each line that must be a token")
    add("--sample-mb", type=positive_int, default=1_000, help="MB of text to learn from")
    config = ROOT / "bert_configs" / "bert-base-uncased.json"
    add("--bert-config", type=Path, default=config, help="model config to copy with the vocabulary's size in it")


def add_hdf5(add: Add) -> None:
    add("--vocab-file", type=Path, help="else the one trained here, else the shipped one of the casing")
    add(
        "--lengths",
        nargs="+",
        type=length_and_predictions,
        default=[(128, 20), (512, 80)],
        metavar="LENGTH:PREDICTIONS",
        help="tokens a sample, and most masked ones",
    )
    add("--masked-lm-prob", type=fraction, default=0.15, help="share of tokens to mask")
    add("--short-seq-prob", type=fraction, default=0.1, help="share of documents whose samples are made shorter")
    add("--dupe-factor", type=positive_int, default=5, help="passes over the training text")
    add("--whole-word-mask", action=BooleanFlag, help="mask all pieces of a word or none")
    add("--nsp", action=BooleanFlag, default=True, help="next-sentence prediction")
    add("--compression", choices=("none", "gzip"), default="none", help="gzip for archives; none can be mapped")


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="STAGE")

    def command(name: str, what: str, *groups: Callable[[Add], None]) -> Add:
        sub = commands.add_parser(name, help=what, description=what)
        for group in groups:
            group(sub.add_argument)
        return sub.add_argument

    add = command("download", "Downloads a data set, whole and verified.", add_common, add_language, add_download)
    add("dataset", choices=("wikicorpus", "books", "squad"), help="what to download")

    add = command("format", "Writes a source as one sentence a line.", add_common, add_language, add_format)
    add("dataset", choices=tuple(SOURCE_SUFFIXES), help="a Wikipedia dump; books, cleaned; or documents as they are")
    add("paths", nargs="*", type=Path, metavar="PATH", help="files and folders; else what was downloaded")

    add = command("shard", "Makes text shards of one size, training and test apart.", add_common, add_seed, add_shard)
    add("paths", nargs="*", type=Path, metavar="FOLDER", help="formatted text; else all in formatted/")

    command("vocabulary", "Trains a WordPiece vocabulary.", add_common, add_sharded, add_casing, add_vocabulary)
    command("hdf5", "Makes samples and verifies them.", add_common, add_sharded, add_casing, add_seed, add_hdf5)

    add = command("verify", "Reads HDF5 shards, checks every row, and reports what is in them.")
    add("folder", type=Path, help="folder of HDF5 shards, or one with such folders in it")
    add("--vocab-file", type=Path, help="else the one whose sum is in the shards, where it is beside them or ships")
    add("--samples", type=non_negative_int, default=3, help="samples to print")
    add_run(add)

    groups = (add_common, add_language, add_download, add_format, add_seed, add_shard, add_casing, add_vocabulary)
    add = command("all", "Runs every stage for a whole data set.", *groups, add_hdf5)
    add("dataset", choices=("wiki_only", "wiki_books", "books", "corpus", "squad"), help="corpus: any text as it is")
    add("paths", nargs="*", type=Path, metavar="PATH", help="the text or books; a dump that is here already")
    add("--train-vocab", action=BooleanFlag, help="train a vocabulary on the text")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.command == "verify":
        verify_folders(args)
    elif args.dry_run:
        show(plan(args))
    else:
        with only_one_in(args.output_dir):
            for stage in plan(args):
                run(stage, args.num_workers)


if __name__ == "__main__":
    run_main(main)
