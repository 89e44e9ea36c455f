"""Runs the implementations that are compared: each in a process of its own, and all of them in
turns.

A process of its own gives each its own threads, allocator, environment and memory; taking turns
spreads what else happens on the machine over all of them.
"""

import contextlib
import multiprocessing
import os
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common.results import ROOT
from data_preparation.engine.executors import end_with_parent
from utils.device import keep_freed_memory, set_num_threads
from utils.errors import UserError
from utils.measure import peak_memory_bytes
from utils.progress import progress_bar

THIS_PROJECT, TRANSFORMERS, SAME_SETTINGS = "this project", "transformers", "same settings"


def launch_settings() -> dict[str, str]:
    """The environment variables that the launch scripts set for the CPU."""
    script = ROOT / "scripts" / "cpu_settings.sh"
    listed = subprocess.run(
        ["bash", "-c", f". {script}; env -0"], check=True, capture_output=True, text=True, env={}
    )
    values = dict(entry.split("=", 1) for entry in listed.stdout.split("\0") if entry)
    return {
        name: value
        for name, value in values.items()
        if name.isupper() and name not in ("PWD", "SHLVL")
    }


class Worker:
    """An implementation in its process: `make(*arguments)` creates it there, and `call` calls its
    methods.

    same_settings: give it the CPU settings of this project's runs, which are the environment of the
    launch scripts and an allocator that keeps freed memory. Otherwise it runs as `python3
    program.py` does.
    """

    def __init__(self, make: Callable[..., Any], arguments: tuple, same_settings: bool):
        spawn = multiprocessing.get_context("spawn")
        self.connection, remote = spawn.Pipe()
        self.process = spawn.Process(
            target=serve, args=(remote, make, arguments, same_settings), daemon=True
        )
        settings = launch_settings()
        with patch.dict(os.environ, settings):
            for name in settings if not same_settings else ():
                del os.environ[name]
            self.process.start()
        remote.close()

    def call(self, method: str, *arguments: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):  # it may have sent an error before it ended
            self.connection.send((method, arguments))
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise UserError(
                f"a process of the benchmark ended in {method}: its own message is above"
            ) from None
        if isinstance(answer, UserError):
            raise answer
        return answer

    def peak_memory_gib(self) -> float:
        return self.call("peak_memory_bytes") / 2**30

    def close(self) -> None:
        self.connection.close()
        self.process.join()


def call_in_worker(
    make: Callable[..., Any], method: str, *arguments: Any, same_settings: bool = False
) -> Any:
    """`make(*arguments).method()`, in a process of its own."""
    worker = Worker(make, arguments, same_settings)
    found = worker.call(method)
    worker.close()
    return found


def serve(
    connection: Connection, make: Callable[..., Any], arguments: tuple, same_settings: bool
) -> None:
    end_with_parent()
    set_num_threads()
    if same_settings:
        keep_freed_memory()
    try:
        implementation = make(*arguments)
    except UserError as error:
        connection.send(error)
        return
    except ModuleNotFoundError as error:
        connection.send(
            UserError(f"this benchmark needs a package that is missing: pip install {error.name}")
        )
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    while True:
        try:
            method, values = connection.recv()
        except EOFError:
            return
        if method == "peak_memory_bytes":
            connection.send(peak_memory_bytes(device))
        else:
            connection.send(getattr(implementation, method)(*values))


def take_turns(turns: dict[str, Callable[[int], Any]], rounds: int, title: str) -> dict[str, list]:
    """Calls every function of `turns` once per round, with the number of the round; returns the
    results by name, without those of the first round, which is a warmup.
    """
    results: dict[str, list] = {name: [] for name in turns}
    with progress_bar((1 + rounds) * len(turns), title, "turn") as bar:
        for number in range(1 + rounds):
            for name, turn in turns.items():
                results[name].append(turn(number))
                bar.update()
    return {name: found[1:] for name, found in results.items()}
