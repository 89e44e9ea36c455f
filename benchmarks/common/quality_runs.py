"""The contestants of time_to_quality.py, their data, their runs and the score of a run."""

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common.results import ROOT
from benchmarks.common.shards import sentence_lines
from benchmarks.common.transformers_training import (
    SavedState,
    TransformersTrainer,
    describe,
    masked_lm_model,
    silence_imports,
)
from benchmarks.common.worker import TRANSFORMERS, call_in_worker
from bert_recipe.config import ScheduleConfig
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import read_json, write_json

HELD_OUT = ("frankenstein.txt", "the-picture-of-dorian-gray.txt", "treasure-island.txt")
LENGTH, BATCH, VOCABULARY = 128, 64, 8000
HIDDEN, LAYERS, HEADS = 128, 2, 2
SAVES = 5  # states that a run saves, to continue from after a stop
SCORED_BLOCKS = 1024
MASK_ID = 4  # in the vocabularies that data/prepare.py trains without [unused] tokens

SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "vocab_size": VOCABULARY,
}
BERT_CONFIG = {
    "model_type": "bert",
    "intermediate_size": 4 * HIDDEN,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    **SIZES,
}
MODERN_CONFIG = {
    "model_type": "modernbert",
    "intermediate_size": 3 * HIDDEN,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
    **SIZES,
}


class Contestant(NamedTuple):
    """learning_rate: where the search starts. library: transformers, or none for this recipe.
    optimizer: one of transformers_training.OPTIMIZERS, or a flag of run_pretraining.py. batch:
    blocks per update. causal: a flag of run_pretraining.py.
    """

    config: dict[str, Any]
    learning_rate: float
    optimizer: str
    library: str = ""
    batch: int = BATCH
    causal: float = 0.0

    def with_layers(self, layers: int) -> "Contestant":
        """With `layers` layers of 64 hidden units per layer, and one head per 64 of them."""
        factor = layers / LAYERS
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        return self._replace(
            config=self.config | {name: int(self.config[name] * factor) for name in sizes}
        )


CONTESTANTS = {
    "transformers ModernBERT, AdamW": Contestant(MODERN_CONFIG, 4e-3, "AdamW", TRANSFORMERS),
    "ModernBERT, AdamW": Contestant(MODERN_CONFIG, 4e-3, "AdamW"),
    "ModernBERT, Muon": Contestant(MODERN_CONFIG, 8e-3, "Muon"),
    "ModernBERT, NorMuon": Contestant(MODERN_CONFIG, 8e-3, "NorMuon"),
    "transformers ModernBERT, AdamW, batches of 32": Contestant(
        MODERN_CONFIG, 4e-3, "AdamW", TRANSFORMERS, 32
    ),
    "transformers ModernBERT, Muon, batches of 32": Contestant(
        MODERN_CONFIG, 5.6e-3, "Muon", TRANSFORMERS, 32
    ),
    "ModernBERT, AdamW, batches of 32": Contestant(MODERN_CONFIG, 4e-3, "AdamW", batch=32),
    "ModernBERT, NorMuon, batches of 32": Contestant(MODERN_CONFIG, 5.6e-3, "NorMuon", batch=32),
    "ModernBERT, NorMuon, batches of 32, causal first": Contestant(
        MODERN_CONFIG, 5.6e-3, "NorMuon", batch=32, causal=0.25
    ),
    "transformers BERT, AdamW": Contestant(BERT_CONFIG, 1e-3, "AdamW", TRANSFORMERS),
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


def run_program(program: str, *flags: str) -> None:
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
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = masked_lm_model(contestant.config)
        self.optimizer, self.amp = contestant.optimizer, setting.amp
        self.blocks = torch.from_numpy(data.train_blocks)
        self.mask_rate = setting.mask_rate
        self.generator = torch.Generator().manual_seed(seed)
        self.folder = folder
        self.state = SavedState(
            folder / "state.safetensors", max(updates // SAVES, 1), self.generator
        )
        self.trainer = TransformersTrainer(
            self.model,
            len(self.blocks),
            self.make_batch,
            ScheduleConfig(updates, setting.learning_rate, **SCHEDULES[setting.schedule]),
            contestant.batch,
            seed,
            setting.amp,
            contestant.optimizer,
        )

    def settings(self) -> dict[str, Any]:
        return describe(self.model, self.amp, optimizer=self.optimizer, compiled=False)

    def make_batch(self, chosen: np.ndarray) -> dict[str, torch.Tensor]:
        inputs, labels = masked(self.blocks[chosen], self.mask_rate, self.generator)
        return {"input_ids": inputs, "labels": labels}

    def run(self) -> dict[str, Any]:
        self.trainer.train(self.state)
        self.model.save_pretrained(self.folder / "checkpoint")
        return {"peer": self.settings()}


def project_flags(
    contestant: Contestant, setting: Setting, updates: int, seed: int, data: Data, folder: Path
) -> list[str]:
    """The flags of run_pretraining.py for a run in `folder`, which gets the model's config."""
    schedule = SCHEDULES[setting.schedule]
    flags = {
        "input-dir": data.work / "shards",
        "output-dir": folder,
        "bert-model": "custom",
        "device": "cpu",
        "seed": seed,
        "config-file": folder / "config.json",
        "vocab-file": data.vocab,
        "max-steps": updates,
        "batch-size": contestant.batch,
        "max-seq-length": LENGTH,
        "masked-lm-prob": setting.mask_rate,
        "learning-rate": setting.learning_rate,
        "warmup-proportion": schedule["warmup_proportion"],
        "optimizer": contestant.optimizer,
        "causal-proportion": contestant.causal,
        "num-steps-per-checkpoint": max(updates // SAVES, 1),
        "report-file": folder / "report.json",
        "amp": setting.amp,
    }
    flags |= {
        f"lr-{key.replace('_', '-')}": value
        for key, value in schedule.items()
        if "warmup" not in key
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", contestant.config)
    return [f"--{name}={value}" for name, value in flags.items()]


def train(
    contestant: Contestant, setting: Setting, updates: int, seed: int, data: Data, folder: Path
) -> dict[str, Any]:
    """Trains in a process of its own; returns its seconds, also of interrupted starts, and the
    peer's settings. `folder` keeps the state.
    """
    clock = folder / "seconds.json"
    arguments = (contestant, setting, updates, seed, data, folder)
    folder.mkdir(parents=True, exist_ok=True)
    earlier = {"cpu_seconds": 0.0, "seconds": 0.0}
    if clock.is_file():
        earlier = read_json(clock, "the clock")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    settings = {}
    try:
        if contestant.library:
            settings = call_in_worker(TransformersRun, "run", *arguments)
        else:
            flags = project_flags(*arguments)
            run_program("run_pretraining.py", "--resume-from-checkpoint", *flags)
    finally:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        seconds = {"cpu_seconds": cpu_seconds, "seconds": time.perf_counter() - started}
        total = {kind: earlier[kind] + value for kind, value in seconds.items()}
        write_json(clock, total)
    return total | settings


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
    count = len(data.held_out_blocks)
    rows = np.linspace(0, count - 1, min(SCORED_BLOCKS, count)).astype(int)
    blocks = torch.from_numpy(data.held_out_blocks[rows])
    generator = torch.Generator()
    generator.manual_seed(0)
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
