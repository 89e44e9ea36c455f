"""The command-line flags that pre-training and fine-tuning share."""

import argparse
import math
from pathlib import Path

from checkpoint.folder import is_step
from optimizer import check_shardable
from parallel.deepspeed_config import engine_config
from run_config import (
    ACTIVATION_CHECKPOINTS,
    AMP_DTYPES,
    COMPILE_MODES,
    DECAYS,
    OPTIMIZERS,
    RESHARD_MODES,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainerConfig,
)
from utils.command_line import (
    ArgumentParser,
    Arguments,
    BooleanFlag,
    bounded_float,
    bounded_int,
    decay_factor,
    fraction,
    non_negative_float,
    non_negative_int,
    optional_path,
    plain_name,
    positive_float,
    positive_int,
    random_seed,
)
from utils.errors import UserError

MAX_BATCH = 2**24  # sequences per update; also of a micro-batch
MAX_LENGTH = 2**20  # tokens of a sequence
LAMB_FLAGS = ("lamb_min_coeff", "lamb_max_coeff", "lamb_bias_correction", "lamb_adapt_undecayed")
BERT_MODELS = ("bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-large-cased", "custom")


def checkpoint_step(text: str) -> str | None:
    if text.lower() == "none":
        return None
    if text != "auto" and not is_step(text):
        raise argparse.ArgumentTypeError(f"expected None, auto or a step, not {text}")
    return text


def positive_int_or_minus_one(text: str) -> int:
    return -1 if text == "-1" else positive_int(text)


def add_global_arguments(parser: argparse.ArgumentParser, steps_required: bool) -> None:
    group = parser.add_argument_group("global")
    group.add_argument("--output-dir", type=Path, required=True, help="folder for checkpoints and results")
    group.add_argument(
        "--vocab-file", type=optional_path, help="WordPiece vocabulary; by default vocab/<bert-model>-vocab.txt"
    )
    group.add_argument("--bert-model", choices=BERT_MODELS, default="bert-large-uncased", help="architecture")
    group.add_argument(
        "--config-file",
        type=optional_path,
        help="the architecture's JSON file; by default bert_configs/<bert-model>.json, required for custom",
    )
    if steps_required:
        group.add_argument("--max-steps", type=positive_int, required=True, help="updates of the whole run")
    else:
        group.add_argument(
            "--max-steps",
            type=positive_int_or_minus_one,
            default=-1,
            help="maximum number of updates; -1: as many as the epochs need",
        )
    group.add_argument(
        "--pre-layer-norm",
        action=BooleanFlag,
        help="LayerNorm before attention and feed-forward, as in DeepSpeed's bing_bert",
    )
    group.add_argument(
        "--dropout", type=fraction, help="dropout of hidden states and attention; by default that of the config"
    )
    group.add_argument("--log-freq", type=positive_int, default=10, help="updates between log lines")
    group.add_argument("--num-steps-per-checkpoint", type=positive_int, default=100, help="updates between checkpoints")
    group.add_argument(
        "--from-pretrained-params",
        "--init-checkpoint",
        type=optional_path,
        help="checkpoint or Hugging Face model folder to load weights from, and nothing else",
    )
    group.add_argument(
        "--from-checkpoint",
        type=optional_path,
        help="checkpoint to continue from: weights, optimizer, schedule and data position",
    )
    group.add_argument(
        "--last-step-of-checkpoint",
        type=checkpoint_step,
        help="None: --from-checkpoint is a checkpoint folder; N: it is the folder of steps that holds N; auto: the "
        "newest valid checkpoint in that folder of steps, or a start from step 1 if it has none yet",
    )
    group.add_argument(
        "--resume-from-checkpoint",
        action=BooleanFlag,
        help="continue from the newest checkpoint of this run's own folder, or start at step 1 if it has none yet",
    )
    group.add_argument(
        "--overwrite", action=BooleanFlag, help="remove another run's checkpoints and results from this run's folder"
    )
    group.add_argument("--steps-this-run", type=positive_int, help="stop after this many updates")
    group.add_argument(
        "--seed", type=random_seed, default=42, help="seed of initial weights, dropout and the order of samples"
    )
    group.add_argument(
        "--report-file",
        "--json-summary",
        type=optional_path,
        default=Path("./report.json"),
        help="file for DLLogger's JSON lines",
    )
    group.add_argument("--tensorboard-dir", type=optional_path, help="folder for TensorBoard's logs")
    group.add_argument(
        "--model-prefix", type=plain_name, default="model", help="prefix of the file names of the training state"
    )
    group.add_argument("--show-config", action=BooleanFlag, default=True, help="print all settings at the start")
    group.add_argument(
        "--enable-cpu-affinity", action=BooleanFlag, default=True, help="bind each process to the cores near its GPU"
    )
    group.add_argument("--num-workers", type=bounded_int(0, 1024), default=1, help="threads that read data ahead")
    group.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if there is one")
    group.add_argument(
        "--distributed-timeout-minutes",
        type=bounded_float(0, 10_000, exclusive=True),
        default=5,
        help="minutes to wait at the start for all processes",
    )
    group.add_argument("--benchmark", action=BooleanFlag, help="measure speed; save nothing but the report")
    group.add_argument("--benchmark-steps", type=positive_int, default=20, help="updates that --benchmark measures")
    group.add_argument(
        "--benchmark-warmup-steps", type=positive_int, default=20, help="updates before the measured ones"
    )


