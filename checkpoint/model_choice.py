"""Selects the architecture, vocabulary and casing of a run.

Flags take precedence, then the model folder that the run starts from, then the files of --bert-model in this project.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint.folder import CONFIG_FILE, RECORD_FILE, find_checkpoint, find_model_folder
from encoders.config import VOCAB_MULTIPLE, ModelConfig
from modeling import config_from_dict
from run_config import CUSTOM, ModelSelection, StartConfig
from tokenizer import Tokenizer, load_tokenizer
from tokenizer_formats.files import TOKENIZER_CONFIG, VOCAB_FILE, find_tokenizer
from utils.errors import UserError
from utils.files import read_json_object

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "bert_configs"


@dataclass(frozen=True)
class ModelChoice:
    """`name`: the folder for results; the name of a file in bert_configs/, of the model's folder, or `custom`."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer


def choose_model(
    selection: ModelSelection, start: StartConfig, on_main: Callable[[Callable], Any] = lambda function: function()
) -> ModelChoice:
    """Resolves the model flags. Raises UserError for files that are missing or do not match.

    on_main: calls a function on the main process only; used to verify the model folder."""
    folder = None if selection.config_file or selection.is_named else on_main(partial(initial_folder, start))
    folder = folder and Path(folder)
    path, name, do_lower_case = selection.config_file, selection.name, selection.do_lower_case
    if path is not None and not selection.is_named:
        name = path.stem if path.resolve().parent == CONFIGS else CUSTOM
    elif folder is not None:
        path = folder / CONFIG_FILE
    elif path is None and name == CUSTOM:
        raise UserError("--bert-model custom needs --config-file: give the architecture's JSON file")
    config = read_config(path or CONFIGS / f"{name}.json")
    if folder is not None:
        name = name_of(config)
    for option in ("pre_layer_norm", "global_rope_theta"):
        if value := getattr(selection, option):
            if option not in config.options:
                flag = f"--{option.replace('_', '-')}"
                raise UserError(f"{flag} is not for {name}, a {config.model_type} model: leave it out")
            config = dataclasses.replace(config, **{option: value})
    if (dropout := selection.dropout) is not None:
        config = config.with_dropout(dropout)

    vocab_file = selection.vocab_file
    if vocab_file is None and folder is not None and (vocab_file := find_tokenizer(folder)) is not None:
        if do_lower_case is None and vocab_file.name == VOCAB_FILE and (folder / TOKENIZER_CONFIG).is_file():
            casing = read_json_object(folder / TOKENIZER_CONFIG, "the tokenizer's config").get("do_lower_case")
            do_lower_case = casing if isinstance(casing, bool) else None
    elif vocab_file is None:
        if name == CUSTOM:
            raise UserError("--vocab-file is missing: give the vocabulary of the model")
        # Models of the same casing share one vocabulary.
        vocab_file = ROOT / "vocab" / f"bert-base-{'cased' if '-cased' in name else 'uncased'}-vocab.txt"
    tokenizer = load_tokenizer(vocab_file, do_lower_case)
    check_vocab_size(tokenizer, config)
    if folder is not None and name == CUSTOM:
        name = name_of_folder(folder)
    try:
        return ModelChoice(name, config.with_vocabulary(tokenizer), tokenizer)
    except ValueError as error:
        raise UserError(
            f"{tokenizer.vocab_file} does not fit the config ({error}): use those that belong together"
        ) from error


def check_vocab_size(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raises UserError unless the config has the size of the vocabulary, which may be padded."""
    num_tokens = tokenizer.vocab_size
    if not num_tokens <= config.vocab_size <= -(-num_tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE:
        raise UserError(
            f"{tokenizer.vocab_file} has {num_tokens} tokens and the config's vocab_size is {config.vocab_size}: use "
            f"the vocabulary and the config that belong together"
        )


def initial_folder(start: StartConfig) -> str | None:
    """The verified model folder that the run starts from, or None without a config; see checkpoint.state.find_start."""
    folder, weights = None, start.from_phase1_final_params or start.from_pretrained_params
    if start.from_checkpoint is not None:
        folder = find_checkpoint(start.from_checkpoint, start.last_step_of_checkpoint, log=lambda _: None)
    if folder is None and weights is not None:
        folder = find_model_folder(weights, log=lambda _: None)
    return str(folder) if folder is not None and (folder / CONFIG_FILE).is_file() else None


def read_config(path: Path) -> ModelConfig:
    try:
        return config_from_dict(read_json_object(path, "the config"))
    except ValueError as error:
        raise UserError(f"{path}: {error}: correct the config") from error


def name_of(config: ModelConfig) -> str:
    """The name of this architecture in bert_configs/, or `custom`."""
    return next((path.stem for path in sorted(CONFIGS.glob("*.json")) if read_config(path) == config), CUSTOM)


def name_of_folder(folder: Path) -> str:
    """The model's name in `<output-dir>/<model>/<phase or task>[/seed-N]/<step>`, or the folder's own name."""
    run = folder.resolve().parent
    if (run / RECORD_FILE).is_file():
        return (run.parent if run.name.startswith("seed-") else run).parent.name
    if run.name == "snapshots":  # Hugging Face's cache: models--<organization>--<name>/snapshots/<commit>
        return run.parent.name.rpartition("--")[2]
    return folder.resolve().name
