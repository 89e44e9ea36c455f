"""Sentence embeddings: a run of this project and one of sentence-transformers, for
compare_fine_tuning.py, and the rates of their updates, for a GPU.
"""

import itertools
import math
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import run_embeddings
from benchmarks.common.results import ROOT, config_file
from benchmarks.common.shards import VOCAB_FILE
from benchmarks.common.training import train_step
from benchmarks.common.transformers_training import (
    TransformersTrainer,
    peer_attention,
    precision_name,
    silence_imports,
)
from bert_recipe.config import ScheduleConfig
from bert_recipe.config.arguments import make_run_config
from bert_recipe.tasks.embeddings.files import read_tuples
from bert_recipe.tasks.embeddings.task import EmbeddingTask
from bert_recipe.training.evaluation import predict
from bert_recipe.training.setup import start_runtime
from bert_recipe.training.workflow import plan_training
from bert_recipe.utils.command_line import Arguments
from bert_recipe.utils.device import select_device
from bert_recipe.utils.files import read_json
from bert_recipe.utils.measure import synchronize

STS_COLUMNS = {"text-column": "sentence1", "pair-column": "sentence2", "label-column": "score"}
EMBEDDINGS = {
    "squad-embedding": {},
    "sts-b-embedding": STS_COLUMNS,
}  # tasks, and columns of their files
PAIRS_RATE = "training_pairs_per_cpu_second"
WARMUP_UPDATES, NUM_UPDATES = 5, 25  # of `embedding_rates`


class ProjectEmbeddings:
    """run_embeddings.py's training, in this process for the processor time of its updates.
    flags: of training.
    """

    def __init__(self, args: Arguments, train_file: Path, dev_file: Path, flags: list[str]):
        task = {"train-file": train_file, "eval-file": dev_file}
        self.args = args
        self.flags = [
            *flags,
            *(f"--{name}={value}" for name, value in (task | EMBEDDINGS[args.task_name]).items()),
        ]

    def updates_per_second(self) -> float:
        with tempfile.TemporaryDirectory(prefix="embeddings_") as work:
            parsed = run_embeddings.parse_arguments([*self.flags, f"--output-dir={work}"])
            config = make_run_config(parsed)
            with start_runtime(config, "embeddings") as runtime:
                [plan] = plan_training(config, run_embeddings.make_task(parsed), runtime).values()
                trainer = plan.build_trainer(runtime)
                batches = iter([*itertools.islice(plan.make_loader(trainer), NUM_UPDATES)])
                return rate_of(lambda _: train_step(trainer, next(batches)), runtime.device)

    def run(self) -> dict[str, float]:
        seconds: list[float] = []
        with tempfile.TemporaryDirectory(prefix="compare_fine_tuning_") as work:
            parsed = run_embeddings.parse_arguments([*self.flags, f"--output-dir={work}"])
            config = make_run_config(parsed)
            with start_runtime(config, "embeddings") as runtime:
                started = time.process_time()
                [plan] = plan_training(config, run_embeddings.make_task(parsed), runtime).values()
                (dev,) = plan.data.sets
                texts = 2 * len(plan.data.dataset) + len(dev.dataset)
                tokenization = 2 * (time.process_time() - started) / texts  # of a pair
                trainer = plan.build_trainer(runtime)
                trainer.train(timed(plan.make_loader(trainer), seconds))
                vectors, _ = predict(
                    trainer.parallel, dev.dataset, "sequence", config.prediction, runtime
                )
        rate = 1 / (tokenization + float(np.mean(seconds)) / self.args.batch_size)
        return dev.finish(vectors, None) | {PAIRS_RATE: rate}


def timed(batches: Iterable, seconds: list[float]) -> Iterator:
    """The batches; `seconds` gets the processor time from each to the next."""
    iterator = iter(batches)
    while True:
        started = time.process_time()
        yield next(iterator)
        seconds.append(time.process_time() - started)


