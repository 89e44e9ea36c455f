"""Flags shared by pre-training and fine-tuning that stand for no single field of run_config.py, and the run's
configuration from all flags. Does not import torch, so that parsing is fast."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel.deepspeed_config import differences, engine_config, parse_with_deepspeed
from run_config import (
    AMP_DTYPES,
    BERT_MODELS,
    LAMB,
    RESHARD_MODES,
    TRAIN,
    CheckpointMetadata,
    ModelSelection,
    OptimizerConfig,
    ParallelConfig,
    PredictionConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    StartConfig,
    TrainerConfig,
)
from utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Arguments,
    Flag,
    bounded_float,
    bounded_int,
    flags_of,
    format_arguments,
    fraction_below_one,
    from_flags,
    non_negative_float,
    non_negative_int,
    optional_path,
    positive_float,
    positive_int,
)
from utils.errors import UserError
from utils.launcher import read_environment

MAX_BATCH = 2**24  # sequences per update or micro-batch
MAX_LENGTH = 2**20  # tokens per sequence
INITIAL_LOSS_SCALE = 2.0**20  # for --use-dynamic-loss-scaling without --scale-loss

batch_size, sequence_length = bounded_int(1, MAX_BATCH), bounded_int(1, MAX_LENGTH)


def positive_int_or_minus_one(text: str) -> int:
    return -1 if text == "-1" else positive_int(text)


SIXTEEN_BITS = ("--amp or --use-pure-fp16 or --fp16",)

# fmt: off
GLOBAL_FLAGS = (
    *flags_of(TrainerConfig, ModelSelection, StartConfig, CheckpointMetadata, RuntimeConfig),
    Flag("--show-config", bool, None,
         "print all settings at the start (true) or none (false); by default those that differ from the defaults",
         alone=False),
    Flag("--num-workers", bounded_int(0, 1024), 1, "threads that read data ahead", TRAIN),
)

TRAINING_FLAGS = (
    *flags_of(OptimizerConfig, ScheduleConfig),
    Flag("--gradient-merge-steps --gradient-accumulation-steps", batch_size, 1,
         "micro-batches per GPU and update, whose gradients are summed", TRAIN, excludes=("--global-batch-size",)),
    Flag("--global-batch-size", batch_size, None,
         "sequences per update over all GPUs, instead of --gradient-merge-steps", TRAIN),
    Flag("--beta1 --adam-beta1", fraction_below_one, OptimizerConfig.betas[0], "decay of the first moment", TRAIN,
         result=True),
    Flag("--beta2 --adam-beta2", fraction_below_one, OptimizerConfig.betas[1], "decay of the second moment", TRAIN,
         result=True),
    Flag("--lamb-min-coeff", non_negative_float, 0.0, "lower bound of Lamb's trust ratios", LAMB, result=True,
         deepspeed="optimizer.params.min_coeff"),
    Flag("--lamb-max-coeff", positive_float, None, "upper bound of Lamb's trust ratios; by default there is none", LAMB,
         result=True, deepspeed="optimizer.params.max_coeff"),
)

PARALLEL_FLAGS = (
    *flags_of(ParallelConfig),
    Flag("--data-parallel-shard-degree", positive_int_or_minus_one, 1,
         "processes that share one copy of parameters, gradients and optimizer state (FSDP2); 1: every process has its "
         "own (DDP); -1: all processes share one", excludes=("--deepspeed",), alone=1),
    Flag("--data-parallel-replicate-degree", positive_int, None,
         "copies of the model; by default the number of processes divided by the shard degree",
         excludes=("--deepspeed",), alone=None),
    Flag("--fsdp-reshard-after-forward", RESHARD_MODES, None,
         "when sharded: free gathered parameters after the forward pass always, never (they are kept for the whole "
         "update), or by default those of the layers", ("--data-parallel-shard-degree",), excludes=("--deepspeed",),
         alone=None),
    Flag("--deepspeed", bool, False, "train with DeepSpeed's engine; see --deepspeed-config", TRAIN),
    Flag("--deepspeed-config", optional_path, None,
         "DeepSpeed's JSON file; docs/coming_from_deepspeed.md says what its keys do here", ("--deepspeed",)),
    Flag("--local-rank", non_negative_int, None, argparse.SUPPRESS),  # from the launcher deepspeed
    Flag("--estimate-memory", positive_int, None,
         "print an estimate of the memory that each process needs, and exit; PROCESSES: number of processes of the "
         "run; by default those that are started now", excludes=("--deepspeed",),
         options={"nargs": "?", "const": 0, "metavar": "PROCESSES"}),
)

PRECISION_FLAGS = (
    Flag("--amp", bool, False, "compute in 16 bits, with float32 weights", result=True),
    Flag("--fp16", bool, False, "the same as --amp --amp-dtype float16 with dynamic loss scaling", result=True),
    Flag("--amp-dtype", AMP_DTYPES, None, "the 16-bit type; by default bfloat16, or float16 with a loss scaling flag",
         SIXTEEN_BITS, result=True),
    Flag("--use-pure-fp16", bool, False, "keep the model in --amp-dtype; the optimizer has float32 copies",
         result=True),
    Flag("--scale-loss", positive_float, 1.0, "loss scale of float16", SIXTEEN_BITS, result=True),
    Flag("--use-dynamic-loss-scaling", bool, False,
         "adapt the loss scale, starting at --scale-loss, or at 2^20 without it", SIXTEEN_BITS, result=True),
)

PREDICT = ("--do-eval or --do-predict",)

FINE_TUNING_FLAGS = (
    Flag("--max-steps", positive_int_or_minus_one, -1, "maximum number of updates; -1: as many as the epochs need",
         TRAIN),
    Flag("--do-train", bool, False, "fine-tune on the training file"),
    Flag("--do-eval", bool, False, "predict the development file and score the predictions"),
    Flag("--do-predict", bool, False, "write predictions"),
    Flag("--train-file", optional_path, None, "file to train on", TRAIN),
    Flag("--num-seeds", positive_int, 1, "number of runs, with the seeds from --seed up", TRAIN,
         excludes=("--benchmark",)),
    Flag("--do-lower-case", bool, None,
         "lower-case and strip accents; by default if the vocabulary has no capital letters"),
    Flag("--epochs --num-train-epochs", bounded_float(0, 1e6, exclusive=True), 3, "passes over the training data",
         TRAIN),
    Flag("--batch-size --train-batch-size --per-device-train-batch-size", batch_size, 32,
         "sequences per GPU and micro-batch", TRAIN),
    Flag("--predict-batch-size --eval-batch-size --per-device-eval-batch-size", batch_size, REQUIRED,
         "sequences per GPU and forward pass", PREDICT),
    Flag("--max-seq-length", sequence_length, REQUIRED, "maximum tokens of a sequence"),
    Flag("--eval-steps", non_negative_int, 0,
         "score the development file every so many updates, and keep the best checkpoint; 0: only at the end",
         ("--do-train", "--do-eval"), excludes=("--benchmark",)),
    Flag("--early-stopping", positive_int, None, "stop after this many evaluations without a better score",
         ("--eval-steps",)),
)

# Flags of other programs, and what to use instead.
HINTS = {
    "--bf16": "use --amp, which computes in bfloat16",
    "--gradient-checkpointing": "use --activation-checkpoint full",
    "--model-name-or-path": "use --init-checkpoint, with a model folder on this machine",
    "--lr-scheduler-type": "use --lr-decay",
    "--warmup-steps": "use --warmup-proportion, a share of all updates",
    "--save-total-limit": "the newest three checkpoints are kept; leave it out",
    "--loss-scale": "use --scale-loss, or --use-dynamic-loss-scaling",
    "--checkpoint-activations": "use --activation-checkpoint full",
    "--allreduce-post-accumulation": "gradients are always reduced once per update; leave it out",
    "--allreduce-post-accumulation-fp16": "gradients are always reduced once per update, in float32; leave it out",
    "--phase1-end-step": "use --max-steps in phase 1, and --from-phase1-final-params in phase 2",
    "--steps-this-run-phase1": "use --steps-this-run",
    "--eval-script": "--do-eval scores predictions without another script; leave it out",
    "--verbose-logging": "leave it out",
    "--disable-progress-bar": "there is no bar without a terminal; leave it out",
    "--cf": "use --config-file for the architecture and --deepspeed-config for DeepSpeed's JSON file",
    "--delay-allreduce": "gradients are always reduced once per update; leave it out",
    "--print-steps": "use --log-freq",
}
# fmt: on


def add_run_flags(parser: ArgumentParser, **defaults: object) -> None:
    """Adds the flags shared by all training programs. `defaults` are program-specific."""
    parser.add_flags("global", GLOBAL_FLAGS, **defaults)
    parser.add_flags("training", TRAINING_FLAGS, **defaults)
    parser.add_flags("memory and parallelism", PARALLEL_FLAGS)
    parser.add_flags("advanced", PRECISION_FLAGS)
    parser.hints |= {name: hint for name, hint in HINTS.items() if name not in parser.hints}


def parse_run_arguments(parser: ArgumentParser, argv: Sequence[str] | None) -> Arguments:
    """Parses the command line of a training program, with DeepSpeed's JSON file. Raises UserError for flags that would
    have no effect or that contradict each other."""
    args = parse_with_deepspeed(parser, argv)
    parser.check_flags(args)
    if args.lr_decay == "warmup_stable_decay" and args.warmup_proportion + args.lr_decay_proportion > 1:
        parser.error("--warmup-proportion and --lr-decay-proportion are more than all updates together: lower one")
    if args.lamb_max_coeff is not None and args.lamb_min_coeff > args.lamb_max_coeff:
        parser.error(
            f"--lamb-min-coeff {args.lamb_min_coeff:g} is above --lamb-max-coeff {args.lamb_max_coeff:g}: change one"
        )
    scales_loss = args.given("scale_loss") or args.use_dynamic_loss_scaling
    if args.amp_dtype == "bfloat16" and (scales_loss or args.fp16):
        parser.error("bfloat16 needs no loss scaling: leave out --amp-dtype bfloat16 for float16, or the loss scaling")
    return args


def parse_fine_tuning(
    parser: ArgumentParser, argv: Sequence[str] | None, groups: Mapping[str, Sequence[Flag]], **defaults: object
) -> Arguments:
    """Parses `argv` with the flags that all tasks share, and a task's own ones in `groups`. `defaults` replace those of
    the shared flags."""
    parser.add_flags("fine-tuning", FINE_TUNING_FLAGS, **defaults)
    add_run_flags(parser, optimizer="AdamW", warmup_proportion=0.1, **defaults)
    for title, flags in groups.items():
        parser.add_flags(title, flags)
    args = parse_run_arguments(parser, argv)
    if not (args.do_train or args.do_eval or args.do_predict):
        parser.error("nothing to do: give --do-train, --do-eval or --do-predict")
    if not args.do_train and args.from_pretrained_params is None and args.from_checkpoint is None:
        parser.error("without --do-train there has to be a fine-tuned model: give --init-checkpoint")
    if args.num_seeds > 1 and args.from_checkpoint is not None and args.last_step_of_checkpoint != "auto":
        parser.error("--from-checkpoint with --num-seeds needs --last-step-of-checkpoint auto")
    return args


def check_weights(path: Path | None) -> None:
    """Raises UserError if there is no `path` to start from. For a name of Hugging Face's hub, it says how to download
    the model."""
    if path is not None and not path.exists():
        hub_name = f"google-bert/{path}" if str(path) in BERT_MODELS else path
        download = f", or download the model: hf download {hub_name} --local-dir {path.name}"
        is_hub_name = not path.is_absolute() and len(path.parts) <= 2
        raise UserError(f"--init-checkpoint {path} does not exist: check the path{download if is_hub_name else ''}")


def make_run_config(args: Arguments, world_size: int | None = None) -> RunConfig:
    """Converts the flags of a training program to a RunConfig. `world_size`: number of processes; by default that of
    --estimate-memory, or of the current launch."""
    world_size = world_size or args.get("estimate_memory") or read_environment().world_size
    dynamic = args.use_dynamic_loss_scaling or args.fp16
    values = args.as_dict()
    return from_flags(
        RunConfig,
        args,
        global_batch_size=global_batch_size(args, world_size),
        optimizer=optimizer_config(args),
        total_steps=args.max_steps,
        gamma=args.lr_decay_rate if args.given("lr_decay_rate") else ScheduleConfig.gamma,
        parallel=parallel_config(args, world_size),
        arguments=values,
        loss_scale=INITIAL_LOSS_SCALE if dynamic and not args.given("scale_loss") else args.scale_loss,
        dynamic_loss_scale=dynamic,
        amp=args.amp or args.fp16,
        amp_dtype=amp_dtype(args),
        pure_fp16=args.use_pure_fp16,
        messages=startup_messages(args),
        reports_in_folder=not args.given("report_file"),
        is_named=args.given("bert_model"),
        prediction=from_flags(PredictionConfig, args, batch_size=args.get("predict_batch_size", args.batch_size)),
        world_size=world_size,
        hyperparameters={f"--{name.replace('_', '-')}": values[name] for name in args.tagged("result")},
    )


def startup_messages(args: Arguments) -> tuple[str, ...]:
    messages = differences(args) if args.deepspeed else []
    if args.show_config:
        messages.append(format_arguments(args, "settings:"))
    elif args.show_config is None:
        changed = (f"{flag} {value}" for flag, value in args.changed().items())
        messages.append(f"settings that differ from the defaults: {' '.join(changed) or 'none'}")
    if args.amp_dtype is None and amp_dtype(args) == "float16":
        messages.append(
            "note: loss scaling was asked for, so the 16-bit type is float16 (--amp-dtype bfloat16 needs none)"
        )
    return tuple(messages)


def global_batch_size(args: Arguments, world_size: int) -> int:
    """Sequences per optimizer step over all ranks."""
    global_batch = args.global_batch_size or args.batch_size * args.gradient_merge_steps * world_size
    if global_batch > MAX_BATCH:
        raise UserError(
            f"an update would take {global_batch} sequences; at most {MAX_BATCH} are possible: lower the batch size or "
            f"--gradient-merge-steps"
        )
    if args.get("initial_global_batch_size", 0) > global_batch:
        raise UserError(
            f"--initial-global-batch-size {args.initial_global_batch_size} is above the {global_batch} sequences of a "
            f"full update: give less"
        )
    return global_batch


def parallel_config(args: Arguments, world_size: int) -> ParallelConfig:
    shard, replicate = args.data_parallel_shard_degree, args.data_parallel_replicate_degree
    if shard != 1 and world_size == 1:
        raise UserError(
            f"--data-parallel-shard-degree {shard} with one process: start several with torchrun, or leave it out"
        )
    if shard == -1:
        shard = world_size // (replicate or 1)
    if shard * (replicate or world_size // shard) != world_size:
        raise UserError(
            f"--data-parallel-shard-degree {args.data_parallel_shard_degree} and --data-parallel-replicate-degree "
            f"{replicate} do not multiply to the {world_size} processes of this run: change one of them"
        )
    if args.enable_cpu_offload and shard == 1 and world_size > 1:
        raise UserError("--enable-cpu-offload with several processes needs --data-parallel-shard-degree: give -1")
    if shard != 1 and args.compile == "model":
        raise UserError("--compile model cannot be combined with sharding: use --compile layers")
    engine = None
    if args.deepspeed:
        steps = -(-global_batch_size(args, world_size) // (args.batch_size * world_size))
        pure_dtype = amp_dtype(args) if args.use_pure_fp16 else None
        engine = engine_config(args.deepspeed_config, args.batch_size, steps, args.max_grad_norm, pure_dtype)
    return from_flags(
        ParallelConfig,
        args,
        shard_degree=shard,
        reshard_after_forward=args.fsdp_reshard_after_forward or "default",
        deepspeed=engine,
    )


def optimizer_config(args: Arguments) -> OptimizerConfig:
    maximum = math.inf if args.lamb_max_coeff is None else args.lamb_max_coeff
    has_bounds = args.lamb_min_coeff > 0 or maximum < math.inf
    return from_flags(
        OptimizerConfig,
        args,
        betas=(args.beta1, args.beta2),
        trust_bounds=(args.lamb_min_coeff, maximum) if has_bounds else None,
    )


def amp_dtype(args: Arguments) -> str:
    """The 16-bit type. Loss-scaling flags, as in NVIDIA's commands, imply float16."""
    if args.amp_dtype is not None:
        return args.amp_dtype
    return "float16" if args.fp16 or args.given("scale_loss") or args.use_dynamic_loss_scaling else "bfloat16"
