#!/usr/bin/env python3
"""Held-out masked-token loss of a first model from raw text, by recipe, at equal CPU time.

    python3 benchmarks/first_model.py --books FOLDER --work FOLDER --seconds 120 --seeds 1 2 3

Recipes: docs/pretraining.md's command as it was (BERT-mini, LAMB, next sentences), the same model
in transformers' Trainer as its example run_mlm.py has it (AdamW, 5e-5, batches of 8), and
ModernBERTs with AdamW or NorMuon. All have the same text, trained vocabulary, length of 128,
bfloat16 and one thread. A recipe makes as many updates as fit into the seconds, by the CPU time of
an update measured before, and has its whole schedule in them.

One scorer for all: transformers loads the last checkpoint and predicts the same masked tokens (15%)
of books that no recipe has seen. Runs whose results are in the result file are not repeated: rerun
the command. Needs transformers.
"""

import datetime
import itertools
import resource
import shutil
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.quality_runs import (
    HELD_OUT,
    LENGTH,
    VOCABULARY,
    Data,
    prepare,
    run_program,
    score,
)
from benchmarks.common.results import RESULTS, Runs, benchmark_parser, config_file
from benchmarks.common.transformers_training import silence_imports
from benchmarks.common.worker import call_in_worker
from bert_recipe.utils.command_line import REQUIRED, Flag, positive_float, positive_int
from bert_recipe.utils.errors import run_main
from bert_recipe.utils.json_files import read_json, write_json
from bert_recipe.utils.progress import print_line

MAX_MASKED = 20  # of the samples with next sentences
SHORT, LONG = 5, 35  # updates: their difference is the time of an update


class Recipe(NamedTuple):
    """flags: of run_pretraining.py; none for transformers."""

    model: str
    batch: int
    learning_rate: float
    flags: tuple[str, ...] = ()

    @property
    def is_peer(self) -> bool:
        return not self.flags

    @property
    def has_pairs(self) -> bool:
        return self.model in ("tiny", "mini") and not self.is_peer


MASKED_30 = ("--masked-lm-prob=0.3",)
DECAYS = ("--lr-decay=warmup_stable_decay", "--warmup-proportion=0.1", "--lr-decay-proportion=0.3")
ADAMW = ("--optimizer=AdamW", *MASKED_30, *DECAYS)
NORMUON = ("--optimizer=NorMuon", "--weight-decay=0.1", *MASKED_30, *DECAYS)
RECIPES = {
    "transformers, BERT-mini, run_mlm.py as it comes": Recipe("mini", 8, 5e-5),
    "BERT-mini, LAMB 2e-3, batches of 64": Recipe("mini", 64, 2e-3, ("--optimizer=Lamb",)),
    "ModernBERT-mini, AdamW 2e-3, batches of 64": Recipe("modernbert-mini", 64, 2e-3, ADAMW),
    "ModernBERT-mini, NorMuon 2e-3, batches of 64": Recipe("modernbert-mini", 64, 2e-3, NORMUON),
    "ModernBERT-mini, NorMuon 5.6e-3": Recipe("modernbert-mini", 32, 5.6e-3, NORMUON),
    "ModernBERT-tiny, NorMuon 5.6e-3": Recipe("modernbert-tiny", 32, 5.6e-3, NORMUON),
}


def config_of(recipe: Recipe) -> dict[str, Any]:
    return read_json(config_file(recipe.model), "the config") | {"vocab_size": VOCABULARY}


# --- this project ---------------------------------------------------------------------------------


def samples_of(recipe: Recipe, data: Data) -> Path:
    """The folder of the recipe's samples, which is made if needed."""
    if not recipe.has_pairs:
        return data.work / "shards"
    folder = data.work / "pairs"
    if not folder.exists():
        run_program(
            "create_pretraining_data.py",
            f"--input-dir={data.work / 'text' / 'training'}",
            f"--output-dir={folder}",
            f"--vocab-file={data.vocab}",
            f"--max-seq-length={LENGTH}",
            f"--max-predictions-per-seq={MAX_MASKED}",
        )
    return folder


def pretrain(recipe: Recipe, data: Data, folder: Path, updates: int, *flags: str) -> None:
    write_json(folder / "config.json", config_of(recipe))
    flags_of_run = {
        "input-dir": samples_of(recipe, data),
        "output-dir": folder,
        "config-file": folder / "config.json",
        "vocab-file": data.vocab,
        "device": "cpu",
        "amp": "true",
        "max-seq-length": LENGTH,
        "batch-size": recipe.batch,
        "learning-rate": recipe.learning_rate,
        "max-steps": updates,
        "num-steps-per-checkpoint": updates,
        "report-file": "None",
    }
    if recipe.has_pairs:
        flags_of_run["max-predictions-per-seq"] = MAX_MASKED
    words = [f"--{name}={value}" for name, value in flags_of_run.items()]
    run_program("run_pretraining.py", *words, *recipe.flags, *flags)


