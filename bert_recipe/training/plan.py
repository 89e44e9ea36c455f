"""Plans the runs of a command: where each starts, its model, its data and its configuration."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from bert_recipe.checkpoint.folder import EVALUATIONS_FILE
from bert_recipe.checkpoint.identity import check_record, identity_of
from bert_recipe.checkpoint.model_choice import check_same_kind, choose_model
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.pretrained import make_model
from bert_recipe.checkpoint.progress import GLOBAL_BATCH
from bert_recipe.checkpoint.start import Start, StartPoint, find_start, resolve_start
from bert_recipe.config import RunConfig, RunRecord, StartConfig
from bert_recipe.data_loading.loader import StepLoader
from bert_recipe.data_loading.packing import MicroBatchLimits, stream_sizes
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.optimization.lr_scheduler import exact_product
from bert_recipe.parallel.compilation import choose_what_to_compile
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import Task, TaskData
from bert_recipe.training.chosen_settings import choose_settings
from bert_recipe.training.evaluation import Evaluator
from bert_recipe.training.setup import SCORES_FILE, build_trainer, strategy_for
from bert_recipe.training.trainer import Trainer
from bert_recipe.utils.errors import UserError


@dataclass(frozen=True)
class TrainingPlan:
    """Everything needed to build a run; nothing is allocated yet. num_sizes: see
    packing.stream_sizes. note: what to print before training, or "".
    """

    start: Start
    data: TaskData
    config: RunConfig
    num_sizes: int | None = None
    note: str = ""

    def check_folder(self) -> StartPoint:
        """Where the run will start; for the main process. Raises UserError if it may not write to
        its folder.
        """
        folder, record = self.config.trainer.checkpoint_folder, self.config.trainer.record
        if record is None or self.start.config.overwrite:
            return resolve_start(self.start, folder, saves=False)
        check_record(folder, record)
        return resolve_start(self.start, folder, saves=True)

    def make_model(self) -> PreTrainedModel:
        """Builds the model on the meta device."""
        with torch.device("meta"):
            return make_model(self.data.task.head, self.data.choice.config)

    def limits(self, batch_size: int | None = None) -> MicroBatchLimits:
        """The limits of micro-batches of the run's batch size, or of another one."""
        datasets = [self.data.dataset]
        if self.data.held_out is not None:
            datasets.append(self.data.held_out)
        loader = replace(
            self.config.loader,
            batch_size=batch_size or self.config.loader.batch_size,
            max_seq_length=self.data.task.max_sample_length,
        )
        limits = MicroBatchLimits.of(
            loader,
            self.num_sizes,
            max(dataset.max_labelled_per_sample for dataset in datasets),
            max(dataset.max_sequences_per_sample for dataset in datasets),
            self.config.parallel.compiles,
        )
        precision = self.config.precision
        return replace(limits, fills_sequences=precision.amp or precision.pure_fp16)

    def build_trainer(self, runtime: Runtime) -> Trainer:
        torch.manual_seed(self.config.metadata.seed)
        evaluator = None
        if self.data.held_out is not None or self.data.scored_sets:
            evaluator = Evaluator(self.data, self.limits(), self.config.prediction, runtime)
        return build_trainer(
            self.make_model(),
            self.data.task,
            self.config,
            runtime,
            self.start,
            evaluator,
            self.data.development,
            self.data.task.logged_settings(self.config, self.data),
        )

    def make_loader(self, trainer: Trainer) -> StepLoader:
        """The loader of the remaining batches of `trainer`."""
        return StepLoader(
            self.data.dataset,
            self.config.loader,
            self.config.metadata.seed,
            first_position=trainer.state.samples_consumed,
            rank=trainer.distributed.rank,
            world_size=trainer.distributed.world_size,
            pin_memory=trainer.device.type == "cuda",
            limits=self.limits(),
            updates=trainer.config.max_steps - trainer.state.schedule_start,
        )


def plan_training(config: RunConfig, task: Task, runtime: Runtime) -> dict[str, TrainingPlan]:
    """The plan of each run, by its subfolder. The data that seeds share is opened once."""
    runs = runs_of(config, task)
    starts = find_starts(config.start, list(runs), task, runtime, config.trainer.benchmark)
    folder = next(iter(starts.values())).folder
    choice = choose_model(config.model, folder)
    plans = {}
    opened = settings = None
    for name, (own_config, own_task) in runs.items():
        if own_task is not opened:
            data = own_task.open(choice, folder, config, runtime)
            opened = own_task
        if data.task.defaults_kind is not None and settings is None:
            settings = choose_settings(config, data, starts, runtime)
        if settings is not None:
            own_config = settings.applied_to(own_config)
        plans[name] = plan_run(own_config, starts[name], data, name, runtime)
    return plans


def runs_of(config: RunConfig, task: Task) -> dict[str, tuple[RunConfig, Task]]:
    """The configuration and the task of each seed or fold, by its subfolder; without --num-seeds
    and --num-folds the run itself, without a subfolder.
    """
    split = task.split
    if split is not None and split.num_folds is not None:
        folds = {}
        for fold in range(split.num_folds):
            own_task = cast(Task, replace(cast(Any, task), split=replace(split, fold=fold)))
            folds[f"fold-{fold + 1}"] = (config.with_argument("fold", fold + 1), own_task)
        return folds
    if config.num_seeds == 1:
        return {"": (config, task)}
    first = config.metadata.seed
    seeds = range(first, first + config.num_seeds)
    return {f"seed-{seed}": (config.with_seed(seed), task) for seed in seeds}


