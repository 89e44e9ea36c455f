"""Converts a checkpoint of another project to a Hugging Face model folder.

    python3 convert_checkpoint.py --from {nvidia-pytorch,nvidia-paddle,composer} SOURCE FOLDER

or makes one from other model folders:

    python3 convert_checkpoint.py average SOURCE SOURCE... FOLDER
    python3 convert_checkpoint.py safetensors SOURCE FOLDER

All programs here accept the result. Every tensor is converted or reported. Pickled code is never
executed. The output folder is written atomically.
"""

import dataclasses
import glob
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_recipe.utils.errors import UserError, handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

import torch
from torch import Tensor

from bert_recipe.checkpoint.calibration import CALIBRATION_FILE
from bert_recipe.checkpoint.derived.average import average
from bert_recipe.checkpoint.folder import CONFIG_FILE, MODEL_FILE
from bert_recipe.checkpoint.formats import composer, nvidia_paddle, nvidia_pytorch
from bert_recipe.checkpoint.formats.source_weights import SourceWeights, convert_weights
from bert_recipe.checkpoint.formats.torch_files import read_pickled_weights
from bert_recipe.checkpoint.model_card import write_derived_card
from bert_recipe.checkpoint.model_choice import check_vocab_size
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.rows import TensorRows, create_file, file_layout, write_rows
from bert_recipe.checkpoint.sentence_folders import sentence_files
from bert_recipe.model.encoders.bert import BertConfig
from bert_recipe.model.encoders.config import HIDDEN_ACTS, ModelConfig
from bert_recipe.model.encoders.modernbert import ModernBertConfig
from bert_recipe.model.encoders.registry import config_from_dict
from bert_recipe.tokenization.files import TOKENIZER_CONFIG, TOKENIZER_JSON, VOCAB_FILE, Casing
from bert_recipe.tokenization.tokenizer import (
    Tokenizer,
    load_tokenizer,
    model_files,
)
from bert_recipe.utils.command_line import REQUIRED, ArgumentParser, Arguments, Flag
from bert_recipe.utils.files import atomic_folder, remove
from bert_recipe.utils.json_files import read_json, write_json
from bert_recipe.utils.progress import print_line

NVIDIA_PYTORCH, COMPOSER = "nvidia-pytorch", "composer"
READERS = {
    NVIDIA_PYTORCH: nvidia_pytorch.read,
    "nvidia-paddle": nvidia_paddle.read,
    COMPOSER: composer.read,
}
DERIVED = {
    "average": "Writes the average of model folders, such as the last steps of a run.",
    "safetensors": "Writes a model folder of Hugging Face with its pytorch_model.bin, a pickle, as "
    "model.safetensors.",
}
CONFIG_NAMES = ("config.json", "bert_config.json")
FLAGS = (
    Flag(
        "--from",
        tuple(READERS),
        REQUIRED,
        "format of SOURCE",
        options={"dest": "source_format"},
    ),
    Flag(
        "source",
        Path,
        REQUIRED,
        "checkpoint file, its prefix, or its folder",
    ),
    Flag(
        "folder",
        Path,
        REQUIRED,
        "model folder to write; must not exist, or be empty",
    ),
    Flag("--config-file", Path, None, "BERT config; by default the one beside the checkpoint"),
    Flag("--vocab-file", Path, None, "vocabulary; by default the one beside the checkpoint"),
    Flag(
        "--hidden-act",
        HIDDEN_ACTS,
        None,
        "activation function that the weights were trained with: gelu (erf), or a name of its "
        "tanh form; by default the config's. NVIDIA's PyTorch model uses gelu before 2022 and "
        "gelu_pytorch_tanh since: required if its file does not show which",
    ),
)


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    parser = ArgumentParser(prog="convert_checkpoint.py", description=__doc__)
    parser.add_flags("flags", FLAGS)
    return parser.parse_args(argv)


def find_beside(source: Path, names: tuple[str, ...], flag: str) -> Path:
    """The first of the files `names` in the folder `source`, or beside the file `source`."""
    folder = source if source.is_dir() else source.parent
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} has no {' or '.join(names)}: give {flag}")