# --- transformers ---------------------------------------------------------------------------------


class RunMlm:
    """transformers' Trainer with the arguments of its example run_mlm.py, all by default, on blocks
    of full length.
    """

    def __init__(self, recipe: Recipe, data: Data, folder: Path, updates: int, seed: int):
        silence_imports()
        from transformers import (
            BertConfig,
            BertForMaskedLM,
            BertTokenizerFast,
            DataCollatorForLanguageModeling,
            Trainer,
            TrainingArguments,
        )

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.folder = folder
        self.trainer = Trainer(
            BertForMaskedLM(BertConfig(**config_of(recipe))),
            TrainingArguments(
                str(folder / "out"),
                max_steps=updates,
                per_device_train_batch_size=recipe.batch,
                learning_rate=recipe.learning_rate,
                seed=seed,
                bf16=True,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            DataCollatorForLanguageModeling(BertTokenizerFast(str(data.vocab))),
            [{"input_ids": block} for block in data.train_blocks],
        )

    def run(self) -> float:
        """Trains; returns the CPU seconds."""
        start = time.process_time()
        self.trainer.train()
        seconds = time.process_time() - start
        self.trainer.model.save_pretrained(self.folder / "checkpoint")
        return seconds


# --- runs -----------------------------------------------------------------------------------------


def train(recipe: Recipe, data: Data, folder: Path, updates: int, seed: int) -> float:
    """Trains in a process of its own, in an empty folder; returns the CPU seconds. Those of this
    project are of the whole program.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if recipe.is_peer:
        return call_in_worker(RunMlm, "run", recipe, data, folder, updates, seed)
    samples_of(recipe, data)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    pretrain(recipe, data, folder, updates, f"--seed={seed}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def update_seconds(recipe: Recipe, data: Data) -> dict[str, float]:
    """CPU seconds of an update: the difference between a long and a short run."""
    short, long = (train(recipe, data, data.work / "timed", n, 0) for n in (SHORT, LONG))
    shutil.rmtree(data.work / "timed")
    return {"update_seconds": (long - short) / (LONG - SHORT)}


def measure(recipe: Recipe, data: Data, updates: int, seed: int) -> dict[str, float]:
    folder = data.work / "run"
    seconds = train(recipe, data, folder, updates, seed)
    (checkpoint,) = [*folder.glob(f"*/*/{updates}"), *folder.glob("checkpoint")]
    scores = score(checkpoint, data)
    shutil.rmtree(folder)
    return {"updates": updates, "cpu_seconds": seconds, **scores}


def main() -> None:
    names = tuple(RECIPES)
    args = benchmark_parser(
        __doc__,
        Flag("--books", Path, REQUIRED, f"folder of .txt books, {', '.join(HELD_OUT)} among them"),
        Flag("--work", Path, REQUIRED, "folder for data, which are kept, and runs"),
        Flag("--recipes", names, names, "to run", options={"nargs": "+"}),
        Flag("--seconds", positive_float, REQUIRED, "CPU time of the updates of a run"),
        Flag("--seeds", positive_int, (1, 2, 3), "seeds of the runs", options={"nargs": "+"}),
    ).parse_args()
    torch.set_num_threads(1)
    path = args.output or RESULTS / f"first_model-{datetime.date.today()}.json"
    settings = {"held_out": HELD_OUT, "length": LENGTH, "vocabulary": VOCABULARY}
    runs = Runs(path, settings | {"recipes": {name: RECIPES[name]._asdict() for name in RECIPES}})
    data = prepare(args.books, args.work)
    for seed, name in itertools.product(args.seeds, args.recipes):
        recipe = RECIPES[name]
        timing = runs.get({"recipe": name, "timing": True}, partial(update_seconds, recipe, data))
        updates = round(args.seconds / timing["update_seconds"])
        key = {"recipe": name, "seconds": args.seconds, "seed": seed}
        run = runs.get(key, partial(measure, recipe, data, updates, seed))
        print_line(f"{name}, seed {seed}: {run['updates']} updates, loss {run['loss']:.3f}")
    for name in args.recipes:
        rows = runs.matching({"recipe": name, "seconds": args.seconds})
        losses = [run["loss"] for run in rows]
        right = np.mean([run["accuracy"] for run in rows])
        spread = f" +- {statistics.stdev(losses):.2f}" if len(losses) > 1 else ""
        print_line(f"{name}: {np.mean(losses):.2f}{spread} ({right:.1%} right, {len(rows)} seeds)")
    print_line(f"written to {path}")


if __name__ == "__main__":
    run_main(main)
