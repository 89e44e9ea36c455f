"""DeepSpeed's JSON configuration: keys that map to flags, keys passed to the engine, and
unsupported keys.

docs/coming_from_deepspeed.md has the keys that are honoured. Keys that are not in the tables below
are errors, so that no setting is silently ignored. The methods of `DeepSpeedFile` add the file's
name to each ValueError of the other functions.
"""

import argparse
import contextlib
import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_recipe.config.fine_tuning_defaults import LARGEST_BATCH
from bert_recipe.config.runtime import EngineConfig
from bert_recipe.utils.command_line import ArgumentParser, Arguments, argument_name
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject, read_json
from bert_recipe.utils.rank_environment import read_environment
from bert_recipe.utils.requirements import release

# The lowest and the highest with which tests/parallel/test_deepspeed.py passed. Newer ones are used
# if they have what parallel/deepspeed.py needs. With 0.18.5, the losses of ZeRO 1 in 16 bits and of
# ZeRO 2 with offload were wrong, with 0.19.0 those of ZeRO 1 in float16; before 0.18.5, ZeRO 1 in
# bfloat16 divides nothing.
DEEPSPEED_VERSIONS = ("0.19.0", "0.19.8")
AUTO = "auto"  # Hugging Face's value for "set by the flags"
Setting = tuple[str, str, Any]  # a key, the flag that it stands for, and the flag's value

# Keys whose values are those of a flag.
FLAGS = {
    "steps_per_print": "--log-freq",
    "gradient_clipping": "--max-grad-norm",
    "optimizer.params.eps": "--epsilon",
    "optimizer.params.weight_decay": "--weight-decay",
    "optimizer.params.min_coeff": "--lamb-min-coeff",
    "optimizer.params.max_coeff": "--lamb-max-coeff",
    "optimizer.params.lr": "--learning-rate",
}
# Keys that become flags by a rule of their own (see `flags_of`, `batch_flags`).
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
CLIPPING_KEYS = ("gradient_clipping", "optimizer.params.max_grad_norm")
COMPUTED = {
    *BATCH_KEYS,
    *CLIPPING_KEYS,
    *("optimizer.params.betas", "optimizer.params.bias_correction"),
    *("tensorboard.enabled", "tensorboard.output_path", "tensorboard.job_name"),
    *("bf16.enabled", "fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power"),
    *("torch_autocast.enabled", "torch_autocast.dtype"),
}
OPTIMIZER_TYPES = {"adam": "AdamW", "adamw": "AdamW", "lamb": "Lamb"}

# DeepSpeed's defaults of its optimizers and of enabled blocks, where they differ from those of the
# flags.
ADAM_DEFAULTS = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZER_DEFAULTS = {
    "AdamW": ADAM_DEFAULTS,
    "Lamb": ADAM_DEFAULTS | {"min_coeff": 0.01, "max_coeff": 10.0},
}
INITIAL_SCALE_POWER = 16
JOB_NAME = "DeepSpeedJobName"  # of TensorBoard's logs

# Blocks that are off if they have no key `enabled`.
OFF_BY_DEFAULT = {
    *(
        "bf16",
        "fp16",
        "amp",
        "torch_autocast",
        "tensorboard",
        "wandb",
        "comet",
        "csv_monitor",
        "comms_logger",
    ),
    *("flops_profiler", "elasticity"),
}

# Keys of `zero_optimization` that go to the engine as they are.
ZERO_KEYS = {
    *(
        "stage",
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "allgather_partitions",
    ),
    *("allgather_bucket_size", "overlap_comm", "sub_group_size", "use_multi_rank_bucket_allreduce"),
    *(
        "ignore_unused_parameters",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    ),
    *(
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
    ),
    *(
        "offload_param.device",
        "offload_param.pin_memory",
        "offload_optimizer.device",
        "offload_optimizer.pin_memory",
    ),
}

