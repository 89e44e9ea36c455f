"""BERT (Devlin et al., 2018): absolute positions, post-LN (pre-LN by config), GELU. Config, layers
and heads.

Legend: T tokens in the stream, N sequences, M masked tokens, R tokens whose output is used, H
heads, D head size, E hidden size, V vocabulary (padded to a multiple of 64 in memory).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from bert_recipe.model.attention import PreparedAttention
from bert_recipe.model.costs import bert as bert_costs
from bert_recipe.model.encoders.base import EncoderModel, PreTrainedModel, accepts_padded
from bert_recipe.model.encoders.config import (
    FOREIGN_KEYS,
    HIDDEN_ACTS,
    ModelConfig,
    dropout,
    one_of,
)
from bert_recipe.model.encoders.heads import (
    MaskedLanguageModel,
    ModelsByHead,
    NextSentenceModel,
    QuestionAnswering,
    SentenceEmbedding,
    SequenceClassification,
    TokenClassification,
)
from bert_recipe.model.encoders.modules import (
    ACTIVATIONS,
    Embedding,
    Linear,
    Transform,
    VocabularyEmbedding,
)
from bert_recipe.model.kernels.dropout import Dropout
from bert_recipe.model.kernels.linear import linear
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.utils.json_files import JsonObject

PRE_LN_MODEL_TYPE = "bert_pre_layer_norm"


@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """BERT's architecture, with the keys of Google's and Hugging Face's `config.json`."""

    hidden_act: str = one_of(HIDDEN_ACTS, "gelu")
    hidden_dropout_prob: float = dropout(0.1)
    attention_probs_dropout_prob: float = dropout(0.1)
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    # Of classifiers' inputs; hidden_dropout_prob if None.
    classifier_dropout: float | None = dropout(None)
    # LayerNorm before attention and feed-forward, and after the last layer.
    pre_layer_norm: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("bert", PRE_LN_MODEL_TYPE)
    meaning: ClassVar[tuple[str, ...]] = (
        "num_attention_heads",
        "hidden_act",
        "layer_norm_eps",
        "pre_layer_norm",
    )
    options: ClassVar[tuple[str, ...]] = ("pre_layer_norm",)

    @classmethod
    def from_dict(cls, values: JsonObject) -> Self:
        """See ModelConfig. An unknown key is an error, too, unless `"model_type": "bert"` is set,
        as in Hugging Face's files, which contain many other keys.
        """
        model_type = PRE_LN_MODEL_TYPE if values.get("pre_layer_norm") else "bert"
        if values.get("model_type", model_type) != model_type:
            raise ValueError(
                f"model_type is {values['model_type']!r}; this model is BERT: {model_type!r}"
            )
        known = {field.name for field in dataclasses.fields(cls)} | FOREIGN_KEYS.keys()
        if "model_type" not in values and (unknown := sorted(values.keys() - known)):
            names = ", ".join(map(repr, unknown))
            raise ValueError(
                f"unknown key {names}: correct it, or add model_type, as Hugging Face's files have"
            )
        return super().from_dict(values)

    def to_dict(self) -> JsonObject:
        values = super().to_dict()
        if self.classifier_dropout is None:
            del values["classifier_dropout"]
        return values

    @property
    def model_type(self) -> str:
        """Another type for pre-LN, which transformers' BERT lacks: it would load such a model as
        post-LN.
        """
        return PRE_LN_MODEL_TYPE if self.pre_layer_norm else "bert"

    # The names that ModernBERT has for the same settings.
    classifier_pooling = "cls"

    @property
    def attention_dropout(self) -> float:
        return self.attention_probs_dropout_prob

    @property
    def embedding_dropout(self) -> float:
        return self.hidden_dropout_prob

    @property
    def head_dropout(self) -> float:
        if self.classifier_dropout is None:
            return self.hidden_dropout_prob
        return self.classifier_dropout

    @property
    def takes_token_types(self) -> bool:
        return self.type_vocab_size > 1

    def with_dropout(self, prob: float) -> Self:
        return dataclasses.replace(
            self,
            hidden_dropout_prob=prob,
            attention_probs_dropout_prob=prob,
            classifier_dropout=None,
        )


def make_norm(config: BertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class BertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.word_embeddings = VocabularyEmbedding(config)
        self.position_embeddings = Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = make_norm(config)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, stream: TokenStream) -> Tensor:
        types_T = stream.token_type_ids
        if self.token_type_embeddings.num_embeddings == 1:  # for both texts of a pair
            types_T = torch.zeros_like(types_T)
        hidden_TE = self.word_embeddings(stream.input_ids) + self.token_type_embeddings(types_T)
        hidden_TE = hidden_TE + self.position_embeddings(stream.position_ids)
        return self.dropout(self.LayerNorm(hidden_TE))


