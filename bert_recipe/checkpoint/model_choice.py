"""Selects the architecture, vocabulary and casing of a run.

Flags take precedence, then the model folder that the run starts from, then the files of
--bert-model in this project.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from bert_recipe.checkpoint.folder import CONFIG_FILE
from bert_recipe.checkpoint.model_folder import ModelFolder, read_config
from bert_recipe.checkpoint.start import NamedStart, find_starts, on_this_process
from bert_recipe.config import CONFIGS, CUSTOM, ModelSelection, RunConfig
from bert_recipe.config.start import DEFAULT_BERT_MODEL
from bert_recipe.model.encoders.config import VOCAB_MULTIPLE, ModelConfig
from bert_recipe.tokenization.files import Casing
from bert_recipe.tokenization.tokenizer import Tokenizer, load_tokenizer
from bert_recipe.utils.command_line import flags_of
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.resources import resource_folder

SAME_ACTS = {"gelu_new": "gelu_pytorch_tanh"}  # the same function


@dataclass(frozen=True)
class ModelChoice:
    """`name`: the folder for results; the name of a file in bert_configs/, of the model's folder,
    or `custom`.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer


@dataclass(frozen=True)
class NamedModel:
    """The model of a command, whose runs share it.

    starts: what the flags name for each run, by its subfolder.
    folder: the model folder that the first run starts from; None for random weights.
    """

    choice: ModelChoice
    starts: dict[str, NamedStart]
    folder: ModelFolder | None


def find_model(
    config: RunConfig,
    names: Sequence[str] = ("",),
    on_main: Callable[[Callable[[], Any]], Any] = on_this_process,
    loads: bool = True,
) -> NamedModel:
    """Finds what the runs of a command start from, and chooses their model. Raises UserError if
    these do not fit together.

    names, on_main: see `find_starts`.
    loads: whether weights will be loaded. An estimate loads none: folders are searched only if no
        flag names its model.
    """
    starts: dict[str, NamedStart] = {}
    folder = None
    if loads or config.model.given_name is None:
        starts = find_starts(config.start, names, on_main, config.fine_tuning.do_train)
        folder = starts[names[0]].folder
    choice = choose_model(config.model, folder)
    for start in starts.values():
        for opened in (start.checkpoint, start.weights):
            if opened is not None:
                check_same_kind(opened, choice)
    return NamedModel(choice, starts, folder)


def choose_model(selection: ModelSelection, source: ModelFolder | None = None) -> ModelChoice:
    """Resolves the model flags. Raises UserError for files that are missing or do not match.

    source: the model folder that the run starts from; its config is used unless flags name the
    architecture.
    """
    name = model_name(selection, source)
    config = with_options(choose_config(selection, source, name), selection, name)
    tokenizer = choose_tokenizer(selection, source, name)
    check_vocab_size(tokenizer, config)
    try:
        return ModelChoice(name, config.with_vocabulary(tokenizer), tokenizer)
    except ValueError as error:
        raise UserError(
            f"{tokenizer.vocab_file} does not fit the config ({error}): use those that belong "
            f"together"
        ) from error


def choose_model_in(folder: ModelFolder, selection: ModelSelection) -> ModelChoice:
    """`choose_model` for a program without a model of its own by default."""
    if not folder.has_config and selection.config_file is None:
        raise UserError(f"{folder} has no {CONFIG_FILE}: copy it there, or give --config-file")
    return choose_model(selection, folder)


def gives_config(source: ModelFolder | None, selection: ModelSelection) -> TypeGuard[ModelFolder]:
    """Whether the architecture is that of the folder, because no flag names another."""
    return source is not None and selection.given_name is None and source.has_config


def model_name(selection: ModelSelection, source: ModelFolder | None) -> str:
    """The model's name, which is that of its folder for results: that of --bert-model, else of
    --config-file in bert_configs/ or `custom`, else that of the starting model.
    """
    if gives_config(source, selection):
        return source.name
    return selection.given_name or DEFAULT_BERT_MODEL


def choose_config(selection: ModelSelection, source: ModelFolder | None, name: str) -> ModelConfig:
    """The config of the starting model `source`, of --config-file, or of the model `name` in
    bert_configs/.
    """
    if gives_config(source, selection):
        return source.config
    if selection.config_file is None and name == CUSTOM:
        raise UserError(
            "--bert-model custom needs --config-file: give the architecture's JSON file"
        )
    return read_config(selection.config_file or CONFIGS / f"{name}.json")


def with_options(config: ModelConfig, selection: ModelSelection, name: str) -> ModelConfig:
    """The config with the architecture's options that flags change."""
    for flag in flags_of(ModelSelection):
        value = getattr(selection, flag.name, None)
        if not value or not flag.tags.get("encoder_option"):
            continue
        if flag.name not in config.options:
            raise UserError(
                f"{flag.names[0]} is not for {name}, a {config.model_type} model: leave it out"
            )
        config = replace(config, **{flag.name: value})
    if selection.dropout is not None:
        config = config.with_dropout(selection.dropout)
    return config


def choose_tokenizer(selection: ModelSelection, source: ModelFolder | None, name: str) -> Tokenizer:
    """The tokenizer of `tokenizer_path`, with the casing that the flags give."""
    path, lower_cases = tokenizer_path(selection, source, name), selection.do_lower_case
    if source is not None and lower_cases is None and path == source.path:
        return source.tokenizer
    tokenizer = load_tokenizer(path, lower_cases)
    if source is not None and lower_cases is None:
        check_casing(source, tokenizer)
    return tokenizer


def tokenizer_path(selection: ModelSelection, source: ModelFolder | None, name: str) -> Path:
    """--vocab-file, else the starting model, else the vocabulary of the architecture `name` in
    vocab/.
    """
    if selection.vocab_file is not None:
        return selection.vocab_file
    if source is not None and source.has_tokenizer:
        return source.path
    # A folder's own name says nothing about its vocabulary.
    if gives_config(source, selection) or not (CONFIGS / f"{name}.json").is_file():
        advice = "give the vocabulary of the model"
        if source is not None:
            advice = f"{source} has no tokenizer: copy it there"
        raise UserError(f"--vocab-file is missing: {advice}")
    # Models of the same casing share one vocabulary.
    shipped = f"bert-base-{'cased' if '-cased' in name else 'uncased'}-vocab.txt"
    return resource_folder("vocab") / shipped


def check_casing(source: ModelFolder, tokenizer: Tokenizer) -> None:
    """Raises UserError if `tokenizer` has the tokens of the starting model's, but lower-cases
    where that does not, or vice versa.
    """
    if tokenizer.is_json or not source.has_tokenizer:
        return
    if not have_same_tokens(source.tokenizer, tokenizer):
        return
    then, now = source.tokenizer.casing_settings(), tokenizer.casing_settings()
    if then["do_lower_case"] != now["do_lower_case"]:
        raise UserError(
            f"{tokenizer.vocab_file} is {Casing.of(now)}, and the tokenizer of {source} is "
            f"{Casing.of(then)}: leave out --vocab-file, or say it with --do-lower-case"
        )


def have_same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers of one kind have the same tokens."""
    return type(first) is type(second) and first.vocab == second.vocab


def check_vocab_size(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raises UserError unless the config has the size of the vocabulary, which may be padded."""
    count, advice = tokenizer.vocab_size, "use the vocabulary and the config that belong together"
    if not count <= config.vocab_size <= -(-count // VOCAB_MULTIPLE) * VOCAB_MULTIPLE:
        raise UserError(
            f"{tokenizer.vocab_file} has {count} tokens, and vocab_size is {config.vocab_size}: "
            f"{advice}"
        )


def check_same_kind(folder: ModelFolder, choice: ModelChoice) -> None:
    """Raises UserError for weights of equal shapes with another meaning: other heads, another
    vocabulary.
    """
    config, tokenizer = choice.config, choice.tokenizer
    if folder.has_config:
        stored = folder.config
        keys = config.meaning if type(stored) is type(config) else ("model_type",)
        for key in keys:
            then, now = getattr(stored, key), getattr(config, key)
            if SAME_ACTS.get(then, then) != SAME_ACTS.get(now, now):
                raise UserError(
                    f"{folder.path / CONFIG_FILE}: {key} is {then}, but this run's config has "
                    f"{now}: use the config that the weights were trained with"
                )
    if not folder.has_tokenizer:
        return
    if not have_same_tokens(folder.tokenizer, tokenizer):
        advice = "use the vocabulary that the weights were made with"
        raise UserError(
            f"{folder.tokenizer.vocab_file} and {tokenizer.vocab_file} contain different tokens: "
            f"{advice}"
        )
    if not tokenizer.is_json:
        check_accents(folder.tokenizer, tokenizer)


def check_accents(theirs: Tokenizer, ours: Tokenizer) -> None:
    """Raises UserError if two tokenizers of one casing differ in accents, for which runs have no
    flag.
    """
    then, now = theirs.casing_settings(), ours.casing_settings()
    if then["do_lower_case"] == now["do_lower_case"] and then != now:
        raise UserError(
            f"{theirs.vocab_file} is {Casing.of(then)}, and {ours.vocab_file} is "
            f"{Casing.of(now)}: use the vocabulary in the model's folder"
        )