# Keys that are accepted with these values only; with one value, it describes the existing
# behaviour.
MUST_BE_FALSE = (
    "prescale_gradients",
    "sparse_gradients",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "zero_force_ds_cpu_optimizer",
    "fp16.auto_cast",
)
ALLOWED: dict[str, tuple[object, ...]] = dict.fromkeys(MUST_BE_FALSE, (False,)) | {
    "zero_allow_untested_optimizer": (True, False),  # has no effect here
    "zero_optimization.stage": (0, 1, 2, 3),
    "zero_optimization.offload_param.device": ("cpu", "none"),
    "zero_optimization.offload_optimizer.device": ("cpu", "none"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True,),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (True,),  # its former name
    "bf16.check_grad_overflow": (True,),
    "fp16.min_loss_scale": (1,),
    "fp16.loss_scale_window": (2000,),
    "fp16.hysteresis": (1,),
    "data_types.grad_accum_dtype": ("fp32",),
    "optimizer.type": ("AdamW", "Lamb"),
    "optimizer.params.adam_w_mode": (True,),
}

# Alternatives to unsupported keys and values, by prefixes; the first one that fits.
INSTEAD = {
    "scheduler": (
        "the schedule is that of --lr-decay, --warmup-proportion and --warmup-start-lr; leave the "
        "block out"
    ),
    "amp": 'use --amp, or "torch_autocast": {"enabled": true}',
    "wandb comet csv_monitor": (
        "metrics go to --report-file and --tensorboard-dir; leave the block out"
    ),
    "prescale_gradients gradient_predivide_factor data_types communication_data_type": (
        "gradients are summed in float32, where nothing overflows; leave it out"
    ),
    "activation_checkpointing": "use --activation-checkpoint",
    "zero_optimization.cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.offload": "only device, which is cpu or none, and pin_memory are",
    "zero_optimization": (
        'write an object such as {"stage": 2}, with the keys of docs/coming_from_deepspeed.md'
    ),
    "tensorboard": "use --tensorboard-dir",
    "flops_profiler wall_clock_breakdown": "use --benchmark",
    "sparse_attention": "attention is dense here, so leave it out",
    "elasticity": "use --global-batch-size, which keeps the batch at any number of processes",
    "checkpoint": "checkpoints have this project's own format (docs/checkpoints.md)",
    "fp16": (
        "the loss scale doubles after 2000 updates without overflow, halves at the first one and "
        "stays above 1: leave the key out to accept that"
    ),
    "optimizer": "the optimizers are Adam, AdamW and Lamb",
    "": "leave it out",
}