def add_training_arguments(
    parser: argparse.ArgumentParser, optimizer: str, learning_rate: float, warmup_proportion: float
) -> argparse._ArgumentGroup:
    """The arguments after `parser` are the defaults that differ between programs."""
    adam, schedule, trainer = OptimizerConfig, ScheduleConfig, TrainerConfig
    group = parser.add_argument_group("training")
    group.add_argument("--optimizer", choices=OPTIMIZERS, default=optimizer, help="FusedLAMB is apex's LAMB")
    batch = group.add_mutually_exclusive_group()
    batch.add_argument(
        "--gradient-merge-steps",
        "--gradient-accumulation-steps",
        type=bounded_int(1, MAX_BATCH),
        default=1,
        help="micro-batches per GPU and update, whose gradients are summed",
    )
    batch.add_argument(
        "--global-batch-size",
        type=bounded_int(1, MAX_BATCH),
        help="sequences per update over all GPUs, instead of --gradient-merge-steps",
    )
    group.add_argument("--learning-rate", type=non_negative_float, default=learning_rate, help="peak learning rate")
    group.add_argument(
        "--warmup-start-lr",
        type=non_negative_float,
        default=schedule.warmup_start_lr,
        help="learning rate at the start of the warmup; for poly",
    )
    group.add_argument(
        "--warmup-proportion", type=fraction, default=warmup_proportion, help="share of the updates for the warmup"
    )
    group.add_argument("--lr-decay", choices=DECAYS, default=schedule.decay, help="schedule after the warmup")
    group.add_argument(
        "--lr-decay-power",
        type=positive_float,
        default=schedule.power,
        help="power of poly; NVIDIA's PyTorch recipe has 0.5",
    )
    group.add_argument(
        "--lr-decay-rate", type=positive_float, default=schedule.rate, help="decay rate of warmup_exp_decay_exp"
    )
    group.add_argument(
        "--lr-decay-steps",
        type=positive_int,
        default=schedule.decay_steps,
        help="updates per decay of warmup_exp_decay_exp",
    )
    group.add_argument(
        "--lr-offset",
        type=non_negative_float,
        default=schedule.offset,
        help="added to the learning rate by warmup_exp_decay_exp",
    )
    group.add_argument("--beta1", type=decay_factor, default=adam.betas[0], help="decay of the first moment")
    group.add_argument("--beta2", type=decay_factor, default=adam.betas[1], help="decay of the second moment")
    group.add_argument("--epsilon", type=positive_float, default=adam.eps, help="epsilon of the optimizer")
    group.add_argument(
        "--weight-decay",
        type=non_negative_float,
        default=adam.weight_decay,
        help="weight decay; none on biases and LayerNorms",
    )
    group.add_argument(
        "--lamb-min-coeff", type=non_negative_float, default=0.0, help="lower bound of Lamb's trust ratios"
    )
    group.add_argument(
        "--lamb-max-coeff", type=positive_float, help="upper bound of Lamb's trust ratios; by default there is none"
    )
    group.add_argument(
        "--lamb-bias-correction", action=BooleanFlag, default=adam.bias_correction, help="bias-correct Lamb's moments"
    )
    group.add_argument(
        "--lamb-adapt-undecayed",
        action=BooleanFlag,
        help="use trust ratios for biases and LayerNorms too, as DeepSpeed's LAMB",
    )
    group.add_argument(
        "--max-grad-norm", type=positive_float, default=trainer.max_grad_norm, help="gradients are clipped to this norm"
    )
    group.add_argument(
        "--max-skipped-steps",
        type=positive_int,
        default=trainer.max_skipped_steps,
        help="stop after this many updates in a row without a finite gradient",
    )
    return group


