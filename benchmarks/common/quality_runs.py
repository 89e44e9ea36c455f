"""The contestants of time_to_quality.py, their data, their runs and the score of a run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common.results import ROOT
from benchmarks.common.shards import sentence_lines
from benchmarks.common.transformers_training import (
    TransformersTrainer,
    describe,
    masked_lm_model,
    silence_imports,
)
from benchmarks.common.worker import call_in_worker
from bert_recipe.config import ScheduleConfig
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import write_json

HELD_OUT = ("frankenstein.txt", "the-picture-of-dorian-gray.txt", "treasure-island.txt")
LENGTH, BATCH, VOCABULARY = 128, 32, 8000
LAYERS = 2
SCHEDULE = {"decay": "warmup_stable_decay", "warmup_proportion": 0.1, "decay_proportion": 0.3}
MASK_RATE, SCORED_MASK_RATE = 0.3, 0.15
SCORED_BLOCKS, SCORED_AT_ONCE = 1024, 64
MASK_ID = 4  # in the vocabularies that data/prepare.py trains without [unused] tokens


def modern_config(layers: int) -> dict[str, Any]:
    """A ModernBERT with 64 hidden units, and one head, per layer."""
    return {
        "model_type": "modernbert",
        "hidden_size": 64 * layers,
        "num_hidden_layers": layers,
        "num_attention_heads": layers,
        "intermediate_size": 192 * layers,
        "max_position_embeddings": LENGTH,
        "vocab_size": VOCABULARY,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "pad_token_id": 0,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }


class Contestant(NamedTuple):
    """optimizer: one of transformers_training.OPTIMIZERS, or a flag of run_pretraining.py."""

    optimizer: str
    is_peer: bool


CONTESTANTS = {
    "ModernBERT, NorMuon": Contestant("NorMuon", False),
    "ModernBERT, AdamW": Contestant("AdamW", False),
    "transformers ModernBERT, AdamW": Contestant("AdamW", True),
    "transformers ModernBERT, Muon": Contestant("Muon", True),
}


class Plan(NamedTuple):
    """A run: of a contestant, with the config of its model."""

    contestant: Contestant
    config: dict[str, Any]
    learning_rate: float
    updates: int
    seed: int


# --- the data -------------------------------------------------------------------------------------


class Data(NamedTuple):
    work: Path
    vocab: Path
    train_blocks: np.ndarray  # [blocks, LENGTH]
    held_out_blocks: np.ndarray
    mask_id: int = MASK_ID


def prepare(books_folder: Path, work: Path) -> Data:
    """The vocabulary, trained on the training text; the shards of this project, and the blocks of
    transformers and of the scorer.
    """
    books = {path.name: path for path in sorted(books_folder.glob("*.txt"))}
    if missing := [name for name in HELD_OUT if name not in books]:
        raise UserError(f"{books_folder} lacks {missing[0]}, a held-out book")
    text = work / "text"
    vocab = work / "vocab" / "vocab.txt"
    done = work / "prepared"
    if not done.exists():
        shutil.rmtree(work, ignore_errors=True)
        for name, path in books.items():
            target = text / ("test" if name in HELD_OUT else "training") / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(sentence_lines(path.read_text(encoding="utf-8")), encoding="utf-8")
        run_program(
            "data/prepare.py",
            "vocabulary",
            f"--sharded={text}",
            f"--output-dir={work}",
            f"--vocab-size={VOCABULARY}",
            "--unused=0",
        )
        run_program(
            "create_pretraining_data.py",
            f"--input-dir={text / 'training'}",
            f"--output-dir={work / 'shards'}",
            f"--vocab-file={vocab}",
            f"--max-seq-length={LENGTH}",
            "--no-nsp",
            "--dynamic-masking",
        )
        for split in ("training", "test"):
            np.save(work / f"{split}.npy", packed_blocks(text / split, vocab))
        done.touch()
    return Data(work, vocab, np.load(work / "training.npy"), np.load(work / "test.npy"))


def masked(
    ids_BS: torch.Tensor, rate: float, generator: torch.Generator, mask_id: int = MASK_ID
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and labels [B, LENGTH] of masked language modelling: a share `rate` of the tokens but
    [CLS] and [SEP], of which 80% are replaced by [MASK], 10% by a random token and 10% by
    themselves; -100 elsewhere.
    """
    chosen = torch.rand(ids_BS.shape, generator=generator) < rate
    chosen[:, [0, -1]] = False
    kind = torch.rand(ids_BS.shape, generator=generator)
    random_ids = torch.randint(VOCABULARY, ids_BS.shape, generator=generator)
    replaced = torch.where(kind < 0.8, mask_id, torch.where(kind < 0.9, random_ids, ids_BS))
    return torch.where(chosen, replaced, ids_BS), ids_BS.masked_fill(~chosen, -100)


