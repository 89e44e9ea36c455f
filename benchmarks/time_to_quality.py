#!/usr/bin/env python3
"""Held-out masked-token loss of encoders pre-trained from raw text, by number of updates.

    python3 benchmarks/time_to_quality.py --books FOLDER --work FOLDER

Contestants: transformers' ModernBERT with AdamW or with torch's Muon, the peers that a user would
pick, and this recipe's with AdamW, Muon or NorMuon; for context, transformers' BERT with AdamW and
this recipe's BERT with LAMB. transformers trains as in its example of masked language modelling:
text packed to blocks of 128 tokens, new masks in every batch, but computes logits for masked tokens
only where its class can (ModernBERT's `sparse_prediction`). All have the same text, vocabulary,
tokens, number of parameters (within 5%), thread and allocator. --amp trains all in bfloat16.

Every contestant gets the same search, at each of the `--search-budgets`: learning rates by factors
of two, warmup with linear decay and warmup-stable-decay, mask rates 0.15 and 0.3, one value changed
at a time until every change is worse. The best of the largest search budget is used. Every budget
is a run of its own with a whole schedule. --learning-rates makes the named runs instead.

One scorer for all: transformers loads each run's last checkpoint and predicts the same masked
tokens (15%) of books that no contestant has seen. CPU time of a run's process, with its start and
its checkpoints, is recorded, but other work on the machine changes it: the time of an update is
measured by update_time.py, with the contestants in turns and nothing beside them. Runs whose
results are in the result file are not repeated, and an interrupted one continues from its last
saved state: rerun the command. Needs transformers.
"""

import datetime
import itertools
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.quality_runs import (
    CONTESTANTS,
    HELD_OUT,
    LAYERS,
    LENGTH,
    MASK_RATES,
    SCHEDULES,
    Contestant,
    Data,
    Setting,
    prepare,
    score,
    train,
)
from benchmarks.common.results import RESULTS, Runs, benchmark_parser
from bert_recipe.utils.command_line import positive_float, positive_int
from bert_recipe.utils.errors import UserError, run_main
from bert_recipe.utils.progress import print_line

PARAMETER_TOLERANCE = 0.05
SEARCHED = Setting("warmup_stable_decay", 0.3, 4e-3)  # what all searches so far ended with


class Campaign(NamedTuple):
    """Runs, found in and added to the result file."""

    data: Data
    runs: Runs
    amp: bool
    contestants: dict[str, Contestant]

    def loss(self, name: str, setting: Setting, updates: int, seed: int) -> float:
        """The held-out loss of a run, which is made if the result file lacks it."""
        key = {"contestant": name, **setting._asdict(), "updates": updates, "seed": seed}
        contestant = self.contestants[name]
        title = f"{name}, {', '.join(map(str, setting))}, {updates} updates, seed {seed}"
        layers = contestant.config["num_hidden_layers"]
        if layers != LAYERS:
            title = f"{layers} layers, {title}"
        folder = self.data.work / "runs" / title.replace(", ", "-").replace(" ", "_")

        def measure() -> dict[str, Any]:
            seconds = train(contestant, setting, updates, seed, self.data, folder)
            checkpoint = next(iter([*folder.glob(f"*/*/{updates}"), folder / "checkpoint"]))
            found = seconds | score(checkpoint, self.data)
            cost = f"{found['cpu_seconds']:.0f} CPU seconds, {found['parameters']:,} parameters"
            print_line(f"{title}: loss {found['loss']:.3f}, {cost}")
            return found

        found = self.runs.get(key, measure)
        shutil.rmtree(folder, ignore_errors=True)
        return found["loss"]

    def search(self, name: str, updates: int) -> Setting:
        """The best setting of a contestant after `updates`, with seed 0: coordinate descent,
        until each setting that differs in one value is worse.
        """
        best = Setting("linear", 0.3, self.contestants[name].learning_rate, self.amp)
        while True:
            rates = [
                best._replace(learning_rate=best.learning_rate * factor) for factor in (0.5, 2)
            ]
            schedules = [best._replace(schedule=schedule) for schedule in SCHEDULES]
            mask_rates = [best._replace(mask_rate=rate) for rate in MASK_RATES]
            for settings in (rates, schedules, mask_rates):
                better = min(
                    (best, *settings), key=lambda setting: self.loss(name, setting, updates, 0)
                )
                if better != best:
                    best = better
                    break
            else:
                return best

    def points(self, name: str, setting: Setting) -> dict[int, np.ndarray]:
        """CPU seconds and loss of the measured runs, without those of the search, by number of
        updates.
        """
        found = [
            run for run in self.runs.found({"contestant": name, **setting._asdict()}) if run["seed"]
        ]
        return {
            updates: np.array(
                [(run["cpu_seconds"], run["loss"]) for run in found if run["updates"] == updates]
            )
            for updates in sorted({run["updates"] for run in found})
        }

    def table(self, chosen: list[tuple[str, Setting]]) -> None:
        """Prints mean and deviation of the losses, and the median of the CPU seconds."""
        for name, setting in chosen:
            print_line(f"{name}: {', '.join(map(str, setting))}")
            for updates, points in self.points(name, setting).items():
                seconds = np.median(points[:, 0])
                loss = points[:, 1]
                deviation = f" +- {np.std(loss, ddof=1):.3f}" if len(loss) > 1 else ""
                print_line(
                    f"  {updates:5} updates: {loss.mean():.3f}{deviation} ({seconds:.0f} s, "
                    f"{len(loss)} seeds)"
                )


