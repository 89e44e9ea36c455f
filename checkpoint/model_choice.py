"""Selects the architecture, vocabulary and casing of a run.

Flags take precedence, then the model folder that the run starts from, then the files of
--bert-model in this project.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from checkpoint.folder import CONFIG_FILE, RECORD_FILE
from encoders.config import VOCAB_MULTIPLE, ModelConfig
from modeling import config_from_dict
from run_config import CONFIGS, CUSTOM, ModelSelection
from tokenizer import Tokenizer, load_tokenizer
from tokenizer_formats.files import find_tokenizer
from utils.errors import UserError
from utils.files import from_json, read_json

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class ModelChoice:
    """`name`: the folder for results; the name of a file in bert_configs/, of the model's folder,
    or `custom`.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer


def choose_model(selection: ModelSelection, folder: Path | None = None) -> ModelChoice:
    """Resolves the model flags. Raises UserError for files that are missing or do not match.

    folder: the model folder that the run starts from; its config is used unless flags name the
    architecture.
    """
    has_config = folder is not None and (folder / CONFIG_FILE).is_file()
    if (
        folder is not None
        and not has_config
        and selection.given_name is None
        and selection.name == CUSTOM
    ):
        raise UserError(f"{folder} has no {CONFIG_FILE}: copy it there, or give --config-file")
    source = folder
    if selection.config_file or selection.is_named or not has_config:
        folder = None
    name = model_name(selection, folder)
    path = selection.config_file or (
        folder / CONFIG_FILE if folder is not None else CONFIGS / f"{name}.json"
    )
    if name == CUSTOM and selection.config_file is None and folder is None:
        raise UserError(
            "--bert-model custom needs --config-file: give the architecture's JSON file"
        )
    config = read_config(path)
    for option in ("pre_layer_norm", "global_rope_theta"):
        if value := getattr(selection, option):
            if option not in config.options:
                flag = f"--{option.replace('_', '-')}"
                raise UserError(
                    f"{flag} is not for {name}, a {config.model_type} model: leave it out"
                )
            config = dataclasses.replace(config, **{option: value})
    if (dropout := selection.dropout) is not None:
        config = config.with_dropout(dropout)

    vocab_file = selection.vocab_file
    if vocab_file is None and source is not None:
        vocab_file = find_tokenizer(source)
    if vocab_file is None:
        if not (CONFIGS / f"{name}.json").is_file():
            advice = (
                "give the vocabulary of the model"
                if source is None
                else f"{source} has no tokenizer: copy it there"
            )
            raise UserError(f"--vocab-file is missing: {advice}")
        # Models of the same casing share one vocabulary.
        vocab_file = (
            ROOT / "vocab" / f"bert-base-{'cased' if '-cased' in name else 'uncased'}-vocab.txt"
        )
    tokenizer = load_tokenizer(vocab_file, selection.do_lower_case)
    check_vocab_size(tokenizer, config)
    try:
        return ModelChoice(name, config.with_vocabulary(tokenizer), tokenizer)
    except ValueError as error:
        raise UserError(
            f"{vocab_file} does not fit the config ({error}): use those that belong together"
        ) from error


def check_vocab_size(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raises UserError unless the config has the size of the vocabulary, which may be padded."""
    count, advice = tokenizer.vocab_size, "use the vocabulary and the config that belong together"
    if not count <= config.vocab_size <= -(-count // VOCAB_MULTIPLE) * VOCAB_MULTIPLE:
        raise UserError(
            f"{tokenizer.vocab_file} has {count} tokens, and vocab_size is {config.vocab_size}: "
            f"{advice}"
        )


def read_config(path: Path) -> ModelConfig:
    values = read_json(path, "the config")
    from_json({"architectures": list[str] | None}, values, f"the config {path}")
    if "bert_model_config" in values:
        raise UserError(
            f"{path} is a configuration of DeepSpeed's bing_bert: the model is its inner object "
            f"bert_model_config: "
            f"give --config-file a file with that, or bert_configs/bert-large-uncased.json with "
            f"--pre-layer-norm"
        )
    try:
        return config_from_dict(values)
    except ValueError as error:
        raise UserError(f"{path}: {error}: correct the config") from error


def model_name(selection: ModelSelection, folder: Path | None = None) -> str:
    """The model's name, which is that of its folder for results: that of --bert-model, else of
    --config-file in bert_configs/ or `custom`, else of the starting model `folder`: the name of its
    architecture in bert_configs/, otherwise the model's in `<output-dir>/<model>/<phase or
    task>[/seed-N]/<step>`, or the folder's own.
    """
    if selection.given_name is not None or folder is None:
        return selection.given_name or selection.name
    config = read_config(folder / CONFIG_FILE)
    for path in sorted(CONFIGS.glob("*.json")):
        if read_config(path) == config:
            return path.stem
    run = folder.resolve().parent
    if (run / RECORD_FILE).is_file():
        return (run.parent if run.name.startswith("seed-") else run).parent.name
    if (
        run.name == "snapshots"
    ):  # Hugging Face's cache: models--<organization>--<name>/snapshots/<commit>
        return run.parent.name.rpartition("--")[2]
    return (
        folder.resolve().name if folder.name in ("", "..") else folder.name
    )  # a symbolic link's own
