"""What run_glue.py refuses, before anything is written."""

from pathlib import Path

import pytest
from conftest import VOCAB_FILE
from refusal_tables import Refusal, fine_tuning_command, refusals

import run_glue

SST_2 = "--task-name sst-2 --data-dir {files}/SST-2"
FINE_TUNED = "--init-checkpoint {model}"
OWN = "--do-train --train-file {folder}/own.csv --text-column text --label-column label"
LINES = OWN.replace(".csv", ".jsonl")
OTHER_WORDS = "\n".join(sorted(VOCAB_FILE.read_text(encoding="utf-8").splitlines()[:1210]))
MULTI = " --task-name multi-label"
FITTED = f"{OWN} {FINE_TUNED} --frozen-encoder"


@pytest.fixture(scope="module")
def places(inputs, glue_files, tmp_path_factory) -> dict[str, Path]:
    """Files of GLUE and a model that was fine-tuned on SST-2."""
    output = tmp_path_factory.mktemp("output")
    flags = ("--max-steps", 1, "--do-train", *SST_2.format(files=glue_files).split())
    assert run_glue.main(fine_tuning_command(inputs, output, *flags)) == 0
    return {"files": glue_files, "model": output / "custom" / "sst-2"}


def csv_rows(*labels: str) -> str:
    return "text,label\n" + "".join(f"text {row},{label}\n" for row, label in enumerate(labels))


