"""What both run scripts build from their arguments: the surroundings of a run, its config and vocabulary, and the
trainer with its model, optimizer and schedule in the state that the flags name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lr_scheduler import make_schedule
from modeling import BertConfig
from optimizer import LossScale, MasterWeights, make_optimizer
from tokenizer import BertTokenizer
from trainer import Provenance, Runtime, Settings, Task, Trainer
from utils import checkpoint as checkpoints
from utils import command_line
from utils.affinity import set_cpu_affinity
from utils.distributed import (
    Precision,
    keep_freed_memory,
    processes_from_environment,
    select_device,
    select_precision,
    use_threads,
)
from utils.errors import UserError
from utils.files import read_json
from utils.logger import Reporter
from utils.progress import print_line

ROOT = Path(__file__).resolve().parent


@contextmanager
def runtime_for(args: command_line.Arguments, title: str) -> Iterator[Runtime]:
    """Device, precision and processes as the flags and the environment say; joins the other processes and leaves them
    at the end."""
    device = select_device(args.device)
    precision = select_precision(args.amp, args.amp_dtype, args.use_pure_fp16, args.tf32, device)
    use_threads()
    keep_freed_memory()
    with processes_from_environment(device) as processes:
        if args.enable_cpu_affinity:
            set_cpu_affinity(device, processes.local_rank, processes.local_world_size)
        if args.show_config and processes.is_main:
            print_line(command_line.format_arguments(args, f"{title} on {processes.world_size} x {device.type}:"))
        reporter = Reporter(args.report_file, enabled=processes.is_main)
        try:
            yield Runtime(device, precision, processes, reporter)
        finally:
            reporter.close()


def load_config(args: command_line.Arguments) -> BertConfig:
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


def find_vocab_file(args: command_line.Arguments) -> Path:
    if args.vocab_file is not None:
        return args.vocab_file
    if args.bert_model == "custom":
        raise UserError("--bert-model custom needs --vocab-file: give the vocabulary that the shards were made with")
    return ROOT / "vocab" / f"{args.bert_model}-vocab.txt"


def check_vocabulary(vocab_file: Path, bert_config: BertConfig) -> None:
    """The config's vocabulary may be rounded up to a multiple of 64, and is the file's otherwise."""
    words = BertTokenizer(vocab_file).vocab_size
    if not words <= bert_config.vocab_size <= -(-words // 64) * 64:
        raise UserError(
            f"{vocab_file} holds {words} words and the config's vocab_size is {bert_config.vocab_size}: "
            f"use the vocabulary and the config that belong together"
        )


def has_no_capitals(vocab_file: Path) -> bool:
    """Whether a vocabulary is for lower-cased text, for shards that do not say how they were made."""
    words = vocab_file.read_text(encoding="utf-8").split()
    return not any(word != word.lower() for word in words if not word.startswith("["))


def make_loss_scale(args: command_line.Arguments, precision: Precision, device: torch.device) -> LossScale:
    if not precision.needs_loss_scale:
        return LossScale(1.0, dynamic=False, device=device)
    initial = 2.0**20 if args.use_dynamic_loss_scaling and args.scale_loss == 1 else args.scale_loss
    return LossScale(initial, args.use_dynamic_loss_scaling, device)


def make_settings(args: command_line.Arguments, phase: str, max_steps: int, eval_steps: int = 0) -> Settings:
    return Settings(
        max_steps=max_steps,
        checkpoint_folder=args.output_dir / args.bert_model / phase,
        steps_this_run=args.steps_this_run,
        seed=args.seed,
        max_grad_norm=args.max_grad_norm,
        max_skipped_steps=args.max_skipped_steps,
        log_freq=args.log_freq,
        steps_per_checkpoint=args.num_steps_per_checkpoint,
        eval_steps=eval_steps,
        benchmark=args.benchmark,
        benchmark_steps=args.benchmark_steps,
        benchmark_warmup_steps=args.benchmark_warmup_steps,
        model_prefix=args.model_prefix,
    )


def build_trainer(
    args: command_line.Arguments,
    model: torch.nn.Module,
    task: Task,
    settings: Settings,
    provenance: Provenance,
    runtime: Runtime,
    evaluate: Callable[[torch.nn.Module], dict[str, float]] | None = None,
) -> Trainer:
    """A trainer for `model`, brought to its device and precision, in the state that the flags name."""
    model.to(runtime.device)
    learning_rate = torch.tensor(args.learning_rate, dtype=torch.float32, device=runtime.device)
    masters = None
    if runtime.precision.pure:
        masters = MasterWeights(model)
        model.to(runtime.precision.dtype)
    optimizer = make_optimizer(
        args.optimizer,
        list((masters or model).named_parameters()),
        learning_rate,
        (args.beta1, args.beta2),
        args.epsilon,
        args.weight_decay,
    )
    schedule = make_schedule(
        args.lr_decay,
        args.learning_rate,
        settings.max_steps,
        args.warmup_proportion,
        args.warmup_start_lr,
        args.lr_decay_power,
        args.lr_decay_rate,
        args.lr_decay_steps,
        args.lr_offset,
    )
    run = Trainer(
        model,
        task,
        optimizer,
        learning_rate,
        schedule,
        settings,
        provenance,
        runtime,
        loss_scale=make_loss_scale(args, runtime.precision, runtime.device),
        masters=masters,
        evaluate=evaluate,
    )
    restore_state(run, args)
    compile_model(model, args.compile)
    return run


def compile_model(model: torch.nn.Module, what: str) -> None:
    """Compiles in place, for the fixed shapes that the loader then gives (see token_stream.pad_stream)."""
    modules = {"none": [], "layers": model.bert.encoder.layer, "model": [model]}[what]
    if what != "none" and model.bert.embeddings.word_embeddings.weight.device.type == "cpu":
        # What suits the CPU reads the sequences' lengths, which a compiled graph cannot.
        model.bert.attention_implementation = "padded"
    for module in modules:
        module.compile(fullgraph=True, dynamic=False)


def restore_state(run: Trainer, args: command_line.Arguments) -> None:
    """A checkpoint, or else weights alone, or else nothing, as the flags say; the same on all processes."""
    take_state(run, args)
    processes = run.runtime.processes
    if processes.all_sum([run.step]) != [run.step * processes.world_size]:
        raise UserError(
            f"the processes found different checkpoints (this one step {run.step}): --output-dir and "
            f"--from-checkpoint must be on storage that all machines share"
        )


def take_state(run: Trainer, args: command_line.Arguments) -> None:
    if args.last_step_of_checkpoint is not None and args.from_checkpoint is None:
        raise UserError("--last-step-of-checkpoint needs --from-checkpoint: give the folder of steps")
    tell = print_line if run.runtime.processes.is_main else (lambda _text: None)
    if args.from_checkpoint is not None:
        found = checkpoints.find_checkpoint(args.from_checkpoint, args.last_step_of_checkpoint, tell)
        if found is not None:
            refuse_newer_checkpoints(run, found)
            run.resume(found)
            return
        tell(f"no checkpoint in {args.from_checkpoint} yet: starting at step 1")
    refuse_newer_checkpoints(run, None)
    weights = getattr(args, "from_phase1_final_params", None) or args.from_pretrained_params
    if weights is not None:
        run.load_weights(checkpoints.find_model_folder(weights, tell), tell)


def refuse_newer_checkpoints(run: Trainer, found: Path | None) -> None:
    """Two runs must not mix in one folder of steps."""
    folder = run.settings.checkpoint_folder
    step = int(found.name) if found is not None and found.parent.resolve() == folder.resolve() else 0
    newer = [other for other in checkpoints.checkpoint_steps(folder) if other > step]
    newer = [other for other in newer if checkpoints.is_whole(folder / str(other))]
    if run.settings.benchmark or not newer:
        return
    raise UserError(
        f"{folder} already holds step {newer[-1]}: to go on from it, add --from-checkpoint {folder} "
        f"--last-step-of-checkpoint auto; to start afresh, move it away or choose another --output-dir"
    )
