"""The plan of a first model, and its script on real texts."""

import json
import math
import os
import subprocess

import numpy as np
import pytest
from conftest import ROOT, read_json
from small_runs import run_here
from transformers import AutoModelForMaskedLM, AutoTokenizer

from scripts import pretraining_plan
from scripts.pretraining_plan import SIZES, choose_batch, choose_size, choose_updates

HOUR = 3600
CPU, H100 = 2e11, 4e14  # FLOP/s of training, about


@pytest.mark.parametrize(
    ("compute", "tokens", "size"),
    [
        (CPU * 600, 1e9, "tiny"),
        (CPU * HOUR, 1e9, "mini"),
        (CPU * 48 * HOUR, 1e9, "small"),
        (H100 * HOUR, 1e10, "base"),
        (8 * H100 * HOUR, 1e10, "base"),
        (H100 * HOUR, 1e6, "mini"),  # as many tokens as 40 passes over the text have
        (H100 * HOUR, 1, "tiny"),
    ],
)
def test_the_size_follows_the_compute_and_the_text(compute, tokens, size):
    assert choose_size(compute, tokens).config == f"modernbert-{size}"


def test_sizes_are_those_of_their_configs():
    for size in SIZES:
        config = read_json(ROOT / "bert_configs" / f"{size.config}.json")
        width, inner = config["hidden_size"], config["intermediate_size"]
        parameters = config["num_hidden_layers"] * (4 * width**2 + 3 * width * inner)
        assert size.parameters == pytest.approx(parameters, rel=0.05)


@pytest.mark.parametrize("total", [1e4, 4e7, 1e9, 1e11])
def test_the_batch_grows_where_there_would_be_more_than_ten_thousand_updates(total):
    batch = 128 * choose_batch(total, 128)
    assert batch == 4096 if total <= 4e7 else 5e3 <= total / batch <= 1e4


def test_the_updates_fit_into_the_time_and_into_forty_passes():
    assert choose_updates(4096, 10_000, 60, 1e9) == math.floor(10_000 * HOUR / 4096)
    assert choose_updates(4096, 10_000, 60, 1e5) == math.floor(40 * 1e5 / 4096)
    assert choose_updates(4096, 1, 1, 1e9) == 20


def plan_of(folder, *flags, minutes=10):
    """The words of the first command, of `flags` if given, and the plan."""
    texts = folder / "a.txt"
    texts.write_text("word " * 1000)
    first = ("--texts", texts, "--gpus", 0, "--precision", "fp32", "--minutes", minutes)
    return run_here([str(word) for word in (folder, *(flags or first))], pretraining_plan.main)


def test_a_plan_is_kept_and_less_time_refused(tmp_path):
    first, second = (plan_of(tmp_path).stdout for _ in range(2))
    assert first == second and first.startswith("modernbert-tiny 0.0056 128 8000 fp32 32 32")
    result = plan_of(tmp_path, minutes=9)
    assert result.returncode == 2 and "is planned for 10 minutes: give that" in result.stderr


def write_report(path, steps=(), **results):
    """steps: seconds per update."""
    values = [([0, number], {"step_seconds": seconds}) for number, seconds in enumerate(steps, 1)]
    with path.open("w") as file:
        for elapsed, (step, data) in enumerate([*values, ([], results)]):
            record = {"timestamp": "1", "elapsedtime": str(elapsed), "step": step, "data": data}
            file.write(f"DLLL {json.dumps(record)}\n")
    return path


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """The folder of a plan of 10 minutes, of a text of 12.8 million tokens."""
    monkeypatch.setattr(pretraining_plan, "products_per_second", lambda *_: CPU)
    assert plan_of(tmp_path).returncode == 0
    counts = {"samples": 100_000, "%_full": 100}
    (tmp_path / "manifest.json").write_text(json.dumps({"counts": counts}))
    return tmp_path


def planned_updates(folder, seconds):
    report = write_report(folder / "speed.json", [2.0] * 4 + seconds)
    result = plan_of(folder, "--speed-report", report, "--samples", folder)
    return [int(word) for word in result.stdout.split()]


def corrected_updates(folder, step, minutes):
    report = write_report(folder / "run.json", step=step, e2e_train_time=60 * minutes)
    return int(plan_of(folder, "--training-report", report).stdout)


@pytest.mark.parametrize("busy", [[], [1.0] * 25, [0.3] * 12 + [3.0] * 12])
def test_what_else_runs_for_some_updates_does_not_change_the_plan(planned, busy):
    updates, first_part = planned_updates(planned, busy + [0.1] * (36 - len(busy)))
    assert updates == pytest.approx(6000, rel=0.1) and first_part == math.ceil(0.4 * updates)


