"""The stages of the data preparation: what each reads and makes, and the options that decide its
results.

Modules that need nltk, h5py or tokenizers are imported where they are used, so that --help is
quick.
"""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_recipe.data_preparation.engine.input_files import find_files, left_out, walk
from bert_recipe.data_preparation.engine.runner import MANIFEST, Files, Stage, read_manifest
from bert_recipe.data_preparation.engine.versions import run_units
from bert_recipe.data_preparation.options import (
    SAMPLE_MB,
    FormatOptions,
    ModelVocabularyOptions,
    SampleOptions,
    TextShardOptions,
    VocabularyOptions,
)
from bert_recipe.data_preparation.sources.spans import Span, plan_spans, total_size
from bert_recipe.tokenization.files import TOKENIZER_CONFIG, VOCAB_FILE
from bert_recipe.utils.errors import UserError, listed, one_line
from bert_recipe.utils.files import file_digest, write_atomically
from bert_recipe.utils.json_files import JsonObject, write_json
from bert_recipe.utils.progress import print_line, progress_bar
from bert_recipe.utils.text_files import TABLES, kind_of, splits_of
from bert_recipe.utils.work_units.units import Record, WorkUnit

if TYPE_CHECKING:  # it imports NumPy
    from bert_recipe.checkpoint.model_folder import ModelFolder

TEXT_FORMATS = (".txt", *TABLES)
SOURCE_FORMATS = {"wikicorpus": (".xml",), "books": TEXT_FORMATS, "corpus": TEXT_FORMATS}
UNKNOWN, LOST = "%_unknown", "%_of_the_text_lost"  # counts of samples
ONE_ROW = re.compile(r"(:|, row )\d+$")  # where a bad document is
TRAINING_SPANS = 8  # of the text that the parameters of the sentence splitter are trained on


def download_stage(
    name: str, folder: Path, options: JsonObject, fetch: Callable[..., Any], **more: Any
) -> Stage:
    """fetch: called with `folder=`, `options` and `more`, which does not decide the result."""

    def make(folder: Path, _: Files, __: Executor) -> JsonObject:
        fetch(folder=folder, **options, **more)
        return {"files": sum(path.name != MANIFEST for path in folder.iterdir())}

    return Stage(f"download {name}", folder, options, list, make, in_place=True)


def format_stage(
    output_dir: Path, dataset: str, name: str, paths: Sequence[str], options: FormatOptions
) -> Stage:
    """dataset: how to read the files, a key of `SOURCE_FORMATS`.
    paths: files, folders with files.
    """
    values = asdict(options) | {"dataset": dataset}
    check_source_paths(paths, output_dir)
    find_inputs = partial(find_files, paths, SOURCE_FORMATS[dataset])

    def make(folder: Path, inputs: Files, executor: Executor) -> JsonObject:
        files = find_inputs()
        names = [Path(file).name for file in files]
        print_line(f"note: format {name}: reads {listed(names, 5)}")
        if others := left_out(paths, SOURCE_FORMATS[dataset]):
            print_line(f"note: format {name}: {others}")
        sizes = [(path, entry["bytes"]) for path, entry in zip(files, inputs, strict=True)]
        spans = plan_spans(sizes, whole_files=(".txt",) if dataset == "books" else ())
        parameters = None
        with progress_bar(sum(size for _, size in sizes), f"format {name}") as bar:
            if needs_training(options):
                print_line(
                    f"format {name}: no sentence parameters ship for {options.language}: training "
                    "them"
                )
                parameters = train_sentence_splitter(folder, dataset, spans, options, executor)
            units = format_units(dataset, spans, options, parameters)
            records = run_units(folder, units, executor, bar.update)
        write_skipped(folder, records)
        counts = format_counts(records)
        if counts["documents"] == 0:
            raise UserError(f"no document with text in {', '.join(files[:3])}: check the input")
        for unit, record in zip(units, records, strict=True):
            if record.bytes == 0:
                (folder / unit.output).unlink()
        return counts

    return Stage(f"format {name}", output_dir / "formatted" / name, values, find_inputs, make)


