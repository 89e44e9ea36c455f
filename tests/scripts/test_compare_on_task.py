"""Models before and after continued pre-training, compared on a task."""

import itertools
import json
import shutil

import numpy as np
import pytest
from conftest import assert_refused, read_json
from glue_runs import sentences, write_csv
from scored_runs import write_run
from small_runs import run_here, steps_folder, train

from bert_recipe.reporting.comparison import ScoreDifference
from bert_recipe.reporting.paired_scores import Difference
from bert_recipe.tasks import baselines
from scripts import compare_on_task


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((-0.2, -0.1), "-15.00 points (95% interval -20.00 to -10.00, p 0.010, 600 rows): the mod"),
        ((-0.2, 0.1), "no difference is shown"),
        ((0.1, 0.2), ": better"),
    ],
)
def test_a_model_that_became_worse_is_said_to_be_worse(interval, words):
    p_value = 0.5 if interval[0] < 0 < interval[1] else 0.01
    difference = Difference((0.5, 0.5 + sum(interval) / 2), interval, p_value)
    text = compare_on_task.describe(ScoreDifference("", "accuracy", 600, difference))
    assert words in text


def test_a_score_that_is_not_defined_for_all_runs_is_named(tmp_path):
    folders = [tmp_path / "before", tmp_path / "after"]
    for folder, seed in itertools.product(folders, (1, 2)):
        write_run(folder / "model" / "regression" / f"seed-{seed}", "numbers", seed)
    scores = read_json(folders[1] / "model" / "regression" / "seed-2" / "scores.json")
    lines = compare_on_task.compare(folders, "vectors")
    assert len(lines) == 2 and "not compared" not in "".join(lines)
    for name, undefined in (("pearson", "pearson"), ("spearman", "pearson, spearman")):
        scores[name] = None  # as of a model that predicts one number
        path = folders[1] / "model" / "regression" / "seed-2" / "scores.json"
        path.write_text(json.dumps(scores))
        *compared, last = compare_on_task.compare(folders, "vectors")
        assert len(compared) == 2 - len(undefined.split())
        assert last.endswith(f"it is not defined for all runs: {undefined}")


def models_and_table(inputs, folder, count):
    train(inputs.command(folder / "before", "--max-steps", 1))
    train(inputs.command(folder / "after", "--max-steps", 2))
    rows = [row for row in sentences(count, 0) if row[0] != "text"]
    table = write_csv(folder / "train.csv", ("text", "label"), *rows)
    words = ["--before", steps_folder(folder / "before"), "--num-seeds", 2]
    words += ["--after", steps_folder(folder / "after"), "--output-dir", folder / "task"]
    return [*words, "--train-file", table, "--text-column", "text", "--max-seq-length", 16]


def test_both_models_are_compared_by_vectors_and_fine_tuned_on_the_same_texts(inputs, tmp_path):
    words = [*models_and_table(inputs, tmp_path, 40), "--label-column", "label"]
    result = run_here(words, compare_on_task.main)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "task" / "comparison.txt").read_text()
    assert text in result.stdout
    lines = text.splitlines()
    assert lines[0].startswith("vectors with logistic regression (26 labels, 5 draws): accuracy ")
    assert lines[2].startswith("fine-tuning (20 epochs, batches of 16, rate ")
    assert "2 seeds): accuracy " in lines[2]
    for line in lines[:4]:
        assert "most frequent class " in line and "tf-idf + logistic regression " in line
    assert any(line.startswith("fine-tuning") and "f1 macro" in line for line in lines)
    other = run_here([*words, "--seed", 43], compare_on_task.main)
    assert_refused(other, "seed-42 is of an earlier command with other seeds")
    shutil.rmtree(tmp_path / "after")
    for flag in ("--epochs", "--num-train-epochs"):
        assert_refused(run_here([*words, flag, 2], compare_on_task.main), f"leave {flag} out")


