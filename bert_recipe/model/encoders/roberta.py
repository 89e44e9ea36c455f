"""RoBERTa (Liu et al., 2019), XLM-RoBERTa and CamemBERT: BERT's layers; positions start after the
padding token's id, the masked-token head has its own norm, and the classifier reads the first token
without a pooler.

Legend: M masked tokens, N sequences, T tokens in the stream, E hidden size.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from bert_recipe.model.encoders import heads
from bert_recipe.model.encoders.bert import (
    BertConfig,
    BertEmbeddings,
    BertModel,
    BertPreTrainedModel,
    make_norm,
)
from bert_recipe.model.encoders.config import token_id
from bert_recipe.model.encoders.modules import Transform
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.utils.json_files import JsonObject

# Hugging Face's model types, and what the names of their classes begin with.
FAMILY = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """RoBERTa's architecture, with the keys and defaults of Hugging Face's `config.json`."""

    model_type: str = "roberta"
    pad_token_id: int = token_id(1)

    # With a vocab.txt, transformers makes token types, of which there is one here.
    needs_tokenizer_json = True
    model_types = tuple(FAMILY)
    meaning = ("num_attention_heads", "hidden_act", "layer_norm_eps", "pad_token_id")
    options = ()

    @classmethod
    def from_dict(cls, values: JsonObject) -> Self:
        return super(BertConfig, cls).from_dict(values)

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings - self.pad_token_id - 1

    def with_padding(self, pad_token_id: int) -> Self:
        moved = pad_token_id - self.pad_token_id
        positions = self.max_position_embeddings + moved
        return dataclasses.replace(
            self, pad_token_id=pad_token_id, max_position_embeddings=positions
        )

    def with_vocabulary(self, tokenizer: Any) -> Self:
        if tokenizer.pad_token_id != self.pad_token_id:
            raise ValueError(
                f"pad_token_id is {self.pad_token_id}, and the tokenizer's is "
                f"{tokenizer.pad_token_id}"
            )
        return self


class RobertaEmbeddings(BertEmbeddings):
    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        self.pad_token_id = config.pad_token_id

    def forward(self, stream: TokenStream) -> Tensor:
        return super().forward(stream._replace(position_ids=self.positions(stream)))

    def positions(self, stream: TokenStream) -> Tensor:
        """The row of each token [T] in the table of positions. A padding token that is written in a
        text has a row of its own and is not counted, as in transformers and fairseq.
        """
        is_padding_T = stream.input_ids == self.pad_token_id
        before_T = is_padding_T.cumsum(dim=0) - is_padding_T.long()  # in the stream
        bounds = stream.cu_seqlens
        tokens_T = torch.arange(stream.num_tokens, device=bounds.device, dtype=bounds.dtype)
        first_T = bounds[torch.searchsorted(bounds[1:], tokens_T, right=True)]
        number_T = stream.position_ids + 1 - before_T + before_T[first_T]
        return self.pad_token_id + number_T * ~is_padding_T


class RobertaPreTrainedModel(BertPreTrainedModel):
    base_model_prefix = "roberta"
    head_names = ("lm_head.", "qa_outputs.", "classifier.")
    tied_copies = ("lm_head.decoder.weight", "lm_head.decoder.bias")
    config_class = RobertaConfig
    config: RobertaConfig

    def __init__(self, config: RobertaConfig, *args: str | None):
        super().__init__(config, *args)
        self.architecture = self.architecture.replace("Roberta", FAMILY[config.model_type])

    def add_encoder(self, pooling: str | None) -> None:
        self.roberta = RobertaModel(self.config, pooling)


class RobertaModel(RobertaPreTrainedModel, BertModel):
    """RoBERTa without a head. Its `pooler_output` is the state of the first token: the pooler of
    transformers' RobertaModel, which only that class has, is not computed.
    """

    embeddings_class = RobertaEmbeddings
    pooler_class = None


class RobertaLMHead(Transform):
    def __init__(self, config: RobertaConfig):
        super().__init__(config.hidden_size, "gelu", "layer_norm", make_norm(config))
        self.bias = nn.Parameter(torch.empty(config.vocab_size))


class RobertaForMaskedLM(RobertaPreTrainedModel, heads.MaskedLanguageModel):
    """RoBERTa with the masked-language-model head, see heads.MaskedLanguageModel."""

    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        self.add_encoder(None)
        self.lm_head = RobertaLMHead(config)
        self.init_weights("lm_head.")

    def transform(self, hidden_ME: Tensor) -> Tensor:
        return self.lm_head(hidden_ME)

    @property
    def output_bias(self) -> Tensor:
        return self.lm_head.bias


class RobertaClassificationHead(heads.DenseClassifier):
    activation = staticmethod(torch.tanh)


class RobertaForSequenceClassification(RobertaPreTrainedModel, heads.SequenceClassification):
    """RoBERTa with a classifier of texts, see heads.SequenceClassification."""

    classifier_class = RobertaClassificationHead


class RobertaForQuestionAnswering(RobertaPreTrainedModel, heads.QuestionAnswering):
    """RoBERTa with a span head: a start and an end logit per token."""


class RobertaForTokenClassification(RobertaPreTrainedModel, heads.TokenClassification):
    """RoBERTa with a classifier of tokens: a logit per label for each token."""


class RobertaForSentenceEmbedding(RobertaPreTrainedModel, heads.SentenceEmbedding):
    """RoBERTa with a vector for each text, see heads.SentenceEmbedding."""


MODELS: heads.ModelsByHead = {
    "pretraining": RobertaForMaskedLM,
    "masked_lm": RobertaForMaskedLM,
    "question_answering": RobertaForQuestionAnswering,
    "sequence_classification": RobertaForSequenceClassification,
    "token_classification": RobertaForTokenClassification,
    "sentence_embedding": RobertaForSentenceEmbedding,
}
