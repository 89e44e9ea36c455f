"""What readers return, and its checks against a config: no tensor is missing, misshapen or left out
silently.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.encoders.registry import make_model
from bert_recipe.utils.errors import UserError, listed
from bert_recipe.utils.json_files import JsonObject

VOCAB_MULTIPLES = (8, 64)  # NVIDIA's and ModernBERT's recipes pad the vocabulary to one of these
MAX_NAMES = 3  # listed in a message


@dataclass(frozen=True)
class TensorNames:
    """Names of tensors in model folders: of the word embeddings and the masked-token head's bias;
    copies of tensors, with the tensors that they are tied to; prefixes of the parts that may be
    missing, but only completely.

    heads: of the models that together have all tensors but the classifier.
    architectures: model classes by their tensors.
    """

    embedding: str
    mlm_bias: str
    tied: Mapping[str, str]
    optional_parts: tuple[str, ...]
    heads: tuple[str, ...]
    architectures: Mapping[str, tuple[str, ...]]

    def architecture(self, names: Collection[str]) -> str:
        return next(name for name, tensors in self.architectures.items() if {*tensors} <= {*names})


WORDS, TOKENS = "bert.embeddings.word_embeddings.weight", "model.embeddings.tok_embeddings.weight"
BERT = TensorNames(
    *(WORDS, "cls.predictions.bias"),
    {
        "cls.predictions.decoder.weight": WORDS,
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ("bert.pooler.", "cls.predictions.", "cls.seq_relationship.", "qa_outputs.", "classifier."),
    ("pretraining", "question_answering"),
    {
        "BertForQuestionAnswering": ("qa_outputs.weight",),
        "BertForSequenceClassification": ("classifier.weight",),
        "BertForPreTraining": ("cls.predictions.bias", "cls.seq_relationship.weight"),
        "BertForMaskedLM": ("cls.predictions.bias",),
        "BertForNextSentencePrediction": ("cls.seq_relationship.weight",),
        "BertModel": (),
    },
)
MODERNBERT = TensorNames(
    *(
        TOKENS,
        "decoder.bias",
        {"decoder.weight": TOKENS},
        ("head.", "decoder.", "classifier."),
        ("masked_lm",),
    ),
    {
        "ModernBertForSequenceClassification": ("classifier.weight",),
        "ModernBertForMaskedLM": ("head.dense.weight",),
        "ModernBertModel": (),
    },
)


@dataclass
class SourceWeights:
    """A source's tensors under Hugging Face's names.

    origin: name in the source of each tensor, for error messages.
    unused: names in the source that are not converted, by reason.
    notes: further messages for the user.
    hidden_act: the activation function that the weights were trained with, if the file shows it.
    config_values, tokenizer_files: content of `config.json`, and files of the tokenizer, if the
        source has them.
    """

    path: Path
    layout: TensorNames = BERT
    tensors: dict[str, Tensor] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    unused: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hidden_act: str | None = None
    config_values: JsonObject | None = None
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, source_name: str) -> None:
        if name in self.tensors:
            raise UserError(
                f"{self.path}: {self.origin[name]} and {source_name} are both {name}: give a file "
                f"with one"
            )
        self.tensors[name], self.origin[name] = tensor, source_name

    def skip(self, reason: str, source_name: str) -> None:
        self.unused.setdefault(reason, []).append(source_name)

    def drop_tied_copies(self) -> None:
        """Removes the output layer's copies of tied tensors. Raises UserError for a copy with other
        values.
        """
        for copy, tied_to in self.layout.tied.items():
            if copy not in self.tensors:
                continue
            tensor, source_name = self.tensors.pop(copy), self.origin.pop(copy)
            if tied_to in self.tensors and torch.equal(tensor, self.tensors[tied_to]):
                self.skip(f"tied copy of {self.origin[tied_to]}", source_name)
            else:
                raise UserError(
                    f"{self.path}: {source_name} differs from {self.origin.get(tied_to, tied_to)}: "
                    f"this model ties "
                    f"them, so its masked-token head cannot be converted"
                )


def rename(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """`name` after all substitutions (regular expression, replacement)."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def find_file(source: Path, suffix: str) -> Path:
    """Resolves SOURCE: a file, a path without its suffix, or a folder with one such file; else
    raises UserError.
    """
    if source.is_dir():
        candidates = sorted(source.glob(f"[!.]*{suffix}"))
    else:
        candidates = [source, source.with_name(source.name + suffix)]
    files = [path for path in candidates if path.is_file()]
    if source.is_file():
        return source
    if len(files) == 1:
        return files[0]
    names = ", ".join(path.name for path in files) or "none"
    raise UserError(
        f"{source}: expected the file {source.name}{suffix}, or a folder with one *{suffix}: found "
        f"{names}"
    )


