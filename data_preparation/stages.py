"""The stages of the data preparation: what each reads and makes, and the options that decide its results.

Modules that need nltk, h5py or tokenizers are imported where they are used, so that --help is quick.
"""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_preparation import download, glue, manifest
from data_preparation.documents import SUFFIXES
from data_preparation.options import FormatOptions, SampleOptions, TextShardOptions, VocabularyOptions
from data_preparation.parallel import ordered_map, useful_workers
from data_preparation.stage_runner import Stage, clear_folder
from utils.errors import UserError
from utils.files import file_digest, read_json, write_atomically, write_json
from utils.progress import progress_bar

SOURCE_SUFFIXES = {"wikicorpus": (".xml.bz2", ".xml"), "books": SUFFIXES, "corpus": SUFFIXES}
SPLITS = ("training", "test")
# Present in an unfinished HDF5 folder: the options and input hashes of its shards.
UNFINISHED_NOTE = ".begun"


class DownloadStage(Stage):
    in_place = True

    def __init__(self, name: str, folder: Path, options: dict[str, Any], fetch: Callable[..., Any]):
        """fetch: called with `folder=`; a function of download.py with its other arguments filled in."""
        self.name, self.folder, self.options, self.fetch = f"download {name}", folder, options, fetch

    def inputs(self) -> list[Path]:
        return []

    def make(self, folder: Path) -> dict[str, Any]:
        self.fetch(folder=folder)
        return {"files": sum(path.name != manifest.FILE_NAME for path in folder.iterdir())}


def download_wikipedia(output_dir: Path, language: str, date: str, mirrors: Sequence[str]) -> DownloadStage:
    """mirrors: addresses to try before the known ones."""
    folder = output_dir / "download" / "wikicorpus" / language / date
    mirrors = [*mirrors, *download.WIKIMEDIA_MIRRORS]
    fetch = partial(download.fetch_wikipedia, language, date=date, mirrors=mirrors)
    return DownloadStage("wikicorpus", folder, {"language": language, "date": date}, fetch)


def download_books(output_dir: Path, urls: Sequence[str]) -> DownloadStage:
    folder = output_dir / "download" / "books"
    return DownloadStage("books", folder, {"urls": list(urls)}, partial(download.fetch_books, urls))


def download_squad(output_dir: Path, version: str) -> DownloadStage:
    folder = output_dir / "download" / "squad" / f"v{version}"
    return DownloadStage(f"squad {version}", folder, {"version": version}, partial(download.fetch_squad, f"v{version}"))


def download_glue(output_dir: Path, task: str) -> DownloadStage:
    folder = output_dir / "download" / glue.task_folder(task)
    return DownloadStage(f"glue {task}", folder, {"task": task}, partial(glue.fetch_glue, task))


class FormatStage(Stage):
    def __init__(
        self, output_dir: Path, dataset: str, name: str, paths: Sequence[Path], options: FormatOptions, workers: int
    ):
        """dataset: how to read the files, a key of `SOURCE_SUFFIXES`. paths: files, and folders with files."""
        self.name, self.folder = f"format {name}", output_dir / "formatted" / name
        self.dataset, self.paths, self.format_options, self.workers = dataset, paths, options, workers
        parameters = options.sentence_parameters
        self.options = {
            "dataset": dataset,
            "sentence_splitter": options.sentence_splitter,
            "language": options.language,
            "sentence_parameters": read_json(parameters, "sentence parameters") if parameters else None,
            "text_field": options.text_field,
            "empty_line": options.empty_line,
            "skip_bad": options.skip_bad,
        }

    def inputs(self) -> list[Path]:
        return find_sources(self.dataset, self.paths)

    def make(self, folder: Path) -> dict[str, Any]:
        from data_preparation.formatting import expected_text_bytes, format_text

        clear_folder(folder)
        files = self.inputs()
        size = expected_text_bytes(files)
        with progress_bar(size, self.name) as bar:
            workers = useful_workers(self.workers, size)
            return format_text(self.dataset, files, folder, self.format_options, workers, bar.update)


