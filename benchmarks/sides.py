"""Contenders side by side: each in a process of its own, so that threads, allocator, environment and memory are its
own, and all of them taking turns, so that a busy moment of the machine hits each alike."""

import contextlib
import multiprocessing
import os
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.peers import ROOT
from utils.distributed import keep_freed_memory, use_threads
from utils.errors import UserError
from utils.measure import peak_memory_bytes

OURS, PEER, TUNED_PEER = "ours", "transformers", "transformers, our settings"


def launch_settings() -> dict[str, str]:
    """The environment variables that the launch scripts set for the CPU."""
    script = ROOT / "scripts" / "cpu_settings.sh"
    listed = subprocess.run(["bash", "-c", f". {script}; env -0"], check=True, capture_output=True, text=True, env={})
    values = dict(entry.split("=", 1) for entry in listed.stdout.split("\0") if entry)
    return {name: value for name, value in values.items() if name.isupper() and name not in ("PWD", "SHLVL")}


class Side:
    """A contender in its process: `make(*arguments)` there, whose methods are called from here.

    `is_tuned` gives it what this project's runs have on a CPU: the environment of the launch scripts, and an allocator
    that keeps freed memory. Other contenders run as `python3 program.py` would run them."""

    def __init__(self, make: Callable[..., Any], arguments: tuple, is_tuned: bool):
        settings = launch_settings()
        before = {name: os.environ.pop(name) for name in settings if name in os.environ}
        os.environ.update(settings if is_tuned else {})
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        try:
            self.process = spawn.Process(target=serve, args=(theirs, make, arguments, is_tuned), daemon=True)
            self.process.start()
        finally:
            for name in settings:
                os.environ.pop(name, None)
            os.environ.update(before)
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):  # it may have said why before it ended
            self.connection.send((method, arguments))
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise UserError(f"a side of the benchmark ended in {method}: its own message is above") from None
        if isinstance(answer, UserError):
            raise answer
        return answer

    def peak_memory_gib(self) -> float:
        return self.call("peak_memory_bytes") / 2**30

    def close(self) -> None:
        self.connection.close()
        self.process.join()


def serve(connection: Connection, make: Callable[..., Any], arguments: tuple, is_tuned: bool) -> None:
    use_threads()
    if is_tuned:
        keep_freed_memory()
    try:
        contender = make(*arguments)
    except UserError as error:
        connection.send(error)
        return
    except ModuleNotFoundError as error:
        connection.send(UserError(f"this benchmark compares with a package that is missing: pip install {error.name}"))
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
            connection.send(getattr(contender, method)(*values))