def convert_weights(
    source: SourceWeights, config: ModelConfig, labels: Sequence[Any] | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors to write, under Hugging Face's names, and notes for the user.

    labels: those of the classification head in the source's config, if any. Raises UserError,
    naming the tensor, if one is unknown, missing or misshapen, or has values that are not finite
    floats.
    """
    tensors = source.tensors
    num_labels = len(labels or ())
    if not labels and "classifier.weight" in tensors:
        num_labels = len(tensors["classifier.weight"])
    expected = expected_shapes(source.layout, config, num_labels)
    if unknown := [source.origin[name] for name in tensors if name not in expected]:
        raise UserError(
            f"{source.path} has tensors that its config has no place for: "
            f"{listed(unknown, MAX_NAMES)}: check --from"
        )
    notes = [*source.notes, *strip_vocab_padding(source, config)]
    for name in tensors:
        check_tensor(source, name, expected[name])
    absent = absent_parts(source)
    check_complete(source, expected, absent)
    if absent:
        notes.append(f"not in the source: {', '.join(f'{part}*' for part in absent)}")
    for reason, names in sorted(source.unused.items()):
        notes.append(f"not used ({reason}): {listed(names, MAX_NAMES)}")
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if other := sorted(dtypes - {"float32"}):
        notes.append(f"{', '.join(other)} weights are written as float32")
    return {name: tensors[name] for name in expected if name in tensors}, notes


def expected_shapes(
    layout: TensorNames, config: ModelConfig, num_labels: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors that a model folder can have, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in layout.heads:
        with torch.device("meta"):
            model = make_model(head, config)
        shapes |= {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes["classifier.weight"] = (num_labels, config.hidden_size)
    shapes["classifier.bias"] = (num_labels,)
    return shapes


def check_tensor(source: SourceWeights, name: str, shape: tuple[int, ...]) -> None:
    """Raises UserError for another shape than `shape`, and for values that are not finite."""
    tensor, origin = source.tensors[name], source.origin[name]
    described = origin if origin == name else f"{origin} ({name})"
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"{source.path}: {described} has shape {list(tensor.shape)}; the config needs "
            f"{list(shape)}: use its own config"
        )
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise UserError(
            f"{source.path}: {described} has values that are not finite floats: give another "
            f"checkpoint"
        )


def absent_parts(source: SourceWeights) -> tuple[str, ...]:
    """The optional parts of which the source has no tensor."""
    return tuple(
        part
        for part in source.layout.optional_parts
        if not any(name.startswith(part) for name in source.tensors)
    )


def check_complete(
    source: SourceWeights, expected: Collection[str], absent: tuple[str, ...]
) -> None:
    """Raises UserError if a tensor is missing that is in none of the absent parts."""
    missing = [name for name in expected if name not in source.tensors]
    if lacking := [name for name in missing if not name.startswith(absent)]:
        raise UserError(
            f"{source.path} is incomplete: it lacks {listed(lacking, MAX_NAMES)}: give another "
            f"checkpoint"
        )


def strip_vocab_padding(source: SourceWeights, config: ModelConfig) -> list[str]:
    """Removes the vocabulary padding from the embedding and the masked-token head's bias."""
    embedding = source.layout.embedding
    rows = len(source.tensors[embedding]) if embedding in source.tensors else config.vocab_size
    padding = rows - config.vocab_size
    if padding == 0:
        return []
    padded = [-(-config.vocab_size // multiple) * multiple for multiple in VOCAB_MULTIPLES]
    if rows not in padded:
        expected = (
            f"{config.vocab_size}, or {padded[0]} or {padded[1]} with padding: use its own config"
        )
        raise UserError(
            f"{source.path}: {source.origin[embedding]} has {rows} rows; the config needs "
            f"{expected}"
        )
    for name in (embedding, source.layout.mlm_bias):
        if name in source.tensors and len(source.tensors[name]) == rows:
            source.tensors[name] = source.tensors[name][: config.vocab_size]
    return [f"cut {padding} rows that pad the vocabulary from {config.vocab_size} to {rows}"]
