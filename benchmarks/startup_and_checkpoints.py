#!/usr/bin/env python3
"""Time from launch to the first step, for a new and a resumed run, and time that a checkpoint
takes.

    python3 benchmarks/startup_and_checkpoints.py --model large
    TMPDIR=/mnt/fast python3 benchmarks/startup_and_checkpoints.py --model large --device cuda

Runs run_pretraining.py on shards of the sample corpus, and records the time at the start of each
stage. Training waits while a checkpoint is copied (`stopped`); then it is written, hashed, synced
and renamed in the background (`durable`, from the same start; no step runs meanwhile here). A
resumed run reads and verifies the whole checkpoint first.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.results import benchmark_parser, config_file, quartiles, write_result
from benchmarks.common.shards import make_shards, pretraining_flags
from utils.command_line import Arguments, positive_int
from utils.device import select_device
from utils.errors import UserError, run_main
from utils.progress import print_line, progress_bar

SEQ_LENGTH = 128
STEPS_PER_CHECKPOINT = 4
FIRST_BATCH, END = "first batch", "end"


def run_with_marks(marks_file: str, last_stage: str, *argv: str) -> None:
    """Runs the program in this process until it begins `last_stage`, and writes a JSON line at the
    start of each.
    """

    def mark(name: str, **values: float) -> None:
        with Path(marks_file).open("a", encoding="utf-8") as marks:
            marks.write(json.dumps({"mark": name, "time": time.time(), **values}) + "\n")

    import run_pretraining
    from run_setup import TrainingPlan
    from training.checkpoints import Checkpoints

    mark("imports")
    build_trainer = TrainingPlan.build_trainer

    def build_marked_trainer(*args):
        mark("device, data")
        trainer = build_trainer(*args)
        checkpoints = trainer.callback(Checkpoints)
        training_step, save = trainer.training_step, checkpoints.save

        def marked_step(*args):
            mark(FIRST_BATCH)
            if last_stage == FIRST_BATCH:
                raise UserError("the benchmark stops this run at its first step")
            return training_step(*args)

        def marked_save():
            started = time.perf_counter()
            save()
            stopped = time.perf_counter() - started
            checkpoints.writer.wait()
            mark("saved", stopped=stopped, durable=time.perf_counter() - started)

        trainer.training_step, checkpoints.save = marked_step, marked_save
        mark("model, optimizer, state")
        return trainer

    TrainingPlan.build_trainer = build_marked_trainer
    run_pretraining.main(list(argv))


def launch(
    command: list[str], last_stage: str, scratch: Path
) -> tuple[dict[str, float], list[dict]]:
    """The seconds of each stage until the first step, and the marks of the checkpoints."""
    marks_file = scratch / "marks.jsonl"
    marks_file.unlink(missing_ok=True)
    words = [sys.executable, __file__, "--run-with-marks", str(marks_file), last_stage, *command]
    last = started = time.time()
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    seconds: dict[str, float] = {}
    saves = []
    for mark in map(json.loads, marks_file.read_text(encoding="utf-8").splitlines()):
        if mark["mark"] == "saved":
            saves.append(mark)
        elif mark["mark"] not in seconds:
            seconds[mark["mark"]] = mark["time"] - last
            last = mark["time"]
    if FIRST_BATCH not in seconds or (last_stage == END and result.returncode):
        raise UserError(f"run_pretraining.py failed: {result.stderr[-2000:]}")
    return seconds | {"total": last - started}, saves


def measure(args: Arguments, scratch: Path) -> dict:
    output = scratch / "output"
    steps = args.checkpoints * STEPS_PER_CHECKPOINT
    shards = args.input_dir or make_shards(scratch, SEQ_LENGTH)
    flags = (
        "--max-steps",
        10 * steps,
        "--num-steps-per-checkpoint",
        STEPS_PER_CHECKPOINT,
        "--device",
        args.device,
    )
    command = pretraining_flags(
        args.model, shards, output, SEQ_LENGTH, 1, "--report-file", "none", *flags
    )
    folder = output / config_file(args.model).stem / "phase1"
    new = [*command, "--output-dir", str(scratch / "elsewhere")]
    resumed = [*command, "--from-checkpoint", str(folder), "--last-step-of-checkpoint", "auto"]
    launches: dict[str, list[dict]] = {"new": [], "resumed": []}
    with progress_bar(2 * args.launches, "launches", "run") as bar:
        # The first one writes the checkpoints that the others resume from.
        first, saves = launch([*command, "--steps-this-run", str(steps)], END, scratch)
        for number in range(args.launches):
            launches["new"].append(launch(new, FIRST_BATCH, scratch)[0] if number else first)
            bar.update()
            launches["resumed"].append(launch(resumed, FIRST_BATCH, scratch)[0])
            bar.update()
    return {
        "seconds_to_first_step": {
            kind: {stage: quartiles([run[stage] for run in runs]) for stage in runs[0]}
            for kind, runs in launches.items()
        },
        "checkpoint": {
            "bytes": sum(path.stat().st_size for path in (folder / str(steps)).iterdir()),
            "stopped_seconds": [save["stopped"] for save in saves],
            "durable_seconds": [save["durable"] for save in saves],
        },
    }


def main(argv: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__, "large")
    add = parser.add_argument
    add(
        "--input-dir",
        type=Path,
        help=f"folder of shards of length {SEQ_LENGTH}; by default the sample corpus",
    )
    add("--launches", type=positive_int, default=3, help="launches of each kind")
    add("--checkpoints", type=positive_int, default=3, help="checkpoints to write")
    args = parser.parse_args(argv)
    device = select_device(args.device)
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(args, Path(scratch))
    for kind, stages in figures["seconds_to_first_step"].items():
        parts = ", ".join(f"{stage} {seconds['median']:.1f}" for stage, seconds in stages.items())
        print_line(f"launch to the first step, {kind} run: {parts} s")
    saved = figures["checkpoint"]
    stopped, durable = (
        ", ".join(f"{s:.2f}" for s in saved[f"{kind}_seconds"]) for kind in ("stopped", "durable")
    )
    size = saved["bytes"] / 1e9
    print_line(
        f"checkpoint of {size:.2f} GB: training stopped for {stopped} s; durable after {durable} s"
    )
    result = {"arguments": args.as_dict(), **figures}
    write_result(args.output, f"startup_and_checkpoints-{device.type}-{args.model}", device, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run-with-marks"]:
        run_main(lambda: run_with_marks(*sys.argv[2:]))
    run_main(main)
