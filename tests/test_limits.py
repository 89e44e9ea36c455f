"""Numbers beyond all bounds, memory that is not there, and data that is legal and odd."""

import json
import subprocess
import sys
import zlib

import h5py
import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    VOCAB_FILE,
    assert_refused,
    pretraining_command,
    reported,
    sample_rows,
    write_shard,
    write_shards,
)
from small_runs import run_here

import run_pretraining
import run_squad
from encoders.bert import BertConfig
from tasks.squad_features import SquadDataset
from tasks.squad_file import read_squad
from tokenizer import BertTokenizer
from utils.errors import UserError, is_out_of_memory


def run(*command) -> subprocess.CompletedProcess:
    return run_here([str(word) for word in command[1:]])


# --- command lines and configs ----------------------------------------------------------------------------------------

HUGE = ("1" + "0" * 10, "1" + "0" * 30, "9" * 5000, "1e30", "nan", "-1", "²", "")
PRETRAINING_NUMBERS = (
    *("--batch-size", "--global-batch-size", "--gradient-merge-steps", "--max-seq-length", "--max-predictions-per-seq"),
    *("--max-steps", "--num-workers", "--log-freq", "--steps-this-run", "--num-steps-per-checkpoint"),
)


@pytest.mark.parametrize("flag", PRETRAINING_NUMBERS)
@pytest.mark.parametrize("value", HUGE, ids=lambda value: value[:12])
def test_whole_numbers_beyond_all_bounds_are_refused(capsys, flag, value):
    with pytest.raises(SystemExit) as end:
        run_pretraining.parse_arguments(
            ["--input-dir", "x", "--output-dir", "y", "--max-steps", "1", f"{flag}={value}"]
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith(f"error: argument {flag}") and len(line) < 300


@pytest.mark.parametrize("flag", ["--learning-rate", "--max-grad-norm", "--epsilon", "--collective-timeout-minutes"])
@pytest.mark.parametrize("value", ["1e39", "1e999", "nan", "-inf", "9" * 5000, "one"], ids=lambda value: value[:12])
def test_numbers_beyond_float32_are_refused(capsys, flag, value):
    with pytest.raises(SystemExit):
        run_pretraining.parse_arguments(
            ["--input-dir", "x", "--output-dir", "y", "--max-steps", "1", f"{flag}={value}"]
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line and len(line) < 300


@pytest.mark.parametrize(
    "flags", [("--max-steps=0",), ("--max-steps=-2",), ("--epochs=1e30",), ("--n-best-size=10**9",)]
)
def test_numbers_of_fine_tuning(capsys, flags):
    with pytest.raises(SystemExit):
        run_squad.parse_arguments(["--do-train", "--train-file", "x", "--output-dir", "y", *flags])
    assert flags[0].partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../model", "/model", "", ".", "..", "a b", "a\nb", "x" * 300])
def test_a_prefix_of_file_names_is_a_plain_name(capsys, name):
    with pytest.raises(SystemExit):
        run_pretraining.parse_arguments(
            ["--input-dir", "x", "--output-dir", "y", "--max-steps", "1", f"--model-prefix={name}"]
        )
    assert "--model-prefix" in capsys.readouterr().err


@pytest.mark.parametrize("key", [key for key, value in TINY.items() if not isinstance(value, str)])
@pytest.mark.parametrize("value", [10**9, 10**30, float("nan"), float("inf"), -1, True, "1", None])
def test_configs_beyond_all_bounds_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        BertConfig(**{**TINY, key: value})


def test_an_update_of_more_sequences_than_possible(tmp_path):
    words = pretraining_command(
        write_shards(tmp_path / "shards"), ROOT / "bert_configs/bert-base-uncased.json", tmp_path
    )
    flags = ("--max-steps", 1, "--batch-size", 2**20, "--gradient-merge-steps", 2**20)
    assert_refused(run(*words, *flags), "sequences", "--gradient-merge-steps")


# --- the schedule -----------------------------------------------------------------------------------------------------


def test_a_run_of_two_billion_updates_starts_at_once(tmp_path, tiny_config):
    flags = ("--max-steps", 2**31 - 1, "--steps-this-run", 2, "--log-freq", 1)
    result = run(*pretraining_command(write_shards(tmp_path / "shards"), tiny_config, tmp_path / "out", *flags))
    assert result.returncode == 0, result.stderr
    assert sorted(reported(tmp_path / "out" / "report.json")) == [1, 2]


def test_more_updates_than_a_schedule_holds(inputs, tmp_path):
    result = run_here(inputs.command(tmp_path / "out", "--max-steps", 2**31 - 1))
    assert_refused(result, "2147483647 updates", "--steps-this-run")


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_model_that_no_batch_would_fit_beside_is_refused_before_memory_is_asked_for(inputs, tmp_path):
    config = json.loads(inputs.config.read_text()) | {"hidden_size": 2**16, "intermediate_size": 2**18}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 64}))
    result = run_here(inputs.command(tmp_path / "out", "--max-steps", 1, "--config-file", tmp_path / "config.json"))
    assert_refused(result, "million parameters", "with their optimizer state, and cpu has", "use a smaller model")


