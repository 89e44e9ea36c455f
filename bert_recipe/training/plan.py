"""Opens the runs of a command: where each starts, its model, its data, and what follows from
them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bert_recipe.checkpoint.identity import identity_of, refuse_other_runs
from bert_recipe.checkpoint.model_choice import find_model
from bert_recipe.checkpoint.progress import GLOBAL_BATCH
from bert_recipe.checkpoint.record import RunRecord
from bert_recipe.checkpoint.run_folder import RunFolder
from bert_recipe.checkpoint.start import (
    NamedStart,
    StartPoint,
    decide_start,
)
from bert_recipe.config import ParallelConfig, RunConfig
from bert_recipe.config.arguments import divided_batch
from bert_recipe.parallel.compilation import choose_what_to_compile
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import Task, TaskData, TaskOptions
from bert_recipe.training.chosen_settings import EPOCHS, RATE, STEPS, WARMUP, choose_settings
from bert_recipe.training.run import Run, TrainingValues
from bert_recipe.training.shrunk_outputs import SHRINKAGE, recorded_shrinkage
from bert_recipe.utils.json_files import JsonObject


def open_runs(
    settings: RunConfig,
    options: TaskOptions,
    runtime: Runtime,
    decide: Callable[[NamedStart, RunFolder, RunConfig], StartPoint] = decide_start,
) -> dict[str, Run]:
    """The runs of a command by their subfolder: those of seeds or folds; "" if it is alone. The
    data that seeds share is opened once. decide: where each starts.
    """
    members = members_of(settings, options)
    model = find_model(settings, list(members), runtime.distributed.on_main)
    runs: dict[str, Run] = {}
    opened = None
    for name, (fold, arguments) in members.items():
        if fold != opened:
            data = options.open(model.choice, model.folder, settings, runtime, fold)
            opened = fold
        if not runs:
            folders = folders_of(settings, data, list(members), runtime)
            starts = {name: decide(model.starts[name], folders[name], settings) for name in members}
            chosen = choose_settings(settings, data, list(starts.values()), runtime)
        values = chosen.values(len(data.dataset))
        shrinkage = recorded_shrinkage(settings, starts[name], values.max_steps)
        values = replace(values, shrinkage=shrinkage)
        place = folders[name], starts[name]
        runs[name] = make_run(settings, arguments, *place, data, values, runtime)
    return runs


def members_of(settings: RunConfig, options: TaskOptions) -> dict[str, tuple[int, JsonObject]]:
    """The fold and the argument of each run, by its subfolder; without --num-seeds and --num-folds
    one run, without a subfolder.
    """
    if options.num_folds is not None:
        return {f"fold-{fold + 1}": (fold, {"fold": fold + 1}) for fold in range(options.num_folds)}
    if settings.num_seeds == 1:
        return {"": (0, {})}
    seeds = range(settings.seed, settings.seed + settings.num_seeds)
    return {f"seed-{seed}": (0, {"seed": seed}) for seed in seeds}


def folders_of(
    settings: RunConfig, data: TaskData, names: list[str], runtime: Runtime
) -> dict[str, RunFolder]:
    """The folder of each run, by its subfolder. Raises UserError if there are runs of another kind
    beside them: a single one, seeds or folds.
    """
    of_model, task = settings.trainer.checkpoint_folder / data.choice.name, data.task.name
    if not settings.trainer.benchmark:
        kind = names[0].partition("-")[0]
        runtime.distributed.on_main(partial(refuse_other_runs, of_model / task, kind))
    phases = {name: str(Path(task, name)) for name in names}
    processes, locks = runtime.distributed, runtime.locks
    return {name: RunFolder(of_model, phase, processes, locks) for name, phase in phases.items()}


def make_run(
    settings: RunConfig,
    arguments: Mapping[str, Any],
    folder: RunFolder,
    start: StartPoint,
    data: TaskData,
    values: TrainingValues,
    runtime: Runtime,
) -> Run:
    """A run of a command. arguments: those whose values are not as typed."""
    parallel, note = choose_strategies(settings, values, data.task, runtime)
    changed = {**arguments, "compile": parallel.compile}
    record = make_record(settings, folder.phase, changed, start, data, values, runtime)
    return Run(settings, folder, start, data, values, parallel, record, note)


def choose_strategies(
    settings: RunConfig, values: TrainingValues, task: Task, runtime: Runtime
) -> tuple[ParallelConfig, str]:
    """The strategies with what --compile auto means for this run, and with its batches for
    DeepSpeed's engine; and a line to print about compilation, or "".
    """
    what, note = choose_what_to_compile(
        settings, values.max_steps, runtime.device, task.compiling_pays_from
    )
    engine, loader = settings.parallel.engine, values.loader
    if engine is not None:
        processes = settings.world_size
        batches = {
            "train_micro_batch_size_per_gpu": loader.batch_size,
            "gradient_accumulation_steps": divided_batch(
                loader.global_batch_size, loader.batch_size, processes
            ),
        }
        engine = replace(engine, values=engine.values | batches)
    return replace(settings.parallel, compile=what, engine=engine), note


def make_record(
    settings: RunConfig,
    phase: str,
    changed: JsonObject,
    start: StartPoint,
    data: TaskData,
    values: TrainingValues,
    runtime: Runtime,
) -> RunRecord:
    """The record of a run, on all ranks. The other ranks wait here, where the timeout is long,
    while the main process reads the starting weights and the data; not for a benchmark. changed:
    arguments whose values are not as typed.
    """
    on_main = runtime.distributed.on_main
    arguments = settings.arguments.as_dict() | changed
    arguments["max_seq_length"] = data.task.max_seq_length
    seed = arguments.get("seed", settings.seed)
    hyperparameters = settings.arguments.tagged("result")
    if data.task.defaults_kind is not None:
        rate, warmup = values.schedule.learning_rate, values.schedule.warmup_proportion
        hyperparameters |= {RATE: rate, WARMUP: warmup, EPOCHS: values.epochs}
        arguments |= {
            "learning_rate": rate,
            "warmup_proportion": warmup,
            "epochs": values.epochs,
            "batch_size": values.loader.batch_size,
        }
    if values.shrinkage is not None:
        hyperparameters[SHRINKAGE] = values.shrinkage
    record = RunRecord({}, hyperparameters, arguments, phase, seed, len(data.dataset))
    if settings.trainer.benchmark:
        return record
    hyperparameters |= {GLOBAL_BATCH: values.loader.global_batch_size, STEPS: values.max_steps}
    if data.held_out is not None:
        hyperparameters["the digest of --eval-dir"] = on_main(data.held_out.digest)
    identity = on_main(
        lambda: identity_of(
            start.weights_digest(),
            data.choice.config,
            data.choice.tokenizer,
            data.dataset.digest(),
            seed,
            data.development,
            data.task.identity(),
        )
    )
    return replace(record, identity=identity, data=identity["data"], data_files=data.data_files)