class SentenceTransformersRun:
    """The same with sentence-transformers' model and loss."""

    def __init__(
        self, args: Arguments, train_file: Path, dev_file: Path, model_folder: Path, seed: int
    ):
        silence_imports()
        from sentence_transformers import SentenceTransformer

        torch.manual_seed(seed)
        self.args = args
        self.seed = seed
        self.device = select_device(args.device)
        # With flash attention it computes no padding.
        options = {"attn_implementation": peer_attention(args)}
        self.model = SentenceTransformer(
            str(model_folder), device=str(self.device), model_kwargs=options
        )
        self.model.max_seq_length = args.max_seq_length
        *columns, self.score = EMBEDDINGS[args.task_name].values() or (None,)
        self.train, self.dev = (
            read_tuples(file, columns, self.score) for file in (train_file, dev_file)
        )

    def batch(self, chosen: np.ndarray) -> dict[str, Any]:
        rows = [self.train.rows[index] for index in chosen]
        features = [
            self.model.preprocess([self.train.texts[row[side]] for row in rows])
            for side in range(2)
        ]
        return {
            "features": features,
            "scores": self.score and torch.tensor([self.train.scores[i] for i in chosen]),
        }

    def settings(self) -> dict[str, Any]:
        from importlib.metadata import version

        attention = self.model[0].auto_model.config._attn_implementation
        return {
            "library": f"sentence-transformers {version('sentence-transformers')}",
            "attention": attention,
            "padding": not self.model[0].can_flatten_inputs,
            "precision": precision_name(self.args.amp),
            "optimizer": "AdamW",
            "batches": "in random order: the library has no sampler by length",
            "compiled": False,
        }

    def make_trainer(self, max_steps: int) -> TransformersTrainer:
        args = self.args
        config = ScheduleConfig(
            max_steps, args.learning_rate, warmup_proportion=args.warmup_proportion
        )
        loss = PairsLoss(self.model, self.score)
        num_pairs = len(self.train.rows)
        return TransformersTrainer(
            loss, num_pairs, self.batch, config, args.batch_size, self.seed, args.amp
        )

    def updates_per_second(self) -> float:
        trainer = self.make_trainer(NUM_UPDATES)
        chosen = trainer.order.reshape(NUM_UPDATES, -1)
        batches = iter([self.batch(rows) for rows in chosen])
        trainer.make_batch = lambda _: next(batches)
        return rate_of(trainer.update, self.device)

    def run(self) -> dict[str, Any]:
        args = self.args
        max_steps = math.ceil(args.epochs * len(self.train.rows) / args.batch_size)
        trainer = self.make_trainer(max_steps)
        started = time.process_time()
        trainer.train()
        rate = max_steps * args.batch_size / (time.process_time() - started)
        self.model.eval()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=args.amp):
            vectors = self.model.encode(self.dev.texts, batch_size=args.predict_batch_size)
        scores = EmbeddingTask(score=self.score).finish(self.dev, vectors, None)
        return scores | {PAIRS_RATE: rate, "peer": self.settings()}


class PairsLoss(nn.Module):
    """A model's loss as transformers' models return it."""

    def __init__(self, model: nn.Module, score: str | None):
        super().__init__()
        from sentence_transformers.sentence_transformer import losses
        from sentence_transformers.util import batch_to_device

        self.device, self.to_device = model.device, batch_to_device
        self.loss = (
            losses.CoSENTLoss(model) if score else losses.MultipleNegativesRankingLoss(model)
        )

    def forward(self, features: list, scores: torch.Tensor | None) -> SimpleNamespace:
        features = [self.to_device(side, self.device) for side in features]
        scores = None if scores is None else scores.to(self.device)
        return SimpleNamespace(loss=self.loss(features, scores))


def rate_of(update: Callable[[int], Any], device: torch.device) -> float:
    """Updates per second, without the first ones."""
    for step in range(WARMUP_UPDATES):
        update(step)
    synchronize(device)
    started = time.perf_counter()
    for step in range(WARMUP_UPDATES, NUM_UPDATES):
        update(step)
    synchronize(device)
    return (NUM_UPDATES - WARMUP_UPDATES) / (time.perf_counter() - started)


def random_model_folder(name: str, folder: Path) -> Path:
    """transformers' folder of a BERT of bert_configs/ with random weights."""
    silence_imports()
    from transformers import BertConfig, BertModel, BertTokenizerFast

    config = BertConfig(**read_json(config_file(name), "the config"))
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(vocab=str(VOCAB_FILE)).save_pretrained(folder)
    return folder


def embedding_rates(device: str, is_toy: bool, scratch: Path) -> dict[str, Any]:
    """Pairs per second of both, on SQuAD's questions and paragraphs, which are tokenized before.
    None is compiled. Without sentence-transformers: this project's, with no verdict.
    """
    args = Namespace(
        task_name="squad-embedding",
        device=device,
        amp=device == "cuda",
        peer_attention=None,
        max_seq_length=256,
        batch_size=4 if is_toy else 64,
        learning_rate=1e-5,
        warmup_proportion=0.1,
    )
    model = random_model_folder("tiny" if is_toy else "base", scratch / "random")
    files = [ROOT / f"data/sample/squad/{split}-v1.1.json" for split in ("train", "dev")]
    words = {"init-checkpoint": model, "train-batch-size": args.batch_size, "compile": "none"}
    for name in ("device", "amp", "max_seq_length", "learning_rate", "warmup_proportion"):
        words[name.replace("_", "-")] = getattr(args, name)
    flags = ["--do-train", *(f"--{name}={value}" for name, value in words.items())]
    project = ProjectEmbeddings(args, *files, [*flags, f"--max-steps={NUM_UPDATES}"])
    rates = {"this project": args.batch_size * project.updates_per_second()}
    if find_spec("sentence_transformers") is None:
        return {"pairs_per_second": rates, "peer": "sentence-transformers is not installed"}
    peer = SentenceTransformersRun(args, *files, model, seed=0)
    rates["sentence-transformers"] = args.batch_size * peer.updates_per_second()
    ratio = rates["this project"] / rates["sentence-transformers"]
    is_faster = ratio > 1 or device == "cpu"
    return {"pairs_per_second": rates, "ratio": ratio, "peer": peer.settings(), "ok": is_faster}
