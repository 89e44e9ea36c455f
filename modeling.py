"""BERT (Devlin et al., 2018) and ModernBERT (Warner et al., 2024) on token streams, with heads for pre-training, spans,
classification and embeddings. The encoders' layers are in encoders/.

Parameters carry Hugging Face's names and shapes. Every model takes either of two inputs:

    padded    model(input_ids, attention_mask, token_type_ids), each [B, S]; the mask is 1 on real tokens
    stream    model(stream), a packing.TokenStream: whole sequences end to end without padding

Padded input is converted to a stream first. All token-wise layers run on real tokens only; only attention uses the
sequence boundaries (attention.py). Models also report the FLOPs and memory of a step (`training_flops`,
`activation_memory`).

`make_model` makes the model with a given head for a config. To add an encoder, write it in encoders/, its models here,
and add them to `MODELS`.

Legend: T tokens in the stream, N sequences, M masked tokens, R tokens whose output is used, B batch, S padded length,
E hidden size, C labels, V vocabulary (padded to a multiple of 64 in memory).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import PreparedAttention, RotaryAttention, default_implementation, prepare_attention, rotary_table
from bert_config import BertConfig, ModelConfig, ModernBertConfig
from cpu.dropout import Dropout
from cpu.packed_linear import PackedLinear
from data_loading.packing import PassSizes, TokenStream, to_padded
from encoders.bert import BertEmbeddings, BertEncoder, BertPooler, BertSelfAttention
from encoders.modernbert import ModernBertEmbeddings, ModernBertLayer, make_norm
from encoders.modules import ACTIVATIONS, LayerMemory, Linear, VocabularyEmbedding
from loss import PreTrainingSums, pretraining_sums


class ActivationMemory(NamedTuple):
    """Bytes of the activations of a training step; `head` excludes the logits of masked tokens."""

    embeddings: int
    embeddings_backward: int
    layers: list[LayerMemory]
    head: int


class EncoderOutput(NamedTuple):
    last_hidden_state: (
        Tensor  # [T, E] of a stream, [B, S, E] of padded input, zero on padding; or [M, E] at `output_positions`
    )
    pooler_output: Tensor | None  # [N, E] or [B, E]; None without a pooler


class PreTrainingOutput(NamedTuple):
    prediction_logits: Tensor  # [M, V] at `mlm_positions`; without them [T, V], or [B, S, V] of padded input
    seq_relationship_logits: Tensor | None = None  # [N, 2] or [B, 2]; None without the next-sentence head


class SpanOutput(NamedTuple):
    start_logits: Tensor  # [T], or [B, S] of padded input
    end_logits: Tensor

    @property
    def logits(self) -> Tensor:
        """Start and end logits, [T, 2] or [B, S, 2]."""
        return torch.stack(self, dim=-1)


class ClassificationOutput(NamedTuple):
    logits: Tensor  # [N, C], or [B, C] of padded input; of tokens [T, C] or [B, S, C]


class PreTrainedModel(nn.Module, ABC):
    """Base class: initial weights, inference mode, costs, and loading from Hugging Face model folders.

    base_model_prefix: name of the encoder in models with a head. optional_heads: prefixes of tensors that a model
    folder may lack."""

    base_model_prefix: str
    optional_heads: tuple[str, ...]

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.architecture = type(self).__name__  # sharding changes the class
        self.is_compiled = False  # or a part of it

    @property
    def base_model(self) -> "EncoderModel":
        """The encoder of a model with a head."""
        return getattr(self, self.base_model_prefix, self)

    @property
    def layers(self) -> nn.ModuleList:
        return self.base_model.layers

    @property
    def word_embeddings(self) -> VocabularyEmbedding:
        return next(module for module in self.modules() if isinstance(module, VocabularyEmbedding))

    def training_flops(self, lengths_N, num_targets: float) -> float:
        """Model FLOPs of a forward and backward pass over sequences of real `lengths_N` with `num_targets` masked
        tokens: matrix products only, a multiply-add counts as two (Narayanan et al., 2021, appendix)."""
        lengths_N = np.asarray(lengths_N, dtype=np.float64)
        layers = sum(layer.forward_flops(lengths_N) for layer in self.layers)
        return 3 * (layers + self.head_flops(float(lengths_N.sum()), len(lengths_N), num_targets))

    @property
    def num_outputs(self) -> int:
        """Number of columns of the output's `logits`."""
        return self.config.num_labels

    @abstractmethod
    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        """Forward FLOPs of the matrix products after the last layer."""

    def activation_memory(self, sizes: PassSizes) -> ActivationMemory:
        hidden, tokens, residual = self.config.hidden_size, sizes.tokens, sizes.residual
        # With masked tokens, the last layer computes only these and the pooled tokens after its attention.
        pooled = sizes.sequences if self.base_model.pooling == "cls" else 0
        rows = sizes.targets + pooled if sizes.targets else tokens
        # On a CPU, a dropout mask has as many bytes per element as the states.
        mask = (residual if sizes.mask > 1 else 1) if self.config.embedding_dropout else 0
        *first, last = self.layers
        return ActivationMemory(
            embeddings=tokens * hidden * (residual + mask),
            embeddings_backward=3 * tokens * hidden * residual,
            layers=[*(layer.memory(sizes, tokens) for layer in first), last.memory(sizes, rows)],
            head=rows * hidden * (3 * sizes.product + 2 * residual),
        )

    def initial_values(self, parts: str | tuple[str, ...] = "") -> Iterator[tuple[str, Tensor]]:
        """Yields names and initial values, from torch's random state, of all parameters whose names start with one of
        `parts`, but not of those on the meta device. Values are always drawn on the CPU, as whole tensors even if the
        parameters are sharded."""
        for name, module in self.named_modules():
            if not f"{name}.".startswith(parts):
                continue
            for key, p in module.named_parameters(prefix=name, recurse=False):
                if p.is_meta:
                    continue
                value = torch.empty(p.shape, dtype=torch.float32, device="cpu")
                if key.endswith("bias"):
                    value.zero_()
                elif isinstance(module, nn.LayerNorm):
                    value.fill_(1.0)
                else:
                    self.draw_matrix(name, value)
                if isinstance(module, VocabularyEmbedding):
                    value[module.vocab_size :] = 0
                yield key, value

    @abstractmethod
    def draw_matrix(self, name: str, value: Tensor) -> None:
        """Draws the initial weight of the linear layer or embedding `name`."""

    @torch.no_grad()
    def init_weights(self, parts: str | tuple[str, ...] = "") -> None:
        """Initializes all parameters whose names start with one of `parts`."""
        parameters = dict(self.named_parameters())
        for name, value in self.initial_values(parts):
            parameters[name].copy_(value)

    @torch.no_grad()
    def prepare_for_inference(self, dtype: torch.dtype) -> None:
        """Casts Linear weights to `dtype`, fuses QKV and packs weights (see PackedLinear) once, instead of in every
        forward pass. The logits are the same. Inference only: do not train or save the model afterwards."""
        for module in self.modules():
            if isinstance(module, BertSelfAttention):
                weight, bias = module.fuse_qkv()
                module.qkv = Linear(*weight.T.shape)
                module.qkv.weight, module.qkv.bias = nn.Parameter(weight), nn.Parameter(bias)
                module.query = module.key = module.value = None
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    child.to(dtype)
                    setattr(module, name, PackedLinear(child) if PackedLinear.supports(child.weight) else child)

    @classmethod
    def from_pretrained(cls, folder, **kwargs):
        """Loads the model in `folder`: a checkpoint of this project or a Hugging Face model folder.

        Heads missing from the folder keep their initial weights; a message names them. Raises UserError for any other
        missing, unexpected or misshapen tensor."""
        from checkpoint.weights import load_pretrained  # imported here: nothing else in the model needs files

        return load_pretrained(cls, folder, **kwargs)


