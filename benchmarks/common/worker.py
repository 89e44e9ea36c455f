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
from bert_recipe.utils.device import keep_freed_memory, set_num_threads
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.measure import peak_memory_bytes
from bert_recipe.utils.progress import progress_bar
from bert_recipe.utils.work_units.executors import end_with_parent

THIS_PROJECT, TRANSFORMERS = "this project", "transformers"


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

    Every implementation gets the CPU settings of this project's runs, which are the environment of
    the launch scripts and an allocator that keeps freed memory.
    """

    def __init__(self, make: Callable[..., Any], arguments: tuple):
        spawn = multiprocessing.get_context("spawn")
        self.connection, remote = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(remote, make, arguments), daemon=True)
        with patch.dict(os.environ, launch_settings()):
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

    def settings(self) -> dict[str, Any]:
        """Those of the process and, under `own`, those of the implementation."""
        return self.call("settings")

    def peak_memory_gib(self) -> float:
        return self.call("peak_memory_bytes") / 2**30

    def close(self) -> None:
        self.connection.close()
        self.process.join()


def call_in_worker(make: Callable[..., Any], method: str, *arguments: Any) -> Any:
    """`make(*arguments).method()`, in a process of its own. The settings of a peer, which it may
    return as `peer`, get those of the process.
    """
    worker = Worker(make, arguments)
    result = worker.call(method)
    if isinstance(result, dict) and "peer" in result:
        process = {name: value for name, value in worker.settings().items() if name != "own"}
        result["peer"] = process | result["peer"]
    worker.close()
    return result


def process_settings() -> dict[str, Any]:
    """What decides the speed of this process beside the implementation."""
    environment = {name: os.environ.get(name) for name in launch_settings()}
    return {"threads": torch.get_num_threads(), **environment}


def serve(connection: Connection, make: Callable[..., Any], arguments: tuple) -> None:
    end_with_parent()
    set_num_threads()
    keep_freed_memory()
    settings = process_settings()
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
        elif method == "settings":
            settings_of_implementation = getattr(implementation, "settings", dict)()
            connection.send(settings | {"own": settings_of_implementation})
        else:
            connection.send(getattr(implementation, method)(*values))


def measure_in_turns(
    workers: dict[str, Worker], rounds: int, *arguments: Any
) -> tuple[dict[str, list], dict[str, dict[str, Any]], dict[str, float]]:
    """By name, what the methods `turn` return, the settings, and the GiB of memory at the peak.
    All take a turn in each round; the first round is a warmup. Ends the workers. arguments: of
    `turn`, after the number of the round.
    """
    settings = {name: worker.settings() for name, worker in workers.items()}
    results: dict[str, list] = {name: [] for name in workers}
    with progress_bar((1 + rounds) * len(workers), "rounds", "turn") as bar:
        for number in range(1 + rounds):
            for name, worker in workers.items():
                results[name].append(worker.call("turn", number, *arguments))
                bar.update()
    results = {name: turns[1:] for name, turns in results.items()}
    memory = {name: worker.peak_memory_gib() for name, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    return results, settings, memory
