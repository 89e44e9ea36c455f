#!/usr/bin/env python3
"""Held-out masked-token loss of encoders pre-trained from raw text, against training time.

    python3 benchmarks/time_to_quality.py --books FOLDER --work FOLDER

Contestants: transformers' ModernBERT with AdamW, the peer that a user would pick, and this recipe's
with AdamW, Muon or NorMuon; for context, transformers' BERT with AdamW and this recipe's BERT with
LAMB. transformers trains as in its example of masked language modelling: text packed to blocks of
128 tokens, new masks in every batch. All have the same text, vocabulary, tokens and number of
parameters (within 5%). --amp trains all in bfloat16.

Every contestant gets the same search, at each of the `--search-budgets`: learning rates by factors
of two, warmup with linear decay and warmup-stable-decay, mask rates 0.15 and 0.3, one value changed
at a time until every change is worse. The best of the largest search budget is used. Every budget
is a run of its own with a whole schedule.

One scorer for all: transformers loads each run's last checkpoint and predicts the same masked
tokens (15%) of books that no contestant has seen. Time is CPU time of the run's process, with its
start and its checkpoints, on one thread, so other work on the machine does not change it;
wall-clock time is recorded beside it. The contestants take turns. Runs whose results are in the
result file are not repeated, and an interrupted one continues from its last saved state: rerun the
command. Needs transformers and matplotlib.
"""

import datetime
import itertools
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot
import matplotlib.ticker
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common.results import RESULTS, Runs, benchmark_parser
from benchmarks.common.shards import sentence_lines
from benchmarks.common.transformers_training import (
    SavedState,
    silence_imports,
    train_with_transformers,
)
from benchmarks.common.worker import call_in_worker
from run_config import ScheduleConfig
from tokenizer import BertTokenizer
from utils.command_line import Arguments, positive_int
from utils.errors import UserError, run_main
from utils.files import read_json, write_json
from utils.progress import print_line

HELD_OUT = ("frankenstein.txt", "the-picture-of-dorian-gray.txt", "treasure-island.txt")
LENGTH, BATCH, VOCABULARY = 128, 64, 8000
HIDDEN, LAYERS, HEADS = 128, 2, 2
SAVES = 5  # states that a run saves, to continue from after a stop
SCORED_BLOCKS = 1024
PARAMETER_TOLERANCE = 0.05
MASK_ID = 4  # in the vocabularies that data/prepare.py trains without [unused] tokens

SIZES = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "max_position_embeddings": LENGTH,
    "vocab_size": VOCABULARY,
}  # fmt: skip
BERT_CONFIG = {
    "model_type": "bert", "intermediate_size": 4 * HIDDEN, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-12,
    "type_vocab_size": 2, **SIZES,
}  # fmt: skip
MODERN_CONFIG = {
    "model_type": "modernbert", "intermediate_size": 3 * HIDDEN, "local_attention": 128,
    "global_attn_every_n_layers": 3, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2,
    "eos_token_id": 3, **SIZES,
}  # fmt: skip


class Contestant(NamedTuple):
    """optimizer, causal: flags of run_pretraining.py; none for transformers. learning_rate: where
    the search starts. batch: blocks per update.
    """

    config: dict[str, Any]
    learning_rate: float
    optimizer: str | None = None
    batch: int = BATCH
    causal: float = 0.0


CONTESTANTS = {
    "transformers ModernBERT, AdamW": Contestant(MODERN_CONFIG, 4e-3),
    "ModernBERT, AdamW": Contestant(MODERN_CONFIG, 4e-3, "AdamW"),
    "ModernBERT, Muon": Contestant(MODERN_CONFIG, 8e-3, "Muon"),
    "ModernBERT, NorMuon": Contestant(MODERN_CONFIG, 8e-3, "NorMuon"),
    "transformers ModernBERT, AdamW, batches of 32": Contestant(MODERN_CONFIG, 4e-3, batch=32),
    "ModernBERT, NorMuon, batches of 32": Contestant(MODERN_CONFIG, 5.6e-3, "NorMuon", 32),
    "ModernBERT, NorMuon, batches of 32, causal first": Contestant(
        MODERN_CONFIG, 5.6e-3, "NorMuon", 32, 0.25
    ),
    "transformers BERT, AdamW": Contestant(BERT_CONFIG, 1e-3),
    "BERT, LAMB": Contestant(BERT_CONFIG, 1.6e-2, "Lamb"),
}
SCHEDULES = {
    "linear": {"decay": "poly", "warmup_proportion": 0.1},
    "warmup_stable_decay": {
        "decay": "warmup_stable_decay",
        "warmup_proportion": 0.1,
        "decay_proportion": 0.3,
    },
}
MASK_RATES = (0.15, 0.3)


