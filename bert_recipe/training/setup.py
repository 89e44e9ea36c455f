"""Setup shared by all programs: starts the runtime, and builds a trainer with its callbacks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from bert_recipe.checkpoint.state import TrainState
from bert_recipe.config import RunConfig
from bert_recipe.data_loading.loader import StepLoader
from bert_recipe.metrics.sinks import DLLoggerJsonSink, make_reporter
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.kernels.linear import float32_linear, onednn_is_faster
from bert_recipe.optimization.layers import freeze_lowest_layers
from bert_recipe.optimization.lr_scheduler import LearningRate, make_schedule
from bert_recipe.optimization.precision import (
    optimizer_product_dtype,
    select_precision,
    slow_bfloat16,
)
from bert_recipe.optimization.registry import make_optimizer
from bert_recipe.parallel.compilation import check_compile
from bert_recipe.parallel.parallelize import check_parallel, parallelize
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.training.benchmark import Benchmark
from bert_recipe.training.callbacks import Callback
from bert_recipe.training.checkpoint_callback import Checkpoints
from bert_recipe.training.evaluation_callback import Evaluations
from bert_recipe.training.fitted_numbers import FitToNumbers
from bert_recipe.training.guessing import GuessingLoss
from bert_recipe.training.head_first import HeadFirst, begins_with_head, head_rate
from bert_recipe.training.new_dense import StandardizeDense, new_dense_layers
from bert_recipe.training.row_gradients import RowGradients, takes_row_gradients
from bert_recipe.training.run import Run
from bert_recipe.training.shrunk_outputs import ShrunkOutputs
from bert_recipe.training.trainer import Trainer
from bert_recipe.utils.device import (
    keep_freed_memory,
    select_device,
    set_cpu_affinity,
    set_num_threads,
    use_deterministic_kernels,
)
from bert_recipe.utils.distributed import DistributedContext, init_distributed
from bert_recipe.utils.errors import UserError, is_out_of_memory
from bert_recipe.utils.measure import Stopwatch
from bert_recipe.utils.progress import print_line


@contextmanager
def start_runtime(config: RunConfig, title: str, messages: Sequence[str] = ()) -> Iterator[Runtime]:
    """Selects device and precision, initializes the process group, and opens the logs. Cleans up on
    exit. messages: to print after the title.
    """
    settings = config.runtime
    device = select_device(settings.device)
    set_num_threads()
    keep_freed_memory()
    if settings.cpu_affinity:
        set_cpu_affinity(device)
    if settings.deterministic:
        use_deterministic_kernels()
    precision = select_precision(config.precision, device)
    if slow := slow_bfloat16(precision, device):
        messages = (*messages, f"note: {slow}")
    check_parallel(config, device)
    check_compile(config.parallel.compile, device)
    timeouts = (settings.timeout_minutes, settings.collective_timeout_minutes)
    with init_distributed(device, *timeouts) as distributed:
        if distributed.is_main:
            print_line(f"{title} on {distributed.world_size} x {device.type}")
            for message in messages:
                print_line(message)
        reporter = make_reporter(settings, distributed.is_main)
        try:
            onednn = float32_linear(chooses_onednn(config, device, distributed))
            with onednn, ExitStack() as locks:
                yield Runtime(device, precision, distributed, reporter, locks)
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


def chooses_onednn(
    config: RunConfig, device: torch.device, distributed: DistributedContext
) -> bool:
    """Whether float32 linear layers are computed by oneDNN, on all ranks: if it is faster on the
    machines of all.
    """
    is_faster = device.type == "cpu" and onednn_is_faster() and not config.parallel.compiles
    chosen = config.runtime.float32_linear == "auto" and is_faster
    return distributed.all_reduce_sum([chosen]) == [distributed.world_size]


def open_report(config: RunConfig, folder: Path, runtime: Runtime) -> None:
    """Logs to report.json in the run's folder, unless the flags give a report file."""
    if not config.arguments.given("report_file") and runtime.distributed.is_main:
        runtime.reporter.sinks.append(DLLoggerJsonSink(folder / "report.json", "--report-file"))


