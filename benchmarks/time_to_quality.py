#!/usr/bin/env python3
"""Held-out masked-token loss of encoders pre-trained from raw text, against training time.

    python3 benchmarks/time_to_quality.py --books FOLDER --work FOLDER

Contestants: transformers' BERT with AdamW, trained as in its masked-language-modelling example (text packed to blocks
of 128 tokens, new masks in every batch); this recipe with BERT and LAMB (NVIDIA's recipe); and with ModernBERT and
AdamW or Muon. All have the same text, vocabulary, batch and number of parameters (within 5%). Each contestant's
learning rate is the best of three at the smallest budget. Every budget is a run of its own with a whole schedule.

One scorer for all: transformers loads each run's last checkpoint and predicts the same masked tokens of books that no
contestant has seen. Time is CPU time of the run's process, with its start and its checkpoint, on one thread, so other
work on the machine does not change it; wall-clock time is recorded beside it. Runs whose results are in the result file
are not repeated, so rerun an interrupted command to continue. Needs transformers.
"""

import datetime
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common.results import RESULTS, machine_info
from benchmarks.common.shards import sentence_lines
from benchmarks.common.transformers_training import silence_imports, train_with_transformers
from lr_scheduler import make_schedule
from run_config import ScheduleConfig
from tokenizer import BertTokenizer
from utils.command_line import ArgumentParser, Arguments, non_negative_int, positive_int
from utils.errors import UserError, run_main
from utils.files import read_json, write_json
from utils.progress import print_line

HELD_OUT = ("frankenstein.txt", "the-picture-of-dorian-gray.txt", "treasure-island.txt")
LENGTH, BATCH, VOCABULARY = 128, 64, 8000
HIDDEN, LAYERS, HEADS = 128, 2, 2
MASK_RATE = 0.15  # of the scorer, and of BERT's training
MODERN_MASK_RATE = 0.3
SCORED_BLOCKS = 1024
PARAMETER_TOLERANCE = 0.05
MASK_ID = 4  # in the vocabularies that data/prepare.py trains without [unused] tokens

BERT_CONFIG = {
    "model_type": "bert", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 4 * HIDDEN, "max_position_embeddings": LENGTH, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
}  # fmt: skip
MODERN_CONFIG = {
    "model_type": "modernbert", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 3 * HIDDEN, "max_position_embeddings": LENGTH, "local_attention": 128,
    "global_attn_every_n_layers": 3,
}  # fmt: skip


class Contestant(NamedTuple):
    """flags: of run_pretraining.py; none for transformers. learning_rates: those of the search."""

    learning_rates: tuple[float, ...]
    config: dict[str, Any]
    shards: str = ""
    flags: tuple[str, ...] = ()


STABLE = ("--lr-decay=warmup_stable_decay", "--warmup-proportion=0.1", "--lr-decay-proportion=0.3")
CONTESTANTS = {
    "transformers BERT, AdamW": Contestant((1e-3, 2e-3, 4e-3), BERT_CONFIG),
    "BERT, LAMB": Contestant(
        (8e-3, 1.6e-2, 3.2e-2),
        BERT_CONFIG,
        "next_sentence",
        ("--optimizer=Lamb", "--lr-decay=poly", "--lr-decay-power=0.5", "--warmup-proportion=0.2843"),
    ),
    "ModernBERT, AdamW": Contestant((2e-3, 4e-3, 8e-3), MODERN_CONFIG, "modern", ("--optimizer=AdamW", *STABLE)),
    "ModernBERT, Muon": Contestant((2e-3, 4e-3, 8e-3), MODERN_CONFIG, "modern", ("--optimizer=Muon", *STABLE)),
}