def find_starts(
    config: StartConfig, seed_names: list[str], task: Task, runtime: Runtime, benchmark: bool
) -> dict[str, Start]:
    """Where the run of each seed starts. Folders that seeds share are opened once."""
    starts: dict[StartConfig, Start] = {}
    folders: dict[Path, ModelFolder] = {}
    for name in seed_names:
        seed_config = config.of_seed(name)
        if seed_config not in starts:
            check_weights = partial(task.check_start, seed_config)
            start = find_start(seed_config, runtime.distributed.on_main, check_weights)
            if benchmark:
                start = start.for_benchmark()
            starts[seed_config] = start.sharing(folders)
    return {name: starts[config.of_seed(name)] for name in seed_names}


def plan_run(
    config: RunConfig, start: Start, data: TaskData, seed_name: str, runtime: Runtime
) -> TrainingPlan:
    """The plan of one run. seed_name: subfolder of the seed, if there are several."""
    for model_folder in start.folders:
        check_same_kind(model_folder, data.choice)
    max_steps = count_steps(config, len(data.dataset))
    record = None
    if not config.trainer.benchmark:
        record = make_record(config, max_steps, start, data, runtime)
    config = complete_config(config, max_steps, data, seed_name, record)
    logs_start = record is not None and data.task.logs_start and start.weights is not None
    saved_record = record if runtime.distributed.is_main else None
    config = config.with_values(trainer={"logs_start": logs_start, "record": saved_record})
    config, note = choose_compilation(config, data.task, runtime)
    result_files = (*data.task.result_files, SCORES_FILE, EVALUATIONS_FILE)
    start = replace(start, result_files=result_files)
    num_sizes = stream_sizes(runtime.device, runtime.precision.dtype)
    return TrainingPlan(start, data, config, num_sizes, note)


def complete_config(
    config: RunConfig, max_steps: int, data: TaskData, seed_name: str, record: RunRecord | None
) -> RunConfig:
    """`config` with the values that follow from model and data.

    max_steps: of the run, also if epochs are given.
    seed_name: subfolder of the seed, if there are several.
    record: None for a benchmark.
    """
    phase = str(Path(data.task.name, seed_name))
    eval_steps = config.trainer.eval_steps
    if data.held_out is not None:
        eval_steps = eval_steps or max_steps
    return config.with_values(
        trainer={
            "max_steps": max_steps,
            "checkpoint_folder": config.trainer.checkpoint_folder / data.choice.name / phase,
            "eval_steps": eval_steps,
        },
        schedule={"total_steps": max_steps},
        metadata={
            "phase": phase,
            "num_samples": len(data.dataset),
            "data": None if record is None else record.identity["data"],
            "identity": {} if record is None else record.identity,
            "hyperparameters": (
                config.hyperparameters if record is None else record.hyperparameters
            ),
            "tokenizer": data.choice.tokenizer,
            "name": data.choice.name,
            **data.metadata,
        },
    )


def choose_compilation(config: RunConfig, task: Task, runtime: Runtime) -> tuple[RunConfig, str]:
    """`config` with what --compile auto means for this run, also in its arguments, and a line to
    print about that, or "".
    """
    what, note = "none", ""
    if strategy_for(runtime).compiles:
        what, note = choose_what_to_compile(config, runtime.device, task.compiling_pays_from)
    parallel = {"compile": what, "compiles_by_default": config.parallel.compile == "auto"}
    arguments = config.metadata.arguments | {"compile": what}
    return config.with_values(parallel=parallel, metadata={"arguments": arguments}), note


def make_record(
    config: RunConfig, max_steps: int, start: Start, data: TaskData, runtime: Runtime
) -> RunRecord:
    """The identity of a run and its hyperparameters, on all ranks. The other ranks wait here, where
    the timeout is long, while the main process reads the starting weights and the data.
    """
    hyperparameters = config.hyperparameters | {
        GLOBAL_BATCH: config.loader.global_batch_size,
        "--max-steps": max_steps,
    }
    if data.held_out is not None:
        digest = runtime.distributed.on_main(data.held_out.digest)
        hyperparameters["the digest of --eval-dir"] = digest
    identity = runtime.distributed.on_main(
        lambda: identity_of(
            start.weights_digest(),
            data.choice.config,
            data.choice.tokenizer,
            data.dataset.digest(),
            config.metadata.seed,
            data.development,
            data.task.identity(),
        )
    )
    return RunRecord(identity, hyperparameters)


def count_steps(config: RunConfig, num_samples: int) -> int:
    """Number of updates of a run: the smaller of `max_steps` and the length of `epochs`."""
    steps, epochs = config.trainer.max_steps, config.trainer.epochs
    if epochs is not None:
        needed = math.ceil(exact_product(epochs, num_samples) / config.loader.global_batch_size)
        steps = min(needed, steps) if steps > 0 else needed
    if steps >= 2**31:
        raise UserError(
            f"--epochs {epochs:g} takes {steps} updates: give fewer epochs, or --max-steps"
        )
    return steps
