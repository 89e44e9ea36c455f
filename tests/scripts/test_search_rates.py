"""A search over learning rates and epochs: its table is that of the runs' own scores."""

import re
import shutil
import statistics

import glue_runs
import pytest
from conftest import assert_refused
from small_runs import run_here

from bert_recipe.checkpoint.record import read_record
from scripts import search_rates

SEARCH = ["--epochs", "4", "--num-seeds", "2"]


@pytest.fixture(scope="module")
def command(glue_files) -> list[str]:
    """A command of run_glue.py without what the search decides."""
    words = glue_runs.words(
        glue_files, glue_files / "unused", *glue_runs.sst_2(glue_files, "--do-eval")
    )
    for flag in ("--output-dir", "--report-file"):
        place = words.index(flag)
        del words[place : place + 2]
    return ["run_glue.py", *words, "--do-train", "--batch-size", "8"]


def test_the_table_has_the_scores_of_all_seeds_and_added_rates_go_on(command, tmp_path, capsys):
    rest = [*SEARCH, "--output-dir", str(tmp_path), *command]
    assert search_rates.main(["--learning-rates", "0.01", *rest]) == 0
    capsys.readouterr()
    assert search_rates.main(["--learning-rates", "1e-9", "0.01", *rest]) == 0
    assert capsys.readouterr().out.count("step 20/24") == 2  # of the seeds of the added rate
    written = (tmp_path / "search.md").read_text()
    rows = re.findall(r"^\| ([\d.e-]+) +\| (\d) +\| (.*?) +\| (.*?) +\| (.*?) +\|$", written, re.M)
    scores = {}
    for rate, epochs, mean, seeds, _ in rows:
        folders = tmp_path.glob(f"rate-{rate}-epochs-{epochs}/*/sst-2/seed-*")
        values = [glue_runs.scores_in(folder)["accuracy"] for folder in sorted(folders)]
        assert [float(value) for value in seeds.split(", ")] == pytest.approx(values, rel=1e-3)
        found_mean, found_deviation = map(float, mean.split(" ± "))
        assert found_mean == pytest.approx(statistics.mean(values), abs=found_deviation / 10 + 1e-4)
        assert found_deviation == pytest.approx(statistics.stdev(values), rel=0.05)
        scores[rate, epochs] = values
    assert len(scores) == 2 and all(len(values) == 2 for values in scores.values())
    assert [row[:2] for row in rows if row[4] == "**best**"] == [("0.01", "4")]
    pairs = zip(scores["1e-09", "4"], scores["0.01", "4"], strict=True)
    differences = [value - best for value, best in pairs]
    shown = search_rates.spread(differences)
    assert rows[0][4] == shown and shown.startswith("-")
    assert "Its rate is the highest of the search: add one beyond it." in written
    page = (tmp_path / "report.html").read_text()
    assert all(f"rate-{rate}-epochs-{epochs}" in page for rate, epochs in scores)


def test_without_rates_the_one_of_the_rule_is_in_the_middle(command, glue_files, tmp_path):
    """On a few rows, as the rule has many epochs."""
    shutil.copytree(glue_files / "SST-2", tmp_path / "SST-2")
    rows = (tmp_path / "SST-2" / "train.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "SST-2" / "train.tsv").write_text("".join(rows[:9]))
    few = ["--data-dir", str(tmp_path / "SST-2")]
    words = ["--num-seeds", "1", "--output-dir", str(tmp_path), *command, *few]
    assert search_rates.main(words) == 0
    written = (tmp_path / "search.md").read_text()
    rates = [float(rate) for rate in re.findall(r"^\| (\d[\d.e-]*) ", written, re.M)]
    assert len(rates) == 3 and rates == pytest.approx([rates[1] / 2, rates[1], 2 * rates[1]])
    scores = next(tmp_path.glob("rate-by-rule-epochs-by-rule/*/*/scores.json"))
    assert read_record(scores.parent).hyperparameters["--learning-rate"] == rates[1]


def test_settings_that_seeds_do_not_tell_apart_are_counted():
    best, other, worse = (search_rates.Setting(rate, 3.0) for rate in (1e-4, 2e-4, 1e-3))
    scores = {best: [0.81, 0.85, 0.83], other: [0.82, 0.80, 0.85], worse: [0.5, 0.54, 0.521]}
    text = search_rates.table("accuracy", scores)
    assert "The seeds tell 1 of the 2 other settings apart from it." in text
    by_chance = {best: [0.84, 0.84, 0.86], other: [0.82, 0.82, 0.84]}  # of 50 rows
    assert "The seeds tell 0 of the 1 other" in search_rates.table("accuracy", by_chance)
    one_seed = {setting: values[:1] for setting, values in scores.items()}
    assert "One seed tells none of them apart" in search_rates.table("accuracy", one_seed)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.4253, 0.4347], "0.4300 ± 0.0066"),
        ([81.2, 84.9, 79.0], "81.7 ± 3.0"),
        ([-0.5], "-0.5"),
        ([0.5, 0.5], "0.5 ± 0"),
        ([1234.0, 1678.0], "1456 ± 314"),
    ],
)
def test_mean_and_deviation_are_written_to_the_same_decimal(values, shown):
    assert search_rates.spread(values) == shown


def test_a_command_that_leaves_nothing_to_compare_is_refused(command, tmp_path):
    search = ["--learning-rates", "0.01", *SEARCH, "--output-dir", str(tmp_path)]
    for words, says in (
        (search, "give a command of run_glue.py or run_ner.py or"),
        ([*search, *command, "--learning_rate=1"], "leave --learning-rate out"),
        ([*search, *command, "--json-summary", "a"], "leave --json-summary out"),
        ([*search, *(word for word in command if word != "--do-eval")], "needs --do-eval"),
        (
            [*search, *command, "--eval-steps=1", "--metric-for-best-model=eval_loss"],
            "give one of accuracy",
        ),
    ):
        assert_refused(run_here(words, search_rates.main), says)
    assert not any(tmp_path.iterdir())
