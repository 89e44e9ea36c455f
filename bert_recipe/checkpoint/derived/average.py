"""The average of several models, such as the last steps of a run or its seeds."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.rows import LazyTensor
from bert_recipe.checkpoint.sentence_folders import sentence_files
from bert_recipe.tokenization.files import Casing
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject


def average(folders: Sequence[ModelFolder]) -> dict[str, Tensor]:
    """The mean of the weights of several model folders, computed in float64. Raises UserError
    unless they have one config, vocabulary and pooling.
    """
    first, *others = folders
    expected = surroundings_of(first)
    shapes = shapes_of(first.tensors)
    for folder in others:
        actual = surroundings_of(folder)
        different = [name for name, value in expected.items() if actual[name] != value]
        if different or shapes_of(folder.tensors) != shapes:
            what = f"another {different[0]}" if different else "other tensors"
            raise UserError(f"{folder} has {what} than {first}: average models of one kind")
    means: dict[str, Tensor] = {}
    for name, tensor in first.tensors.items():
        if tensor.dtype.is_floating_point:
            values = [folder.tensors[name].read() for folder in folders]
            total = functools.reduce(torch.add, (value.double() for value in values))
            means[name] = total / len(folders)
    return means


def shapes_of(tensors: dict[str, LazyTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def surroundings_of(folder: ModelFolder) -> JsonObject:
    """What must be equal besides the tensors."""
    sentences = [
        (path.relative_to(folder.path), path.read_bytes()) for path in sentence_files(folder.path)
    ]
    tokenizer = folder.tokenizer if folder.has_tokenizer else None
    return {
        "config": (folder.config, folder.config.labels),
        "vocabulary": tokenizer and tokenizer.vocab_sha256,
        "casing": tokenizer and Casing.of(tokenizer.casing_settings()),
        "pooling or prompt": sentences,
    }
