"""Numbers beyond all bounds, memory that is not there, and data that is legal and odd."""

import itertools
import json
import resource
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import TINY, add_checksums, assert_refused, change_row, read_json, write_shards
from processes import exit_codes, launch
from small_runs import losses, run_here, train

import run_pretraining
import run_squad
from bert_recipe.model.encoders.bert import BertConfig
from bert_recipe.utils.errors import is_out_of_memory

HUGE = ("1" + "0" * 10, "1" + "0" * 30, "9" * 5000, "1e30", "nan", "-1", "²", "")
BEYOND_FLOAT32 = ("1e39", "1e999", "nan", "-inf", "9" * 5000, "one")
NO_FILE_NAME = ("../model", "/model", "", ".", "..", "a b", "a\nb", "x" * 300)
PRETRAINING = (run_pretraining, "--input-dir", "x", "--output-dir", "y", "--max-steps", "1")
SQUAD = (run_squad, "--do-train", "--train-file", "x", "--output-dir", "y")


@pytest.mark.parametrize(
    ("command", "flags", "values"),
    [
        (
            PRETRAINING,
            "--batch-size --global-batch-size --gradient-merge-steps --max-seq-length",
            HUGE,
        ),
        (
            PRETRAINING,
            "--max-predictions-per-seq --max-steps --num-workers --log-freq --steps-this-run",
            HUGE,
        ),
        (PRETRAINING, "--num-steps-per-checkpoint", HUGE),
        (
            PRETRAINING,
            "--learning-rate --max-grad-norm --epsilon --collective-timeout-minutes",
            BEYOND_FLOAT32,
        ),
        (PRETRAINING, "--model-prefix", NO_FILE_NAME),
        (SQUAD, "--max-steps", ("0", "-2")),
        (SQUAD, "--n-best-size", HUGE),
        (SQUAD, "--epochs", BEYOND_FLOAT32),
    ],
)
def test_values_beyond_all_bounds_are_refused_in_one_line(capsys, command, flags, values):
    program, *words = command
    for flag, value in itertools.product(flags.split(), values):
        with pytest.raises(SystemExit) as end:
            program.parse_arguments([*words, f"{flag}={value}"])
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            end.value.code == 2 and line.startswith(f"error: argument {flag}") and len(line) < 300
        ), line


NUMBERS = [key for key, value in TINY.items() if not isinstance(value, str)]
ODD = [10**30, float("nan"), float("inf"), -1, True, "1", None]


@pytest.mark.parametrize(
    ("key", "value"), [*((key, 10**9) for key in NUMBERS), *(("hidden_size", v) for v in ODD)]
)
def test_configs_beyond_all_bounds_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        BertConfig(**{**TINY, key: value})


def test_a_run_of_two_billion_updates_starts_at_once(inputs, tmp_path):
    train(
        inputs.command(tmp_path, "--max-steps", 2**31 - 1, "--steps-this-run", 2, "--log-freq", 1)
    )
    assert sorted(losses(tmp_path)) == [1, 2]


def train_in_little_memory(argv: list[str]) -> int:
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = in_use + (3 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return run_pretraining.main(argv)


def test_out_of_memory_is_one_line_that_says_what_to_lower(inputs, tmp_path):
    """Activations of 8 GB and more, in a process that may have 3 GB more than it began with."""
    large = {"intermediate_size": 2**17, "hidden_size": 128, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(read_json(inputs.config) | large))
    shards = write_shards(tmp_path / "shards", sizes=(1024,))
    flags = ("--input-dir", shards, "--config-file", tmp_path / "config.json", "--batch-size", 512)
    command = inputs.command(tmp_path / "out", "--max-steps", 4, *flags)
    output, errors = tmp_path / "output", tmp_path / "errors"
    (code,) = exit_codes([launch(train_in_little_memory, (command,), {}, output, errors)])
    result = subprocess.CompletedProcess(command, code, output.read_text(), errors.read_text())
    assert_refused(result, "out of memory on cpu", "lower the batch size", "--gradient-merge-steps")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you "
            "tried to"
        ),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("could not create a primitive"),
        ImportError("/lib/tokenizers.so: failed to map segment from shared object"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=repr,
)
def test_what_allocators_raise(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(
        OSError(28, "No space left")
    )


def test_verify_data_finds_a_changed_shard_before_training(inputs, tmp_path):
    """And says of shards without checksums that it cannot."""
    shards = write_shards(tmp_path / "shards", sizes=(16, 16))
    first, second = sorted(shards.iterdir())
    add_checksums(first)
    command = inputs.command(
        tmp_path / "out", "--input-dir", shards, "--max-steps", 1, "--verify-data"
    )
    result = train(command)
    assert (
        f"--verify-data: 1 of 2 shards match their checksums; 1 have none, such as {second}"
        in result.stdout
    )
    change_row(first)
    train([*command[:-1], "--overwrite"])  # the change is one that only a checksum finds
    assert_refused(run_here([*command, "--overwrite"]), str(first), "segment_ids", "checksum")
