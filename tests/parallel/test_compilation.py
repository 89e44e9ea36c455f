"""--compile: what `auto` chooses, what compilation needs, and what ends it."""

import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import assert_refused
from small_runs import run_here, train
from torch._inductor.async_compile import AsyncCompile

import run_glue
import run_pretraining
from arguments import make_run_config
from parallel import compilation
from parallel.compilation import (
    BEFORE_THE_WAIT,
    choose_what_to_compile,
    keep_compiled_kernels,
    start_workers,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PRETRAINING = "--input-dir i --output-dir o --max-steps 20"
SHARDED = "--data-parallel-shard-degree -1"


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        (GPU, "", "model"),
        (GPU, "--amp --enable-cpu-offload", "model"),
        (GPU, "--amp --fp8", "layers"),
        (GPU, "--activation-checkpoint selective", "layers"),
        (GPU, SHARDED, "layers"),
        (GPU, "--compile none", "none"),
        (GPU, "--compile layers", "layers"),
        (CPU, "", "none"),
        (CPU, "--compile model", "model"),
    ],
)
def test_what_is_compiled(monkeypatch, device, flags, expected):
    monkeypatch.setattr(compilation, "missing_for_compile", lambda _: [])
    args = run_pretraining.parse_arguments(f"{PRETRAINING} {flags}".split())
    config = make_run_config(args, world_size=2 if flags == SHARDED else 1)
    assert choose_what_to_compile(config, device, pays_from=1) == (expected, "")
    with_engine = config.with_values(parallel={"deepspeed": {}, "compile": "auto"})
    assert choose_what_to_compile(with_engine, device, pays_from=1) == ("none", "")


@pytest.mark.parametrize(("steps", "expected"), [(5999, "none"), (6000, "model")])
def test_fine_tuning_is_compiled_if_that_pays_for_its_time(monkeypatch, steps, expected):
    monkeypatch.setattr(compilation, "missing_for_compile", lambda _: [])
    flags = f"--task-name sst-2 --do-train --output-dir o --init-checkpoint m --max-steps {steps}"
    args = run_glue.parse_arguments([*flags.split(), "--data-dir", "d"])
    task = run_glue.make_task(args)
    found, note = choose_what_to_compile(make_run_config(args), GPU, task.compiling_pays_from)
    assert found == expected and f"{steps:,} updates: compiling pays" in note and "6,000" in note


@pytest.mark.parametrize(("device", "missing"), [(CPU, 1), (GPU, 4)])
def test_what_compilation_needs_is_named(inputs, tmp_path, monkeypatch, device, missing):
    assert compilation.missing_for_compile(CPU) == []
    monkeypatch.setattr(compilation.shutil, "which", lambda _: None)
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda _: "/nowhere")
    monkeypatch.setattr(compilation.ctypes.util, "find_library", lambda _: None)
    found = compilation.missing_for_compile(device)
    for text, word in zip(found, ["C++ compiler", "gcc", "Python.h", "libcuda"], strict=False):
        assert word in text
    assert len(found) == missing
    config = make_run_config(run_pretraining.parse_arguments(PRETRAINING.split()))
    what, note = choose_what_to_compile(config, device, pays_from=1)
    assert what == "none" and (device == CPU or "needs a C++ compiler" in note)
    result = run_here(inputs.command(tmp_path, "--max-steps", 1, "--compile", "model"))
    assert_refused(result, "--compile needs a C++ compiler: install g++")


def compiled_run(inputs, folder: Path, monkeypatch, backend):
    """A run with --compile model, in which `backend` compiles the graph of one layer."""
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        functools.partialmethod(torch.nn.Module.compile, backend=backend),
    )
    torch.compiler.reset()
    config_file = folder / "config.json"
    config = json.loads(inputs.config.read_text()) | {"num_hidden_layers": 1}
    config_file.write_text(json.dumps(config))
    flags = ("--max-steps", 2, "--compile", "model", "--config-file", config_file)
    return run_here(inputs.command(folder / "output", *flags))


def test_a_signal_ends_the_first_compilation_at_once(inputs, tmp_path, monkeypatch):
    ended = []

    def compile_long(_graph, _inputs):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        ended.append("compilation")

    result = compiled_run(inputs, tmp_path, monkeypatch, compile_long)
    assert not ended
    assert (result.returncode, BEFORE_THE_WAIT in result.stdout) == (0, True)
    assert "step 0 of 2, stopped by SIGTERM" in result.stdout
    assert "nothing was to be saved" in result.stdout


def test_compiling_processes_ignore_what_stops_the_run_and_the_run_does_not(monkeypatch):
    """Signals may go to all processes, and the evaluation that compiles is finished first."""
    stopping = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in stopping]
    found = []
    monkeypatch.setattr(
        AsyncCompile,
        "warm_pool",
        lambda: found.extend(signal.getsignal(number) for number in stopping),
    )
    start_workers()
    assert found == [signal.SIG_IGN] * 2 and signal.SIG_IGN not in before
    assert [signal.getsignal(number) for number in stopping] == before


def test_a_compilation_that_fails_says_how_to_do_without(inputs, tmp_path, monkeypatch):
    def fail(_graph, _inputs):
        raise RuntimeError("no such instruction")

    result = compiled_run(inputs, tmp_path, monkeypatch, fail)
    assert_refused(result, "no such instruction", "--compile none")


def test_runs_that_do_not_compile_do_not_say_so(inputs, tmp_path):
    assert BEFORE_THE_WAIT not in train(inputs.command(tmp_path, "--max-steps", 1)).stdout


def test_compiled_kernels_are_kept_in_the_users_cache_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for given, expected in ((None, tmp_path / "torchinductor"), ("/results", "/results")):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if given:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        keep_compiled_kernels()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(expected)
