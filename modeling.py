"""BERT (Devlin et al., 2018) on token streams: the encoder, and heads for pre-training, spans and classification.

Parameters carry Hugging Face's names and shapes. Every model takes either of two inputs:

    padded    model(input_ids, attention_mask, token_type_ids), each [B, S]; the mask is 1 on real tokens
    stream    model(stream), a packing.TokenStream: whole sequences end to end without padding

Padded input is converted to a stream first. All token-wise layers run on real tokens only; only attention uses the
sequence boundaries (attention.py). Models also report the FLOPs and memory of a step (`training_flops`,
`activation_memory`).

Legend: T tokens in the stream, N sequences, M masked tokens, R tokens whose output is used, B batch, S padded length,
H heads, D head size, E hidden size, C labels, V vocabulary (padded to a multiple of 64 in memory).

The encoder and all heads are in one file, as in Hugging Face's and Google's code.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import IMPLEMENTATIONS, PreparedAttention, default_implementation, prepare_attention
from bert_config import BertConfig
from cpu.dropout import Dropout
from cpu.packed_linear import PackedLinear
from data_loading.packing import PassSizes, TokenStream, to_padded

# Values of `hidden_act` in a config.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class LayerMemory(NamedTuple):
    """Bytes of one layer in a training step (see packing.PassSizes): activations saved for backward (`kept`, including
    its input; `input` alone; `linear_outputs`), peak activation gradients (`backward`), and 16-bit or fused copies of
    weights, during the layer's own pass (`weight_copies`) or the whole forward pass (`cached_copies`)."""

    kept: int
    input: int
    linear_outputs: int
    backward: int
    weight_copies: int
    cached_copies: int


class ActivationMemory(NamedTuple):
    """Bytes of the activations of a training step; `head` excludes the logits of masked tokens."""

    embeddings: int
    embeddings_backward: int
    layers: list[LayerMemory]
    head: int


# --- the encoder ------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """nn.Linear that skips its own initialization; `init_weights` initializes the whole model once."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """nn.Embedding that skips its own initialization, like Linear."""

    def reset_parameters(self) -> None:
        pass


class VocabularyEmbedding(Embedding):
    """Word embeddings, padded to a multiple of 64 rows in memory. The padding rows are zero, get no gradient, and are
    not part of the state dict."""

    def __init__(self, config: BertConfig):
        super().__init__(config.padded_vocab_size, config.hidden_size)
        self.vocab_size = config.vocab_size
        self.register_state_dict_post_hook(VocabularyEmbedding.strip_vocab_padding)
        self.register_load_state_dict_pre_hook(VocabularyEmbedding.pad_vocab)

    @staticmethod
    def strip_vocab_padding(module, state_dict, prefix, local_metadata) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"][: module.vocab_size]

    @staticmethod
    def pad_vocab(module, state_dict, prefix, *_) -> None:
        weight_VE = state_dict.get(prefix + "weight")
        if weight_VE is not None and len(weight_VE) == module.vocab_size:
            padding_rows = module.num_embeddings - module.vocab_size
            state_dict[prefix + "weight"] = F.pad(weight_VE, (0, 0, 0, padding_rows))


class BertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.word_embeddings = VocabularyEmbedding(config)
        self.position_embeddings = Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden_TE = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        hidden_TE = hidden_TE + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(hidden_TE))


class BertSelfAttention(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.dropout_prob = config.attention_probs_dropout_prob
        self.query = Linear(config.hidden_size, config.hidden_size)
        self.key = Linear(config.hidden_size, config.hidden_size)
        self.value = Linear(config.hidden_size, config.hidden_size)
        self.qkv: nn.Module | None = None  # fused, see `prepare_for_inference`

    def fuse_qkv(self) -> tuple[Tensor, Tensor]:
        """Fused weight [3E, E] and bias [3E] of query, key and value, so that one product reads and casts the hidden
        states once."""
        projections = (self.query, self.key, self.value)
        return torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections])

    def forward(self, hidden_TE: Tensor, attention: PreparedAttention) -> Tensor:
        qkv = self.qkv(hidden_TE) if self.qkv is not None else F.linear(hidden_TE, *self.fuse_qkv())
        qkv_T3HD = qkv.unflatten(-1, (3, self.num_attention_heads, -1))
        return attention(qkv_T3HD, self.dropout_prob if self.training else 0.0).flatten(1)


