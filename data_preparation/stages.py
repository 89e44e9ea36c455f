"""The stages of the data preparation: what each reads and makes, and the options that decide its results.

Modules that need nltk, h5py or tokenizers are imported where they are used, so that --help is quick.
"""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_preparation import download, glue, manifest
from data_preparation.inputs import Span, find_files, identity_of, plan_spans
from data_preparation.options import FormatOptions, SampleOptions, TextShardOptions, VocabularyOptions
from data_preparation.stage_runner import Stage
from data_preparation.tasks import Task, digest_of, run_tasks
from utils.errors import UserError
from utils.files import read_json, write_atomically, write_json
from utils.progress import progress_bar

TEXT_FORMATS = (".txt", ".jsonl", ".csv", ".parquet")
SOURCE_FORMATS = {"wikicorpus": (".xml",), "books": TEXT_FORMATS, "corpus": TEXT_FORMATS}
SPLITS = ("training", "test")
TRAINING_SPANS = 8  # of the text that the parameters of the sentence splitter are trained on
BUCKETS = ".buckets"  # folder of the documents of each task, in the order of their shards


class DownloadStage(Stage):
    in_place = True

    def __init__(self, name: str, folder: Path, options: dict[str, Any], fetch: Callable[..., Any]):
        """fetch: called with `folder=`; a function of download.py with its other arguments filled in."""
        self.name, self.folder, self.options, self.fetch = f"download {name}", folder, options, fetch

    def inputs(self) -> list[str]:
        return []

    def make(self, folder: Path, inputs: list[dict[str, Any]], executor: Executor) -> dict[str, Any]:
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


def download_squad(output_dir: Path, version: str, mirrors: Sequence[str]) -> DownloadStage:
    folder = output_dir / "download" / "squad" / f"v{version}"
    fetch = partial(download.fetch_squad, f"v{version}", mirrors=[*mirrors, *download.SQUAD_MIRRORS])
    return DownloadStage(f"squad {version}", folder, {"version": version}, fetch)


def download_glue(output_dir: Path, task: str, mirrors: Sequence[str]) -> DownloadStage:
    folder = output_dir / "download" / glue.task_folder(task)
    fetch = partial(glue.fetch_glue, task, mirrors=[*mirrors, glue.SERVER])
    return DownloadStage(f"glue {task}", folder, {"task": task}, fetch)


