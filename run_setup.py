"""From parsed arguments to a running trainer, once for all programs: typed configs, and the parts in their order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from arguments import parallel_config
from bert_config import BertConfig
from data_loader import LoaderConfig, StepLoader, StreamDataset
from device import keep_freed_memory, select_device, set_num_threads
from evaluation import evaluate
from lr_scheduler import ScheduleConfig, make_schedule
from metrics import make_reporter
from modeling import BertPreTrainedModel
from optimizer import OptimizerConfig, make_optimizer
from parallelize import ParallelConfig, ParallelModel, parallelize
from precision import LossScale, select_precision
from tokenizer import BertTokenizer
from train_state import CheckpointMetadata, StartConfig, TrainState
from trainer import Runtime, Task, Trainer, TrainerConfig
from utils.affinity import set_cpu_affinity
from utils.command_line import Arguments, format_arguments
from utils.distributed import init_distributed, read_environment
from utils.errors import UserError
from utils.files import read_json
from utils.progress import print_line

ROOT = Path(__file__).resolve().parent
INITIAL_LOSS_SCALE = 2.0**20  # where --use-dynamic-loss-scaling starts if --scale-loss is not given


@contextmanager
def start_runtime(args: Arguments, title: str) -> Iterator[Runtime]:
    """Selects device and precision, joins the other processes, and opens the log; leaves everything at the end."""
    device = select_device(args.device)
    precision = select_precision(args.amp, args.amp_dtype, args.use_pure_fp16, args.tf32, device)
    parallel = parallel_config(args, read_environment().world_size, on_gpu=device.type == "cuda")
    set_num_threads()
    keep_freed_memory()
    with init_distributed(device) as distributed:
        if args.enable_cpu_affinity:
            set_cpu_affinity(device, distributed.local_rank, distributed.local_world_size)
        if args.show_config and distributed.is_main:
            print_line(format_arguments(args, f"{title} on {distributed.world_size} x {device.type}:"))
        reporter = make_reporter(args.report_file, args.tensorboard_dir, distributed.is_main)
        try:
            yield Runtime(device, precision, distributed, reporter, parallel)
        finally:
            reporter.close()


# --- architecture and vocabulary --------------------------------------------------------------------------------------


def load_config(args: Arguments) -> BertConfig:
    path = args.config_file
    if path is None:
        if args.bert_model == "custom":
            raise UserError("--bert-model custom needs --config-file: give the architecture's JSON file")
        path = ROOT / "bert_configs" / f"{args.bert_model}.json"
    read_json(path, "the config")
    try:
        return BertConfig.from_json_file(path)
    except ValueError as error:
        raise UserError(f"{error}: correct the config") from error


def find_vocab_file(args: Arguments) -> Path:
    if args.vocab_file is not None:
        return args.vocab_file
    if args.bert_model == "custom":
        raise UserError("--bert-model custom needs --vocab-file: give the vocabulary that the shards were made with")
    return ROOT / "vocab" / f"{args.bert_model}-vocab.txt"


def check_vocabulary(vocab_file: Path, bert_config: BertConfig) -> None:
    """The config's vocab_size is the number of words in the file, or that rounded up to a multiple of 64."""
    words = BertTokenizer(vocab_file).vocab_size
    if not words <= bert_config.vocab_size <= -(-words // 64) * 64:
        raise UserError(
            f"{vocab_file} holds {words} words and the config's vocab_size is {bert_config.vocab_size}: "
            f"use the vocabulary and the config that belong together"
        )


def is_uncased(vocab_file: Path) -> bool:
    """Whether a vocabulary has no capital letters, so that its text was lower-cased."""
    words = vocab_file.read_text(encoding="utf-8").split()
    return not any(word != word.lower() for word in words if not word.startswith("["))


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunConfig:
    """The settings of a training run, one part per module."""

    trainer: TrainerConfig
    loader: LoaderConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    parallel: ParallelConfig
    start: StartConfig
    metadata: CheckpointMetadata
    loss_scale: float = 1.0
    dynamic_loss_scale: bool = False


def make_run_config(
    args: Arguments,
    loader: LoaderConfig,
    runtime: Runtime,
    metadata: CheckpointMetadata,
    max_steps: int,
    eval_steps: int = 0,
) -> RunConfig:
    """The flags that all programs share (see arguments.py) as a RunConfig."""
    return RunConfig(
        TrainerConfig(
            max_steps=max_steps,
            checkpoint_folder=args.output_dir / args.bert_model / metadata.phase,
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
        OptimizerConfig(args.optimizer, (args.beta1, args.beta2), args.epsilon, args.weight_decay),
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
            args.from_checkpoint,
            args.last_step_of_checkpoint,
            getattr(args, "from_phase1_final_params", None),
            args.from_pretrained_params,
        ),
        metadata,
        INITIAL_LOSS_SCALE if args.use_dynamic_loss_scaling and args.scale_loss == 1 else args.scale_loss,
        args.use_dynamic_loss_scaling,
    )


def global_batch_size(args: Arguments, batch_size: int, world_size: int) -> int:
    """Sequences per update over all ranks."""
    return args.global_batch_size or batch_size * args.gradient_merge_steps * world_size


def build_trainer(
    model: BertPreTrainedModel,
    task: Task,
    config: RunConfig,
    runtime: Runtime,
    eval_dataset: StreamDataset | None = None,
) -> Trainer:
    """The trainer of `model`, which may be on the meta device, in the state that `config.start` names."""
    precision, distributed = runtime.precision, runtime.distributed
    parallel = parallelize(model, config.parallel, precision, runtime.device, distributed)
    device = parallel.optimizer_device
    learning_rate = torch.tensor(config.schedule.learning_rate, dtype=torch.float32, device=device)
    optimizer = make_optimizer(
        config.optimizer, parallel.named_parameters().items(), learning_rate, parallel.shard_group
    )
    loss_scale = LossScale(device=device)
    if precision.needs_loss_scale:
        loss_scale = LossScale(config.loss_scale, config.dynamic_loss_scale, device)
    state = TrainState(parallel, optimizer, loss_scale, config.metadata, distributed)
    state.start_from(config.start, config.trainer.checkpoint_folder, saves=not config.trainer.benchmark)
    return Trainer(
        task,
        parallel,
        state,
        learning_rate,
        make_schedule(config.schedule),
        config.trainer,
        runtime,
        evaluate_with(parallel, task, eval_dataset, config, runtime) if eval_dataset is not None else None,
    )


def evaluate_with(
    parallel: ParallelModel, task: Task, dataset: StreamDataset, config: RunConfig, runtime: Runtime
) -> Callable[[], dict[str, float]]:
    return partial(evaluate, parallel, task, dataset, config.loader.limits, runtime)


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