@dataclass(frozen=True)
class DeepSpeedFile:
    """The file of --deepspeed-config. values: see `flatten`."""

    path: Path
    values: JsonObject

    @classmethod
    def read(cls, path: Path | None) -> "DeepSpeedFile":
        if path is None:
            raise UserError("--deepspeed needs --deepspeed-config: give DeepSpeed's JSON file")
        return cls(path, dict(flatten(read_json(path, "DeepSpeed's configuration"))))

    def flags(self, parser: ArgumentParser, args: Arguments) -> list[str]:
        """The flags that the file stands for, as words of a command line. Raises UserError for keys
        that are not supported or contradict `args`, and without DeepSpeed.

        parser: of the program.
        args: the command line without these flags.
        """
        with self._errors():
            values = with_defaults(self.values, args)
            check_keys(values)
            settings = settings_by_argument(parser, values, args)
            check_typed(settings, args)
        installed_version()
        return [f"{flag}={value}" for _, flag, value in settings.values()]

    def engine(self, args: Arguments, amp_dtype: str) -> EngineConfig:
        """What DeepSpeed's engine gets. Raises UserError for combinations of flags and keys that it
        does not support.

        args: the command line, with the flags that the file stands for.
        amp_dtype: the 16-bit type.
        """
        with self._errors():
            check_engine(self.values, args)
        config = engine_config(self.values, args, amp_dtype)
        check_float16(config)
        return EngineConfig(config, self._notes(args))

    def _notes(self, args: Arguments) -> tuple[str, ...]:
        is_clipped = args.given("max_grad_norm") or not self.values.keys().isdisjoint(CLIPPING_KEYS)
        scales = "fp16.enabled" in self.values and args.use_dynamic_loss_scaling
        notes = {
            f"{self.path} has no gradient_clipping, so DeepSpeed would not clip: here gradients "
            f"are clipped to --max-grad-norm {args.max_grad_norm:g}": not is_clipped,
            f"the scheduler of {self.path} has only the values auto: the schedule is that of "
            "--lr-decay and --warmup-proportion": leaves_schedule_to_flags(self.values),
            "the loss scale doubles after 2000 updates without overflow and halves at the first "
            "overflow; DeepSpeed's defaults are loss_scale_window 1000 and hysteresis 2": scales,
        }
        return tuple(f"note: {text}" for text, applies in notes.items() if applies)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises UserError, with the name of the file, for a ValueError."""
        try:
            yield
        except ValueError as error:
            raise UserError(f"{self.path}: {error}") from error


def installed_version() -> str:
    """The version of DeepSpeed. Raises UserError if it is not installed, or too old."""
    try:
        installed = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            "--deepspeed needs DeepSpeed: pip install -r requirements-deepspeed.txt"
        ) from error
    if release(installed) < release(DEEPSPEED_VERSIONS[0]):
        raise UserError(
            f"DeepSpeed {installed} is too old, its ZeRO 1 and 2 give wrong losses: pip install -r "
            "requirements-deepspeed.txt"
        )
    return installed


def note_on_version() -> str | None:
    """A line for a version with which the tests were not run."""
    installed = installed_version()
    highest = DEEPSPEED_VERSIONS[1]
    if release(installed) <= release(highest):
        return None
    return f"note: DeepSpeed {installed} was not tested with this program; {highest} was"


def flatten(config: JsonObject, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested objects under names such as `optimizer.params.lr`, without disabled
    blocks.
    """
    for key, value in config.items():
        if not isinstance(value, dict):
            yield prefix + key, value
            continue
        is_on_by_default = bool(prefix) or key not in OFF_BY_DEFAULT
        if value.get("enabled", is_on_by_default) is not False:
            yield from flatten(value, f"{prefix}{key}.")


def check_typed(settings: dict[str, Setting], args: Arguments) -> None:
    """Raises ValueError where the command line has another value of a flag than the file. The
    frequency of logs may differ.
    """
    for name, (key, flag, value) in settings.items():
        typed = args.get(name)
        if args.given(name) and typed != value and name != "log_freq":
            raise ValueError(
                f"{key} asks for {flag} {value}, and the command line has {typed}: leave one of "
                "them out, or make them equal"
            )


def settings_by_argument(
    parser: ArgumentParser, values: JsonObject, args: Arguments
) -> dict[str, Setting]:
    """The flags that the file's keys stand for, by the argument's name. Raises ValueError if two
    keys contradict each other.
    """
    settings: dict[str, Setting] = {}
    world_size = read_environment().world_size
    for key, flag, text in (*flags_of(values, args), *batch_flags(values, args, world_size)):
        value = parse_value(parser, key, flag, text)
        other_key, _, other = settings.setdefault(argument_name(flag), (key, flag, value))
        if value != other:
            raise ValueError(
                f"{key} {value} contradicts {other_key} {other}: leave one of them out"
            )
    return settings


