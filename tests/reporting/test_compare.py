"""Two runs compared: scores against those of the tasks, intervals against a written loop, and the
program.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from glue_runs import make_files, own_files
from glue_runs import run as glue_run
from log_files import only_phase
from scipy import optimize
from scored_runs import KINDS, NUM_ROWS, remove_last_row, write_run
from sklearn.metrics import f1_score, matthews_corrcoef
from small_runs import run_here

import compare
import report
from bert_recipe.reporting import paired_scores
from bert_recipe.reporting.comparison import differences_of, read_model
from bert_recipe.reporting.paired_scores import MeanScore, calibration, compare_scores
from bert_recipe.reporting.records import differences
from bert_recipe.reporting.scored_rows import class_scores

RESUME = ("--resume-from-checkpoint",)
# Of tokens, which differ between models.
NOT_COMPARED = {("texts with entities", "accuracy")}
RECORD = {"identity": {}, "hyperparameters": {"--label-separator": "; "}}


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(paired_scores, "RESAMPLES", 50)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_both_runs_are_those_of_the_task(tmp_path, kind):
    expected = [write_run(tmp_path / name, kind, seed) for name, seed in (("a", 1), ("b", 2))]
    for name in "ab" if "other separator" in kind else "":
        (tmp_path / name / "run.json").write_text(json.dumps(RECORD))
    first, second = (read_model(tmp_path / name) for name in "ab")
    found = list(differences_of(first, second))
    percent = 100 if kind == "SQuAD" else 1
    names = ["_".join(filter(None, (one.set_name, one.name))) for one in found]
    assert {*names} == {name for name in expected[0] if (kind, name) not in NOT_COMPARED}
    for name, one in zip(names, found, strict=True):
        means = [scores[name] / percent for scores in expected]
        assert one.difference.means == pytest.approx(means, abs=1e-6), name
        low, high = one.difference.interval
        assert low <= one.difference.value <= high


@pytest.mark.parametrize(
    ("name", "classes", "metric"),
    [
        ("f1", 2, f1_score),
        ("f1_macro", 4, lambda *pair: f1_score(*pair, average="macro", zero_division=0)),
        ("matthews_correlation", 3, matthews_corrcoef),
    ],
)
def test_scores_of_resamples_are_those_of_scikit_learn(name, classes, metric):
    random = np.random.default_rng(0)
    true, found = random.integers(classes, size=(2, 12))  # so few that classes are missing
    score = class_scores(true, found, classes, [name])[name]
    counts = np.stack([np.bincount(random.integers(12, size=12), minlength=12) for _ in range(20)])
    counts[0] = 12 * (np.arange(12) == 3)  # one class only
    expected = [metric(np.repeat(true, row), np.repeat(found, row)) for row in counts]
    assert score.resampled(counts.astype(float)) == pytest.approx(expected)


@pytest.mark.parametrize(("runs", "same_seeds"), [((1, 1), True), ((3, 3), True), ((2, 3), False)])
def test_interval_is_that_of_a_loop_over_resamples_of_rows_and_runs(monkeypatch, runs, same_seeds):
    monkeypatch.setattr(paired_scores, "RESAMPLES", 4000)
    random = np.random.default_rng(0)
    sides = [
        [(random.random(40) < share + 0.1 * place).astype(float) for place in range(count)]
        for count, share in zip(runs, (0.4, 0.6), strict=True)
    ]
    found = compare_scores(*([MeanScore(own) for own in side] for side in sides), 40, same_seeds)
    differences = []
    for _ in range(4000):
        rows = random.integers(40, size=40)
        values, chosen = [], None
        for side in sides:
            if chosen is None or not same_seeds:
                chosen = random.integers(len(side), size=len(side))
            values.append(np.mean([side[run][rows].mean() for run in chosen]))
        differences.append(values[1] - values[0])
    expected = np.quantile(differences, (0.025, 0.975)).tolist()
    assert found.interval == pytest.approx(expected, abs=0.03)
    assert found.means == pytest.approx([np.mean(side) for side in sides])


def test_calibration_is_that_of_a_loop_and_its_temperature_minimizes_the_log_loss():
    random = np.random.default_rng(0)
    logits = random.normal(size=(500, 4))
    likely = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.array([random.choice(4, p=row) for row in likely])
    sure = np.exp(3 * logits) / np.exp(3 * logits).sum(1, keepdims=True)  # three times too sure
    error = 0.0
    for place in range(15):
        rows = [
            (row.max(), row.argmax() == label)
            for row, label in zip(sure, labels, strict=True)
            if place / 15 <= row.max() < (place + 1) / 15 or (place == 14 and row.max() == 1)
        ]
        if rows:
            confidence, right = np.mean(rows, axis=0)
            error += len(rows) / 500 * abs(confidence - right)

    def log_loss(temperature: float) -> float:
        scaled = np.log(sure) / temperature
        shares = np.exp(scaled) / np.exp(scaled).sum(1, keepdims=True)
        return -np.mean(np.log(shares[np.arange(500), labels]))

    expected = optimize.brute(lambda x: log_loss(x[0]), [(0.5, 10)], Ns=200)[0]
    found = calibration(sure, labels)
    assert found.error == pytest.approx(error)
    assert found.temperature == pytest.approx(expected, rel=1e-3)
    assert found.temperature == pytest.approx(3, rel=0.15)


def run(*paths: Path):
    return run_here([*map(str, paths)], compare.main)


def test_rows_are_known_by_content_and_not_by_position(tmp_path, capsys):
    for name in ("a", "b"):
        write_run(tmp_path / name, "classes", 1)
    path = tmp_path / "b" / "eval_predictions.tsv"
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *reversed(rows)]) + "\n")
    result = run(tmp_path / "a", tmp_path / "b")
    assert result.returncode == 0, result.stderr
    assert f"{NUM_ROWS} rows with the same texts and labels" in result.stdout
    assert "+0.00 to +0.00" in result.stdout


def test_seeds_are_runs_of_one_model_and_folds_are_one_file(tmp_path):
    for name, seed in (("a", 1), ("b", 5)):
        for number in range(2):
            write_run(tmp_path / name / f"seed-{number}", "classes", seed + number)
            write_run(tmp_path / f"folds {name}" / f"fold-{number + 1}", "classes", seed + number)
    seeds, folds = read_model(tmp_path / "a"), read_model(tmp_path / "folds a")
    assert seeds.runs == ["seed-0", "seed-1"] and folds.runs == [""]
    assert [len(next(iter(own.sets[""].values())).keys) for own in (seeds, folds)] == [
        NUM_ROWS,
        2 * NUM_ROWS,
    ]
    found = run(tmp_path / "a", tmp_path / "b").stdout
    assert "(2 seeds)" in found
    pooled = run(tmp_path / "folds a", tmp_path / "folds b").stdout
    assert "(2 folds)" in pooled and f"{2 * NUM_ROWS} rows" in pooled


def test_the_page_says_what_the_scores_of_two_runs_show(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        write_run(tmp_path / name / "classification", "classes", seed)
        log = {"timestamp": "1e9", "elapsedtime": "0", "type": "LOG", "step": "PARAMETER"}
        log["data"] = {"output_dir": "x", "task": "classification", "starting_weights": name}
        (tmp_path / name / "classification" / "report.json").write_text(f"DLLL {json.dumps(log)}\n")
    page = tmp_path / "page.html"
    report.main([str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(page)])
    text = page.read_text().replace("<wbr>", "")
    (one, *_) = differences_of(*(read_model(tmp_path / name) for name in "ab"))
    assert f"{one.title} {100 * one.difference.value:+.2f} points" in text
    assert "starting_weights" in text and "No logged setting" not in text
    remove_last_row(tmp_path / "b" / "classification")
    report.main([str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(page)])
    assert "cannot be compared: other rows were scored" in page.read_text()


def test_the_page_tells_runs_apart_that_started_from_other_weights_at_the_same_path(tmp_path):
    make_files(tmp_path)
    start = tmp_path / "start"

    def train(name: str, *flags) -> Path:
        words = own_files(tmp_path, "--do-train")
        glue_run(tmp_path, tmp_path / name, *words, "--max-steps", 1, *flags)
        (folder,) = (tmp_path / name).glob("*/*")
        return folder

    for name, seed in (("a", 1), ("b", 2)):
        shutil.rmtree(start, ignore_errors=True)
        shutil.copytree(train(f"start {name}", "--seed", seed) / "1", start)
        train(name, "--init-checkpoint", start)
        train(name, "--init-checkpoint", start, "--max-steps", 2, *RESUME)
    phases = [only_phase(tmp_path / name) for name in "ab"]
    assert [len(phase.sessions) for phase in phases] == [2, 2]
    assert [*differences(phases)] == ["starting_weights"]