def find_sources(dataset: str, paths: Sequence[Path]) -> list[Path]:
    """The files of `dataset` that `paths` name or contain, in an order that depends only on their names."""
    suffixes = SOURCE_SUFFIXES[dataset]
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist: check the path, or run the download stage first")
        if not path.is_file() and not path.is_dir():
            raise UserError(f"{path} is not a regular file or folder: check the path")
        found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        found = [file for file in found if file.name.lower().endswith(suffixes)]
        if not found:
            raise UserError(f"{path} contains no {', '.join(suffixes)} file: check the path")
        files += found
    return files


class ShardStage(Stage):
    name = "shard"

    def __init__(self, output_dir: Path, find_folders: Callable[[], list[Path]], options: TextShardOptions):
        """find_folders: returns the folders of formatted text; called when the stage runs."""
        self.folder, self.options = output_dir / "sharded", asdict(options)
        self.find_folders, self.shard_options = find_folders, options

    def inputs(self) -> list[Path]:
        return [path for folder in self.find_folders() for path in text_identity(folder, "format")]

    def make(self, folder: Path) -> dict[str, Any]:
        from data_preparation.text_shards import write_shards

        clear_folder(folder)
        files = [path for source in self.find_folders() for path in text_files(source, "format")]
        with progress_bar(sum(path.stat().st_size for path in files), self.name) as bar:
            options = self.shard_options
            shard_bytes = max(1, round(options.shard_mb * 1_000_000))
            splits = write_shards(files, folder, shard_bytes, options.test_fraction, options.random_seed, bar.update)
        counts: dict[str, Any] = {}
        for split, shards in splits.items():
            counts |= {f"{split}_documents": shards.documents, f"{split}_shards": len(shards.files)}
        return counts


def formatted_folders(output_dir: Path) -> list[Path]:
    folders = sorted(path.parent for path in output_dir.glob(f"formatted/*/{manifest.FILE_NAME}"))
    folders = [folder for folder in folders if folder.suffix not in (".partial", ".old")]
    if not folders:
        raise UserError(f"no text in {output_dir / 'formatted'}: run the format stage first")
    return folders


def text_files(folder: Path, maker: str) -> list[Path]:
    """The text that the stage `maker`, or the user, left in `folder` and in its folders training and test."""
    made = manifest.read(folder)
    if made is None:
        files = sorted(path for pattern in ("*.txt", "t*/*.txt") for path in folder.glob(pattern) if path.is_file())
        if not files:
            raise UserError(f"no text in {folder}: run the {maker} stage first, or check the path")
        return files
    entries = [entry for entry in made["outputs"] if entry["path"].endswith(".txt")]
    for entry in entries:
        path = folder / entry["path"]
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise UserError(f"{path} is missing or has changed: run the {maker} stage again")
    return [folder / entry["path"] for entry in entries]


def text_identity(folder: Path, maker: str) -> list[Path]:
    """The files whose hashes identify the text in `folder`: a stage's manifest contains the hashes of all its files."""
    files = text_files(folder, maker)
    return [folder / manifest.FILE_NAME] if manifest.read(folder) else files


def shards_of_split(sharded: Path, split: str) -> list[Path]:
    """Text shards in the folder `test`, or in any other one for training."""
    is_test = split == "test"
    return [path for path in text_files(sharded, "shard") if (path.parent.name == "test") == is_test]


class VocabularyStage(Stage):
    name = "vocabulary"

    def __init__(self, output_dir: Path, sharded: Path, options: VocabularyOptions, config: dict[str, Any]):
        """config: model config to copy, with the size of the vocabulary."""
        self.folder, self.options = output_dir / "vocab", asdict(options) | {"bert_config": config}
        self.sharded, self.vocabulary_options, self.config = sharded, options, config

    def inputs(self) -> list[Path]:
        return text_identity(self.sharded, "shard")

    def make(self, folder: Path) -> dict[str, Any]:
        from data_preparation.vocabulary import train_vocabulary

        clear_folder(folder)
        files = shards_of_split(self.sharded, "training")
        size = min(self.vocabulary_options.sample_mb * 1_000_000, sum(path.stat().st_size for path in files))
        with progress_bar(2 * size, self.name) as bar:
            tokens = train_vocabulary(files, self.vocabulary_options, bar.update)
        write_atomically(folder / "vocab.txt", "\n".join(tokens) + "\n")
        write_json(folder / "config.json", self.config | {"vocab_size": len(tokens)})
        return {"tokens": len(tokens)}


