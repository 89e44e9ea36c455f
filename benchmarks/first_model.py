#!/usr/bin/env python3
"""Held-out masked-token loss of a first model from raw text, by recipe, at equal CPU time.

    python3 benchmarks/first_model.py --texts FOLDER --work FOLDER --minutes 10 --seeds 1 2

Recipes: scripts/pretrain_from_texts.sh as it is typed; docs/pretraining.md's BERT-mini with LAMB
and next sentences; and transformers' Trainer as its example run_mlm.py has it (AdamW, 5e-5, batches
of 8), with BERT-mini and with BERT-tiny, which has the sizes of the script's model of ten minutes.
All have the vocabulary and the sentences that the script makes of nine tenths of the files, length
128, bfloat16 and one thread. The script plans its updates by the clock; the others make as many as
fit into the same CPU time, by that of an update measured before, and have their whole schedule in
them.

One scorer for all: transformers loads the last checkpoint (of the script, its best) and predicts
the same masked tokens (15%) of the tenth of the files that no recipe has seen. Runs whose results
are in the result file are not repeated: rerun the command. Needs transformers.
"""

import datetime
import filecmp
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
    LENGTH,
    VOCABULARY,
    Data,
    packed_blocks,
    run_program,
    score,
)
from benchmarks.common.results import RESULTS, Runs, benchmark_parser, config_file
from benchmarks.common.transformers_training import silence_imports
from benchmarks.common.worker import call_in_worker
from bert_recipe.utils.command_line import REQUIRED, Flag, positive_int
from bert_recipe.utils.errors import UserError, run_main
from bert_recipe.utils.json_files import read_json, write_json
from bert_recipe.utils.progress import print_line

MAX_MASKED = 20  # of the samples with next sentences
HELD_OUT_EVERY = 10  # files
SHORT, LONG = 5, 35  # updates: their difference is the time of an update


class Recipe(NamedTuple):
    """optimizer: that of run_pretraining.py; none for transformers."""

    model: str
    batch: int
    learning_rate: float
    optimizer: str | None = None


SCRIPT = "scripts/pretrain_from_texts.sh"
RECIPES = {
    "BERT-mini, LAMB 2e-3, batches of 64": Recipe("mini", 64, 2e-3, "Lamb"),
    "transformers, BERT-mini, run_mlm.py as it comes": Recipe("mini", 8, 5e-5),
    "transformers, BERT-tiny, run_mlm.py as it comes": Recipe("tiny", 8, 5e-5),
}


# --- the data -------------------------------------------------------------------------------------


def prepare(texts: Path, work: Path) -> Data:
    """The files in two parts, and what the script makes of the first: the vocabulary and samples.
    The others get its sentences.
    """
    text, page = work / "text", work / "page"
    done = work / "prepared"
    if not done.exists():
        shutil.rmtree(work, ignore_errors=True)
        for index, path in enumerate(sorted(texts.glob("*.txt"))):
            is_held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY // 2
            target = text / ("test" if is_held_out else "training") / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        # The flags of the script; its runs start from this folder, so that all share a vocabulary.
        run_program(
            "data/prepare.py",
            *("all", "corpus", str(text / "training"), f"--output-dir={page}", "--train-vocab"),
            *(f"--vocab-size={VOCABULARY}", "--no-do-lower-case", f"--lengths={LENGTH}"),
            *("--bert-config", str(config_file("modernbert-tiny")), "--dynamic-masking"),
            *("--no-nsp", "--pack-documents", "--test-fraction=0.05", "--max-document-kb=50"),
        )
        vocab = page / "vocab" / "vocab.txt"
        run_program(
            "create_pretraining_data.py",
            f"--input-dir={page / 'sharded' / 'training'}",
            f"--output-dir={work / 'pairs'}",
            f"--vocab-file={vocab}",
            "--no-do-lower-case",
            f"--max-seq-length={LENGTH}",
            f"--max-predictions-per-seq={MAX_MASKED}",
        )
        np.save(work / "training.npy", packed_blocks(page / "sharded" / "training", vocab, False))
        np.save(work / "test.npy", packed_blocks(text / "test", vocab, False))
        done.touch()
    vocab = page / "vocab" / "vocab.txt"
    mask_id = vocab.read_text(encoding="utf-8").split("\n").index("[MASK]")
    return Data(work, vocab, np.load(work / "training.npy"), np.load(work / "test.npy"), mask_id)


def config_of(recipe: Recipe) -> dict[str, Any]:
    return read_json(config_file(recipe.model), "the config") | {"vocab_size": VOCABULARY}


# --- this project ---------------------------------------------------------------------------------


