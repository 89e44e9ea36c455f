"""From parsed arguments to a running trainer, once for all programs: typed configs, and the parts in their order."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from arguments import MAX_BATCH, amp_dtype, optimizer_config, parallel_config
from bert_config import BertConfig
from checkpoint.identity import make_record
from checkpoint.state import TrainState, find_start, load_weights
from data_loading.loader import StepLoader, StreamDataset
from data_loading.packing import MicroBatchLimits, stream_sizes
from device import Runtime, keep_freed_memory, select_device, set_num_threads, total_memory
from diagnostics.estimates import MemorySettings, format_estimate
from evaluation import evaluate
from lr_scheduler import make_schedule
from metrics import make_reporter
from model_choice import ModelChoice
from modeling import BertPreTrainedModel
from optimizer import make_optimizer
from parallel.base import ParallelModel
from parallel.deepspeed import check_engine_config
from parallelize import parallelize
from precision import DTYPES, LossScale, Precision, select_precision
from run_config import (
    CheckpointMetadata,
    LoaderConfig,
    RunConfig,
    ScheduleConfig,
    StartConfig,
    TrainerConfig,
)
from tasks import Task
from tokenizer import BertTokenizer
from trainer import Trainer
from utils.affinity import set_cpu_affinity
from utils.command_line import Arguments, format_arguments
from utils.distributed import init_distributed, read_environment
from utils.errors import UserError, is_out_of_memory, reports_errors
from utils.launcher import stop_with_launcher
from utils.progress import print_line
from utils.terminal import may_lose_terminal

INITIAL_LOSS_SCALE = 2.0**20  # where --use-dynamic-loss-scaling starts if --scale-loss is not given


@contextmanager
def start_runtime(args: Arguments, title: str) -> Iterator[Runtime]:
    """Selects device and precision, joins the other processes, and opens the log; leaves everything at the end."""
    stop_with_launcher()
    device = select_device(args.device)
    amp = args.amp or args.fp16
    precision = select_precision(amp, amp_dtype(args), args.use_pure_fp16, args.tf32, device)
    parallel = parallel_config(args, read_environment().world_size, on_gpu=device.type == "cuda")
    if parallel.deepspeed is not None:
        check_engine_config(parallel.deepspeed, device)
    set_num_threads()
    keep_freed_memory()
    with may_lose_terminal(), init_distributed(device, args.distributed_timeout_minutes) as distributed:
        if args.enable_cpu_affinity:
            set_cpu_affinity(device, distributed.local_rank, distributed.local_world_size)
        if args.show_config and distributed.is_main:
            print_line(format_arguments(args, f"{title} on {distributed.world_size} x {device.type}:"))
        if precision.dtype == torch.float16 and args.amp_dtype is None and distributed.is_main:
            print_line(
                "note: loss scaling was asked for, so the 16-bit type is float16 (--amp-dtype bfloat16 needs none)"
            )
        reporter = make_reporter(args.report_file, args.tensorboard_dir, distributed.is_main)
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


def check_memory(model: BertPreTrainedModel, runtime: Runtime, tensors_per_parameter: int = 1) -> None:
    """Raises UserError if the model alone needs more memory than the device has. Activations are not counted.

    tensors_per_parameter: 1 for weights, 3 for weights with the two moments of the optimizer. All are float32, except
    in prediction with --use-pure-fp16.
    """
    parallel, precision = runtime.parallel, runtime.precision
    if parallel.deepspeed is not None and parallel.deepspeed["zero_optimization"]["stage"]:
        tensors_per_parameter = 1  # each process starts with all weights, and then has its part of the moments
    itemsize = precision.dtype.itemsize if precision.pure and tensors_per_parameter == 1 else 4
    num_parameters = sum(p.numel() for p in model.parameters())
    device, needed = runtime.device, num_parameters * itemsize * tensors_per_parameter / parallel.shard_degree
    if parallel.cpu_offload:
        device = torch.device("cpu")
    if device.type == "cpu":  # the processes of a machine share it
        needed *= runtime.distributed.local_world_size
    if needed > (total := total_memory(device)):
        state = " with their optimizer state" if tensors_per_parameter > 1 else ""
        raise UserError(
            f"the model has {num_parameters / 1e6:,.0f} million parameters, which need {needed / 2**30:,.1f} GiB{state}"
            f", and {device} has {total / 2**30:,.1f} GiB: use a smaller model, or more GPUs with "
            f"--data-parallel-shard-degree"
        )


# --- estimates --------------------------------------------------------------------------------------------------------


def memory_settings(args: Arguments, batch_size: int, targets_per_sequence: int) -> MemorySettings:
    """What the flags say about memory. --estimate-memory gives the number of processes, and --device cuda needs no
    GPU."""
    world_size = args.estimate_memory or read_environment().world_size
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    parallel = parallel_config(args, world_size, on_gpu)
    micro_batches = args.gradient_merge_steps
    if args.global_batch_size:
        micro_batches = -(-args.global_batch_size // (world_size * batch_size))
    num_sizes = 1 if parallel.compile != "none" else None
    sixteen_bits = args.amp or args.fp16 or args.use_pure_fp16
    return MemorySettings(
        MicroBatchLimits.for_batch(batch_size, args.max_seq_length, targets_per_sequence, num_sizes),
        batch_size,
        micro_batches,
        args.optimizer,
        Precision(DTYPES[amp_dtype(args)], args.use_pure_fp16) if sixteen_bits else Precision(),
        parallel,
        world_size,
        torch.device("cuda" if on_gpu else "cpu"),
        saves=not args.benchmark,
    )


def print_estimate(
    model_class: type[BertPreTrainedModel],
    config: BertConfig,
    args: Arguments,
    batch_size: int,
    targets_per_sequence: int = 0,
) -> None:
    """Carries out --estimate-memory: prints the table on the first process, and allocates nothing."""
    with torch.device("meta"):
        model = model_class(config)
    text = format_estimate(model, memory_settings(args, batch_size, targets_per_sequence))
    if reports_errors():
        print_line(text)


# --- fine-tuned models ------------------------------------------------------------------------------------------------


def find_fine_tuned(args: Arguments, runtime: Runtime) -> Path:
    """The model folder to predict with, which the flags name."""
    start = StartConfig(
        args.from_checkpoint,
        args.last_step_of_checkpoint,
        from_pretrained_params=args.from_pretrained_params or args.from_checkpoint,
    )
    found = runtime.distributed.on_main(lambda: find_start(start, args.from_checkpoint or args.output_dir, saves=False))
    return Path(found["checkpoint"] or found["weights"])


def load_fine_tuned(
    model_class: type[BertPreTrainedModel],
    config: BertConfig,
    folder: Path,
    required: tuple[str, ...],
    runtime: Runtime,
    log: Callable[[str], None] = print_line,
) -> ParallelModel:
    """The model in `folder`, to predict with. `required`: prefixes of the heads that it must have."""
    with torch.device("meta"):
        model = model_class(config)
    check_memory(model, runtime)
    parallel = parallelize(model, runtime.parallel, runtime.precision, runtime.device, runtime.distributed)
    load_weights(parallel, folder, log if runtime.distributed.is_main else lambda _text: None, required)
    return parallel


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingPlan:
    """What a command line trains, before anything is allocated. initial_loss: the expected loss of random weights, if
    it is known."""

    choice: ModelChoice
    model_class: type[BertPreTrainedModel]
    task: Task
    dataset: StreamDataset
    config: RunConfig
    initial_loss: float | None = None
    eval_dataset: StreamDataset | None = None

    def make_model(self) -> BertPreTrainedModel:
        """On the meta device, without memory."""
        with torch.device("meta"):
            return self.model_class(self.choice.config)

    def build_trainer(self, runtime: Runtime) -> Trainer:
        torch.manual_seed(self.config.metadata.seed)
        return build_trainer(self.make_model(), self.task, self.config, runtime, self.eval_dataset)

    def make_loader(self, trainer: Trainer) -> StepLoader:
        return make_loader(self.dataset, self.config, trainer)


def make_run_config(
    args: Arguments,
    loader: LoaderConfig,
    runtime: Runtime,
    model: ModelChoice,
    metadata: CheckpointMetadata,
    data_digest: str,
    max_steps: int,
    eval_steps: int = 0,
    result_files: tuple[str, ...] = (),
) -> RunConfig:
    """The flags that all programs share (see arguments.py) as a RunConfig. data_digest: see
    run_identity.make_record; result_files: see StartConfig."""
    folder = args.output_dir / model.name / metadata.phase
    from_checkpoint, last_step = args.from_checkpoint, args.last_step_of_checkpoint
    if args.resume_from_checkpoint:
        from_checkpoint, last_step = folder, "auto"
    dynamic = args.use_dynamic_loss_scaling or args.fp16
    weights = getattr(args, "from_phase1_final_params", None) or args.from_pretrained_params
    record = None
    if runtime.distributed.is_main and not args.benchmark:
        record = make_record(
            args,
            weights=weights,
            data=data_digest,
            vocabulary=model.vocab_file,
            architecture=model.config.to_dict(),
            global_batch_size=loader.global_batch_size,
            max_steps=max_steps,
        )
    return RunConfig(
        TrainerConfig(
            max_steps=max_steps,
            checkpoint_folder=folder,
            record=record,
            steps_this_run=args.steps_this_run,
            max_grad_norm=args.max_grad_norm,
            max_skipped_steps=args.max_skipped_steps,
            log_freq=args.log_freq,
            steps_per_checkpoint=args.num_steps_per_checkpoint,
            eval_steps=eval_steps,
            benchmark=args.benchmark,
            benchmark_steps=args.benchmark_steps,
            benchmark_warmup_steps=args.benchmark_warmup_steps,
        ),
        loader,
        optimizer_config(args),
        ScheduleConfig(
            total_steps=max_steps,
            learning_rate=args.learning_rate,
            decay=args.lr_decay,
            warmup_proportion=args.warmup_proportion,
            warmup_start_lr=args.warmup_start_lr,
            power=args.lr_decay_power,
            rate=args.lr_decay_rate,
            decay_steps=args.lr_decay_steps,
            offset=args.lr_offset,
        ),
        runtime.parallel,
        StartConfig(
            from_checkpoint,
            last_step,
            getattr(args, "from_phase1_final_params", None),
            args.from_pretrained_params,
            args.overwrite,
            getattr(args, "lr_rewarmup", False),
            result_files,
        ),
        metadata,
        INITIAL_LOSS_SCALE if dynamic and args.scale_loss == 1 else args.scale_loss,
        dynamic,
    )


def count_steps(args: Arguments, num_samples: int, batch_size: int) -> int:
    """Updates of a fine-tuning run: as many as --epochs need, and at most --max-steps."""
    steps = math.ceil(args.epochs * num_samples / batch_size)
    steps = min(steps, args.max_steps) if args.max_steps > 0 else steps
    if steps >= 2**31:
        raise UserError(f"--epochs {args.epochs:g} takes {steps} updates: give fewer epochs, or --max-steps")
    return steps


def global_batch_size(args: Arguments, batch_size: int, world_size: int) -> int:
    """Sequences per update over all ranks."""
    global_batch = args.global_batch_size or batch_size * args.gradient_merge_steps * world_size
    if global_batch > MAX_BATCH:
        raise UserError(
            f"an update would take {global_batch} sequences, and at most {MAX_BATCH} are possible: lower the batch "
            f"size or --gradient-merge-steps"
        )
    return global_batch


def build_trainer(
    model: BertPreTrainedModel,
    task: Task,
    config: RunConfig,
    runtime: Runtime,
    eval_dataset: StreamDataset | None = None,
) -> Trainer:
    """The trainer of `model`, which may be on the meta device, in the state that `config.start` names."""
    precision, distributed = runtime.precision, runtime.distributed
    check_memory(model, runtime, tensors_per_parameter=3)
    parallel = parallelize(model, config.parallel, precision, runtime.device, distributed)
    device = parallel.optimizer_device
    learning_rate = torch.tensor(config.schedule.learning_rate, dtype=torch.float32, device=device)
    optimizer = make_optimizer(
        config.optimizer, parallel.named_parameters().items(), learning_rate, parallel.shard_group
    )
    parallel.prepare(optimizer)
    loss_scale = LossScale(device=device)
    if precision.needs_loss_scale:
        loss_scale = LossScale(config.loss_scale, config.dynamic_loss_scale, device)
    state = TrainState(parallel, optimizer, loss_scale, config.metadata, distributed)
    state.start_from(config.start, config.trainer.checkpoint_folder, config.trainer.record)
    max_steps = config.trainer.max_steps
    if state.schedule_start >= max_steps:
        raise UserError(
            f"phase 1 ended at update {state.schedule_start}, and --max-steps is {max_steps}: with --lr-rewarmup it "
            f"counts the updates of both phases, so give more"
        )
    return Trainer(
        task,
        parallel,
        state,
        learning_rate,
        make_schedule(replace(config.schedule, first_step=state.schedule_start)),
        config.trainer,
        runtime,
        evaluate_with(parallel, task, eval_dataset, config, runtime) if eval_dataset is not None else None,
    )


def evaluate_with(
    parallel: ParallelModel, task: Task, dataset: StreamDataset, config: RunConfig, runtime: Runtime
) -> Callable[[], dict[str, float]]:
    return partial(evaluate, parallel, task, dataset, MicroBatchLimits.of(config.loader), runtime)


def make_loader(dataset: StreamDataset, config: RunConfig, trainer: Trainer) -> StepLoader:
    """The batches that `trainer` takes from here on."""
    return StepLoader(
        dataset,
        config.loader,
        config.metadata.seed,
        first_position=trainer.state.samples_consumed,
        rank=trainer.distributed.rank,
        world_size=trainer.distributed.world_size,
        pin_memory=trainer.device.type == "cuda",
    )


def plan_fine_tuning(
    args: Arguments,
    choice: ModelChoice,
    model_class: type[BertPreTrainedModel],
    task: Task,
    dataset: StreamDataset,
    tokenizer: BertTokenizer,
    phase: str,
    runtime: Runtime,
    result_files: tuple[str, ...],
    initial_loss: float | None = None,
) -> TrainingPlan:
    """The plan of a fine-tuning task; `phase` is its folder."""
    loader = LoaderConfig(
        args.train_batch_size,
        global_batch_size(args, args.train_batch_size, runtime.distributed.world_size),
        args.max_seq_length,
        int(dataset.num_targets.max(initial=0)),
        num_workers=args.num_workers,
        num_sizes=stream_sizes(runtime.device, runtime.precision.dtype, args.compile != "none"),
    )
    max_steps = count_steps(args, len(dataset), loader.global_batch_size)
    metadata = CheckpointMetadata(
        phase=phase,
        arguments=args.as_dict(),
        num_samples=len(dataset),
        seed=args.seed,
        vocab_file=Path(tokenizer.vocab_file),
        do_lower_case=tokenizer.do_lower_case,
        prefix=args.model_prefix,
    )
    config = make_run_config(
        args, loader, runtime, choice, metadata, dataset.digest(), max_steps, args.eval_steps, result_files
    )
    return TrainingPlan(choice, model_class, task, dataset, config, initial_loss)
