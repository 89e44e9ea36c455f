"""Setup shared by all programs: starts the runtime, completes the configuration, builds model,
trainer and loader.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bert_recipe.checkpoint.best import BestCheckpoint
from bert_recipe.checkpoint.folder import EVALUATIONS_FILE
from bert_recipe.checkpoint.identity import (
    WEIGHTS,
    check_record,
    complete_record,
    identity_of,
)
from bert_recipe.checkpoint.model_choice import check_same_kind
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.pretrained import make_model
from bert_recipe.checkpoint.progress import GLOBAL_BATCH
from bert_recipe.checkpoint.start import Start, StartPoint, no_log, resolve_start
from bert_recipe.checkpoint.state import TrainState
from bert_recipe.checkpoint.weights import load_weights
from bert_recipe.config import DevelopmentData, RunConfig, RunRecord
from bert_recipe.data_loading.loader import StepLoader
from bert_recipe.data_loading.packing import MicroBatchLimits, stream_sizes
from bert_recipe.metrics.sinks import make_reporter
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.optimization.layers import freeze_layers
from bert_recipe.optimization.lr_scheduler import exact_product, make_schedule, rate_table
from bert_recipe.optimization.precision import (
    LossScale,
    optimizer_product_dtype,
    select_precision,
    slow_bfloat16,
)
from bert_recipe.optimization.registry import make_optimizer, spec_of
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.compilation import check_compile, choose_what_to_compile
from bert_recipe.parallel.parallelize import check_parallel, parallelize, strategy_of
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import Task, TaskData
from bert_recipe.training.benchmark import Benchmark
from bert_recipe.training.callbacks import Callback
from bert_recipe.training.checkpoint_callback import Checkpoints
from bert_recipe.training.evaluation import Evaluator
from bert_recipe.training.evaluation_callback import Evaluations
from bert_recipe.training.head_first import (
    HeadFirst,
    begins_with_head,
    encoder_parameters,
    head_rate,
)
from bert_recipe.training.trainer import Trainer, measuring_window
from bert_recipe.utils.device import (
    allocate,
    keep_freed_memory,
    select_device,
    set_cpu_affinity,
    set_num_threads,
    use_deterministic_kernels,
)
from bert_recipe.utils.distributed import init_distributed
from bert_recipe.utils.errors import UserError, is_out_of_memory
from bert_recipe.utils.measure import Stopwatch
from bert_recipe.utils.memory import total_memory
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.typed_json import JsonObject

SCORES_FILE = "scores.json"  # in a run's folder
DIGITS = 16  # of a digest that is logged


@contextmanager
def start_runtime(config: RunConfig, title: str) -> Iterator[Runtime]:
    """Selects device and precision, initializes the process group, and opens the logs. Cleans up on
    exit.
    """
    settings, parallel = config.runtime, config.parallel
    device = select_device(settings.device)
    types = config.precision
    precision = select_precision(
        types.amp, types.amp_dtype, types.pure_fp16, types.tf32, device, types.fp8
    )
    check_parallel(config, device)
    check_compile(parallel.compile, device)
    if settings.deterministic:
        use_deterministic_kernels()
    set_num_threads()
    keep_freed_memory()
    timeouts = (settings.timeout_minutes, settings.collective_timeout_minutes)
    with init_distributed(device, *timeouts) as distributed:
        if settings.cpu_affinity:
            set_cpu_affinity(device)
        if distributed.is_main:
            print_line(f"{title} on {distributed.world_size} x {device.type}")
            for message in settings.messages:
                print_line(message)
            if slow := slow_bfloat16(precision, device):
                print_line(f"note: {slow}")
        reporter = make_reporter(settings, distributed.is_main)
        try:
            yield Runtime(device, precision, distributed, reporter, parallel)
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"out of memory on {device}: lower the batch size (and raise "
                "--gradient-merge-steps as much: the global batch stays the same), or add "
                "--activation-checkpoint full; the last checkpoint is kept"
            ) from error
        finally:
            reporter.close()


def strategy_for(runtime: Runtime) -> type[ParallelModel]:
    return strategy_of(runtime.parallel, runtime.distributed.world_size, runtime.precision.pure)


def check_memory(model: PreTrainedModel, runtime: Runtime, tensors_per_parameter: int = 1) -> None:
    """Raises UserError if the model alone needs more memory than the device has. Activations are
    not counted.

    model: may be on the meta device.
    runtime: its device, precision and processes.
    tensors_per_parameter: 1 for weights, 3 with two moments; float32, except in prediction with
        --use-pure-fp16.
    """
    parallel, precision = runtime.parallel, runtime.precision
    if strategy_for(runtime).shards_only_state:
        tensors_per_parameter = 1  # the weights, which each process first holds
    itemsize = precision.dtype.itemsize if precision.pure and tensors_per_parameter == 1 else 4
    num_parameters = sum(p.numel() for p in model.parameters())
    device = runtime.device
    needed = num_parameters * itemsize * tensors_per_parameter / parallel.shard_degree
    if parallel.cpu_offload:
        device = torch.device("cpu")
    if device.type == "cpu":  # shared by the processes of a machine
        needed *= runtime.distributed.local_world_size
    if device.type == "cuda":
        total: float = torch.cuda.get_device_properties(device).total_memory
    else:
        total = total_memory()
    if needed > total:
        state = " with their optimizer state" if tensors_per_parameter > 1 else ""
        raise UserError(
            f"{num_parameters / 1e6:,.0f} million parameters need {needed / 2**30:,.1f} "
            f"GiB{state}, and {device} has {total / 2**30:,.1f} GiB: use a smaller model, or more "
            "GPUs with --data-parallel-shard-degree"
        )


def load_fine_tuned(
    head: str,
    config: ModelConfig,
    folder: ModelFolder,
    runtime: Runtime,
    log: Callable[[str], None] = print_line,
) -> ParallelModel:
    """Loads the model in `folder` for prediction. head: a key of modeling.MODELS; the folder must
    have all of it.
    """
    with torch.device("meta"):
        model = make_model(head, config)
    check_memory(model, runtime)
    if runtime.parallel.shard_degree == 1:  # no initial values, since all are loaded
        allocate(model, runtime.device)
    parallel = parallelize(
        model, runtime.parallel, runtime.precision, runtime.device, runtime.distributed
    )
    log = log if runtime.distributed.is_main else no_log
    load_weights(parallel, folder, log, needs_head=True)
    return parallel


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
        saves = False
        if record is not None and not self.start.config.overwrite:
            saves = True
            check_record(folder, record)
        return resolve_start(self.start, folder, saves)

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
        return MicroBatchLimits.of(
            loader,
            self.num_sizes,
            max(dataset.max_labelled_per_sample for dataset in datasets),
            max(dataset.max_sequences_per_sample for dataset in datasets),
            self.config.parallel.compiles,
        )

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
            self.data.task.logged_settings(self.config, self.data.dataset),
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


def plan_run(
    config: RunConfig, start: Start, data: TaskData, seed_name: str, runtime: Runtime
) -> TrainingPlan:
    """Completes `config` with the values that depend on model, data and device. seed_name:
    subfolder of the seed, if there are several.
    """
    for model_folder in start.folders:
        check_same_kind(model_folder, data.choice)
    num_samples = len(data.dataset)
    phase = str(Path(data.task.name, seed_name))
    max_steps = count_steps(config, num_samples)
    trainer = config.trainer
    folder = trainer.checkpoint_folder / data.choice.name / phase
    eval_steps = trainer.eval_steps
    if data.held_out is not None:
        eval_steps = eval_steps or max_steps
    record = None
    if not trainer.benchmark:
        record = make_record(config, max_steps, start, data, runtime)
    starts_from_weights = start.weights is not None
    config = config.with_values(
        trainer={
            "max_steps": max_steps,
            "checkpoint_folder": folder,
            "record": record if runtime.distributed.is_main else None,
            "eval_steps": eval_steps,
            "logs_start": not trainer.benchmark and data.task.logs_start and starts_from_weights,
        },
        schedule={"total_steps": max_steps},
        metadata={
            "phase": phase,
            "num_samples": num_samples,
            "data": None if record is None else record.identity["data"],
            "hyperparameters": (
                config.hyperparameters if record is None else record.hyperparameters
            ),
            "tokenizer": data.choice.tokenizer,
            "name": data.choice.name,
            **data.metadata,
        },
    )
    result_files = (*data.task.result_files, SCORES_FILE, EVALUATIONS_FILE)
    start = replace(start, config=replace(start.config, result_files=result_files))
    num_sizes = stream_sizes(runtime.device, runtime.precision.dtype)
    config, note = choose_compilation(config, data.task, runtime)
    return TrainingPlan(start, data, config, num_sizes, note)


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


def build_trainer(
    model: PreTrainedModel,
    task: Task,
    config: RunConfig,
    runtime: Runtime,
    start: Start | None = None,
    evaluator: Evaluator | None = None,
    development: DevelopmentData | None = None,
    settings: JsonObject | None = None,
) -> Trainer:
    """The trainer of `model`, also on the meta device, with the state of `start`. development: see
    TaskData. evaluator: see Evaluations. settings: to log at the start, besides those of the
    run.
    """
    check_memory(model, runtime, tensors_per_parameter=3)
    untrained = freeze_layers(model, config.trainer.freeze_layers)
    parallel = parallelize(
        model,
        config.parallel,
        runtime.precision,
        runtime.device,
        runtime.distributed,
        task.frozen_models,
    )
    for name in untrained:
        parallel.named_parameters()[name].requires_grad_(False)
    rate = config.schedule.learning_rate
    learning_rate = torch.tensor(rate, dtype=torch.float32, device=parallel.optimizer_device)
    state = make_state(parallel, learning_rate, config, runtime)
    start = start or Start()
    state.start_from(start, config.trainer.checkpoint_folder, config.trainer.record)
    check_updates_left(state, config)
    record = config.trainer.record
    is_new = state.samples_consumed == 0 and not config.trainer.benchmark
    if is_new and task.has_trained_head and begins_with_head(model, start, state, config):
        state.encoder_start = None
    if state.encoder_start is None:
        parallel.frozen = encoder_parameters(model)
    updates = state.step, config.trainer.last_step(state.step), parallel.optimizer_device
    rates = rate_table(schedule_of(config, state), *updates)

    def train_encoder() -> None:  # without the trainer, which would then refer to itself
        parallel.frozen = frozenset()
        rates.copy_(rate_table(schedule_of(config, state), *updates))

    best = None
    if development is not None:
        best = make_best(state, task, config, development)
    state.evaluated_step = None if best is None else best.evaluated_step
    stopwatch = Stopwatch(runtime.device, enabled=config.trainer.benchmark)
    if config.trainer.benchmark:
        callbacks: list[Callback] = [make_benchmark(state, stopwatch, config, runtime)]
    else:
        callbacks = make_callbacks(state, evaluator, best, config, runtime)
    if state.encoder_start is None:
        callbacks = [HeadFirst(task, state, config, runtime, train_encoder), *callbacks]
    processes = runtime.distributed.world_size
    logged = config.metadata.arguments | {"SEED": config.metadata.seed, "processes": processes}
    logged |= state.versions | (settings or {})
    if record is not None:  # paths do not tell models apart: their content may change
        weights = complete_record(config.trainer.checkpoint_folder, record).identity[WEIGHTS]
        logged["starting_weights"] = weights and weights[:DIGITS]
    return Trainer(
        task,
        state,
        learning_rate,
        rates,
        config.trainer,
        runtime,
        callbacks=callbacks,
        stopwatch=stopwatch,
        settings=logged,
    )


def schedule_of(config: RunConfig, state: TrainState) -> Callable[[int], float]:
    """The learning rate by updates: constant while only the head is trained."""
    if state.encoder_start is None:
        rate = head_rate(config)
        return lambda _updates: rate
    first = state.encoder_start or state.schedule_start
    return make_schedule(replace(config.schedule, first_step=first))


def make_state(
    parallel: ParallelModel, learning_rate: Tensor, config: RunConfig, runtime: Runtime
) -> TrainState:
    """The state of a run before its first update, with its optimizer. learning_rate: the tensor
    that the optimizer reads.
    """
    optimizer = make_optimizer(
        config.optimizer,
        parallel.model,
        learning_rate,
        parallel.named_parameters(),
        parallel.shard_group,
        parallel.replica_group,
        optimizer_product_dtype(runtime.precision, learning_rate.device),
    )
    parallel.prepare(optimizer)
    loss_scale = LossScale(device=learning_rate.device)
    if runtime.precision.needs_loss_scale:
        types = config.precision
        loss_scale = LossScale(types.loss_scale, types.dynamic_loss_scale, learning_rate.device)
    return TrainState(
        parallel,
        optimizer,
        spec_of(optimizer),
        loss_scale,
        config.metadata,
        runtime.distributed,
        config.trainer.ema,
    )


def check_updates_left(state: TrainState, config: RunConfig) -> None:
    first, max_steps = state.schedule_start, config.trainer.max_steps
    if first >= max_steps:
        advice = "with --lr-rewarmup it counts the updates of both phases, so give more"
        raise UserError(
            f"phase 1 ended at update {first}, and --max-steps is {max_steps}: {advice}"
        )


def make_best(
    state: TrainState, task: Task, config: RunConfig, development: DevelopmentData
) -> BestCheckpoint:
    """The evaluations of the run so far, and its best checkpoint."""
    return BestCheckpoint(
        folder=config.trainer.checkpoint_folder,
        metric=task.metric,
        lower_is_better=task.lower_is_better,
        patience=config.trainer.early_stopping,
        development_data=development.digest,
        step=state.step,
        evaluated_step=state.evaluated_step,
        on_main=state.distributed.on_main,
    )


def make_benchmark(
    state: TrainState, stopwatch: Stopwatch, config: RunConfig, runtime: Runtime
) -> Benchmark:
    warmup_steps = config.trainer.benchmark_warmup_steps
    window = measuring_window(runtime)
    return Benchmark(state, window, stopwatch, warmup_steps, runtime.reporter)


def make_callbacks(
    state: TrainState,
    evaluator: Evaluator | None,
    best: BestCheckpoint | None,
    config: RunConfig,
    runtime: Runtime,
) -> list[Callback]:
    """The callbacks of a run that is no benchmark."""
    checkpoints = Checkpoints(state, config.trainer, runtime)
    if evaluator is None:
        return [checkpoints]
    evaluations = Evaluations(evaluator, best, checkpoints, state, config.trainer, runtime)
    return [checkpoints, evaluations]
