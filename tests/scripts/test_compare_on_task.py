"""Models before and after continued pre-training, compared on a task."""

import math
import shutil

import numpy as np
import pytest
from conftest import assert_refused
from glue_runs import sentences, write_csv
from small_runs import run_here, steps_folder, train

from scripts import compare_on_task


@pytest.mark.parametrize(
    ("gain", "verdict"), [(-0.2, "WORSE"), (0.0, "no difference"), (0.2, "better")]
)
def test_the_interval_is_that_of_the_mean_paired_change(gain, verdict):
    """For many texts, about 1.96 standard errors on both sides."""
    rng = np.random.default_rng(0)
    before = {str(text): [bool(rng.random() < 0.6)] for text in range(500)}
    after = {text: [bool(rng.random() < 0.6 + gain)] for text in before}
    found = compare_on_task.compare(before, after)
    changes = 100.0 * np.array([after[text][0] - before[text][0] for text in before], dtype=float)
    error = 1.96 * changes.std(ddof=1) / math.sqrt(len(changes))
    assert (found.low, found.high) == pytest.approx(
        (changes.mean() - error, changes.mean() + error), abs=0.3
    )
    assert found.after - found.before == pytest.approx(changes.mean())
    assert verdict in str(found)


def test_both_models_are_fine_tuned_shortly_and_long_on_the_same_texts(inputs, tmp_path):
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
    assert lines[0].startswith("short fine-tuning (1 epoch, batches of 32): accuracy ")
    assert lines[1].startswith("long fine-tuning (4 epochs, batches of 16): accuracy ")
    shutil.rmtree(tmp_path / "after")
    assert_refused(run_here([*words, "--epochs", 2], compare_on_task.main), "leave --epochs out")
