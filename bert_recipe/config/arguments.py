"""The command lines of the training programs: which flags of run_config they have, checks of
their combinations, and the run's configuration. Does not import torch, so that parsing is fast.
"""

import itertools
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_recipe.config import (
    FINE_TUNING,
    FLAG_GROUPS,
    OWN_CONFIGS,
    PRE_TRAINING,
    RunConfig,
)
from bert_recipe.config.fine_tuning_defaults import BY_RULE, LARGEST_BATCH, WARMUP_PROPORTION
from bert_recipe.config.foreign_flags import foreign_flags
from bert_recipe.config.optimization import EXPONENTIAL_RATE
from bert_recipe.utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Arguments,
    Computed,
    Flag,
    flags_of,
    from_flags,
    settings_text,
)
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.rank_environment import read_environment

INITIAL_LOSS_SCALE = 2.0**20  # for --use-dynamic-loss-scaling without --scale-loss


def run_flags(program: str, unused: Collection[str] = ()) -> dict[str, list[Flag]]:
    """The flags of a training program by the title of their group; the first one is `task`.

    program: PRE_TRAINING or FINE_TUNING.
    unused: names of arguments without effect in this program, which lacks their flags.
    """
    others = [config for name, config in OWN_CONFIGS.items() if name != program]
    groups = {}
    for title, configs in FLAG_GROUPS.items():
        flags = flags_of(*(config for config in configs if config not in others))
        flags = [flag for flag in flags if flag.tags.get("only", program) == program]
        groups[title] = [flag for flag in flags if flag.name not in unused]
    return groups


def all_names(flags: Collection[str]) -> set[str]:
    """The names of these flags of fine-tuning programs, and their other names."""
    names = set(flags)
    for flag in itertools.chain.from_iterable(run_flags(FINE_TUNING).values()):
        if not names.isdisjoint(flag.names):
            names |= set(flag.names)
    return names