class EncoderModel(PreTrainedModel):
    """The base class of encoders. `attention_implementation` is a key of attention.IMPLEMENTATIONS, or `auto`: the
    fastest one for the device.

    pooling: `cls` for the pooled state of the first token of each sequence, `mean` for the mean over its tokens, or
    None. With `output_positions` [M], indices into the stream (or the flattened padded input), the last hidden states
    are [M, E], for these tokens only, and the last layer's feed-forward block runs only on them and the first tokens
    that are pooled."""

    embeddings: nn.Module

    def __init__(self, config: ModelConfig, pooling: str | None):
        super().__init__(config)
        self.pooling = pooling
        self.pooler: nn.Module | None = None
        self.attention_implementation = "auto"

    @abstractmethod
    def encode(self, hidden_TE: Tensor, attentions: list[PreparedAttention], output_R: Tensor | None = None) -> Tensor:
        """The last hidden states [T, E], or [R, E] for the tokens `output_R` only. `attentions`: one per layer."""

    @abstractmethod
    def prepare_attentions(self, stream: TokenStream, hidden_TE: Tensor) -> list[PreparedAttention]:
        """Prepares the attention of each layer."""

    def forward(
        self,
        input_ids: Tensor | TokenStream,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        output_positions: Tensor | None = None,
    ) -> EncoderOutput:
        if not isinstance(input_ids, TokenStream):
            return self._forward_padded(input_ids, attention_mask, token_type_ids, output_positions)
        stream = input_ids
        hidden_TE = self.embeddings(stream)
        attentions = self.prepare_attentions(stream, hidden_TE)
        if self.pooling == "mean":
            last_TE = self.encode(hidden_TE, attentions)
            return EncoderOutput(last_TE, sequence_means(last_TE, stream.cu_seqlens))
        if self.pooling is None:
            return EncoderOutput(self.encode(hidden_TE, attentions, output_positions), None)
        # An empty filler sequence may start at T. Its pooled state is not used.
        first_N = stream.cu_seqlens[:-1].clamp(max=stream.num_tokens - 1)
        if output_positions is None:
            last_TE = self.encode(hidden_TE, attentions)
            return EncoderOutput(last_TE, self._pool(last_TE[first_N]))
        last_RE = self.encode(hidden_TE, attentions, torch.cat([first_N, output_positions]))
        first_NE, last_ME = last_RE.tensor_split([len(first_N)])
        return EncoderOutput(last_ME, self._pool(first_NE))

    def _forward_padded(self, input_ids, attention_mask, token_type_ids, output_positions) -> EncoderOutput:
        stream, flat_T = TokenStream.from_padded(input_ids, attention_mask, token_type_ids)
        if output_positions is not None:
            return self(stream, output_positions=torch.searchsorted(flat_T, output_positions))
        encoded = self(stream)
        return EncoderOutput(to_padded(encoded.last_hidden_state, flat_T, *input_ids.shape), encoded.pooler_output)

    def pooled(self, input_ids: Tensor | TokenStream, *padded: Tensor | None) -> Tensor:
        """The pooled states [N, E], without the other hidden states."""
        token_ids = input_ids.input_ids if isinstance(input_ids, TokenStream) else input_ids
        nothing = token_ids.new_empty(0) if self.pooling == "cls" else None
        return self(input_ids, *padded, output_positions=nothing).pooler_output

    def _pool(self, first_NE: Tensor) -> Tensor:
        return first_NE if self.pooler is None else self.pooler(first_NE)

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        return 0.0 if self.pooler is None else num_sequences * 2 * self.config.hidden_size**2

    def prepare_attention(self, stream: TokenStream, hidden_TE: Tensor, window: int | None = None) -> PreparedAttention:
        implementation = self.attention_implementation
        if implementation == "auto":
            device = hidden_TE.device
            autocast = torch.is_autocast_enabled(device.type) if device.type == "cuda" else False
            dtype = torch.get_autocast_dtype("cuda") if autocast else hidden_TE.dtype
            implementation = default_implementation(device, dtype)
        return prepare_attention(implementation, stream.cu_seqlens, stream.max_seqlen, stream.num_tokens, window)