def run_script(data: Data, folder: Path, minutes: int, seed: int) -> None:
    shutil.copytree(data.work / "page", folder, dirs_exist_ok=True)
    texts = data.work / "text" / "training"
    run_program(SCRIPT, str(texts), str(folder), str(minutes), "0", "amp", str(seed))
    if not filecmp.cmp(data.vocab, folder / "vocab" / "vocab.txt", shallow=False):
        raise UserError(f"{SCRIPT} has made another vocabulary: adapt the flags in prepare()")


def pretrain(recipe: Recipe, data: Data, folder: Path, updates: int, seed: int) -> None:
    write_json(folder / "config.json", config_of(recipe))
    flags = {
        "input-dir": data.work / "pairs",
        "output-dir": folder,
        "config-file": folder / "config.json",
        "vocab-file": data.vocab,
        "device": "cpu",
        "amp": "true",
        "max-seq-length": LENGTH,
        "max-predictions-per-seq": MAX_MASKED,
        "batch-size": recipe.batch,
        "optimizer": recipe.optimizer,
        "learning-rate": recipe.learning_rate,
        "max-steps": updates,
        "num-steps-per-checkpoint": updates,
        "report-file": "None",
        "seed": seed,
    }
    run_program("run_pretraining.py", *(f"--{name}={value}" for name, value in flags.items()))


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
            DataCollatorForLanguageModeling(
                BertTokenizerFast(str(data.vocab), do_lower_case=False)
            ),
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


def cpu_seconds() -> float:
    """Of the programs that this process has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def train(recipe: Recipe, data: Data, folder: Path, updates: int, seed: int) -> float:
    """Trains in a process of its own, in an empty folder; returns the CPU seconds. Those of this
    project are of the whole program.
    """
    empty(folder)
    if recipe.optimizer is None:
        return call_in_worker(RunMlm, "run", recipe, data, folder, updates, seed)
    before = cpu_seconds()
    pretrain(recipe, data, folder, updates, seed)
    return cpu_seconds() - before


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


def measure_script(data: Data, minutes: int, seed: int) -> dict[str, Any]:
    folder = empty(data.work / "run")
    before, started = cpu_seconds(), time.monotonic()
    run_script(data, folder, minutes, seed)
    seconds = {"cpu_seconds": cpu_seconds() - before, "seconds": time.monotonic() - started}
    scores = score(folder / "results" / "custom" / "phase1" / "best", data)
    plan = read_json(folder / "plan.json", "the plan")
    shutil.rmtree(folder)
    return {"model": plan["config"], "updates": plan["updates"], **seconds, **scores}


def main() -> None:
    names = (SCRIPT, *RECIPES)
    args = benchmark_parser(
        __doc__,
        Flag("--texts", Path, REQUIRED, "folder of .txt files"),
        Flag("--work", Path, REQUIRED, "folder for data, which are kept, and runs"),
        Flag("--recipes", names, names, "to run", options={"nargs": "+"}),
        Flag("--minutes", positive_int, REQUIRED, "time of a run"),
        Flag("--seeds", positive_int, (1, 2, 3), "seeds of the runs", options={"nargs": "+"}),
    ).parse_args()
    torch.set_num_threads(1)
    path = args.output or RESULTS / f"first_model-{args.minutes}m-{datetime.date.today()}.json"
    data = prepare(args.texts, args.work)
    tokens = {"training_tokens": data.train_blocks.size, "held_out": data.held_out_blocks.size}
    settings = {"texts": args.texts.name, "length": LENGTH, "vocabulary": VOCABULARY, **tokens}
    runs = Runs(path, settings | {"recipes": {name: RECIPES[name]._asdict() for name in RECIPES}})
    for seed, name in itertools.product(args.seeds, args.recipes):
        key = {"recipe": name, "minutes": args.minutes, "seed": seed}
        if name == SCRIPT:
            run = runs.get(key, partial(measure_script, data, args.minutes, seed))
        else:
            recipe = RECIPES[name]
            timed = {"recipe": name, "timing": True}
            timing = runs.get(timed, partial(update_seconds, recipe, data))
            updates = round(60 * args.minutes / timing["update_seconds"])
            run = runs.get(key, partial(measure, recipe, data, updates, seed))
        print_line(f"{name}, seed {seed}: {run['updates']} updates, loss {run['loss']:.3f}")
    for name in args.recipes:
        rows = runs.matching({"recipe": name, "minutes": args.minutes})
        losses = [run["loss"] for run in rows]
        right = np.mean([run["accuracy"] for run in rows])
        spread = f" +- {statistics.stdev(losses):.2f}" if len(losses) > 1 else ""
        print_line(f"{name}: {np.mean(losses):.2f}{spread} ({right:.1%} right, {len(rows)} seeds)")
    print_line(f"written to {path}")


if __name__ == "__main__":
    run_main(main)
