"""BERT, ModernBERT and their kin for your own training loop: models that take token streams without
padding, their tokenizers, optimizers and losses.

    from bert_recipe import BertForSequenceClassification, NorMuon, TokenStream, muon_groups

    model = BertForSequenceClassification.from_pretrained(folder, num_labels=2).train()
    optimizer = NorMuon(muon_groups(model, weight_decay=0.01), lr=1e-3)
    logits = model(TokenStream.from_sequences(sequences)).logits

Names are imported when they are first used, so that importing the package takes no time and sets
nothing. docs/use_as_a_library.md has whole examples; other names lie in the package's modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from bert_recipe.model.encoders.distilbert import (
        DistilBertConfig,
        DistilBertForMaskedLM,
        DistilBertForQuestionAnswering,
        DistilBertForSentenceEmbedding,
        DistilBertForSequenceClassification,
        DistilBertForTokenClassification,
        DistilBertModel,
    )
    from bert_recipe.model.encoders.electra import (
        ElectraConfig,
        ElectraForMaskedLM,
        ElectraForQuestionAnswering,
        ElectraForSentenceEmbedding,
        ElectraForSequenceClassification,
        ElectraForTokenClassification,
        ElectraModel,
    )
    from bert_recipe.model.encoders.modernbert import (
        ModernBertConfig,
        ModernBertForMaskedLM,
        ModernBertForQuestionAnswering,
        ModernBertForSentenceEmbedding,
        ModernBertForSequenceClassification,
        ModernBertForTokenClassification,
        ModernBertModel,
    )
    from bert_recipe.model.encoders.neobert import (
        NeoBertConfig,
        NeoBertForMaskedLM,
        NeoBertForQuestionAnswering,
        NeoBertForSentenceEmbedding,
        NeoBertForSequenceClassification,
        NeoBertForTokenClassification,
        NeoBertModel,
    )
    from bert_recipe.model.encoders.roberta import (
        RobertaConfig,
        RobertaForMaskedLM,
        RobertaForQuestionAnswering,
        RobertaForSentenceEmbedding,
        RobertaForSequenceClassification,
        RobertaForTokenClassification,
        RobertaModel,
    )
    from bert_recipe.model.loss import linear_cross_entropy
    from bert_recipe.model.token_stream import TokenStream
    from bert_recipe.optimization.lamb import Lamb
    from bert_recipe.optimization.muon import Muon, NorMuon, muon_groups
    from bert_recipe.optimization.protocol import parameter_groups
    from bert_recipe.tasks.text_sequences import TextDataset
    from bert_recipe.tokenization.tokenizer import load_tokenizer
    from bert_recipe.training.library import OwnTask, train

__version__ = "1.0.0"
__all__ = [
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
    "Lamb",
    "ModernBertConfig",
    "ModernBertForMaskedLM",
    "ModernBertForQuestionAnswering",
    "ModernBertForSentenceEmbedding",
    "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification",
    "ModernBertModel",
    "Muon",
    "NeoBertConfig",
    "NeoBertForMaskedLM",
    "NeoBertForQuestionAnswering",
    "NeoBertForSentenceEmbedding",
    "NeoBertForSequenceClassification",
    "NeoBertForTokenClassification",
    "NeoBertModel",
    "NorMuon",
    "OwnTask",
    "RobertaConfig",
    "RobertaForMaskedLM",
    "RobertaForQuestionAnswering",
    "RobertaForSentenceEmbedding",
    "RobertaForSequenceClassification",
    "RobertaForTokenClassification",
    "RobertaModel",
    "TextDataset",
    "TokenStream",
    "linear_cross_entropy",
    "load_tokenizer",
    "muon_groups",
    "parameter_groups",
    "train",
]

# By what the names of an encoder's classes begin with.
ENCODERS = {
    "Bert": "bert",
    "DistilBert": "distilbert",
    "Electra": "electra",
    "ModernBert": "modernbert",
    "NeoBert": "neobert",
    "Roberta": "roberta",
}
MODULES = {
    "TokenStream": "model.token_stream",
    "linear_cross_entropy": "model.loss",
    "Lamb": "optimization.lamb",
    "Muon": "optimization.muon",
    "NorMuon": "optimization.muon",
    "muon_groups": "optimization.muon",
    "parameter_groups": "optimization.protocol",
    "load_tokenizer": "tokenization.tokenizer",
    "OwnTask": "training.library",
    "TextDataset": "tasks.text_sequences",
    "train": "training.library",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = MODULES.get(name)
    if module is None:
        encoder = next(file for start, file in ENCODERS.items() if name.startswith(start))
        module = f"model.encoders.{encoder}"
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