def with_defaults(given: JsonObject, args: Arguments) -> JsonObject:
    """The keys of enabled blocks, and DeepSpeed's defaults of missing ones. A value "auto", and a
    missing one that the command line gives, is left to the flags.
    """
    float16 = (
        args.amp_dtype == "float16"
        or args.fp16
        or args.use_dynamic_loss_scaling
        or args.given("scale_loss")
    )
    if given.get("fp16.enabled") == AUTO and not float16:
        given = {key: value for key, value in given.items() if not key.startswith("fp16.")}
    values = {key: value for key, value in given.items() if value != AUTO}
    if leaves_schedule_to_flags(given):
        values.pop("scheduler.type", None)
    if "optimizer.type" in values:
        typed = given["optimizer.type"]
        name = OPTIMIZER_TYPES.get(str(typed).lower(), typed)
        values["optimizer.type"] = name
        for parameter, value in OPTIMIZER_DEFAULTS.get(str(name), {}).items():
            key = f"optimizer.params.{parameter}"
            if key not in given and not args.given(argument_name(FLAGS[key])):
                values[key] = value
    if "fp16.enabled" in given and not args.given("scale_loss"):
        values = {"fp16.initial_scale_power": INITIAL_SCALE_POWER} | values
    return values


def leaves_schedule_to_flags(given: JsonObject) -> bool:
    """Whether all parameters of the block `scheduler` are "auto", as in Hugging Face's zero2.json
    and zero3.json.
    """
    values = [value for key, value in given.items() if key.startswith("scheduler.params.")]
    return bool(values) and all(value == AUTO for value in values)


def check_keys(values: JsonObject) -> None:
    """Raises ValueError, with all their names, for keys and values that are not supported."""
    refused: dict[str, list[str]] = {}  # by advice
    honoured = (
        COMPUTED | ALLOWED.keys() | FLAGS.keys() | {f"zero_optimization.{key}" for key in ZERO_KEYS}
    )
    for key, value in values.items():
        if key in ALLOWED and value not in ALLOWED[key]:
            refused.setdefault(advice_for(key), []).append(f"{key} {value!r}")
        elif key not in honoured:
            refused.setdefault(advice_for(key), []).append(key)
        elif key.endswith(".enabled") and not isinstance(value, bool):
            raise ValueError(f"{key} is {value!r}, expected true or false")
    if refused:
        groups = "; ".join(f"{', '.join(keys)}: {advice}" for advice, keys in refused.items())
        raise ValueError(f"not supported with --deepspeed: {groups}")


def advice_for(key: str) -> str:
    """What to do about a key, or a value of it, that is not supported."""
    for prefixes, advice in INSTEAD.items():
        if key.startswith(tuple(prefixes.split(" "))):
            return advice
    return INSTEAD[""]


def parse_value(parser: ArgumentParser, key: str, flag: str, value: Any) -> Any:
    """The flag's value that the JSON `value` of `key` means. Raises ValueError, with the name of
    the key, if the flag does not take it.
    """
    kind = parser.flags[argument_name(flag)].kind
    try:
        if kind is bool:
            if not isinstance(value, bool):
                raise ValueError("expected true or false")
            return value
        if not isinstance(kind, tuple):
            return kind(str(value))
        if value not in kind:
            raise ValueError(f"expected {' or '.join(kind)}")
        return value
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ValueError(f"{key} is {value!r}, which {flag} does not take: {error}") from error


def flags_of(values: JsonObject, args: Arguments) -> Iterator[Setting]:
    """The flags that the keys stand for, without those of the batch."""
    for key in CLIPPING_KEYS:
        if values.get(key) == 0:
            raise ValueError(
                f"{key} 0 turns clipping off, and this project always clips: leave it out, or give "
                "a large norm"
            )
    flags = FLAGS | dict.fromkeys(CLIPPING_KEYS, "--max-grad-norm")
    yield from ((key, flag, values[key]) for key, flag in flags.items() if key in values)
    if "optimizer.type" in values:
        yield from optimizer_flags(values, args, values["optimizer.type"])
    if "optimizer.params.betas" in values:
        betas = values["optimizer.params.betas"]
        if not isinstance(betas, list) or len(betas) != 2:
            raise ValueError(f"optimizer.params.betas is {betas!r}, expected two numbers")
        yield from (
            ("optimizer.params.betas", f"--beta{number}", beta)
            for number, beta in enumerate(betas, 1)
        )
    yield from precision_flags(values)
    if values.get("tensorboard.enabled"):
        folder = values.get("tensorboard.output_path", "")
        job = values.get("tensorboard.job_name", JOB_NAME)
        yield "tensorboard.output_path", "--tensorboard-dir", f"{folder}/{job}" if folder else job