def test_vectors_are_compared_with_100_labels_and_with_all(inputs, tmp_path):
    words = [*models_and_table(inputs, tmp_path, 300), "--label-column", "label"]
    words += ["--group-column", "text"]
    args, command = compare_on_task.parse_arguments([*map(str, words)])
    lines = compare_on_task.compare_vectors(args, command)
    assert [line.partition(":")[0] for line in lines[::2]] == [
        "vectors with logistic regression (100 labels, 5 draws)",
        "vectors with logistic regression (192 labels, 5 draws)",
    ]
    for name in ("100", "all"):
        folder = tmp_path / "task" / f"vectors-{name}" / "after"
        draws = list(folder.glob("seed-*/eval_predictions.*"))
        assert len(draws) == len(list(folder.glob("seed-*/scores.json"))) == 5
        assert len({path.read_text() for path in draws}) > 1


def test_tfidf_learns_from_the_rows_of_a_draw_also_of_a_large_file(inputs, tmp_path, monkeypatch):
    words = [*models_and_table(inputs, tmp_path, 300), "--label-column", "label"]
    args, command = compare_on_task.parse_arguments([*map(str, words)])
    stored = []
    for most in (20_000, 110):
        monkeypatch.setattr(baselines, "MAX_ROWS", most)
        compare_on_task.compare_vectors(args, command)
        files = sorted((tmp_path / "task").rglob("seed-*/scores.json"))
        stored.append([read_json(path)["baselines"] for path in files])
        rows = {
            scores["tf-idf + logistic regression"].get("training_rows") for scores in stored[-1]
        }
        assert rows == ({None} if most == 20_000 else {None, 110})
    few, all_rows = range(10), range(10, 20)  # folders "100" come before "all"
    assert [stored[0][place] for place in few] == [stored[1][place] for place in few]
    assert [stored[0][place] for place in all_rows] != [stored[1][place] for place in all_rows]


@pytest.mark.parametrize(
    "counts", [[100, 100], [150, 150, 1], [3] * 150, [60, 140]], ids=["even", "rare", "many", "40"]
)
def test_draws_have_each_class_in_proportion_also_rare_ones(counts):
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))
    draws = compare_on_task.draws_of(labels, None)
    left_out = [set(range(len(labels))) - set(rows.tolist()) for rows in draws]
    assert sum(map(len, left_out)) == len(labels) == len(set.union(*left_out))
    for count in (None, 100):
        draws = compare_on_task.draws_of(labels, count)
        assert len({tuple(rows) for rows in draws}) == len(draws) == 5
        for rows in draws:
            assert len(rows) == len(set(rows.tolist())) == (count or len(rows))
            share = np.bincount(labels[rows], minlength=len(counts))
            assert np.abs(share - len(rows) / len(labels) * np.array(counts)).max() < 1.01
            assert count is None or len(counts) > count or share.all()


def test_each_draw_takes_another_row_of_a_rare_class():
    """Else the draws differ less than those of other rows would."""
    counts = [3_920, *[4] * 20]
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))
    drawn = np.unique(np.concatenate(compare_on_task.draws_of(labels, 100)))
    # Five draws with replacement take 3.05 of four rows on average.
    assert 50 < (labels[drawn] > 0).sum() <= 80


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        (("--regression",), "ridge regression (13 labels"),
        (("--task-name", "multi-label"), "logistic regression for each label (13 labels"),
    ],
    ids=["numbers", "labels"],
)
def test_numbers_and_several_labels_are_compared_by_vectors_too(inputs, tmp_path, flags, method):
    words = [*models_and_table(inputs, tmp_path, 20), "--label-column", "label", *flags]
    if "multi-label" in flags:
        table = tmp_path / "train.csv"
        text = table.read_text().replace(",1", ",any|good").replace(",0", ",any")
        table.write_text(text)
    args, command = compare_on_task.parse_arguments([*map(str, words)])
    lines = compare_on_task.compare_vectors(args, command)
    assert lines and all(line.startswith(f"vectors with {method}, 5 draws): ") for line in lines)
