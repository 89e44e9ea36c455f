"""The return type of all readers, and naming rules shared by several formats."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from utils.errors import UserError

EMBEDDING = "bert.embeddings.word_embeddings.weight"
MLM_BIAS = "cls.predictions.bias"
# Copies that Hugging Face's models tie to another tensor, and the one they are tied to.
TIED = {"cls.predictions.decoder.weight": EMBEDDING, "cls.predictions.decoder.bias": MLM_BIAS}
OLD_LAYER_NORM_NAMES = {"gamma": "weight", "beta": "bias"}
HEAD_PREFIXES = ("cls.", "qa_outputs.", "classifier.")


@dataclass
class SourceWeights:
    """A source's tensors under Hugging Face's names.

    origin: name in the source of each tensor, for error messages.
    unused: what is not converted, as reason -> names in the source.
    notes: what else the user should know.
    hidden_act: the activation function, where the file shows which one the weights were trained with.
    """

    path: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    unused: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hidden_act: str | None = None

    def add(self, name: str, tensor: Tensor, source_name: str) -> None:
        if name in self.tensors:
            raise UserError(f"{self.path}: {self.origin[name]} and {source_name} are both {name}: give a file with one")
        self.tensors[name], self.origin[name] = tensor, source_name

    def skip(self, reason: str, source_name: str) -> None:
        self.unused.setdefault(reason, []).append(source_name)

    def drop_tied_copies(self) -> None:
        """Removes the output layer's copies of tied tensors. Raises UserError for a copy with other values."""
        for copy, tied_to in TIED.items():
            if copy not in self.tensors:
                continue
            tensor, source_name = self.tensors.pop(copy), self.origin.pop(copy)
            if tied_to not in self.tensors:  # transformers may keep either of the two biases
                self.add(tied_to, tensor, source_name)
            elif torch.equal(tensor, self.tensors[tied_to]):
                self.skip(f"tied copy of {self.origin[tied_to]}", source_name)
            else:
                raise UserError(
                    f"{self.path}: {source_name} differs from {self.origin[tied_to]}: this model ties them, so its "
                    f"masked-token head cannot be converted"
                )


def translate(path: Path, tensors: Mapping[str, Tensor], rename: Callable[[str], str] | None = None) -> SourceWeights:
    """PyTorch tensors under Hugging Face's names, after `rename` and the rules that all PyTorch BERTs need."""
    source = SourceWeights(path)
    renamed = tensors if rename is None else map(rename, tensors)
    for source_name, name in zip(tensors, hugging_face_names(renamed), strict=True):
        if name.endswith(".position_ids"):
            source.skip("buffer, not a weight", source_name)
        else:
            source.add(name, tensors[source_name], source_name)
    source.drop_tied_copies()
    return source


def hugging_face_names(names: Iterable[str]) -> list[str]:
    """Without the prefix of a data-parallel wrapper, with `bert.` before the encoder's names, and with LayerNorm's
    new names (`weight` and `bias`)."""
    names = list(names)
    if all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    names = [
        re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda match: OLD_LAYER_NORM_NAMES[match[1]], name) for name in names
    ]
    if any(name.startswith("bert.") for name in names):
        return names
    return [name if name.startswith(HEAD_PREFIXES) else f"bert.{name}" for name in names]


def find_file(source: Path, suffix: str) -> Path:
    """The file that SOURCE names: a file, a path without its suffix, or a folder with one such file.

    Raises UserError if there is none, or several."""
    if source.is_file():
        return source
    if source.is_dir():
        files = sorted(source.glob(f"*{suffix}"))
        if len(files) == 1:
            return files[0]
        found = ", ".join(path.name for path in files) or "none"
        raise UserError(f"{source}: expected one *{suffix} file, found {found}: give the path of the file")
    with_suffix = source.with_name(source.name + suffix)
    if with_suffix.is_file():
        return with_suffix
    raise UserError(f"{source} does not exist, nor does {with_suffix.name} beside it: check SOURCE")