class BertResidualOutput(nn.Module):
    """Output of the attention and feed-forward blocks: dense, dropout, residual, LayerNorm. With pre-LN, LayerNorm is
    applied to the block's input instead (Xiong et al., 2020), by `normalize_input`."""

    def __init__(self, in_features: int, config: BertConfig):
        super().__init__()
        self.pre_layer_norm = config.pre_layer_norm
        self.dense = Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def normalize_input(self, hidden_TE: Tensor) -> Tensor:
        return self.LayerNorm(hidden_TE) if self.pre_layer_norm else hidden_TE

    def forward(self, inner: Tensor, residual_TE: Tensor) -> Tensor:
        output_TE = self.dropout(self.dense(inner), residual_TE)
        return output_TE if self.pre_layer_norm else self.LayerNorm(output_TE)


class BertAttention(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertResidualOutput(config.hidden_size, config)

    def forward(self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None) -> Tensor:
        context_TE = self.self(self.output.normalize_input(hidden_TE), attention)
        if output_R is not None:
            context_TE, hidden_TE = context_TE.index_select(0, output_R), hidden_TE.index_select(0, output_R)
        return self.output(context_TE, hidden_TE)


class BertIntermediate(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden_TE: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_TE))


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertResidualOutput(config.intermediate_size, config)

    def forward(self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None) -> Tensor:
        attended_TE = self.attention(hidden_TE, attention, output_R)
        return self.output(self.intermediate(self.output.normalize_input(attended_TE)), attended_TE)

    def forward_flops(self, lengths_N: np.ndarray) -> float:
        """FLOPs of the matrix products for sequences of these real lengths."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return float(lengths_N.sum() * (8 * hidden**2 + 4 * hidden * inner) + 4 * np.square(lengths_N).sum() * hidden)

    def memory(self, sizes: PassSizes, rows: int) -> LayerMemory:
        """rows: number of tokens that are computed after attention."""
        config, product, residual = self.config, sizes.product, sizes.residual
        hidden, inner, tokens = config.hidden_size, config.intermediate_size, sizes.tokens
        attention = IMPLEMENTATIONS[sizes.attention].memory(
            sizes, config.num_attention_heads, hidden, config.attention_probs_dropout_prob > 0, rows
        )
        # Inputs of LayerNorm with the dropout masks, and the inputs of linear layers and of the activation function.
        mask = sizes.mask if config.hidden_dropout_prob else 0
        after_attention = rows * (2 * hidden * (residual + mask) + (2 * hidden + 2 * inner) * product)
        # When the backward pass reaches attention, the activations of the rest of the layer are freed.
        feed_forward_backward = rows * (2 * hidden * residual + 2 * inner * product)
        attention_backward = tokens * hidden * (residual + 8 * product) + attention.backward - after_attention
        cached = (hidden**2 + 2 * hidden * inner) * product if sizes.autocast else 0  # query, key and value are fused
        return LayerMemory(
            kept=tokens * hidden * product + attention.kept + after_attention,
            input=tokens * hidden * residual,
            linear_outputs=(3 * tokens * hidden + rows * (2 * hidden + inner)) * product,
            backward=max(feed_forward_backward, attention_backward),
            weight_copies=3 * hidden**2 * product + cached,
            cached_copies=cached,
        )


class BertEncoder(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        if config.pre_layer_norm:
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self, hidden_TE: Tensor, attentions: Sequence[PreparedAttention], output_R: Tensor | None = None
    ) -> Tensor:
        """Returns the last hidden states [T, E], or [R, E] for the tokens `output_R` only: the last layer then skips
        the other tokens after its attention. `attentions`: one per layer."""
        for layer, attention in zip(self.layer[:-1], attentions[:-1], strict=True):
            hidden_TE = layer(hidden_TE, attention)
        hidden = self.layer[-1](hidden_TE, attentions[-1], output_R)
        return self.LayerNorm(hidden) if hasattr(self, "LayerNorm") else hidden


class BertPooler(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, first_NE: Tensor) -> Tensor:
        return torch.tanh(self.dense(first_NE))


# --- the models -------------------------------------------------------------------------------------------------------


class EncoderOutput(NamedTuple):
    last_hidden_state: (
        Tensor  # [T, E] of a stream, [B, S, E] of padded input, zero on padding; or [M, E] at `output_positions`
    )
    pooler_output: Tensor | None  # [N, E] or [B, E]; None without a pooler


class PreTrainingOutput(NamedTuple):
    prediction_logits: Tensor  # [M, V] at `mlm_positions`; without them [T, V], or [B, S, V] of padded input
    seq_relationship_logits: Tensor  # [N, 2] or [B, 2]


class SpanOutput(NamedTuple):
    start_logits: Tensor  # [T], or [B, S] of padded input
    end_logits: Tensor

    @property
    def logits(self) -> Tensor:
        """Start and end logits, [T, 2] or [B, S, 2]."""
        return torch.stack(self, dim=-1)


class ClassificationOutput(NamedTuple):
    logits: Tensor  # [N, C], or [B, C] of padded input; of tokens [T, C] or [B, S, C]


class BertPreTrainedModel(nn.Module):
    """Base class: initial weights, inference mode, costs, and loading from Hugging Face model folders."""

    base_model_prefix = "bert"

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.architecture = type(self).__name__  # sharding changes the class

    @property
    def base_model(self) -> "BertModel":
        """The encoder of a model with a head."""
        return getattr(self, self.base_model_prefix, self)

    @property
    def layers(self) -> nn.ModuleList:
        return self.base_model.encoder.layer

    @property
    def word_embeddings(self) -> Embedding:
        return self.base_model.embeddings.word_embeddings

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

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        """Forward FLOPs of the matrix products after the last layer."""
        raise NotImplementedError

    def activation_memory(self, sizes: PassSizes) -> ActivationMemory:
        hidden, tokens, residual = self.config.hidden_size, sizes.tokens, sizes.residual
        # With masked tokens, the last layer computes only these and the pooled tokens after its attention.
        rows = sizes.targets + sizes.sequences if sizes.targets else tokens
        # On a CPU, a dropout mask has as many bytes per element as the states.
        mask = (residual if sizes.mask > 1 else 1) if self.config.hidden_dropout_prob else 0
        *first, last = self.layers
        return ActivationMemory(
            embeddings=tokens * hidden * (residual + mask),
            embeddings_backward=3 * tokens * hidden * residual,
            layers=[*(layer.memory(sizes, tokens) for layer in first), last.memory(sizes, rows)],
            head=rows * hidden * (3 * sizes.product + 2 * residual),
        )

    def initial_values(self, parts: str | tuple[str, ...] = "") -> Iterator[tuple[str, Tensor]]:
        """Yields names and initial values, from torch's random state, of all parameters whose names start with one of
        `parts`. Values are always drawn on the CPU, as whole tensors even if the parameters are sharded."""
        for name, module in self.named_modules():
            if not f"{name}.".startswith(parts):
                continue
            for key, p in module.named_parameters(prefix=name, recurse=False):
                value = torch.empty(p.shape, dtype=torch.float32, device="meta" if p.is_meta else "cpu")
                if key.endswith("bias"):
                    value.zero_()
                elif isinstance(module, nn.LayerNorm):
                    value.fill_(1.0)
                else:
                    value.normal_(std=self.config.initializer_range)
                if isinstance(module, VocabularyEmbedding):
                    value[module.vocab_size :] = 0
                yield key, value

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


class BertModel(BertPreTrainedModel):
    """The encoder with its pooler. `attention_implementation` is a key of attention.IMPLEMENTATIONS, or `auto`: the
    fastest one for the device.

    With `output_positions` [M], indices into the stream (or the flattened padded input), the last hidden states are
    [M, E], for these tokens only, and the last layer's feed-forward block runs only on them and the pooled tokens."""

    optional_heads = ("pooler.",)

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.attention_implementation = "auto"
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.init_weights()

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
        hidden_TE = self.embeddings(stream.input_ids, stream.token_type_ids, stream.position_ids)
        attentions = self.prepare_attentions(stream, hidden_TE)
        # An empty filler sequence may start at T. Its pooled state is not used.
        first_N = stream.cu_seqlens[:-1].clamp(max=stream.num_tokens - 1)
        if output_positions is None:
            last_TE = self.encoder(hidden_TE, attentions)
            return EncoderOutput(last_TE, self.pooler(last_TE[first_N]) if self.pooler is not None else None)
        last_RE = self.encoder(hidden_TE, attentions, torch.cat([first_N, output_positions]))
        first_NE, last_ME = last_RE.tensor_split([len(first_N)])
        return EncoderOutput(last_ME, self.pooler(first_NE) if self.pooler is not None else None)

    def _forward_padded(self, input_ids, attention_mask, token_type_ids, output_positions) -> EncoderOutput:
        stream, flat_T = TokenStream.from_padded(input_ids, attention_mask, token_type_ids)
        if output_positions is not None:
            return self(stream, output_positions=torch.searchsorted(flat_T, output_positions))
        encoded = self(stream)
        return EncoderOutput(to_padded(encoded.last_hidden_state, flat_T, *input_ids.shape), encoded.pooler_output)

    def prepare_attentions(self, stream: TokenStream, hidden_TE: Tensor) -> list[PreparedAttention]:
        """Prepares the attention of each layer. BERT's layers share one."""
        implementation = self._attention_implementation(hidden_TE)
        shared = prepare_attention(implementation, stream.cu_seqlens, stream.max_seqlen, stream.num_tokens)
        return [shared] * len(self.encoder.layer)

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        return 0.0 if self.pooler is None else num_sequences * 2 * self.config.hidden_size**2

    def _attention_implementation(self, hidden_TE: Tensor) -> str:
        if self.attention_implementation != "auto":
            return self.attention_implementation
        device = hidden_TE.device
        autocast = torch.is_autocast_enabled(device.type) if device.type == "cuda" else False
        return default_implementation(device, torch.get_autocast_dtype("cuda") if autocast else hidden_TE.dtype)


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
        # Logits of the vocabulary's padding rows are -inf, so their probability and gradient are exactly zero.
        bias_V = F.pad(self.bias, (0, len(embedding_VE) - len(self.bias)), value=-math.inf)
        return F.linear(self.transform(hidden_ME), embedding_VE, bias_V)


