"""Which model a command line names: its architecture, vocabulary and casing.

Flags come first. Without them, a model folder that the run starts from brings its own; else --bert-model names files of
this project.
"""

import atexit
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bert_config import BertConfig
from checkpoint.folder import CONFIG_FILE, TOKENIZER_FILE, VOCAB_FILE, find_checkpoint, find_model_folder
from tokenizer import BertTokenizer, check_tokenizer_folder, read_tokenizer_file
from utils.command_line import Arguments
from utils.errors import UserError
from utils.files import read_json_object

ROOT = Path(__file__).resolve().parent
CONFIGS = ROOT / "bert_configs"
CUSTOM = "custom"


@dataclass(frozen=True)
class ModelChoice:
    """`name` is that of the folder for results: a file in bert_configs/, or `custom`."""

    name: str
    config: BertConfig
    vocab_file: Path
    do_lower_case: bool


def choose_model(args: Arguments, on_main: Callable[[Callable], Any] = lambda function: function()) -> ModelChoice:
    """The model that the flags name. Raises UserError for files that are missing or do not fit together.

    on_main: calls a function on the main process only, which verifies the model folder that the flags name."""
    folder = None if args.config_file or args.given("bert_model") else on_main(partial(initial_folder, args))
    folder = folder and Path(folder)
    config_path, name = args.config_file, args.bert_model
    if config_path is not None and not args.given("bert_model"):
        is_ours = config_path.resolve().parent == CONFIGS
        name = config_path.stem if is_ours else CUSTOM
    elif folder is not None:
        config_path = folder / CONFIG_FILE
        name = name_of(read_config(config_path))
    elif config_path is None and name == CUSTOM:
        raise UserError("--bert-model custom needs --config-file: give the architecture's JSON file")
    config = read_config(config_path or CONFIGS / f"{name}.json")
    if args.pre_layer_norm:
        config = dataclasses.replace(config, pre_layer_norm=True)
    if args.dropout is not None:
        config = dataclasses.replace(
            config, hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout
        )

    vocab_file, do_lower_case = args.vocab_file, None
    if vocab_file is None and folder is not None and (folder / VOCAB_FILE).is_file():
        vocab_file = folder / VOCAB_FILE
        if (folder / TOKENIZER_FILE).is_file():
            do_lower_case = read_json_object(folder / TOKENIZER_FILE, "the tokenizer's config").get("do_lower_case")
    elif vocab_file is None and folder is not None and (folder / "tokenizer.json").is_file():  # from transformers 5
        vocab_file, do_lower_case = extract_vocabulary(folder / "tokenizer.json")
    elif vocab_file is None:
        if name == CUSTOM:
            raise UserError("--vocab-file is missing: give the vocabulary of the model")
        # All of Google's models of a casing have the same vocabulary.
        vocab_file = ROOT / "vocab" / f"bert-base-{'uncased' if 'uncased' in name else 'cased'}-vocab.txt"
    check_vocabulary(vocab_file, config)
    if not isinstance(do_lower_case, bool):
        do_lower_case = is_uncased(vocab_file)
    if folder is not None and args.vocab_file is None:
        check_tokenizer_folder(folder, do_lower_case)
    return ModelChoice(name, config, vocab_file, do_lower_case)


def extract_vocabulary(path: Path) -> tuple[Path, bool]:
    """The vocabulary of a `tokenizer.json` as a temporary `vocab.txt`, and whether it lower-cases."""
    tokens, do_lower_case = read_tokenizer_file(path)
    folder = Path(tempfile.mkdtemp(prefix="vocabulary_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    vocab_file = folder / VOCAB_FILE
    vocab_file.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return vocab_file, do_lower_case


def initial_folder(args: Arguments) -> str | None:
    """The model folder that the run starts from, verified, if it has a config; see checkpoint.state.find_start."""
    folder, weights = None, getattr(args, "from_phase1_final_params", None) or args.from_pretrained_params
    if getattr(args, "from_checkpoint", None) is not None:  # a flag of the training programs
        folder = find_checkpoint(args.from_checkpoint, args.last_step_of_checkpoint, log=lambda _: None)
    if folder is None and weights is not None:
        folder = find_model_folder(weights, log=lambda _: None)
    return str(folder) if folder is not None and (folder / CONFIG_FILE).is_file() else None


def read_config(path: Path) -> BertConfig:
    read_json_object(path, "the config")
    try:
        return BertConfig.from_json_file(path)
    except ValueError as error:
        raise UserError(f"{error}: correct the config") from error


def name_of(config: BertConfig) -> str:
    """The name of the same architecture in bert_configs/, or `custom`."""
    for path in sorted(CONFIGS.glob("*.json")):
        if BertConfig(**json.loads(path.read_text(encoding="utf-8"))) == config:
            return path.stem
    return CUSTOM


def check_vocabulary(vocab_file: Path, config: BertConfig) -> None:
    """The config's vocab_size is the number of words in the file, or that rounded up to a multiple of 64."""
    words = BertTokenizer(vocab_file).vocab_size
    if not words <= config.vocab_size <= -(-words // 64) * 64:
        raise UserError(
            f"{vocab_file} holds {words} words and the config's vocab_size is {config.vocab_size}: "
            f"use the vocabulary and the config that belong together"
        )


def is_uncased(vocab_file: Path) -> bool:
    """Whether a vocabulary has no capital letters, so that its text was lower-cased."""
    words = vocab_file.read_text(encoding="utf-8").split()
    return not any(word != word.lower() for word in words if not word.startswith("["))
