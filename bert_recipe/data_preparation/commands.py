"""The stages of a command of data/prepare.py, made from its arguments."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bert_recipe.data_preparation import stages
from bert_recipe.data_preparation.engine.input_files import find_files
from bert_recipe.data_preparation.engine.runner import Stage
from bert_recipe.data_preparation.options import (
    FormatOptions,
    ModelVocabularyOptions,
    TextShardOptions,
    VocabularyOptions,
    sample_options,
)
from bert_recipe.data_preparation.sources import published
from bert_recipe.tasks.classification.specs import TASKS
from bert_recipe.tokenization.files import TOKENIZER_JSON, VOCAB_FILE
from bert_recipe.utils.command_line import Arguments, from_flags
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import read_json
from bert_recipe.utils.resources import resource_folder
from bert_recipe.utils.text_files import TABLES, kind_of

if TYPE_CHECKING:  # it imports NumPy
    from bert_recipe.checkpoint.model_folder import ModelFolder

# Sentence parameters ship under the name of the language; trained ones are stored under its code.
LANGUAGE_NAMES = {"en": "english", "simple": "english"}


def download_stages(args: Arguments, dataset: str) -> list[Stage]:
    folder = download_folder(args, dataset)
    mirrors = [*args.mirror, *published.MIRRORS.get(dataset, ())]
    if dataset == "wikicorpus":
        options = {"language": args.language, "date": args.dump_date}
        return [
            stages.download_stage(
                dataset, folder, options, published.fetch_wikipedia, mirrors=mirrors
            )
        ]
    if dataset == "glue":
        key = "task"
        fetch: Callable[..., None] = published.fetch_glue
        folders = {
            task: folder.parent / published.glue_folder(task) for task in args.tasks or TASKS
        }
    else:
        key, fetch = "version", published.fetch_squad
        versions = ("1.1", "2.0") if args.squad_version == "both" else (args.squad_version,)
        folders = {version: folder / f"v{version}" for version in versions}
    return [
        stages.download_stage(f"{dataset} {value}", path, {key: value}, fetch, mirrors=mirrors)
        for value, path in folders.items()
    ]


def download_folder(args: Arguments, dataset: str) -> Path:
    folder = args.output_dir / "download" / dataset
    return folder / args.language / args.dump_date if dataset == "wikicorpus" else folder


def format_stage(args: Arguments, dataset: str, paths: Sequence[str]) -> Stage:
    if dataset != "wikicorpus" and (args.given("text_field") or args.given("empty_line")):
        check_effects_on(args, find_files(paths, stages.SOURCE_FORMATS[dataset]))
    empty_line = args.empty_line or (
        "document" if args.sentence_splitter == "newline" else "paragraph"
    )
    language = LANGUAGE_NAMES.get(args.language, args.language)
    options = from_flags(FormatOptions, args, language=language, empty_line=empty_line)
    name = f"wikicorpus_{args.language}" if dataset == "wikicorpus" else dataset
    return stages.format_stage(args.output_dir, dataset, name, paths, options)


def check_effects_on(args: Arguments, files: Sequence[str]) -> None:
    """Raises UserError for a flag of text files without such a file, or of tables without one."""
    are_tables = {kind_of(file)[0] in TABLES for file in files}
    if args.given("text_field") and True not in are_tables:
        raise UserError("--text-field has no effect on .txt files, whose text is all: leave it out")
    if args.given("empty_line") and False not in are_tables:
        raise UserError(
            "--empty-line has no effect on tables, where a row is a document: leave it out, or "
            "give the text as .txt"
        )


def shard_stage(args: Arguments, find_folders: Callable[[], list[Path]]) -> Stage:
    options = from_flags(TextShardOptions, args)
    return stages.shard_stage(args.output_dir, find_folders, options)


def changes_model(args: Arguments) -> bool:
    """Whether the vocabulary is that of a model with words of the text, or a new one for it."""
    return bool(args.get("extend") or args.get("replace"))


def open_source(args: Arguments) -> "ModelFolder | None":
    """The model whose vocabulary is changed. Raises UserError if its parts do not belong together,
    or samples would be too long for it.
    """
    if not changes_model(args):
        return None
    from bert_recipe.checkpoint.model_choice import choose_model_in
    from bert_recipe.checkpoint.model_folder import ModelFolder
    from bert_recipe.config import ModelSelection

    source = ModelFolder.find(args.extend or args.replace)
    choose_model_in(source, ModelSelection())
    return source


def vocabulary_stage(args: Arguments, sharded: Path, source: "ModelFolder | None") -> Stage:
    """source: of `open_source`."""
    options = from_flags(VocabularyOptions, args, do_lower_case=args.do_lower_case is not False)
    if source is not None:
        model = from_flags(ModelVocabularyOptions, args)
        return stages.model_vocabulary_stage(args.output_dir, sharded, options, model, source)
    config = read_json(args.bert_config, "model config")
    return stages.vocabulary_stage(args.output_dir, sharded, options, config)


def hdf5_stages(
    args: Arguments, sharded: Path, new_vocabulary: tuple[Path, bool] | None = None
) -> list[Stage]:
    """The stages that make the shards of samples: for each sequence length, one of training and one
    of test samples.

    sharded: folder of the text.
    new_vocabulary: see `file_of_new_vocabulary`, if a stage before makes it.
    """
    vocab_file, lower_case = new_vocabulary or existing_vocabulary(args)
    make_stage = partial(stages.hdf5_stage, args.output_dir, sharded, vocab_file, lower_case)
    hdf5 = []
    for length, max_masked in args.lengths:
        options = sample_options(args, length, max_masked)
        hdf5.append(make_stage("training", options))
        # Test samples are only evaluated, so one pass is enough.
        hdf5.append(make_stage("test", replace(options, dupe_factor=1)))
    return hdf5


def existing_vocabulary(args: Arguments) -> tuple[Path, bool]:
    """The vocabulary of the samples, and whether text is lower-cased. The vocabulary is
    --vocab-file, or else one that was trained in the output folder, or else BERT's.
    """
    from bert_recipe.tokenization.tokenizer import load_tokenizer

    trained_folder = args.output_dir / "vocab"
    if args.vocab_file is not None:
        vocab_file = args.vocab_file
    elif (trained_folder / VOCAB_FILE).exists():
        vocab_file = trained_folder / VOCAB_FILE
    elif (trained_folder / TOKENIZER_JSON).exists():
        vocab_file = trained_folder / TOKENIZER_JSON
    else:
        casing = "cased" if args.do_lower_case is False else "uncased"
        vocab_file = resource_folder("vocab") / f"bert-large-{casing}-vocab.txt"
    tokenizer = load_tokenizer(vocab_file, args.do_lower_case)
    return tokenizer.vocab_file, tokenizer.do_lower_case  # the file, also of a model folder


def file_of_new_vocabulary(args: Arguments, source: "ModelFolder | None") -> tuple[Path, bool]:
    """The file that the vocabulary stage will make, and whether text is lower-cased."""
    is_wordpiece = args.tokenizer == "wordpiece"
    lower_case = args.do_lower_case is not False
    if source is not None and args.extend:
        from bert_recipe.tokenization.tokenizer import BertTokenizer

        tokenizer = source.tokenizer
        is_wordpiece = isinstance(tokenizer, BertTokenizer)
        lower_case = tokenizer.do_lower_case
    return args.output_dir / "vocab" / (VOCAB_FILE if is_wordpiece else TOKENIZER_JSON), lower_case


def all_stages(args: Arguments) -> list[Stage]:
    if args.dataset in ("squad", "glue"):
        return download_stages(args, args.dataset)
    if args.dataset == "wiki_books" and args.books is None:
        taken = f" ({args.paths[0]} is taken for it)" if args.paths else ""
        raise UserError(
            f"all wiki_books: name the books: --books FOLDER; PATH is the Wikipedia dump{taken}"
        )
    datasets = {"wiki_only": ["wikicorpus"], "wiki_books": ["wikicorpus", "books"]}.get(
        args.dataset, [args.dataset]
    )
    downloads, formats = [], []
    for dataset in datasets:
        paths = args.paths if dataset == datasets[0] else []
        if dataset == "books" and not paths:
            paths = [str(args.books)]
        if not paths:
            downloads += download_stages(args, dataset)
            paths = [str(download_folder(args, dataset))]
        formats.append(format_stage(args, dataset, paths))
    if args.dataset in ("wiki_only", "wiki_books") and not args.paths:
        # For fine-tuning; not where the dump is local, without a network.
        downloads += download_stages(args, "squad")
    shard = shard_stage(args, lambda: [stage.folder for stage in formats])
    vocabulary, new_vocabulary = [], None
    if args.train_vocab or changes_model(args):
        source = open_source(args)
        vocabulary = [vocabulary_stage(args, shard.folder, source)]
        new_vocabulary = file_of_new_vocabulary(args, source)
    return [
        *downloads,
        *formats,
        shard,
        *vocabulary,
        *hdf5_stages(args, shard.folder, new_vocabulary),
    ]


def stages_of(args: Arguments) -> list[Stage]:
    """The stages of a command; none for those that only read."""
    match args.stage:
        case "download":
            return download_stages(args, args.dataset)
        case "format":
            paths = args.paths or [str(download_folder(args, args.dataset))]
            return [format_stage(args, args.dataset, paths)]
        case "shard":
            return [
                shard_stage(args, lambda: args.paths or stages.formatted_folders(args.output_dir))
            ]
        case "vocabulary":
            return [vocabulary_stage(args, sharded_folder(args), open_source(args))]
        case "hdf5":
            return hdf5_stages(args, sharded_folder(args))
        case "all":
            return all_stages(args)
    return []


def sharded_folder(args: Arguments) -> Path:
    return args.sharded or args.output_dir / "sharded"