def build_trainer(run: Run, runtime: Runtime, model: PreTrainedModel | None = None) -> Trainer:
    """The trainer of a run, with the state that it starts from. model: the run's, also on the meta
    device; by default a new one.
    """
    torch.manual_seed(run.record.seed)
    model = model or run.make_model()
    num_frozen = run.settings.trainer.freeze_layers
    if num_frozen is not None:
        freeze_lowest_layers(model, num_frozen)
    parallel = parallelize(
        model,
        run.parallel,
        runtime,
        frozen_models=run.task.frozen_models,
        falls_back=run.settings.parallel.compile == "auto",
    )
    learning_rate = LearningRate(run.values.schedule.learning_rate, parallel.optimizer_device)
    optimizer = make_optimizer(
        run.settings.optimizer,
        model,
        learning_rate.value,
        parallel.named_parameters(),
        parallel.shard_group,
        parallel.replica_group,
        optimizer_product_dtype(runtime.precision, parallel.optimizer_device),
    )
    parallel.prepare(optimizer)
    state = TrainState(run, parallel, optimizer)
    state.restore()
    if begins_with_head(run, state):
        state.start_encoder(None)
    follow = partial(follow_schedule, run, state, learning_rate)
    follow()
    stopwatch = Stopwatch(runtime.device, enabled=run.settings.trainer.benchmark)
    callbacks = make_callbacks(run, state, follow, stopwatch, runtime)
    return Trainer(run, state, learning_rate, runtime, callbacks, stopwatch)


def make_loader(trainer: Trainer) -> StepLoader:
    """The loader of the remaining batches of `trainer`."""
    run = trainer.run
    return StepLoader(
        run.data.dataset,
        run.values.loader,
        run.record.seed,
        first_position=trainer.state.samples_consumed,
        rank=trainer.distributed.rank,
        world_size=trainer.distributed.world_size,
        pin_memory=trainer.device.type == "cuda",
        limits=run.limits(trainer.runtime),
        updates=run.max_steps - trainer.state.schedule_start,
    )


def follow_schedule(run: Run, state: TrainState, learning_rate: LearningRate) -> None:
    """Sets the rates of the updates to come: a constant one while only the head is trained."""
    schedule, first = run.values.schedule, state.encoder_start
    if first is None:
        rate = head_rate(run.settings.optimizer.name, schedule.learning_rate)
        learning_rate.follow(lambda _updates: rate, state.step, state.last_step)
        return
    rates = make_schedule(schedule, run.max_steps, first or state.schedule_start)
    learning_rate.follow(rates, state.step, state.last_step)


def make_callbacks(
    run: Run, state: TrainState, follow: Callable[[], None], stopwatch: Stopwatch, runtime: Runtime
) -> list[Callback]:
    """What happens around updates: checkpoints and evaluations, or the measurements of a benchmark.

    follow: sets the learning rates of the updates to come.
    stopwatch: of the phases of an update.
    """
    callbacks: list[Callback] = []
    if takes_row_gradients(state):
        callbacks.append(RowGradients(state.model))
    if names := new_dense_layers(run, state):
        callbacks.append(StandardizeDense(names, run, state, runtime))
    if run.is_trial:
        return callbacks
    if run.task.numbers is not None:
        callbacks.append(FitToNumbers(run, state, runtime))
    if not run.saves:
        return [*callbacks, Benchmark(run, state, stopwatch, runtime)]
    if state.encoder_start is None:
        callbacks.append(HeadFirst(run, state, runtime, follow))
    if run.values.shrinkage is not None:
        callbacks.append(ShrunkOutputs(run, state, run.values.shrinkage))
    checkpoints = Checkpoints(run, state, runtime)
    if run.data.held_out is not None or run.data.scored_sets:
        callbacks.append(Evaluations(run, state, checkpoints, runtime))
    callbacks.append(checkpoints)  # which have the evaluation of their step
    if run.task.guessing_loss is not None:
        callbacks.append(GuessingLoss(run, run.task.guessing_loss, runtime))
    return callbacks
