#!/usr/bin/env python3
"""Accuracy of the quickstart's last step, five seeds: from its pre-trained model, and from random
weights.

    python3 benchmarks/quickstart_scores.py quickstart/results

A folder is the RESULTS_DIR of the quickstart, or of its pre-training with another optimizer, by
which the model is named in the result file.
"""

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.quality_runs import run_program
from benchmarks.common.results import CPU, ROOT, benchmark_parser, config_file, write_result
from bert_recipe.checkpoint.record import read_record
from bert_recipe.utils.command_line import REQUIRED, Flag
from bert_recipe.utils.errors import run_main
from bert_recipe.utils.json_files import read_json
from bert_recipe.utils.progress import print_line

SEEDS = range(42, 47)


def accuracies(*start: str) -> list[float]:
    """By seed. start: flags of the weights."""
    with tempfile.TemporaryDirectory() as folder:
        run_program(
            "run_glue.py",
            *("--train-file", str(ROOT / "data/sample/authors.csv"), "--eval-fraction", "0.2"),
            *("--text-column", "text", "--label-column", "author", "--do-train", "--do-eval"),
            *("--num-seeds", str(len(SEEDS)), "--output-dir", folder, *start),
        )
        (run,) = Path(folder).glob("*/classification")
        scores = [read_json(run / f"seed-{seed}" / "scores.json", "scores") for seed in SEEDS]
    return [score["accuracy"] for score in scores]


def main() -> None:
    args = benchmark_parser(
        __doc__, Flag("results", Path, REQUIRED, "folders", options={"nargs": "+"})
    ).parse_args()
    torch.set_num_threads(1)
    config = str(config_file("tiny"))
    vocab = str(ROOT / "vocab" / "bert-base-uncased-vocab.txt")
    starts = {"random weights": ("--config-file", config, "--vocab-file", vocab)}
    for results in args.results:
        (phase,) = results.glob("*/phase2")
        optimizer = read_record(phase).arguments["optimizer"]
        starts[f"pre-trained with {optimizer}"] = ("--init-checkpoint", str(phase))
    scores = {}
    for name, start in starts.items():
        scores[name] = accuracies(*start)
        mean, spread = torch.std_mean(torch.tensor(scores[name]))[::-1]
        print_line(f"{name}: {mean:.1%} +- {spread:.1%}")
    write_result(args.output, "quickstart_scores", CPU, {"accuracy": scores})


if __name__ == "__main__":
    run_main(main)
