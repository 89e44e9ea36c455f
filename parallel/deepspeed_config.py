"""DeepSpeed's JSON configuration: keys that map to flags, keys passed to the engine, and unsupported keys.

docs/coming_from_deepspeed.md explains every key. Keys that are not in the tables below are errors, so that no setting
is silently ignored.
"""

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from utils.command_line import ArgumentParser, Arguments
from utils.errors import UserError
from utils.files import read_json_object
from utils.launcher import read_environment

VERSION = "0.19.8"  # parallel/deepspeed.py depends on it
AUTO = "auto"  # Hugging Face's value for "set by the flags"

# Keys with their own mapping to flags (see `flags_of`, `precision_flags` and `batch_flags`); the others are the tag
# `deepspeed` of a flag in arguments.py.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
COMPUTED = {
    *BATCH_KEYS,
    *("optimizer.type", "optimizer.params.betas", "optimizer.params.bias_correction"),
    *("bf16.enabled", "fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power"),
    *("torch_autocast.enabled", "torch_autocast.dtype"),
}
OPTIMIZER_TYPES = {"adam": "AdamW", "adamw": "AdamW", "lamb": "Lamb"}

# Keys of `zero_optimization` that are passed to the engine unchanged.
ZERO_KEYS = {
    *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions"),
    *("allgather_bucket_size", "overlap_comm", "sub_group_size", "use_multi_rank_bucket_allreduce"),
    *("ignore_unused_parameters", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    *("stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("offload_param.device", "offload_param.pin_memory", "offload_optimizer.device", "offload_optimizer.pin_memory"),
}

# Keys that are accepted only with the value that describes the existing behaviour.
FIXED = {
    "zero_allow_untested_optimizer": (True, False),  # has no effect here
    "zero_force_ds_cpu_optimizer": (False,),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True,),
    "prescale_gradients": (False,),
    "sparse_gradients": (False,),
    "wall_clock_breakdown": (False,),
    "memory_breakdown": (False,),
    "dump_state": (False,),
    "amp.enabled": (False,),
    "flops_profiler.enabled": (False,),
    "tensorboard.enabled": (False,),
    "bf16.check_grad_overflow": (True,),
    "fp16.auto_cast": (False,),
    "fp16.min_loss_scale": (1,),
    "fp16.loss_scale_window": (2000,),
    "fp16.hysteresis": (1,),
    "data_types.grad_accum_dtype": ("fp32",),
    "optimizer.params.adam_w_mode": (True,),
}

# Alternatives to unsupported keys, by prefix.
INSTEAD = {
    "scheduler": "the schedule is that of --lr-decay, --warmup-proportion and --warmup-start-lr",
    "activation_checkpointing": "use --activation-checkpoint",
    "zero_optimization.cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.offload": "only device and pin_memory are",
    "tensorboard": "use --tensorboard-dir",
    "flops_profiler": "use --benchmark",
    "wall_clock_breakdown": "use --benchmark",
    "sparse_attention": "attention is dense here, so leave it out",
    "elasticity": "use --global-batch-size, which keeps the batch at any number of processes",
    "checkpoint": "checkpoints have this project's own format (docs/checkpoints.md)",
    "data_types": "gradients are summed in float32",
    "communication_data_type": "gradients are summed in float32",
    "fp16": "dynamic loss scaling doubles after 2000 steps without overflow, halves at once, and stays above 1",
    "optimizer": "the optimizers are AdamW and Lamb",
}


def parse_with_deepspeed(parser: ArgumentParser, argv: list[str] | None = None) -> Arguments:
    """Parses `argv` and the flags from --deepspeed-config. Raises UserError for settings that DeepSpeed's engine does
    not support here."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    check_local_rank(args.local_rank)
    if not args.deepspeed:
        return args
    if args.deepspeed_config is None:
        raise UserError("--deepspeed needs --deepspeed-config: give DeepSpeed's JSON file")
    path = args.deepspeed_config
    values = dict(flatten(read_json_object(path, "DeepSpeed's configuration")))
    flags = {key: flag.names[0] for flag in parser.flags.values() if (key := flag.tags.get("deepspeed"))}
    check_keys(path, values, flags)
    words = list(flags_of(path, values, flags))
    words += batch_flags(path, values, args, read_environment().world_size)
    merged = parser.parse_args([*words, *argv])
    for name, value in parser.parse_args([*argv, *words]).as_dict().items():
        if value != (other := merged.as_dict()[name]) and name != "log_freq":
            raise UserError(
                f"{path} asks for --{name.replace('_', '-')} {value}, and the command line has {other}: leave one of "
                f"them out, or make them equal"
            )
    check_engine(path, values, merged)
    check_installed()
    return merged


def flatten(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flattens nested objects to names such as `optimizer.params.lr`; skips "auto" values."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif value != AUTO:
            yield prefix + key, value


def check_local_rank(local_rank: int | None) -> None:
    """Checks the flag --local-rank, which the launcher `deepspeed` passes, against the environment."""
    if local_rank is not None and local_rank != read_environment().local_rank:
        raise UserError(
            f"--local-rank {local_rank} differs from the environment variable LOCAL_RANK: start the run with "
            f"torchrun or deepspeed, which set both"
        )


# --- the keys ---------------------------------------------------------------------------------------------------------


def check_keys(path: Path, values: dict[str, Any], flags: dict[str, str]) -> None:
    """Raises UserError for the first key or value that is not supported."""
    honoured = COMPUTED | flags.keys() | {f"zero_optimization.{key}" for key in ZERO_KEYS}
    for key, value in values.items():
        if key in FIXED and value in FIXED[key]:
            continue
        if key == "zero_optimization":
            raise UserError(f'{path}: zero_optimization is {value!r}, expected an object such as {{"stage": 2}}')
        if key not in honoured:
            advice = next((text for start, text in INSTEAD.items() if key.startswith(start)), "leave it out")
            found = f"{key} {value!r}" if key in FIXED else key
            raise UserError(f"{path}: {found} is not supported with --deepspeed: {advice}")
        if key.endswith(".enabled") and not isinstance(value, bool):
            raise UserError(f"{path}: {key} is {value!r}, expected true or false")


def flags_of(path: Path, values: dict[str, Any], flags: dict[str, str]) -> Iterator[str]:
    """The flags for the keys, except the batch size."""
    for key, flag in flags.items():
        if key in values:
            if key == "gradient_clipping" and values[key] == 0:
                raise UserError(
                    f"{path}: gradient_clipping 0 turns clipping off, and this project always clips: leave it out, or "
                    f"give a large norm"
                )
            yield f"{flag}={values[key]}"
    if "optimizer.type" in values:
        name = OPTIMIZER_TYPES.get(str(values["optimizer.type"]).lower())
        if name is None:
            refuse_lamb_variants(path, str(values["optimizer.type"]), values)
            raise UserError(
                f"{path}: optimizer.type {values['optimizer.type']!r} is not supported with --deepspeed: use Adam, "
                f"AdamW or Lamb"
            )
        yield f"--optimizer={name}"
        if "optimizer.params.bias_correction" in values:
            corrects = values["optimizer.params.bias_correction"]
            if name == "Lamb":
                yield f"--lamb-bias-correction={corrects}"
            elif corrects is not True:
                raise UserError(f"{path}: optimizer.params.bias_correction {corrects!r}: AdamW here always corrects")
    if "optimizer.params.betas" in values:
        betas = values["optimizer.params.betas"]
        if not isinstance(betas, list) or len(betas) != 2:
            raise UserError(f"{path}: optimizer.params.betas is {betas!r}, expected two numbers")
        yield from (f"--beta{number}={beta}" for number, beta in enumerate(betas, 1))
    yield from precision_flags(path, values)


def precision_flags(path: Path, values: dict[str, Any]) -> Iterator[str]:
    enabled = [name for name in ("bf16", "fp16", "torch_autocast") if values.get(f"{name}.enabled")]
    if len(enabled) > 1:
        raise UserError(f"{path}: {' and '.join(enabled)} are both enabled: enable one of them")
    if enabled == ["torch_autocast"]:
        yield "--amp"
        yield f"--amp-dtype={values.get('torch_autocast.dtype', 'bfloat16')}"
    elif enabled:
        yield "--use-pure-fp16"
        yield f"--amp-dtype={ {'bf16': 'bfloat16', 'fp16': 'float16'}[enabled[0]] }"
    if enabled == ["fp16"]:
        scale = values.get("fp16.loss_scale", 0)
        if scale:
            yield f"--scale-loss={scale}"
        else:
            yield "--use-dynamic-loss-scaling"
            power = values.get("fp16.initial_scale_power")
            if power is not None and (type(power) is not int or not 0 <= power <= 100):
                raise UserError(f"{path}: fp16.initial_scale_power is {power!r}, expected a whole number from 0 to 100")
            if power is not None:
                yield f"--scale-loss={2**power}"


def batch_flags(path: Path, values: dict[str, Any], args: Arguments, world_size: int) -> list[str]:
    """The batch-size flags. As in DeepSpeed, two of the three sizes determine the third."""
    total, micro, steps = sizes = [values.get(key) for key in BATCH_KEYS]
    for key, size in zip(BATCH_KEYS, sizes, strict=True):
        if size is not None and (type(size) is not int or size < 1):
            raise UserError(f"{path}: {key} is {size!r}, expected a whole number >= 1")
    if total is not None:
        given_micro = args.batch_size if args.given("batch_size") else None
        given_steps = args.gradient_merge_steps if args.given("gradient_merge_steps") else None
        micro, steps = micro or given_micro, steps or given_steps
        if micro is None:
            micro = total // ((steps or 1) * world_size)
        steps = steps or total // (micro * world_size) if micro else 0
        if total != micro * steps * world_size:
            raise UserError(
                f"{path}: train_batch_size {total} is not {BATCH_KEYS[1]} {micro} times {BATCH_KEYS[2]} {steps} times "
                f"the {world_size} processes of this run: change one of them"
            )
    words = [] if micro is None else [f"--batch-size={micro}"]
    if args.global_batch_size is not None:
        micro = micro or args.batch_size
        if steps is not None and args.global_batch_size != micro * steps * world_size:
            raise UserError(
                f"{path} asks for {micro * steps * world_size} sequences per update, and --global-batch-size is "
                f"{args.global_batch_size}: leave one of them out, or make them equal"
            )
    elif steps is not None:
        words.append(f"--gradient-merge-steps={steps}")
    return words


# --- the engine -------------------------------------------------------------------------------------------------------


def refuse_lamb_variants(path: Path, optimizer: str, values: dict[str, Any]) -> None:
    """Raises UserError for LAMB with ZeRO: LAMB needs the norms of whole tensors, but ZeRO partitions tensors and does
    not compute their norms."""
    stage = values.get("zero_optimization.stage", 0)
    if "lamb" in optimizer.lower() and stage:
        raise UserError(
            f"{path}: LAMB's trust ratios are wrong under ZeRO stage {stage}, which takes parts of tensors for whole "
            f"ones: use --data-parallel-shard-degree instead of --deepspeed, or stage 0, or AdamW"
        )


def check_engine(path: Path, values: dict[str, Any], args: Arguments) -> None:
    """Raises UserError for combinations of flags and keys that the engine does not support."""
    stage = values.get("zero_optimization.stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise UserError(f"{path}: zero_optimization.stage is {stage!r}, expected 0, 1, 2 or 3")
    refuse_lamb_variants(path, args.optimizer, values)
    if (args.amp or args.fp16) and (values.get("bf16.enabled") or values.get("fp16.enabled")):
        raise UserError(
            f"{path} asks for weights in 16 bits, and --amp or --fp16 for float32 ones: leave one of them out"
        )
    for what, lowest in (("optimizer", 1), ("param", 3)):
        device = values.get(f"zero_optimization.offload_{what}.device", "none")
        if device not in ("cpu", "none"):
            raise UserError(f"{path}: zero_optimization.offload_{what}.device is {device!r}, expected cpu or none")
        if device == "cpu" and stage < lowest:
            raise UserError(f"{path}: offload_{what} needs ZeRO stage {lowest} or higher: raise the stage")


def check_installed() -> None:
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found != VERSION:
        raise UserError(
            f"--deepspeed needs DeepSpeed {VERSION}, and {f'{found} is' if found else 'it is not'} installed: "
            f"pip install -r requirements-deepspeed.txt"
        )


def engine_config(
    path: Path, micro_batch: int, steps: int, max_grad_norm: float, pure_dtype: str | None
) -> dict[str, Any]:
    """The configuration of DeepSpeed's engine. path: DeepSpeed's JSON file; pure_dtype: the 16-bit type of the
    weights."""
    zero: dict[str, Any] = {"stage": 0}
    for key, value in flatten(read_json_object(path, "DeepSpeed's configuration").get("zero_optimization", {})):
        if key in ZERO_KEYS:
            group, _, name = key.rpartition(".")
            (zero.setdefault(group, {}) if group else zero)[name] = value
    # With stage 0, this project manages weights and gradients.
    dtype = pure_dtype if zero["stage"] else None
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": max_grad_norm if zero["stage"] else 0.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW supports CPUs
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16", "loss_scale": 1.0},  # the trainer applies the loss scale
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }
