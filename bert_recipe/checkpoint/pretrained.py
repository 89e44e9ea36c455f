"""Models for your own loops: the classes of all encoders, with `from_pretrained` and
`save_pretrained`.

    from bert_recipe import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(folder, num_labels=3)
    model.save_pretrained(other_folder, tokenizer)

Models take what transformers' take (`input_ids`, `attention_mask`, `token_type_ids`, each [B, S]),
or a token stream without padding. They lie in model/encoders/; model/encoders/registry.py lists
them by encoder and head.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bert_recipe.checkpoint.folder import CONFIG_FILE, MODEL_FILE
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.weights import checkpoint_shapes, copy_rows, select_weights
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
from bert_recipe.tokenization.tokenizer import Tokenizer, model_files
from bert_recipe.utils.device import allocate
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import atomic_path, write_atomically
from bert_recipe.utils.json_files import write_json

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


def load_pretrained(
    model_class: type[PreTrainedModel],
    /,
    folder: str | Path,
    *,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """`model_class` with the config and weights in `folder`, of this project or Hugging Face's, in
    evaluation mode. A head that the folder lacks starts from its initial values; a line says so.

    num_labels: classes of a classification head; 1 means a number. labels: their names instead.
    kwargs: of the class. Raises UserError for any other missing, unexpected or misshapen tensor.
    """
    source = ModelFolder.find(folder)
    config = source.config
    if not isinstance(config, model_class.config_class):
        raise UserError(
            f"{source} holds a {config.model_type} model, which {model_class.__name__} cannot load"
        )
    if num_labels is not None and num_labels != config.num_labels:
        labels = [f"LABEL_{index}" for index in range(num_labels)]
    if labels is not None:
        config = replace(config, labels=tuple(labels))
    with torch.device("meta"):  # skip the initialization
        model = model_class(config, **kwargs)
    weights = select_weights(model, source.tensors, source.path)
    allocate(model, torch.device("cpu"))
    model.init_weights(model.optional_heads)
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        copy_rows(parameters[name], 0, tensor)
    return model.eval()


def save_pretrained(
    model: PreTrainedModel, folder: str | Path, tokenizer: Tokenizer | None = None
) -> None:
    """Writes a model folder that transformers, and every program here, reads: `model.safetensors`,
    `config.json` and, with a tokenizer, its files. Each file is written atomically.

    The model must be whole: without shards, and not prepared for inference.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = checkpoint_shapes(model)
    tensors = {}
    for name, parameter in model.named_parameters():
        rows = parameter.detach()[: shapes[name][0]] if shapes[name] else parameter.detach()
        tensors[name] = rows.cpu().contiguous()
    with atomic_path(folder / MODEL_FILE) as path:
        save_file(tensors, path, metadata={"format": "pt"})
    config = {"architectures": [model.architecture], **model.config.to_dict()}
    files: dict[str, bytes] = {}
    if tokenizer is not None:
        config["pad_token_id"] = tokenizer.pad_token_id
        length = model.config.max_length
        files = model_files(tokenizer, length, model.config.needs_tokenizer_json)
    write_json(folder / CONFIG_FILE, config)
    for name, content in files.items():
        write_atomically(folder / name, content)
