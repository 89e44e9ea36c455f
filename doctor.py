#!/usr/bin/env python3
"""Checks a run's setup in under a minute: packages, device, memory, disk, data, overfitting of one
batch, the run's duration and first losses. Takes the flags of the run:

    python3 doctor.py run_pretraining.py --input-dir FOLDER --output-dir results ...
    python3 doctor.py run_squad.py --do-train --train-file ... --init-checkpoint ...
    python3 doctor.py run_glue.py --task-name mrpc --do-train ...
    python3 doctor.py run_ner.py --do-train ...  # or run_embeddings.py
    python3 doctor.py run_pretraining.py --processes 8 ...  # a run of 8 processes; by default one

Each line is "ok", "warning", or "wrong" with what to do. The exit code is 2 if a check is wrong.
"""

import sys
from dataclasses import replace
from pathlib import Path

from bert_recipe.utils.errors import UserError, handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

import run_embeddings
import run_glue
import run_ner
import run_pretraining
import run_squad
from bert_recipe.config import RunConfig, RuntimeConfig
from bert_recipe.config.arguments import make_run_config
from bert_recipe.utils.command_line import ArgumentParser, Arguments, Flag, positive_int
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.rank_environment import read_environment

PROGRAMS = {
    "run_pretraining.py": run_pretraining,
    "run_squad.py": run_squad,
    "run_glue.py": run_glue,
    "run_ner.py": run_ner,
    "run_embeddings.py": run_embeddings,
}
PROCESSES = Flag("--processes", positive_int, 1, "processes of the run")


def parse_arguments(argv: list[str]) -> tuple[str, int, Arguments]:
    """The program, the number of processes, and the arguments of the program itself. The program
    may be named in short, as `glue` for run_glue.py; by default it is run_pretraining.py.
    """
    parser = ArgumentParser(add_help=False)
    if argv and not argv[0].startswith("-"):
        name = f"run_{Path(argv[0]).stem.removeprefix('run_')}.py"
        flags = argv[1:]
        if name not in PROGRAMS:
            parser.error(f"{argv[0]}: the doctor checks {', '.join(PROGRAMS)}: name one of them")
    else:
        name = "run_pretraining.py"
        flags = argv
    if flags and flags[0] in ("-h", "--help"):
        print_line((__doc__ or "").strip())
        sys.exit()
    parser.add_flags("flags", (PROCESSES,))
    known, flags = parser.parse_known_args(flags)
    args = PROGRAMS[name].parse_arguments(flags)
    if not args.get("do_train", True):
        parser.error("the doctor checks training: add --do-train")
    return name, known.processes, args


def alone(config: RunConfig) -> RunConfig:
    """The settings for a trial in one process: the same batches, of as many processes, unsharded,
    without logs and profile, compiled only if asked for.
    """
    logs = config.runtime
    runtime = RuntimeConfig(
        device=logs.device, cpu_affinity=logs.cpu_affinity, deterministic=logs.deterministic
    )
    what = "none" if config.parallel.compile == "auto" else config.parallel.compile
    parallel = replace(
        config.parallel, shard_degree=1, replicate_degree=None, cpu_offload=False, compile=what
    )
    trainer = replace(config.trainer, benchmark=False, profile_update=None)
    return replace(config, parallel=parallel, trainer=trainer, runtime=runtime)


def examine(name: str, processes: int, args: Arguments) -> int:
    """Prints the findings and returns the number of wrong ones."""
    # Here, so that --help and errors of the command line do not wait for torch.
    from bert_recipe.training import checks
    from bert_recipe.training.memory_estimate import MemorySettings
    from bert_recipe.training.plan import open_runs
    from bert_recipe.training.setup import start_runtime

    findings = checks.Findings()
    config = make_run_config(args, processes)
    single = alone(config)
    with findings.check():
        checks.check_packages(findings, config)
    with findings.check(), start_runtime(single, "doctor") as runtime:
        checks.check_device(findings, runtime, processes)
        options = PROGRAMS[name].task_options(args)
        # Of the first seed or fold, if there are several.
        run = next(iter(open_runs(single, options, runtime, findings.decide_start).values()))
        loader = options.in_sequences(run.values.loader, run.data.dataset)
        memory = MemorySettings(config, loader, task_memory=options.resident_memory())
        for check in (checks.check_disk, checks.check_data, checks.check_folder):
            with findings.check():
                check(findings, run)
        with findings.check():
            checks.check_overfitting(findings, run, runtime)
        with findings.check():
            checks.check_memory(findings, run, memory)
            checks.check_updates(findings, run, runtime, processes)
    return findings.num_wrong


def main(argv: list[str] | None = None) -> int:
    name, processes, args = parse_arguments(sys.argv[1:] if argv is None else argv)
    if read_environment().world_size > 1:
        raise UserError(
            "doctor.py is one process: start it without torchrun, and give --processes N"
        )
    num_wrong = examine(name, processes, args)
    print_line(f"{num_wrong} wrong: see above" if num_wrong else "nothing is wrong")
    return 2 if num_wrong else 0


if __name__ == "__main__":
    run_main(main)
