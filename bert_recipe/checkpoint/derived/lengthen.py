"""BERT or RoBERTa with positions for longer sequences."""

import dataclasses

import torch
from torch import Tensor

from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.typed_json import JsonObject

POSITIONS = "position_embeddings.weight"


def lengthen(folder: ModelFolder, max_length: int) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The config and the weights with positions for `max_length` tokens: the learned ones, repeated
    from the beginning (Beltagy et al., 2020, "Longformer", section 5).
    """
    config, tensors = folder.config, folder.tensors
    names = [name for name in tensors if name.endswith(POSITIONS)]
    if not names:
        raise UserError(
            f"a {config.model_type} model has no learned positions: train it with a config of "
            f"larger max_position_embeddings"
        )
    # RoBERTa has rows that stand for no position.
    before = config.max_position_embeddings - config.max_length
    try:
        changed: JsonObject = {"max_position_embeddings": before + max_length}
        longer = dataclasses.replace(config, **changed)
    except ValueError as error:
        raise UserError(f"--max-length {max_length}: {error}") from error
    result = {
        name: tensor.read() for name, tensor in tensors.items() if tensor.dtype.is_floating_point
    }
    rows = torch.arange(max_length) % config.max_length + before
    for name in names:
        result[name] = torch.cat([result[name][:before], result[name][rows]])
    return longer, result
