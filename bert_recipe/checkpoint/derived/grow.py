"""A larger model from the weights of a smaller one."""

import dataclasses
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.weights import select_weights
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.encoders.modules import Linear
from bert_recipe.model.encoders.registry import make_model
from bert_recipe.utils.errors import UserError

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def grow(folder: ModelFolder, large: ModelConfig) -> dict[str, Tensor]:
    """Weights of a model with config `large` from those in `folder`, as ModernBERT-large was made
    from base (Warner et al., 2024, appendix): layer i is layer round(i * small / large) (Rae et
    al., 2021, "Gopher"), and each dimension has the smaller one in its middle, which repeats to
    both sides (Javaheripi et al., 2023, "Phi").

    Query, key and value, and the halves of GeGLU, are repeated apart, and heads as wholes.
    Classifiers are left out. Raises UserError unless `large` differs in sizes only and no size is
    smaller.
    """
    small = folder.config
    check_sizes(small, large)
    with torch.device("meta"):
        model, target = make_model("pretraining", small), make_model("pretraining", large)
    given = select_weights(model, folder.tensors, folder.path)
    linear = {name: module for name, module in target.named_modules() if isinstance(module, Linear)}
    result = {}
    for name, p in target.named_parameters():
        source_name = source_in_layers(name, target, small.num_hidden_layers)
        shape = tuple(p.shape)
        if p is target.word_embeddings.weight:  # without the padding of the vocabulary
            shape = (large.vocab_size, *p.shape[1:])
        if source_name in given:
            module = linear.get(name.rpartition(".")[0])
            parts = given[source_name].read().float().chunk(module.stacked if module else 1)
            sizes = (shape[0] // len(parts), *shape[1:])
            result[name] = torch.cat(
                [tile(part, sizes, small.hidden_size, small.head_size) for part in parts]
            )
        elif name.startswith(layers_prefix(target)):
            result[name] = torch.ones(shape)  # the first layer's norm, which ModernBERT lacks
    return result


def check_sizes(small: ModelConfig, large: ModelConfig) -> None:
    """Raises UserError unless `large` differs in sizes only, and no size is smaller."""
    if type(small) is not type(large):
        raise UserError(
            f"the source is a {small.model_type} model, and --config-file has a "
            f"{large.model_type} model: give the config of a larger {small.model_type} model"
        )
    if not small.can_grow:
        raise UserError(f"grow does not know {small.model_type} models: use another architecture")
    for name in SIZES:
        then, now = getattr(small, name), getattr(large, name)
        if now < then:
            raise UserError(f"--config-file: {name} {now} is below the source's {then}")
    switches = [  # such as biases
        field.name for field in dataclasses.fields(small) if field.type is bool and field.compare
    ]
    others = (*small.meaning, *switches, "head_size", "vocab_size", "max_position_embeddings")
    for name in others:
        then, now = getattr(small, name), getattr(large, name)
        if name not in SIZES and now != then:
            raise UserError(
                f"--config-file: {name} is {now}, the source's {then}: grow changes sizes only"
            )


def layers_prefix(model: PreTrainedModel) -> str:
    """What the names of the parameters of the layers begin with."""
    [name] = [name for name, module in model.named_modules() if module is model.layers]
    return f"{name}."


def source_in_layers(name: str, target: PreTrainedModel, num_layers: int) -> str:
    """The name of the parameter of a model with `num_layers` layers that the parameter `name` of
    `target` is made from.
    """
    prefix = layers_prefix(target)
    match = re.fullmatch(rf"{re.escape(prefix)}(\d+)(\..*)", name)
    if match is None:
        return name
    nearest = round(int(match[1]) * num_layers / len(target.layers))
    return f"{prefix}{min(nearest, num_layers - 1)}{match[2]}"


def tile(tensor: Tensor, shape: Sequence[int], hidden_size: int, head_size: int) -> Tensor:
    """`tensor` in the middle of `shape`, repeated to both sides; along dimensions of `hidden_size`
    by whole heads.
    """
    for dim, (old, new) in enumerate(zip(tensor.shape, shape, strict=True)):
        unit = head_size if old == hidden_size else 1
        offset = (new - old) // unit // 2 * unit
        tensor = tensor.index_select(dim, (torch.arange(new) - offset) % old)
    return tensor
