"""The outputs of a classifier of few rows are drawn towards the class shares, as a trial says."""

import os
import random
import re
import signal

import numpy as np
import pytest
import torch
from conftest import read_json
from glue_runs import GOOD, WORDS, run, words, write_csv
from safetensors.torch import load_file
from scipy.optimize import minimize_scalar

import doctor
from bert_recipe.training import setup, trial
from bert_recipe.training.shrunk_outputs import SHRINKAGE, fitted_shrinkage, log_shares
from bert_recipe.training.trainer import Trainer
from bert_recipe.utils import progress
from bert_recipe.utils.errors import UserError

NO_TRIAL = "--no-shrink-outputs"
SHORT = ("--max-steps", 10)


def table(folder, count: int, is_learnable: bool, share: float = 0.7):
    """Rows of two classes, one of which has this share; without a rule by chance."""
    rng = random.Random(0)
    rows = []
    for number in range(count):
        label = "yes" if number < share * count else "no"
        text = rng.sample(WORDS, 4)
        if is_learnable and label == "no":
            text[rng.randrange(4)] = rng.choice(GOOD)
        rows.append((" ".join(text), label))
    rng.shuffle(rows)
    return write_csv(folder / "rows.csv", ("review", "verdict"), *rows)


def train(files, folder, rows, *flags) -> None:
    columns = ("--text-column", "review", "--label-column", "verdict")
    assert run(files, folder, *columns, "--do-train", "--train-file", rows, *flags) == 0


def last_step(folder):
    models = folder.glob("*/classification/[0-9]*/model.safetensors")
    return max((model.parent for model in models), key=lambda path: int(path.name))


def weights(folder):
    return load_file(last_step(folder) / "model.safetensors")


def recorded(folder) -> float | None:
    return read_json(last_step(folder) / "model_progress.json")["hyperparameters"].get(SHRINKAGE)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("noise", [0.5, 2.0, 8.0])
def test_the_factor_is_the_most_likely_one(noise, num_classes):
    """Beside a search by scipy, of the likelihood of torch and a normal logarithm of the factor."""
    rng = np.random.default_rng(0)
    labels = rng.choice(num_classes, 80, p=[0.7, 0.3, 0.0][:num_classes])
    logits = 2 * np.eye(num_classes)[labels] + rng.normal(0, noise, (80, num_classes))
    shares = np.bincount(labels, minlength=num_classes).clip(0.5) / 80

    def loss(log_factor: float) -> float:
        factor = np.exp(log_factor)
        mixed = torch.from_numpy(factor * logits + (1 - factor) * np.log(shares))
        total = torch.nn.functional.cross_entropy(mixed, torch.from_numpy(labels), reduction="sum")
        return float(
            total
            - torch.distributions.Normal(np.log(0.2), 1.0).log_prob(
                torch.tensor(log_factor, dtype=torch.float64)
            )
        )

    expected = np.exp(minimize_scalar(loss, bounds=(np.log(0.01), 0), method="bounded").x)
    factor = fitted_shrinkage(logits, labels, log_shares(labels, num_classes))
    assert factor == pytest.approx(expected, rel=0.06)  # of the grid, and two digits


def test_the_last_weights_are_those_of_a_run_without_it_drawn_to_the_shares(glue_files, tmp_path):
    rows = table(tmp_path, 120, is_learnable=False)
    train(glue_files, tmp_path / "a", rows, *SHORT)
    train(glue_files, tmp_path / "b", rows, *SHORT, NO_TRIAL)
    factor, plain = recorded(tmp_path / "a"), weights(tmp_path / "b")
    assert factor < 0.3 and recorded(tmp_path / "b") is None
    plain["classifier.weight"] *= factor
    shares = torch.tensor([0.3, 0.7]).log()  # in the order of the labels: no, yes
    plain["classifier.bias"] = factor * plain["classifier.bias"] + (1 - factor) * shares
    torch.testing.assert_close(weights(tmp_path / "a"), plain)


def test_a_rule_that_can_be_learnt_keeps_its_answers(glue_files, tmp_path):
    rows = table(tmp_path, 120, is_learnable=True)
    flags = ("--max-steps", 50, "--do-eval", "--eval-file", rows)
    train(glue_files, tmp_path, rows, *flags)
    (scores,) = tmp_path.glob("*/classification/scores.json")
    assert read_json(scores)["accuracy"] > 0.95 and recorded(tmp_path) > 0.1


