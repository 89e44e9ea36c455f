#!/usr/bin/env python3
"""CPU time of one update of time_to_quality.py's contestants, in turns.

    OMP_NUM_THREADS=1 python3 benchmarks/update_time.py --books FOLDER --work FOLDER
    OMP_NUM_THREADS=1 python3 benchmarks/update_time.py --books FOLDER --work FOLDER --layers 4

An update is everything from making the batch to the new weights, in steady state. All contestants
have the same threads and allocator setting. Updates differ in their tokens: transformers' blocks
are full, this project's samples end with a sentence and are not padded. The time to a loss is the
number of updates to it (time_to_quality.py) times the time of an update, if nothing else runs on
the machine meanwhile. Needs transformers.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import run_pretraining
from benchmarks.common.quality_runs import (
    CONTESTANTS,
    LAYERS,
    LENGTH,
    Data,
    Plan,
    TransformersRun,
    modern_config,
    prepare,
    project_flags,
)
from benchmarks.common.results import (
    CPU,
    benchmark_parser,
    format_quartiles,
    paired_ratio,
    quartiles,
    write_result,
)
from benchmarks.common.training import train_step
from benchmarks.common.transformers_training import PEER_ATTENTION
from benchmarks.common.worker import Worker, measure_in_turns
from bert_recipe.config.arguments import make_run_config
from bert_recipe.training.plan import open_runs
from bert_recipe.training.setup import build_trainer, make_loader, start_runtime
from bert_recipe.utils.command_line import REQUIRED, Flag, positive_int
from bert_recipe.utils.errors import run_main
from bert_recipe.utils.progress import print_line

LEARNING_RATE = 1e-3  # does not change the time


class Turn(NamedTuple):
    """The median CPU milliseconds of its updates, and their mean number of tokens."""

    milliseconds: float
    tokens: float

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.milliseconds


def timed(update: Callable[[], int], count: int) -> Turn:
    """`count` calls of `update`, which returns its number of tokens."""
    milliseconds, tokens = [], []
    for _ in range(count):
        started = time.process_time()
        tokens.append(update())
        milliseconds.append(1e3 * (time.process_time() - started))
    return Turn(float(np.median(milliseconds)), float(np.mean(tokens)))


class ProjectUpdates:
    """The updates of run_pretraining.py."""

    def __init__(self, plan: Plan, data: Data, folder: Path):
        parsed = run_pretraining.parse_arguments(project_flags(plan, data, folder))
        config = make_run_config(parsed)
        options = run_pretraining.task_options(parsed)
        self.cleanup = contextlib.ExitStack()
        runtime = self.cleanup.enter_context(start_runtime(config, "updates"))
        [training] = open_runs(config, options, runtime).values()
        self.trainer = build_trainer(training, runtime)
        self.batches: Iterator = iter(make_loader(self.trainer))
        self.optimizer = plan.contestant.optimizer

    def settings(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "compiled": False}

    def update(self) -> int:
        batch = next(self.batches)
        train_step(self.trainer, batch)
        return int(batch.lengths.sum())

    def turn(self, _number: int, count: int) -> Turn:
        return timed(self.update, count)


class TransformersUpdates:
    """The updates of transformers' runs."""

    def __init__(self, plan: Plan, data: Data, folder: Path, compiled: bool):
        run = TransformersRun(plan, data, folder)
        self.run, self.step, self.compiled = run, 0, compiled
        if compiled:
            run.trainer.forward = torch.compile(run.model)

    def settings(self) -> dict[str, Any]:
        return self.run.settings() | {"compiled": self.compiled}

    def update(self) -> int:
        float(self.run.trainer.update(self.step))
        self.step += 1
        return self.run.trainer.batch_size * LENGTH

    def turn(self, _number: int, count: int) -> Turn:
        return timed(self.update, count)


def token_ratios(turns_of: dict[str, list[Turn]]) -> dict[str, dict[str, float]]:
    """Of each of this project's contestants to each of transformers'."""
    rates = {name: [turn.tokens_per_second for turn in turns] for name, turns in turns_of.items()}
    peers = [name for name in turns_of if name.startswith("transformers")]
    return {
        f"{name} / {peer}": paired_ratio(rates[name], rates[peer])
        for name in turns_of
        for peer in peers
        if name not in peers
    }


def main(argv: list[str] | None = None) -> None:
    args = benchmark_parser(
        __doc__,
        Flag("--books", Path, REQUIRED, "as of time_to_quality.py"),
        Flag("--work", Path, REQUIRED, "as of time_to_quality.py"),
        Flag("--layers", positive_int, LAYERS, "number of layers, of width 64 times the number"),
        Flag("--compile", bool, False, "also measure transformers compiled"),
        PEER_ATTENTION,
        Flag("--rounds", positive_int, 7, "turns of each contestant"),
        Flag("--updates", positive_int, 10, "updates per turn"),
    ).parse_args(argv)
    torch.set_num_threads(1)
    data = prepare(args.books, args.work)
    total = (1 + args.rounds) * args.updates
    with tempfile.TemporaryDirectory(prefix="update_time_") as scratch:
        workers: dict[str, Worker] = {}
        for name, contestant in CONTESTANTS.items():
            config = modern_config(args.layers)
            if contestant.is_peer and args.peer_attention:
                config["attn_implementation"] = args.peer_attention
            plan = Plan(contestant, config, LEARNING_RATE, total, seed=1)
            arguments = (plan, data, Path(scratch, str(len(workers))))
            if not contestant.is_peer:
                workers[name] = Worker(ProjectUpdates, arguments)
                continue
            for compiled in (False, True) if args.compile else (False,):
                title = f"{name}, compiled" if compiled else name
                workers[title] = Worker(TransformersUpdates, (*arguments, compiled))
        turns_of, settings, memory = measure_in_turns(workers, args.rounds, args.updates)
    figures = {}
    for name, turns in turns_of.items():
        milliseconds = quartiles([turn.milliseconds for turn in turns])
        figures[name] = {
            "cpu_milliseconds_per_update": milliseconds,
            "tokens_per_update": float(np.mean([turn.tokens for turn in turns])),
            "tokens_per_cpu_second": quartiles([turn.tokens_per_second for turn in turns]),
            "peak_memory_gib": memory[name],
        }
        print_line(
            f"{name}: {format_quartiles(milliseconds, '.1f')} CPU ms per update of "
            f"{figures[name]['tokens_per_update']:,.0f} tokens"
        )
    ratios = token_ratios(turns_of)
    for names, ratio in ratios.items():
        print_line(f"tokens per CPU second, {names}: {format_quartiles(ratio)}")
    names = ("layers", "peer_attention", "rounds", "updates")
    arguments = {name: getattr(args, name) for name in names}
    result = {"arguments": arguments, "settings": settings, "implementations": figures}
    result["tokens_per_cpu_second_ratio"] = ratios
    write_result(args.output, f"update_time-{args.layers}-fp32", CPU, result)


if __name__ == "__main__":
    run_main(main)