@pytest.mark.parametrize(
    ("minutes", "updates"),
    [
        (4, 6000),
        (2, 12_000),  # the machine was busy when its speed was measured
        (5, 4800),
        (9, 3429),  # the rate falls over the last 30%
        (0.1, 125_000),  # forty passes
    ],
)
def test_the_first_part_of_a_run_decides_how_long_it_is(planned, minutes, updates):
    planned_updates(planned, [0.1] * 36)
    assert corrected_updates(planned, 2400, minutes) == updates
    assert planned_updates(planned, [0.1] * 36) == [updates, 0]  # resumed


def test_a_run_goes_on_for_more_minutes(planned):
    planned_updates(planned, [0.1] * 36)
    assert plan_of(planned, minutes=20).returncode == 0
    assert planned_updates(planned, [0.1] * 36) == [6000, 2400]  # not corrected yet
    assert corrected_updates(planned, 2400, 8) == 6000
    assert plan_of(planned, minutes=30).stdout.split()[-1] == "6000"
    assert planned_updates(planned, [9.0] * 36) == [6000, 1]
    assert corrected_updates(planned, 6000, 20) == 9000


def test_padding_is_no_text(planned):
    """Rows of short documents are not full: forty passes are as many updates as of full rows, and
    the time is that of the updates.
    """
    (planned / "manifest.json").write_text(
        json.dumps({"counts": {"samples": 100_000, "%_full": 50}})
    )
    report = write_report(planned / "speed.json", [0.1] * 40)
    result = plan_of(planned, "--speed-report", report, "--samples", planned)
    assert (
        result.stdout.split()[0] == "6000"
        and "about 10 minutes at 20,480 tokens/s" in result.stderr
    )
    report = write_report(planned / "run.json", step=2400, e2e_train_time=6)
    result = plan_of(planned, "--training-report", report)
    assert result.stdout.strip() == "125000" and "are read 40 times" in result.stderr


@pytest.mark.parametrize(
    ("minutes", "message"),
    [
        (9, ""),
        (7, "6,000 updates took 7.0 of 10 minutes: to go on, rerun the command with more"),
        (14, "6,000 updates took 14.0 of 10 minutes: the machine became slower meanwhile"),
    ],
)
def test_a_run_that_took_another_time_says_so(planned, minutes, message):
    planned_updates(planned, [0.1] * 36)
    assert corrected_updates(planned, 2400, 4) == 6000
    report = write_report(planned / "run.json", step=6000, e2e_train_time=60 * minutes)
    said = plan_of(planned, "--training-report", report).stderr
    assert said.startswith(message) and bool(said) == bool(message)


def pretrain(tmp_path, plan, **environment):
    """The output of the script on a few texts in Cyrillic, a word of them, and its folder."""
    random = np.random.default_rng(0)
    letters = [chr(code) for code in range(ord("а"), ord("я") + 1)]
    words = ["".join(random.choice(letters, random.integers(2, 7))) for _ in range(200)]
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(8):
        sentences = (" ".join(random.choice(words, 8)).capitalize() + "." for _ in range(60))
        (texts / f"{number}.txt").write_text("\n".join(sentences), encoding="utf-8")
    size = SIZES[0]._asdict() | {"length": 32, "vocabulary": 300, "learning_rate": 1e-3}
    size |= {"precision": "fp32", "batch": 4, "micro_batch": 4, "minutes": 1}
    output = tmp_path / "out"
    output.mkdir()
    (output / "plan.json").write_text(json.dumps(size | plan))
    command = ["bash", ROOT / "scripts/pretrain_from_texts.sh", texts, output, "1", "0"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert result.returncode == 0, result.stderr
    return result, words[0], output


def test_texts_in_another_script_become_a_model_that_transformers_loads(tmp_path):
    # Forty passes over 26 tokens are 8 updates, for which there is time.
    plan = {"tokens": 26, "tokens_per_second": 1000, "epochs": 25, "updates": 5, "first_part": 2}
    result, word, output = pretrain(tmp_path, plan)
    assert "5 updates of 4 x 32 tokens with NorMuon at 0.001" in result.stderr
    assert "8 updates of 4 x 32 tokens" in result.stderr
    assert "step 2 of 5" in result.stdout and "step 8 of 8" in result.stdout
    assert "step 3/5" not in result.stdout
    model = output / "results/custom/phase1/best"
    assert len(AutoTokenizer.from_pretrained(model).tokenize(word)) >= 1
    assert AutoModelForMaskedLM.from_pretrained(model).config.num_hidden_layers == 2


def test_flags_of_the_whole_run_are_not_given_to_its_measurement(tmp_path):
    """--benchmark refuses them."""
    flags = "--early-stopping 9 --eval_steps=2 --max-eval-samples 5 --steps-this-run 3 --overwrite"
    result, _, output = pretrain(tmp_path, {"tokens": 26}, EXTRA_ARGS=f"{flags} --dropout 0.2")
    assert "phase1 stopped at step 3 of" in result.stdout
    assert "--dropout 0.2" in (output / "speed.log").read_text()
