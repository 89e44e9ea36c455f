"""What run_embeddings.py refuses, before anything is written."""

import json
import os

from refusal_tables import Refusal, fine_tuning_command, refusals

import run_embeddings

PAIRS = [{"q": f"sea {n}", "p": "a ship", "s": 0.5, "n": "a rose", "stars": 4.5} for n in range(4)]
TRAIN = "--do-train --train-file {folder}/train.jsonl"
SCORED = f"{TRAIN} --label-column s"
GROUPED = {"q": "a", "p": ["x", "y"], "n": ["k", "l", "m"], "prompt": "find "}
GROUPED |= {"pos_scores": [3, 2.5], "neg_scores": [1, 0.5, 0]}
LISTS = f"{TRAIN} --negative-columns n"
TEACHER = " --embedding-loss margin-mse --label-column pos_scores neg_scores"


def lines(*rows: dict) -> dict[str, str]:
    return {"train.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}


def lists(**changes) -> dict[str, str]:
    """A row with three negatives and one with two."""
    other = {**GROUPED, "q": "b", "p": "x", "n": ["n", "o"]}
    return lines(GROUPED, {**other, "pos_scores": 1, "neg_scores": [-1, -2], **changes})


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
        "--negative-columns cannot be combined with --label-column, whose scores are of pairs",
    ),
    (f"{SCORED} --embedding-loss margin-mse", "margin-mse needs --negative-columns"),
    (f"{SCORED} stars", "are a teacher's scores: add --embedding-loss margin-mse"),
    (
        f"{SCORED} stars x --negative-columns n --embedding-loss margin-mse",
        "needs 2 columns in --label-column, with the scores of the second text and of each",
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
                "the global batch is 1, and the loss compares texts",
            ),
            (
                f"{TRAIN} --negative-columns x",
                ":1: no column 'x'; it has 'q', 'p', 's', 'n', 'stars'",
            ),
            (
                f"{TRAIN} --label-column x",
                ":1: no column 'x'; it has 'q', 'p', 's', 'n', 'stars'",
            ),
            (
                f"{TRAIN} --matryoshka-dims 999",
                "--matryoshka-dims 999 is above the hidden size",
            ),
        )
    ),
    (LISTS, "its rows have lists of 2 to 3 negatives: ... --num-negatives 2", lists()),
    (
        f"{LISTS} --num-negatives 3{TEACHER}",
        ":2: 2 negatives, fewer than --num-negatives 3",
        lists(),
    ),
    (f"{LISTS} --num-negatives 2", ":2: no text in 'n'", lists(n=[])),
    (f"{LISTS} --num-negatives 2", ":2: 'n' is 5, expected a string", lists(n=["n", 5])),
    (
        f"{LISTS} --num-negatives 2{TEACHER}",
        ":2: 1 numbers in neg_scores and 2 texts",
        lists(neg_scores=[1]),
    ),
    (
        f"{TRAIN} --prompt-column prompt",
        ":1: 'prompt' is None, expected a string",
        lines({**GROUPED, "prompt": None}),
    ),
    # No row has the column: none can be left out.
    (
        f"{TRAIN} --skip-bad --negative-columns answer",
        ":1: no column 'answer'; it has 'q', 'p'...check the column's name; all 4 rows are so",
        lines(*PAIRS),
    ),
    *(
        (flags.replace(".jsonl", ".csv"), says, {"train.csv": content})
        for flags, says, content in (
            (
                f"{TRAIN} --skip-bad --negative-columns answer",
                "train.csv: no column 'answer'; it has 'q', 'p': check the column's name",
                "q,p\na,b\nc,d\n",
            ),
            (
                LISTS,
                ":2: 'p' is a list that was written as text, ...: give JSON lines",
                "q,p,n\na,\"['x', 'y']\",\"['k']\"\n",
            ),
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
