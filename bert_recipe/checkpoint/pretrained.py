"""Models for your own loops: `from_pretrained` and `save_pretrained` of all encoders' classes.

    from bert_recipe import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(folder, num_labels=3)
    model.save_pretrained(other_folder, tokenizer)

Models take what transformers' take (`input_ids`, `attention_mask`, `token_type_ids`, each [B, S]),
or a token stream without padding. They lie in model/encoders/; model/encoders/registry.py lists
them by encoder and head.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bert_recipe.checkpoint.calibration import CALIBRATION_FILE
from bert_recipe.checkpoint.folder import CONFIG_FILE, INDEX_SUFFIX, MANIFEST_FILE, MODEL_FILE
from bert_recipe.checkpoint.model_choice import check_vocab_size
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.sentence_folders import EmbeddingSettings, sentence_files
from bert_recipe.checkpoint.weight_files import without_wrappers
from bert_recipe.checkpoint.weights import copy_rows, folder_shapes, select_weights
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.heads import SentenceEmbedding
from bert_recipe.model.encoders.registry import check_tied
from bert_recipe.tokenization.files import TOKENIZER_FILES
from bert_recipe.tokenization.tokenizer import Tokenizer, model_files
from bert_recipe.utils.device import allocate
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import atomic_path, remove, write_atomically
from bert_recipe.utils.json_files import write_json

# Of PEFT: transformers puts the adapter on the model of a folder with this file.
ADAPTER_FILE = "adapter_config.json"


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

    num_labels: classes of a classification head; 1 means a number.
    labels: their names instead.
    kwargs: of the class.

    Raises UserError for any other missing, unexpected or misshapen tensor, and ValueError for
    labels that no head has.
    """
    source = ModelFolder.find(folder)
    config = source.config
    if not isinstance(config, model_class.config_class):
        raise UserError(
            f"{source} holds a {config.model_type} model, which {model_class.__name__} cannot load"
        )
    check_tied(model_class, config)
    if num_labels is not None and num_labels != (len(labels) if labels else max(num_labels, 1)):
        raise ValueError(f"num_labels is {num_labels}: give at least 1, or the labels alone")
    if num_labels is not None and labels is None and num_labels != config.num_labels:
        labels = [f"LABEL_{index}" for index in range(num_labels)]
    if labels is not None:
        config = replace(config, labels=tuple(labels))
    settings = None
    if issubclass(model_class, SentenceEmbedding):
        settings = EmbeddingSettings.read(source.path)
        config = replace(config, embedding_pooling=settings.pooling)
    unknown = kwargs.keys() - inspect.signature(model_class.__init__).parameters.keys()
    if unknown:
        raise TypeError(
            f"from_pretrained has no {min(unknown)}: it takes num_labels, labels and what "
            f"{model_class.__name__} takes; for another type or device, model.to(...)"
        )
    with torch.device("meta"):  # skip the initialization
        model = model_class(config, **kwargs)
    if isinstance(model, SentenceEmbedding):
        model.text_settings = settings
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
    `config.json`, for sentence embeddings the files of sentence-transformers, and with a tokenizer
    its files. Each file is written atomically. Files of an earlier model or tokenizer that would be
    read besides are removed.

    Raises UserError for a model with shards, or prepared for inference, for a tokenizer of another
    size, and for the folder of a run's checkpoint or with an adapter.
    """
    folder = Path(folder)
    if (folder / MANIFEST_FILE).is_file():
        raise UserError(
            f"{folder} is a checkpoint of a run, whose {MANIFEST_FILE} lists other weights: choose "
            "another folder"
        )
    if (folder / ADAPTER_FILE).is_file():
        raise UserError(
            f"{folder} has an adapter ({ADAPTER_FILE}), which transformers would load with the "
            "model: choose another folder, or remove the adapter's files"
        )
    tensors, config = whole_tensors(model), model.config
    values = {"architectures": [model.architecture], **config.to_dict()}
    files: dict[str, bytes] = {}
    if isinstance(model, SentenceEmbedding):
        settings = model.text_settings or EmbeddingSettings()
        settings = replace(settings, pooling=config.embedding_pooling)
        length = settings.max_seq_length or config.max_length
        files |= settings.files(config.hidden_size, length)
    if tokenizer is not None:
        check_vocab_size(tokenizer, config)
        values["pad_token_id"] = tokenizer.pad_token_id
        files |= model_files(
            tokenizer, config.max_length, config.needs_tokenizer_json, config.takes_token_types
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / CALIBRATION_FILE, *sentence_files(folder)):
        remove(path)
    remove_shards(folder)
    with atomic_path(folder / MODEL_FILE) as path:
        save_file(tensors, path, metadata={"format": "pt"})
    write_json(folder / CONFIG_FILE, values)
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            if name not in files:
                remove(folder / name)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_atomically(folder / name, content)


def whole_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a model as a folder has them, on the CPU."""
    if model.is_prepared:
        raise UserError(
            "the model was prepared for inference, which packs and rounds its weights: save it "
            "before that, or load it again"
        )
    shapes = folder_shapes(model)
    tensors = {}
    for name, parameter in model.named_parameters():
        if name not in shapes:
            continue
        # Of FSDP2 (DTensor, whose module takes a second to import) or of DeepSpeed.
        is_shard = hasattr(parameter, "placements") or hasattr(parameter, "ds_shape")
        if is_shard or parameter.is_meta:
            raise UserError(f"{name} is not whole: gather the weights of the model, then save it")
        rows = parameter.detach()[: shapes[name][0]] if shapes[name] else parameter.detach()
        tensors[name] = rows.cpu().contiguous()
    return without_wrappers(tensors)


def remove_shards(folder: Path) -> None:
    """Removes the shards of an earlier model, and their index."""
    stem, suffix = MODEL_FILE.split(".")
    for path in folder.glob(f"{stem}-*-of-*.{suffix}"):
        remove(path)
    remove(folder / (MODEL_FILE + INDEX_SUFFIX))
