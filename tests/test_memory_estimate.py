"""The estimate of memory: beside what real steps allocate, and what it says about runs that do not fit here."""

import re

import pytest
from conftest import assert_refused
from small_runs import run_here

from benchmarks.common.shards import write_random_shards
from benchmarks.memory import LENGTH, PRECISIONS, PREDICTIONS, Case, allocated_peak, estimate

TOLERANCE = 0.15
MODES = ("none", "selective", "full")
SHORT = ("--max-steps", "2", "--benchmark-warmup-steps", "1")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_random_shards(tmp_path_factory.mktemp("memory") / "shards", 16, LENGTH, PREDICTIONS)


def command(shards, output, *flags: str) -> list[str]:
    return Case("tiny", 4, flags).command(shards, output)


@pytest.mark.parametrize(
    "flags",
    [
        *((*PRECISIONS[precision], "--activation-checkpoint", mode) for precision in ("fp32", "amp") for mode in MODES),
        ("--use-pure-fp16",),
        ("--use-pure-fp16", "--gradient-merge-steps", "2", "--activation-checkpoint", "full"),
        ("--optimizer", "AdamW", "--gradient-merge-steps", "2", "--activation-checkpoint", "full"),
    ],
    ids=" ".join,
)
def test_the_estimate_is_what_real_steps_allocate(shards, tmp_path, flags):
    argv = command(shards, tmp_path, *flags, *SHORT)
    results = []
    measured = allocated_peak(lambda: results.append(run_here(argv)))
    assert results[0].returncode == 0, results[0].stderr
    assert estimate(argv).total == pytest.approx(measured, rel=TOLERANCE)


def test_sharding_divides_weights_and_optimizer_state(shards, tmp_path):
    whole = estimate(command(shards, tmp_path, "--optimizer", "AdamW"), processes=4)
    shard = estimate(command(shards, tmp_path, "--optimizer", "AdamW", "--data-parallel-shard-degree", "4"), 4)
    for part in ("weights", "optimizer state"):
        assert shard.peak[part] == pytest.approx(whole.peak[part] / 4)


def test_flash_attention_keeps_no_probabilities(shards, tmp_path):
    """Activations per token do not grow with the sequence length."""
    flags = ("--device", "cuda", "--amp", "--max-predictions-per-seq", "1")
    long = estimate(command(shards, tmp_path, *flags))
    short = estimate(command(shards, tmp_path, *flags, "--batch-size", "16", "--max-seq-length", "128"))
    assert long.largest["activations"] == pytest.approx(short.largest["activations"], rel=0.02)


def test_the_flag_prints_a_table_and_touches_nothing(tmp_path):
    argv = [*command(tmp_path / "no data", tmp_path / "output"), "--device", "cuda", "--estimate-memory", "8"]
    result = run_here(argv)
    assert result.returncode == 0, result.stderr
    assert "each of 8 x cuda" in result.stdout and re.search(r"total +\d+\.\d\d", result.stdout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--estimate-memory", "0"), ["--estimate-memory", ">= 1"]),
        (("--estimate-memory", "6", "--data-parallel-shard-degree", "4"), ["do not multiply to the 6 processes"]),
        (("--estimate-memory", "2", "--data-parallel-shard-degree", "2", "--enable-cpu-offload"), ["for GPUs"]),
    ],
    ids=" ".join,
)
def test_flags_that_the_run_would_refuse_are_refused(tmp_path, flags, words):
    assert_refused(run_here([*command(tmp_path, tmp_path), *flags]), *words)
