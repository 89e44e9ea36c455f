"""Setup shared by all programs: starts the runtime, completes the configuration, builds model, trainer and loader."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from checkpoint.identity import identity_of
from checkpoint.model_choice import ModelChoice
from checkpoint.state import TrainState, find_start, load_weights
from data_loading.loader import StepLoader, StreamDataset
from data_loading.packing import MicroBatchLimits, stream_sizes
from encoders.base import PreTrainedModel
from encoders.config import ModelConfig
from evaluation import evaluate
from lr_scheduler import make_schedule
from metrics.sinks import DLLoggerJsonSink, make_reporter
from modeling import make_model
from optimizer import make_optimizer, spec_of
from parallel.base import ParallelModel
from parallel.deepspeed import check_engine_config
from parallel.runtime import Runtime
from parallelize import check_parallel, parallelize
from precision import LossScale, select_precision, slow_bfloat16
from run_config import LoaderConfig, RunConfig, RunRecord
from tasks import Task
from trainer import Trainer
from utils.device import keep_freed_memory, select_device, set_cpu_affinity, set_num_threads
from utils.distributed import init_distributed
from utils.errors import UserError, is_out_of_memory
from utils.launcher import stop_with_launcher
from utils.memory import total_memory
from utils.progress import print_line
from utils.terminal import may_lose_terminal


@contextmanager
def start_runtime(config: RunConfig, title: str) -> Iterator[Runtime]:
    """Selects device and precision, initializes the process group, and opens the logs. Cleans up on exit."""
    settings, parallel = config.runtime, config.parallel
    stop_with_launcher()
    device = select_device(settings.device)
    types = (settings.amp, settings.amp_dtype, settings.pure_fp16, settings.tf32)
    precision = select_precision(*types, device, settings.fp8)
    check_parallel(config, device)
    if parallel.deepspeed is not None:
        check_engine_config(parallel.deepspeed, device)
    set_num_threads()
    keep_freed_memory()
    timeouts = (settings.timeout_minutes, settings.collective_timeout_minutes)
    with may_lose_terminal(), init_distributed(device, *timeouts) as distributed:
        if settings.cpu_affinity:
            set_cpu_affinity(device)
        if distributed.is_main:
            for message in (f"{title} on {distributed.world_size} x {device.type}", *settings.messages):
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
                f"out of memory on {device}: lower the batch size (and raise --gradient-merge-steps as much: the "
                f"global batch stays the same), or add --activation-checkpoint full; the last checkpoint is kept"
            ) from error
        finally:
            reporter.close()


def open_report(config: RunConfig, folder: Path, runtime: Runtime, name: str = "report.json") -> None:
    """Logs to the file `name` in the run's folder, unless the flags give a report file."""
    if config.runtime.reports_in_folder and runtime.distributed.is_main:
        runtime.reporter.sinks.append(DLLoggerJsonSink(folder / name, "--report-file"))


def check_memory(model: PreTrainedModel, runtime: Runtime, tensors_per_parameter: int = 1) -> None:
    """Raises UserError if the model alone needs more memory than the device has. Activations are not counted.

    tensors_per_parameter: 1 for weights only, 3 for weights and two optimizer moments. All are float32, except in
    prediction with --use-pure-fp16.
    """
    parallel, precision = runtime.parallel, runtime.precision
    if parallel.deepspeed is not None and parallel.deepspeed["zero_optimization"]["stage"]:
        tensors_per_parameter = 1  # every process first holds all weights; moments are sharded
    itemsize = precision.dtype.itemsize if precision.pure and tensors_per_parameter == 1 else 4
    num_parameters = sum(p.numel() for p in model.parameters())
    device, needed = runtime.device, num_parameters * itemsize * tensors_per_parameter / parallel.shard_degree
    if parallel.cpu_offload:
        device = torch.device("cpu")
    if device.type == "cpu":  # shared by the processes of a machine
        needed *= runtime.distributed.local_world_size
    on_gpu = device.type == "cuda"
    if needed > (total := torch.cuda.get_device_properties(device).total_memory if on_gpu else total_memory()):
        state = " with their optimizer state" if tensors_per_parameter > 1 else ""
        raise UserError(
            f"the model has {num_parameters / 1e6:,.0f} million parameters, which need {needed / 2**30:,.1f} GiB{state}"
            f", and {device} has {total / 2**30:,.1f} GiB: use a smaller model, or more GPUs with "
            f"--data-parallel-shard-degree"
        )


