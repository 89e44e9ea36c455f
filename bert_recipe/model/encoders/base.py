"""The base classes of all models: initial weights, inference mode; and of encoders: pooling,
attention.

The input of every model is a token_stream.TokenStream: whole sequences end to end without padding.
Padded input is converted (`accepts_padded`). Token-wise layers run on all tokens; only attention
uses the sequence boundaries (model/attention.py).

Legend: T tokens in the stream, N sequences, M masked tokens, R tokens whose output is used, E
hidden size.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from bert_recipe.model.attention import (
    PreparedAttention,
    StreamLayout,
    default_implementation,
    for_first_tokens,
    prepare_attention,
)
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.encoders.modules import Transform, VocabularyEmbedding
from bert_recipe.model.kernels.linear import PackedLinear
from bert_recipe.model.token_stream import TokenStream

FIRST_TOKEN = ("cls", "first")  # poolings


class EncoderOutput(NamedTuple):
    last_hidden_state: Tensor  # [T, E], or [M, E] at `output_positions`
    pooler_output: Tensor | None  # [N, E]; None without pooling
    hidden_states: tuple[Tensor, ...] | None = None  # [T, E] each, with `output_hidden_states`


def model_folders() -> ModuleType:
    """The module that reads and writes model folders. It is imported when it is used, because the
    model knows no files.
    """
    return import_module("bert_recipe.checkpoint.pretrained")


def accepts_padded(forward: Callable[..., NamedTuple]) -> Callable[..., NamedTuple]:
    """Makes `forward`, which takes a TokenStream, also take padded input as transformers does:
    input_ids, attention_mask (1 on real tokens, by default everywhere), token_type_ids (0), each
    [B, S], as labels of tokens. Outputs of tokens are then [B, S, ...], zero on padding, and logits
    of the vocabulary have no columns for its padding. Positions are indices into the flattened
    input; outputs at positions stay as they are.
    """

    @functools.wraps(forward)
    def forward_padded(
        self: "PreTrainedModel",
        input_ids: TokenStream | Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> NamedTuple:
        if isinstance(input_ids, TokenStream):
            return forward(self, input_ids, **kwargs)
        stream, places_T = TokenStream.from_padded(input_ids, attention_mask, token_type_ids)
        # Positions in the flattened input become positions in the stream.
        positions: dict[str, Tensor] = {}
        for name in ("output_positions", "mlm_positions"):
            if kwargs.get(name) is not None:
                positions[name] = torch.searchsorted(places_T, kwargs[name])
        at_positions = bool(positions)
        labels = kwargs.get("labels")
        of_tokens = self.base_model.pooling is None and not at_positions
        if labels is not None and of_tokens:
            positions["labels"] = labels.flatten()[places_T]
        output = forward(self, stream, **kwargs | positions)

        def to_padded(name: str, values: Any) -> Any:
            if isinstance(values, tuple):
                return tuple(to_padded(name, value) for value in values)
            if values is None or at_positions or values.dim() == 0 or len(values) != len(places_T):
                return values
            zeros = values.new_zeros(input_ids.numel(), *values.shape[1:])
            padded = zeros.index_copy(0, places_T, values).unflatten(0, input_ids.shape)
            return padded[..., : self.config.vocab_size] if name == "prediction_logits" else padded

        return type(output)(*map(to_padded, output._fields, output))

    return forward_padded


class PreTrainedModel(nn.Module, ABC):
    """Base class: initial weights and inference mode.

    base_model_prefix: name of the encoder in models with a head.
    head_names: prefixes of the tensors of all heads that model folders of this architecture have; a
        folder may lack them and the pooler.
    tied_copies: names of tensors in model folders that are copies of others.
    training_only: prefixes of parameters that model folders lack, since only training needs them,
        such as a generator that is trained with the model.
    span_classifier_name: name of the span head in model folders.
    task_head: prefix of the head that fine-tuning adds, or none; `prepare_for_inference` leaves it
        as it is.
    """

    base_model_prefix: str
    head_names: tuple[str, ...]
    config_class: type[ModelConfig]
    tied_copies: tuple[str, ...] = ()
    training_only: tuple[str, ...] = ()
    span_classifier_name = "classifier"
    task_head: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig):
        super().__init__()
        if not isinstance(config, ModelConfig):
            config_class = type(self).config_class.__name__
            raise TypeError(
                f"{type(self).__name__} takes bert_recipe's {config_class}, not {type(config)}: of "
                f"transformers' config make {config_class}.from_dict(config.to_dict())"
            )
        self.config = config
        self.architecture = type(self).__name__  # sharding changes the class
        self.is_compiled = False  # or a part of it
        self.is_prepared = False  # for inference: the weights are packed, rounded or joined
        # Of the output layer, as a graph of its own; None: loss.linear_cross_entropy.
        self.cross_entropy: Callable[..., tuple[Tensor, Tensor]] | None = None

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Self:
        """The model in `folder`, see load_pretrained of checkpoint/pretrained.py."""
        return model_folders().load_pretrained(cls, folder, **options)

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None) -> None:
        """Writes a model folder, see save_pretrained of checkpoint/pretrained.py."""
        model_folders().save_pretrained(self, folder, tokenizer)

    @property
    def base_model(self) -> "EncoderModel":
        """The encoder of a model with a head; an encoder is its own."""
        return getattr(self, self.base_model_prefix)

    @property
    def optional_heads(self) -> tuple[str, ...]:
        """Prefixes of the tensors that a model folder may lack."""
        return (*self.head_names, "pooler.", f"{self.base_model_prefix}.pooler.")

    @property
    def folder_tensors(self) -> frozenset[str]:
        """The names of the parameters that a model folder has."""
        names = (name for name, _ in self.named_parameters())
        return frozenset(name for name in names if not name.startswith(self.training_only))

    @property
    def span_dropout(self) -> float:
        """The dropout before the span head."""
        return 0.0

    @property
    def token_dropout(self) -> float:
        """The dropout before the classifier of tokens."""
        return self.config.head_dropout

    @property
    def layers(self) -> nn.ModuleList:
        return self.base_model.layers

    @property
    def encoders(self) -> list["EncoderModel"]:
        """All encoders in the model: `base_model`, and those of a model with several."""
        return [module for module in self.modules() if isinstance(module, EncoderModel)]

    @property
    def all_layers(self) -> list[nn.Module]:
        """The layers of all encoders."""
        return [layer for encoder in self.encoders for layer in encoder.layers]

    @property
    def hidden_modules(self) -> list[nn.Module]:
        """The layers and the heads' transforms, whose matrices Muon orthogonalizes."""
        return [
            *self.all_layers,
            *(module for module in self.modules() if isinstance(module, Transform)),
        ]

    @property
    def word_embeddings(self) -> VocabularyEmbedding:
        return next(module for module in self.modules() if isinstance(module, VocabularyEmbedding))

    @property
    def num_outputs(self) -> int:
        """Number of columns of the output's `logits`."""
        return self.config.num_labels

    @abstractmethod
    def add_encoder(self, pooling: str | None) -> None:
        """Adds the encoder of a model with a head under its name, `base_model_prefix`."""

    def make_transform(self) -> nn.Module:
        """What a head has before its classifier."""
        return nn.Identity()

    def initial_values(self, parts: str | tuple[str, ...] = "") -> Iterator[tuple[str, Tensor]]:
        """Yields names and initial values, from torch's random state, of parameters whose names
        start with one of `parts`, but not on the meta device. They are drawn on the CPU, as whole
        tensors even for sharded parameters.
        """
        for name, module in self.named_modules():
            if not f"{name}.".startswith(parts):
                continue
            for key, p in module.named_parameters(prefix=name, recurse=False):
                if p.is_meta:
                    continue
                value = torch.empty(p.shape, dtype=torch.float32, device="cpu")
                if key.endswith("bias"):
                    value.zero_()
                elif p.dim() < 2:  # of any normalization
                    value.fill_(1.0)
                else:
                    self.draw_matrix(name, value)
                if isinstance(module, VocabularyEmbedding):
                    value[module.vocab_size :] = 0
                yield key, value

    def draw_matrix(self, name: str, value: Tensor) -> None:
        """Draws the initial weight of the linear layer or embedding `name`."""
        value.normal_(std=self.config.initializer_range)

    @torch.no_grad()
    def init_weights(self, parts: str | tuple[str, ...] = "") -> None:
        """Initializes all parameters whose names start with one of `parts`."""
        parameters = dict(self.named_parameters())
        for name, value in self.initial_values(parts):
            parameters[name].copy_(value)

    @torch.no_grad()
    def prepare_for_inference(self, dtype: torch.dtype) -> None:
        """Casts Linear weights to `dtype` and packs them (see PackedLinear) once, instead of in
        every forward pass. The logits are the same. Inference only: the model can neither be
        trained nor saved afterwards.
        """
        self.is_prepared = True
        for name, module in list(self.named_modules()):
            if isinstance(module, nn.Linear) and not f"{name}.".startswith(self.task_head):
                module.to(dtype)
                if PackedLinear.supports(module.weight):
                    self.set_submodule(name, PackedLinear(module))


