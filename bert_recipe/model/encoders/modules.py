"""What the encoders share: linear layers, embeddings with a padded vocabulary, activation
functions.

Legend: T tokens in the stream, E hidden size, V vocabulary (padded to a multiple of 64 in memory).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.kernels.linear import linear

# Values of `hidden_act` and `hidden_activation` in a config.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "linear": nn.Identity(),  # of a classifier's dense layer
}


class Linear(nn.Linear):
    """nn.Linear by `kernels.linear` that skips its own initialization; `init_weights` initializes
    the whole model once.

    stacked: number of matrices that the rows of the weight are, such as query, key and value.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, stacked: int = 1):
        super().__init__(in_features, out_features, bias)
        self.stacked = stacked

    def reset_parameters(self) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002: nn.Linear's name
        return linear(input, self.weight, self.bias)

    def products(self, hidden_TE: Tensor) -> list[Tensor]:
        """The outputs of the stacked matrices. On a CPU each is a product of its own, and so
        contiguous: GELU takes half as long as on a part of a tensor.
        """
        if not hidden_TE.is_cpu or torch.compiler.is_compiling():
            return list(self(hidden_TE).chunk(self.stacked, dim=-1))
        if torch.is_autocast_enabled("cpu"):  # which would cast it for each product
            hidden_TE = hidden_TE.to(torch.get_autocast_dtype("cpu"))
        weights = self.weight.chunk(self.stacked)
        if self.bias is None:
            return [linear(hidden_TE, weight) for weight in weights]
        biases = self.bias.chunk(self.stacked)
        return [
            linear(hidden_TE, weight, bias) for weight, bias in zip(weights, biases, strict=True)
        ]


class Embedding(nn.Embedding):
    """nn.Embedding that skips its own initialization, like Linear."""

    def reset_parameters(self) -> None:
        pass


class VocabularyEmbedding(Embedding):
    """Word embeddings, padded in memory to a multiple of 64 rows: zeros without gradient that are
    in no state dict.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config.padded_vocab_size, config.hidden_size)
        self.vocab_size = config.vocab_size
        self.register_state_dict_post_hook(VocabularyEmbedding.strip_vocab_padding)
        self.register_load_state_dict_pre_hook(VocabularyEmbedding.pad_vocab)

    @staticmethod
    def strip_vocab_padding(
        module: "VocabularyEmbedding", state_dict: dict[str, Tensor], prefix: str, _metadata: object
    ) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"][: module.vocab_size]

    @staticmethod
    def pad_vocab(
        module: "VocabularyEmbedding", state_dict: dict[str, Tensor], prefix: str, *_: object
    ) -> None:
        weight_VE = state_dict.get(prefix + "weight")
        if weight_VE is not None and len(weight_VE) == module.vocab_size:
            padding_rows = module.num_embeddings - module.vocab_size
            state_dict[prefix + "weight"] = F.pad(weight_VE, (0, 0, 0, padding_rows))


class OutputBias(nn.Module):
    """The bias of an output layer whose matrix is tied to the word embeddings, or none."""

    def __init__(self, size: int | None):
        super().__init__()
        self.bias = None if size is None else nn.Parameter(torch.empty(size))


class Transform(nn.Module):
    """Dense layer, activation, and a norm that has the name `norm_name` in model folders; before a
    head's output. output_size: by default the hidden size.
    """

    def __init__(
        self,
        hidden_size: int,
        activation: str,
        norm_name: str,
        norm: nn.Module,
        bias: bool = True,
        output_size: int | None = None,
    ):
        super().__init__()
        self.dense = Linear(hidden_size, output_size or hidden_size, bias)
        self.activation = ACTIVATIONS[activation]
        self.norm_name = norm_name
        self.add_module(norm_name, norm)

    def forward(self, hidden: Tensor) -> Tensor:
        return getattr(self, self.norm_name)(self.activation(self.dense(hidden)))
