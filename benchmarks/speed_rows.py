#!/usr/bin/env python3
"""Measures the ratios of docs/performance.md on this machine: pre-training, fine-tuning, inference.

    python3 benchmarks/speed_rows.py --machine avx2 --model-folder all-MiniLM-L6-v2 --data FOLDER
    python3 benchmarks/speed_rows.py ... --bf16 --list

The folder has GLUE's CoLA, MRPC, SST-2 and STS-B (train.tsv, dev.tsv) and squad (train-v1.1.json,
dev-v1.1.json); their first rows are taken. Each row of the page is a command, whose result file
begins with the program and the machine; --list prints them. Files that are there are kept: rerun
the command to continue. It takes about an hour, with nothing else on the machine.
"""

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.results import RESULTS, ROOT
from bert_recipe.utils.command_line import REQUIRED, ArgumentParser, Arguments, Flag
from bert_recipe.utils.errors import UserError, run_main
from bert_recipe.utils.json_files import read_json, write_json
from bert_recipe.utils.progress import print_line

PARAGRAPHS_OF_ARTICLE, QUESTIONS_OF_PARAGRAPH = 4, 3
SQUAD_QUESTIONS = {"train": 320, "dev": 108}
DEV_ROWS = 240
# Of each task: rows of training (30 to 50 updates), and seeds.
GLUE = {"MRPC": (480, 5), "CoLA": (800, 5), "SST-2": (800, 3), "STS-B": (640, 3)}


class Row(NamedTuple):
    """name: of its result file, after the machine.
    words: the program and its flags.
    """

    name: str
    threads: int
    words: list[str]


FLAGS = (
    Flag("--machine", str, REQUIRED, "its name in the result files, such as avx2 or amx"),
    Flag("--model-folder", Path, REQUIRED, "folder of all-MiniLM-L6-v2"),
    Flag("--data", Path, REQUIRED, "folder of the tasks' folders"),
    Flag("--bf16", bool, False, "the rows of bfloat16 instead of float32"),
    Flag("--output-dir", Path, RESULTS, "folder of the result files"),
    Flag("--work-dir", Path, Path("speed_rows"), "folder of the tasks' first rows"),
    Flag("--list", bool, False, "print the commands only"),
)


def parse_arguments(argv: list[str] | None) -> Arguments:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", FLAGS)
    return parser.parse_args(argv)


def step_rows(bf16: bool) -> list[Row]:
    amp = ["--amp"] if bf16 else []
    flags = {
        "base": ["--steps", "1", *amp],
        "mini": amp or ["--compile-peers"],
        "modernbert-mini": amp,
    }
    common = ["pretraining_step.py", "--rounds", "7", "--model"]
    return [
        Row(f"pretraining_step-{model}", 2, [*common, model, *more])
        for model, more in flags.items()
    ]


def fine_tuning_rows(bf16: bool, model: Path, work: Path) -> list[Row]:
    tasks = {name.lower(): (name, seeds, 128) for name, (_, seeds) in GLUE.items()}
    tasks |= {"squad": ("squad", 1, 384), "squad-embedding": ("squad", 1, 128)}
    common = ["--device", "cpu", "--epochs", "1", "--model-folder", str(model)]
    common += ["--amp", "--peer-attention", "eager"] if bf16 else []
    rows = []
    for task, (folder, seeds, length) in tasks.items():
        words = ["compare_fine_tuning.py", "--task-name", task, "--data-dir", str(work / folder)]
        words += ["--num-seeds", str(seeds), "--max-seq-length", str(length), *common]
        rows.append(Row(f"fine_tuning-{task}", 1, words))
    return rows


def inference_rows(bf16: bool, model: Path, work: Path) -> list[Row]:
    rows = []
    sizes = {("questions", 32): 192, ("paragraphs", 32): 256, ("questions", 1): 192}
    for task, ((texts, batch), count) in itertools.product(("embedding", "classes"), sizes.items()):
        words = ["inference_speed.py", "--init-checkpoint", str(model), "--task", task]
        words += ["--input", str(work / f"{texts}.jsonl"), "--texts", str(count)]
        words += ["--batch-size", str(batch)]
        words += ["--onnx"] if task == "embedding" and batch > 1 else []
        words += ["--amp"] if bf16 else []
        rows.append(Row(f"inference_speed-{task}-{texts}-{batch}", 1, words))
    return rows


def make_data(data: Path, work: Path) -> None:
    """The first rows of each task."""
    for name, (train_rows, _) in GLUE.items():
        for split, count in {"train": train_rows, "dev": DEV_ROWS}.items():
            with (data / name / f"{split}.tsv").open(encoding="utf-8") as file:
                lines = list(itertools.islice(file, count + (name != "CoLA")))  # a header
            (work / name).mkdir(parents=True, exist_ok=True)
            (work / name / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
    (work / "squad").mkdir(parents=True, exist_ok=True)
    for split, count in SQUAD_QUESTIONS.items():
        squad = read_json(data / "squad" / f"{split}-v1.1.json", "SQuAD's file")
        write_json(work / "squad" / f"{split}-v1.1.json", first_questions(squad, count))
    paragraphs = [paragraph for article in squad["data"] for paragraph in article["paragraphs"]]
    questions = [question["question"] for paragraph in paragraphs for question in paragraph["qas"]]
    texts = {
        "questions": questions,
        "paragraphs": [paragraph["context"] for paragraph in paragraphs],
    }
    for name, rows in texts.items():
        lines = [json.dumps({"text": text}) + "\n" for text in rows]
        (work / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def first_questions(squad: dict, count: int) -> dict:
    """A few of each article, so that many articles have some."""
    articles = []
    for article in squad["data"]:
        paragraphs = []
        for paragraph in article["paragraphs"][:PARAGRAPHS_OF_ARTICLE]:
            questions = paragraph["qas"][: min(QUESTIONS_OF_PARAGRAPH, count)]
            count -= len(questions)
            if questions:
                paragraphs.append({**paragraph, "qas": questions})
        if paragraphs:
            articles.append({**article, "paragraphs": paragraphs})
    return {**squad, "data": articles}


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    model = args.model_folder
    rows = step_rows(args.bf16)
    rows += fine_tuning_rows(args.bf16, model, args.work_dir)
    rows += inference_rows(args.bf16, model, args.work_dir)
    if not args.list:
        make_data(args.data, args.work_dir)
    for row in rows:
        program, _, work = row.name.partition("-")
        precision = "bf16" if args.bf16 else "fp32"
        output = args.output_dir / f"{program}-{args.machine}-{work}-{precision}.json"
        words = ["python3", f"benchmarks/{row.words[0]}", *row.words[1:], "--output", str(output)]
        print_line(f"OMP_NUM_THREADS={row.threads} {shlex.join(words)}")
        # Fine-tuning goes on after the last run of its file.
        if args.list or (output.is_file() and program != "fine_tuning"):
            continue
        command = [sys.executable, str(ROOT / words[1]), *words[2:]]
        environment = os.environ | {"OMP_NUM_THREADS": str(row.threads)}
        if subprocess.run(command, check=False, env=environment).returncode:
            raise UserError(f"{words[1]} failed: its own message is above")


if __name__ == "__main__":
    run_main(main)
