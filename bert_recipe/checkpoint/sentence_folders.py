"""Model folders of sentence-transformers: pooling, normalization, prompts, lengths of texts."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject, json_bytes, list_of, read_json

# --help does not wait for packages that functions import.
if TYPE_CHECKING:
    import numpy as np

POOLINGS = {"mean": "mean", "first": "cls"}  # and their names in sentence-transformers
# text-embeddings-inference wants a value for each of these.
OTHER_POOLING_FLAGS = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens")
POOLING_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
PROMPTS = ("query", "document")
MODULES_FILE, PROMPTS_FILE = "modules.json", "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
CLASSIFIER_MODULES = ("LayerNorm", "Dense")
# Beside modules that embed: the classifier of how two vectors compare, tensors weight and bias.
PAIR_CLASSIFIER_FILE = "pair_classifier.safetensors"
MODULE = {"type": str, "path": str}


def read_text_settings(folder: Path) -> JsonObject:
    """What is done to texts before the encoder; None is what the file does not say."""
    path = folder / LENGTH_FILE
    kind = {"max_seq_length": int | None, "do_lower_case": bool | None}
    return read_json(path, "the config", kind) if path.is_file() else dict.fromkeys(kind)


def pooling_modes(values: JsonObject) -> list[Any]:
    """What a pooling's config selects, by the names of today's sentence-transformers. Older ones
    have a flag for each mode.
    """
    modes = [values["pooling_mode"]] if "pooling_mode" in values else []
    for key, value in values.items():
        if key.startswith("pooling_mode_") and value is True:
            modes.append(POOLING_FLAGS.get(key, key))
    return modes


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """The prompts by their names, and the name of the default prompt."""
    path = folder / PROMPTS_FILE
    if not path.is_file():
        return {}, None
    kind = {"prompts": dict[str, str | None] | None, "default_prompt_name": str | None}
    values = read_json(path, "the prompts", kind)
    default = values["default_prompt_name"]
    named = {name: text or "" for name, text in (values["prompts"] or {}).items()}
    if default:  # an empty prompt takes the place of the default one
        return dict.fromkeys(PROMPTS, "") | named, default
    return {name: text for name, text in named.items() if text}, default


@dataclass(frozen=True)
class EmbeddingSettings:
    """How a model folder embeds texts: pooling (a key of POOLINGS), normalization, prompts by their
    names, casing. default_prompt: the name of the prompt of texts that have none of their own.
    max_seq_length: tokens at which texts are cut; 0: the folder does not say.
    """

    pooling: str = "mean"
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    do_lower_case: bool = False  # before the tokenizer, which may be cased
    max_seq_length: int = 0

    def prompted(self, name: str | None, text: str = "") -> str:
        """`text` after the prompt `name`, as it is tokenized; after the default prompt if there is
        no such prompt, or none is named.
        """
        prompt = ""
        for key in (self.default_prompt, name):
            if key is not None:
                prompt = self.prompts.get(key, prompt)
        text = prompt + text
        return text.lower() if self.do_lower_case else text

    def with_query_prompt(self, prompt: str | None) -> "EmbeddingSettings":
        """With the prompt `query` that is given; None: the same."""
        return self if prompt is None else replace(self, prompts=self.prompts | {"query": prompt})

    @classmethod
    def read(cls, folder: Path, classifier: Collection[str] = ()) -> "EmbeddingSettings":
        """Reads sentence-transformers' files in a model folder; without them, its default settings.
        Raises UserError for settings that are not supported. classifier: names of modules after
        those that embed, which may be there.
        """
        texts = read_text_settings(folder)
        do_lower_case, max_seq_length = bool(texts["do_lower_case"]), texts["max_seq_length"] or 0
        if not (folder / MODULES_FILE).is_file():
            return cls(do_lower_case=do_lower_case, max_seq_length=max_seq_length)
        paths_of_modules = {}
        for entry in read_modules(folder):
            # "sentence_transformers.models.Pooling"
            name = entry["type"].rpartition(".")[2]
            paths_of_modules[name] = entry["path"]
        pooling_file = folder / paths_of_modules.get("Pooling", "") / "config.json"
        pooling_config = read_json(pooling_file, "the pooling's config")
        modes = pooling_modes(pooling_config)
        pooling = None
        for name, mode in POOLINGS.items():
            if modes == [mode]:
                pooling = name
        known_modules = {"Transformer", "Pooling", "Normalize", *classifier}
        unknown_modules = paths_of_modules.keys() - known_modules
        if pooling is None or unknown_modules or "Pooling" not in paths_of_modules:
            names = ", ".join(map(str, [*paths_of_modules, *modes]))
            raise UserError(
                f"{folder} embeds with {names}: only the mean of tokens and the first token are "
                f"supported"
            )
        prompts, default_prompt = read_prompts(folder)
        if any(prompts.values()) and pooling_config.get("include_prompt") is False:
            raise UserError(
                f"{pooling_file} leaves prompts out of the mean, which is not supported: use "
                f"another model"
            )
        return cls(
            pooling=pooling,
            normalize="Normalize" in paths_of_modules,
            prompts=prompts,
            default_prompt=default_prompt,
            do_lower_case=do_lower_case,
            max_seq_length=max_seq_length,
        )

    def files(self, hidden_size: int, max_seq_length: int) -> dict[str, bytes]:
        """The files with which sentence-transformers embeds in the same way, by name."""
        pooling = {"word_embedding_dimension": hidden_size, "include_prompt": True}
        pooling |= {flag: mode == POOLINGS[self.pooling] for flag, mode in POOLING_FLAGS.items()}
        pooling |= dict.fromkeys(OTHER_POOLING_FLAGS, False)
        paths = {"Transformer": "", "Pooling": "1_Pooling"}
        if self.normalize:
            paths["Normalize"] = "2_Normalize"
        modules = []
        for index, (kind, path) in enumerate(paths.items()):
            class_name = f"sentence_transformers.models.{kind}"
            modules.append({"idx": index, "name": str(index), "path": path, "type": class_name})
        values: JsonObject = {f"{paths['Pooling']}/config.json": pooling}
        if self.normalize:
            values[f"{paths['Normalize']}/config.json"] = {}
        values[MODULES_FILE] = modules
        values[LENGTH_FILE] = {
            "max_seq_length": max_seq_length,
            "do_lower_case": self.do_lower_case,
        }
        values[PROMPTS_FILE] = {
            "prompts": dict.fromkeys(PROMPTS, "") | self.prompts,
            "default_prompt_name": self.default_prompt,
            "similarity_fn_name": "cosine",
        }
        return {name: json_bytes(value) for name, value in values.items()}


def read_modules(folder: Path) -> list[JsonObject]:
    """The entries of a folder's MODULES_FILE. Raises UserError for a module outside the folder."""
    path = folder / MODULES_FILE
    modules = read_json(path, "modules", list_of(MODULE))
    for entry in modules:
        place = Path(entry["path"])
        if place.is_absolute() or ".." in place.parts:
            raise UserError(f"{path}: {place} is outside of the folder: use another model")
    return modules


