"""Files and folders of other tools that are not read as they are: what each is, and the way out.

One table, in two parts, which is asked before an error of a path that cannot be read.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bert_recipe.utils.errors import UserError, listed

OTHER_TOOLS = "docs/other_tools.md"
LABEL_STUDIO = f"this is Label Studio's JSON: convert it as {OTHER_TOOLS} says"

Find = Callable[[Path], list[Path]]


class KnownTool(NamedTuple):
    """find: what shows that a path is of the tool; empty if it is not.
    says: {path}, {first}, the first of what was found, and {names}, the names of all.
    """

    find: Find
    says: str


def has(*patterns: str) -> Find:
    """A folder with a file of each of the patterns; finds those of the last one."""

    def find(path: Path) -> list[Path]:
        if not path.is_dir():
            return []
        matches = [sorted(path.glob(pattern)) for pattern in patterns]
        return matches[-1] if all(matches) else []

    return find


def ends_with(*endings: str) -> Find:
    """A file of such a name, or a folder that has one."""

    def find(path: Path) -> list[Path]:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return [file for file in files if file.is_file() and file.name.lower().endswith(endings)]

    return find


def is_named(*endings: str) -> Find:
    """A file of such a name."""
    return lambda path: [path] if path.is_file() and path.name.lower().endswith(endings) else []


def begins(pattern: str, names: tuple[str, ...] = ("",)) -> Find:
    """A file whose first line begins so, and whose name ends with one of `names`."""

    def find(path: Path) -> list[Path]:
        if not path.is_file() or not path.name.endswith(names):
            return []
        with path.open("rb") as file:
            first_line = file.readline(1024).decode("utf-8", "replace")
        return [path] if re.match(pattern, first_line) else []

    return find


SHOWN_RUNS = "{path} has the runs {names}: name one of them, such as {first}"
MODELS = (
    KnownTool(
        ends_with(".pdparams", ".pt", ".pth"),
        "{first} is a checkpoint of another project: make a model folder of it with "
        "convert_checkpoint.py, and give that to --from-pretrained-params",
    ),
    KnownTool(
        has("adapter_config.json"),
        "{path} is an adapter that is not merged with its model: merge it with PEFT "
        "(merge_and_unload), save it with save_pretrained, and give that folder",
    ),
    KnownTool(
        ends_with(".h5", ".msgpack", ".onnx", ".gguf", ".ckpt.index", ".ckpt", ".distcp"),
        "{first} has weights in a format that is not read: get the model with model.safetensors, "
        "as most have on the hub, or save it with transformers' save_pretrained",
    ),
    KnownTool(has("seed-*/"), SHOWN_RUNS),
    KnownTool(has("fold-*/"), SHOWN_RUNS),
    KnownTool(
        has("checkpoint-*/config.json", "checkpoint-*/"),
        "{path} is an output folder of transformers' Trainer: name one of its checkpoints, such as "
        "{first}",
    ),
    KnownTool(
        has("refs", "snapshots/*/"),
        "{path} is a model's folder in the hub's cache: name what is in it, {first}",
    ),
    KnownTool(
        has("models--*/snapshots/*/"),
        "{path} is the hub's cache: name a model in it, such as {first}",
    ),
    KnownTool(
        has("modules.json", "0_*/config.json"),
        "{path} has the old layout of sentence-transformers: save it anew with "
        "SentenceTransformer(FOLDER).save_pretrained(NEW_FOLDER), and give that folder",
    ),
    KnownTool(
        begins(r"\S+ \d+\s*$", ("vocab.txt", "dict.txt")),
        "{path} is a dictionary with counts, as PhoBERT has, and no tokenizer: use a model with a "
        "tokenizer.json",
    ),
)
DATA = (
    KnownTool(
        is_named(".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".xz", ".7z", ".rar"),
        "{path} is an archive: unpack it, and name the file that is in it",
    ),
    KnownTool(is_named(".xlsx", ".xls", ".ods"), "{path} is a spreadsheet: save it as CSV"),
    KnownTool(
        has("dataset_dict.json"),
        "{path} has data sets of save_to_disk: write each split as a file, with "
        "load_from_disk(FOLDER)['train'].to_parquet('train.parquet')",
    ),
    KnownTool(
        has("dataset_info.json", "*.arrow"),
        "{path} is a data set of save_to_disk: write it as a file, with "
        "load_from_disk(FOLDER).to_parquet('train.parquet')",
    ),
    KnownTool(
        has("queries.jsonl", "corpus.jsonl"),
        f"{{path}} is a data set of BEIR: make pairs of it as {OTHER_TOOLS} says",
    ),
    KnownTool(
        has("*.txt", "*.ann"), f"{{path}} has files of brat: convert them as {OTHER_TOOLS} says"
    ),
    KnownTool(
        begins("__label__"), f"{{path}} has lines of fastText: convert them as {OTHER_TOOLS} says"
    ),
    KnownTool(
        begins(r"\W*Sentence #\W+Word\b"),
        f"{{path}} has a sentence in several rows, as Kaggle's tags: convert it as {OTHER_TOOLS} "
        "says",
    ),
    KnownTool(
        begins(r"#FORMAT=WebAnno TSV"),
        "{path} is WebAnno's TSV: export it as CoNLL 2002",
    ),
    KnownTool(
        lambda path: [] if path.suffix.lower() == ".gz" else begins(r"PK\x03\x04|\x1f")(path),
        "{path} is compressed, which its name does not say: unpack it, and save a spreadsheet as "
        "CSV",
    ),
    KnownTool(
        begins(r"(?i)\s*<(!doctype html|html)"),
        "{path} is a web page: download the file that it shows",
    ),
    KnownTool(
        lambda path: has("**/wiki_00")(path) or has("**/wiki_00.bz2")(path),
        "{path} is WikiExtractor's output: give its files names that end with .txt, or of its "
        "--json with .jsonl, before .bz2 where it compressed them",
    ),
)


def refuse_known(path: Path, tools: Sequence[KnownTool]) -> None:
    """Raises UserError if `path` is of one of the tools: MODELS or DATA."""
    for tool in tools:
        if matches := tool.find(path):
            names = listed([match.name for match in matches])
            raise UserError(tool.says.format(path=path, first=matches[0], names=names))