def check_source_paths(paths: Sequence[str], output_dir: Path) -> None:
    for path in paths:
        if output_dir.resolve().is_relative_to(Path(path).resolve()):
            raise UserError(
                f"{path} contains --output-dir {output_dir}, whose files would become text: choose "
                "another"
            )


def needs_training(options: FormatOptions) -> bool:
    """Whether sentences are found by parameters that do not ship with this project."""
    from bert_recipe.data_preparation.text.sentences import PARAMETERS_FOLDER

    is_shipped = (PARAMETERS_FOLDER / f"{options.language}.json").is_file()
    return options.sentence_splitter != "newline" and not is_shipped


def train_sentence_splitter(
    folder: Path, dataset: str, spans: Sequence[Span], options: FormatOptions, executor: Executor
) -> Path:
    """Trains the sentence splitter on a sample of the text. Returns its parameters' file."""
    from bert_recipe.data_preparation.text.formatting import train_parameters

    parameters = (folder / f"sentences-{options.language}.json").absolute()
    sample = spans[:: max(1, len(spans) // TRAINING_SPANS)][:TRAINING_SPANS]
    arguments = (dataset, sample, options)
    unit = WorkUnit(parameters.name, train_parameters, arguments, total_size(sample))
    run_units(folder, [unit], executor)
    return parameters


def format_units(
    dataset: str, spans: Sequence[Span], options: FormatOptions, parameters: Path | None
) -> list[WorkUnit]:
    """A file of text per span."""
    from bert_recipe.data_preparation.text.formatting import format_span

    units = []
    for number, span in enumerate(spans):
        arguments = (dataset, span, options, parameters)
        units.append(WorkUnit(f"part-{number:05d}.txt", format_span, arguments, span.size))
    return units


def format_counts(records: Sequence[Record]) -> dict[str, int]:
    from bert_recipe.data_preparation.text.formatting import COUNTS

    counts = {name: sum(record.counts[name] for record in records) for name in COUNTS}
    return counts | {"bad_skipped": sum(len(record.counts["bad"]) for record in records)}


def write_skipped(folder: Path, records: Sequence[Record]) -> None:
    """Writes the places of bad documents, and why they are bad, to `skipped.log`. Warns of those
    that are more than a document.
    """
    bad = [(where, why) for record in records for where, why in record.counts["bad"]]
    if bad:
        content = "".join(f"{where}: {why}\n" for where, why in bad)
        write_atomically(folder / "skipped.log", content.encode("utf-8", "backslashreplace"))
    files = [one_line(f"{where} ({why})") for where, why in bad if not ONE_ROW.search(where)]
    if files:
        print_line(f"warning: files are left out, or what follows in them: {listed(files, 3)}")


def shard_stage(
    output_dir: Path, find_folders: Callable[[], list[Path]], options: TextShardOptions
) -> Stage:
    """find_folders: of formatted text, called when the stage runs."""

    def find_inputs() -> list[str]:
        return [path for folder in find_folders() for path in text_identity(folder, "format")]

    def make(folder: Path, _: Files, executor: Executor) -> JsonObject:
        from bert_recipe.data_preparation.text.text_shards import make_shards

        sources = [(text.name, text_files(text, "format")) for text in find_folders()]
        spans = [
            (name, plan_spans([(file["path"], file["bytes"]) for file in files]))
            for name, files in sources
        ]
        counts = make_shards(folder, spans, options, executor)
        if options.test_fraction and not counts["test_documents"]:
            print_line(
                f"shard: no test split: {counts['training_documents']} documents are too few, 4 "
                "are needed"
            )
        return counts

    return Stage("shard", output_dir / "sharded", asdict(options), find_inputs, make)


def formatted_folders(output_dir: Path) -> list[Path]:
    folders = sorted(path.parent for path in output_dir.glob(f"formatted/*/{MANIFEST}"))
    folders = [folder for folder in folders if not folder.suffix]  # of unfinished and replaced ones
    if not folders:
        raise UserError(f"no text in {output_dir / 'formatted'}: run the format stage first")
    return folders


def text_files(folder: Path, maker: str) -> Files:
    """The text that the stage `maker` or the user left in `folder` and its folders; with SHA-256 if
    a stage did.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: run the {maker} stage first, or check the path")
    made = read_manifest(folder)
    if made is None:
        files = sorted(path for path in walk(folder) if kind_of(path.name)[0] == ".txt")
        if not files:
            raise UserError(f"no text in {folder}: run the {maker} stage first, or check the path")
        for path in files:
            if kind_of(path.name)[1]:
                raise UserError(f"{path} is compressed, which text of a stage is not: unpack it")
        return [{"path": str(path), "bytes": path.stat().st_size} for path in files]
    entries = [entry for entry in made["outputs"] if entry["path"].endswith(".txt")]
    for entry in entries:
        path = folder / entry["path"]
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise UserError(f"{path} is missing or has changed: run the {maker} stage again")
    return [entry | {"path": str(folder / entry["path"])} for entry in entries]


def text_identity(folder: Path, maker: str) -> list[str]:
    """The files whose hashes identify the text in `folder`: a stage's manifest contains the hashes
    of all its files.
    """
    files = text_files(folder, maker)
    return [str(folder / MANIFEST)] if read_manifest(folder) else [entry["path"] for entry in files]


def shards_of_split(sharded: Path, split: str) -> Files:
    """Text shards for training, or for the split `test`: those in folders of held-out text, such as
    `test` or `dev`.
    """
    chosen: Files = []
    for entry in text_files(sharded, "shard"):
        path = Path(entry["path"]).relative_to(sharded.absolute())
        splits = {word for folder in path.parts[:-1] for word in splits_of(folder)}
        if bool(splits & {"test", "development"}) == (split == "test"):
            chosen.append(entry)
    return chosen


def vocabulary_stage(
    output_dir: Path, sharded: Path, options: VocabularyOptions, config: JsonObject
) -> Stage:
    """config: model config to copy, with the size of the vocabulary."""

    def make(folder: Path, _: Files, __: Executor) -> JsonObject:
        from bert_recipe.data_preparation.text.vocabulary import train_tokenizer
        from bert_recipe.tokenization.tokenizer import load_tokenizer, vocabulary_config

        files = shards_of_split(sharded, "training")
        size = min(SAMPLE_MB * 1_000_000, sum(entry["bytes"] for entry in files))
        paths = [Path(entry["path"]) for entry in files]
        passes = 2 if options.tokenizer == "wordpiece" else 1
        with progress_bar(passes * size, "vocabulary") as bar:
            name, content = train_tokenizer(paths, options, bar.update)
        write_atomically(folder / name, content)
        if name == VOCAB_FILE:
            casing = options.casing.settings()
            write_atomically(folder / TOKENIZER_CONFIG, vocabulary_config(casing))
        tokenizer = load_tokenizer(folder / name)
        ids = {
            f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id")
            for kind in ("pad", "cls", "sep", "mask")
        }
        known = {key: value for key, value in ids.items() if key in config}
        write_json(folder / "config.json", config | known | {"vocab_size": tokenizer.vocab_size})
        return {"tokens": tokenizer.vocab_size}

    values = options.values() | {"bert_config": config}
    return Stage(
        "vocabulary", output_dir / "vocab", values, partial(text_identity, sharded, "shard"), make
    )


def model_vocabulary_stage(
    output_dir: Path,
    sharded: Path,
    training: VocabularyOptions,
    options: ModelVocabularyOptions,
    source: "ModelFolder",
) -> Stage:
    """A vocabulary for the model `source`, and that model. options: of which `extend` or `replace`
    is given.
    """
    from bert_recipe.checkpoint.derived.vocabulary import model_inputs
    from bert_recipe.data_preparation.text.model_vocabulary import change_vocabulary

    name = options.model_name or f"{source.name}-{output_dir.resolve().name}"

    def make(folder: Path, _: Files, __: Executor) -> JsonObject:
        paths = [Path(entry["path"]) for entry in shards_of_split(sharded, "training")]
        return change_vocabulary(folder, name, source, paths, training, options)

    def find_inputs() -> list[str]:
        return [*text_identity(sharded, "shard"), *model_inputs(source.path)]

    if options.replace:
        values = training.values()
    else:
        values = {**source.tokenizer.casing_settings(), "add": options.add}
    values |= {"sample_mb": SAMPLE_MB, "model_name": name}
    return Stage("vocabulary", output_dir / "vocab", values, find_inputs, make)


def trained_casing(vocab_file: Path) -> bool | None:
    """Whether a vocabulary that was trained here is of lower-cased text; None for any other
    vocabulary, also one beside it.
    """
    made = read_manifest(vocab_file.parent)
    if made is None or vocab_file.name not in {entry["path"] for entry in made["outputs"]}:
        return None
    return made["options"].get("do_lower_case")


def hdf5_stage(
    output_dir: Path,
    sharded: Path,
    vocab_file: Path,
    do_lower_case: bool,
    split: str,
    options: SampleOptions,
) -> Stage:
    length, max_masked = options.sequence_length, options.predictions_per_sequence
    name = f"hdf5 {length} {split}"
    parent = f"seq_{length}_pred_{max_masked}" if max_masked else f"seq_{length}"

    def find_inputs() -> list[str] | None:
        trained = trained_casing(vocab_file)
        if trained not in (None, do_lower_case):
            raise UserError(
                f"{vocab_file} was trained with --do-lower-case {trained}: use the same here"
            )
        has_text = bool(shards_of_split(sharded, split))
        if not has_text:
            return None
        inputs = [*text_identity(sharded, "shard"), str(vocab_file)]
        settings = vocab_file.parent / TOKENIZER_CONFIG  # says whether accents are stripped
        if vocab_file.name == VOCAB_FILE and settings.is_file():
            inputs.append(str(settings))
        return inputs

    def make(folder: Path, _: Files, executor: Executor) -> JsonObject:
        from bert_recipe.data_preparation.samples.create_shards import (
            create_shards,
            lost_share,
            shard_units,
        )
        from bert_recipe.data_preparation.samples.verify import write_report
        from bert_recipe.tokenization.tokenizer import load_tokenizer, model_files

        tokenizer = load_tokenizer(vocab_file, do_lower_case)
        texts = shards_of_split(sharded, split)
        hashed = [
            text if "sha256" in text else text | {"sha256": file_digest(text["path"])}
            for text in texts
        ]
        units = shard_units(hashed, tokenizer, options)
        records, statistics = create_shards(folder, units, executor, name)
        for file_name, content in model_files(tokenizer, length).items():
            write_atomically(folder / file_name, content)
        write_report(folder, statistics, tokenizer)
        return {
            "samples": statistics.samples,
            "shards": statistics.shards,
            "%_full": round(100 * statistics.fill, 1),
            "%_masked": round(100 * statistics.masked_share, 1),
            "%_random_next": round(100 * statistics.random_next_share, 1),
            UNKNOWN: round(100 * statistics.unknown_share, 1),
            LOST: round(100 * lost_share(records), 1),
        }

    def find_doubts(counts: JsonObject) -> list[str]:
        from bert_recipe.data_preparation.samples.sample_statistics import doubts

        if split == "test":  # the same text, nearly
            return []
        names = (LOST, UNKNOWN, "%_random_next")
        return doubts(length, *(counts[name] / 100 for name in names))

    values = asdict(options) | {"do_lower_case": do_lower_case}
    folder = output_dir / "hdf5" / parent / split
    return Stage(name, folder, values, find_inputs, make, find_doubts=find_doubts)