def add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory and parallelism")
    group.add_argument(
        "--data-parallel-shard-degree",
        type=positive_int_or_minus_one,
        default=1,
        help="processes that share one copy of parameters, gradients and optimizer state (FSDP2); 1: every process has "
        "its own (DDP); -1: all processes share one",
    )
    group.add_argument(
        "--data-parallel-replicate-degree",
        type=positive_int,
        help="copies of the model; by default the number of processes divided by the shard degree",
    )
    group.add_argument(
        "--fsdp-reshard-after-forward",
        choices=RESHARD_MODES,
        help="when sharded: free gathered parameters after the forward pass always, never, or by default those of "
        "the layers",
    )
    group.add_argument(
        "--enable-cpu-offload",
        action=BooleanFlag,
        help="when sharded on GPUs: keep parameters, gradients and optimizer state on the CPU",
    )
    group.add_argument(
        "--activation-checkpoint",
        choices=ACTIVATION_CHECKPOINTS,
        default="none",
        help="compute activations again in the backward pass: those of each layer (full), or all but the outputs of "
        "linear layers (selective)",
    )
    group.add_argument(
        "--compile",
        choices=COMPILE_MODES,
        default="none",
        help="torch.compile: each layer (starts sooner), or the whole model; needs a C++ compiler",
    )
    group.add_argument("--deepspeed", action=BooleanFlag, help="train with DeepSpeed's engine; see --deepspeed-config")
    group.add_argument(
        "--deepspeed-config",
        type=optional_path,
        help="DeepSpeed's JSON file; docs/coming_from_deepspeed.md says what its keys do here",
    )
    group.add_argument("--local-rank", type=non_negative_int, help=argparse.SUPPRESS)  # from the launcher deepspeed
    group.add_argument(
        "--estimate-memory",
        nargs="?",
        type=positive_int,
        const=0,
        metavar="PROCESSES",
        help="print an estimate of the memory that each process needs, and exit; PROCESSES: number of processes of the "
        "run; by default those that are started now",
    )


def parallel_config(args: Arguments, world_size: int, on_gpu: bool) -> ParallelConfig:
    """The flags of `add_parallel_arguments`, checked against the number of processes."""
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
    if shard == 1:
        for flag, given in (
            ("--fsdp-reshard-after-forward", args.fsdp_reshard_after_forward),
            ("--enable-cpu-offload", args.enable_cpu_offload),
        ):
            if given:
                raise UserError(f"{flag} is for sharded runs: add --data-parallel-shard-degree, or leave it out")
    else:
        check_shardable(args.optimizer)
        if args.compile == "model":
            raise UserError("--compile model cannot be combined with sharding: use --compile layers")
    if args.enable_cpu_offload and not on_gpu:
        raise UserError("--enable-cpu-offload is for GPUs, and this run is on the CPU: leave it out")
    return ParallelConfig(
        args.compile,
        args.activation_checkpoint,
        shard,
        args.fsdp_reshard_after_forward or "default",
        args.enable_cpu_offload,
        engine_config(args, world_size, amp_dtype(args)),
    )


# Flags of the fine-tuning programs that have an effect on training only. Not among them: --optimizer and --log-freq,
# which NVIDIA's commands also give for prediction.
TRAINING_FLAGS = (
    *("train_file", "epochs", "train_batch_size", "gradient_merge_steps", "global_batch_size", "max_steps"),
    *("learning_rate", "warmup_start_lr", "warmup_proportion", "lr_decay", "lr_decay_power", "lr_decay_rate"),
    *("lr_decay_steps", "lr_offset", "beta1", "beta2", "epsilon", "weight_decay", "max_grad_norm", "max_skipped_steps"),
    *("steps_this_run", "num_steps_per_checkpoint", "resume_from_checkpoint", "overwrite", "model_prefix"),
    *("num_workers", "activation_checkpoint", "compile", "dropout", *LAMB_FLAGS),
)