def main() -> None:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    held_out = ", ".join(HELD_OUT)
    add("--books", type=Path, required=True, help=f"folder of .txt books, {held_out} among them")
    add("--work", type=Path, required=True, help="folder for data and runs; kept, to continue")
    add(
        "--contestants",
        nargs="+",
        choices=tuple(CONTESTANTS),
        default=tuple(CONTESTANTS),
        help="which to run",
    )
    add(
        "--budgets",
        type=positive_int,
        nargs="+",
        default=(250, 750, 2750),
        help=f"updates of a contestant's batch of blocks of {LENGTH} tokens",
    )
    add(
        "--layers",
        type=positive_int,
        default=LAYERS,
        help="number of layers, of width 64 times the number",
    )
    add("--amp", action="store_true", help="train in bfloat16")
    add(
        "--search-budgets",
        type=positive_int,
        nargs="+",
        default=(75, 250),
        help="updates of the search's runs",
    )
    add(
        "--learning-rates",
        type=positive_float,
        nargs="+",
        help="peak rates to run, with warmup-stable-decay and 30%% masked, instead of a search",
    )
    add(
        "--seeds",
        type=positive_int,
        nargs="+",
        default=(1, 2, 3),
        help="seeds of the runs of each contestant and budget",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.output or RESULTS / f"time_to_quality-{datetime.date.today()}.json"
    contestants = {name: c.with_layers(args.layers) for name, c in CONTESTANTS.items()}
    settings = {
        "held_out": HELD_OUT,
        "contestants": {name: c._asdict() for name, c in contestants.items()},
    }
    data = prepare(args.books, args.work)
    runs = Runs(path, settings)
    campaign = Campaign(data, runs, args.amp, contestants)
    chosen = []
    for name in args.contestants:
        if args.learning_rates:
            chosen += [(name, SEARCHED._replace(learning_rate=r)) for r in args.learning_rates]
        else:
            found = [campaign.search(name, updates) for updates in sorted(args.search_budgets)]
            chosen.append((name, found[-1]))
    chosen = [(name, setting._replace(amp=args.amp)) for name, setting in chosen]
    for seed, updates in itertools.product(args.seeds, sorted(args.budgets)):
        for name, setting in chosen:
            campaign.loss(name, setting, updates, seed)
    sizes = {run["contestant"]: run["parameters"] for run in campaign.runs.found({})}
    if max(sizes.values()) > (1 + PARAMETER_TOLERANCE) * min(sizes.values()):
        raise UserError(f"the contestants' numbers of parameters differ too much: {sizes}")
    campaign.table(chosen)
    print_line(f"written to {path}")


if __name__ == "__main__":
    run_main(main)
