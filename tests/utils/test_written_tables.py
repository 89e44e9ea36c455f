"""Tables of predictions: in the format of the file that was read, with standard quoting and all
digits.
"""

import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import VOCAB_FILE

from bert_recipe.reporting.scored_rows import read_scored_rows
from bert_recipe.tasks.classification.options import ClassificationOptions
from bert_recipe.tasks.classification.specs import custom_spec
from bert_recipe.tasks.classification.task import ClassificationTask
from bert_recipe.tasks.reading import NumberReadingOptions
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.output_tables import encode_table
from bert_recipe.utils.text_files import TableFormat

TOKENIZER = BertTokenizer(VOCAB_FILE)
TEXTS = [
    '"Quoted" at the start',
    'said "so" and, then; left',
    '"',
    '"""',
    "two\nlines, and\ta tab",
    "old\rMac",
    " spaces ",
    "naïve 😀",
]
IN_TSV = [text for text in TEXTS if not set(text) & set("\t\r\n")]  # which has none of these
NUMBERS = [1234517.0, 0.1, 1e-7, 123456789.123, 2.5, 3.0, -4.25, 1 / 3]


def score(path: Path, labels: list, spec, folder: Path, reading=None) -> dict:
    """Scores a file, with predictions drawn for its rows."""
    files = {"eval_file": path, "predict_file": path, "do_eval": True, "do_predict": True}
    options = ClassificationOptions(**files, **vars(reading or NumberReadingOptions()))
    task = ClassificationTask(options, spec)
    outputs = len(spec.labels) or 1
    scores = {}
    for one in task.prediction_sets(TOKENIZER):
        logits = np.random.default_rng(0).normal(size=(len(labels), outputs)) * 1e5
        scores |= one.finish(logits.astype(np.float32), folder)
    numbers = {name: value for name, value in scores.items() if isinstance(value, float)}
    (folder / "scores.json").write_text(json.dumps(numbers))
    return numbers


def read(path: Path, delimiter: str = ",") -> list[dict]:
    """By Python's csv, json and pyarrow, not by this project."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        return parquet.read_table(path).to_pylist()
    delimiter = "\t" if path.suffix == ".tsv" else delimiter
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file, delimiter=delimiter, strict=True))


FORMATS = [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t"), ("a.jsonl", ""), ("a.parquet", "")]


@pytest.mark.parametrize(("name", "delimiter"), FORMATS)
def test_every_row_and_value_comes_back_in_the_format_of_the_input(tmp_path, name, delimiter):
    texts = IN_TSV if name == "a.tsv" else TEXTS
    labels = ["new\nline, x", "b", "b", '"c"', "b", "b", "b", "b"][: len(texts)]
    if name == "a.tsv":
        labels[0] = "x"
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    path = tmp_path / name
    if name == "a.tsv":
        path.write_text("text\tlabel\n" + "".join(f"{r['text']}\t{r['label']}\n" for r in rows))
    else:
        path.write_bytes(encode_table(path, rows, TableFormat(delimiter or None)))
    spec = dataclasses.replace(custom_spec("text", None, "label"), labels=tuple({*labels}))
    scores = score(path, labels, spec, tmp_path)
    for stem in ("eval_predictions", "predictions"):
        (written,) = tmp_path.glob(f"{stem}.*")
        assert written.suffix == path.suffix
        table = read(written, delimiter)
        assert [row["text"] for row in table] == texts
        predicted = "prediction" if stem == "eval_predictions" else "predicted label"
        assert all(row[predicted] in labels for row in table)
    (scored,) = tmp_path.glob("eval_predictions.*")
    assert [row["label"] for row in read(scored, delimiter)] == labels
    rows_of_run = read_scored_rows([tmp_path])[""]
    for name, value in scores.items():
        assert rows_of_run.scores[name].value() == pytest.approx(value)


@pytest.mark.parametrize("decimal", [".", ","])
def test_numbers_have_all_digits(tmp_path, decimal):
    cells = [str(number).replace(".", decimal) for number in NUMBERS]
    lines = [f"{text};{cell}\n" for text, cell in zip("abcdefgh", cells, strict=True)]
    (tmp_path / "a.csv").write_text("text;label\n" + "".join(lines))
    spec = custom_spec("text", None, "label", regression=True)
    scores = score(
        tmp_path / "a.csv", NUMBERS, spec, tmp_path, NumberReadingOptions(decimal=decimal)
    )
    table = read(tmp_path / "eval_predictions.csv", ";")
    assert [float(row["label"].replace(decimal, ".")) for row in table] == NUMBERS
    logits = (np.random.default_rng(0).normal(size=(8, 1)) * 1e5).astype(np.float32)
    predictions = [float(row["prediction"].replace(decimal, ".")) for row in table]
    assert predictions == logits[:, 0].astype(float).tolist()
    value = read_scored_rows([tmp_path])[""].scores["pearson"].value()
    assert value == pytest.approx(scores["pearson"], rel=1e-12)


def test_runs_of_classes_are_read_with_a_decimal_comma(tmp_path):
    """They have no numbers of their own, but probabilities."""
    labels = list("ababbaba")
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)]
    path = tmp_path / "a.csv"
    path.write_bytes(encode_table(path, rows, TableFormat(";")))
    spec = dataclasses.replace(custom_spec("text", None, "label"), labels=("a", "b"))
    scores = score(path, labels, spec, tmp_path, NumberReadingOptions(decimal=","))
    scored = read_scored_rows([tmp_path])[""]
    for name, value in scores.items():
        assert scored.scores[name].value() == pytest.approx(value)
    assert scored.probabilities_nC.sum(axis=1) == pytest.approx(np.ones(len(labels)))


def test_pandas_reads_what_is_written(tmp_path):
    pytest.importorskip("pandas")
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, "ababbaba", strict=True)]
    for name in ("a.csv", "a.tsv"):
        (tmp_path / name).write_bytes(encode_table(tmp_path / name, rows))
        code = f"import pandas; table = pandas.read_csv({name!r}, sep=None, engine='python'); "
        code = code.replace(
            "sep=None, engine='python'", f"sep={',' if name[2] == 'c' else chr(9)!r}"
        )
        code += "print(table.to_json(orient='records'))"
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert json.loads(result.stdout) == rows