COMMAND_LINES = [
    ("", "nothing to do"),
    ("--task-name mrpc --do-train", "--task-name mrpc needs --data-dir"),
    (f"{SST_2} --do-train --train-file train.csv", "is for --task-name custom"),
    ("--data-dir . --do-train", "--data-dir has no effect without --task-name cola or"),
    ("--do-train --train-file train.csv", "needs --text-column"),
    ("--do-train --train-file a.csv --text-column review", "need --label-column"),
    ("--do-eval --task-name rte --data-dir .", "give --init-checkpoint"),
    (f"{SST_2} --do-train --eval-steps 5", "--eval-steps has no effect without --do-eval"),
    (f"{SST_2} --do-train --do-eval --early-stopping 5", "has no effect without --eval-steps"),
    (
        f"{SST_2} --do-train --do-eval --eval-fraction 0.1",
        "--eval-fraction cannot be combined with --data-dir",
    ),
    (
        f"{SST_2} {FINE_TUNED} --do-eval --class-weights balanced",
        "--class-weights has no effect",
    ),
    (f"{SST_2} --do-eval --num-seeds 2 {FINE_TUNED}", "--num-seeds has no effect without --do-tr"),
    (f"{SST_2} --do-train --predict-batch-size 8", "--predict-batch-size"),
    (f"{OWN} --label-column text", "column 'text' is given twice: give each column once"),
    (f"{OWN} --label-column b c", "columns of 0 and 1, one per label: add --task-name multi"),
    (
        f"{OWN} --do-train --do-eval --eval-file e --group-column d",
        "--group-column has no effect without --eval-fraction or --num-folds",
    ),
    (f"{OWN} --do-eval", "or --eval-fraction 0.1 to hold out a part of the training file"),
    *(
        (f"{OWN} --do-train --shrink-outputs {flags}", "--shrink-outputs cannot be combined with")
        for flags in ("--class-weights balanced", "--regression", "--benchmark", "--eval-steps 5")
    ),
    (f"{OWN} --frozen-encoder", "--frozen-encoder needs an encoder: give --init-checkpoint"),
    (f"{FITTED} --learning-rate 2e-5", "--learning-rate has no effect with --frozen-encoder"),
    (f"{FITTED} --freeze-layers 1", "--freeze-layers has no effect with --frozen-encoder"),
    (f"{FITTED} --epochs 3", "--epochs has no effect with --frozen-encoder"),
    (f"{FITTED} --optimizer Muon", "--optimizer has no effect with --frozen-encoder"),
    (f"{FITTED} --dropout 0.1", "--dropout cannot be combined with --frozen-encoder"),
    (f"{FITTED} --estimate-memory", "--estimate-memory cannot be combined with --frozen-encoder"),
    (f"{FITTED} --negative-columns x", "--frozen-encoder cannot be combined with --negative"),
    (f"{FITTED} --benchmark", "--frozen-encoder cannot be combined with --benchmark"),
    (f"{OWN} --no-baseline", "--no-baseline has no effect without --do-eval"),
    (f"{OWN} --label-separator ;", "has no effect without --task-name multi-label"),
    (f"{OWN} --delimiter ;;", "--delimiter: expected one character, or tab, not ';;'"),
    (f"{OWN} --encoding latin9000", "there is no encoding 'latin9000'"),
    (
        "--do-train --train-file {folder}/a-1.csv {folder}/a-2.csv",
        "unrecognized arguments: {folder}/a-2.csv: put a pattern of several files in quotation",
        {"a-1.csv": "", "a-2.csv": ""},
    ),
    # Of the other fine-tuning programs.
    (f"{OWN} --temperature 1", "unrecognized arguments: --temperature"),
    (f"{OWN} --corpus-file f", "unrecognized arguments: --corpus-file"),
    (f"{OWN} --pooling mean", "unrecognized arguments: --pooling"),
    (
        "--do-train --task-name ner --train-file t.txt",
        "error: --task-name ...run_ner.py ...--do-train --train-file t.txt",
    ),
    (
        "--do-train --train-file t.txt --task_name=Embedding",
        "error: --task-name ...run_embeddings.py ...--do-train --train-file t.txt",
    ),
]
TASKS = [
    ("--do-train --task-name rte --data-dir {files}", "train.tsv does not exist"),
    ("--do-train --train-file x.csv --text-column a --second-text-column b", "use --pair-column"),
    ("--do-train --task-name rte --data-dir {files}/SST-2", "no column 'sentence1'"),
    (
        f"{SST_2} --do-train --do-eval --eval-steps=5 --metric-for-best-model=f1",
        "f1 is no score of this task: give one of accuracy",
    ),
    (
        "--task-name sts-b --data-dir . --do-train --label-smoothing 0.1",
        "with one class per text",
    ),
    (f"{SST_2} --do-train --max-seq-length 99", "64 positions"),
    (
        f"--task-name wnli --data-dir {{files}}/MNLI --do-eval {FINE_TUNED}",
        "on single texts: leave",
    ),
    (
        f"{SST_2} --do-eval {FINE_TUNED} --vocab-file {{folder}}/vocab.txt",
        "contain different tokens",
        {"vocab.txt": OTHER_WORDS},
    ),
    (
        "--task-name sst-2 --data-dir {folder} --do-train",
        "train.tsv:3: label '2', expected one of 0, 1",
        {"train.tsv": "sentence\tlabel\na\t1\nb\t2\n"},
    ),
    (
        "--task-name boolq --data-dir {folder} --do-train",
        ":1: 'passage' is 5, expected a string",
        {"train.jsonl": {"question": "is it", "passage": 5, "idx": 0, "label": True}},
    ),
]
TABLES = [
    *(
        (OWN, says, {"own.csv": content})
        for says, content in (
            ("holds no samples", "text,label\n"),
            ("the column 'text' is empty in all rows", "text,label\n ,a\n,b\n"),
            ("own.csv:2: 'label' is '', expected a label: it is missing", "text,label\na,\n"),
            (":2: 1 cells, fewer than the 2 columns: correct the line", "text,label\na\n"),
            ("the header is not valid CSV", '{"text":"a","label":"x"}\n'),
            ("the header is not UTF-8", b"t\xe9xt,label\na,x\n"),
            # One class per text.
            ("expected one label: ...--task-name multi-label", 'text,label\na,"[0, 0, 1]"\n'),
            ("expected one label: ...--task-name multi-label", "text,label\na,\"['x', 'y']\"\n"),
            ("expected one label: ...--task-name multi-label", "text,label\na,\"{'x', 'y'}\"\n"),
            ("expected one label: ...--task-name multi-label", "text,label\na,set()\n"),
            (
                "each text has a label of its own: add --regression",
                csv_rows(*(f"{number / 8}" for number in range(11))),
            ),
            ("all labels are 'x'", csv_rows("x", "x")),
            ("labels '1' and '1.0' are the same value", csv_rows("1", "1.0")),
            ("look the same: write them in one way", csv_rows("e\u0301", "\xe9")),
            ("look the same: write them in one way", csv_rows("good", "good\u200b")),
            ("look the same: write them in one way", csv_rows("\u2764", "\u2764\ufe0f")),
            (
                "each text has a label of its own: check the column of labels",
                csv_rows(*"abcdefghijk"),
            ),
        )
    ),
    (
        f"{OWN} --do-eval --eval-fraction 0.5 --group-column label",
        "only held-out groups have ..., and one label is left to learn: give another column",
        {"own.csv": csv_rows("x", "y", "x", "y")},
    ),
    (
        f"{OWN} --pair-column pair",
        "the column 'pair' is empty in all rows",
        {"own.csv": "text,pair,label\na, ,x\nb,,y\n"},
    ),
    (
        "--do-train --train-file {folder}/own.csv --text-column q --pair-column p "
        "--negative-columns n",
        ":2: 'p' is a list that was written as text, ...: give JSON lines",
        {"own.csv": "q,p,n\na,\"['x', 'y']\",\"['k']\"\n"},
    ),
    (
        OWN.replace(".csv", ".tsv"),
        ":2: 3 cells, more than the 2 columns",
        {"own.tsv": "text\tlabel\na\tb\tc\n"},
    ),
    (
        OWN.replace(".csv", ".docx"),
        "unknown file extension: give a file of .csv, .tsv, .jsonl, .parquet",
        {"own.docx": "PK"},
    ),
    *(
        (LINES, says, {"own.jsonl": content})
        for says, content in (
            (":2: no column 'label'", '{"text": "a", "label": 1}\n{"text": "b"}\n'),
            (":1: 'text' is 5, expected a string", '{"text": 5, "label": 1}\n'),
            (
                ":1: 'label' is None, expected a label: it is missing",
                '{"text": "a", "label": null}',
            ),
            (":1: 'label' is nan, expected a label: it is missing", '{"text": "a", "label": NaN}'),
            (":1: 'label' is 4.5: add --regression, or write", '{"text": "a", "label": 4.5}'),
        )
    ),
    *(
        (f"{OWN} --regression", f":2: label '{label}', expected a number", {"own.csv": rows})
        for label in ("high", "nan", "inf", "1_000", "1e999")
        for rows in [csv_rows(label)]
    ),
    *(
        (f"{OWN} --regression", "are too large for float32...divide", {"own.csv": rows})
        for rows in (csv_rows("1e300", "-1e300"), csv_rows("1e39"), csv_rows("1.7e12", "1.4e12"))
    ),
    (
        f"{OWN} --regression",
        "label '0,5', expected a number: give --decimal ,",
        {"own.csv": csv_rows('"0,5"')},
    ),
    (
        OWN.replace(".csv", ".json"),
        "'text' is a dict, ...orient='records'",
        {"own.json": [{"text": {"0": "a"}, "label": 1}]},
    ),
    # Several labels per text.
    *(
        (OWN + MULTI, says, {"own.csv": "text,label\n" + rows})
        for says, rows in (
            ("no text has a label", "a,\n"),
            (":2: 'label' is '', expected a label", "a,x||y\n"),
            (
                "'sports#politics' would be one label: give --label-s",
                "a,sports#politics\nb,sports\n",
            ),
            (
                "--label-separator ';' if it is several, else --label-separator '|'",
                "a,x;y\nb,y;z\n",
            ),
            ("would be one label: give --label-separator '\\n'", 'a,"x\ny"\nb,x\n'),
            ("--label-separator ' '", "a,x y\nb,y x\nc,x y z\nd,y\n"),
            (
                "3 times 0 or 1, without the names of labels",
                'a,"[0, 0, 1]"\nb,"[1, 0, 0]"\n',
            ),
            (
                "has 0 or 1, without the names of labels: give a column of 0 and 1 for",
                "a,0\nb,1\n",
            ),
            ("neither JSON's nor Python's list", "a,[0 0 1]\nb,[1 0 0]\n"),
            ("neither JSON's nor Python's list", "a,['x' 'y']\nb,['x']\n"),
            ("neither JSON's nor Python's list", 'a,"[x, y]"\nb,x\n'),
            ("neither JSON's nor Python's list", 'a,"{x,y}"\nb,{x}\n'),
            ("neither JSON's nor Python's list", "a,\"{'x': 1, 'y': 2}\"\nb,{}\n"),
            ("neither JSON's nor Python's list", "a,\"dict_keys(['x', 'y'])\"\nb,x\n"),
            ("labels '1' and '1.0' are the same value", "a,1|2\nb,1.0\n"),
            ("look the same", "a,New York|x\nb,New  York\n"),
        )
    ),
    *(
        (LINES + MULTI, says, {"own.jsonl": {"text": "a", "label": label}})
        for says, label in (
            (":1: 'label' is 3, expected labels", 3),
            (":1: 'label' is 0, expected labels", 0),
            (":1: 'label' is {{}}, expected labels", {}),
            (":1: 'label' has the label 'C|C++', and '|' separates", ["C|C++"]),
            (":1: 'label' is None, expected a label", ["x", None]),
        )
    ),
    (
        f"{OWN} toxic {MULTI}",
        "'toxic' is '-1', expected 0 or 1",
        {"own.csv": "text,label,toxic\na,1,-1\n"},
    ),
    # Annotation tools.
    *(
        (OWN.replace(".csv", ".json"), "own.json: this is Label Studio's JSON: convert", annotated)
        for annotated in (
            {"own.json": [{"data": {"text": "a"}, "annotations": [{"result": []}]}]},
            {"own.json": {"data": {"text": "a"}, "completions": []}},
        )
    ),
    (
        LINES,
        "Prodigy's answer is 'reject': leave the row out, or learn accept and reject",
        {"own.jsonl": {"text": "a", "label": "x", "answer": "reject", "_task_hash": 1}},
    ),
]


@refusals(*COMMAND_LINES, *TASKS, *TABLES)
def test_run_glue_refuses(refusal: Refusal, inputs, places, tmp_path):
    command = fine_tuning_command(inputs, tmp_path / "output")
    refusal.check(run_glue.main, command, tmp_path, **places)
