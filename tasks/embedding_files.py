"""Sentence embeddings: files of pairs and triplets of texts, and sentence-transformers' files of a model folder."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tasks.squad_file import read_squad
from utils.command_line import option, optional_path, positive_float, positive_int
from utils.errors import UserError
from utils.files import read_json, read_json_object
from utils.tables import TextFile, read_rows

POOLINGS = {"mean": "mean", "first": "cls"}  # and their names in sentence-transformers
PROMPTS = ("query", "document")
MODULES_FILE, PROMPTS_FILE = "modules.json", "config_sentence_transformers.json"


LOSSES = ("contrastive", "cosent", "cosine")
EMBEDDING = ("--task-name embedding",)
TRAIN = (*EMBEDDING, "--do-train")


# fmt: off
@dataclass(frozen=True)
class EmbeddingOptions:
    """How sentence embeddings are trained and scored."""

    negative_columns: list[str] | None = option("--negative-columns", str, None, "columns of hard negatives", TRAIN,
        options={"nargs": "+", "metavar": "NAME"})
    corpus_file: Path | None = option("--corpus-file", optional_path, None,
        "further texts among which the second texts of --eval-file have to be found, in a column of the same name",
        (*EMBEDDING, "--do-eval"))
    embedding_loss: str | None = option("--embedding-loss", LOSSES, None,
        "contrastive: the second text among all others of the global batch; cosent: order of the pairs by their score; "
        "cosine: squared error of the cosine. By default contrastive, with --label-column cosent", TRAIN, result=True)
    temperature: float = option("--temperature", positive_float, 0.05, "divisor of cosines in the loss", TRAIN,
        result=True)
    symmetric_loss: bool = option("--symmetric-loss", bool, False,
        "contrastive: also the first text among all first texts", TRAIN, result=True)
    matryoshka_dims: list[int] | None = option("--matryoshka-dims", positive_int, None,
        "sum the losses of the first so many dimensions", TRAIN, options={"nargs": "+"}, result=True)
    pooling: str | None = option("--pooling", tuple(POOLINGS), None,
        "mean of the tokens, or the first token; by default as the starting folder says, else mean", EMBEDDING,
        result=True)
    query_prompt: str | None = option("--query-prompt", str, None, "put before first texts", EMBEDDING, result=True)
    document_prompt: str | None = option("--document-prompt", str, None, "put before all other texts", EMBEDDING,
        result=True)
# fmt: on


class TextTuples(NamedTuple):
    """texts: distinct texts. rows: indices of the k texts of each sample: an anchor, its positive, and hard negatives.
    scores: similarities of pairs, or None."""

    texts: list[str]
    rows: list[list[int]]
    scores: list[float] | None


def read_tuples(path: Path, columns: Sequence[str], score: str | None, prompts: Sequence[str] = ("", "")) -> TextTuples:
    """Reads the texts in `columns` of a table. Without columns: neighbouring lines of a .txt file, where an empty line
    ends a document, or the questions of SQuAD's .json with their paragraphs. prompts: put before the first text, and
    before the others. Raises UserError naming the bad line."""
    index: dict[str, int] = {}
    rows, scores = [], []
    file = TextFile(path)
    pairs = squad_pairs if path.suffix == ".json" else neighbouring_lines
    for number, values, value in table_rows(file, columns, score) if columns else pairs(file):
        for text in values:
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"{file.where(number)}: a text is {text!r}, expected a string with words: correct it")
        prompted = [prompts[min(place, 1)] + text for place, text in enumerate(values)]
        rows.append([index.setdefault(text, len(index)) for text in prompted])
        scores.append(value)
    if not rows:
        raise UserError(f"{path} has no pairs of texts: check the file")
    return TextTuples(list(index), rows, None if score is None else scores)


def table_rows(file: TextFile, columns: Sequence[str], score: str | None) -> Iterator[tuple[int, list[Any], float]]:
    for number, row in read_rows(file, [*columns, *([] if score is None else [score])], exact=True):
        value = 0.0
        if score is not None:
            try:
                value = float(row.get(score))
            except (TypeError, ValueError):
                value = math.nan
            if not math.isfinite(value):
                raise UserError(f"{file.where(number)}: {score!r} is {row.get(score)!r}, expected a number: correct it")
        yield number, [row.get(name) for name in columns], value


def neighbouring_lines(file: TextFile) -> Iterator[tuple[int, list[str], float]]:
    before = ""
    for line in file:
        if before and line.strip():
            yield file.number, [before, line.strip()], 0.0
        before = line.strip()


def squad_pairs(file: TextFile) -> Iterator[tuple[int, list[str], float]]:
    squad = read_squad(file.path)
    for number, question in enumerate(squad.questions, 1):
        yield number, [question.text, squad.contexts[question.context]], 0.0


def read_corpus(path: Path, column: str, prompt: str) -> list[str]:
    """The texts in a column of a table, with `prompt` before them."""
    file = TextFile(path)
    texts = []
    for number, row in read_rows(file, [column]):
        if not isinstance(text := row.get(column), str):
            raise UserError(f"{file.where(number)}: {column!r} is {text!r}, expected a string: correct the line")
        texts.append(prompt + text)
    if not texts:
        raise UserError(f"{path} has no rows: check the file")
    return texts


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
            "sentence_bert_config.json": {"max_seq_length": max_seq_length, "do_lower_case": False},
            PROMPTS_FILE: {
                "prompts": dict.fromkeys(PROMPTS, "") | self.prompts,
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        }
        values |= {f"{path}/config.json": {} for path in paths[2:]}
        return {name: json.dumps(value, indent=2).encode() + b"\n" for name, value in values.items()}
