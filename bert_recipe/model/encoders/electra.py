"""ELECTRA (Clark et al., 2020), discriminator and generator: BERT's layers on embeddings of another
size, without pooler. Fine-tuning drops the discriminator's own head. The head for masked words is
the generator's.

Legend: M masked tokens, T tokens in the stream, E hidden size.
"""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor, nn

from bert_recipe.model.encoders import heads
from bert_recipe.model.encoders.bert import (
    BertConfig,
    BertEmbeddings,
    BertModel,
    BertPreTrainedModel,
    make_norm,
)
from bert_recipe.model.encoders.modules import ACTIVATIONS, Linear, OutputBias, Transform
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.utils.json_files import JsonObject


@dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """ELECTRA's architecture, with the keys of Hugging Face's `config.json`."""

    embedding_size: int = 128

    model_type = "electra"
    model_types = ("electra",)
    meaning = ("num_attention_heads", "hidden_act", "layer_norm_eps")
    options = ()

    @classmethod
    def from_dict(cls, values: JsonObject) -> Self:
        return super(BertConfig, cls).from_dict(values)

    @property
    def of_embeddings(self) -> BertConfig:
        """The config of the embeddings, whose states have `embedding_size`."""
        return replace(self, hidden_size=self.embedding_size, num_attention_heads=1)


class ElectraPreTrainedModel(BertPreTrainedModel):
    base_model_prefix = "electra"
    head_names = ("discriminator_predictions.", "generator_", "qa_outputs.", "classifier.")
    tied_copies = ("generator_lm_head.weight",)
    config_class = ElectraConfig
    config: ElectraConfig

    def add_encoder(self, pooling: str | None) -> None:
        self.electra = ElectraModel(self.config, pooling)


class ElectraModel(ElectraPreTrainedModel, BertModel):
    """ELECTRA without a head."""

    pooler_class = None

    @staticmethod
    def embeddings_class(config: ElectraConfig) -> BertEmbeddings:
        return BertEmbeddings(config.of_embeddings)

    def __init__(self, config: ElectraConfig, pooling: str | None = "cls"):
        super().__init__(config, pooling)
        if config.embedding_size != config.hidden_size:
            self.embeddings_project = Linear(config.embedding_size, config.hidden_size)
            self.init_weights("embeddings_project.")

    @property
    def embedding_modules(self) -> list[nn.Module]:
        modules = super().embedding_modules
        if self.config.embedding_size != self.config.hidden_size:
            modules.append(self.embeddings_project)
        return modules

    def embed(self, stream: TokenStream) -> Tensor:
        hidden_TE = super().embed(stream)
        if self.config.embedding_size != self.config.hidden_size:
            hidden_TE = self.embeddings_project(hidden_TE)
        return hidden_TE


class ElectraForMaskedLM(ElectraPreTrainedModel, heads.MaskedLanguageModel):
    """ELECTRA with the masked-language-model head, see heads.MaskedLanguageModel."""

    def __init__(self, config: ElectraConfig):
        super().__init__(config)
        self.add_encoder(None)
        norm = make_norm(config.of_embeddings)
        self.generator_predictions = Transform(
            config.hidden_size, "gelu", "LayerNorm", norm, output_size=config.embedding_size
        )
        self.generator_lm_head = OutputBias(config.vocab_size)
        self.init_weights("generator_")

    def transform(self, hidden_ME: Tensor) -> Tensor:
        return self.generator_predictions(hidden_ME)

    @property
    def output_bias(self) -> Tensor | None:
        return self.generator_lm_head.bias


class ElectraClassificationHead(heads.DenseClassifier):
    activation = staticmethod(ACTIVATIONS["gelu"])  # with any hidden_act, as in transformers


class ElectraForSequenceClassification(ElectraPreTrainedModel, heads.SequenceClassification):
    """ELECTRA with a classifier of texts, see heads.SequenceClassification."""

    classifier_class = ElectraClassificationHead


class ElectraForQuestionAnswering(ElectraPreTrainedModel, heads.QuestionAnswering):
    """ELECTRA with a span head: a start and an end logit per token."""


class ElectraForTokenClassification(ElectraPreTrainedModel, heads.TokenClassification):
    """ELECTRA with a classifier of tokens: a logit per label for each token."""


class ElectraForSentenceEmbedding(ElectraPreTrainedModel, heads.SentenceEmbedding):
    """ELECTRA with a vector for each text, see heads.SentenceEmbedding."""


MODELS: heads.ModelsByHead = {
    "pretraining": ElectraForMaskedLM,
    "masked_lm": ElectraForMaskedLM,
    "question_answering": ElectraForQuestionAnswering,
    "sequence_classification": ElectraForSequenceClassification,
    "token_classification": ElectraForTokenClassification,
    "sentence_embedding": ElectraForSentenceEmbedding,
}