def write_model(
    folder: Path,
    config: ModelConfig,
    config_values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Writes weights in float32, and the config with the model class and the labels of a
    classification head.
    """
    rows = [
        TensorRows(name, tuple(tensor.shape), tensor.to(torch.float32))
        for name, tensor in tensors.items()
    ]
    layout = file_layout(rows)
    create_file(folder / MODEL_FILE, layout)
    write_rows(folder / MODEL_FILE, layout, rows)
    values = {
        key: value for key, value in config_values.items() if key not in ("dtype", "torch_dtype")
    }
    if "classifier.weight" in tensors and "id2label" not in values:
        count = len(tensors["classifier.weight"])
        config = dataclasses.replace(config, labels=tuple(f"LABEL_{i}" for i in range(count)))
    write_json(folder / CONFIG_FILE, {**values, **config.to_dict()})


def write_tokenizer(folder: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Copies the vocabulary, and the `tokenizer_config.json` beside it."""
    check_vocab_size(tokenizer, config)
    files = model_files(
        tokenizer, config.max_length, config.needs_tokenizer_json, config.takes_token_types
    )
    for name, content in files.items():
        (folder / name).write_bytes(content)
    settings = read_json(folder / TOKENIZER_CONFIG, "tokenizer config")
    beside = tokenizer.vocab_file.with_name(TOKENIZER_CONFIG)
    if tokenizer.vocab_file.name in (VOCAB_FILE, TOKENIZER_JSON) and beside.is_file():
        settings |= read_json(beside, "tokenizer config")
        write_json(folder / TOKENIZER_CONFIG, settings)
    casing = Casing.of(settings) or Casing.of(tokenizer.casing_settings())
    print_line(f"vocabulary {tokenizer.vocab_file} ({casing})")


def derive(command: str, argv: Sequence[str]) -> None:
    """The commands that make a model folder from others."""
    parser = ArgumentParser(prog=f"convert_checkpoint.py {command}", description=DERIVED[command])
    count = "+" if command == "average" else 1
    flags = (
        Flag(
            "sources",
            Path,
            REQUIRED,
            "model folder, or folder of a run",
            options={"metavar": "SOURCE", "nargs": count},
        ),
        Flag(
            "folder",
            Path,
            REQUIRED,
            "model folder to write; new, or empty",
        ),
    )
    parser.add_flags("flags", flags)
    args = parser.parse_args(argv)
    check_output(args.folder)
    sources = [ModelFolder.find(path) for path in args.sources]
    source = sources[0]
    config = source.config
    weights = average(sources) if command == "average" else read_pickled_weights(source.path)
    with atomic_folder(args.folder.resolve()) as folder:
        write_tokenizer(folder, source.tokenizer, config)
        write_model(folder, config, source.config_values, weights)
        kept = sentence_files(source.path)
        if command == "safetensors":  # the same model; an average is another one
            kept += [path for path in (source.path / CALIBRATION_FILE,) if path.is_file()]
        for path in kept:
            target = folder / path.relative_to(source.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        names = [source.name for source in sources]
        base = names[0] if len(names) == 1 else None
        write_derived_card(folder, args.folder.name, parser.prog, names, base)
    print_line(f"wrote {len(weights)} tensors to {args.folder}")


def check_output(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: choose another FOLDER")
    # Of a killed conversion.
    for leftover in folder.parent.glob(f"{glob.escape(folder.name)}.tmp-*"):
        remove(leftover)


def read_source_config(
    args: Arguments, source: SourceWeights
) -> tuple[Path, dict[str, Any], ModelConfig]:
    """The config of the weights: its file, its values, and what they mean."""
    path, values = source.path, source.config_values
    if args.config_file is not None or values is None:
        path = args.config_file or find_beside(args.source, CONFIG_NAMES, "--config-file")
        values = {"model_type": "bert", **read_json(path, "config")}
    try:
        config = config_from_dict(values)
    except ValueError as error:
        raise UserError(f"{path}: {error}: give another --config-file") from error
    config_class = ModernBertConfig if args.source_format == COMPOSER else BertConfig
    if type(config) is not config_class:
        raise UserError(
            f"{path} has a {config.model_type} model: give one of {config_class.__name__}"
        )
    return path, values, config


def find_vocabulary(args: Arguments, source: SourceWeights, unpacked: Path) -> Path:
    """The file of --vocab-file, of the checkpoint itself, or beside it. unpacked: an empty folder
    for the tokenizer's files in the checkpoint.
    """
    names = (TOKENIZER_JSON, VOCAB_FILE) if args.source_format == COMPOSER else (VOCAB_FILE,)
    for name, content in source.tokenizer_files.items():
        (unpacked / Path(name).name).write_bytes(content)
    has_vocabulary = not source.tokenizer_files.keys().isdisjoint(names)
    beside = unpacked if has_vocabulary else args.source
    return args.vocab_file or find_beside(beside, names, "--vocab-file")


def find_hidden_act(args: Arguments, source: SourceWeights) -> str | None:
    """The activation function that the weights were trained with; None: the config's."""
    hidden_act = args.hidden_act or source.hidden_act
    if hidden_act is None and args.source_format == NVIDIA_PYTORCH:
        raise UserError(
            f"{args.source} does not show which GELU it was trained with: give --hidden-act "
            f"gelu_pytorch_tanh for NVIDIA's code since 2022, or --hidden-act gelu for the "
            f"code before"
        )
    return hidden_act


def convert(args: Arguments) -> None:
    """The conversion of another project's checkpoint."""
    check_output(args.folder)
    if args.source_format == COMPOSER and args.hidden_act is not None:
        raise UserError(
            "--hidden-act has no effect with --from composer, whose files say it: leave it out"
        )
    source = READERS[args.source_format](args.source)
    config_file, config_values, config = read_source_config(args, source)
    with atomic_folder(args.folder.resolve()) as folder:
        print_line(f"config {config_file}")
        with tempfile.TemporaryDirectory() as unpacked:
            vocab_file = find_vocabulary(args, source, Path(unpacked))
            write_tokenizer(folder, load_tokenizer(vocab_file), config)
        tensors, notes = convert_weights(source, config, config_values.get("id2label"))
        if (hidden_act := find_hidden_act(args, source)) is not None:
            config = config_from_dict({**config_values, "hidden_act": hidden_act})
            print_line(f"hidden_act {hidden_act}")
        architectures = [source.layout.architecture(tensors)]
        write_model(folder, config, {"architectures": architectures, **config_values}, tensors)
        made_from = [args.source.name]
        write_derived_card(folder, args.folder.name, "convert_checkpoint.py", made_from)
    for note in notes:
        print_line(note)
    print_line(f"wrote {len(tensors)} tensors to {args.folder}")


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in DERIVED:
        derive(argv[0], argv[1:])
    else:
        convert(parse_arguments(argv))


if __name__ == "__main__":
    run_main(main)