def module_paths(folder: Path) -> dict[str, str]:
    """The folders of sentence-transformers' modules in a model folder, by name; {} without any."""
    if not (folder / MODULES_FILE).is_file():
        return {}
    paths = {}
    for entry in read_json(folder / MODULES_FILE, "modules", list_of(MODULE)):
        name = entry["type"].rpartition(".")[2]  # of "sentence_transformers.models.Pooling"
        paths[name] = entry["path"]
    return paths


def classifier_files(
    settings: EmbeddingSettings, weight_CE: "np.ndarray", bias_C: "np.ndarray", max_seq_length: int
) -> dict[str, bytes]:
    """The files of sentence-transformers whose last modules are a LayerNorm without weights and a
    linear classifier with these, by name. LayerNorm takes the place of a normalization.
    """
    import numpy as np
    from safetensors.numpy import save

    num_classes, hidden_size = weight_CE.shape
    files = replace(settings, normalize=False).files(hidden_size, max_seq_length)
    norm = {"norm.weight": np.ones(hidden_size, np.float32)}
    norm["norm.bias"] = np.zeros(hidden_size, np.float32)
    dense = {"in_features": hidden_size, "out_features": num_classes, "bias": True}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    modules = json.loads(files[MODULES_FILE])
    for kind, config, tensors in (
        ("LayerNorm", {"dimension": hidden_size}, norm),
        ("Dense", dense, {"linear.weight": weight_CE, "linear.bias": bias_C}),
    ):
        index = len(modules)
        path = f"{index}_{kind}"
        class_name = f"sentence_transformers.models.{kind}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": class_name})
        files[f"{path}/config.json"] = json_bytes(config)
        files[f"{path}/model.safetensors"] = save(tensors)
    files[MODULES_FILE] = json_bytes(modules)
    return files


def read_classifier(folder: Path) -> "tuple[EmbeddingSettings, np.ndarray, np.ndarray] | None":
    """How a folder with the files of `classifier_files` embeds texts, and the weights [C, E] and
    biases [C] of its classifier; None if it has none.
    """
    paths = module_paths(folder)
    if list(paths) != ["Transformer", "Pooling", *CLASSIFIER_MODULES]:
        return None
    from safetensors.numpy import load_file

    tensors = load_file(folder / paths["Dense"] / "model.safetensors")
    settings = EmbeddingSettings.read(folder, CLASSIFIER_MODULES)
    return settings, tensors["linear.weight"], tensors["linear.bias"]


def pair_classifier_files(
    settings: EmbeddingSettings, weight_CF: "np.ndarray", bias_C: "np.ndarray", max_seq_length: int
) -> dict[str, bytes]:
    """The files of a folder that embeds the texts of pairs, and of the classifier that compares
    their vectors, by name.
    """
    from safetensors.numpy import save

    hidden_size = weight_CF.shape[1] // 2
    tensors = save({"weight": weight_CF, "bias": bias_C})
    return settings.files(hidden_size, max_seq_length) | {PAIR_CLASSIFIER_FILE: tensors}


def read_pair_classifier(folder: Path) -> "tuple[EmbeddingSettings, np.ndarray, np.ndarray] | None":
    """How a folder with the files of `pair_classifier_files` embeds texts, and the weights [C, F]
    and biases [C]; None if it has no such classifier.
    """
    if not (folder / PAIR_CLASSIFIER_FILE).is_file():
        return None
    from safetensors.numpy import load_file

    tensors = load_file(folder / PAIR_CLASSIFIER_FILE)
    return EmbeddingSettings.read(folder), tensors["weight"], tensors["bias"]


def sentence_files(folder: Path) -> list[Path]:
    """The files of sentence-transformers in a model folder, also those of the modules after the
    encoder, which lie in folders that MODULES_FILE names.
    """
    names = (MODULES_FILE, PROMPTS_FILE, LENGTH_FILE, PAIR_CLASSIFIER_FILE)
    paths = [folder / name for name in names]
    if paths[0].is_file():
        for entry in read_modules(folder):
            if Path(entry["path"]).parts:  # the encoder lies in the folder itself
                paths += (folder / entry["path"]).rglob("*")
    return sorted({path for path in paths if path.is_file()})