def test_all_folds_of_a_file_have_trials_or_none(glue_files, tmp_path, capsys):
    """By its rows: those of some folds are fewer than 100, or have less than 60% of the class."""
    rows = table(tmp_path, 100, is_learnable=True, share=0.6)
    train(glue_files, tmp_path, rows, "--max-steps", 1, "--num-folds", 5, "--do-eval")
    assert capsys.readouterr().out.count("5 trials on") == 5


def test_a_resumed_run_takes_the_recorded_factor(glue_files, tmp_path, capsys):
    """To the bit, without another trial."""
    rows = table(tmp_path, 120, is_learnable=False)
    train(glue_files, tmp_path / "a", rows, *SHORT)
    train(glue_files, tmp_path / "b", rows, *SHORT, "--steps-this-run", 1, "--profile-update", 1)
    printed = capsys.readouterr().out
    assert printed.count("5 trials on") == 2 and printed.count("profile of update") == 1
    train(glue_files, tmp_path / "b", rows, *SHORT, "--resume-from-checkpoint")
    assert "trials on" not in capsys.readouterr().out
    torch.testing.assert_close(weights(tmp_path / "b"), weights(tmp_path / "a"), rtol=0, atol=0)


def test_trials_show_their_progress_also_in_a_file(glue_files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0)
    train(glue_files, tmp_path, table(tmp_path, 120, is_learnable=False), *SHORT)
    assert capsys.readouterr().err.count("trial: 1 of ") == 5


def test_a_run_whose_outputs_are_shrunk_does_not_go_on(glue_files, tmp_path):
    """They would be shrunk twice; without more updates it is only scored again."""
    rows = table(tmp_path, 120, is_learnable=False)
    train(glue_files, tmp_path, rows, "--epochs", 1)
    before = weights(tmp_path)
    train(glue_files, tmp_path, rows, "--epochs", 1, "--resume-from-checkpoint")
    torch.testing.assert_close(weights(tmp_path), before, rtol=0, atol=0)
    with pytest.raises(UserError, match="it cannot train longer: add --overwrite"):
        train(glue_files, tmp_path, rows, "--epochs", 2, "--resume-from-checkpoint")


def test_a_run_that_was_begun_without_it_goes_on_so(glue_files, tmp_path, capsys):
    """As those of versions that did not have it."""
    rows = table(tmp_path, 120, is_learnable=False)
    train(glue_files, tmp_path, rows, *SHORT, NO_TRIAL, "--steps-this-run", 5)
    train(glue_files, tmp_path, rows, *SHORT, "--resume-from-checkpoint")
    assert "trials on" not in capsys.readouterr().out and recorded(tmp_path) is None
    with pytest.raises(UserError, match="the run that is resumed goes on without it"):
        train(glue_files, tmp_path, rows, *SHORT, "--resume-from-checkpoint", "--shrink-outputs")


@pytest.mark.parametrize(
    ("count", "share", "flags"),
    [
        (99, 0.7, ()),
        (120, 0.7, ("--class-weights", "balanced")),
        (120, 0.7, (NO_TRIAL,)),
        (120, 0.7, ("--do-eval", "--eval-file", "rows.csv", "--eval-steps", 1)),
    ],
)
def test_other_runs_have_no_trial(glue_files, tmp_path, monkeypatch, capsys, count, share, flags):
    monkeypatch.chdir(tmp_path)
    rows = table(tmp_path, count, False, share)
    train(glue_files, tmp_path, rows, "--max-steps", 1, *flags)
    assert "trials on" not in capsys.readouterr().out and recorded(tmp_path) is None


def test_a_run_that_ends_where_it_stopped_is_not_shrunk(glue_files, tmp_path):
    """No update is left after which it could be, so its settings do not name a factor."""
    rows = table(tmp_path, 120, is_learnable=False)
    train(glue_files, tmp_path, rows, *SHORT, "--steps-this-run", 5)
    report = tmp_path / "report.json"
    assert report.read_text().count('"shrinkage"') == 1
    train(glue_files, tmp_path, rows, "--max-steps", 5, "--resume-from-checkpoint")
    assert report.read_text().count('"shrinkage"') == 1


def test_few_distinct_texts_have_no_trial(glue_files, tmp_path, capsys):
    """Such as those of which the vocabulary knows no word: nothing could be held out."""
    rows = [("\u0e01" * (number + 1), "yes" if number < 84 else "no") for number in range(120)]
    rows = write_csv(tmp_path / "rows.csv", ("review", "verdict"), *rows)
    train(glue_files, tmp_path, rows, "--max-steps", 1)
    assert "trials on" not in capsys.readouterr().out