def sequence_means(hidden_TE: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The mean of the hidden states of each sequence, [N, E]."""
    tokens_T = torch.arange(len(hidden_TE), device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence_T = torch.searchsorted(cu_seqlens[1:], tokens_T, right=True)  # N for filler
    sums = hidden_TE.new_zeros(len(cu_seqlens), hidden_TE.shape[1], dtype=torch.float32)
    sums_NE = sums.index_add(0, sequence_T, hidden_TE.float())[:-1]
    return sums_NE / cu_seqlens.diff().clamp(min=1)[:, None]


def vocabulary_logits(hidden_ME: Tensor, embedding_VE: Tensor, bias: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [M, V] of an output matrix that is tied to the word embeddings. Those of the vocabulary's padding rows are
    -inf, so their probability and gradient are exactly zero."""
    bias = embedding_VE.new_zeros(vocab_size) if bias is None else bias
    bias_V = F.pad(bias, (0, len(embedding_VE) - len(bias)), value=-math.inf)
    return F.linear(hidden_ME, embedding_VE, bias_V)


# --- the heads --------------------------------------------------------------------------------------------------------


class MaskedLanguageModel(PreTrainedModel):
    """An encoder with the masked-language-model head. With `mlm_positions` [M], indices into the stream (or the
    flattened padded input), the vocabulary is predicted for those tokens only. With `labels` (mlm_labels [M],
    nsp_labels [N]), it returns the sums of the loss, so that a compiled model computes the loss too."""

    @abstractmethod
    def predictions(self, hidden_ME: Tensor) -> Tensor:
        """Logits of the vocabulary with its padding."""

    def forward(
        self,
        input_ids: Tensor | TokenStream,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        mlm_positions: Tensor | None = None,
        labels: tuple[Tensor, Tensor] | None = None,
    ) -> PreTrainingOutput | PreTrainingSums:
        hidden, pooled_NE = self.base_model(input_ids, attention_mask, token_type_ids, output_positions=mlm_positions)
        logits = self.predictions(hidden)
        if mlm_positions is None:  # drop the vocabulary padding
            logits = logits[..., : self.config.vocab_size]
        output = PreTrainingOutput(logits, None if pooled_NE is None else self.cls.seq_relationship(pooled_NE))
        return output if labels is None else pretraining_sums(*output, *labels)

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        hidden = self.config.hidden_size
        return num_targets * (2 * hidden**2 + 2 * hidden * self.config.padded_vocab_size)


class ClassificationModel(PreTrainedModel):
    """An encoder with a linear layer on its output; ModernBERT transforms the output first (`head`)."""

    classifier_name = "classifier"

    def add_classifier(self, num_outputs: int, dropout: float) -> None:
        self.head = self.make_transform()
        self.dropout = Dropout(dropout)
        setattr(self, self.classifier_name, Linear(self.config.hidden_size, num_outputs))
        self.init_weights(self.optional_heads)

    def classify(self, hidden: Tensor) -> Tensor:
        return getattr(self, self.classifier_name)(self.dropout(self.head(hidden)))

    def classifier_flops(self, rows: float, num_outputs: int) -> float:
        hidden = self.config.hidden_size
        transform = 0 if isinstance(self.head, nn.Identity) else 2 * hidden**2
        return rows * (transform + 2 * hidden * num_outputs)


class QuestionAnswering(ClassificationModel):
    """An encoder with a span head: a start and an end logit per token."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.add_encoder(None)
        self.add_classifier(2, self.span_dropout)

    def forward(
        self,
        input_ids: Tensor | TokenStream,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> SpanOutput:
        hidden = self.base_model(input_ids, attention_mask, token_type_ids).last_hidden_state
        return SpanOutput(*self.classify(hidden).unbind(dim=-1))

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        return self.classifier_flops(num_tokens, 2)


class SequenceClassification(ClassificationModel):
    """An encoder with a classifier on the pooled state: a logit per label, or the predicted value if there is one label
    (regression)."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.add_encoder(config.classifier_pooling)
        self.add_classifier(config.num_labels, config.classifier_dropout)

    def forward(
        self,
        input_ids: Tensor | TokenStream,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ClassificationOutput:
        return ClassificationOutput(self.classify(self.base_model.pooled(input_ids, attention_mask, token_type_ids)))

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        pooler = self.base_model.head_flops(num_tokens, num_sequences, num_targets)
        return pooler + self.classifier_flops(num_sequences, self.config.num_labels)


class TokenClassification(ClassificationModel):
    """An encoder with a classifier on each token: a logit per label of the config."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.add_encoder(None)
        self.add_classifier(config.num_labels, config.classifier_dropout)

    def forward(
        self,
        input_ids: Tensor | TokenStream,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ClassificationOutput:
        hidden = self.base_model(input_ids, attention_mask, token_type_ids).last_hidden_state
        return ClassificationOutput(self.classify(hidden))

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        return self.classifier_flops(num_tokens, self.config.num_labels)


class SentenceEmbedding(PreTrainedModel):
    """The mean of the last hidden states of each sequence, as the `logits` [N, E] of the output."""

    optional_heads = ()

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.add_encoder("mean")

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        return 0.0  # the mean has no matrix products

    def forward(
        self,
        input_ids: Tensor | TokenStream,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ClassificationOutput:
        return ClassificationOutput(self.base_model.pooled(input_ids, attention_mask, token_type_ids))

    @property
    def num_outputs(self) -> int:
        return self.config.hidden_size


# --- BERT -------------------------------------------------------------------------------------------------------------


class BertPreTrainedModel(PreTrainedModel):
    base_model_prefix = "bert"
    config_class = BertConfig
    span_dropout = 0.0

    def add_encoder(self, pooling: str | None) -> None:
        self.bert = BertModel(self.config, pooling)

    def make_transform(self) -> nn.Module:
        return nn.Identity()

    def draw_matrix(self, name: str, value: Tensor) -> None:
        value.normal_(std=self.config.initializer_range)


class BertModel(BertPreTrainedModel, EncoderModel):
    """The encoder with its pooler."""

    optional_heads = ("pooler.",)

    def __init__(self, config: BertConfig, pooling: str | None = "cls"):
        super().__init__(config, pooling)
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if pooling == "cls" else None
        self.init_weights()

    @property
    def layers(self) -> nn.ModuleList:
        return self.encoder.layer

    def encode(self, hidden_TE: Tensor, attentions: list[PreparedAttention], output_R: Tensor | None = None) -> Tensor:
        return self.encoder(hidden_TE, attentions, output_R)

    def prepare_attentions(self, stream: TokenStream, hidden_TE: Tensor) -> list[PreparedAttention]:
        return [self.prepare_attention(stream, hidden_TE)] * len(self.layers)


class BertPredictionHeadTransform(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_ME: Tensor) -> Tensor:
        return self.LayerNorm(self.activation(self.dense(hidden_ME)))


class BertLMPredictionHead(nn.Module):
    """The masked-token head. The output matrix is tied to the word embeddings."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, hidden_ME: Tensor, embedding_VE: Tensor) -> Tensor:
        return vocabulary_logits(self.transform(hidden_ME), embedding_VE, self.bias, len(self.bias))


class BertPreTrainingHeads(nn.Module):
    def __init__(self, config: BertConfig, next_sentence: bool):
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        if next_sentence:
            self.seq_relationship = Linear(config.hidden_size, 2)


class BertForMaskedLM(BertPreTrainedModel, MaskedLanguageModel):
    """BERT with the masked-language-model head only."""

    optional_heads = ("cls.",)
    next_sentence = False

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.add_encoder("cls" if self.next_sentence else None)
        self.cls = BertPreTrainingHeads(config, self.next_sentence)
        self.init_weights("cls.")

    def predictions(self, hidden_ME: Tensor) -> Tensor:
        return self.cls.predictions(hidden_ME, self.word_embeddings.weight)


class BertForPreTraining(BertForMaskedLM):
    """BERT with the masked-language-model and next-sentence heads."""

    optional_heads = ("cls.", "bert.pooler.")
    next_sentence = True

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        hidden = self.config.hidden_size
        masked_tokens = super().head_flops(num_tokens, num_sequences, num_targets)
        return masked_tokens + num_sequences * (2 * hidden**2 + 4 * hidden)


class BertForQuestionAnswering(BertPreTrainedModel, QuestionAnswering):
    optional_heads = ("qa_outputs.",)
    classifier_name = "qa_outputs"


class BertForSequenceClassification(BertPreTrainedModel, SequenceClassification):
    optional_heads = ("classifier.", "bert.pooler.")


class BertForTokenClassification(BertPreTrainedModel, TokenClassification):
    optional_heads = ("classifier.",)


class BertForSentenceEmbedding(BertPreTrainedModel, SentenceEmbedding):
    pass


# --- ModernBERT -------------------------------------------------------------------------------------------------------


class ModernBertPreTrainedModel(PreTrainedModel):
    base_model_prefix = "model"
    config_class = ModernBertConfig
    optional_heads = ("head.", "classifier.")

    @property
    def span_dropout(self) -> float:
        return self.config.classifier_dropout

    def add_encoder(self, pooling: str | None) -> None:
        self.model = ModernBertModel(self.config, pooling)

    def make_transform(self) -> nn.Module:
        return ModernBertPredictionHead(self.config)

    def draw_matrix(self, name: str, value: Tensor) -> None:
        """A normal distribution, truncated at `initializer_cutoff_factor` standard deviations."""
        config = self.config
        std = config.initializer_range
        if name.endswith(("Wo", "head.dense")):
            std /= math.sqrt(2 * config.num_hidden_layers)
        elif name == "classifier":
            std = config.hidden_size**-0.5
        limit = config.initializer_cutoff_factor * std
        nn.init.trunc_normal_(value, std=std, a=-limit, b=limit)


class ModernBertModel(ModernBertPreTrainedModel, EncoderModel):
    """The encoder. Local layers attend to a window; local and global layers have rotary positions of different
    frequencies."""

    optional_heads = ()

    def __init__(self, config: ModernBertConfig, pooling: str | None = None):
        super().__init__(config, pooling)
        self.embeddings = ModernBertEmbeddings(config)
        self.layers = nn.ModuleList(ModernBertLayer(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = make_norm(config)
        self.init_weights()

    @property
    def layers(self) -> nn.ModuleList:
        return self._modules["layers"]

    def encode(self, hidden_TE: Tensor, attentions: list[PreparedAttention], output_R: Tensor | None = None) -> Tensor:
        for layer, attention in zip(self.layers[:-1], attentions[:-1], strict=True):
            hidden_TE = layer(hidden_TE, attention)
        return self.final_norm(self.layers[-1](hidden_TE, attentions[-1], output_R))

    def prepare_attentions(self, stream: TokenStream, hidden_TE: Tensor) -> list[PreparedAttention]:
        config = self.config
        prepared: dict[int | None, PreparedAttention] = {}  # by window
        for layer in self.layers:
            if layer.window not in prepared:
                theta = config.global_rope_theta if layer.window is None else config.local_rope_theta
                prepared[layer.window] = RotaryAttention(
                    self.prepare_attention(stream, hidden_TE, layer.window),
                    rotary_table(stream.position_ids, config.head_size, theta),
                )
        return [prepared[layer.window] for layer in self.layers]


class ModernBertPredictionHead(nn.Module):
    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.activation = ACTIVATIONS[config.classifier_activation]
        self.norm = make_norm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden)))


class ModernBertDecoder(nn.Module):
    """The bias of the output matrix, which is tied to the token embeddings."""

    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.vocab_size)) if config.decoder_bias else None


