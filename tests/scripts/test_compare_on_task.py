"""Models before and after continued pre-training, compared on a task."""

import shutil

import pytest
from conftest import assert_refused
from glue_runs import sentences, write_csv
from small_runs import run_here, steps_folder, train

from bert_recipe.reporting.comparison import ScoreDifference
from bert_recipe.reporting.paired_scores import Difference
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


def test_both_models_are_fine_tuned_shortly_and_fully_on_the_same_texts(inputs, tmp_path):
    train(inputs.command(tmp_path / "before", "--max-steps", 1))
    train(inputs.command(tmp_path / "after", "--max-steps", 2))
    rows = [row for row in sentences(40, 0) if row[0] != "text"]
    table = write_csv(tmp_path / "train.csv", ("text", "label"), *rows)
    words = ["--before", steps_folder(tmp_path / "before"), "--num-seeds", 2]
    words += ["--after", steps_folder(tmp_path / "after"), "--output-dir", tmp_path / "task"]
    words += ["--train-file", table, "--text-column", "text", "--label-column", "label"]
    words += ["--max-seq-length", 16]
    result = run_here(words, compare_on_task.main)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "task" / "comparison.txt").read_text()
    assert text in result.stdout
    lines = text.splitlines()
    assert lines[0].startswith("short fine-tuning (1 epoch, batches of 16, rate ")
    assert any(line.startswith("short") and "f1 macro" in line for line in lines)
    assert lines[2].startswith("full fine-tuning (20 epochs, batches of 16, rate ")
    shutil.rmtree(tmp_path / "after")
    assert_refused(run_here([*words, "--epochs", 2], compare_on_task.main), "leave --epochs out")
