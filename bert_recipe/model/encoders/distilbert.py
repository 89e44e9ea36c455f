"""DistilBERT (Sanh et al., 2019): BERT's layers under other names, without token types and pooler.
Legend: M masked tokens, T tokens in the stream, R tokens of the output, E hidden size.
"""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor, nn

from bert_recipe.model.attention import PreparedAttention
from bert_recipe.model.encoders import bert, heads
from bert_recipe.model.encoders.config import ModelConfig, dropout
from bert_recipe.model.encoders.modules import ACTIVATIONS, Linear, OutputBias
from bert_recipe.model.kernels.dropout import Dropout
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.utils.json_files import JsonObject

# DistilBERT's keys in config.json, and BERT's.
KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "seq_classif_dropout": "classifier_dropout",
}
WITHOUT = ("type_vocab_size", "layer_norm_eps", "pre_layer_norm")
PROJECTIONS = ("q_lin", "k_lin", "v_lin")


@dataclass(frozen=True)
class DistilBertConfig(bert.BertConfig):
    classifier_dropout: float = dropout(0.2)
    qa_dropout: float = dropout(0.1)
    needs_tokenizer_json = True  # with a vocab.txt transformers makes token types
    model_type = "distilbert"
    model_types = ("distilbert",)
    meaning = ("num_attention_heads", "hidden_act")
    options = ()

    @classmethod
    def from_dict(cls, values: JsonObject) -> Self:
        named = {KEYS.get(name, name): value for name, value in values.items()}
        return super(bert.BertConfig, cls).from_dict(named)

    def to_dict(self) -> JsonObject:
        values = ModelConfig.to_dict(self)
        names = {ours: theirs for theirs, ours in KEYS.items()}
        return {names.get(name, name): values[name] for name in values if name not in WITHOUT}

    @property
    def takes_token_types(self) -> bool:
        return False

    def with_dropout(self, prob: float) -> Self:
        return replace(super().with_dropout(prob), classifier_dropout=prob, qa_dropout=prob)


class DistilBertEmbeddings(bert.BertEmbeddings):
    def __init__(self, config: DistilBertConfig):
        super().__init__(config)
        del self.token_type_embeddings

    def forward(self, stream: TokenStream) -> Tensor:
        positions_TE = self.position_embeddings(stream.position_ids)
        return self.dropout(self.LayerNorm(self.word_embeddings(stream.input_ids) + positions_TE))


class DistilBertAttention(bert.BertSelfAttention):
    projection_names = PROJECTIONS

    def __init__(self, config: DistilBertConfig):
        super().__init__(config)
        self.out_lin = Linear(config.hidden_size, config.hidden_size)


class DistilBertLayer(nn.Module):
    def __init__(self, config: DistilBertConfig):
        super().__init__()
        self.config = config
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attention = DistilBertAttention(config)
        self.sa_layer_norm = bert.make_norm(config)
        self.output_layer_norm = bert.make_norm(config)
        self.ffn = nn.ModuleDict({"lin1": Linear(hidden, inner), "lin2": Linear(inner, hidden)})
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None
    ) -> Tensor:
        context_TE = self.attention(hidden_TE, attention)
        if output_R is not None:
            context_TE, hidden_TE = context_TE[output_R], hidden_TE[output_R]
        attended_TE = self.sa_layer_norm(self.attention.out_lin(context_TE) + hidden_TE)
        inner = self.activation(self.ffn["lin1"](attended_TE))
        return self.output_layer_norm(self.dropout(self.ffn["lin2"](inner), attended_TE))


class DistilBertPreTrainedModel(bert.BertPreTrainedModel):
    base_model_prefix = "distilbert"
    head_names = ("vocab_", "qa_outputs.", "pre_classifier.", "classifier.")
    tied_copies = ("vocab_projector.weight",)
    config_class = DistilBertConfig
    config: DistilBertConfig

    @property
    def span_dropout(self) -> float:
        return self.config.qa_dropout

    @property
    def token_dropout(self) -> float:
        return self.config.hidden_dropout_prob

    def add_encoder(self, pooling: str | None) -> None:
        self.distilbert = DistilBertModel(self.config, pooling)


class DistilBertModel(DistilBertPreTrainedModel, bert.BertModel):
    """DistilBERT without a head."""

    embeddings_class = DistilBertEmbeddings
    layer_class = DistilBertLayer
    pooler_class = None
    layers_name = "transformer"


class DistilBertForMaskedLM(DistilBertPreTrainedModel, heads.MaskedLanguageModel):
    """DistilBERT with the masked-language-model head, see heads.MaskedLanguageModel."""

    def __init__(self, config: DistilBertConfig):
        super().__init__(config)
        self.add_encoder(None)
        self.vocab_transform = Linear(config.hidden_size, config.hidden_size)
        self.vocab_layer_norm = bert.make_norm(config)
        self.vocab_projector = OutputBias(config.vocab_size)
        self.init_weights("vocab_")

    @property
    def hidden_modules(self) -> list[nn.Module]:
        return [*super().hidden_modules, self.vocab_transform]

    def transform(self, hidden_ME: Tensor) -> Tensor:
        activated_ME = ACTIVATIONS[self.config.hidden_act](self.vocab_transform(hidden_ME))
        return self.vocab_layer_norm(activated_ME)

    @property
    def output_bias(self) -> Tensor | None:
        return self.vocab_projector.bias


class DistilBertForSequenceClassification(DistilBertPreTrainedModel, heads.SequenceClassification):
    """DistilBERT with a classifier of texts, see heads.SequenceClassification."""

    def __init__(self, config: DistilBertConfig):
        super().__init__(config)
        self.pre_classifier = Linear(config.hidden_size, config.hidden_size)
        self.init_weights("pre_classifier.")

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.pre_classifier(hidden).relu())


class DistilBertForQuestionAnswering(DistilBertPreTrainedModel, heads.QuestionAnswering):
    """DistilBERT with a span head: a start and an end logit per token."""


class DistilBertForTokenClassification(DistilBertPreTrainedModel, heads.TokenClassification):
    """DistilBERT with a classifier of tokens: a logit per label for each token."""


class DistilBertForSentenceEmbedding(DistilBertPreTrainedModel, heads.SentenceEmbedding):
    """DistilBERT with a vector for each text, see heads.SentenceEmbedding."""


MODELS: heads.ModelsByHead = {
    "pretraining": DistilBertForMaskedLM,
    "masked_lm": DistilBertForMaskedLM,
    "question_answering": DistilBertForQuestionAnswering,
    "sequence_classification": DistilBertForSequenceClassification,
    "token_classification": DistilBertForTokenClassification,
    "sentence_embedding": DistilBertForSentenceEmbedding,
}