class BertSelfAttention(nn.Module):
    projection_names: tuple[str, ...] = ("query", "key", "value")  # in model folders

    def __init__(self, config: BertConfig):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.dropout_prob = config.attention_probs_dropout_prob
        for name in self.projection_names:
            setattr(self, name, Linear(config.hidden_size, config.hidden_size))
        self.qkv: nn.Module | None = None  # fused, see `fuse`

    def fuse(self) -> None:
        """Keeps the fused weights only, for inference."""
        weight, bias = self.fuse_qkv()
        self.qkv = Linear(*weight.T.shape)
        self.qkv.weight, self.qkv.bias = nn.Parameter(weight), nn.Parameter(bias)
        for name in self.projection_names:
            setattr(self, name, None)

    def fuse_qkv(self) -> tuple[Tensor, Tensor]:
        """Fused weight [3E, E] and bias [3E] of query, key and value: one product reads the hidden
        states once.
        """
        projections = [getattr(self, name) for name in self.projection_names]
        return torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections])

    def forward(self, hidden_TE: Tensor, attention: PreparedAttention) -> Tensor:
        qkv = self.qkv(hidden_TE) if self.qkv is not None else linear(hidden_TE, *self.fuse_qkv())
        qkv_T3HD = qkv.unflatten(-1, (3, self.num_attention_heads, -1))
        return attention(qkv_T3HD, self.dropout_prob if self.training else 0.0).flatten(1)


class BertResidualOutput(nn.Module):
    """Output of the attention and feed-forward blocks: dense, dropout, residual, LayerNorm. With
    pre-LN, LayerNorm is applied to the block's input instead (Xiong et al., 2020), by
    `normalize_input`.
    """

    def __init__(self, in_features: int, config: BertConfig):
        super().__init__()
        self.pre_layer_norm = config.pre_layer_norm
        self.dense = Linear(in_features, config.hidden_size)
        self.LayerNorm = make_norm(config)
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

    def forward(
        self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None
    ) -> Tensor:
        context_TE = self.self(self.output.normalize_input(hidden_TE), attention)
        if output_R is not None:
            context_TE = context_TE.index_select(0, output_R)
            hidden_TE = hidden_TE.index_select(0, output_R)
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

    def forward(
        self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None
    ) -> Tensor:
        attended_TE = self.attention(hidden_TE, attention, output_R)
        return self.output(self.intermediate(self.output.normalize_input(attended_TE)), attended_TE)


class BertPooler(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, first_NE: Tensor) -> Tensor:
        return torch.tanh(self.dense(first_NE))


class BertPreTrainedModel(PreTrainedModel):
    base_model_prefix = "bert"
    head_names: tuple[str, ...] = ("cls.", "qa_outputs.", "classifier.")
    tied_copies: tuple[str, ...] = (
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    )
    config_class: type[BertConfig] = BertConfig
    config: BertConfig
    span_classifier_name = "qa_outputs"

    def add_encoder(self, pooling: str | None) -> None:
        self.bert = BertModel(self.config, pooling)

    @torch.no_grad()
    def prepare_for_inference(self, dtype: torch.dtype) -> None:
        for module in self.modules():
            if isinstance(module, BertSelfAttention):
                module.fuse()
        super().prepare_for_inference(dtype)


