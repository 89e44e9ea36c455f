"""--benchmark --estimate: how long a run takes, and which GPUs it fits."""

import json
import re

import pytest
from conftest import assert_refused
from small_runs import RunInputs, choose_model_of, run_here, train

from arguments import make_run_config
from benchmarks.memory import Case, estimate
from diagnostics.estimates import LIBRARY_BYTES, RunSize, devices_line, memory_line, memory_settings, time_line
from modeling import BertForPreTraining
from run_pretraining import parse_arguments


def test_the_estimate_is_the_measured_update_times_the_number_of_updates(inputs: RunInputs, tmp_path):
    flags = ("--max-steps", 50_000, "--global-batch-size", 8, "--benchmark", "--benchmark-warmup-steps", 1)
    result = train(inputs.command(tmp_path, *flags, "--benchmark-steps", 3, "--estimate"))
    *_, last = [json.loads(line.removeprefix("DLLL ")) for line in (tmp_path / "report.json").open()]
    match = re.search(r"50,000 updates of 8 sequences, .* take ([\d.]+) (\w+) on 1 x cpu", result.stdout)
    seconds = float(match[1]) * {"s": 1, "minutes": 60, "hours": 3600, "days": 86400}[match[2]]
    assert seconds == pytest.approx(50_000 * last["data"]["step_seconds"], rel=0.06)
    assert "memory on a GPU" in result.stdout and "64 GPUs" in result.stdout


def test_the_estimate_needs_the_measurement(inputs: RunInputs, tmp_path):
    result = run_here(inputs.command(tmp_path, "--max-steps", 5, "--estimate"))
    assert_refused(result, "--estimate has no effect without --benchmark")


def test_gpus_are_divided_by_what_the_run_needs(tmp_path):
    """BERT-large with 32 full sequences and 16-bit products needs more than 16 GB, and fits 24 GB."""
    flags = ("--device", "cuda", "--amp")
    argv = Case("large", 32, flags).command(tmp_path, tmp_path)
    needed = (estimate(argv).total + LIBRARY_BYTES) / 1e9
    args = parse_arguments(argv)
    model = BertForPreTraining(choose_model_of(args).config)
    line = memory_line(model, memory_settings(make_run_config(args.replace(device="cpu"))))
    assert 16 < needed <= 24
    assert f"{needed:.1f} GB per process, fits 80, 40, 24 GB, does not fit 16 GB" in line


def test_the_time_on_other_numbers_of_gpus():
    """8 GPUs and 90 days of updates; and on a CPU, 105 TFLOP/s for 105e12 x 86,400 operations: one day."""
    measured = RunSize(90, 1024, 86400.0, 1e15, "cuda", 8)
    assert "take 90.0 days on 8 x cuda" in time_line(measured)
    assert "1 GPU 720.0 days" in devices_line(measured) and "64 GPUs 11.2 days" in devices_line(measured)
    assert "8 GPUs" not in devices_line(measured)
    assert "1 GPU 24 hours, 8 GPUs 3 hours" in devices_line(RunSize(10, 1024, 1e6, 10.5e12 * 86400, "cpu", 1))