class ModernBertForMaskedLM(ModernBertPreTrainedModel, MaskedLanguageModel):
    """ModernBERT with the masked-language-model head."""

    optional_heads = ("head.", "decoder.")

    def __init__(self, config: ModernBertConfig):
        super().__init__(config)
        self.add_encoder(None)
        self.head = self.make_transform()
        self.decoder = ModernBertDecoder(config)
        self.init_weights(self.optional_heads)

    def predictions(self, hidden_ME: Tensor) -> Tensor:
        return vocabulary_logits(
            self.head(hidden_ME), self.word_embeddings.weight, self.decoder.bias, self.config.vocab_size
        )


class ModernBertForQuestionAnswering(ModernBertPreTrainedModel, QuestionAnswering):
    pass


class ModernBertForSequenceClassification(ModernBertPreTrainedModel, SequenceClassification):
    pass


class ModernBertForTokenClassification(ModernBertPreTrainedModel, TokenClassification):
    pass


class ModernBertForSentenceEmbedding(ModernBertPreTrainedModel, SentenceEmbedding):
    optional_heads = ()


# --- the registry -----------------------------------------------------------------------------------------------------

# The model with each head, by encoder. `pretraining` is for data with next-sentence labels, if the encoder learns them.
MODELS: dict[type[ModelConfig], dict[str, type[PreTrainedModel]]] = {
    BertConfig: {
        "pretraining": BertForPreTraining,
        "masked_lm": BertForMaskedLM,
        "question_answering": BertForQuestionAnswering,
        "sequence_classification": BertForSequenceClassification,
        "token_classification": BertForTokenClassification,
        "sentence_embedding": BertForSentenceEmbedding,
    },
    ModernBertConfig: {
        "pretraining": ModernBertForMaskedLM,
        "masked_lm": ModernBertForMaskedLM,
        "question_answering": ModernBertForQuestionAnswering,
        "sequence_classification": ModernBertForSequenceClassification,
        "token_classification": ModernBertForTokenClassification,
        "sentence_embedding": ModernBertForSentenceEmbedding,
    },
}


def make_model(head: str, config: ModelConfig) -> PreTrainedModel:
    """Makes the model with `head`, a key of `MODELS`, for the encoder of `config`."""
    return MODELS[type(config)][head](config)