@pytest.mark.parametrize("last", [3, 8, 16])  # updates; a trial has 8
def test_a_signal_in_the_trial_ends_the_command(glue_files, tmp_path, monkeypatch, capsys, last):
    rows = table(tmp_path, 120, is_learnable=False)
    update, made = Trainer.optimizer_step, []

    def update_and_stop(trainer: Trainer) -> None:
        update(trainer)
        made.append(1)
        if len(made) == last:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "optimizer_step", update_and_stop)
    train(glue_files, tmp_path, rows, "--max-steps", 10)
    assert "5 trials on four fifths" in (out := capsys.readouterr().out)
    assert "stopped in a trial: rerun the same command" in out
    assert last <= len(made) <= last + 1
    assert not list(tmp_path.glob("*/classification/[0-9]*"))


def test_a_signal_between_two_trials_ends_the_command(glue_files, tmp_path, monkeypatch, capsys):
    rows = table(tmp_path, 120, is_learnable=False)
    monkeypatch.setattr(trial, "predict", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    train(glue_files, tmp_path, rows, "--max-steps", 10)
    assert "stopped by a signal: rerun the same command" in capsys.readouterr().out
    assert not list(tmp_path.glob("*/classification/[0-9]*"))


def test_a_trial_whose_loss_is_not_finite_names_no_checkpoints(glue_files, tmp_path):
    rows = table(tmp_path, 120, is_learnable=False)
    with pytest.raises(UserError, match="lower --learning-rate") as refusal:
        train(glue_files, tmp_path, rows, "--learning-rate", 3e38, "--max-steps", 40)
    assert "checkpoints are in" not in str(refusal.value)


def test_a_trial_is_not_measured(glue_files, tmp_path, monkeypatch):
    """Each event of a stopwatch would be kept to its end, with no one to read it."""
    laps: list[bool] = []
    make = setup.Stopwatch

    def stopwatch(device, enabled):
        laps.append(enabled)
        return make(device, enabled)

    monkeypatch.setattr(setup, "Stopwatch", stopwatch)
    rows = table(tmp_path, 120, is_learnable=False)
    train(glue_files, tmp_path, rows, "--max-steps", 2)
    assert laps == [False] * 6


@pytest.mark.parametrize(
    ("count", "share", "says"),
    [
        (99, 0.7, "100 to 1,999 rows, and there are 99"),
        (2000, 0.7, "1,999 rows, and there are 2,000"),
        (120, 0.55, "has 55.0% of the rows, less than 60%"),
    ],
)
def test_a_typed_flag_without_effect_is_refused(glue_files, tmp_path, count, share, says):
    rows = table(tmp_path, count, False, share)
    with pytest.raises(UserError, match=f"--shrink-outputs has no effect.*{says}"):
        train(glue_files, tmp_path, rows, "--max-steps", 1, "--shrink-outputs")


@pytest.mark.parametrize(("count", "trials"), [(125, 5), (200, 4), (250, 3), (700, 2), (800, 1)])
def test_150_rows_are_held_out(glue_files, tmp_path, capsys, count, trials):
    rows = table(tmp_path, count, is_learnable=False)
    train(glue_files, tmp_path, rows, "--max-steps", 1)
    out = capsys.readouterr().out
    assert f"{trials} trials on" in out if trials > 1 else "a trial on" in out
    held_out = re.search(r"of (\d+) held-out rows", out)
    assert int(held_out[1]) == pytest.approx(count * trials / 5, abs=5)  # some texts are equal


def test_the_doctor_counts_the_updates_of_trials(glue_files, tmp_path, capsys):
    rows = table(tmp_path, 120, is_learnable=False)
    columns = ("--text-column", "review", "--label-column", "verdict")
    flags = ("--do-train", "--train-file", rows, "--max-steps", 10)
    doctor.main(["glue", *words(glue_files, tmp_path / "out", *columns, *flags)])
    out = capsys.readouterr().out
    assert "time: 50 updates of" in out and "; 40 updates are of trials)" in out


def test_trials_and_seeds_say_once_what_their_weights_lack(glue_files, tmp_path, capsys):
    rows = table(tmp_path, 120, is_learnable=False)
    train(glue_files, tmp_path / "a", rows, NO_TRIAL, *SHORT)
    flags = ("--init-checkpoint", last_step(tmp_path / "a"), "--num-seeds", 2, *SHORT)
    rows.write_text(rows.read_text().replace(",no", ",perhaps"))
    train(glue_files, tmp_path / "b", rows, *flags)
    out = capsys.readouterr().out
    assert out.count("5 trials on") == 2
    assert out.count("they start from their initial values") == 1
