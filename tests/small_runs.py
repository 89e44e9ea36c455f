"""Pre-training runs that take a second: in this process, in one that can be killed, or in several that talk."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, VOCAB_FILE, pretraining_command, reported, write_shards
from safetensors.torch import load_file

import run_pretraining
from utils.errors import run_main

AUTO = ("--last-step-of-checkpoint", "auto")


@dataclass(frozen=True)
class Ground:
    """The files that small runs start from."""

    shards: Path
    held_out: Path
    config: Path
    config_without_dropout: Path
    vocab_file: Path

    @classmethod
    def make(cls, folder: Path) -> "Ground":
        words = VOCAB_FILE.read_text(encoding="utf-8").splitlines()[:1210]  # not a multiple of 64
        ground = cls(
            write_shards(folder / "shards"),
            write_shards(folder / "held_out", sizes=(20,), seed=7),
            folder / "config.json",
            folder / "config_without_dropout.json",
            folder / "vocab.txt",
        )
        ground.vocab_file.write_text("\n".join(words) + "\n", encoding="utf-8")
        small = {**TINY, "vocab_size": len(words)}
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        ground.config.write_text(json.dumps(small))
        ground.config_without_dropout.write_text(json.dumps({**small, **no_dropout}))
        return ground

    def command(self, output: Path, *extra, dropout: bool = True) -> list[str]:
        """run_pretraining.py's arguments; a flag in `extra` replaces the one before it."""
        config = self.config if dropout else self.config_without_dropout
        command = pretraining_command(self.shards, config, output, "--vocab-file", self.vocab_file, *extra)
        return [str(word) for word in command[1:]]


def steps_folder(output: Path, phase: str = "phase1") -> Path:
    return output / "custom" / phase


def resuming(output: Path, phase: str = "phase1") -> tuple:
    """The flags that make a command go on from where it was stopped."""
    return ("--from-checkpoint", steps_folder(output, phase), *AUTO)


def run_here(argv: list[str]) -> subprocess.CompletedProcess:
    """The program in this process, as if it had been run as one."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_main(lambda: run_pretraining.main(argv))
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def trained(argv: list[str]) -> subprocess.CompletedProcess:
    result = run_here(argv)
    assert result.returncode == 0, (result.stdout, result.stderr)
    return result


def losses(output: Path) -> dict[int, float]:
    return {step: entry["loss"] for step, entry in reported(output / "report.json").items() if "loss" in entry}


def weights(output: Path, step: int, phase: str = "phase1") -> dict[str, torch.Tensor]:
    return load_file(steps_folder(output, phase) / str(step) / "model.safetensors")


def progress(output: Path, step: int, phase: str = "phase1") -> dict:
    return json.loads((steps_folder(output, phase) / str(step) / "model_progress.json").read_text())


def steps_in(output: Path, phase: str = "phase1") -> list[str]:
    """The names in the folder of steps."""
    folder = steps_folder(output, phase)
    return (
        sorted((path.name for path in folder.iterdir()), key=lambda name: (len(name), name)) if folder.is_dir() else []
    )


# --- processes of their own -------------------------------------------------------------------------------------------


def _child(argv: list[str], environment: dict[str, str], output_file: Path) -> None:
    os.environ.update(environment)
    with output_file.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    run_main(lambda: run_pretraining.main(argv))


@functools.cache
def _server():
    """A process that has imported the program and is forked for each run, so that a run starts at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["small_runs", "torch._dynamo"])  # FSDP2 and DDP import it
    with pytest.MonkeyPatch.context() as patch:  # before Python 3.13 the server knows sys.path by this alone
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context


def start(argv: list[str], output_file: Path, environment: dict[str, str] | None = None):
    """The program in a process of its own."""
    process = _server().Process(target=_child, args=(argv, environment or {}, output_file))
    process.start()
    return process


def start_several(argv: list[str], output_file: Path, count: int = 2) -> list:
    """`count` processes that know of each other, as torchrun would start them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(
            argv,
            output_file.with_suffix(f".{rank}"),
            {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()},
        )
        for rank in range(count)
    ]


def ended(processes: list, timeout: float = 60) -> list[int]:
    """The exit codes, once all have ended."""
    for process in processes:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise AssertionError("a process hangs")
    return [process.exitcode for process in processes]


@contextlib.contextmanager
def torchrun(argv: list[str], output_file: Path, count: int = 2) -> Iterator[subprocess.Popen]:
    """The program under a real torchrun, ended at the end at the latest."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    with output_file.open("w") as file:
        process = subprocess.Popen(
            [*command, "run_pretraining.py", *argv],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
