"""The benchmarks at toy size: they run, and what they print can be trusted where it can be checked."""

import json
import sys

import pytest
from benchmarks.sides import Side
from conftest import ROOT, write_shards
from pretraining_dataset import PretrainingDataset

from benchmarks import around_the_step, data_loading, device_checks, pretraining_step, step_floor
from modeling import BertConfig, training_flops
from utils.errors import UserError


def test_fast_paths_compiled_graphs_and_fixed_sizes_agree_with_the_plain_ones(tmp_path):
    toy = ["--model", "tiny", "--seq-length", "24", "--batch-size", "4", "--device", "cpu"]
    assert device_checks.main([*toy, "--measure-optimizer", "tiny", "--output-dir", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "device_checks-cpu-tiny.json").read_text())
    names = {check["check"] for check in result["checks"]}
    assert {"by_length, bf16", "compiled layers, bf16", "compiled model, bf16", "by_length, fp32"} <= names
    assert {"Lamb, other form", "Lamb, compiled"} <= names
    sides = json.loads((tmp_path / "optimizer_step-cpu-tiny.json").read_text())["sides"]
    assert {"AdamW", "Lamb", "Lamb, other form", "Lamb, compiled"} == set(sides)
    assert all(side["milliseconds"]["median"] > 0 for side in sides.values())


def test_the_compiler_counts_the_operations_that_the_formula_gives(tmp_path):
    output = tmp_path / "floor.json"
    toy = ["--model", "tiny", "--seq-length", "24", "--batch-size", "8", "--device", "cpu", "--output", str(output)]
    rates = ["--gigabytes-per-second", "10", "--tflops", "0.1"]
    assert step_floor.main([*toy, *rates]) == 0
    result = json.loads(output.read_text())
    bert_config = BertConfig.from_json_file(ROOT / "bert_configs" / "bert-tiny-uncased.json")
    formula = training_flops(bert_config, [24] * 8, num_masked=8 * 3)
    # The last layer computes its second half for some tokens only; attention is matrix products on a CPU.
    assert 0.8 * formula < result["kinds"]["matrix products"]["flops"] < 1.02 * formula
    for kind in result["kinds"].values():
        assert kind["floor_milliseconds"] == pytest.approx(max(kind["num_bytes"] / 10e6, kind["flops"] / 0.1e9))
    # Each weight and its gradient are read or written at the least.
    assert result["kinds"]["fused kernels"]["num_bytes"] > 8 * result["kinds"]["optimizer"]["num_bytes"] / 60


def test_the_step_benchmark_counts_real_tokens_and_compares_medians(tmp_path):
    shards, output = write_shards(tmp_path / "shards", length=128, predictions=20), tmp_path / "result.json"
    toy = ["--model", "tiny", "--batch-size", "4", "--rounds", "2", "--steps", "1", "--device", "cpu"]
    assert pretraining_step.main([*toy, "--input-dir", str(shards), "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    medians = {name: side["tokens_per_second"]["median"] for name, side in result["sides"].items()}
    assert set(medians) == {"ours", "transformers", "transformers, our settings"}
    for peer, ratio in result["ours_is_faster_by"].items():
        assert ratio["ratio_of_medians"] == pytest.approx(medians["ours"] / medians[peer])
    # Each side's memory is that of a process of its own.
    assert len({side["peak_memory_gib"] for side in result["sides"].values()}) == 3
    for side in result["sides"].values():
        assert set(side["milliseconds"]) == {"data", "forward", "backward", "optimizer"}
        seconds = sum(side["milliseconds"].values()) / 1000
        assert side["sequences_per_second"] == pytest.approx(4 / seconds, rel=0.9)


def test_shards_without_a_full_sample_are_no_ground_for_full_ones(tmp_path):
    shards = write_shards(tmp_path / "shards", length=128, predictions=20)
    dataset = PretrainingDataset(shards, vocab_size=30522)
    dataset.sequence_length = 129  # which no sample has
    args = pretraining_step.parse_arguments(["--full", "--batch-size", "2"])
    with pytest.raises(UserError, match="no sample of full length"):
        pretraining_step.samples_of_steps(args, dataset)


def without_a_package():
    raise ModuleNotFoundError("No module named 'peer'", name="peer")


@pytest.mark.parametrize(
    ("make", "words"), [(without_a_package, "pip install peer"), (sys.exit, "its own message is above")]
)
def test_a_side_that_cannot_start_is_one_clear_line(make, words):
    with pytest.raises(UserError, match=words):
        Side(make, (), is_tuned=False).call("turn", 0)


def test_the_loader_benchmark_runs_on_shards_of_its_own(tmp_path):
    output = tmp_path / "result.json"
    toy = ["--samples", "400", "--batch-size", "20", "--batches", "2", "--rounds", "2"]
    assert data_loading.main([*toy, "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["samples"] == 400 and result["sequence_length"] == 128
    assert all(rate["median"] > 0 for rate in result["sequences_per_second"].values())


def test_launches_and_checkpoints_are_timed_from_outside(tmp_path):
    shards, output = write_shards(tmp_path / "shards", length=128, predictions=20), tmp_path / "result.json"
    toy = ["--model", "tiny", "--device", "cpu", "--launches", "1", "--checkpoints", "1"]
    assert around_the_step.main([*toy, "--input-dir", str(shards), "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    for stages in result["seconds_to_first_step"].values():
        *parts, whole = (seconds["median"] for seconds in stages.values())
        assert all(part > 0 for part in parts) and whole == pytest.approx(sum(parts))
    (stopped,), (durable,) = (result["checkpoint"][f"{kind}_seconds"] for kind in ("stopped", "durable"))
    assert 0 < stopped < durable
    assert result["checkpoint"]["bytes"] > 3 * 4 * 4_000_000  # weights and two moments of BERT-tiny, in float32