class Setting(NamedTuple):
    """What the search varies, and whether to train in bfloat16."""

    schedule: str
    mask_rate: float
    learning_rate: float
    amp: bool = False


# --- the data -------------------------------------------------------------------------------------


class Data(NamedTuple):
    work: Path
    vocab: Path
    train_blocks: np.ndarray  # [blocks, LENGTH]
    held_out_blocks: np.ndarray


def prepare(args: Arguments) -> Data:
    """The vocabulary, trained on the training text; the shards of this project, and the blocks of
    transformers and of the scorer.
    """
    books = {path.name: path for path in sorted(args.books.glob("*.txt"))}
    if missing := [name for name in HELD_OUT if name not in books]:
        raise UserError(f"{args.books} lacks {missing[0]}, a held-out book")
    if len(books) == len(HELD_OUT):
        raise UserError(f"{args.books} holds no book to train on beside the held-out ones")
    text, vocab, done = (
        args.work / "text",
        args.work / "vocab" / "vocab.txt",
        args.work / "prepared",
    )
    if not done.exists():
        shutil.rmtree(args.work, ignore_errors=True)
        for name, path in books.items():
            target = text / ("test" if name in HELD_OUT else "training") / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(sentence_lines(path.read_text(encoding="utf-8")), encoding="utf-8")
        run("data/prepare.py", "vocabulary", f"--sharded={text}", f"--output-dir={args.work}",
            f"--vocab-size={VOCABULARY}", "--unused=0")  # fmt: skip
        run("create_pretraining_data.py", f"--input-dir={text / 'training'}", f"--output-dir={args.work / 'shards'}",
            f"--vocab-file={vocab}", f"--max-seq-length={LENGTH}", "--no-nsp", "--dynamic-masking")  # fmt: skip
        for split in ("training", "test"):
            np.save(args.work / f"{split}.npy", packed_blocks(text / split, vocab))
        done.touch()
    return Data(
        args.work, vocab, np.load(args.work / "training.npy"), np.load(args.work / "test.npy")
    )