def find_fine_tuned(config: RunConfig, runtime: Runtime) -> Path:
    """The model folder for prediction, from the flags."""
    start = config.start
    start = replace(start, from_pretrained_params=start.from_pretrained_params or start.from_checkpoint)
    folder = start.from_checkpoint or config.trainer.checkpoint_folder
    found = runtime.distributed.on_main(lambda: find_start(start, folder, saves=False))
    return Path(found["checkpoint"] or found["weights"])


def load_fine_tuned(
    head: str, config: ModelConfig, folder: Path, runtime: Runtime, log: Callable[[str], None] = print_line
) -> ParallelModel:
    """Loads the model in `folder` for prediction. head: a key of modeling.MODELS; the folder must have all of it."""
    with torch.device("meta"):
        model = make_model(head, config)
    check_memory(model, runtime)
    if runtime.parallel.shard_degree == 1:  # no initial values, since all are loaded
        model.to_empty(device=runtime.device)
    parallel = parallelize(model, runtime.parallel, runtime.precision, runtime.device, runtime.distributed)
    load_weights(parallel, folder, log if runtime.distributed.is_main else lambda _text: None, has_head=True)
    return parallel


@dataclass(frozen=True)
class TrainingPlan:
    """Everything needed to build a run; nothing is allocated yet. head: a key of modeling.MODELS. initial_loss: the
    expected loss of random weights, or None."""

    choice: ModelChoice
    head: str
    task: Task
    dataset: StreamDataset
    config: RunConfig
    initial_loss: float | None = None
    eval_dataset: StreamDataset | None = None

    def make_model(self) -> PreTrainedModel:
        """Builds the model on the meta device."""
        with torch.device("meta"):
            return make_model(self.head, self.choice.config)

    def build_trainer(self, runtime: Runtime) -> Trainer:
        torch.manual_seed(self.config.metadata.seed)
        return build_trainer(self.make_model(), self.task, self.config, runtime, self.eval_dataset)

    def make_loader(self, trainer: Trainer) -> StepLoader:
        """The loader of the remaining batches of `trainer`."""
        return StepLoader(
            self.dataset,
            self.config.loader,
            self.config.metadata.seed,
            first_position=trainer.state.samples_consumed,
            rank=trainer.distributed.rank,
            world_size=trainer.distributed.world_size,
            pin_memory=trainer.device.type == "cuda",
        )