def test_out_of_memory_is_one_line_that_says_what_to_lower(tmp_path):
    """In a process that may have 6 GB of addresses, with activations that need more."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, "intermediate_size": 2**17, "hidden_size": 128, "num_hidden_layers": 4}))
    shards = write_shards(tmp_path / "shards", sizes=(1024,))
    words = pretraining_command(shards, config, tmp_path / "out", "--max-steps", 4, "--batch-size", 512)
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
    limited += "sys.argv = sys.argv[1:]; sys.path.insert(0, '.'); runpy.run_path(sys.argv[0], run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", limited, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert_refused(result, "out of memory on cpu", "lower the batch size", "--gradient-merge-steps")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("could not create a primitive"),
        ImportError("/lib/tokenizers.so: failed to map segment from shared object"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=repr,
)
def test_what_allocators_raise(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(OSError(28, "No space left"))


# --- shards -----------------------------------------------------------------------------------------------------------


def test_attributes_that_are_arrays(tmp_path, tiny_config):
    for name, values in (("a", [1, 2]), ("b", [1, 2]), ("c", [1, 3])):
        attributes = {"vocab_sha256": np.array(values), "note": np.array([b"\xff", b"x"])}
        write_shard(tmp_path / "shards" / f"{name}.hdf5", sample_rows(8, 32, 5, 0), attributes)
    result = run(*pretraining_command(tmp_path / "shards", tiny_config, tmp_path / "out", "--max-steps", 1))
    assert_refused(result, "vocab_sha256", "a.hdf5", "c.hdf5")


def test_verify_data_finds_a_changed_shard_before_training(tmp_path, tiny_config):
    """And says of shards without checksums that it cannot."""
    shards = write_shards(tmp_path / "shards", sizes=(16, 16))
    first, second = sorted(shards.iterdir())
    with h5py.File(first, "r+") as file:
        for key in file:
            file[key].attrs["crc32"] = zlib.crc32(file[key][:].tobytes())
    command = pretraining_command(shards, tiny_config, tmp_path / "out", "--max-steps", 1, "--verify-data")
    result = run(*command)
    assert result.returncode == 0, result.stderr
    assert f"1 shards of {shards} match their checksums; 1 have none, such as {second}" in result.stdout
    with h5py.File(first, "r+") as file:
        file["segment_ids"][3, 2] ^= 1
    assert run(*command[:-1], "--overwrite").returncode == 0, "the change is one that only a checksum finds"
    assert_refused(run(*command, "--overwrite"), str(first), "segment_ids", "checksum")


# --- SQuAD ------------------------------------------------------------------------------------------------------------


def squad_file(tmp_path, context: str, question: str = "who?", answer: str = "Bob", start: int | None = None):
    answers = [{"text": answer, "answer_start": context.index(answer) if start is None else start}]
    paragraph = {"context": context, "qas": [{"id": "q", "question": question, "answers": answers}]}
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    return path


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return BertTokenizer(VOCAB_FILE)


def test_lone_surrogates_in_squad_keep_the_answers_place(tmp_path, tokenizer):
    path = squad_file(tmp_path, "it was \ud83d Bob \udc00 again", question="who \ud800?")
    dataset = SquadDataset(read_squad(path), tokenizer, training=True)
    assert dataset.text(0, dataset.start_positions[0], dataset.end_positions[0]) == "Bob"


@pytest.mark.parametrize("start", [10**18, -(10**18)])
def test_impossible_places_of_an_answer(tmp_path, tokenizer, start):
    with pytest.raises(UserError, match="not in its context"):
        SquadDataset(read_squad(squad_file(tmp_path, "Bob was here", start=start)), tokenizer, training=True)


@pytest.mark.parametrize("content", ["[" * 200_000, '{"data": ' + "9" * 5000 + "}", '{"data": [[[]]]}', "NaN"])
def test_squad_files_of_odd_json(tmp_path, content):
    (tmp_path / "squad.json").write_text(content)
    with pytest.raises(UserError, match=r"squad\.json"):
        read_squad(tmp_path / "squad.json")
