"""What run_embeddings.py refuses, before anything is written."""

import json
import os

from refusal_tables import Refusal, fine_tuning_command, refusals

import run_embeddings

PAIRS = [{"q": f"sea {n}", "p": "a ship", "s": 0.5, "n": "a rose", "stars": 4.5} for n in range(4)]
TRAIN = "--do-train --train-file {folder}/train.jsonl"
SCORED = f"{TRAIN} --label-column s"


def lines(*rows: dict) -> dict[str, str]:
    return {"train.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}


COMMAND_LINES = [
    (f"{TRAIN} --pair-column q", "column 'q' is given twice"),
    (f"{TRAIN} --max-seq-length 7", "expected a whole number >= 8, not 7"),
    (f"{TRAIN} --predict-batch-size 8", "--predict-batch-size has no effect without --do-eval"),
    # Of the other fine-tuning programs.
    *(
        (f"{TRAIN} {flag}", f"unrecognized arguments: {flag.split()[0]}")
        for flag in ("--do-predict", "--label-smoothing 0.1", "--predict-file f", "--num-folds 3")
    ),
    # Losses and the scores that they need.
    (f"{SCORED} --symmetric-loss", "cannot be combined with --label-column"),
    (f"{SCORED} --embedding-loss contrastive", "contrastive goes without --label-column"),
    (f"{TRAIN} --embedding-loss cosine", "cosine goes together with --label-column"),
    (
        f"{SCORED} --negative-columns n",
        "--label-column cannot be combined with --negative-columns",
    ),
]
FILES = [
    *(
        (flags, says, lines(*PAIRS))
        for flags, says in (
            (
                f"{TRAIN} --label-column stars --embedding-loss cosine",
                "up to 4.5, and cosines at most 1",
            ),
            (
                (*TRAIN.split(), "--query-prompt", "find " * 9),
                "has 9 tokens, more than half of --max-seq-length 16",
            ),
            (
                f"{TRAIN} --train-batch-size 1",
                "the global batch is 1, and the task embedding compares texts",
            ),
            (
                f"{TRAIN} --negative-columns x",
                "line 1: no column 'x'; it has 'q', 'p', 's', 'n', 'stars'",
            ),
            (
                f"{TRAIN} --label-column x",
                "line 1: no column 'x'; it has 'q', 'p', 's', 'n', 'stars'",
            ),
            (
                f"{TRAIN} --matryoshka-dims 999",
                "--matryoshka-dims 999 is above the hidden size",
            ),
        )
    ),
    (
        f"{TRAIN} --negative-columns n",
        ":1: 'n' is a list, expected a string",
        lines({**PAIRS[0], "n": ["a rose", "a bank"]}),
    ),
    *(
        (flags.replace(".jsonl", ".csv"), says, {"train.csv": content})
        for flags, says, content in (
            (
                TRAIN,
                "2 bad rows: line 3: a text is ...also at line 4",
                "q,p\na,b\n\u200b,c\na,\u00ad\n",
            ),
            # As in `--train-file <(zcat train.csv.gz)`.
            (TRAIN, "train.csv is a pipe or a device: write its content to", os.mkfifo),
        )
    ),
]
WITHOUT_COLUMNS = [
    ("--do-train --train-file a.txt --text-column q", "SQuAD's .json files without columns"),
    (
        "--do-train --train-file {folder}/a.txt",
        "an empty line ends a document: remove those",
        {"a.txt": "One.\n\nTwo.\n\nThree.\n"},
    ),
]


@refusals(*COMMAND_LINES, *FILES)
def test_run_embeddings_refuses(refusal: Refusal, inputs, tmp_path):
    columns = ("--text-column", "q", "--pair-column", "p")
    command = fine_tuning_command(inputs, tmp_path / "output", *columns)
    refusal.check(run_embeddings.main, command, tmp_path)


@refusals(*WITHOUT_COLUMNS)
def test_run_embeddings_refuses_texts(refusal: Refusal, inputs, tmp_path):
    refusal.check(run_embeddings.main, fine_tuning_command(inputs, tmp_path / "output"), tmp_path)
