"""Two runs compared: scores against those of the tasks, intervals against the analysis of variance,
verdicts against runs that do not differ, and the program.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_refused
from glue_runs import make_files, own_files, write_csv
from glue_runs import run as glue_run
from log_files import only_phase
from scipy import optimize, stats
from scored_runs import KINDS, NUM_ROWS, remove_last_row, write_run
from sklearn.metrics import f1_score, matthews_corrcoef
from small_runs import run_here

import compare
import inference
import report
from bert_recipe.reporting import paired_scores
from bert_recipe.reporting.calibration import calibration
from bert_recipe.reporting.comparison import corrected, differences_of, read_model
from bert_recipe.reporting.comparison_cards import comparison_cards
from bert_recipe.reporting.paired_scores import (
    MeanScore,
    OrderScore,
    SumScore,
    compare_scores,
    holm,
)
from bert_recipe.reporting.records import differences, read_runs
from bert_recipe.reporting.scored_rows import class_scores, several_label_scores
from bert_recipe.tasks.ner.scores import f1

RESUME = ("--resume-from-checkpoint",)
# Of tokens, which differ between models.
NOT_COMPARED = {("texts with entities", "accuracy")}
RECORD = {"identity": {}, "hyperparameters": {"--label-separator": "; "}}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_both_runs_are_those_of_the_task(tmp_path, kind):
    expected = [write_run(tmp_path / name, kind, seed) for name, seed in (("a", 1), ("b", 2))]
    for name in "ab" if "other separator" in kind else "":
        (tmp_path / name / "predicted_by.json").write_text(json.dumps(RECORD))
    first, second = (read_model(tmp_path / name) for name in "ab")
    scored = list(differences_of(first, second))
    percent = 100 if kind == "SQuAD" else 1
    names = ["_".join(filter(None, (one.set_name, one.name))) for one in scored]
    assert {*names} == {name for name in expected[0] if (kind, name) not in NOT_COMPARED}
    for name, one in zip(names, scored, strict=True):
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
def test_scores_without_a_row_are_those_of_scikit_learn(name, classes, metric):
    random = np.random.default_rng(0)
    true, predicted = random.integers(classes, size=(2, 12))  # so few that classes are missing
    score = class_scores(true, predicted, [name])[name]
    whole = metric(true, predicted)
    assert score.value() == pytest.approx(whole)
    pairs = [(np.delete(true, row), np.delete(predicted, row)) for row in range(12)]
    expected = [12 * whole - 11 * metric(*pair) for pair in pairs]
    assert score.pseudo_values() == pytest.approx(expected)


@pytest.mark.parametrize("average", ["micro", "macro"])
def test_scores_of_several_labels_without_a_row_are_those_of_scikit_learn(average):
    random = np.random.default_rng(0)
    labels = np.array(["a", "b", "c"])
    sides = random.random((2, 12, 3)) < 0.3
    cells = [["|".join(labels[row]) for row in side] for side in sides]
    name = f"f1_{average}"
    scores, _ = several_label_scores(*cells, labels.tolist(), [name], "|")

    def metric(*pair: np.ndarray) -> float:
        return f1_score(*pair, average=average, zero_division=0)

    whole = metric(*sides)
    assert scores[name].value() == pytest.approx(whole)
    expected = [12 * whole - 11 * metric(*np.delete(sides, row, axis=1)) for row in range(12)]
    assert scores[name].pseudo_values() == pytest.approx(expected)


def test_the_jackknife_of_a_correlation_leaves_groups_of_rows_out(monkeypatch):
    random = np.random.default_rng(0)
    labels, predictions = random.normal(size=(2, 60))

    def correlation(*pair: np.ndarray) -> float:
        return np.corrcoef(*pair)[0, 1]

    score = OrderScore(labels, predictions + labels, correlation)
    # Fisher's standard error, for many rows.
    expected = (1 - score.value() ** 2) / 60**0.5
    assert score.pseudo_values().std(ddof=1) / 60**0.5 == pytest.approx(expected, rel=0.3)
    monkeypatch.setattr(paired_scores, "MAX_GROUPS", 30)
    assert score.pseudo_values().std(ddof=1) / 30**0.5 == pytest.approx(expected, rel=0.3)


def variances(values_SG: np.ndarray) -> tuple[float, float, float]:
    """Of the mean of a table: of runs, of rows, and of what is left, by the analysis of variance of
    two ways.
    """
    runs, rows = values_SG.shape
    left = values_SG - values_SG.mean(0) - values_SG.mean(1, keepdims=True) + values_SG.mean()
    of_left = (left**2).sum() / (runs - 1) / (rows - 1) / values_SG.size
    return (values_SG.mean(1).var(ddof=1) / runs, values_SG.mean(0).var(ddof=1) / rows, of_left)


@pytest.mark.parametrize("runs", [(3, 3), (2, 4)])
def test_each_part_of_the_error_is_counted_once_with_its_own_degrees(runs):
    random = np.random.default_rng(2)
    hard = random.random(40)
    first, second = (
        (easy + random.random((count, 40)) > 1).astype(float)
        for count, easy in zip(runs, (hard, 1.2 - hard), strict=True)
    )
    sides = [[MeanScore(values) for values in side] for side in (first, second)]
    same_seeds = runs[0] == runs[1]
    result = compare_scores(*sides, same_seeds)
    value = second.mean() - first.mean()
    of_rows = (second.mean(0) - first.mean(0)).var(ddof=1) / 40
    if same_seeds:
        of_runs, of_rows, left = variances(second - first)
        degrees = 2.0
    else:
        (one, _, left), (other, _, other_left) = variances(first), variances(second)
        welch = stats.ttest_ind(first.mean(1), second.mean(1), equal_var=False)
        of_runs, left, degrees = one + other, left + other_left, welch.df
    for level, half in ((0.05, np.diff(result.interval)[0] / 2), (result.p_value, value)):
        squares = stats.t.isf(level / 2, degrees) ** 2 * of_runs
        squares += stats.t.isf(level / 2, 39) ** 2 * (of_rows - left)
        assert half == pytest.approx(squares**0.5), level
    assert result.means == pytest.approx((first.mean(), second.mean()))


def drawn_scores(random: np.random.Generator, runs: int, share: float, noise: float, hard):
    """Of `runs` runs of a model. noise: of the share of right rows, from run to run."""
    scores = []
    for _ in range(runs):
        share_of_run = share + noise * random.normal()
        of_run = random.random(len(hard))
        is_by_row = random.random(len(hard)) < 0.7
        is_right = np.where(is_by_row, hard, of_run) < share_of_run
        scores.append(MeanScore(is_right.astype(float)))
    return scores


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.09])
@pytest.mark.parametrize("runs", [2, 3, 5])
def test_runs_of_the_same_model_are_rarely_said_to_differ(noise, runs):
    for same_seeds in (True, False):
        assert share_of_verdicts(runs, noise, 0.0, 600, same_seeds) <= 0.06


def share_of_verdicts(
    runs: int, noise: float, gain: float, trials: int, same_seeds: bool = True
) -> float:
    """How often two models are said to differ, of which one has a share of right rows that is
    higher by `gain`.
    """
    random = np.random.default_rng(0)
    verdicts = []
    for _ in range(trials):
        hard = random.random(200)  # the same rows for both
        sides = (drawn_scores(random, runs, 0.65 + more, noise, hard) for more in (0, gain))
        verdicts.append(compare_scores(*sides, same_seeds).is_shown)
    return float(np.mean(verdicts))


def test_a_true_difference_is_found_as_often_as_the_page_says():
    """The page has the shares of 2,000 trials."""
    page = " ".join((ROOT / "docs/report.md").read_text(encoding="utf-8").split())
    pattern = r"two seeds find .*? in (\d+)% of cases, three in (\d+)%, five in (\d+)%"
    (told,) = re.findall(pattern, page)
    for runs, percent in zip((2, 3, 5), told, strict=True):
        share = share_of_verdicts(runs, 0.05, 0.1, 400)
        assert 100 * share == pytest.approx(int(percent), abs=4), runs


def test_models_with_other_mistakes_and_noise_are_rarely_said_to_differ():
    random = np.random.default_rng(0)
    verdicts = []
    for _ in range(400):
        first = drawn_scores(random, 3, 0.65, 0.01, random.random(200))
        second = drawn_scores(random, 3, 0.65, 0.05, random.random(200))
        verdicts.append(compare_scores(first, second, False).is_shown)
    assert np.mean(verdicts) <= 0.06


def test_corrected_p_values_are_holms():
    # Worked by hand: 4 x .01, 3 x .02, then the largest so far, and 1 x .3.
    assert holm([0.02, 0.3, 0.01, 0.025]) == pytest.approx([0.06, 0.3, 0.04, 0.06])
    assert holm([0.9, 0.8]) == pytest.approx([1, 1]) and holm([]) == []


def test_the_error_after_calibration_does_not_depend_on_classes_in_turn():
    """As in files that have a positive row, then a negative one, and so on."""
    labels = np.arange(400) % 2
    sure = np.tile([[0.6, 0.4]], (400, 1))
    calibrated = calibration(sure, labels)
    assert calibrated.error == pytest.approx(0.1) and calibrated.calibrated_error < 0.06


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
    calibrated = calibration(sure, labels)
    assert calibrated.error == pytest.approx(error) and calibrated.calibrated_error < 0.5 * error
    assert calibrated.temperature == pytest.approx(expected, rel=1e-3)
    assert calibrated.temperature == pytest.approx(3, rel=0.15)


def test_one_seed_is_never_better_and_several_runs_are_corrected(tmp_path):
    random = np.random.default_rng(0)
    for name, share in (("a", 0.2), ("b", 0.95), ("c", 0.9)):
        for seed in (1, 2, 3):
            write_right_rows(tmp_path / name / f"seed-{seed}", random.random(200) < share)
    one = run(*(tmp_path / name / "seed-1" for name in "ab")).stdout
    assert "another seed may reverse it" in one and "| one seed" in one and "than A" not in one
    mixed = run(tmp_path / "a" / "seed-1", tmp_path / "b").stdout
    assert "another seed may reverse it" in mixed and "than A" not in mixed
    several = run(*(tmp_path / name for name in "abc")).stdout
    assert several.count("accuracy: B is better than A") == 2
    assert "accuracy: B is worse than A" in run(tmp_path / "b", tmp_path / "a").stdout
    (alone,) = differences_of(*(read_model(tmp_path / name) for name in "ab"))
    ((two,), _) = corrected([[alone], [alone]])
    assert two.difference.p_value == 2 * alone.difference.p_value


def write_right_rows(folder: Path, is_right: np.ndarray) -> None:
    """A run's scored rows."""
    folder.mkdir(parents=True)
    lines = ["text\tlabel\tprediction\tprobability a\tprobability b"]
    for row, right in enumerate(is_right):
        lines.append(f"row {row}\ta\t{'a' if right else 'b'}\t0.5\t0.5")
    (folder / "eval_predictions.tsv").write_text("\n".join(lines) + "\n")
    (folder / "scores.json").write_text(json.dumps({"accuracy": float(is_right.mean())}))


