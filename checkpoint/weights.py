"""Weights from model folders: Hugging Face's names, heads that a model adds or lacks, and strict checks of the rest."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from checkpoint.folder import CONFIG_FILE, VOCAB_FILE
from checkpoint.model_choice import read_config
from checkpoint.model_files import open_model_weights
from checkpoint.rows import LazyTensor
from utils.errors import UserError
from utils.files import read_json_object
from utils.progress import print_line

HEADS = ("cls.", "qa_outputs.", "classifier.")
UNUSED_HEADS = (*HEADS, "pooler.", "bert.pooler.")


def canonical_names(tensors: Mapping[str, LazyTensor], model: nn.Module) -> dict[str, LazyTensor]:
    """`tensors` under the names of `model`: old LayerNorm names (gamma, beta) are renamed, buffers and copies of tied
    weights are dropped, and the prefix `bert.` is added or removed."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if not name.endswith(("position_ids", "predictions.decoder.weight", "predictions.decoder.bias")):
            renamed[name] = tensor
    model_has_prefix = hasattr(model, "bert")
    tensors_have_prefix = any(name.startswith("bert.") for name in renamed)
    if model_has_prefix and not tensors_have_prefix:
        return {name if name.startswith(HEADS) else f"bert.{name}": tensor for name, tensor in renamed.items()}
    if not model_has_prefix and tensors_have_prefix:
        return {name.removeprefix("bert."): tensor for name, tensor in renamed.items()}
    return renamed


def check_same_kind(folder: Path, config: Mapping[str, Any], vocab_file: Path) -> None:
    """Raises UserError where weights of the right shapes would mean something else in this run: another number of
    heads, or another vocabulary of the same size."""
    if (folder / CONFIG_FILE).is_file():
        theirs = read_json_object(folder / CONFIG_FILE, "the config")
        theirs = {"pre_layer_norm": False, **theirs}
        for key in ("num_attention_heads", "hidden_act", "layer_norm_eps", "pre_layer_norm"):
            if theirs.get(key, config[key]) != config[key]:
                raise UserError(
                    f"{folder / CONFIG_FILE}: {key} is {theirs[key]}, and this run's config has {config[key]}: use "
                    f"the config that the weights were made with"
                )
    given = folder / VOCAB_FILE
    if given.is_file() and given.read_bytes().split() != vocab_file.read_bytes().split():
        raise UserError(
            f"{given} and {vocab_file} hold other words: use the vocabulary that the weights were made with"
        )


def checkpoint_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter in a checkpoint: that in memory, without the vocabulary's padding rows."""
    # DeepSpeed's ZeRO 3 keeps the shape of a parameter under another name.
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    name = next(name for name in shapes if name.endswith("word_embeddings.weight"))
    shapes[name] = (model.config.vocab_size, *shapes[name][1:])
    return shapes


@torch.no_grad()
def copy_rows(target: Tensor, start: int, source: LazyTensor) -> None:
    """Copies rows [start, start + len(target)) of `source` to `target`. Rows beyond the end of `source`, which are the
    vocabulary's padding, become zero. Rows are single elements where `target` is a part of a matrix as a vector."""
    if not target.dim():
        target.copy_(source.read())
        return
    width = math.prod(source.shape[1:]) // math.prod(target.shape[1:])  # rows of `target` per row of `source`
    stop = max(start, min(start + len(target), source.shape[0] * width))
    if stop > start:
        first, last = start // width, -(-stop // width)
        rows = source.read(first, last).reshape(-1, *target.shape[1:])
        target[: stop - start].copy_(rows[start - first * width : stop - first * width])
    target[stop - start :].zero_()


def select_weights(
    model: nn.Module,
    tensors: Mapping[str, LazyTensor],
    source: str | Path,
    log: Callable[[str], None] = print_line,
    required: tuple[str, ...] = (),
) -> dict[str, LazyTensor]:
    """The tensors for the parameters of `model`, by name. Heads of other tasks in `tensors` are skipped, and heads that
    `tensors` lacks are left out; notes name both. Raises UserError for any other missing, unexpected or misshapen
    tensor.

    required: prefixes of heads that must be there, to predict with."""
    given, wanted = canonical_names(tensors, model), checkpoint_shapes(model)
    if not required:
        given = without_other_classifier(given, wanted)
    misshapen = [
        f"{name} is {list(given[name].shape)}, the model's is {list(shape)}"
        for name, shape in wanted.items()
        if name in given and given[name].shape != shape
    ]
    if misshapen:
        raise UserError(
            f"{source}: {len(misshapen)} tensors have another shape ({'; '.join(misshapen[:3])}): use the config and "
            f"the vocabulary that it was made with"
        )
    wrong_types = [name for name in wanted if name in given and not given[name].dtype.is_floating_point]
    if wrong_types:
        raise UserError(
            f"{source}: {', '.join(wrong_types[:3])} are not floating-point numbers: fetch or write it again"
        )
    missing = sorted(wanted.keys() - given.keys())
    if required and (untrained := [name for name in missing if name.startswith(required)]):
        raise UserError(f"{source} has no {untrained[0]}: it was not fine-tuned for this task, so add --do-train")
    if lacking := [name for name in missing if not name.startswith(model.optional_heads)]:
        raise UserError(f"{source} lacks {len(lacking)} tensors of the model ({', '.join(lacking[:3])})")
    unexpected = sorted(given.keys() - wanted.keys())
    if strangers := [name for name in unexpected if not name.startswith(UNUSED_HEADS)]:
        raise UserError(f"{source} has {len(strangers)} tensors that the model lacks ({', '.join(strangers[:3])})")
    if missing:
        log(f"note: {source} has no {', '.join(missing)}: they start from their initial values")
    if unexpected:
        log(f"note: {source}: {', '.join(unexpected)} are not used by {model.architecture}")
    return {name: given[name] for name in wanted if name in given}


def without_other_classifier(
    given: dict[str, LazyTensor], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, LazyTensor]:
    """`given` without a classifier of another number of labels, which is that of another task."""
    name = "classifier.weight"
    if name not in given or name not in wanted or given[name].shape == wanted[name]:
        return given
    return {name: tensor for name, tensor in given.items() if not name.startswith("classifier.")}


def load_pretrained(model_class: type, folder: str | Path, **kwargs):
    """`model_class` with the config and the weights in `folder`; see BertPreTrainedModel.from_pretrained."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist: expected {CONFIG_FILE} and weights in it")
    config = read_config(folder / CONFIG_FILE)
    with torch.device("meta"):  # initializes nothing that would be overwritten
        model = model_class(config, **kwargs)
    weights = select_weights(model, open_model_weights(folder), folder)
    model.to_empty(device="cpu")
    model.init_weights(model.optional_heads)
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        copy_rows(parameters[name], 0, tensor)
    return model
