"""Processes of a test's own: functions and programs that can be killed, and several that form one run."""

import contextlib
import functools
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from conftest import ROOT

import run_pretraining
from utils.errors import run_main


def _child(function: Callable, args: tuple, environment: dict[str, str], output_file: Path) -> None:
    os.environ.update(environment)
    with output_file.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    run_main(lambda: function(*args))


@functools.cache
def server():
    """A process that has imported the program and is forked for each process, so that one starts at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["processes", "torch._dynamo"])  # DDP and FSDP2 import the latter
    with pytest.MonkeyPatch.context() as patch:  # before Python 3.13 the server takes sys.path from this only
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context


def start(
    argv: list[str],
    output_file: Path,
    environment: dict[str, str] | None = None,
    function: Callable = run_pretraining.main,
):
    """`function`(argv), run_pretraining.py by default, in a process of its own."""
    process = server().Process(target=_child, args=(function, (argv,), environment or {}, output_file))
    process.start()
    return process


def environments(count: int, port: int | None = None) -> list[dict[str, str]]:
    """The environment of each of `count` processes of one run, as torchrun sets it."""
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(count)
    ]


def start_several(
    argv: list[str], output_file: Path, count: int = 2, function: Callable = run_pretraining.main
) -> list:
    """`count` processes of one run, which print to `output_file` with the rank as the suffix."""
    return [
        start(argv, output_file.with_suffix(f".{rank}"), environment, function)
        for rank, environment in enumerate(environments(count))
    ]


def exit_codes(processes: list, timeout: float = 60) -> list[int]:
    """Waits for all processes."""
    for process in processes:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise AssertionError("a process hangs")
    return [process.exitcode for process in processes]


@contextlib.contextmanager
def torchrun(argv: list[str], output_file: Path, count: int = 2) -> Iterator[subprocess.Popen]:
    """run_pretraining.py under torchrun; it is terminated at the end of the block."""
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
