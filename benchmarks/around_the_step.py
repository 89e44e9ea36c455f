#!/usr/bin/env python3
"""What pre-training takes besides its steps: seconds from launch to the first step, fresh and resumed, and seconds for
which a checkpoint stops training.

    python3 benchmarks/around_the_step.py --model large
    python3 benchmarks/around_the_step.py --model large --device cuda --scratch-dir /mnt/fast

Runs run_pretraining.py in processes of its own, on shards of the sample corpus, with marks at the places of interest.
A checkpoint is copied, which training waits for (`stopped`), and then written, hashed, synced and renamed in the
background (`durable`, from the same start; no step runs meanwhile here). Whoever resumes reads and verifies all of it
first.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peers import median_and_spread, surroundings, write_result
from utils import command_line
from utils.errors import UserError, run_main
from utils.progress import print_line, progress_bar

MODELS = {"tiny": "bert-tiny-uncased", "base": "bert-base-uncased", "large": "bert-large-uncased"}
STEPS_PER_CHECKPOINT = 4


def parse_arguments(argv=None) -> command_line.Arguments:
    parser = command_line.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="large", help="architecture")
    parser.add_argument("--input-dir", type=Path, help="folder of shards of length 128; by default the sample corpus")
    parser.add_argument("--batch-size", type=command_line.positive_int, default=1, help="sequences a step")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where")
    parser.add_argument("--launches", type=command_line.positive_int, default=3, help="of each kind")
    parser.add_argument("--checkpoints", type=command_line.positive_int, default=3, help="to write")
    parser.add_argument("--scratch-dir", type=Path, help="where checkpoints go; by default the system's")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


def run_with_marks(marks_file: str, stop_at_first_step: bool, argv: list[str]) -> None:
    """Runs the program in this process and writes a JSON line for each mark that it passes."""

    def mark(name: str, **values: float) -> None:
        with Path(marks_file).open("a", encoding="utf-8") as marks:
            marks.write(json.dumps({"mark": name, "time": time.time(), **values}) + "\n")

    import run_pretraining
    from trainer import Trainer

    mark("imported")
    make_model, training_step, save = run_pretraining.BertForPreTraining, Trainer.training_step, Trainer.save

    def marked_model(*args, **kwargs):
        model = make_model(*args, **kwargs)
        mark("model made")
        return model

    def marked_step(self, *args):
        mark("step")
        if stop_at_first_step:
            raise UserError("stopped at the first step, as the benchmark wants it")
        return training_step(self, *args)

    def marked_save(self):
        started = time.perf_counter()
        save(self)
        stopped = time.perf_counter() - started
        self.writer.wait()
        mark("saved", stopped=stopped, durable=time.perf_counter() - started)

    run_pretraining.BertForPreTraining = marked_model
    Trainer.training_step = marked_step
    if not stop_at_first_step:
        Trainer.save = marked_save
    run_pretraining.main(argv)


def marks_of_a_run(command: list[str], stop_at_first_step: bool, scratch: Path) -> tuple[float, list[dict]]:
    """When the process was started, and the marks that it passed."""
    marks_file = scratch / "marks.jsonl"
    marks_file.unlink(missing_ok=True)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks.around_the_step import run_with_marks; "
    code += f"run_with_marks({str(marks_file)!r}, {stop_at_first_step}, sys.argv[1:])"
    started = time.time()
    result = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    marks = [json.loads(line) for line in marks_file.read_text(encoding="utf-8").splitlines()]
    if not any(mark["mark"] == "step" for mark in marks) or not (stop_at_first_step or result.returncode == 0):
        raise UserError(f"run_pretraining.py failed: {result.stderr[-2000:]}")
    return started, marks


def seconds_of_launch(started: float, marks: list[dict]) -> dict[str, float]:
    times = {}
    for mark in marks:
        times.setdefault(mark["mark"], mark["time"])
    return {
        "imports": times["imported"] - started,
        "model": times["model made"] - times["imported"],
        "optimizer, state, data": times["step"] - times["model made"],
        "in all": times["step"] - started,
    }


def measure(args: command_line.Arguments, scratch: Path) -> dict:
    from benchmarks.pretraining_step import make_shards

    shards = args.input_dir or make_shards(scratch, 128)
    output = scratch / "output"
    steps = args.checkpoints * STEPS_PER_CHECKPOINT
    options = {
        "--input-dir": shards,
        "--output-dir": output,
        "--bert-model": MODELS[args.model] if args.model != "tiny" else "custom",
        "--config-file": ROOT / "bert_configs" / f"{MODELS[args.model]}.json",
        "--vocab-file": ROOT / "vocab" / "bert-base-uncased-vocab.txt",
        "--max-steps": 10 * steps,
        "--batch-size": args.batch_size,
        "--max-seq-length": 128,
        "--max-predictions-per-seq": 20,
        "--num-steps-per-checkpoint": STEPS_PER_CHECKPOINT,
        "--device": args.device,
        "--report-file": "none",
    }
    command = [str(word) for option in options.items() for word in option]
    folder = output / options["--bert-model"] / "phase1"
    resuming = ["--from-checkpoint", str(folder), "--last-step-of-checkpoint", "auto"]
    launches: dict[str, list[dict]] = {"fresh": [], "resumed": []}
    with progress_bar(2 * args.launches, "launches", "run") as bar:
        for number in range(args.launches):
            if number == 0:  # goes on, and leaves the checkpoints that the others resume from
                started, marks = marks_of_a_run([*command, "--steps-this-run", str(steps)], False, scratch)
                saves = [mark for mark in marks if mark["mark"] == "saved"]
            else:
                elsewhere = [*command, "--output-dir", str(scratch / "elsewhere")]
                started, marks = marks_of_a_run(elsewhere, True, scratch)
            launches["fresh"].append(seconds_of_launch(started, marks))
            bar.update()
            started, marks = marks_of_a_run([*command, *resuming], True, scratch)
            launches["resumed"].append(seconds_of_launch(started, marks))
            bar.update()
    return {
        "seconds_to_first_step": {
            kind: {stage: median_and_spread([run[stage] for run in runs]) for stage in runs[0]}
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
    if args.scratch_dir is not None:
        args.scratch_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.scratch_dir) as scratch:
        figures = measure(args, Path(scratch))
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    result = {"surroundings": surroundings(device), "arguments": args.as_dict(), **figures}
    path = write_result(args.output, f"around_the_step-{device.type}-{args.model}", result)
    for kind, stages in figures["seconds_to_first_step"].items():
        parts = ", ".join(f"{stage} {seconds['median']:.1f}" for stage, seconds in stages.items())
        print_line(f"launch to the first step, {kind}: {parts} s")
    saved = figures["checkpoint"]
    stopped, durable = (", ".join(f"{s:.2f}" for s in saved[f"{kind}_seconds"]) for kind in ("stopped", "durable"))
    print_line(
        f"checkpoint of {saved['bytes'] / 1e9:.2f} GB: training stopped for {stopped} s; durable after {durable} s"
    )
    print_line(f"written to {path}")
    return 0


if __name__ == "__main__":
    run_main(main)