def parse_run_arguments(parser: ArgumentParser, argv: Sequence[str] | None) -> Arguments:
    """Parses the command line of a training program. Refuses flags without effect."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.deepspeed:
        from bert_recipe.config.deepspeed_config import DeepSpeedFile

        words = DeepSpeedFile.read(args.deepspeed_config).flags(parser, args)
        args = parser.parse_args([*words, *argv])
    parser.check_flags(args)
    parser.refuse(contradictions(args))
    return args


def contradictions(args: Arguments) -> Iterator[str]:
    """A sentence for each pair of flags whose values exclude each other."""
    has_stable_part = args.warmup_proportion + args.lr_decay_proportion <= 1
    if args.lr_decay == "warmup_stable_decay" and not has_stable_part:
        yield (
            "--warmup-proportion and --lr-decay-proportion are more than all updates together: "
            "lower one"
        )
    if args.amp and args.is_typed("--bf16") and amp_dtype(args) != "bfloat16":
        yield "--bf16 computes in bfloat16: leave out --fp16, --amp-dtype float16 and loss scaling"
    if args.amp_dtype == "bfloat16" and scales_loss(args):
        yield (
            "bfloat16 needs no loss scaling: leave out --amp-dtype bfloat16 for float16, or the "
            "loss scaling"
        )
    if args.benchmark and (args.profile_update or 0) > args.benchmark_warmup_steps:
        yield (
            f"--profile-update {args.profile_update} is one of the updates that --benchmark "
            f"measures, and would be slower: give one of the warmup, at most "
            f"{args.benchmark_warmup_steps} (--benchmark-warmup-steps)"
        )


def parse_pretraining(parser: ArgumentParser, argv: Sequence[str] | None) -> Arguments:
    defaults: dict[str, Any] = {
        "input_dir": REQUIRED,
        "learning_rate": 1e-4,
        "warmup_proportion": 0.01,
    }
    for title, flags in run_flags(PRE_TRAINING).items():
        parser.add_flags(title, flags, **defaults)
    parser.foreign = foreign_flags(PRE_TRAINING)
    args = parse_run_arguments(parser, argv)
    if args.max_steps < 1:
        parser.error(f"argument --max-steps: expected a whole number >= 1, not {args.max_steps}")
    return args


def parse_fine_tuning(
    parser: ArgumentParser,
    argv: Sequence[str] | None,
    groups: Mapping[str, Sequence[Flag]],
    unused: Collection[str] = (),
    **defaults: object,
) -> Arguments:
    """Parses the command line of a fine-tuning program.

    groups: the task's flags, by the title in --help.
    unused: names of arguments of other tasks that this one has no use for.
    defaults: by the name of the argument, where they differ from those of other tasks.
    """
    by_rule = Computed(BY_RULE)
    shared = {
        "optimizer": "AdamW",
        "warmup_proportion": WARMUP_PROPORTION,
        "max_steps": -1,
        "learning_rate": by_rule,
        "batch_size": by_rule,
        "epochs": by_rule,
    }
    run_groups = run_flags(FINE_TUNING, unused)
    task_flags = run_groups.pop("task")
    for title, flags in {"task": task_flags, **groups, **run_groups}.items():
        parser.add_flags(title, flags, **shared | defaults)
    parser.foreign = foreign_flags(FINE_TUNING)
    argv = sys.argv[1:] if argv is None else argv
    if any(re.fullmatch("--eval[-_]file(=.*)?", word) for word in argv):
        argv = ["--do-eval", *argv]  # the file alone means it
    args = parse_run_arguments(parser, argv)
    work = [name for name in ("do_train", "do_eval", "do_predict") if name in args]
    if not any(vars(args)[name] for name in work):
        *others, last = (f"--{name.replace('_', '-')}" for name in work)
        parser.error(f"nothing to do: give {', '.join(others)} or {last}")
    if not args.do_train and args.from_pretrained_params is None and args.from_checkpoint is None:
        parser.error(
            "without --do-train there has to be a fine-tuned model: give --init-checkpoint"
        )
    return args


# Of models that are often named without their owner on the hub.
OWNERS = {
    "google-bert": "bert-(base|large)-(un)?cased",
    "sentence-transformers": r"(all|multi-qa|paraphrase)-[\w.-]+",
}


def check_weights(path: Path | None) -> None:
    """Raises UserError if there is no `path` to start from; for a hub name, it says how to download
    the model.
    """
    if path is not None and not path.exists():
        owners = (owner for owner, names in OWNERS.items() if re.fullmatch(names, str(path)))
        hub_name = "/".join([*owners, str(path)])
        download = f", or download the model: hf download {hub_name} --local-dir {path.name}"
        is_hub_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) is not None
        raise UserError(
            f"--init-checkpoint {path} does not exist: check the "
            f"path{download if is_hub_name else ''}"
        )


def make_run_config(args: Arguments, world_size: int | None = None, **changes: Any) -> RunConfig:
    """The settings of the flags.

    world_size: processes; by default those of --estimate-memory or of this launch.
    changes: settings of the program that its flags do not give, by argument.
    """
    world_size = world_size or args.get("estimate_memory") or read_environment().world_size
    resolved = resolved_values(args, world_size)
    if args.deepspeed:
        from bert_recipe.config.deepspeed_config import DeepSpeedFile

        file = DeepSpeedFile.read(args.deepspeed_config)
        resolved["engine"] = file.engine(args, resolved["amp_dtype"])
    return from_flags(RunConfig, args, **resolved | changes)


def resolved_values(args: Arguments, world_size: int) -> dict[str, Any]:
    """Settings that follow from several flags, by argument; those without a flag by field."""
    is_dynamic = args.use_dynamic_loss_scaling or args.fp16
    starts_high = is_dynamic and not args.given("scale_loss")
    batch_size, global_batch_size = batch_sizes(args, world_size)
    has_own_rate = args.lr_decay == "exponential" and not args.given("lr_decay_rate")
    return {
        "batch_size": batch_size,
        "global_batch_size": global_batch_size,
        "lr_decay_rate": EXPONENTIAL_RATE if has_own_rate else args.lr_decay_rate,
        "data_parallel_shard_degree": shard_degree(args, world_size),
        "amp": args.amp or args.fp16,
        "amp_dtype": amp_dtype(args),
        "scale_loss": INITIAL_LOSS_SCALE if starts_high else args.scale_loss,
        "use_dynamic_loss_scaling": is_dynamic,
        "bert_model": args.bert_model if args.given("bert_model") else None,
        "do_train": args.get("do_train", True),
        "world_size": world_size,
        "arguments": args,
    }


def startup_messages(config: RunConfig) -> list[str]:
    """Lines to print at the start: the settings, and what follows from them."""
    args, engine = config.arguments, config.parallel.engine
    notes = [] if engine is None else [*engine.notes]
    notes += settings_text(args)
    if args.amp_dtype is None and config.precision.amp_dtype == "float16":
        notes.append(
            "note: loss scaling was asked for, so the 16-bit type is float16 (--amp-dtype bfloat16 "
            "needs none)"
        )
    return notes


def divided_batch(global_batch: int, gradient_merge_steps: int, world_size: int) -> int:
    """The micro-batch of a global batch."""
    return -(-global_batch // (gradient_merge_steps * world_size))


def batch_sizes(args: Arguments, world_size: int) -> tuple[int, int]:
    """Sequences per GPU and micro-batch, and per optimizer step over all ranks; the most of the
    rule, until it has seen the rows.
    """
    batch_size, global_batch = args.batch_size, args.global_batch_size
    merge_steps = args.gradient_merge_steps
    if batch_size is not None:
        global_batch = global_batch or batch_size * merge_steps * world_size
    elif global_batch is not None:
        batch_size = LARGEST_BATCH
    else:
        batch_size = divided_batch(LARGEST_BATCH, merge_steps, world_size)
        global_batch = max(LARGEST_BATCH, world_size)
    if args.get("initial_global_batch_size", 0) > global_batch:
        raise UserError(
            f"--initial-global-batch-size {args.initial_global_batch_size} is above the "
            f"{global_batch} sequences of a full update: give less"
        )
    return batch_size, global_batch


def shard_degree(args: Arguments, world_size: int) -> int:
    """Processes that share one copy of the model. Raises UserError if the degrees do not fit
    `world_size`.
    """
    given, replicas = args.data_parallel_shard_degree, args.data_parallel_replicate_degree
    shard = given
    if given == -1:  # all processes of a replica
        shard = world_size // (replicas or 1)
    num_replicas = replicas or world_size // shard
    if shard * num_replicas != world_size:
        raise UserError(
            f"--data-parallel-shard-degree {given} and --data-parallel-replicate-degree "
            f"{replicas or 1} do not multiply to the {world_size} processes of this run: change "
            "one of them"
        )
    return shard


def amp_dtype(args: Arguments) -> str:
    """The 16-bit type. Loss-scaling flags, as in NVIDIA's commands, imply float16."""
    if args.amp_dtype is not None:
        return args.amp_dtype
    return "float16" if scales_loss(args) else "bfloat16"


def scales_loss(args: Arguments) -> bool:
    return args.fp16 or args.given("scale_loss") or args.use_dynamic_loss_scaling