def run(*words: Path | str):
    return run_here([*map(str, words)], compare.main)


def test_rows_are_known_by_content_and_not_by_position(tmp_path, capsys):
    for name in ("a", "b"):
        write_run(tmp_path / name, "classes", 1)
    (path,) = (tmp_path / "b").glob("eval_predictions.*")
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
    printed = run(tmp_path / "a", tmp_path / "b").stdout
    assert "(2 seeds)" in printed
    pooled = run(tmp_path / "folds a", tmp_path / "folds b").stdout
    assert "(2 folds)" in pooled and f"{2 * NUM_ROWS} rows" in pooled
    # Not defined for a fold: only the rows of all folds say whether the score is.
    scores = tmp_path / "folds a" / "fold-1" / "scores.json"
    scores.write_text(json.dumps(json.loads(scores.read_text()) | {"f1_macro": None}))
    assert run(tmp_path / "folds a", tmp_path / "folds b").stdout == pooled
    (path,) = (tmp_path / "b" / "seed-1").glob("eval_predictions.*")
    path.rename(path.with_stem("eval_predictions-m"))
    assert_refused(run(tmp_path / "a", tmp_path / "b"), "seed-0 and seed-1 scored other files")


def test_scores_that_are_not_defined_for_a_run_are_named(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        write_run(tmp_path / name, "numbers", seed)
    assert "not compared" not in run(tmp_path / "a", tmp_path / "b").stdout
    scores = tmp_path / "b" / "scores.json"
    of_b = json.loads(scores.read_text())
    scores.write_text(json.dumps(of_b | {"pearson": None}))
    printed = run(tmp_path / "a", tmp_path / "b").stdout
    assert "not compared, since it is not defined for all runs: pearson\n" in printed
    scores.write_text(json.dumps(of_b | {"pearson": None, "spearman": None}))
    refused = f"{tmp_path}/a and {tmp_path}/b: not compared, since it is not defined for all runs"
    assert_refused(run(tmp_path / "a", tmp_path / "b"), refused)


def write_log(folder: Path, **settings) -> None:
    log = {"timestamp": "1e9", "elapsedtime": "0", "type": "LOG", "step": "PARAMETER"}
    log["data"] = {"output_dir": "x", "task": "classification", **settings}
    (folder / "report.json").write_text(f"DLLL {json.dumps(log)}\n")


def test_the_page_says_what_the_scores_of_two_runs_show(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        write_run(tmp_path / name / "classification", "classes", seed)
        write_log(tmp_path / name / "classification", starting_weights=name)
    page = tmp_path / "page.html"
    report.main([str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(page)])
    text = page.read_text().replace("<wbr>", "")
    (one, *_) = differences_of(*(read_model(tmp_path / name) for name in "ab"))
    assert f"<td>{100 * one.difference.value:+.2f}</td>" in text
    assert "starting_weights" in text and "No logged setting" not in text
    assert str(tmp_path) not in text.partition("Settings and versions")[0]
    remove_last_row(tmp_path / "b" / "classification")
    report.main([str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(page)])
    assert "cannot be compared: other rows were scored" in page.read_text()


def test_the_card_of_two_runs_of_seeds_has_settings_and_rows_that_changed(tmp_path):
    right_rows = {  # of each seed
        "a": [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
        "b": [[1, 1, 1, 1, 0], [0, 1, 1, 0, 0]],
    }
    for name, of_seeds in right_rows.items():
        for seed, right in enumerate(of_seeds):
            folder = tmp_path / name / "mini" / "classification" / f"seed-{seed}"
            write_right_rows(folder, np.array(right, bool))
            write_log(folder, seed=seed, learning_rate=len(name) * 1e-3 + (name == "b"))
    paths = [tmp_path / name for name in "ab"]
    (card,) = comparison_cards(paths, read_runs(paths))
    assert (card.names, card.num_rows) == (("a (2 seeds)", "b (2 seeds)"), 5)
    assert card.settings == [("learning_rate", [0.001, 1.001])]
    (gained, gained_rows), (lost, lost_rows) = card.changes
    assert gained == "3 of 5 rows gained by B" and lost == "1 of 5 rows lost by B"
    assert gained_rows[0] == ("row 2", "a", "b", "a")  # in both seeds
    assert {tuple(row) for row in gained_rows[1:]} == {
        ("row 1", "a", "a, b", "a"),
        ("row 3", "a", "b", "a, b"),
    }
    assert lost_rows == [("row 0", "a", "a", "a, b")]
    seeds = [tmp_path / "a" / "mini" / "classification" / f"seed-{seed}" for seed in (0, 1)]
    (card,) = comparison_cards(seeds, read_runs(seeds))
    assert card.names == ("seed-0", "seed-1") and card.settings == [("seed", [0, 1])]
    assert "one seed" in card.scores[0]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_changed_are_shown_with_what_each_model_says(tmp_path, kind):
    for name, seed in (("a", 1), ("b", 2)):
        write_run(tmp_path / name / "task", kind, seed)
    (card,) = comparison_cards([tmp_path / "a", tmp_path / "b"], [])
    assert not card.error
    shown = [row for _, rows in card.changes for row in rows]
    assert shown and all(row.text for row in shown)
    if kind != "texts with entities":  # the same word may be twice in a text
        assert all(row.first != row.other for row in shown)


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
    assert [*differences([[phase] for phase in phases])] == ["starting_weights"]


def test_inference_divides_logits_by_the_temperature_that_calibrate_writes(tmp_path):
    make_files(tmp_path)
    words = own_files(tmp_path, "--do-train", "--do-eval")
    glue_run(tmp_path, tmp_path / "out", *words, "--max-steps", 4)
    (folder,) = (tmp_path / "out").glob("*/*")
    texts = ["great ship", "awful river", "a lovely house"]
    source = write_csv(tmp_path / "texts.csv", ("text",), *[(text,) for text in texts])

    def log_odds(name: str) -> np.ndarray:
        """Of the two classes of each text."""
        flags = ("--init-checkpoint", folder, "--input", source, "--output", tmp_path / name)
        result = run_here([*map(str, flags), "--text-column", "text"], inference.main)
        assert result.returncode == 0, result.stderr
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        pairs = [[v for key, v in row.items() if key.startswith("probability")] for row in rows]
        return np.diff(np.log(pairs), axis=1)[:, 0]

    before = log_odds("before.jsonl")
    assert_refused(run(folder, "--calibrate"), "no temperature helps")  # it has learnt nothing
    assert not [*folder.rglob("calibration.json")]
    lines = ["text,label,prediction,probability n,probability y"]
    lines += [f"row {row},{'ny'[row % 4 == 0]},n,0.95,0.05" for row in range(48)]
    (folder / "eval_predictions.csv").write_text("\n".join(lines) + "\n")
    result = run(folder, "--calibrate")
    assert result.returncode == 0, result.stderr
    (rows,) = read_model(folder).sets[""].values()
    temperature = calibration(rows.probabilities_nC, rows.labels_n).temperature
    assert f"temperature {temperature:.2f}" in result.stdout
    assert log_odds("after.jsonl") == pytest.approx(before / temperature, rel=1e-3)
    write_run(tmp_path / "numbers", "numbers", 1)
    assert_refused(run(tmp_path / "numbers", "--calibrate"), "is for classifiers of texts")
    write_run(tmp_path / "scored", "classes", 1)
    assert_refused(run(tmp_path / "scored", "--calibrate"), "holds neither model.safetensors")
    (file,) = folder.rglob("calibration.json")
    file.write_text('{"temperature": 0}')
    words = ["--init-checkpoint", str(folder), "--text", "a ship"]
    assert_refused(run_here(words, inference.main), "temperature 0.0 is not positive")


@pytest.mark.parametrize("same_seeds", [True, False])
def test_two_seeds_with_equal_differences_by_chance_show_none(same_seeds):
    """B has another row right with each seed: 2 of 100 predictions."""
    first, second = (np.zeros((2, 50)) for _ in "AB")
    first[:, 10:] = second[:, 10:] = 1
    second[[0, 1], [0, 1]] = 1
    scores = [list(map(MeanScore, side)) for side in (first, second)]
    difference = compare_scores(*scores, same_seeds=same_seeds)
    assert difference.value == pytest.approx(0.02)
    # Of two rows, half a row squared for each; of the mean over two seeds half of that.
    error = (2 * 0.5 / 50**2 / 2) ** 0.5
    expected = 2 * stats.t.sf(0.02 / error, 1)
    assert difference.p_value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize(("rows", "is_shown"), [(1, False), (2, False), (5, False), (6, True)])
def test_few_rows_that_all_differ_alike_show_nothing(rows, is_shown, runs):
    """By chance, five rows do in one of 16 cases: as in a test of signs."""
    counts = np.tile([[0.0, 1, 1], [1, 1, 1]], (rows, 1, 1))  # of entities, by A and by B
    sides = [[SumScore(counts[:, side], f1)] * runs for side in range(2)]
    sides_of_means = [[MeanScore(counts[:, side, 0])] * runs for side in range(2)]
    for first, second in (sides, sides_of_means):
        difference = compare_scores(first, second, same_seeds=True)
        assert difference.value == 1
        assert difference.leaves_out_zero == is_shown
        if runs > 1:
            assert difference.is_shown == is_shown
            assert difference.p_value == stats.binomtest(0, rows).pvalue


def test_a_temperature_is_not_fitted_where_few_rows_are_wrong(tmp_path):
    """Then no seed of the run gets one."""
    for seed in (1, 2):
        write_run(tmp_path / "run" / f"seed-{seed}", "classes", 1)
        (tmp_path / "run" / f"seed-{seed}" / "model.safetensors").touch()
        (path,) = (tmp_path / "run" / f"seed-{seed}").glob("eval_predictions.*")
        rows = list(map(json.loads, path.read_text().splitlines()))
        right = [row for row in rows if row["prediction"] == row["label"]]
        wrong = [row for row in rows if row["prediction"] != row["label"]]
        kept = right * (3 - seed) * 3 + wrong[: 11 - seed]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    says = f"9 of {3 * len(right) + 9} scored rows are wrong"
    assert_refused(run(tmp_path / "run", "--calibrate"), says, "score a larger file")
    assert not [*(tmp_path / "run").rglob("calibration.json")]
