"""Reads the weights of a Hugging Face model folder, in any of the four layouts that the library has used."""

import pickle
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoint.rows import LazyTensor, open_safetensors
from utils.errors import UserError
from utils.files import read_json

INDEX_SUFFIX = ".index.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # either may be split into shards with an index


class InertObject:
    """Stands in for an object in a pickle that is not needed. It takes any state and does nothing with it."""

    def __new__(cls, *_args: Any) -> "InertObject":
        return super().__new__(cls)

    def __init__(self, *_args: Any):
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


def read_model_tensors(folder: str | Path) -> dict[str, Tensor]:
    """The weights in a Hugging Face model folder by name, on the CPU.

    Takes the first of these that is there: `model.safetensors`, its shards with `model.safetensors.index.json`,
    `pytorch_model.bin`, its shards with `pytorch_model.bin.index.json`. No pickle is executed. Raises UserError if
    there is none, a shard is missing, or the shards do not hold what the index says.
    """
    folder = Path(folder)
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return read_tensor_file(folder / name)
        if (folder / (name + INDEX_SUFFIX)).is_file():
            return _read_shards(folder / (name + INDEX_SUFFIX))
    expected = ", ".join(f"{name} or {name}{INDEX_SUFFIX}" for name in WEIGHT_FILES)
    raise UserError(f"model folder {folder} holds no weights: expected {expected}")


def has_weights(folder: Path) -> bool:
    """Whether `folder` holds weights in one of the four layouts."""
    return any((folder / name).is_file() or (folder / (name + INDEX_SUFFIX)).is_file() for name in WEIGHT_FILES)


def open_model_weights(folder: Path) -> dict[str, LazyTensor]:
    """The weights in a model folder by name. Those of a single safetensors file are read when they are used, by rows;
    the other layouts are read at once."""
    if (folder / WEIGHT_FILES[0]).is_file():
        return open_safetensors(folder / WEIGHT_FILES[0])
    return {name: LazyTensor.of(tensor) for name, tensor in read_model_tensors(folder).items()}


def _read_shards(index_path: Path) -> dict[str, Tensor]:
    index = read_json(index_path, "index of weight files")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index_path} has no weight_map of tensors to files: fetch it again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise UserError(f"{index_path} names {name!r}: shards must be in the same folder")
        shard = index_path.parent / name
        if not shard.is_file():
            raise UserError(f"{shard} does not exist: {index_path.name} names it, fetch the missing shard")
        found = read_tensor_file(shard)
        expected = {tensor for tensor, file in weight_map.items() if file == name}
        if difference := sorted(found.keys() ^ expected):
            where = "only in the index" if difference[0] in expected else "not in the index"
            raise UserError(f"{shard}: tensor {difference[0]} is {where}: fetch the shard and {index_path.name} again")
        tensors.update(found)
    return tensors


def read_tensor_file(path: Path) -> dict[str, Tensor]:
    """The tensors in one file: `.safetensors`, or else what `torch.save` wrote of a state dict."""
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except safetensors.SafetensorError as error:
            raise UserError(f"{path} is not a complete safetensors file ({error}): fetch it again") from error
    return state_dict_of(read_torch_file(path), path)


def state_dict_of(value: Any, path: Path) -> dict[str, Tensor]:
    """`value` as a dictionary of tensors. Raises UserError, naming the first entry that is none."""
    if not isinstance(value, dict) or not value:
        raise UserError(f"{path} holds no state dict (a {type(value).__name__}): give a file with a model's weights")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UserError(
                f"{path}: entry {name!r} is a {type(tensor).__name__}, not a tensor: give a file with a model's weights"
            )
    return dict(value)


def read_torch_file(path: Path, inert: Sequence[str] = ()) -> Any:
    """The value that `torch.save` wrote to `path`, with tensors on the CPU. Executes nothing (`weights_only`).

    inert: full names of classes and functions whose objects are replaced by `InertObject`. Any other class than
    those of tensors and plain containers raises UserError, which names it.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: check the path")
    try:
        with torch.serialization.safe_globals([(InertObject, name) for name in inert]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on unusual pickles, which are read or refused
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        if isinstance(error, pickle.UnpicklingError) and (forbidden := re.search(r"GLOBAL (\S+)", str(error))):
            raise forbidden_class(path, forbidden[1]) from error
        raise UserError(f"{path} is not a complete PyTorch file: check that it is one, or fetch it again") from error
    return value


def forbidden_class(path: Path, name: str) -> UserError:
    return UserError(
        f"{path}: its pickle names {name}, and only tensors and plain containers are read: nothing was executed; save "
        f"the file again with the weights alone, if you trust it"
    )
