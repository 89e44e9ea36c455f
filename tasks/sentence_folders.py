"""Model folders of sentence-transformers: pooling, normalization, prompts and the length of texts."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files import read_json, read_json_object

POOLINGS = {"mean": "mean", "first": "cls"}  # and their names in sentence-transformers
PROMPTS = ("query", "document")
MODULES_FILE, PROMPTS_FILE = "modules.json", "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"


@dataclass(frozen=True)
class EmbeddingSettings:
    """How a model folder embeds texts: pooling (a key of POOLINGS), normalization, and prompts by their names."""

    pooling: str = "mean"
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "EmbeddingSettings":
        """Reads sentence-transformers' files; without them, its default. Raises UserError for other modules."""
        if not (folder / MODULES_FILE).is_file():
            return cls()
        entries = read_json(folder / MODULES_FILE, "modules")
        is_valid = isinstance(entries, list) and all(
            isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path"), str)
            for entry in entries
        )
        if not is_valid:
            raise UserError(f"{folder / MODULES_FILE} is no list of modules with type and path: fetch it again")
        modules = {entry["type"].rpartition(".")[2]: entry["path"] for entry in entries}
        values = read_json_object(folder / modules.get("Pooling", "") / "config.json", "the pooling's config")
        modes = [values["pooling_mode"]] if "pooling_mode" in values else []
        old = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
        modes += [old.get(key, key) for key in values if key.startswith("pooling_mode_") and values[key] is True]
        pooling = [ours for ours, theirs in POOLINGS.items() if modes == [theirs]]
        if not pooling or modules.keys() - {"Transformer", "Pooling", "Normalize"} or "Pooling" not in modules:
            raise UserError(
                f"{folder} embeds with {', '.join(map(str, [*modules, *modes]))}: only the mean of tokens and the "
                "first token are supported"
            )
        path = folder / PROMPTS_FILE
        prompts = read_json_object(path, "the prompts").get("prompts") if path.is_file() else None
        prompts = {name: text for name, text in (prompts or {}).items() if isinstance(text, str) and text}
        return cls(pooling[0], "Normalize" in modules, prompts)

    def files(self, hidden_size: int, max_seq_length: int) -> dict[str, bytes]:
        """The files with which sentence-transformers embeds in the same way, by name."""
        kinds = ["Transformer", "Pooling", *(["Normalize"] if self.normalize else [])]
        paths = [f"{index}_{kind}" if index else "" for index, kind in enumerate(kinds)]
        theirs = POOLINGS[self.pooling]
        pooling = {"word_embedding_dimension": hidden_size, "include_prompt": True}
        pooling |= {"pooling_mode_mean_tokens": theirs == "mean", "pooling_mode_cls_token": theirs == "cls"}
        values: dict[str, Any] = {
            MODULES_FILE: [
                {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
            ],
            f"{paths[1]}/config.json": pooling,
            LENGTH_FILE: {"max_seq_length": max_seq_length, "do_lower_case": False},
            PROMPTS_FILE: {
                "prompts": dict.fromkeys(PROMPTS, "") | self.prompts,
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        }
        values |= {f"{path}/config.json": {} for path in paths[2:]}
        return {name: json.dumps(value, indent=2).encode() + b"\n" for name, value in values.items()}


def read_sentence_config(folder: Path) -> dict[str, Any]:
    """sentence-transformers' settings of the encoder, or an empty dict."""
    path = folder / LENGTH_FILE
    types = {"max_seq_length": int, "do_lower_case": bool}
    return read_json_object(path, "the config", types) if path.is_file() else {}
