"""--compile: what `auto` chooses, what compilation needs, and what ends it."""

import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import assert_refused, read_json
from small_runs import losses, run_here, train
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.async_compile import AsyncCompile

import run_glue
import run_pretraining
from bert_recipe.config.arguments import make_run_config
from bert_recipe.parallel import compilation
from bert_recipe.parallel.compilation import (
    BEFORE_THE_WAIT,
    choose_what_to_compile,
    keep_compiled_kernels,
    start_workers,
)
from bert_recipe.tasks.classification.task import ClassificationTask
from bert_recipe.training import plan

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PRETRAINING = "--input-dir i --output-dir o --max-steps 20"
SHARDED = "--data-parallel-shard-degree -1"


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        (GPU, "", "model"),
        (GPU, "--amp --enable-cpu-offload", "model"),
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
    assert choose_what_to_compile(config, 100, device, pays_from=1) == (expected, "")


@pytest.mark.parametrize(("steps", "expected"), [(5999, "none"), (6000, "model")])
def test_fine_tuning_is_compiled_if_that_pays_for_its_time(monkeypatch, steps, expected):
    monkeypatch.setattr(compilation, "missing_for_compile", lambda _: [])
    flags = f"--task-name sst-2 --do-train --output-dir o --init-checkpoint m --max-steps {steps}"
    args = run_glue.parse_arguments([*flags.split(), "--data-dir", "d"])
    pays_from = ClassificationTask.compiling_pays_from
    what, note = choose_what_to_compile(make_run_config(args), steps, GPU, pays_from)
    assert what == expected
    assert f"{steps:,} updates: compiling pays from 6,000 on, a bound by estimate" in note


@pytest.mark.parametrize(("device", "missing"), [(CPU, 1), (GPU, 4)])
def test_what_compilation_needs_is_named(inputs, tmp_path, monkeypatch, device, missing):
    assert compilation.missing_for_compile(CPU) == []
    monkeypatch.setattr(compilation.shutil, "which", lambda _: None)
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda _: "/nowhere")
    monkeypatch.setattr(compilation.ctypes.util, "find_library", lambda _: None)
    lacking = compilation.missing_for_compile(device)
    for text, word in zip(lacking, ["C++ compiler", "gcc", "Python.h", "libcuda"], strict=False):
        assert word in text
    assert len(lacking) == missing
    config = make_run_config(run_pretraining.parse_arguments(PRETRAINING.split()))
    what, note = choose_what_to_compile(config, 100, device, pays_from=1)
    assert what == "none" and (device == CPU or "needs a C++ compiler" in note)
    result = run_here(inputs.command(tmp_path, "--max-steps", 1, "--compile", "model"))
    assert_refused(result, "--compile needs a C++ compiler: install g++")


def make_programs(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("variable", "program"),
    [
        ("ccache gcc", "gcc"),
        ("gcc -pthread", "gcc"),
        ("ccache gcc -m64 -pthread", "gcc"),
        ("clang", "clang"),
        (None, "gcc"),
        ("icc", None),
    ],
)
def test_a_compiler_may_have_a_launcher_and_flags(monkeypatch, tmp_path, variable, program):
    """Triton takes CC for the name of one program."""
    monkeypatch.setenv("PATH", make_programs(tmp_path, "gcc", "clang", "ccache"))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv("CC", variable)
    missing = compilation.missing_for_compile(GPU)
    assert any("a C compiler" in text for text in missing) == (program is None)
    compilation.use_one_program_as_compiler()
    assert os.environ.get("CC") == (variable and (program or variable))


@pytest.mark.parametrize(("capability", "is_missing"), [((6, 1), True), ((7, 0), False)])
def test_gpus_without_triton_do_not_compile(monkeypatch, capability, is_missing):
    """torch.utils._triton asks for 7.0, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    missing = ", ".join(compilation.missing_for_compile(GPU))
    assert ("a GPU of compute capability 7.0 or newer" in missing) == is_missing


def compiled_run(inputs, folder: Path, monkeypatch, backend, *flags):
    """A run with --compile model or other flags, in which `backend` compiles the graph of one
    layer.
    """
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        functools.partialmethod(torch.nn.Module.compile, backend=backend),
    )
    torch.compiler.reset()
    config_file = folder / "config.json"
    config = read_json(inputs.config) | {"num_hidden_layers": 1}
    config_file.write_text(json.dumps(config))
    flags = flags or ("--compile", "model")
    command = inputs.command(folder / "output", *flags, dropout=False)
    return run_here([*command, "--max-steps", 2, "--log-freq", 1, "--config-file", config_file])


def fail(_graph, _inputs):
    raise RuntimeError("no such instruction")


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
    handlers = []
    monkeypatch.setattr(
        AsyncCompile,
        "warm_pool",
        lambda: handlers.extend(signal.getsignal(number) for number in stopping),
    )
    start_workers()
    assert handlers == [signal.SIG_IGN] * 2 and signal.SIG_IGN not in before
    assert [signal.getsignal(number) for number in stopping] == before


def test_a_compilation_that_fails_says_how_to_do_without(inputs, tmp_path, monkeypatch):
    result = compiled_run(inputs, tmp_path, monkeypatch, fail)
    assert_refused(result, "no such instruction", "--compile none")


@pytest.mark.parametrize(
    ("what", "backend"),
    [
        ("model", fail),
        ("layers", fail),
        ("model", aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=fail)),
    ],
    ids=["model", "layers", "backward pass"],
)
def test_a_compilation_that_nobody_asked_for_does_not_end_a_run(
    inputs, tmp_path, monkeypatch, what, backend
):
    """As on a GPU, where `auto` compiles."""
    (tmp_path / "eager").mkdir()
    eager = compiled_run(inputs, tmp_path / "eager", monkeypatch, fail, "--compile", "none")
    monkeypatch.setattr(plan, "choose_what_to_compile", lambda *_: (what, ""))
    result = compiled_run(inputs, tmp_path, monkeypatch, backend, "--compile", "auto")
    assert eager.returncode == result.returncode == 0, result.stderr
    assert result.stdout.count("nothing is compiled") == 1
    assert "torch.compile failed (" in result.stdout and "no such instruction" in result.stdout
    actual, expected = losses(tmp_path / "output"), losses(tmp_path / "eager" / "output")
    assert len(expected) == 2 and actual == pytest.approx(expected, rel=1e-4)


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
