"""A model folder, opened once: its config, tokenizer, weights and name."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bert_recipe.checkpoint.folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    find_model_folder,
    is_of_run,
    model_digest,
    without_seed,
)
from bert_recipe.model.encoders.config import ModelConfig, UnsupportedModelError
from bert_recipe.tokenization.files import find_tokenizer, read_settings
from bert_recipe.tokenization.tokenizer import Tokenizer, load_tokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import file_digest
from bert_recipe.utils.json_files import JsonObject, from_json, json_digest, read_json
from bert_recipe.utils.progress import print_line

# Names and vocabularies need no torch, whose import takes seconds: here, methods import it.
if TYPE_CHECKING:
    from bert_recipe.checkpoint.rows import LazyTensor


def read_config(path: Path) -> ModelConfig:
    """The config in a file. Raises UserError if it is missing or not supported."""
    values = read_config_values(path)
    return config_of(values, path)


def read_config_values(path: Path) -> JsonObject:
    """The content of a `config.json`, which may have keys that are not used here."""
    values = read_json(path, "the config")
    from_json({"architectures": list[str] | None}, values, f"the config {path}")
    return values


def config_of(values: JsonObject, path: Path) -> ModelConfig:
    """The config in `values`, the content of the file `path`. Raises UserError if it is not
    supported.
    """
    from bert_recipe.model.encoders.registry import config_from_dict

    try:
        return config_from_dict(values)
    except UnsupportedModelError as error:
        raise UserError(f"{path}: {error}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}: correct the config") from error


class ModelFolder:
    """A folder with a model of this project or Hugging Face's. Each part is read when it is first
    needed, once. Raises UserError for parts that are missing or damaged.

    path: the folder itself, of a run's folder of steps the one that `find_model_folder` chooses.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @classmethod
    def find(cls, path: str | Path, log: Callable[[str], None] = print_line) -> "ModelFolder":
        """Opens `path`, or the model that `find_model_folder` chooses in it and verifies."""
        return cls(find_model_folder(path, log))

    def __str__(self) -> str:
        return str(self.path)

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles open the files of the weights themselves."""
        return {name: value for name, value in self.__dict__.items() if name != "tensors"}

    @property
    def name(self) -> str:
        """The model's name: the folder's own, but in `<output-dir>/<model>/<phase or
        task>[/seed-N or /fold-N]/<step>` and in Hugging Face's cache that of the model.
        """
        parent = self.path.resolve().parent
        if is_of_run(self.path.resolve()):
            return without_seed(parent).parent.name
        if parent.name == "snapshots":  # models--<organization>--<name>/snapshots/<commit>
            return parent.parent.name.rpartition("--")[2]
        if self.path.name in ("", ".."):
            return self.path.resolve().name
        return self.path.name  # of a symbolic link its own

    @property
    def has_config(self) -> bool:
        return (self.path / CONFIG_FILE).is_file()

    @cached_property
    def config_values(self) -> JsonObject:
        """The content of `config.json`."""
        return read_config_values(self.path / CONFIG_FILE)

    @cached_property
    def config(self) -> ModelConfig:
        return config_of(self.config_values, self.path / CONFIG_FILE)

    @property
    def architecture(self) -> str | None:
        """The class that the config names; None without a config, or if it names several."""
        if not self.has_config:
            return None
        names = self.config_values.get("architectures") or []
        return names[0] if len(names) == 1 else None

    @cached_property
    def tokenizer_settings(self) -> JsonObject:
        """The keys of `tokenizer_config.json` that matter, see `read_settings`."""
        return read_settings(self.path)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        file = find_tokenizer(self.path)
        return None if file is None else load_tokenizer(file)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises UserError without one."""
        if self._tokenizer is None:
            raise UserError(f"{self} has no tokenizer: copy it there")
        return self._tokenizer

    @cached_property
    def tensors(self) -> "dict[str, LazyTensor]":
        """The weights by name, which are read on demand; see `forget_tensors`."""
        from bert_recipe.checkpoint.weight_files import open_model_weights

        return open_model_weights(self.path)

    def forget_tensors(self) -> None:
        """Closes the files of `tensors`, and frees those that are not read by rows."""
        self.__dict__.pop("tensors", None)

    @cached_property
    def weights_digest(self) -> str:
        """Identifies the weights by content."""
        if (self.path / MANIFEST_FILE).is_file():
            return model_digest(self.path)
        from bert_recipe.checkpoint.weight_files import weight_paths

        paths = weight_paths(self.path, MODEL_FILE)  # what is read, not what lies beside
        return json_digest([file_digest(path) for path in paths])
