"""NeoBERT (Le Breton et al., 2025): rotary positions and gates as ModernBERT's, all layers global,
RMSNorm, an output matrix of its own. transformers reads its folders with the code on the hub.

Legend: M masked tokens, T tokens in the stream, R tokens of the output, H heads, D head size, F
rotary frequencies (D / 2), E hidden size.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_recipe.model.attention import PreparedAttention
from bert_recipe.model.costs import modernbert as modernbert_costs
from bert_recipe.model.encoders import heads
from bert_recipe.model.encoders.base import EncoderModel, PreTrainedModel
from bert_recipe.model.encoders.config import ModelConfig, dropout
from bert_recipe.model.encoders.modernbert import ModernBertModel
from bert_recipe.model.encoders.modules import Linear, VocabularyEmbedding
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.utils.json_files import JsonObject

KEYS = {"max_length": "max_position_embeddings", "decoder_init_range": "initializer_range"}
# transformers' classes, without "Auto", and NeoBERT's on the hub.
CODE = {
    "Config": "NeoBERTConfig",
    "Model": "NeoBERT",
    "ModelForMaskedLM": "NeoBERTLMHead",
    "ModelForSequenceClassification": "NeoBERTForSequenceClassification",
}


@dataclass(frozen=True)
class NeoBertConfig(ModelConfig):
    max_position_embeddings: int = 1024
    initializer_range: float = 0.02
    norm_eps: float = 1e-6
    classifier_dropout: float = dropout(0.1)

    model_type = "neobert"
    model_types = ("neobert",)
    meaning = ("num_attention_heads", "norm_eps")
    needs_tokenizer_json = True
    attention_dropout = embedding_dropout = mlp_dropout = 0.0
    classifier_pooling = "cls"
    global_rope_theta = 10_000.0
    head_dropout = property(lambda self: self.classifier_dropout)
    # SwiGLU has three matrices where other blocks have two.
    gate_size = property(lambda self: -(-int(2 * self.intermediate_size / 3) // 8) * 8)

    @classmethod
    def from_dict(cls, values: JsonObject) -> Self:
        return super().from_dict({KEYS.get(key, key): value for key, value in values.items()})

    def to_dict(self) -> JsonObject:
        values = super().to_dict()
        names = {ours: theirs for theirs, ours in KEYS.items()}
        code = {f"Auto{auto}": f"chandar-lab/NeoBERT--model.{name}" for auto, name in CODE.items()}
        return {names.get(key, key): values[key] for key in values} | {"auto_map": code}

    def window(self, layer: int) -> int | None:
        return None  # all layers attend to all tokens

    def with_dropout(self, prob: float) -> Self:
        return replace(self, classifier_dropout=prob)


class NeoBertLayer(nn.Module):
    window = None  # it attends to all tokens

    def __init__(self, config: NeoBertConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.gate_size
        self.config = replace(config, intermediate_size=inner)  # for the costs
        self.attention_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.qkv = Linear(hidden, 3 * hidden, False)
        self.wo = Linear(hidden, hidden, False)
        w12 = Linear(hidden, 2 * inner, False, stacked=2)
        w3 = Linear(inner, hidden, False)
        self.ffn = nn.ModuleDict({"w12": w12, "w3": w3})

    def forward(
        self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None
    ) -> Tensor:
        # The rows of `qkv` are sorted by head. Rotary positions rotate the elements 2f and 2f + 1
        # together; `attention` rotates f and f + D/2.
        shape = (self.config.num_attention_heads, 3, -1, 2)
        qkv_TH3F2 = self.qkv(self.attention_norm(hidden_TE)).unflatten(-1, shape)
        qkv_T3HD = qkv_TH3F2.permute(0, 2, 1, 4, 3).flatten(-2)
        context_TH2F = attention(qkv_T3HD, 0.0).unflatten(-1, (2, -1))
        context_TE = context_TH2F.transpose(-1, -2).flatten(1)
        if output_R is not None:
            context_TE, hidden_TE = context_TE[output_R], hidden_TE[output_R]
        attended_TE = hidden_TE + self.wo(context_TE)
        gate, inner = self.ffn["w12"](self.ffn_norm(attended_TE)).chunk(2, dim=-1)
        return attended_TE + self.ffn["w3"](F.silu(gate) * inner)


class NeoBertPreTrainedModel(PreTrainedModel):
    base_model_prefix = "model"
    config_class = NeoBertConfig
    config: NeoBertConfig
    head_names = ("decoder.", "dense.", "classifier.", "qa_outputs.")
    span_classifier_name = "qa_outputs"

    def add_encoder(self, pooling: str | None) -> None:
        self.model = NeoBertModel(self.config, pooling)


class NeoBertModel(NeoBertPreTrainedModel, EncoderModel):
    """NeoBERT without a head."""

    costs: ClassVar[ModuleType] = modernbert_costs
    prepare_attentions = ModernBertModel.prepare_attentions

    def __init__(self, config: NeoBertConfig, pooling: str | None = None):
        super().__init__(config, pooling)
        self.encoder = VocabularyEmbedding(config)
        layers = (NeoBertLayer(config) for _ in range(config.num_hidden_layers))
        self.transformer_encoder = nn.ModuleList(layers)
        self.layer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.init_weights()

    @property
    def layers(self) -> nn.ModuleList:
        return self.transformer_encoder

    @property
    def embedding_modules(self) -> list[nn.Module]:
        return [self.encoder]

    def embed(self, stream: TokenStream) -> Tensor:
        return self.encoder(stream.input_ids)

    def normalize_output(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(hidden)


class NeoBertForMaskedLM(NeoBertPreTrainedModel, heads.MaskedLanguageModel):
    """NeoBERT with the masked-language-model head, see heads.MaskedLanguageModel."""

    output_weight = property(lambda self: self.decoder.weight)
    output_bias = property(lambda self: self.decoder.bias)

    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.add_encoder(None)
        self.decoder = VocabularyEmbedding(config)
        self.decoder.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.init_weights("decoder.")

    def transform(self, hidden_ME: Tensor) -> Tensor:
        return hidden_ME


class NeoBertForSequenceClassification(NeoBertPreTrainedModel, heads.SequenceClassification):
    """NeoBERT with a classifier of texts, see heads.SequenceClassification."""

    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.init_weights("dense.")

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(torch.tanh(self.dense(self.dropout(hidden))))


class NeoBertForQuestionAnswering(NeoBertPreTrainedModel, heads.QuestionAnswering):
    """NeoBERT with a span head: a start and an end logit per token."""


class NeoBertForTokenClassification(NeoBertPreTrainedModel, heads.TokenClassification):
    """NeoBERT with a classifier of tokens: a logit per label for each token."""


class NeoBertForSentenceEmbedding(NeoBertPreTrainedModel, heads.SentenceEmbedding):
    """NeoBERT with a vector for each text, see heads.SentenceEmbedding."""


MODELS: heads.ModelsByHead = {
    "pretraining": NeoBertForMaskedLM,
    "masked_lm": NeoBertForMaskedLM,
    "question_answering": NeoBertForQuestionAnswering,
    "sequence_classification": NeoBertForSequenceClassification,
    "token_classification": NeoBertForTokenClassification,
    "sentence_embedding": NeoBertForSentenceEmbedding,
}
