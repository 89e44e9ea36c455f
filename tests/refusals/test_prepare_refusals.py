"""What data/prepare.py refuses, before anything is written."""

import bz2
import os

import h5py
import pytest
from conftest import ROOT, sample_rows, write_shard
from prepared_data import SAMPLE
from refusal_tables import Refusal, refusals

from data import prepare

BOOKS = f"all books {SAMPLE}"


def negative_token(path) -> None:
    """Which no shard can have."""
    write_shard(path, sample_rows(50, 32, 5, seed=3), compression="gzip")
    with h5py.File(path, "r+") as file:
        file["input_ids"][7, 3] = -1


COMMAND_LINES = [
    ("nonsense", "nonsense"),
    (("all", "corpus", ""), "the value is empty"),
    ("all corpus", "name the text"),
    ("format corpus", "name the text: format corpus PATH"),
    (f"all wiki_books {SAMPLE}", "name the books: --books FOLDER; PATH is"),
    ("all books", "all books: name the text"),
    ("download squad --language de", "--language"),
    (f"all books {SAMPLE} --mirror http://a", "--mirror"),
    ("download wikicorpus --squad-version 1.1", "--squad-version"),
    ("format corpus text --dump-date 20260101", "--dump-date"),
    ("format wikicorpus --text-field body", "--text-field"),
    ("all corpus text --vocab-size 1000", "--vocab-size"),
    ("all wiki_only --books b", "--books"),
    ("all squad --lengths 128:20", "--lengths"),
    (f"{BOOKS} --test-fraction 1", "--test-fraction"),
    (f"format corpus {SAMPLE} --language ../de", "--language"),
    (f"{BOOKS} --shard-mb 0", "--shard-mb"),
    ("hdf5 --lengths 128:20 --dynamic-masking", "128:20"),
    ("hdf5 --lengths 128", "128:20"),
    (f"{BOOKS} --lengths 100000:5", "sequence length 100000"),
    (f"{BOOKS} --masked-lm-prob 0.3", "0.3 of 128 tokens takes 38...at most 20...--lengths"),
    (f"{BOOKS} --bert-config /nowhere.json --train-vocab", "/nowhere.json"),
    ("vocabulary --tokenizer bpe --alphabet 50", "--alphabet has no effect without --tokenizer wo"),
    ("vocabulary --add 5", "--add has no effect without --extend"),
    ("vocabulary --extend m --replace m", "--extend cannot be combined with --replace"),
    ("vocabulary --extend m --vocab-size 500", "--extend cannot be combined with --vocab-size"),
    ("vocabulary --extend m --alphabet 500", "--extend cannot be combined with --alphabet"),
    (
        "vocabulary --replace m --bert-config c.json",
        "--replace cannot be combined with --bert-config",
    ),
    (
        "all corpus text --extend m --add 20 --lengths 64 --vocab-file v.txt",
        "--vocab-file cannot be combined with --train-vocab, --extend",
    ),
    ("all corpus text --train-vocab --vocab-file v.txt", "--vocab-file cannot be combined with"),
]
FILES = [
    (f"all corpus {ROOT / 'vocab' / 'README.md'}", "contains no .txt"),
    ("all corpus {folder}/in", "no .txt...but hidden ones, such as .a.txt", {"in/.a.txt": "A b."}),
    (f"format wikicorpus {ROOT / 'bert_configs' / 'x.xml'}", "does not exist"),
    (f"all corpus {SAMPLE} --output-dir {SAMPLE / 'out'}", "whose files would become text"),
    *(
        (
            "format wikicorpus {folder}/other.xml.bz2",
            "other.xml.bz2: does not start like a Wikipedia dump",
            {"other.xml.bz2": content},
        )
        for content in (
            b"no dump",
            b"<mediawiki>" * 5,
            bz2.compress(b"no dump"),
            b"BZh9" + bytes(100),
        )
    ),
    ("format wikicorpus {folder}/a.xml.bz2", "a.xml.bz2 is empty", {"a.xml.bz2": b""}),
    (f"format corpus {SAMPLE} --text-field body", "--text-field has no effect on .txt files"),
    (
        "all corpus {folder}/a.jsonl --empty-line document",
        "--empty-line has no effect on tables",
        {"a.jsonl": '{"text": "A text."}\n'},
    ),
    (f"{BOOKS} --scheduler nonsense", "scheduler file nonsense does not exist"),
    ("shard", "run the format stage first"),
    ("hdf5", "run the shard stage first"),
    ("vocabulary --extend /nowhere", "model folder /nowhere does not exist"),
    (
        "format corpus {folder}/pipe.txt",
        "pipe.txt: a part of the path is not a folder",
        {"pipe.txt": os.mkfifo},
    ),
    (
        "vocabulary --sharded {folder}/text --vocab-size 20",
        "--vocab-size",
        {"text/a.txt": "a text of some words.\n" * 40},
    ),
    ("vocabulary --sharded {folder}/text", "no words", {"text/a.txt": "\n\n"}),
]
SHARDS = [
    ("verify /nowhere", "no HDF5 shard"),
    ("repack {folder}/none", "contains no HDF5 shard"),
    (
        "repack {folder}/shards --num-workers 1",
        "a.h5, row 7...input_ids",
        {"shards/a.h5": negative_token},
    ),
]


@refusals(*COMMAND_LINES, *FILES, *SHARDS)
def test_prepare_refuses(refusal: Refusal, tmp_path, monkeypatch):
    if "--scheduler" in refusal.flags:
        pytest.importorskip("distributed")
    monkeypatch.setenv("BERT_PREP_WORKING_DIR", str(tmp_path / "data"))
    refusal.check(prepare.main, [], tmp_path)
