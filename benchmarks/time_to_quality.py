#!/usr/bin/env python3
"""Held-out masked-token loss of encoders pre-trained from raw text, by number of updates.

    python3 benchmarks/time_to_quality.py --books FOLDER --work FOLDER \\
        --contestants "ModernBERT, NorMuon" --learning-rates 5.6e-3 --budgets 950 --seeds 1 2 3

Contestants: transformers' ModernBERT with AdamW or with torch's Muon, the peers that a user would
pick, and this recipe's with AdamW or NorMuon. transformers trains as in its example of masked
language modelling: text packed to blocks of 128 tokens, new masks in every batch, but computes
logits for masked tokens only (`sparse_prediction`). All have the same text, vocabulary, model, 30%
masked tokens, thread and allocator, and batches of 32 blocks with a rate that warms up, stays and
decays. Every budget is a run of its own with a whole schedule. The rates of the shown results were
searched on both sides by factors of the root of two, with seed 1.

One scorer for all: transformers loads each run's last checkpoint and predicts the same masked
tokens (15%) of books that no contestant has seen. The time of an update is measured by
update_time.py, with the contestants in turns and nothing beside them. Runs whose results are in the
result file are not repeated: rerun the command. Needs transformers.
"""

import datetime
import itertools
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.quality_runs import (
    BATCH,
    CONTESTANTS,
    HELD_OUT,
    LAYERS,
    LENGTH,
    MASK_RATE,
    SCHEDULE,
    Plan,
    modern_config,
    prepare,
    score,
    train,
)
from benchmarks.common.results import RESULTS, Runs, benchmark_parser
from bert_recipe.utils.command_line import REQUIRED, Flag, positive_float, positive_int
from bert_recipe.utils.errors import run_main
from bert_recipe.utils.progress import print_line

FLAGS = (
    Flag("--books", Path, REQUIRED, f"folder of .txt books, {', '.join(HELD_OUT)} among them"),
    Flag("--work", Path, REQUIRED, "folder for data, which are kept, and runs"),
    Flag(
        "--contestants",
        tuple(CONTESTANTS),
        tuple(CONTESTANTS),
        "which to run",
        options={"nargs": "+"},
    ),
    Flag(
        "--budgets",
        positive_int,
        REQUIRED,
        f"updates of {BATCH} blocks of {LENGTH} tokens",
        options={"nargs": "+"},
    ),
    Flag("--layers", positive_int, LAYERS, "number of layers, of width 64 times the number"),
    Flag("--learning-rates", positive_float, REQUIRED, "peak rates to run", options={"nargs": "+"}),
    Flag(
        "--seeds",
        positive_int,
        (1, 2, 3),
        "seeds of the runs of each contestant, rate and budget",
        options={"nargs": "+"},
    ),
)


def table(runs: Runs, names: Sequence[str], rates: Sequence[float]) -> None:
    """Prints mean and deviation of the losses."""
    for name, rate in itertools.product(names, rates):
        runs_at_rate = runs.matching({"contestant": name, "learning_rate": rate})
        print_line(f"{name}: {rate:g}")
        for updates in sorted({run["updates"] for run in runs_at_rate}):
            losses = [run["loss"] for run in runs_at_rate if run["updates"] == updates]
            deviation = f" +- {np.std(losses, ddof=1):.3f}" if len(losses) > 1 else ""
            print_line(
                f"  {updates:5} updates: {np.mean(losses):.3f}{deviation} ({len(losses)} seeds)"
            )


def main() -> None:
    args = benchmark_parser(__doc__, *FLAGS).parse_args()
    torch.set_num_threads(1)
    path = args.output or RESULTS / f"time_to_quality-{datetime.date.today()}.json"
    config = modern_config(args.layers)
    settings = {"held_out": HELD_OUT, "config": config, "schedule": SCHEDULE}
    runs = Runs(path, settings | {"mask_rate": MASK_RATE})
    data = prepare(args.books, args.work)

    def measure(plan: Plan) -> dict[str, Any]:
        folder = data.work / "run"
        settings = train(plan, data, folder)
        (checkpoint,) = [*folder.glob(f"*/*/{plan.updates}"), *folder.glob("checkpoint")]
        result = settings | score(checkpoint, data)
        shutil.rmtree(folder)
        return result

    for seed, updates in itertools.product(args.seeds, sorted(args.budgets)):
        for name, rate in itertools.product(args.contestants, args.learning_rates):
            plan = Plan(CONTESTANTS[name], config, rate, updates, seed)
            key = {"contestant": name, "learning_rate": rate, "updates": updates, "seed": seed}
            result = runs.get(key, partial(measure, plan))
            print_line(f"{', '.join(map(str, key.values()))}: loss {result['loss']:.3f}")
    table(runs, args.contestants, args.learning_rates)
    print_line(f"written to {path}")


if __name__ == "__main__":
    run_main(main)
