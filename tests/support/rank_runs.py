"""Functions run by several processes that talk to each other, and pre-training runs of several
processes.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any

import processes
import torch
from conftest import read_json
from processes import free_port
from torch import nn

import run_pretraining
from bert_recipe.utils.distributed import init_distributed


@dataclass(frozen=True)
class RankResults:
    """Exit codes and standard error, a rank each."""

    exit_codes: list[int]
    errors: list[str]

    def error_lines(self) -> list[str]:
        """All lines `error: ...`, of all ranks."""
        return [
            line for text in self.errors for line in text.splitlines() if line.startswith("error: ")
        ]

    def check(self) -> None:
        assert not any(self.exit_codes), (self.exit_codes, self.errors)


def run_ranks(
    count: int, folder: Path, function: Callable, *args, timeout: float = processes.PATIENCE
) -> RankResults:
    """Calls `function(*args)`, of a test file, in `count` processes with torchrun's environment
    variables. Their output goes to files in `folder`. Each imports that file: what takes seconds,
    such as transformers, is to be imported in the tests that use it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = [
        processes.launch(
            function, args, environment, folder / f"{number}.out", folder / f"{number}.err"
        )
        for number, environment in enumerate(processes.environments(count))
    ]
    exit_codes = processes.exit_codes(started, timeout)
    return RankResults(
        exit_codes, [(folder / f"{number}.err").read_text() for number in range(count)]
    )


def run_distributed(function: Callable, folder: Path, *args, count: int = 2) -> list[Any]:
    """The JSON-like results of `function(distributed, *args)`, a test file's function, in `count`
    processes of one run.
    """
    run_ranks(count, folder / "ranks", _join_and_call, folder / "result", function, *args).check()
    return [read_json(folder / f"result.{number}") for number in range(count)]


def _join_and_call(result: Path, function: Callable, *args) -> None:
    with init_distributed(torch.device("cpu")) as distributed:
        result.with_suffix(f".{distributed.rank}").write_text(
            json.dumps(function(distributed, *args))
        )


def rank() -> int:
    return int(os.environ["RANK"])


def compile_on_one_rank(backend: str) -> Callable:
    """For torch.nn.Module.compile: without code generation, and only on rank 0, as the other ranks
    would trace the same graphs.
    """
    if rank() == 0:
        return partialmethod(nn.Module.compile, backend=backend)
    return lambda _module, **_options: None


@dataclass(frozen=True)
class Command:
    """run_pretraining.py's arguments for the first `count` processes."""

    count: int
    argv: list[str]
    port: int = field(default_factory=free_port)


def pretrain(*commands: Command) -> int:
    """run_pretraining.py with each of `commands`, one after another."""
    for command in commands:
        if rank() < command.count:
            os.environ.update(
                WORLD_SIZE=str(command.count),
                LOCAL_WORLD_SIZE=str(command.count),
                MASTER_PORT=str(command.port),
            )
            if code := run_pretraining.main(command.argv):
                return code
    return 0


def pretrain_ranks(folder: Path, *commands: Command) -> RankResults:
    """`commands` one after another, in as many processes as the largest needs: starting them takes
    longer than most of these runs.
    """
    return run_ranks(max(command.count for command in commands), folder, pretrain, *commands)