def optimizer_flags(values: JsonObject, args: Arguments, name: str) -> Iterator[Setting]:
    key = "optimizer.params.bias_correction"
    corrects = values.get(key, True)
    if name == "AdamW" and corrects is False:
        if values.get("zero_optimization.stage", 0):
            raise ValueError(
                f"{key} false: Adam without bias correction is LAMB with trust ratios of 1 here, "
                "which ZeRO cannot shard: use stage 0, or true"
            )
        why = f"{key} false (Adam without it is LAMB with trust ratios of 1 here)"
        yield why, "--optimizer", "Lamb"
        yield from ((key, flag, 1.0) for flag in ("--lamb-min-coeff", "--lamb-max-coeff"))
        yield key, "--lamb-bias-correction", False
        return
    if name == "Lamb":
        if key in values:
            yield key, "--lamb-bias-correction", corrects
        if not args.given("lamb_adapt_undecayed"):
            yield "optimizer.type", "--lamb-adapt-undecayed", True
    elif corrects is not True:
        raise ValueError(f"{key} is {corrects!r}, expected true or false")
    yield "optimizer.type", "--optimizer", name


def precision_flags(values: JsonObject) -> Iterator[Setting]:
    enabled = [name for name in ("bf16", "fp16", "torch_autocast") if values.get(f"{name}.enabled")]
    if len(enabled) > 1:
        raise ValueError(f"{' and '.join(enabled)} are both enabled: enable one of them")
    if enabled == ["torch_autocast"]:
        yield "torch_autocast.enabled", "--amp", True
        yield "torch_autocast.dtype", "--amp-dtype", values.get("torch_autocast.dtype", "bfloat16")
    elif enabled:
        yield f"{enabled[0]}.enabled", "--use-pure-fp16", True
        dtype = "bfloat16" if enabled == ["bf16"] else "float16"
        yield f"{enabled[0]}.enabled", "--amp-dtype", dtype
    if scale := values.get("fp16.loss_scale", 0):
        yield "fp16.loss_scale", "--scale-loss", scale
    elif any(key.startswith("fp16.") for key in values):
        yield "fp16.loss_scale", "--use-dynamic-loss-scaling", True
        if (power := values.get("fp16.initial_scale_power")) is not None:
            if type(power) is not int or not 0 <= power <= 100:
                raise ValueError(
                    f"fp16.initial_scale_power is {power!r}, expected a whole number from 0 to 100"
                )
            yield "fp16.initial_scale_power", "--scale-loss", 2.0**power


def batch_flags(values: JsonObject, args: Arguments, world_size: int) -> Iterator[Setting]:
    """The flags of the batch: as in DeepSpeed, two of the three sizes give the third one."""
    total, micro, steps = batch_sizes(values)
    if total is not None:
        micro, steps = divide_batch(total, micro, steps, args, world_size)
    if micro is not None:
        yield BATCH_KEYS[1], "--batch-size", micro
    if steps is None:
        return
    if args.global_batch_size is None:
        yield BATCH_KEYS[2], "--gradient-merge-steps", steps
        return
    asked = (micro or args.batch_size or LARGEST_BATCH) * steps * world_size
    if args.global_batch_size != asked:
        raise ValueError(
            f"the file asks for {asked} sequences per update, and --global-batch-size is "
            f"{args.global_batch_size}: leave one of them out, or make them equal"
        )