def parse_arguments() -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--books", type=Path, required=True, help=f"folder of .txt books, {', '.join(HELD_OUT)} among them")
    add("--work", type=Path, required=True, help="folder for data and runs; kept, to continue")
    add("--contestants", nargs="+", choices=tuple(CONTESTANTS), default=tuple(CONTESTANTS), help="which to run")
    add("--budgets", type=positive_int, nargs="+", default=(75, 250, 750), help=f"updates of {BATCH * LENGTH} tokens")
    add("--num-seeds", type=positive_int, default=3, help="runs of each contestant and budget")
    add("--seed", type=non_negative_int, default=1, help="first seed; the search uses seed 0")
    add("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args()


# --- the data ---------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    work: Path
    vocab: Path
    train_blocks: np.ndarray  # [blocks, LENGTH]
    held_out_blocks: np.ndarray


def prepare(args: Arguments) -> Data:
    """The vocabulary, trained on the training text; the shards of this project, and the blocks of transformers and of
    the scorer."""
    books = {path.name: path for path in sorted(args.books.glob("*.txt"))}
    if missing := [name for name in HELD_OUT if name not in books]:
        raise UserError(f"{args.books} lacks {missing[0]}, a held-out book")
    if len(books) == len(HELD_OUT):
        raise UserError(f"{args.books} holds no book to train on beside the held-out ones")
    text, vocab, done = args.work / "text", args.work / "vocab" / "vocab.txt", args.work / "prepared"
    if not done.exists():
        shutil.rmtree(args.work, ignore_errors=True)
        for name, path in books.items():
            target = text / ("test" if name in HELD_OUT else "training") / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(sentence_lines(path.read_text(encoding="utf-8")), encoding="utf-8")
        run("data/prepare.py", "vocabulary", f"--sharded={text}", f"--output-dir={args.work}",
            f"--vocab-size={VOCABULARY}", "--unused=0")  # fmt: skip
        make_shards(args, vocab, "next_sentence", 20)
        make_shards(args, vocab, "modern", 39, "--no-nsp", f"--masked-lm-prob={MODERN_MASK_RATE}")
        for split in ("training", "test"):
            np.save(args.work / f"{split}.npy", packed_blocks(text / split, vocab))
        done.touch()
    return Data(args.work, vocab, np.load(args.work / "training.npy"), np.load(args.work / "test.npy"))


def masked(ids_BS: torch.Tensor, num_tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and labels [B, LENGTH] of masked language modelling: MASK_RATE of the tokens but [CLS] and [SEP], of which
    80% are replaced by [MASK], 10% by a random token and 10% by themselves; -100 elsewhere."""
    chosen = torch.rand(ids_BS.shape, generator=generator) < MASK_RATE
    chosen[:, [0, -1]] = False
    kind = torch.rand(ids_BS.shape, generator=generator)
    random_ids = torch.randint(num_tokens, ids_BS.shape, generator=generator)
    replaced = torch.where(kind < 0.8, MASK_ID, torch.where(kind < 0.9, random_ids, ids_BS))
    return torch.where(chosen, replaced, ids_BS), ids_BS.masked_fill(~chosen, -100)


def run(program: str, *flags: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / program), *flags]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise UserError(f"{program} failed:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")


def make_shards(args: Arguments, vocab: Path, name: str, predictions: int, *flags: str) -> None:
    run("create_pretraining_data.py", f"--input-dir={args.work / 'text' / 'training'}",
        f"--output-dir={args.work / name}", f"--vocab-file={vocab}", f"--max-seq-length={LENGTH}",
        f"--max-predictions-per-seq={predictions}", "--dupe-factor=1", *flags)  # fmt: skip


def packed_blocks(folder: Path, vocab: Path) -> np.ndarray:
    """The books' tokens end to end, in blocks of LENGTH with [CLS] and [SEP] around."""
    tokenizer = BertTokenizer(vocab, do_lower_case=True)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    lines = [line for path in sorted(folder.glob("*.txt")) for line in path.read_text(encoding="utf-8").split("\n")]
    ids = np.concatenate([tokenizer.encode(line) for line in lines if line]).astype(np.int64)
    inner = LENGTH - 2
    ids_BS = ids[: len(ids) // inner * inner].reshape(-1, inner)
    return np.pad(ids_BS, ((0, 0), (1, 1)), constant_values=((0, 0), (cls, sep)))


# --- a run ------------------------------------------------------------------------------------------------------------


def train(name: str, learning_rate: float, updates: int, seed: int, data: Data, folder: Path) -> dict[str, float]:
    """Trains in a process of its own; returns its seconds."""
    contestant = CONTESTANTS[name]
    folder.mkdir(parents=True)
    write_json(folder / "config.json", contestant.config | {"vocab_size": len(data.vocab.read_text().splitlines())})
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    if contestant.flags:
        run(
            "run_pretraining.py", f"--input-dir={data.work / contestant.shards}", f"--output-dir={folder}",
            "--bert-model=custom", f"--config-file={folder / 'config.json'}", f"--vocab-file={data.vocab}",
            f"--max-steps={updates}", f"--batch-size={BATCH}", f"--max-seq-length={LENGTH}",
            f"--max-predictions-per-seq={predictions(data, contestant)}", f"--learning-rate={learning_rate}",
            f"--seed={seed}", f"--num-steps-per-checkpoint={updates}", "--device=cpu",
            f"--report-file={folder / 'report.json'}", *contestant.flags,
        )  # fmt: skip
    else:
        process = multiprocessing.get_context("spawn").Process(
            target=train_transformers, args=(learning_rate, updates, seed, data, folder)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise UserError(f"{name}: training failed with exit code {process.exitcode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "seconds": time.perf_counter() - started,
    }


def predictions(data: Data, contestant: Contestant) -> int:
    return 20 if contestant.shards == "next_sentence" else 39


def train_transformers(learning_rate: float, updates: int, seed: int, data: Data, folder: Path) -> None:
    """transformers' BertForMaskedLM on blocks in random order, with new masks in every batch."""
    silence_imports()
    from transformers import BertConfig, BertForMaskedLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = BertForMaskedLM(BertConfig(**read_json(folder / "config.json", "the config")))
    blocks, generator = torch.from_numpy(data.train_blocks), torch.Generator().manual_seed(seed)

    def make_batch(chosen: np.ndarray) -> dict[str, torch.Tensor]:
        input_ids, labels = masked(blocks[chosen], model.config.vocab_size, generator)
        return {"input_ids": input_ids, "labels": labels}

    schedule = make_schedule(ScheduleConfig(updates, learning_rate, warmup_proportion=0.1))
    train_with_transformers(model, len(blocks), make_batch, schedule, updates, BATCH, seed)
    model.save_pretrained(folder / "checkpoint")


def checkpoint_of(folder: Path, updates: int) -> Path:
    return next(iter([*folder.glob(f"*/*/{updates}"), folder / "checkpoint"]))


# --- the score --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def score(checkpoint: Path, data: Data) -> dict[str, float]:
    """Cross-entropy in nats per masked token of the held-out blocks, the accuracy, and the number of parameters."""
    silence_imports()
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForMaskedLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rows = np.linspace(0, len(data.held_out_blocks) - 1, min(SCORED_BLOCKS, len(data.held_out_blocks))).astype(int)
    blocks, generator = torch.from_numpy(data.held_out_blocks[rows]), torch.Generator().manual_seed(0)
    loss = correct = count = 0.0
    for ids in blocks.split(BATCH):
        input_ids, labels = masked(ids, model.config.vocab_size, generator)
        is_masked = labels != -100
        logits, labels = model(input_ids=input_ids).logits[is_masked], labels[is_masked]
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"loss": loss / count, "accuracy": correct / count, "parameters": parameters}


# --- the campaign -----------------------------------------------------------------------------------------------------


class Campaign:
    """Runs, found in and added to the result file."""

    def __init__(self, args: Arguments, data: Data, path: Path):
        self.data, self.path, self.work = data, path, args.work / "runs"
        settings = {"held_out": HELD_OUT, "contestants": {name: c._asdict() for name, c in CONTESTANTS.items()}}
        self.result = read_json(path, "the result file") if path.is_file() else {"settings": settings, "runs": []}
        if self.result["settings"]["contestants"].keys() != CONTESTANTS.keys():
            raise UserError(f"{path} holds results of other contestants: give another --output")

    def loss(self, name: str, learning_rate: float, updates: int, seed: int) -> float:
        """The held-out loss of a run, which is made if the result file lacks it."""
        key = {"contestant": name, "learning_rate": learning_rate, "updates": updates, "seed": seed}
        found = next((run for run in self.result["runs"] if key.items() <= run.items()), None)
        if found is None:
            folder = self.work / f"{name}-{learning_rate}-{updates}-{seed}".replace(" ", "-").replace(",", "")
            shutil.rmtree(folder, ignore_errors=True)
            seconds = train(name, learning_rate, updates, seed, self.data, folder)
            found = key | seconds | score(checkpoint_of(folder, updates), self.data)
            self.result["runs"].append(found)
            self.result["machine_info"] = machine_info(torch.device("cpu"))
            write_json(self.path, self.result)
            print_line(
                f"{name}, lr {learning_rate:g}, {updates} updates, seed {seed}: loss {found['loss']:.3f}, "
                f"{found['cpu_seconds']:.0f} CPU seconds, {found['parameters']:,} parameters"
            )
        return found["loss"]

    def chart(self, chosen: dict[str, float]) -> Path:
        """Draws the losses with the chosen learning rates over CPU time, beside the result file: each run as a mark,
        and a line through the medians of the budgets."""
        figure, axes = matplotlib.pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        for (name, learning_rate), marker in zip(chosen.items(), "osD^", strict=False):
            runs = [
                run for run in self.result["runs"]
                if run["seed"] and (run["contestant"], run["learning_rate"]) == (name, learning_rate)
            ]  # fmt: skip
            by_budget: dict[int, list[tuple[float, float]]] = {}
            for run in sorted(runs, key=lambda run: run["updates"]):
                by_budget.setdefault(run["updates"], []).append((run["cpu_seconds"], run["loss"]))
            (line,) = axes.plot(*np.array([np.median(points, axis=0) for points in by_budget.values()]).T)
            points = np.concatenate([*by_budget.values()])
            axes.plot(*points.T, marker, color=line.get_color(), markersize=4, label=name)
        axes.set(
            xscale="log", xlabel="CPU seconds of training, one thread", ylabel="held-out loss, nats per masked token"
        )
        axes.grid(alpha=0.3)
        axes.legend()
        path = self.path.with_suffix(".svg")
        figure.savefig(path, metadata={"Date": None})
        return path

    def table(self, budgets: list[int], chosen: dict[str, float]) -> None:
        print_line(f"{'contestant':26}{'lr':>8}" + "".join(f"{f'{budget} updates':>28}" for budget in budgets))
        for name, learning_rate in chosen.items():
            cells = []
            for budget in budgets:
                runs = [
                    run for run in self.result["runs"]
                    if (run["contestant"], run["learning_rate"], run["updates"]) == (name, learning_rate, budget)
                ]  # fmt: skip
                losses = [run["loss"] for run in runs]
                seconds = np.median([run["cpu_seconds"] for run in runs])
                cells.append(f"{np.mean(losses):.3f} +- {np.std(losses):.3f} ({seconds:.0f} s)")
            print_line(f"{name:26}{learning_rate:8g}" + "".join(f"{cell:>28}" for cell in cells))


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    budgets = sorted(args.budgets)
    path = args.output or RESULTS / f"time_to_quality-{datetime.date.today()}.json"
    campaign = Campaign(args, prepare(args), path)
    chosen: dict[str, float] = {}
    for name in args.contestants:
        losses = {rate: campaign.loss(name, rate, budgets[0], 0) for rate in CONTESTANTS[name].learning_rates}
        chosen[name] = min(losses, key=losses.get)
    sizes = {run["contestant"]: run["parameters"] for run in campaign.result["runs"]}
    if max(sizes.values()) > (1 + PARAMETER_TOLERANCE) * min(sizes.values()):
        raise UserError(f"the contestants' numbers of parameters differ too much: {sizes}")
    for seed in range(args.seed, args.seed + args.num_seeds):
        for budget in budgets:
            for name, learning_rate in chosen.items():
                campaign.loss(name, learning_rate, budget, seed)
    campaign.table(budgets, chosen)
    print_line(f"written to {path} and {campaign.chart(chosen)}")


if __name__ == "__main__":
    run_main(main)