class Hdf5Stage(Stage):
    def __init__(
        self,
        output_dir: Path,
        sharded: Path,
        split: str,
        vocab_file: Path,
        do_lower_case: bool,
        options: SampleOptions,
        workers: int,
    ):
        self.sharded, self.split, self.vocab_file, self.workers = sharded, split, vocab_file, workers
        self.do_lower_case, self.sample_options = do_lower_case, options
        length = options.sequence_length
        self.name = f"hdf5 {length} {split}"
        self.folder = output_dir / "hdf5" / f"seq_{length}_pred_{options.predictions_per_sequence}" / split
        self.options = asdict(options) | {"do_lower_case": do_lower_case}

    def inputs(self) -> list[Path]:
        check_casing(self.vocab_file, self.do_lower_case)
        return [*text_identity(self.sharded, "shard"), self.vocab_file]

    def skip_reason(self) -> str | None:
        return None if shards_of_split(self.sharded, self.split) else f"there is no {self.split} text"

    def make(self, folder: Path) -> dict[str, Any]:
        from data_preparation.sample_shards import create_shard_in_worker, load_tokenizer, output_name

        tokenizer = load_tokenizer(self.vocab_file, self.do_lower_case)  # a bad vocabulary fails before workers start
        self.keep_unfinished(folder)
        create = partial(
            create_shard_in_worker,
            vocab_file=self.vocab_file,
            do_lower_case=self.do_lower_case,
            options=self.sample_options,
        )
        texts = shards_of_split(self.sharded, self.split)
        size = sum(path.stat().st_size for path in texts)
        workers = min(len(texts), useful_workers(self.workers, size * self.sample_options.dupe_factor))
        with progress_bar(size, self.name) as bar:
            for report in ordered_map(create, [(path, folder / output_name(path)) for path in texts], workers):
                bar.update(report.text_bytes)
                if report.warning:
                    tqdm.write(f"warning: {report.warning}", file=sys.stderr)
        shutil.copyfile(self.vocab_file, folder / "vocab.txt")
        counts = verify_new_shards(folder, tokenizer, workers)
        (folder / UNFINISHED_NOTE).unlink()
        return counts

    def keep_unfinished(self, folder: Path) -> None:
        """Keeps the shards that a killed run left in `folder` if it had the same options and inputs, else removes
        them."""
        note = folder / UNFINISHED_NOTE
        content = json.dumps([self.options, [file_digest(path) for path in self.inputs()]])
        if not note.exists() or note.read_text() != content:
            clear_folder(folder)
            write_atomically(note, content)


def check_casing(vocab_file: Path, do_lower_case: bool) -> None:
    """The manifest of a vocabulary that was trained here says its casing."""
    made = manifest.read(vocab_file.parent)
    trained = made["options"].get("do_lower_case", do_lower_case) if made else do_lower_case
    if trained != do_lower_case:
        raise UserError(f"{vocab_file} was trained with --do-lower-case {trained}: use the same here")


def verify_new_shards(folder: Path, tokenizer: Any, workers: int) -> dict[str, Any]:
    """Verifies the shards and writes the report and the figure beside them."""
    from data_preparation import verify_report
    from data_preparation.verify import verify_folder

    findings = verify_folder(folder, tokenizer, workers)
    lines = [*verify_report.report_lines(findings, tokenizer), "", *verify_report.sample_lines(folder, tokenizer, 3)]
    write_atomically(folder / "report.txt", "\n".join(lines) + "\n")
    verify_report.draw(findings, folder / verify_report.FIGURE)
    return {
        "samples": findings.samples,
        "shards": findings.shards,
        "%_full": round(100 * findings.fill, 1),
        "%_masked": round(100 * findings.masked_share, 1),
        "%_random_next": round(100 * findings.random_next_share, 1),
    }
