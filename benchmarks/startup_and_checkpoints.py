#!/usr/bin/env python3
"""Time from launch to the first step, for a new and a resumed run, and time that a checkpoint takes.

    python3 benchmarks/startup_and_checkpoints.py --model large
    python3 benchmarks/startup_and_checkpoints.py --model large --device cuda --scratch-dir /mnt/fast

Runs run_pretraining.py on shards of the sample corpus, and records the time at the start of each stage. Training waits
while a checkpoint is copied (`stopped`); then it is written, hashed, synced and renamed in the background (`durable`,
from the same start; no step runs meanwhile here). A resumed run reads and verifies the whole checkpoint first.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common.results import quartiles, write_result
from benchmarks.common.shards import PREDICTIONS, make_shards
from benchmarks.common.training import MODELS
from utils.command_line import ArgumentParser, Arguments, positive_int
from utils.device import select_device
from utils.errors import UserError, run_main
from utils.progress import print_line, progress_bar

SEQ_LENGTH = 128
STEPS_PER_CHECKPOINT = 4


def parse_arguments(argv=None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="large", help="architecture")
    add("--input-dir", type=Path, help=f"folder of shards of length {SEQ_LENGTH}; by default the sample corpus")
    add("--batch-size", type=positive_int, default=1, help="sequences per step")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="device")
    add("--launches", type=positive_int, default=3, help="launches of each kind")
    add("--checkpoints", type=positive_int, default=3, help="checkpoints to write")
    add("--scratch-dir", type=Path, help="folder for checkpoints; by default the system's temporary folder")
    add("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


def run_with_marks(marks_file: str, stop_at_first_step: bool, argv: list[str]) -> None:
    """Runs the program in this process and writes a JSON line at the start of each stage."""

    def mark(name: str, **values: float) -> None:
        with Path(marks_file).open("a", encoding="utf-8") as marks:
            marks.write(json.dumps({"mark": name, "time": time.time(), **values}) + "\n")

    import run_pretraining
    from run_setup import TrainingPlan

    mark("imported")
    build_trainer = TrainingPlan.build_trainer

    def build_marked_trainer(*args):
        mark("data opened")
        trainer = build_trainer(*args)
        training_step, save = trainer.training_step, trainer.save

        def marked_step(*args):
            mark("step")
            if stop_at_first_step:
                raise UserError("the benchmark stops this run at its first step")
            return training_step(*args)

        def marked_save():
            started = time.perf_counter()
            save()
            stopped = time.perf_counter() - started
            trainer.writer.wait()
            mark("saved", stopped=stopped, durable=time.perf_counter() - started)

        trainer.training_step, trainer.save = marked_step, marked_save
        mark("trainer built")
        return trainer

    TrainingPlan.build_trainer = build_marked_trainer
    run_pretraining.main(argv)


def run_marked(command: list[str], stop_at_first_step: bool, scratch: Path) -> tuple[float, list[dict]]:
    """When the process was started, and its marks."""
    marks_file = scratch / "marks.jsonl"
    marks_file.unlink(missing_ok=True)
    module = "benchmarks.startup_and_checkpoints"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {module} import run_with_marks; "
    code += f"run_with_marks({str(marks_file)!r}, {stop_at_first_step}, sys.argv[1:])"
    started = time.time()
    result = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    marks = [json.loads(line) for line in marks_file.read_text(encoding="utf-8").splitlines()]
    if not any(mark["mark"] == "step" for mark in marks) or not (stop_at_first_step or result.returncode == 0):
        raise UserError(f"run_pretraining.py failed: {result.stderr[-2000:]}")
    return started, marks


def launch_seconds(started: float, marks: list[dict]) -> dict[str, float]:
    times = {mark["mark"]: mark["time"] for mark in reversed(marks)}  # the first of each name
    return {
        "imports": times["imported"] - started,
        "device, data": times["data opened"] - times["imported"],
        "model, optimizer, state": times["trainer built"] - times["data opened"],
        "first batch": times["step"] - times["trainer built"],
        "total": times["step"] - started,
    }


def measure(args: Arguments, scratch: Path) -> dict:
    output = scratch / "output"
    steps = args.checkpoints * STEPS_PER_CHECKPOINT
    options = {
        "--input-dir": args.input_dir or make_shards(scratch, SEQ_LENGTH),
        "--output-dir": output,
        "--bert-model": "custom",
        "--config-file": ROOT / "bert_configs" / f"{MODELS[args.model]}.json",
        "--vocab-file": ROOT / "vocab" / "bert-base-uncased-vocab.txt",
        "--max-steps": 10 * steps,
        "--batch-size": args.batch_size,
        "--max-seq-length": SEQ_LENGTH,
        "--max-predictions-per-seq": PREDICTIONS[SEQ_LENGTH],
        "--num-steps-per-checkpoint": STEPS_PER_CHECKPOINT,
        "--device": args.device,
        "--report-file": "none",
    }
    command = [str(word) for option in options.items() for word in option]
    folder = output / options["--bert-model"] / "phase1"
    resume = ["--from-checkpoint", str(folder), "--last-step-of-checkpoint", "auto"]
    launches: dict[str, list[dict]] = {"new": [], "resumed": []}
    with progress_bar(2 * args.launches, "launches", "run") as bar:
        for number in range(args.launches):
            if number == 0:  # writes the checkpoints that the others resume from
                started, marks = run_marked([*command, "--steps-this-run", str(steps)], False, scratch)
                saves = [mark for mark in marks if mark["mark"] == "saved"]
            else:
                started, marks = run_marked([*command, "--output-dir", str(scratch / "elsewhere")], True, scratch)
            launches["new"].append(launch_seconds(started, marks))
            bar.update()
            started, marks = run_marked([*command, *resume], True, scratch)
            launches["resumed"].append(launch_seconds(started, marks))
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


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    device = select_device(args.device)
    if args.scratch_dir is not None:
        args.scratch_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.scratch_dir) as scratch:
        figures = measure(args, Path(scratch))
    result = {"arguments": args.as_dict(), **figures}
    path = write_result(args.output, f"startup_and_checkpoints-{device.type}-{args.model}", device, result)
    for kind, stages in figures["seconds_to_first_step"].items():
        parts = ", ".join(f"{stage} {seconds['median']:.1f}" for stage, seconds in stages.items())
        print_line(f"launch to the first step, {kind} run: {parts} s")
    saved = figures["checkpoint"]
    stopped, durable = (", ".join(f"{s:.2f}" for s in saved[f"{kind}_seconds"]) for kind in ("stopped", "durable"))
    print_line(
        f"checkpoint of {saved['bytes'] / 1e9:.2f} GB: training stopped for {stopped} s; durable after {durable} s"
    )
    print_line(f"written to {path}")
    return 0


if __name__ == "__main__":
    run_main(main)