class BertPreTrainingHeads(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = Linear(config.hidden_size, 2)


class BertForPreTraining(BertPreTrainedModel):
    """BERT with the masked-language-model and next-sentence heads. With `mlm_positions` [M], indices into the stream
    (or the flattened padded input), the vocabulary is predicted for those tokens only."""

    optional_heads = ("cls.", "bert.pooler.")

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self.init_weights("cls.")

    def forward(
        self,
        input_ids: Tensor | TokenStream,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        mlm_positions: Tensor | None = None,
    ) -> PreTrainingOutput:
        hidden, pooled_NE = self.bert(input_ids, attention_mask, token_type_ids, output_positions=mlm_positions)
        logits = self.cls.predictions(hidden, self.bert.embeddings.word_embeddings.weight)
        if mlm_positions is None:  # drop the vocabulary padding
            logits = logits[..., : self.config.vocab_size]
        return PreTrainingOutput(logits, self.cls.seq_relationship(pooled_NE))

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        hidden = self.config.hidden_size
        masked_tokens = num_targets * (2 * hidden**2 + 2 * hidden * self.config.padded_vocab_size)
        return masked_tokens + num_sequences * (2 * hidden**2 + 4 * hidden)


class BertForQuestionAnswering(BertPreTrainedModel):
    """BERT with a span head: a start and an end logit per token."""

    optional_heads = ("qa_outputs.",)

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.qa_outputs = Linear(config.hidden_size, 2)
        self.init_weights("qa_outputs.")

    def forward(
        self,
        input_ids: Tensor | TokenStream,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> SpanOutput:
        hidden = self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state
        return SpanOutput(*self.qa_outputs(hidden).unbind(dim=-1))

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        return num_tokens * 4 * self.config.hidden_size


class BertForSequenceClassification(BertPreTrainedModel):
    """BERT with a classifier on the pooled first token: a logit per label, or the predicted value if there is one label
    (regression)."""

    optional_heads = ("classifier.", "bert.pooler.")

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.bert = BertModel(config)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = Linear(config.hidden_size, config.num_labels)
        self.init_weights("classifier.")

    def forward(
        self,
        input_ids: Tensor | TokenStream,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ClassificationOutput:
        token_ids = input_ids.input_ids if isinstance(input_ids, TokenStream) else input_ids
        nothing = token_ids.new_empty(0)  # so the last layer computes only the pooled tokens
        encoded = self.bert(input_ids, attention_mask, token_type_ids, output_positions=nothing)
        return ClassificationOutput(self.classifier(self.dropout(encoded.pooler_output)))

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        hidden = self.config.hidden_size
        return num_sequences * (2 * hidden**2 + 2 * hidden * self.config.num_labels)


class BertForTokenClassification(BertPreTrainedModel):
    """BERT with a classifier on each token: a logit per label of the config."""

    optional_heads = ("classifier.",)

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = Linear(config.hidden_size, config.num_labels)
        self.init_weights("classifier.")

    def forward(
        self,
        input_ids: Tensor | TokenStream,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ClassificationOutput:
        hidden = self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state
        return ClassificationOutput(self.classifier(self.dropout(hidden)))

    def head_flops(self, num_tokens: float, num_sequences: int, num_targets: float) -> float:
        return num_tokens * 2 * self.config.hidden_size * self.config.num_labels


class BertForSentenceEmbedding(BertPreTrainedModel):
    """The mean of the last hidden states of each sequence of a stream, as the `logits` [N, E] of the output."""

    optional_heads = ()

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, stream: TokenStream) -> ClassificationOutput:
        lengths_N = stream.cu_seqlens.diff()
        real = int(stream.cu_seqlens[-1])
        sequence_T = torch.arange(len(lengths_N), device=lengths_N.device).repeat_interleave(lengths_N)
        hidden_TE = self.bert(stream).last_hidden_state[:real].float()
        sums_NE = hidden_TE.new_zeros(len(lengths_N), hidden_TE.shape[1]).index_add_(0, sequence_T, hidden_TE)
        return ClassificationOutput(sums_NE / lengths_N.clamp(min=1)[:, None])

    @property
    def num_outputs(self) -> int:
        return self.config.hidden_size
