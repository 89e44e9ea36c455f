"""Small runs of run_glue.py on texts that a tiny model can learn by heart."""

import csv
import json
import random
from pathlib import Path

from conftest import NO_DROPOUT, TINY, VOCAB_FILE, fine_tuning_words, read_json

import run_glue

WORDS = ["ship", "river", "stone", "house", "cloud", "table", "horse", "garden", "window", "bridge"]
GOOD, BAD = ["great", "lovely", "fine"], ["awful", "poor", "sad"]


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """Texts that are good or bad by one of their words."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        label = rng.randrange(2)
        words = [*rng.sample(WORDS, rng.randrange(2, 6)), rng.choice((BAD, GOOD)[label])]
        rng.shuffle(words)
        rows.append((" ".join(words), str(label)))
    return rows


def write_tsv(path: Path, *rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


def write_csv(path: Path, *rows) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def make_files(folder: Path) -> None:
    """A config, and SST-2, RTE, STS-B, MNLI and CSV files of such texts."""
    (folder / "config.json").write_text(json.dumps({**TINY, **NO_DROPOUT}))
    tokens = VOCAB_FILE.read_text(encoding="utf-8").splitlines()
    (folder / "other.txt").write_text(
        "\n".join([*tokens[:2000], *tokens[:1999:-1]]), encoding="utf-8"
    )
    train, dev = sentences(48, 0), sentences(21, 1)
    write_tsv(folder / "SST-2" / "train.tsv", ("sentence", "label"), *train)
    write_tsv(folder / "SST-2" / "dev.tsv", ("sentence", "label"), *dev)
    texts = [(str(index), text) for index, (text, _) in enumerate(dev)]
    write_tsv(folder / "SST-2" / "test.tsv", ("index", "sentence"), *texts)
    columns = [
        "index",
        "genre",
        "filename",
        "year",
        "old_index",
        "source1",
        "source2",
        "sentence1",
        "sentence2",
    ]
    for name, rows in (("train", train), ("dev", dev)):
        scored = [
            ("0", "g", "f", "y", "0", "n", "n", text, "a stone", f"{4.5 * int(y):.3f}")
            for text, y in rows
        ]
        write_tsv(folder / "STS-B" / f"{name}.tsv", (*columns, "score"), *scored)
    for name, rows in (("train", train), ("dev_matched", dev), ("dev_mismatched", dev)):
        labelled = [
            ("0", text, "a stone", ("entailment", "contradiction")[int(label)])
            for text, label in rows
        ]
        write_tsv(
            folder / "MNLI" / f"{name}.tsv",
            ("index", "sentence1", "sentence2", "gold_label"),
            *labelled,
        )
    for name in ("test_matched", "test_mismatched"):
        pairs = [(index, text, "a stone") for index, text in texts]
        write_tsv(folder / "MNLI" / f"{name}.tsv", ("index", "sentence1", "sentence2"), *pairs)
    for name, rows in (("train", train), ("dev", dev)):
        write_csv(
            folder / f"{name}.csv",
            ("review", "verdict"),
            *((text, "ny"[int(label)]) for text, label in rows),
        )


def words(files: Path, output: Path, *extra) -> list[str]:
    training = (
        ("--train-batch-size", 8, "--learning-rate", 0.01, "--epochs", 8)
        if "--do-train" in extra
        else ()
    )
    return fine_tuning_words(
        files / "config.json", output, "--max-seq-length", 16, *training, *extra
    )


def run(files: Path, output: Path, *extra) -> int:
    return run_glue.main(words(files, output, *extra))


def sst_2(files: Path, *tasks: str) -> tuple:
    return ("--task-name", "sst-2", "--data-dir", files / "SST-2", *tasks)


def scores_in(folder: Path) -> dict[str, float]:
    """The numbers in scores.json, without its tables."""
    scores = read_json(folder / "scores.json")
    return {name: value for name, value in scores.items() if isinstance(value, float)}


def predictions_in(path: Path) -> list[str]:
    header, *rows = [line.split("\t") for line in path.read_text().splitlines()]
    assert header == ["index", "prediction"]
    assert [index for index, _ in rows] == [str(index) for index in range(len(rows))]
    return [prediction for _, prediction in rows]


def own_files(files: Path, *tasks: str) -> tuple:
    given = {"--do-train": ("--train-file", "train.csv"), "--do-eval": ("--eval-file", "dev.csv")}
    given["--do-predict"] = ("--predict-file", "dev.csv")
    flags = [word for task in tasks for word in (task, given[task][0], files / given[task][1])]
    return ("--text-column", "review", "--label-column", "verdict", *flags)
