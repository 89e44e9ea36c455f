"""Opens the weights of Hugging Face model folders: safetensors and PyTorch files, whole or sharded.
Pickled code is never executed.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.folder import INDEX_SUFFIX, WEIGHT_FILES
from checkpoint.rows import LazyTensor, open_safetensors
from utils.errors import UserError
from utils.files import read_json


def open_model_weights(folder: Path) -> dict[str, LazyTensor]:
    """The weights in a Hugging Face model folder, by name.

    Uses the first of these that exists: `model.safetensors`, its shards with
    `model.safetensors.index.json`, `pytorch_model.bin`, its shards with
    `pytorch_model.bin.index.json`. Tensors in safetensors files are read by rows, on demand.
    Pickled code is never executed. Raises UserError if there are no weights or a shard is missing.
    """
    for name in WEIGHT_FILES:
        names = {name}
        index = folder / (name + INDEX_SUFFIX)
        if not (folder / name).is_file():
            if not index.is_file():
                continue
            kind = {"weight_map": dict[str, str]}
            names = {*read_json(index, "index of weight files", kind)["weight_map"].values()}
        tensors: dict[str, LazyTensor] = {}
        for path in (folder / name for name in sorted(names)):
            if path.suffix == ".safetensors":
                tensors |= open_safetensors(path)
            else:
                found = state_dict_of(read_torch_file(path), path)
                tensors |= {key: LazyTensor.of(tensor) for key, tensor in found.items()}
        return tensors
    expected = ", ".join(f"{name} or {name}{INDEX_SUFFIX}" for name in WEIGHT_FILES)
    raise UserError(f"model folder {folder} holds no weights: expected {expected}")


def state_dict_of(value: Any, path: Path) -> dict[str, Tensor]:
    """`value` as a dictionary of tensors. Raises UserError, naming the first entry that is not a
    tensor.
    """
    if not isinstance(value, dict) or not value:
        raise UserError(
            f"{path} holds no state dict (a {type(value).__name__}): give a file with a model's "
            f"weights"
        )
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            what = type(tensor).__name__
            raise UserError(
                f"{path}: entry {name!r} is a {what}, not a tensor: give a file of weights only"
            )
        if kind := unusual_kind(tensor):
            raise UserError(
                f"{path}: {name} is a {kind} tensor: save the file again with dense weights"
            )
    return dict(value)


def unusual_kind(tensor: Tensor) -> str | None:
    """How `tensor` differs from a dense array of real numbers in memory; None for one."""
    kinds = {
        "meta": tensor.is_meta,
        "nested": tensor.is_nested,
        "sparse": tensor.layout != torch.strided,
        "quantized": tensor.is_quantized,
        "complex": tensor.is_complex(),
    }
    return next((kind for kind, holds in kinds.items() if holds), None)


def read_torch_file(path: Path, replacements: Sequence[tuple[type, str]] = ()) -> Any:
    """Loads a file written by `torch.save`, on the CPU, with `weights_only`.

    replacements: (class, full name) pairs: the class to use for the class or function of that name.
    Raises UserError for all other classes except tensors and plain containers.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: check the path")
    try:
        with torch.serialization.safe_globals(list(replacements)), warnings.catch_warnings():
            # About unusual pickles, which are read or refused anyway.
            warnings.simplefilter("ignore")
            # torch compares no checksums.
            if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip() is not None:
                raise ValueError("a checksum differs")
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        if isinstance(error, pickle.UnpicklingError) and (
            forbidden := re.search(r"GLOBAL (\S+)", str(error))
        ):
            raise forbidden_class(path, forbidden[1]) from error
        raise UserError(
            f"{path} is not a complete PyTorch file: check that it is one, or fetch it again"
        ) from error
    return value


def forbidden_class(path: Path, name: str) -> UserError:
    return UserError(
        f"{path}: its pickle names {name}, and only tensors and plain containers are read: nothing "
        f"was executed; save "
        f"the file again with the weights alone, if you trust it"
    )