def check_shared_arguments(args: Arguments, parser: ArgumentParser) -> None:
    """Refuses flags that would have no effect."""
    exponential = args.lr_decay == "warmup_exp_decay_exp"
    sixteen_bits = args.amp or args.use_pure_fp16 or args.fp16
    scales_loss = args.given("scale_loss") or args.use_dynamic_loss_scaling
    effects = [
        (("lr_decay_power", "warmup_start_lr"), args.lr_decay == "poly", "--lr-decay poly"),
        (("lr_decay_rate", "lr_decay_steps", "lr_offset"), exponential, "--lr-decay warmup_exp_decay_exp"),
        (LAMB_FLAGS, args.optimizer == "Lamb", "--optimizer Lamb"),
        (("amp_dtype", "scale_loss", "use_dynamic_loss_scaling"), sixteen_bits, "--amp or --use-pure-fp16"),
        (("last_step_of_checkpoint",), args.from_checkpoint or not args.last_step_of_checkpoint, "--from-checkpoint"),
        (("benchmark_steps", "benchmark_warmup_steps"), args.benchmark, "--benchmark"),
        (("steps_this_run", "overwrite"), not args.benchmark, "a run that is no benchmark"),
    ]
    parser.refuse_without_effect(args, effects)
    if args.lamb_max_coeff is not None and args.lamb_min_coeff > args.lamb_max_coeff:
        parser.error(
            f"--lamb-min-coeff {args.lamb_min_coeff:g} is above --lamb-max-coeff {args.lamb_max_coeff:g}: change one"
        )
    if args.amp_dtype == "bfloat16" and (scales_loss or args.fp16):
        parser.error("bfloat16 needs no loss scaling: leave out --amp-dtype bfloat16 for float16, or the loss scaling")
    if args.resume_from_checkpoint and args.from_checkpoint is not None:
        parser.error("--resume-from-checkpoint and --from-checkpoint were both given: give one of them")


def optimizer_config(args: Arguments) -> OptimizerConfig:
    has_bounds = args.lamb_min_coeff > 0 or args.lamb_max_coeff is not None
    maximum = math.inf if args.lamb_max_coeff is None else args.lamb_max_coeff
    return OptimizerConfig(
        args.optimizer,
        (args.beta1, args.beta2),
        args.epsilon,
        args.weight_decay,
        args.lamb_bias_correction,
        (args.lamb_min_coeff, maximum) if has_bounds else None,
        args.lamb_adapt_undecayed,
    )


def amp_dtype(args: Arguments) -> str:
    """The 16-bit type. Flags for loss scaling, as NVIDIA's commands have them, mean float16."""
    if args.amp_dtype is not None:
        return args.amp_dtype
    return "float16" if args.fp16 or args.given("scale_loss") or args.use_dynamic_loss_scaling else "bfloat16"


def add_precision_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("advanced")
    group.add_argument("--amp", action=BooleanFlag, help="compute in 16 bits, with float32 weights")
    group.add_argument(
        "--fp16", action=BooleanFlag, help="the same as --amp --amp-dtype float16 with dynamic loss scaling"
    )
    group.add_argument(
        "--amp-dtype",
        choices=AMP_DTYPES,
        help="the 16-bit type; by default bfloat16, or float16 with a loss scaling flag",
    )
    group.add_argument(
        "--use-pure-fp16", action=BooleanFlag, help="keep the model in --amp-dtype; the optimizer has float32 copies"
    )
    group.add_argument("--scale-loss", type=positive_float, default=1.0, help="loss scale of float16")
    group.add_argument(
        "--use-dynamic-loss-scaling",
        action=BooleanFlag,
        help="adapt the loss scale, starting at --scale-loss, or at 2^20 if that is 1",
    )
    group.add_argument("--tf32", action=BooleanFlag, help="float32 matrix products in TF32, on GPUs that have it")
