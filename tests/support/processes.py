"""Processes of a test's own: functions and programs that can be killed, and several that form one
run.
"""

import contextlib
import functools
import itertools
import logging
import multiprocessing.util
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

import run_pretraining
from bert_recipe.utils.errors import run_main

PATIENCE = 300.0  # seconds that only a failing test waits
# Each of pytest's processes has ports of its own: a program may take seconds until it listens.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS_OF_A_WORKER = 1_500
FIRST_PORT = 20_000 + WORKER % 8 * PORTS_OF_A_WORKER
PORTS = itertools.count(os.getpid() * 97)


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.02)


def kill_and_wait_for_workers(process: subprocess.Popen) -> None:
    """Kills a program that was started with start_new_session; returns when the processes that it
    had started have ended too.
    """
    process.kill()
    process.wait()
    wait_until(lambda: not running_in_session(process.pid))


def running_in_session(session: int) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
            if its_session == str(session) and state not in "ZX":
                pids.append(int(path.parent.name))
    return pids


def free_port() -> int:
    """A port below those that the system gives to others, so that it is still free when a later run
    takes it.
    """
    while True:
        port = FIRST_PORT + next(PORTS) % PORTS_OF_A_WORKER
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _child(
    function: Callable, args: tuple, environment: dict[str, str], output: Path, errors: Path
) -> None:
    os.environ.update(environment)
    for descriptor, path in ((1, output), (2, errors)):
        with path.open("a") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    run_main(lambda: function(*args))


# What programs import after they have parsed their arguments, DDP and FSDP2 the last one, and what
# tests import.
PRELOADED = (
    *(
        "processes",
        "small_runs",
        "bert_recipe.training.workflow",
        "bert_recipe.training.setup",
        "bert_recipe.tasks.pretraining",
        "bert_recipe.parallel.fsdp",
    ),
    *("torch._dynamo", "frozen_imports"),
)


@functools.cache
def server():
    """A process that has imported the program and is forked for each process, so that one starts at
    once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    # Before Python 3.13 the server takes sys.path from this only.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context


def fork_server() -> None:
    """Makes the server a fork of this process, which has imported the collected tests already: a
    new one takes six seconds for that. Only before the first test, as processes that have computed
    gradients cannot be forked. Python 3.14's server has a key besides, so it is started as usual.
    """
    if sys.version_info >= (3, 14):
        return
    with pytest.MonkeyPatch.context() as patch:
        # Another process, started with the same function. At its end it would warn of semaphores
        # that killed processes have left.
        patch.setenv("PYTHONWARNINGS", "ignore")
        resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.util, "spawnv_passfds", _fork_server_process)
        forkserver.ensure_running()


def _fork_server_process(_executable: str, _words: list[str], descriptors: list[int]) -> int:
    """The process id of a server that has the `descriptors` of its socket, and of a pipe which is
    closed when this process ends.
    """
    if process_id := os.fork():
        return process_id
    try:
        # Objects of this process still have the numbers of its open files.
        with Path(os.devnull).open("r+b") as nothing:
            for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if number > 2 and number not in descriptors:
                    os.dup2(nothing.fileno(), number)
        logging.root.handlers.clear()  # pytest's
        forkserver._forkserver._lock = threading.Lock()  # locked when this process was forked
        select.select(descriptors, [], [])  # many selections of tests start no process
        forkserver.main(*descriptors, PRELOADED)
    finally:
        os._exit(0)


def launch(
    function: Callable, args: tuple, environment: dict[str, str], output: Path, errors: Path
):
    """`function(*args)` in a process of its own, whose output is appended to the two files."""
    process = server().Process(target=_child, args=(function, args, environment, output, errors))
    process.start()
    return process


def start(
    argv: list[str],
    output_file: Path,
    environment: dict[str, str] | None = None,
    function: Callable = run_pretraining.main,
):
    """`function(argv)`, run_pretraining.py by default, in a process of its own."""
    return launch(function, (argv,), environment or {}, output_file, output_file)


def environments(count: int) -> list[dict[str, str]]:
    """The environment of each of `count` processes of one run, as torchrun sets it."""
    common = {
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
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


def fine_tune_on_ports(main: Callable, commands: list[tuple[str, list[str]]]) -> None:
    """A program with several command lines: starting processes takes longer than these runs. Each
    has its own port: at the last one, rank 1 could still find the store of the run that ends there.
    """
    for port, argv in commands:
        os.environ["MASTER_PORT"] = port
        assert main(argv) == 0


def exit_codes(processes: list, timeout: float = PATIENCE) -> list[int]:
    """Waits for all processes; kills them all if one hangs."""
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    if any(process.is_alive() for process in processes):
        for process in processes:
            process.kill()
        raise AssertionError("a process hangs")
    return [process.exitcode for process in processes]