def run_program(program: str, *flags: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    interpreter = "bash" if program.endswith(".sh") else sys.executable
    command = [interpreter, str(ROOT / program), *flags]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise UserError(f"{program} failed:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")


def packed_blocks(folder: Path, vocab: Path, do_lower_case: bool = True) -> np.ndarray:
    """The books' tokens end to end, in blocks of LENGTH with [CLS] and [SEP] around."""
    tokenizer = BertTokenizer(vocab, do_lower_case=do_lower_case)
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

    def __init__(self, plan: Plan, data: Data, folder: Path):
        torch.set_num_threads(1)
        torch.manual_seed(plan.seed)
        self.model = masked_lm_model(plan.config)
        self.optimizer = plan.contestant.optimizer
        self.blocks = torch.from_numpy(data.train_blocks)
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.folder = folder
        self.trainer = TransformersTrainer(
            self.model,
            len(self.blocks),
            self.make_batch,
            ScheduleConfig(plan.learning_rate, **SCHEDULE),
            plan.updates,
            BATCH,
            plan.seed,
            optimizer=self.optimizer,
        )

    def settings(self) -> dict[str, Any]:
        return describe(self.model, amp=False, optimizer=self.optimizer, compiled=False)

    def make_batch(self, chosen: np.ndarray) -> dict[str, torch.Tensor]:
        inputs, labels = masked(self.blocks[chosen], MASK_RATE, self.generator)
        return {"input_ids": inputs, "labels": labels}

    def run(self) -> dict[str, Any]:
        self.trainer.train()
        self.model.save_pretrained(self.folder / "checkpoint")
        return {"peer": self.settings()}


def project_flags(plan: Plan, data: Data, folder: Path) -> list[str]:
    """The flags of run_pretraining.py for a run in `folder`, which gets the model's config."""
    flags = {
        "input-dir": data.work / "shards",
        "output-dir": folder,
        "bert-model": "custom",
        "device": "cpu",
        "seed": plan.seed,
        "config-file": folder / "config.json",
        "vocab-file": data.vocab,
        "max-steps": plan.updates,
        "batch-size": BATCH,
        "max-seq-length": LENGTH,
        "masked-lm-prob": MASK_RATE,
        "learning-rate": plan.learning_rate,
        "warmup-proportion": SCHEDULE["warmup_proportion"],
        "lr-decay": SCHEDULE["decay"],
        "lr-decay-proportion": SCHEDULE["decay_proportion"],
        "optimizer": plan.contestant.optimizer,
        "num-steps-per-checkpoint": plan.updates,
        "report-file": folder / "report.json",
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", plan.config)
    return [f"--{name}={value}" for name, value in flags.items()]


def train(plan: Plan, data: Data, folder: Path) -> dict[str, Any]:
    """Trains in a process of its own; returns the peer's settings."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    folder.mkdir(parents=True)
    if plan.contestant.is_peer:
        return call_in_worker(TransformersRun, "run", plan, data, folder)
    run_program("run_pretraining.py", *project_flags(plan, data, folder))
    return {}


# --- the score ------------------------------------------------------------------------------------


@torch.inference_mode()
def score(checkpoint: Path, data: Data) -> dict[str, float]:
    """Cross-entropy in nats per masked token of the held-out blocks, and the accuracy."""
    silence_imports()
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForMaskedLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    count = len(data.held_out_blocks)
    rows = np.linspace(0, count - 1, min(SCORED_BLOCKS, count)).astype(int)
    blocks = torch.from_numpy(data.held_out_blocks[rows])
    generator = torch.Generator()
    generator.manual_seed(0)
    loss = correct = count = 0.0
    for ids in blocks.split(SCORED_AT_ONCE):
        input_ids, labels = masked(ids, SCORED_MASK_RATE, generator, data.mask_id)
        is_masked = labels != -100
        logits, labels = model(input_ids=input_ids).logits[is_masked], labels[is_masked]
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    return {"loss": loss / count, "accuracy": correct / count}