class BertModel(BertPreTrainedModel, EncoderModel):
    """The encoder with its pooler. Takes a TokenStream of T tokens and N sequences; returns
    `last_hidden_state` [T, E] and `pooler_output` [N, E]. It also takes padded input [B, S], as
    transformers does; the hidden states are then [B, S, E].

        stream = TokenStream.from_sequences([[101, 7592, 102], [101, 2088, 999, 102]])
        states_TE = BertModel.from_pretrained(folder)(stream).last_hidden_state  # [7, E]

    pooling: see EncoderModel. Raises ValueError for padding on the left.
    """

    embeddings_class: Callable[[Any], BertEmbeddings] = BertEmbeddings
    pooler_class: type[BertPooler] | None = BertPooler
    layer_class: type[nn.Module] = BertLayer
    layers_name = "encoder"  # in model folders
    costs: ClassVar[ModuleType] = bert_costs

    def __init__(self, config: BertConfig, pooling: str | None = "cls"):
        super().__init__(config, pooling)
        self.embeddings = self.embeddings_class(config)
        layers = nn.ModuleList(self.layer_class(config) for _ in range(config.num_hidden_layers))
        stack = nn.ModuleDict({"layer": layers})
        if config.pre_layer_norm:
            stack["LayerNorm"] = make_norm(config)
        setattr(self, self.layers_name, stack)
        self.pooler = self.pooler_class(config) if pooling == "cls" and self.pooler_class else None
        self.init_weights()

    @property
    def layers(self) -> nn.ModuleList:
        return getattr(self, self.layers_name).layer

    def normalize_output(self, hidden: Tensor) -> Tensor:
        if not self.config.pre_layer_norm:
            return hidden
        return getattr(self, self.layers_name).LayerNorm(hidden)

    def prepare_attentions(self, stream: TokenStream, hidden_TE: Tensor) -> list[PreparedAttention]:
        return [self.prepare_attention(stream, hidden_TE)] * len(self.layers)


class BertPredictionHead(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        norm = make_norm(config)
        self.transform = Transform(config.hidden_size, config.hidden_act, "LayerNorm", norm)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))


class BertHeads(nn.Module):
    """next_sentence: whether there is a next-sentence head, too."""

    seq_relationship: Linear

    def __init__(self, config: BertConfig, next_sentence: bool):
        super().__init__()
        self.predictions = BertPredictionHead(config)
        if next_sentence:
            self.seq_relationship = Linear(config.hidden_size, 2)


class BertForMaskedLM(BertPreTrainedModel, MaskedLanguageModel):
    """BERT with the masked-language-model head only. Returns `prediction_logits` [T, V], or [M, V]
    at `mlm_positions` [M], indices into the stream; V is the vocabulary, padded to a multiple of 64
    by columns of -inf. The loss is the caller's, such as `linear_cross_entropy`.

        hidden_ME = model.bert(stream, output_positions=positions_M).last_hidden_state
        logits = model(stream, mlm_positions=positions_M).prediction_logits  # [M, V]
    """

    next_sentence = False  # whether it has the next-sentence head

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.add_encoder("cls" if self.next_sentence else None)
        self.cls = BertHeads(config, self.next_sentence)
        self.init_weights("cls.")

    def transform(self, hidden_ME: Tensor) -> Tensor:
        return self.cls.predictions.transform(hidden_ME)

    @property
    def output_bias(self) -> Tensor:
        return self.cls.predictions.bias


class PreTrainingOutput(NamedTuple):
    prediction_logits: Tensor  # [M, V] at `mlm_positions`, or [T, V] without them
    seq_relationship_logits: Tensor  # [N, 2]


class BertForPreTraining(BertForMaskedLM, NextSentenceModel):
    """BERT with the masked-language-model and next-sentence heads. Returns `prediction_logits`, as
    BertForMaskedLM, and `seq_relationship_logits` [N, 2]: the second text follows the first one, or
    is random.
    """

    next_sentence = True

    @property
    def next_sentence_layer(self) -> Linear:
        return self.cls.seq_relationship

    @accepts_padded
    def forward(
        self, stream: TokenStream, *, mlm_positions: Tensor | None = None
    ) -> PreTrainingOutput:
        encoded = self.base_model(stream, output_positions=mlm_positions)
        hidden, pooled_NE = encoded.last_hidden_state, encoded.pooler_output
        return PreTrainingOutput(
            self.prediction_logits(hidden), self.next_sentence_logits(pooled_NE)
        )


class BertForQuestionAnswering(BertPreTrainedModel, QuestionAnswering):
    """BERT with a span head: a start and an end logit per token."""


class BertForSequenceClassification(BertPreTrainedModel, SequenceClassification):
    """BERT with a classifier of texts, see heads.SequenceClassification."""


class BertForTokenClassification(BertPreTrainedModel, TokenClassification):
    """BERT with a classifier of tokens: a logit per label for each token."""


class BertForSentenceEmbedding(BertPreTrainedModel, SentenceEmbedding):
    """BERT with a vector for each text, see heads.SentenceEmbedding."""


MODELS: ModelsByHead = {
    "pretraining": BertForPreTraining,
    "masked_lm": BertForMaskedLM,
    "question_answering": BertForQuestionAnswering,
    "sequence_classification": BertForSequenceClassification,
    "token_classification": BertForTokenClassification,
    "sentence_embedding": BertForSentenceEmbedding,
}
