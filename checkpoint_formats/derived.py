"""Model folders made from others: the average of several, BERT or RoBERTa with more positions, a
larger model.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.folder import CONFIG_FILE
from checkpoint.identity import first_difference, read_record
from checkpoint.model_choice import read_config
from checkpoint.rows import LazyTensor
from checkpoint.weights import open_model_weights, select_weights
from encoders.config import ModelConfig
from encoders.modules import Linear
from modeling import make_model
from tasks.sentence_folders import sentence_files
from tokenizer import load_tokenizer
from tokenizer_formats.files import find_tokenizer, read_settings
from utils.errors import UserError

POSITIONS = "position_embeddings.weight"
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def average(folders: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights of several model folders, computed in float64."""
    first, *others = folders
    if not others:
        raise UserError(f"{first} is one model: give two or more")
    weights = [open_model_weights(folder) for folder in folders]
    shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in weights]
    surroundings = [surroundings_of(folder) for folder in folders]
    runs = {
        folder: identity for folder in folders if (identity := read_record(folder.parent).identity)
    }
    for folder, identity in runs.items():
        if difference := first_difference(next(iter(runs.values())), identity):
            raise UserError(
                f"{folder} is of another run than {next(iter(runs))}: {difference}: average steps "
                f"of one"
            )
    for folder, found, values in zip(others, shapes[1:], surroundings[1:], strict=True):
        different = [name for name, value in surroundings[0].items() if values[name] != value]
        if found != shapes[0] or different:
            what = f"another {different[0]}" if different else "other tensors"
            raise UserError(f"{folder} has {what} than {first}: average steps of one model")
    means = {
        name: sum(tensors[name].read().double() for tensors in weights) / len(weights)
        for name, tensor in weights[0].items()
        if tensor.dtype.is_floating_point
    }
    if damaged := [name for name, mean in means.items() if not mean.isfinite().all()]:
        raise UserError(
            f"the average of {damaged[0]} is not finite: leave out the model that has such weights"
        )
    return means


def surroundings_of(folder: Path) -> dict[str, Any]:
    """What must be equal besides the tensors."""
    config, vocab_file = read_config(folder / CONFIG_FILE), find_tokenizer(folder)
    return {
        "config": (config, config.labels),
        "vocabulary": vocab_file and load_tokenizer(vocab_file).vocab_sha256,
        "casing": read_settings(folder)["do_lower_case"],
        "pooling or prompt": [
            (path.relative_to(folder), path.read_bytes()) for path in sentence_files(folder)
        ],
    }


def lengthen(
    tensors: Mapping[str, LazyTensor], config: ModelConfig, max_length: int
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The config and the weights with positions for `max_length` tokens: the learned ones, repeated
    from the beginning (Beltagy et al., 2020, "Longformer", section 5).
    """
    names = [name for name in tensors if name.endswith(POSITIONS)]
    if not names:
        advice = "train it with a config of larger max_position_embeddings"
        raise UserError(f"a {config.model_type} model has no learned positions: {advice}")
    if max_length <= config.max_length:
        raise UserError(
            f"--max-length {max_length} is not above the model's {config.max_length}: give more"
        )
    before = (
        config.max_position_embeddings - config.max_length
    )  # RoBERTa's rows that stand for no position
    try:
        longer = dataclasses.replace(config, max_position_embeddings=before + max_length)
    except ValueError as error:
        raise UserError(f"--max-length {max_length}: {error}") from error
    result = {
        name: tensor.read() for name, tensor in tensors.items() if tensor.dtype.is_floating_point
    }
    rows = torch.arange(max_length) % config.max_length + before
    for name in names:
        result[name] = torch.cat([result[name][:before], result[name][rows]])
    return longer, result


def grow(
    tensors: Mapping[str, LazyTensor], small: ModelConfig, large: ModelConfig, source: Path
) -> dict[str, Tensor]:
    """Weights of a model with config `large` from those of one with config `small`, as
    ModernBERT-large was made from base (Warner et al., 2024, appendix): layer i is layer round(i *
    small / large) (Rae et al., 2021, "Gopher"), and each dimension has the smaller one in its
    middle, which repeats to both sides (Javaheripi et al., 2023, "Phi").

    Query, key and value, and the halves of GeGLU, are repeated apart, and heads as wholes.
    Classifiers are left out. Raises UserError unless `large` differs in sizes only and no size is
    smaller.
    """
    if type(small) is not type(large):
        kinds = f"the source is a {small.model_type} model, and --config-file has a {large.model_type} model"
        raise UserError(f"{kinds}: give the config of a larger {small.model_type} model")
    switches = [
        field.name for field in dataclasses.fields(small) if field.type is bool and field.compare
    ]  # biases
    for name in (
        *SIZES,
        *small.meaning,
        *switches,
        "head_size",
        "vocab_size",
        "max_position_embeddings",
    ):
        then, now = getattr(small, name), getattr(large, name)
        if name in SIZES and now < then:
            raise UserError(f"--config-file: {name} {now} is below the source's {then}")
        if name not in SIZES and now != then:
            raise UserError(
                f"--config-file: {name} is {now}, the source's {then}: grow changes sizes only"
            )
    with torch.device("meta"):
        model, target = make_model("pretraining", small), make_model("pretraining", large)
    given = select_weights(model, tensors, source)
    linear = {name: module for name, module in target.named_modules() if isinstance(module, Linear)}
    [layers] = [name for name, module in target.named_modules() if module is target.layers]
    result = {}
    for name, p in target.named_parameters():
        prefix, layer, rest = re.fullmatch(
            rf"(?:({re.escape(layers)}\.)(\d+)(\..*)|.*)", name
        ).groups()
        if layer is not None:
            nearest = round(int(layer) * small.num_hidden_layers / large.num_hidden_layers)
            source_name = f"{prefix}{min(nearest, small.num_hidden_layers - 1)}{rest}"
        else:
            source_name = name
        shape = (large.vocab_size, *p.shape[1:]) if p is target.word_embeddings.weight else p.shape
        if source_name in given:
            module = linear.get(name.rpartition(".")[0])
            parts = given[source_name].read().float().chunk(module.stacked if module else 1)
            sizes = (shape[0] // len(parts), *shape[1:])
            result[name] = torch.cat(
                [tile(part, sizes, small.hidden_size, small.head_size) for part in parts]
            )
        elif layer is not None:  # the first layer's norm, which ModernBERT lacks
            result[name] = torch.ones(shape)
    return result


def tile(tensor: Tensor, shape: Sequence[int], hidden_size: int, head_size: int) -> Tensor:
    """`tensor` in the middle of `shape`, repeated to both sides; along dimensions of `hidden_size`
    by whole heads.
    """
    for dim, (old, new) in enumerate(zip(tensor.shape, shape, strict=True)):
        unit = head_size if old == hidden_size else 1
        offset = (new - old) // unit // 2 * unit
        tensor = tensor.index_select(dim, (torch.arange(new) - offset) % old)
    return tensor
