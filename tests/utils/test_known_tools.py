"""Files and folders of other tools: each is named in one line with the way out."""

import gzip
from pathlib import Path

import pytest

from bert_recipe.checkpoint.folder import find_model_folder
from bert_recipe.data_preparation.engine.input_files import find_files
from bert_recipe.tasks.classification.files import read_examples
from bert_recipe.tasks.classification.specs import custom_spec
from bert_recipe.tasks.ner.files import read_sentences
from bert_recipe.tasks.squad.files import read_squad
from bert_recipe.tokenization.files import find_tokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.known_tools import DATA, MODELS

# Of each tool: what makes it, in a folder; the name that the user gives, below it; and what is said
# of it.
MODEL_FOLDERS = {
    "another project": (["ckpt_8601.pt"], "", "ckpt_8601.pt is a checkpoint of another project"),
    "adapter": (
        ["adapter_config.json", "adapter_model.safetensors"],
        "",
        "an adapter that is not merged with its model: merge it with PEFT",
    ),
    "seeds": (
        ["seed-1/scores.json", "seed-2/scores.json"],
        "",
        "has the runs seed-1, seed-2: name one of them, such as {folder}/seed-1",
    ),
    "folds": (["fold-1/scores.json"], "", "has the runs fold-1: name one"),
    "Trainer": (
        ["checkpoint-500/config.json", "checkpoint-500/model.safetensors", "runs/events"],
        "",
        "an output folder of transformers' Trainer: name one of its checkpoints, such as "
        "{folder}/checkpoint-500",
    ),
    "TensorFlow": (["bert_model.ckpt.index"], "", "bert_model.ckpt.index has weights in a format"),
    "Keras": (["config.json", "tf_model.h5"], "", "tf_model.h5 has weights in a format"),
    "cached model": (
        ["models--a--b/refs/main", "models--a--b/snapshots/12ab/config.json"],
        "models--a--b",
        "the hub's cache: name what is in it, {folder}/models--a--b/snapshots/12ab",
    ),
    "cache": (
        ["models--a--b/refs/main", "models--a--b/snapshots/12ab/config.json"],
        "",
        "is the hub's cache: name a model in it, such as {folder}/models--a--b/snapshots/12ab",
    ),
    "old layout": (
        ["modules.json", "0_Transformer/config.json", "0_Transformer/model.safetensors"],
        "",
        "the old layout of sentence-transformers: save it anew with",
    ),
}
DATA_CONTENTS = {
    "a spreadsheet": (b"PK\x03\x04" + bytes(30), "is compressed, which its name does not say"),
    "gzip": (gzip.compress(b"text,label\na,b\n"), "is compressed, which its name does not say"),
    "Kaggle's tags": (
        b"Sentence #,Word,POS,Tag\nSentence: 1,Thousands,NNS,O\n,of,IN,O\n",
        "has a sentence in several rows, as Kaggle's tags: convert it as docs/other_tools.md",
    ),
    "WebAnno": (b"#FORMAT=WebAnno TSV 3.2\n\n\n", "is WebAnno's TSV: export it as CoNLL 2002"),
    "a web page": (b"<!DOCTYPE html>\n<html>\n", "is a web page: download the file that it shows"),
}
DATA_FILES = {
    "archive": (["train.zip"], "train.zip", "train.zip is an archive: unpack it"),
    "tar": (["train.tar.gz"], "train.tar.gz", "train.tar.gz is an archive: unpack it"),
    "spreadsheet": (["a.xlsx"], "a.xlsx", "a.xlsx is a spreadsheet: save it as CSV"),
    "data sets": (["dataset_dict.json", "train/state.json"], "", "data sets of save_to_disk"),
    "data set": (["dataset_info.json", "a.arrow"], "", "is a data set of save_to_disk: write it"),
    "BEIR": (
        ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"],
        "",
        "is a data set of BEIR: make pairs of it as docs/other_tools.md says",
    ),
    "brat": (["a.txt", "a.ann"], "", "has files of brat: convert them as docs/other_tools.md"),
    "fastText": (["a.txt"], "a.txt", "has lines of fastText: convert them as docs/other_tools.md"),
    "WikiExtractor": (["AA/wiki_00"], "", "is WikiExtractor's output: give its files names"),
    "compressed": (["wiki_00.bz2"], "", "that end with .txt, or of its --json with .jsonl, before"),
}
SPEC = custom_spec("text", None, "label")


def make(folder: Path, names: list[str]) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("__label__x a text\n")


def says(folder: Path, message: str) -> str:
    return message.format(folder=folder)


def test_each_row_of_the_table_is_tried():
    counted_dictionary, other_weights = 1, 1
    assert len(MODELS) == len(MODEL_FOLDERS) + counted_dictionary - other_weights
    archives_and_wikis, compressed = 2, 1
    assert len(DATA) == len(DATA_FILES) - archives_and_wikis + len(DATA_CONTENTS) - compressed


@pytest.mark.parametrize("kind", DATA_CONTENTS)
def test_content_that_is_no_table_is_named(tmp_path, kind):
    content, message = DATA_CONTENTS[kind]
    for name in ("a.csv", "a.tsv"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_examples(tmp_path / name, SPEC, labelled=True)
        with pytest.raises(UserError, match=message):  # also where words and tags are read
            read_sentences(tmp_path / name, tagged=True)


@pytest.mark.parametrize("kind", MODEL_FOLDERS)
def test_folders_without_a_model_are_named(tmp_path, kind):
    names, given, message = MODEL_FOLDERS[kind]
    make(tmp_path, names)
    with pytest.raises(UserError) as error:
        find_model_folder(tmp_path / given)
    assert says(tmp_path, message) in str(error.value)


@pytest.mark.parametrize("kind", DATA_FILES)
def test_data_of_other_tools_is_named(tmp_path, kind):
    names, given, message = DATA_FILES[kind]
    make(tmp_path, names)
    with pytest.raises(UserError) as error:
        read_examples(tmp_path / given, SPEC, labelled=True)
    if kind == "fastText":  # lines of .txt are a table for programs with flags
        return
    assert says(tmp_path, message) in str(error.value)
    with pytest.raises(UserError, match=r"unpack|save|convert|make|write|give|name"):
        find_files([str(tmp_path / given)], [".csv"])


def test_lines_of_fasttext_are_named(tmp_path):
    for name in ("a.txt", "a.train"):
        make(tmp_path, [name])
        with pytest.raises(UserError, match="has lines of fastText: convert them as docs/other_to"):
            read_examples(tmp_path / name, SPEC, labelled=True)


def test_an_archive_of_squad_is_named(tmp_path):
    make(tmp_path, ["squad.zip"])
    with pytest.raises(UserError, match="is an archive: unpack it"):
        read_squad(tmp_path / "squad.zip")


def test_a_dictionary_with_counts_is_no_vocabulary(tmp_path):
    (tmp_path / "vocab.txt").write_text("và 130\ncủa 120\n")
    with pytest.raises(UserError, match="is a dictionary with counts, as PhoBERT has, and no tok"):
        find_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\nvà\n")
    find_tokenizer(tmp_path)
