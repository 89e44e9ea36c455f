"""Opens the weights of Hugging Face model folders: safetensors, whole or sharded."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from bert_recipe.checkpoint.folder import INDEX_SUFFIX, MODEL_FILE, PICKLED_FILE
from bert_recipe.checkpoint.rows import LazyTensor, open_safetensors
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import read_json

WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")

Tensors = TypeVar("Tensors")


def open_model_weights(folder: Path) -> dict[str, LazyTensor]:
    """The weights in `model.safetensors`, or in its shards, by name; read by rows, on demand.

    Raises UserError if there are none, a shard is missing, or they are in `pytorch_model.bin` only,
    which is a pickle.
    """
    paths = weight_paths(folder, MODEL_FILE)
    if not paths and weight_paths(folder, PICKLED_FILE):
        raise UserError(
            f"{folder} has its weights in {PICKLED_FILE} only, a pickle, which is not read here: "
            f"run python3 convert_checkpoint.py safetensors {shlex.quote(str(folder))} NEW_FOLDER "
            f"and give that one, or fetch its {MODEL_FILE}"
        )
    if not paths:
        expected = f"{MODEL_FILE} or {MODEL_FILE}{INDEX_SUFFIX}"
        raise UserError(f"model folder {folder} holds no weights: expected {expected}")
    tensors: dict[str, LazyTensor] = {}
    for path in paths:
        tensors |= open_safetensors(path)
    return without_wrappers(tensors)


def without_wrappers(tensors: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """`tensors` by the names of the model itself, also if it was saved inside of
    DistributedDataParallel (`module.`) or torch.compile (`_orig_mod.`).
    """
    return {WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}


def weight_paths(folder: Path, name: str) -> list[Path]:
    """The file of weights, or its shards by its index; empty if there is neither."""
    if (folder / name).is_file():
        return [folder / name]
    index = folder / (name + INDEX_SUFFIX)
    if not index.is_file():
        return []
    shards = read_json(index, "index of weight files", {"weight_map": dict[str, str]})
    return [folder / shard for shard in sorted(set(shards["weight_map"].values()))]
