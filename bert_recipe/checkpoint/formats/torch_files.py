"""Reads files that `torch.save` wrote, which are pickles: tensors and plain containers only.
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

from bert_recipe.checkpoint.folder import PICKLED_FILE
from bert_recipe.checkpoint.weight_files import weight_paths, without_wrappers
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import refuse_pointer


def read_pickled_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in `pytorch_model.bin` of a Hugging Face model folder, or in its shards, by name;
    without its buffers of integers. Raises UserError if there are none.
    """
    paths = weight_paths(folder, PICKLED_FILE)
    if not paths:
        raise UserError(f"{folder} has no {PICKLED_FILE}: there is nothing to convert")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= state_dict_of(read_torch_file(path), path)
    tensors = without_wrappers(tensors)
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


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
    return dict(value)


def read_torch_file(path: Path, replacements: Sequence[tuple[type, str]] = ()) -> Any:
    """Loads a file written by `torch.save`, on the CPU, with `weights_only`.

    replacements: (class, full name) pairs: the class to use for the class or function of that name.
    Raises UserError for all other classes except tensors and plain containers.
    """
    refuse_pointer(path)
    try:
        with torch.serialization.safe_globals(list(replacements)), warnings.catch_warnings():
            # About unusual pickles, which are read or refused anyway.
            warnings.simplefilter("ignore")
            # torch compares no checksums.
            if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip() is not None:
                raise ValueError("a checksum differs")
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        forbidden = re.search(r"GLOBAL (\S+)", str(error))
        if forbidden and isinstance(error, pickle.UnpicklingError):
            raise forbidden_class(path, forbidden[1]) from error
        raise UserError(
            f"{path} is not a complete PyTorch file: check that it is one, or fetch it again"
        ) from error
    return value


def forbidden_class(path: Path, name: str) -> UserError:
    return UserError(
        f"{path}: its pickle names {name}, and only tensors and plain containers are read: nothing "
        "was executed; save the file again with the weights alone, if you trust it"
    )