def masked(
    ids_BS: torch.Tensor, rate: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and labels [B, LENGTH] of masked language modelling: a share `rate` of the tokens but
    [CLS] and [SEP], of which 80% are replaced by [MASK], 10% by a random token and 10% by
    themselves; -100 elsewhere.
    """
    chosen = torch.rand(ids_BS.shape, generator=generator) < rate
    chosen[:, [0, -1]] = False
    kind = torch.rand(ids_BS.shape, generator=generator)
    random_ids = torch.randint(VOCABULARY, ids_BS.shape, generator=generator)
    replaced = torch.where(kind < 0.8, MASK_ID, torch.where(kind < 0.9, random_ids, ids_BS))
    return torch.where(chosen, replaced, ids_BS), ids_BS.masked_fill(~chosen, -100)


def run(program: str, *flags: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / program), *flags]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise UserError(f"{program} failed:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")


def packed_blocks(folder: Path, vocab: Path) -> np.ndarray:
    """The books' tokens end to end, in blocks of LENGTH with [CLS] and [SEP] around."""
    tokenizer = BertTokenizer(vocab, do_lower_case=True)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    lines = [
        line
        for path in sorted(folder.glob("*.txt"))
        for line in path.read_text(encoding="utf-8").split("\n")
    ]
    ids = np.concatenate([tokenizer.encode(line) for line in lines if line]).astype(np.int64)
    inner = LENGTH - 2
    ids_BS = ids[: len(ids) // inner * inner].reshape(-1, inner)
    return np.pad(ids_BS, ((0, 0), (1, 1)), constant_values=((0, 0), (cls, sep)))


# --- a run ----------------------------------------------------------------------------------------


class TransformersRun:
    """transformers' model for masked language modelling on blocks in random order, with new masks
    in every batch.
    """

    def __init__(
        self,
        contestant: Contestant,
        setting: Setting,
        updates: int,
        seed: int,
        data: Data,
        folder: Path,
    ):
        silence_imports()
        from transformers import AutoConfig, AutoModelForMaskedLM

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**contestant.config))
        self.blocks, self.mask_rate = torch.from_numpy(data.train_blocks), setting.mask_rate
        self.generator, self.folder = torch.Generator().manual_seed(seed), folder
        schedule = ScheduleConfig(updates, setting.learning_rate, **SCHEDULES[setting.schedule])
        state = SavedState(folder / "state.safetensors", max(updates // SAVES, 1), self.generator)
        self.arguments = (schedule, contestant.batch, seed, setting.amp, state)

    def make_batch(self, chosen: np.ndarray) -> dict[str, torch.Tensor]:
        return dict(
            zip(
                ("input_ids", "labels"),
                masked(self.blocks[chosen], self.mask_rate, self.generator),
                strict=True,
            )
        )

    def run(self) -> None:
        train_with_transformers(self.model, len(self.blocks), self.make_batch, *self.arguments)
        self.model.save_pretrained(self.folder / "checkpoint")


def run_this_project(
    contestant: Contestant, setting: Setting, updates: int, seed: int, data: Data, folder: Path
) -> None:
    schedule = SCHEDULES[setting.schedule]
    flags = {
        "input-dir": data.work / "shards", "output-dir": folder, "bert-model": "custom", "device": "cpu", "seed": seed,
        "config-file": folder / "config.json", "vocab-file": data.vocab, "max-steps": updates,
        "batch-size": contestant.batch, "max-seq-length": LENGTH, "masked-lm-prob": setting.mask_rate,
        "learning-rate": setting.learning_rate,
        "warmup-proportion": schedule["warmup_proportion"], "optimizer": contestant.optimizer,
        "causal-proportion": contestant.causal,
        "num-steps-per-checkpoint": max(updates // SAVES, 1), "report-file": folder / "report.json", "amp": setting.amp,
    }  # fmt: skip
    flags |= {
        f"lr-{key.replace('_', '-')}": value
        for key, value in schedule.items()
        if "warmup" not in key
    }
    write_json(folder / "config.json", contestant.config)
    run(
        "run_pretraining.py",
        "--resume-from-checkpoint",
        *(f"--{name}={value}" for name, value in flags.items()),
    )


def train(
    name: str, setting: Setting, updates: int, seed: int, data: Data, folder: Path
) -> dict[str, float]:
    """Trains in a process of its own; returns its seconds, also of interrupted starts. `folder`
    keeps the state.
    """
    arguments, clock = (
        (CONTESTANTS[name], setting, updates, seed, data, folder),
        folder / "seconds.json",
    )
    folder.mkdir(parents=True, exist_ok=True)
    earlier = (
        read_json(clock, "the clock") if clock.is_file() else {"cpu_seconds": 0.0, "seconds": 0.0}
    )
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        if CONTESTANTS[name].optimizer:
            run_this_project(*arguments)
        else:
            call_in_worker(TransformersRun, "run", *arguments)
    finally:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        seconds = {"cpu_seconds": cpu_seconds, "seconds": time.perf_counter() - started}
        total = {kind: earlier[kind] + value for kind, value in seconds.items()}
        write_json(clock, total)
    return total


# --- the score ------------------------------------------------------------------------------------


@torch.inference_mode()
def score(checkpoint: Path, data: Data) -> dict[str, float]:
    """Cross-entropy in nats per masked token of the held-out blocks, the accuracy, and the number
    of parameters.
    """
    silence_imports()
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForMaskedLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rows = np.linspace(
        0, len(data.held_out_blocks) - 1, min(SCORED_BLOCKS, len(data.held_out_blocks))
    ).astype(int)
    blocks, generator = (
        torch.from_numpy(data.held_out_blocks[rows]),
        torch.Generator().manual_seed(0),
    )
    loss = correct = count = 0.0
    for ids in blocks.split(BATCH):
        input_ids, labels = masked(ids, MASK_RATES[0], generator)
        is_masked = labels != -100
        logits, labels = model(input_ids=input_ids).logits[is_masked], labels[is_masked]
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"loss": loss / count, "accuracy": correct / count, "parameters": parameters}


# --- the campaign ---------------------------------------------------------------------------------


class Campaign(NamedTuple):
    """Runs, found in and added to the result file."""

    data: Data
    runs: Runs
    amp: bool

    def loss(self, name: str, setting: Setting, budget: int, seed: int) -> float:
        """The held-out loss of a run of `budget * BATCH` blocks, which is made if the result file
        lacks it.
        """
        updates = budget * BATCH // CONTESTANTS[name].batch
        key = {"contestant": name, **setting._asdict(), "updates": updates, "seed": seed}
        title = f"{name}, {', '.join(map(str, setting))}, {updates} updates, seed {seed}"
        folder = self.data.work / "runs" / title.replace(", ", "-").replace(" ", "_")

        def measure() -> dict[str, float]:
            seconds = train(name, setting, updates, seed, self.data, folder)
            checkpoint = next(iter([*folder.glob(f"*/*/{updates}"), folder / "checkpoint"]))
            found = seconds | score(checkpoint, self.data)
            cost = f"{found['cpu_seconds']:.0f} CPU seconds, {found['parameters']:,} parameters"
            print_line(f"{title}: loss {found['loss']:.3f}, {cost}")
            return found

        found = self.runs.get(key, measure)
        shutil.rmtree(folder, ignore_errors=True)
        return found["loss"]

    def search(self, name: str, budget: int) -> Setting:
        """The best setting of a contestant after `budget` updates, with seed 0: coordinate descent,
        until each setting that differs in one value is worse.
        """
        best = Setting("linear", 0.3, CONTESTANTS[name].learning_rate, self.amp)
        while True:
            rates = [
                best._replace(learning_rate=best.learning_rate * factor) for factor in (0.5, 2)
            ]
            schedules = [best._replace(schedule=schedule) for schedule in SCHEDULES]
            mask_rates = [best._replace(mask_rate=rate) for rate in MASK_RATES]
            for settings in (rates, schedules, mask_rates):
                better = min(
                    (best, *settings), key=lambda setting: self.loss(name, setting, budget, 0)
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

    def chart(self, chosen: dict[str, Setting]) -> None:
        """Draws the losses with the chosen settings over CPU time, beside the result file: each run
        as a mark, and a line through the medians of the budgets.
        """
        figure, axes = matplotlib.pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        for (name, setting), marker in zip(chosen.items(), "osD^vP", strict=False):
            points = self.points(name, setting).values()
            (line,) = axes.plot(*np.array([np.median(each, axis=0) for each in points]).T)
            label = f"this recipe: {name}" if CONTESTANTS[name].optimizer else name
            axes.plot(
                *np.concatenate([*points]).T,
                marker,
                color=line.get_color(),
                markersize=4,
                label=label,
            )
        axes.set(
            xscale="log",
            xlabel="CPU seconds of training, one thread",
            ylabel="held-out loss, nats per masked token",
        )
        axes.xaxis.set_minor_locator(matplotlib.ticker.LogLocator(subs=(2, 5)))
        for set_formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            set_formatter(matplotlib.ticker.FuncFormatter(lambda seconds, _: f"{seconds:,.0f}"))
        axes.grid(alpha=0.3)
        figure.legend(loc="outside upper center")
        figure.savefig(self.runs.path.with_suffix(".svg"), metadata={"Date": None})

    def table(self, chosen: dict[str, Setting]) -> None:
        """Prints mean and deviation of the losses, and the median of the CPU seconds."""
        for name, setting in chosen.items():
            print_line(f"{name}: {', '.join(map(str, setting))}")
            for updates, points in self.points(name, setting).items():
                seconds, loss = np.median(points[:, 0]), points[:, 1]
                deviation = f" +- {np.std(loss, ddof=1):.3f}" if len(loss) > 1 else ""
                print_line(
                    f"  {updates:5} updates: {loss.mean():.3f}{deviation} ({seconds:.0f} s, "
                    f"{len(loss)} seeds)"
                )


def main() -> None:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add(
        "--books",
        type=Path,
        required=True,
        help=f"folder of .txt books, {', '.join(HELD_OUT)} among them",
    )
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
        help=f"updates of {BATCH * LENGTH} tokens",
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
        "--num-seeds",
        type=positive_int,
        default=3,
        help="runs of each contestant and budget, from seed 1 up",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.output or RESULTS / f"time_to_quality-{datetime.date.today()}.json"
    settings = {
        "held_out": HELD_OUT,
        "contestants": {name: c._asdict() for name, c in CONTESTANTS.items()},
    }
    campaign = Campaign(prepare(args), Runs(path, settings), args.amp)
    found = {
        name: [campaign.search(name, budget) for budget in sorted(args.search_budgets)]
        for name in args.contestants
    }
    chosen = {name: settings[-1] for name, settings in found.items()}
    sizes = {run["contestant"]: run["parameters"] for run in campaign.runs.found({})}
    if max(sizes.values()) > (1 + PARAMETER_TOLERANCE) * min(sizes.values()):
        raise UserError(f"the contestants' numbers of parameters differ too much: {sizes}")
    for seed, budget in itertools.product(range(1, args.num_seeds + 1), sorted(args.budgets)):
        for name, setting in chosen.items():
            campaign.loss(name, setting, budget, seed)
    campaign.table(chosen)
    campaign.chart(chosen)
    print_line(f"written to {path} and its .svg")


if __name__ == "__main__":
    run_main(main)
