"""The plan of a first model, and its script on real texts."""

import json
import math
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


def test_a_plan_is_kept_and_another_time_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("word " * 1000)
    words = [tmp_path / "out", "--texts", tmp_path / "a.txt", "--gpus", 0, "--precision", "fp32"]
    for _ in range(2):
        pretraining_plan.main([*map(str, words), "--minutes", "10"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and first.startswith("modernbert-tiny 0.0056 128 8000 fp32 32 32")
    result = run_here([*map(str, words), "--minutes", "9"], pretraining_plan.main)
    assert result.returncode == 2 and "is planned for 10 minutes: give that" in result.stderr


def test_texts_in_another_script_become_a_model_that_transformers_loads(tmp_path):
    random = np.random.default_rng(0)
    letters = [chr(code) for code in range(ord("а"), ord("я") + 1)]
    words = ["".join(random.choice(letters, random.integers(2, 7))) for _ in range(200)]
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(8):
        sentences = (" ".join(random.choice(words, 8)).capitalize() + "." for _ in range(60))
        (texts / f"{number}.txt").write_text("\n".join(sentences), encoding="utf-8")
    size = SIZES[0]._asdict() | {"length": 32, "vocabulary": 300, "learning_rate": 1e-3}
    plan = {"precision": "fp32", "batch": 4, "micro_batch": 4, "minutes": 1, "updates": 5}
    plan |= {"tokens": 5000, "tokens_per_second": 1000, "epochs": 0.1}
    output = tmp_path / "out"
    output.mkdir()
    (output / "plan.json").write_text(json.dumps(size | plan))
    command = ["bash", ROOT / "scripts/pretrain_from_texts.sh", texts, output, "1", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "5 updates of 4 x 32 tokens with NorMuon at 0.001" in result.stderr
    model = output / "results/custom/phase1/best"
    assert len(AutoTokenizer.from_pretrained(model).tokenize(words[0])) >= 1
    assert AutoModelForMaskedLM.from_pretrained(model).config.num_hidden_layers == 2
