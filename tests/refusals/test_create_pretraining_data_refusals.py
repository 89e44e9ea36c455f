"""What create_pretraining_data.py refuses, before it leaves a shard."""

import gzip

from conftest import VOCAB_FILE
from refusal_tables import Refusal, refusals

import create_pretraining_data

TEXT = "--input-file {folder}/text.txt"


def text(content: str | bytes) -> dict[str, str | bytes]:
    return {"text.txt": content}


FLAGS = [
    (f"{TEXT} {flags}", says, text("Some text.\n\n" * 9))
    for flags, says in (
        ("--max-seq-length 4", "sequence length 4...--max-seq-length"),
        (
            "--max-seq-length 64 --max-predictions-per-seq 62",
            "62...--max-predictions-per-seq...1 to 61",
        ),
        ("--max-seq-length 512", "0.15 of 512 tokens takes 77...at most 20...allow 77"),
        ("--masked-lm-prob 0.4", "0.4 of 128 tokens takes 51"),
        ("--vocab-file {folder}/none.txt", "none.txt...does not exist"),
        ("--masked-lm-prob 1.5", "--masked-lm-prob"),
        ("--pack-documents", "--pack-documents...--no-nsp"),
        ("--pack-documents --no-nsp --short-seq-prob 0.2", "--short-seq-prob"),
        # Masks that are made, and masks that training draws.
        (
            "--dynamic-masking --masked-lm-prob 0.2",
            "--masked-lm-prob cannot be combined with --dynamic",
        ),
        (
            "--dynamic-masking --whole-word-mask",
            "--whole-word-mask cannot be combined with --dynamic",
        ),
        (
            "--dynamic-masking --max-predictions-per-seq 3",
            "--max-predictions-per-seq cannot be combined",
        ),
    )
]
FILES = [
    (TEXT, "text.txt: no such file"),
    ("--input-file {folder}/empty", "contains no *.txt", {"empty/a": ""}),
    (TEXT, "text.txt...contains no word", text(" \n\n\t\n")),
    (TEXT, "text.txt...line 3...UTF-8", text(b"good\nline\nb\xffd\n")),
    (TEXT, "text.txt...is one document...--no-nsp", text("Only.\n")),
    (TEXT, "text.txt...line 1...NUL", text("\n".join(["Some text."] * 9).encode("utf-16-le"))),
    (
        TEXT,
        "text.txt...% of the tokens are [UNK]...vocabulary",
        text("\n\n".join(["สวัสดี ชาวโลก 🙂."] * 9)),
    ),
    (
        "--input-file {folder}/text.jsonl",
        "text.jsonl...format corpus",
        {"text.jsonl": '{"text": "A text."}\n'},
    ),
    (
        "--input-file {folder}/text.txt.gz",
        "text.txt.gz...truncated",
        {"text.txt.gz": gzip.compress(b"word " * 9999, mtime=0)[:-20]},
    ),
]


@refusals(*FLAGS, *FILES)
def test_create_pretraining_data_refuses(refusal: Refusal, tmp_path):
    command = ("--output-dir", tmp_path / "out", "--vocab-file", VOCAB_FILE, "--num-workers", 1)
    refusal.check(create_pretraining_data.main, map(str, command), tmp_path)
