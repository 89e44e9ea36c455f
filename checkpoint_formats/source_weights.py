"""The return type of all readers."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from utils.errors import UserError

EMBEDDING = "bert.embeddings.word_embeddings.weight"
MLM_BIAS = "cls.predictions.bias"
# Copies of a tensor, and the tensor that they are tied to.
TIED = {"cls.predictions.decoder.weight": EMBEDDING, "cls.predictions.decoder.bias": MLM_BIAS}


@dataclass
class SourceWeights:
    """A source's tensors under Hugging Face's names.

    origin: name in the source of each tensor, for error messages.
    unused: names in the source that are not converted, by reason.
    notes: further messages for the user.
    hidden_act: the activation function that the weights were trained with, if the file shows it.
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
            if tied_to in self.tensors and torch.equal(tensor, self.tensors[tied_to]):
                self.skip(f"tied copy of {self.origin[tied_to]}", source_name)
            else:
                raise UserError(
                    f"{self.path}: {source_name} differs from {self.origin.get(tied_to, tied_to)}: this model ties "
                    f"them, so its masked-token head cannot be converted"
                )


def find_file(source: Path, suffix: str) -> Path:
    """Resolves SOURCE: a file, a path without its suffix, or a folder with one such file.

    Raises UserError if there are no or several files."""
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
