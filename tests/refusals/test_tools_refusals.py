"""What the small programs refuse: scores, comparisons, reports and the doctor."""

import os
from pathlib import Path

from conftest import ROOT
from refusal_tables import Refusal, refusals
from scored_runs import remove_last_row, write_run

import compare
import doctor
import evaluate_squad
import report

SQUAD = {name[:2]: ROOT / f"data/sample/squad/dev-{name}.json" for name in ("v1.1", "v2.0")}
EMPTY = {"empty": "{}"}


@refusals(
    ("{v1}", "PREDICTIONS"),
    ("nowhere.json {folder}/empty", "SQuAD file nowhere.json does not exist", EMPTY),
    ("{v1} nowhere.json", "predictions file nowhere.json does not exist"),
    ("{v1} {folder}/list", "expected an object", {"list": []}),
    ("{v1} {folder}/number", "q1 is 1, expected a string", {"number": {"q1": 1}}),
    ("{v2} {folder}/empty", "the predictions lack", EMPTY),
    (
        "{v1} {folder}/empty --na-prob-file {folder}/empty",
        "leave out --na-prob-file",
        EMPTY,
    ),
    (
        "{v2} {folder}/empty --na-prob-file {folder}/nan",
        "q1 is NaN",
        EMPTY | {"nan": '{"q1": NaN}'},
    ),
    (
        "{v2} {folder}/empty --na-prob-file {folder}/empty --na-prob-thresh nan",
        "expected a number",
        EMPTY,
    ),
)
def test_evaluate_squad_refuses(refusal: Refusal, tmp_path):
    refusal.check(evaluate_squad.main, [], tmp_path, **SQUAD)


def changed_run(old: str, new: str):
    """A function that writes a run like the others, but for a text in its predictions."""

    def write(folder: Path) -> None:
        write_run(folder, "classes", 1)
        (path,) = folder.glob("eval_predictions.*")
        path.write_text(path.read_text().replace(old, new, 1))

    return write


def one_row_less(folder: Path) -> None:
    write_run(folder, "classes", 1)
    remove_last_row(folder)


def unscored(folder: Path) -> None:
    write_run(folder, "classes", 1)
    (folder / "scores.json").unlink()


def not_a_table(folder: Path) -> None:
    write_run(folder, "classes", 1)
    (path,) = folder.glob("eval_predictions.*")
    path.write_text('{"text": "a", "prediction": "b"}\n')


def unquoted(folder: Path) -> None:
    """As versions before 1.0 wrote them."""
    write_run(folder, "words with tags", 1)
    text = 'word\ttag\tprediction\tprobability\n"\tO\tO\t0.5\n'
    (folder / "eval_predictions.tsv").write_text(text)


def whole_run(folder: Path) -> None:
    write_run(folder, "classes", 1)


@refusals(
    *(
        ("{folder}/a {folder}/b", says, {"a": whole_run, "b": make})
        for says, make in (
            (
                "other rows were scored: 1 of the 30 rows of",
                changed_run('"label": "a"', '"label": "b"'),
            ),
            ("other rows were scored: 1 of the 30 rows of", one_row_less),
            ("has no rows that were scored", unscored),
            ("is not what --do-eval writes", not_a_table),
            ("is not what --do-eval writes (Error: unexpected end of data)", unquoted),
        )
    ),
    ("{folder}/a {folder}/b", "does not exist", {"a": whole_run}),
    (
        "{folder} {folder}/a",
        "has several runs: give one of",
        {"a": whole_run, "b": whole_run, "b/x": whole_run},
    ),
)
def test_compare_refuses(refusal: Refusal, tmp_path):
    refusal.check(compare.main, [], tmp_path)


@refusals(
    *(
        (f"{{folder}}/{name} --output {{folder}}/p.html", f"{name} holds no training log", files)
        for name, files in (
            ("missing", {}),
            ("empty", {"empty/other.json": "{}"}),
            ("pipe", {"pipe": os.mkfifo}),
        )
    ),
)
def test_report_refuses(refusal: Refusal, tmp_path):
    refusal.check(report.main, [], tmp_path)


@refusals(
    ("inference.py --text a", "inference.py: the doctor checks run_pretraining.py"),
    ("glue --do-eval --eval-file d.csv --init-checkpoint m --output-dir o", "--do-train"),
    ("--max-step 5", "did you mean --max-steps"),
)
def test_the_doctor_refuses(refusal: Refusal, tmp_path):
    refusal.check(doctor.main, [], tmp_path)