class EncoderModel(PreTrainedModel):
    """The base class of encoders. `attention_implementation` is a key of attention.IMPLEMENTATIONS,
    or `auto`: the fastest one for the device.

    pooling: `cls` for the pooled state of each sequence's first token, `first` for its last hidden
    state, `mean` for the mean over the tokens, or None. With `output_positions` [M], indices into
    the stream, the last hidden states are [M, E], for these tokens only, and the last layer's
    feed-forward block runs only on them and pooled first tokens. Without any, only first tokens are
    queries of its attention, on a CPU.
    """

    costs: ClassVar[ModuleType]  # formulas of layers, see model/costs/memory.py
    embeddings: nn.Module

    def __init__(self, config: ModelConfig, pooling: str | None):
        super().__init__(config)
        self.pooling = pooling
        self.pooler: nn.Module | None = None
        self.attention_implementation = "auto"

    @property
    def base_model(self) -> "EncoderModel":
        return self

    @property
    @abstractmethod
    def layers(self) -> nn.ModuleList: ...

    @property
    def embedding_modules(self) -> list[nn.Module]:
        """What `embed` computes with."""
        return [self.embeddings]

    def embed(self, stream: TokenStream) -> Tensor:
        """The input of the first layer, [T, E]."""
        return self.embeddings(stream)

    def normalize_output(self, hidden: Tensor) -> Tensor:
        """The last hidden states, from the output of the last layer."""
        return hidden

    def encode(
        self,
        hidden_TE: Tensor,
        attentions: list[PreparedAttention],
        output_R: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """The last hidden states [T, E], or [R, E] for the tokens `output_R` only: the last layer
        then skips the other tokens after its attention.

        attentions: one per layer.
        states: a list to which the inputs of all layers are added.
        """
        for layer, attention in zip(self.layers[:-1], attentions[:-1], strict=True):
            if states is not None:
                states.append(hidden_TE)
            hidden_TE = layer(hidden_TE, attention)
        if states is not None:
            states.append(hidden_TE)
        return self.normalize_output(self.layers[-1](hidden_TE, attentions[-1], output_R))

    @abstractmethod
    def prepare_attentions(self, stream: TokenStream, hidden_TE: Tensor) -> list[PreparedAttention]:
        """Prepares the attention of each layer."""

    @accepts_padded
    def forward(
        self,
        stream: TokenStream,
        *,
        output_positions: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> EncoderOutput:
        """With `output_hidden_states`, also what each layer takes, and the last hidden states, as
        in transformers; for all tokens.
        """
        if output_hidden_states:
            if output_positions is not None:
                raise ValueError("output_hidden_states is for all tokens: give no positions")
            states: list[Tensor] = []
            output = self.encoded(stream, None, states)
            return output._replace(hidden_states=(*states, output.last_hidden_state))
        return self.encoded(stream, output_positions)

    def encoded(
        self,
        stream: TokenStream,
        output_positions: Tensor | None,
        states: list[Tensor] | None = None,
    ) -> EncoderOutput:
        """See `forward`; states: see `encode`."""
        hidden_TE = self.embed(stream)
        attentions = self.prepare_attentions(stream, hidden_TE)
        output_R = output_positions
        # An empty filler sequence may start at T. Its pooled state is not used.
        first_N = stream.cu_seqlens[:-1].clamp(max=stream.num_tokens - 1)
        if self.pooling in FIRST_TOKEN and output_positions is not None:
            output_R = torch.cat([first_N, output_positions])
            if len(output_positions) == 0:
                attentions[-1] = for_first_tokens(attentions[-1])
        last = self.encode(hidden_TE, attentions, output_R, states)
        if self.pooling is None:
            return EncoderOutput(last, None)
        if self.pooling == "mean":
            return EncoderOutput(last, sequence_means(last, stream.cu_seqlens))
        if output_R is None:
            first_NE = last[first_N]
        else:  # the states of the first tokens come before the others
            first_NE, last = last.tensor_split([len(first_N)])
        pooled_NE = first_NE if self.pooler is None else self.pooler(first_NE)
        return EncoderOutput(last, pooled_NE)

    def pooled(self, stream: TokenStream) -> Tensor:
        """The pooled states [N, E], without the other hidden states."""
        # A mean needs all tokens.
        no_positions = stream.input_ids.new_empty(0) if self.pooling in FIRST_TOKEN else None
        return self(stream, output_positions=no_positions).pooler_output

    def prepare_attention(
        self, stream: TokenStream, hidden_TE: Tensor, window: int | None = None
    ) -> PreparedAttention:
        implementation = self.attention_implementation
        kind = hidden_TE.device.type
        autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # meta has none
        dtype = torch.get_autocast_dtype(kind) if autocast else hidden_TE.dtype
        if implementation == "auto":
            implementation = default_implementation(hidden_TE.device, dtype)
        layout = StreamLayout(
            stream.cu_seqlens,
            stream.max_seqlen,
            stream.num_tokens,
            window,
            stream.has_filler,
            dtype,
        )
        has_dropout = self.training and self.config.attention_dropout > 0
        return prepare_attention(implementation, layout, has_dropout)


def sequence_means(hidden_TE: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The mean of the hidden states of each sequence, [N, E]."""
    tokens_T = torch.arange(len(hidden_TE), device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence_T = torch.searchsorted(cu_seqlens[1:], tokens_T, right=True)  # N for filler
    hidden_TE = hidden_TE.float()
    zeros = hidden_TE.new_zeros(len(cu_seqlens), hidden_TE.shape[1])
    sums_NE = zeros.index_add(0, sequence_T, hidden_TE)[:-1]  # without that of filler
    return sums_NE / cu_seqlens.diff().clamp(min=1)[:, None]
