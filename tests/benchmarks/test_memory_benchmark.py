"""The estimate of memory: beside what real steps allocate, and what it says about runs that do not
fit here, such as the presets of sharded models.
"""

import json
import re

import pytest
import torch
from conftest import ROOT, VOCAB_FILE, read_json
from launch_scripts import parsed
from small_runs import run_here

from benchmarks.common.shards import write_random_shards
from benchmarks.memory import LENGTH, MAX_MASKED, Case, allocated_peak, estimate
from bert_recipe.checkpoint.model_choice import choose_model
from bert_recipe.checkpoint.model_folder import read_config
from bert_recipe.config.arguments import make_run_config
from bert_recipe.model.encoders.bert import BertForPreTraining
from bert_recipe.training.memory_estimate import MemorySettings, estimate_memory

TOLERANCE = 0.15
MODES = ("none", "selective", "full")
SHORT = ("--max-steps", "2", "--benchmark-warmup-steps", "1")
WORDS = 8000  # beside 30,522, activations are small and products in 16 bits are slow


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    return write_random_shards(folder, 16, LENGTH, MAX_MASKED, WORDS)


def command(shards, output, *flags: str) -> list[str]:
    return Case("tiny", 2, flags).command(shards, output)


def small_vocabulary(folder) -> tuple[str, ...]:
    config = read_json(ROOT / "bert_configs/bert-tiny-uncased.json")
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": WORDS}))
    (folder / "vocab.txt").write_text("\n".join(VOCAB_FILE.read_text().splitlines()[:WORDS]))
    return "--config-file", str(folder / "config.json"), "--vocab-file", str(folder / "vocab.txt")


@pytest.mark.parametrize(
    "flags",
    [
        # A CPU multiplies slowly in 16 bits, so `full` with them is one row below.
        *(("--activation-checkpoint", mode) for mode in MODES),
        *(("--amp", "--activation-checkpoint", mode) for mode in MODES[:2]),
        ("--use-pure-fp16",),
        ("--use-pure-fp16", "--gradient-merge-steps", "2", "--activation-checkpoint", "full"),
        ("--optimizer", "AdamW", "--gradient-merge-steps", "2", "--activation-checkpoint", "full"),
    ],
    ids=" ".join,
)
def test_the_estimate_is_what_real_steps_allocate(shards, tmp_path, flags):
    argv = command(shards, tmp_path, *small_vocabulary(tmp_path), *flags, *SHORT)
    results = []
    measured = allocated_peak(lambda: results.append(run_here(argv)))
    assert results[0].returncode == 0, results[0].stderr
    assert estimate(argv).total == pytest.approx(measured, rel=TOLERANCE)


def test_sharding_divides_weights_and_optimizer_state(shards, tmp_path):
    whole = estimate(command(shards, tmp_path, "--optimizer", "AdamW"), processes=4)
    shard = estimate(
        command(shards, tmp_path, "--optimizer", "AdamW", "--data-parallel-shard-degree", "4"), 4
    )
    for part in ("weights", "optimizer state"):
        assert shard.peak[part] == pytest.approx(whole.peak[part] / 4)


def test_flash_attention_keeps_no_probabilities(shards, tmp_path):
    """Activations per token do not grow with the sequence length."""
    flags = ("--device", "cuda", "--amp", "--max-predictions-per-seq", "1")
    long = estimate(command(shards, tmp_path, *flags))
    short = estimate(
        command(shards, tmp_path, *flags, "--batch-size", "8", "--max-seq-length", "128")
    )
    assert long.largest["activations"] == pytest.approx(short.largest["activations"], rel=0.02)


def test_the_flag_prints_a_table_and_touches_nothing(tmp_path):
    argv = [
        *command(tmp_path / "no data", tmp_path / "output"),
        "--device",
        "cuda",
        "--estimate-memory",
        "8",
    ]
    result = run_here(argv)
    assert result.returncode == 0, result.stderr
    assert "each of 8 x cuda" in result.stdout and re.search(r"total +\d+\.\d\d", result.stdout)
    assert list(tmp_path.iterdir()) == []
    small = run_here([*argv, "--batch-size", "1", "--max-seq-length", "32"]).stdout
    assert "in MiB: 4.43 million parameters" in small
    assert float(re.search(r"weights +(\d+\.\d\d)", small)[1]) == pytest.approx(
        4.43e6 * 4 / 2**20, abs=0.1
    )


GPU_MEMORY = 80e9
LIBRARIES = 2e9  # CUDA, NCCL and what the allocator cannot reuse


@pytest.mark.parametrize(("name", "millions"), [("0.7b", 732), ("1.3b", 1281), ("13b", 12797)])
def test_a_config_has_the_number_of_parameters_of_its_name(name, millions):
    config = read_config(ROOT / "bert_configs" / f"bert-{name}-uncased.json")
    with torch.device("meta"):
        model = BertForPreTraining(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize("name", ["1p3b", "13b"])
def test_a_preset_with_its_flags_is_sharded_and_fits_an_80_gb_gpu(checkout, name):
    result = checkout.run(
        f"source scripts/configs/pretrain_config.sh; EXTRA_ARGS=$flags_{name} bash "
        f"scripts/run_pretraining.sh $(dgxh100-80g_8gpu_amp_{name})"
    )
    assert result.returncode == 0, result.stderr
    for args, length in zip(map(parsed, checkout.calls()), (128, 512), strict=True):
        assert (args.data_parallel_shard_degree, args.use_pure_fp16, args.max_seq_length) == (
            -1,
            True,
            length,
        )
        assert args.config_file.name == f"bert-{name.replace('p', '.')}-uncased.json"
        config = make_run_config(args, world_size=8)
        with torch.device("meta"):
            model = BertForPreTraining(choose_model(config.model).config)
        settings = MemorySettings(config)
        assert (settings.world_size, settings.parallel.shard_degree, settings.device.type) == (
            8,
            8,
            "cuda",
        )
        assert GPU_MEMORY / 4 < estimate_memory(model, settings).total < GPU_MEMORY - LIBRARIES