def batch_sizes(values: JsonObject) -> list[int | None]:
    """The file's sizes of BATCH_KEYS. Raises ValueError for other values than whole numbers."""
    sizes = [values.get(key) for key in BATCH_KEYS]
    for key, size in zip(BATCH_KEYS, sizes, strict=True):
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{key} is {size!r}, expected a whole number >= 1")
    return sizes


def divide_batch(
    total: int, micro: int | None, steps: int | None, args: Arguments, world_size: int
) -> tuple[int, int]:
    """Micro-batch and steps of a global batch of `total` sequences: the file's sizes, else those of
    the command line, else what is left.
    """
    if micro is None and args.given("batch_size"):
        micro = args.batch_size
    if steps is None and args.given("gradient_merge_steps"):
        steps = args.gradient_merge_steps
    if micro is None:
        micro = total // ((steps or 1) * world_size)
    if steps is None:
        steps = total // max(micro * world_size, 1)
    if total != micro * steps * world_size:
        raise ValueError(
            f"train_batch_size {total} is not {BATCH_KEYS[1]} {micro} times {BATCH_KEYS[2]} "
            f"{steps} times the {world_size} processes of this run: change one of them"
        )
    return micro, steps


def check_float16(config: JsonObject) -> None:
    """Raises UserError if the installed DeepSpeed would give wrong losses."""
    installed, highest = installed_version(), DEEPSPEED_VERSIONS[1]
    has_float16 = config["fp16"]["enabled"] and config["zero_optimization"]["stage"] == 1
    if has_float16 and release(installed) < release(highest):
        raise UserError(
            f"DeepSpeed {installed} gives wrong losses with ZeRO 1 in float16: pip install "
            f"deepspeed=={highest}, or use bfloat16 or ZeRO 2"
        )


def check_engine(values: JsonObject, args: Arguments) -> None:
    """Raises ValueError for combinations of flags and keys that the engine does not support."""
    values = {key: value for key, value in values.items() if value != AUTO}
    stage = values.get("zero_optimization.stage", 0)
    # LAMB needs the norms of whole tensors, which ZeRO does not compute.
    if args.optimizer == "Lamb" and stage:
        raise ValueError(
            f"LAMB's trust ratios are wrong under ZeRO stage {stage}, which takes parts of tensors "
            "for whole ones: use --data-parallel-shard-degree instead of --deepspeed, or stage 0, "
            "or AdamW"
        )
    if (args.amp or args.fp16) and (values.get("bf16.enabled") or values.get("fp16.enabled")):
        raise ValueError(
            "it asks for weights in 16 bits, and --amp or --fp16 for float32 ones: leave one of "
            "them out"
        )
    for what, lowest in (("optimizer", 1), ("param", 3)):
        if values.get(f"zero_optimization.offload_{what}.device") == "cpu" and stage < lowest:
            raise ValueError(f"offload_{what} needs ZeRO stage {lowest} or higher: raise the stage")


def engine_config(values: JsonObject, args: Arguments, amp_dtype: str) -> JsonObject:
    """The configuration of DeepSpeed's engine without its batch; see `DeepSpeedFile.engine`."""
    zero = zero_config(values)
    # With stage 0, this project manages weights and gradients.
    dtype = amp_dtype if args.use_pure_fp16 and zero["stage"] else None
    return {
        "gradient_clipping": args.max_grad_norm if zero["stage"] else 0.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW supports CPUs
        "bf16": {"enabled": dtype == "bfloat16"},
        # The trainer applies the loss scale.
        "fp16": {"enabled": dtype == "float16", "loss_scale": 1.0},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }


def zero_config(values: JsonObject) -> JsonObject:
    """The block `zero_optimization`, without the keys that the engine does not get."""
    zero: JsonObject = {"stage": 0}
    for name in ZERO_KEYS:
        value = values.get(f"zero_optimization.{name}", AUTO)
        if value == AUTO:
            continue
        block, _, key = name.rpartition(".")
        if block:  # such as offload_optimizer.device
            zero.setdefault(block, {})[key] = value
        else:
            zero[key] = value
    return zero
