"""The models, for people who import them. Each has `from_pretrained`:

    from bert_recipe.checkpoint.pretrained import BertForQuestionAnswering

    model = BertForQuestionAnswering.from_pretrained(folder)

Models take what transformers' take (`input_ids`, `attention_mask`, `token_type_ids`, each [B, S]),
or a token stream without padding. They lie in model/encoders/; model/encoders/registry.py lists
them by encoder and head.
"""

from bert_recipe.checkpoint.weights import load_pretrained
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.bert import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSentenceEmbedding,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)
from bert_recipe.model.encoders.distilbert import MODELS as DISTILBERT
from bert_recipe.model.encoders.distilbert import DistilBertConfig, DistilBertModel
from bert_recipe.model.encoders.electra import MODELS as ELECTRA
from bert_recipe.model.encoders.electra import ElectraConfig, ElectraModel
from bert_recipe.model.encoders.modernbert import (
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForQuestionAnswering,
    ModernBertForSentenceEmbedding,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertModel,
)
from bert_recipe.model.encoders.neobert import MODELS as NEOBERT
from bert_recipe.model.encoders.neobert import NeoBertConfig, NeoBertModel
from bert_recipe.model.encoders.registry import MODELS, config_from_dict, make_model
from bert_recipe.model.encoders.roberta import (
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForQuestionAnswering,
    RobertaForSentenceEmbedding,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
)

DistilBertForMaskedLM = DISTILBERT["masked_lm"]
DistilBertForQuestionAnswering = DISTILBERT["question_answering"]
DistilBertForSentenceEmbedding = DISTILBERT["sentence_embedding"]
DistilBertForSequenceClassification = DISTILBERT["sequence_classification"]
DistilBertForTokenClassification = DISTILBERT["token_classification"]
ElectraForMaskedLM = ELECTRA["masked_lm"]
ElectraForQuestionAnswering = ELECTRA["question_answering"]
ElectraForSentenceEmbedding = ELECTRA["sentence_embedding"]
ElectraForSequenceClassification = ELECTRA["sequence_classification"]
ElectraForTokenClassification = ELECTRA["token_classification"]
NeoBertForMaskedLM = NEOBERT["masked_lm"]
NeoBertForQuestionAnswering = NEOBERT["question_answering"]
NeoBertForSentenceEmbedding = NEOBERT["sentence_embedding"]
NeoBertForSequenceClassification = NEOBERT["sequence_classification"]
NeoBertForTokenClassification = NEOBERT["token_classification"]

__all__ = [
    "MODELS",
    "BertConfig",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSentenceEmbedding",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "DistilBertConfig",
    "DistilBertForMaskedLM",
    "DistilBertForQuestionAnswering",
    "DistilBertForSentenceEmbedding",
    "DistilBertForSequenceClassification",
    "DistilBertForTokenClassification",
    "DistilBertModel",
    "ElectraConfig",
    "ElectraForMaskedLM",
    "ElectraForQuestionAnswering",
    "ElectraForSentenceEmbedding",
    "ElectraForSequenceClassification",
    "ElectraForTokenClassification",
    "ElectraModel",
    "ModernBertConfig",
    "ModernBertForMaskedLM",
    "ModernBertForQuestionAnswering",
    "ModernBertForSentenceEmbedding",
    "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification",
    "ModernBertModel",
    "NeoBertConfig",
    "NeoBertForMaskedLM",
    "NeoBertForQuestionAnswering",
    "NeoBertForSentenceEmbedding",
    "NeoBertForSequenceClassification",
    "NeoBertForTokenClassification",
    "NeoBertModel",
    "RobertaConfig",
    "RobertaForMaskedLM",
    "RobertaForQuestionAnswering",
    "RobertaForSentenceEmbedding",
    "RobertaForSequenceClassification",
    "RobertaForTokenClassification",
    "RobertaModel",
    "config_from_dict",
    "make_model",
]

# The models in model/encoders/ know no files.
PreTrainedModel.from_pretrained = classmethod(load_pretrained)