class FormatStage(Stage):
    def __init__(self, output_dir: Path, dataset: str, name: str, paths: Sequence[str], options: FormatOptions):
        """dataset: how to read the files, a key of `SOURCE_FORMATS`. paths: files, folders with files, addresses."""
        self.name, self.folder = f"format {name}", output_dir / "formatted" / name
        self.dataset, self.paths, self.format_options = dataset, paths, options
        parameters = options.sentence_parameters
        self.options = asdict(options) | {
            "dataset": dataset,
            "sentence_parameters": read_json(parameters, "sentence parameters") if parameters else None,
        }

    def inputs(self) -> list[str]:
        return find_files(self.paths, SOURCE_FORMATS[self.dataset])

    def make(self, folder: Path, inputs: list[dict[str, Any]], executor: Executor) -> dict[str, Any]:
        from data_preparation.formatting import COUNTS, format_span, train_parameters
        from data_preparation.sentences import PARAMETERS_FOLDER

        files = [(path, entry["bytes"]) for path, entry in zip(self.inputs(), inputs, strict=True)]
        content = {path: entry["sha256"] for (path, _), entry in zip(files, inputs, strict=True)}
        spans = plan_spans(files, whole_files=(".txt",) if self.dataset == "books" else ())
        options, identity = self.format_options, [digest_of(self.options)]
        parameters = options.sentence_parameters and options.sentence_parameters.absolute()

        def task(output: str, work: Callable[..., Any], chosen: Sequence[Span], *arguments: Any) -> Task:
            inputs = [[content[span.path], span.start, span.stop] for span in chosen]
            return Task(output, work, arguments, [*identity, *inputs], sum(span.stop - span.start for span in chosen))

        with progress_bar(sum(size for _, size in files), self.name) as bar:
            if options.sentence_splitter != "newline" and not (
                parameters or (PARAMETERS_FOLDER / f"{options.language}.json").is_file()
            ):
                print(f"{self.name}: no sentence parameters ship for {options.language}: training them", flush=True)
                name = f"sentences-{options.language}.json"
                chosen = spans[:: max(1, len(spans) // TRAINING_SPANS)][:TRAINING_SPANS]
                trained = task(name, train_parameters, chosen, self.dataset, chosen, options)
                (record,) = run_tasks(folder, [trained], executor)
                parameters, identity = (folder / name).absolute(), [*identity, record.sha256]
            tasks = [
                task(f"part-{number:05d}.txt", format_span, [span], self.dataset, span, options, parameters)
                for number, span in enumerate(spans)
            ]
            records = run_tasks(folder, tasks, executor, bar.update)
        bad = [f"{where}: {why}\n" for record in records for where, why in record.counts["bad"]]
        if bad:
            write_atomically(folder / "skipped.log", "".join(bad).encode("utf-8", "backslashreplace"))
        counts = {name: sum(record.counts[name] for record in records) for name in COUNTS}
        if counts["documents"] == 0:
            raise UserError(f"no document with text in {', '.join(list(content)[:3])}: check the input")
        for one, record in zip(tasks, records, strict=True):
            if record.bytes == 0:
                (folder / one.output).unlink()
        return counts | {"bad_skipped": len(bad)}


class ShardStage(Stage):
    name = "shard"

    def __init__(self, output_dir: Path, find_folders: Callable[[], list[Path]], options: TextShardOptions):
        """find_folders: returns the folders of formatted text; called when the stage runs."""
        self.folder, self.options = output_dir / "sharded", asdict(options)
        self.find_folders, self.shard_options = find_folders, options

    def inputs(self) -> list[str]:
        return [path for folder in self.find_folders() for path in text_identity(folder, "format")]

    def make(self, folder: Path, inputs: list[dict[str, Any]], executor: Executor) -> dict[str, Any]:
        from data_preparation import text_shards

        options, folders = self.shard_options, self.find_folders()
        weights = dict(options.weights)
        if unknown := weights.keys() - {source.name for source in folders}:
            names = ", ".join(source.name for source in folders)
            raise UserError(f"--weights {min(unknown)}: there is no such text: use {names}")
        sources = [with_hashes(text_files(source, "format")) for source in folders]
        content = {entry["path"]: entry["sha256"] for files in sources for entry in files}
        total = sum(entry["bytes"] for files in sources for entry in files)
        cells = text_shards.Cells(total, max(1, round(options.shard_mb * 1_000_000)), options.test_fraction)
        planned = [
            (spans, weights.get(source.name, 1.0))
            for source, files in zip(folders, sources, strict=True)
            for spans in text_shards.plan_buckets(plan_spans([(entry["path"], entry["bytes"]) for entry in files]))
        ]
        buckets = [
            Task(
                output=f"{BUCKETS}/{number:05d}",
                work=text_shards.bucket_spans,
                arguments=(spans, cells, options.random_seed),
                identity=[self.options, total, [[content[path], start, stop] for path, start, stop in spans]],
                size=sum(span.stop - span.start for span in spans),
            )
            for number, (spans, _) in enumerate(planned)
        ]
        with progress_bar(2 * total, self.name) as bar:
            records = run_tasks(folder, buckets, executor, bar.update)
            sizes = np.array([record.counts["bytes"] for record in records])
            documents = np.array([record.counts["documents"] for record in records])
            if not documents.any():
                raise UserError(f"{', '.join(list(content)[:3])}: no document in these files: check the formatted text")
            repeated, hashes = None, [record.sha256 for record in records]
            if options.drop_duplicates == "near":
                repeated, identity = find_near_duplicates(folder, buckets, hashes, executor)
                hashes = [[sha256, identity] for sha256 in hashes]
            weighted = np.array([weight for _, weight in planned]) @ sizes
            shards = text_shards.plan_shards(documents.sum(axis=0), weighted.astype(np.int64), cells)
            starts = np.pad(np.cumsum(sizes, axis=1), ((0, 0), (1, 0)))
            firsts = np.pad(np.cumsum(documents)[:-1], (1, 0)).reshape(documents.shape)
            joins, number = [], dict.fromkeys(SPLITS, 0)
            for shard in shards:
                parts, identity = [], [self.options]
                for index, (task, (_, weight)) in enumerate(zip(buckets, planned, strict=True)):
                    start, stop = int(starts[index, shard.first]), int(starts[index, shard.last])
                    if start < stop:
                        weight = weight if shard.split == "training" else 1.0
                        path = (folder / task.output).absolute()
                        parts.append(text_shards.Part(path, start, stop, int(firsts[index, shard.first]), weight))
                        identity.append([hashes[index], *parts[-1][1:]])
                arguments = (parts, options.drop_duplicates, repeated, options.random_seed)
                output = f"{shard.split}/shard-{number[shard.split]:05d}.txt"
                joins.append(Task(output, text_shards.join_shard, arguments, identity, shard.bytes))
                number[shard.split] += 1
            made = run_tasks(folder, joins, executor, bar.update)
        shutil.rmtree(folder / BUCKETS)
        counts: dict[str, Any] = {}
        for split in SPLITS:
            of_split = [
                record.counts["documents"] for shard, record in zip(shards, made, strict=True) if shard.split == split
            ]
            counts |= {f"{split}_documents": sum(of_split), f"{split}_shards": len(of_split)}
        if options.drop_duplicates != "none":
            counts["duplicates_dropped"] = sum(record.counts["dropped"] for record in made)
        return counts


def find_near_duplicates(folder: Path, buckets: list[Task], hashes: list[str], executor: Executor) -> tuple[Path, str]:
    """The file that says which documents are near duplicates, and its SHA-256. hashes: of the buckets."""
    from data_preparation import near_duplicates

    def place(output: str) -> Path:
        return (folder / output).absolute()

    signatures = [
        Task(f"{task.output}.signatures", near_duplicates.sign_documents, (place(task.output),), sha256, task.size)
        for task, sha256 in zip(buckets, hashes, strict=True)
    ]
    run_tasks(folder, signatures, executor)
    paths, size = [place(task.output) for task in signatures], sum(task.size for task in buckets)
    bands = [
        Task(f"{BUCKETS}/band-{band}", near_duplicates.find_repeated, (paths, band), [hashes, band], size)
        for band in range(near_duplicates.BANDS)
    ]
    run_tasks(folder, bands, executor)
    found = [place(task.output) for task in bands]
    merged = Task(f"{BUCKETS}/repeated", near_duplicates.merge_repeated, (found,), hashes, size)
    (record,) = run_tasks(folder, [merged], executor)
    return place(merged.output), record.sha256


def formatted_folders(output_dir: Path) -> list[Path]:
    folders = sorted(path.parent for path in output_dir.glob(f"formatted/*/{manifest.FILE_NAME}"))
    folders = [folder for folder in folders if folder.suffix not in (".partial", ".old")]
    if not folders:
        raise UserError(f"no text in {output_dir / 'formatted'}: run the format stage first")
    return folders


def text_files(folder: Path, maker: str) -> list[dict[str, Any]]:
    """The text that the stage `maker`, or the user, left in `folder` and in its folders training and test: path, size,
    and SHA-256 if a stage made it."""
    folder = folder.absolute()
    made = manifest.read(folder)
    if made is None:
        files = sorted(path for pattern in ("*.txt", "t*/*.txt") for path in folder.glob(pattern) if path.is_file())
        if not files:
            raise UserError(f"no text in {folder}: run the {maker} stage first, or check the path")
        return [{"path": str(path), "bytes": path.stat().st_size} for path in files]
    entries = [entry for entry in made["outputs"] if entry["path"].endswith(".txt")]
    for entry in entries:
        path = folder / entry["path"]
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise UserError(f"{path} is missing or has changed: run the {maker} stage again")
    return [entry | {"path": str(folder / entry["path"])} for entry in entries]


def with_hashes(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"sha256": identity_of(entry["path"])} | entry if "sha256" not in entry else entry for entry in files]


def text_identity(folder: Path, maker: str) -> list[str]:
    """The files whose hashes identify the text in `folder`: a stage's manifest contains the hashes of all its files."""
    files = text_files(folder, maker)
    return [str(folder / manifest.FILE_NAME)] if manifest.read(folder) else [entry["path"] for entry in files]


def shards_of_split(sharded: Path, split: str) -> list[dict[str, Any]]:
    """Text shards in the folder `test`, or in any other one for training."""
    is_test = split == "test"
    return [entry for entry in text_files(sharded, "shard") if (Path(entry["path"]).parent.name == "test") == is_test]


class VocabularyStage(Stage):
    name = "vocabulary"

    def __init__(self, output_dir: Path, sharded: Path, options: VocabularyOptions, config: dict[str, Any]):
        """config: model config to copy, with the size of the vocabulary."""
        self.folder, self.options = output_dir / "vocab", asdict(options) | {"bert_config": config}
        self.sharded, self.vocabulary_options, self.config = sharded, options, config

    def inputs(self) -> list[str]:
        return text_identity(self.sharded, "shard")

    def make(self, folder: Path, inputs: list[dict[str, Any]], executor: Executor) -> dict[str, Any]:
        from data_preparation.vocabulary import train_vocabulary

        files = shards_of_split(self.sharded, "training")
        size = min(self.vocabulary_options.sample_mb * 1_000_000, sum(entry["bytes"] for entry in files))
        with progress_bar(2 * size, self.name) as bar:
            tokens = train_vocabulary([Path(entry["path"]) for entry in files], self.vocabulary_options, bar.update)
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
    ):
        self.sharded, self.split, self.vocab_file = sharded, split, vocab_file
        self.do_lower_case, self.sample_options = do_lower_case, options
        length, predictions = options.sequence_length, options.predictions_per_sequence
        self.name = f"hdf5 {length} {split}"
        self.folder = (
            output_dir / "hdf5" / (f"seq_{length}_pred_{predictions}" if predictions else f"seq_{length}") / split
        )
        self.options = options.as_dict() | {"do_lower_case": do_lower_case}

    def inputs(self) -> list[str]:
        check_casing(self.vocab_file, self.do_lower_case)
        return [*text_identity(self.sharded, "shard"), str(self.vocab_file)]

    def skip_reason(self) -> str | None:
        return None if shards_of_split(self.sharded, self.split) else f"there is no {self.split} text"

    def make(self, folder: Path, inputs: list[dict[str, Any]], executor: Executor) -> dict[str, Any]:
        from data_preparation import verify_report
        from data_preparation.sample_shards import create_shards
        from tokenizer import BertTokenizer

        texts = with_hashes(shards_of_split(self.sharded, self.split))
        tokenizer = BertTokenizer(self.vocab_file, self.do_lower_case)
        _, findings = create_shards(folder, texts, tokenizer, self.sample_options, executor, self.name)
        shutil.copyfile(self.vocab_file, folder / "vocab.txt")
        verify_report.write(folder, findings, tokenizer)
        return {
            "samples": findings.samples,
            "shards": findings.shards,
            "%_full": round(100 * findings.fill, 1),
            "%_masked": round(100 * findings.masked_share, 1),
            "%_random_next": round(100 * findings.random_next_share, 1),
        }


def check_casing(vocab_file: Path, do_lower_case: bool) -> None:
    """The manifest of a vocabulary that was trained here says its casing."""
    made = manifest.read(vocab_file.parent)
    trained = made["options"].get("do_lower_case", do_lower_case) if made else do_lower_case
    if trained != do_lower_case:
        raise UserError(f"{vocab_file} was trained with --do-lower-case {trained}: use the same here")
