"""Hugging Face model folders, with `pytorch_model.bin` or safetensors, in one file or in shards."""

from pathlib import Path

from bert_config import BertConfig
from checkpoint.weights import open_model_weights
from checkpoint_formats.source_weights import SourceWeights, translate
from utils.errors import UserError


def read(source: Path, _config: BertConfig) -> SourceWeights:
    if not source.is_dir():
        raise UserError(f"{source} is not a folder: --from huggingface takes a model folder")
    return translate(source, {name: tensor.read() for name, tensor in open_model_weights(source).items()})
