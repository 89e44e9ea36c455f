"""The folder that a conversion writes: `model.safetensors`, `config.json`, `vocab.txt` and `tokenizer_config.json`."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bert_config import VOCAB_MULTIPLE, BertConfig, ModernBertConfig
from tokenizer import BertTokenizer, read_tokenizer_file
from utils.errors import UserError, one_line
from utils.files import atomic_folder, read_json, write_json

CONFIG_FILES = ("config.json", "bert_config.json")
VOCAB_FILES = ("vocab.txt", "tokenizer.json")  # transformers 5 writes only the second
TOKENIZER_CONFIG = "tokenizer_config.json"
DTYPE_KEYS = ("dtype", "torch_dtype")  # of a Hugging Face config; the converted weights are float32


def find_beside(source: Path, names: tuple[str, ...], flag: str) -> Path:
    """The first of the files `names` in the folder `source`, or beside the file `source`."""
    folder = source if source.is_dir() else source.parent
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} has no {' or '.join(names)}: give {flag}")


def read_config(path: Path) -> tuple[BertConfig, dict[str, Any]]:
    """The architecture in a BERT config of any of the formats, and all the keys of the file."""
    values = read_json(path, "config")
    if not isinstance(values, dict):
        raise UserError(f"config {path} is not a JSON object: give a BERT config")
    if values.get("model_type") == ModernBertConfig.model_type:
        raise UserError(
            f"{path} is a ModernBERT model, and all programs here read its folder as it is: do not convert it"
        )
    values.setdefault("model_type", "bert")  # BertConfig then takes the further keys of Google's multilingual configs
    try:
        return BertConfig.from_dict(values), values
    except ValueError as error:
        raise UserError(f"{path}: {error}: give a BERT config") from error


def output_config(config: BertConfig, source_values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict:
    """The source's config with all keys of the architecture, the model class, and the classification head's labels."""
    values = {key: value for key, value in source_values.items() if key not in DTYPE_KEYS}
    values.setdefault("architectures", [architecture(tensors)])
    if "classifier.weight" in tensors and "id2label" not in values:
        labels = range(len(tensors["classifier.weight"]))
        values["id2label"] = {str(i): f"LABEL_{i}" for i in labels}
        values["label2id"] = {f"LABEL_{i}": i for i in labels}
    return {**values, **config.to_dict()}


def architecture(tensors: Mapping[str, Tensor]) -> str:
    """Hugging Face's model class for the heads in `tensors`."""
    if "qa_outputs.weight" in tensors:
        return "BertForQuestionAnswering"
    if "classifier.weight" in tensors:
        return "BertForSequenceClassification"
    has_mlm, has_nsp = "cls.predictions.bias" in tensors, "cls.seq_relationship.weight" in tensors
    if has_mlm:
        return "BertForPreTraining" if has_nsp else "BertForMaskedLM"
    return "BertForNextSentencePrediction" if has_nsp else "BertModel"


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to write to, which is synced and renamed to `folder` at the end, and removed on an error.

    Raises UserError if `folder` exists and is not empty."""
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: choose another FOLDER")
    try:
        with atomic_folder(folder) as temporary:
            yield temporary
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror or error}): choose another FOLDER") from error


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    float32 = {name: tensor.to(torch.float32).contiguous() for name, tensor in tensors.items()}
    path = folder / "model.safetensors"
    save_file(float32, path, metadata={"format": "pt"})
    path.chmod(folder.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read


def write_vocabulary(folder: Path, source: Path, config: BertConfig) -> bool:
    """Writes `vocab.txt` and `tokenizer_config.json`; returns whether the vocabulary is lower-case.

    source: a `vocab.txt`, or a `tokenizer.json` of transformers. A `tokenizer_config.json` beside it is copied; without
    one, a vocabulary without capitals (but in special tokens) is taken to be lower-case."""
    vocab_file = folder / "vocab.txt"
    if source.suffix == ".json":
        vocab_file.write_text("".join(f"{token}\n" for token in read_tokenizer_file(source)[0]), encoding="utf-8")
    else:
        if not source.is_file():
            raise UserError(f"vocabulary {source} does not exist: check --vocab-file")
        shutil.copyfile(source, vocab_file)
    try:
        tokens = BertTokenizer(vocab_file).tokens
    except UserError as error:
        raise UserError(one_line(str(error)).replace(str(vocab_file), str(source))) from error
    if not len(tokens) <= config.vocab_size <= -(-len(tokens) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE:
        raise UserError(
            f"{source} has {len(tokens)} tokens and the config's vocab_size is {config.vocab_size}: use the vocabulary "
            f"and the config that belong together"
        )
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": not any(token != token.lower() for token in tokens if not token.startswith("[")),
        "model_max_length": config.max_position_embeddings,
    }
    if (source.parent / TOKENIZER_CONFIG).is_file():
        settings = {**settings, **read_json(source.parent / TOKENIZER_CONFIG, "tokenizer config")}
    write_json(folder / TOKENIZER_CONFIG, settings)
    return settings["do_lower_case"]