def plan_run(
    config: RunConfig,
    choice: ModelChoice,
    head: str,
    task: Task,
    dataset: StreamDataset,
    phase: str,
    runtime: Runtime,
    *,
    result_files: tuple[str, ...] = (),
    initial_loss: float | None = None,
    eval_dataset: StreamDataset | None = None,
) -> TrainingPlan:
    """Completes `config` with the values that depend on model, data and device.

    phase: subfolder for results in the model's folder; result_files: see StartConfig.
    """
    max_steps, start, trainer = count_steps(config, len(dataset)), config.start, config.trainer
    folder = trainer.checkpoint_folder / choice.name / phase
    record = None
    if not trainer.benchmark:
        lengths = {"the global batch size": config.loader.global_batch_size, "--max-steps": max_steps}
        # The other ranks wait here, where the timeout is long, while the main process verifies the starting weights.
        identity = runtime.distributed.on_main(
            lambda: identity_of(start, choice, dataset.digest(), config.metadata.seed)
        )
        record = RunRecord(identity, config.hyperparameters | lengths) if runtime.distributed.is_main else None
    if start.resume:
        start = replace(start, from_checkpoint=folder, last_step_of_checkpoint="auto")
    compiled = config.parallel.compile != "none"
    num_sizes = stream_sizes(runtime.device, runtime.precision.dtype, compiled)
    sequences = likely_sequences(dataset, config.loader) if compiled else None
    config = replace(config, start=start).with_values(
        trainer={
            "max_steps": max_steps,
            "checkpoint_folder": folder,
            "record": record,
            "eval_steps": trainer.eval_steps or (max_steps if eval_dataset is not None else 0),
        },
        loader={"num_sizes": num_sizes, "sequences": sequences},
        schedule={"total_steps": max_steps},
        start={"result_files": result_files},
        metadata={"phase": phase, "num_samples": len(dataset), "tokenizer": choice.tokenizer},
    )
    return TrainingPlan(choice, head, task, dataset, config, initial_loss, eval_dataset)


def likely_sequences(dataset: StreamDataset, config: LoaderConfig) -> int:
    """A limit for the sequences of a micro-batch of a compiled graph, which computes attention for as many: 1.25 times
    the sequences of the data set's mean length that fit."""
    mean = dataset.read(np.unique(np.linspace(0, len(dataset) - 1, 200, dtype=np.int64))).lengths.mean()
    return math.ceil(min(1.25 * config.max_seq_length / mean, 4) * config.batch_size)


def count_steps(config: RunConfig, num_samples: int) -> int:
    """Number of updates of a run: the smaller of `max_steps` and the length of `epochs`."""
    steps, epochs = config.trainer.max_steps, config.epochs
    if epochs is not None:
        needed = math.ceil(epochs * num_samples / config.loader.global_batch_size)
        steps = min(needed, steps) if steps > 0 else needed
    if steps >= 2**31:
        raise UserError(f"--epochs {epochs:g} takes {steps} updates: give fewer epochs, or --max-steps")
    return steps


def build_trainer(
    model: PreTrainedModel, task: Task, config: RunConfig, runtime: Runtime, eval_dataset: StreamDataset | None = None
) -> Trainer:
    """Builds the trainer for `model`, which may be on the meta device, and loads the state of `config.start`."""
    precision, distributed = runtime.precision, runtime.distributed
    check_memory(model, runtime, tensors_per_parameter=3)
    parallel = parallelize(model, config.parallel, precision, runtime.device, distributed)
    device = parallel.optimizer_device
    learning_rate = torch.tensor(config.schedule.learning_rate, dtype=torch.float32, device=device)
    optimizer = make_optimizer(
        config.optimizer, parallel.model, learning_rate, parallel.named_parameters(), parallel.shard_group
    )
    parallel.prepare(optimizer)
    loss_scale = LossScale(device=device)
    if precision.needs_loss_scale:
        loss_scale = LossScale(config.loss_scale, config.dynamic_loss_scale, device)
    state = TrainState(parallel, optimizer, spec_of(optimizer), loss_scale, config.metadata, distributed)
    state.start_from(config.start, config.trainer.checkpoint_folder, config.trainer.record)
    max_steps = config.trainer.max_steps
    if state.schedule_start >= max_steps:
        raise UserError(
            f"phase 1 ended at update {state.schedule_start}, and --max-steps is {max_steps}: with --lr-rewarmup it "
            f"counts the updates of both phases, so give more"
        )
    evaluation = None
    if eval_dataset is not None:
        evaluation = partial(evaluate, parallel, task, eval_dataset, MicroBatchLimits.of(config.loader), runtime)
    return Trainer(
        task,
        state,
        learning_rate,
        make_schedule(replace(config.schedule, first_step=state.schedule_start)),
        config.trainer,
        runtime,
        evaluation,
    )
