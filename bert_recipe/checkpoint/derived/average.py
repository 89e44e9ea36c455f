"""The average of several models, such as the last steps of a run."""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from bert_recipe.checkpoint.identity import first_difference, read_record
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.rows import LazyTensor
from bert_recipe.checkpoint.sentence_folders import sentence_files
from bert_recipe.tokenization.files import Casing
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.typed_json import JsonObject


def average(folders: Sequence[ModelFolder]) -> dict[str, Tensor]:
    """The mean of the weights of several model folders, computed in float64. Raises UserError
    unless they are of one model.
    """
    first, *others = folders
    check_one_run(folders)
    expected = surroundings_of(first)
    shapes = shapes_of(first.tensors)
    for folder in others:
        found = surroundings_of(folder)
        different = [name for name, value in expected.items() if found[name] != value]
        if different or shapes_of(folder.tensors) != shapes:
            what = f"another {different[0]}" if different else "other tensors"
            raise UserError(f"{folder} has {what} than {first}: average steps of one model")
    means: dict[str, Tensor] = {}
    equal = set(itertools.combinations(range(len(folders)), 2))
    for name, tensor in first.tensors.items():
        if tensor.dtype.is_floating_point:
            values = [folder.tensors[name].read() for folder in folders]
            equal = {(a, b) for a, b in equal if torch.equal(values[a], values[b])}
            total = functools.reduce(torch.add, (value.double() for value in values))
            means[name] = total / len(folders)
    for a, b in equal:
        raise UserError(
            f"{folders[b]} has the same weights as {folders[a]}, which would count twice: give "
            f"each model once"
        )
    return means


def check_one_run(folders: Sequence[ModelFolder]) -> None:
    """Raises UserError for steps of different runs."""
    runs = {}
    for folder in folders:
        if identity := read_record(folder.path.parent).identity:
            runs[folder] = identity
    for folder, identity in runs.items():
        first = next(iter(runs))
        if difference := first_difference(runs[first], identity):
            raise UserError(
                f"{folder} is of another run than {first}: {difference}: average steps of one"
            )


def shapes_of(tensors: dict[str, LazyTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def surroundings_of(folder: ModelFolder) -> JsonObject:
    """What must be equal besides the tensors."""
    sentences = [
        (path.relative_to(folder.path), path.read_bytes()) for path in sentence_files(folder.path)
    ]
    return {
        "config": (folder.config, folder.config.labels),
        "vocabulary": folder.tokenizer().vocab_sha256 if folder.has_tokenizer else None,
        "casing": Casing.of(folder.tokenizer_settings),
        "pooling or prompt": sentences,
    }
