"""Sentence embeddings: a run of this project and one of sentence-transformers, for
compare_fine_tuning.py.
"""

import math
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import run_embeddings
from benchmarks.common.transformers_training import (
    TransformersTrainer,
    peer_attention,
    precision_name,
    silence_imports,
)
from bert_recipe.config import ScheduleConfig
from bert_recipe.config.arguments import make_run_config
from bert_recipe.tasks.embeddings.files import read_tuples
from bert_recipe.tasks.embeddings.options import EmbeddingTaskOptions
from bert_recipe.tasks.embeddings.task import EmbeddingTask
from bert_recipe.training.evaluation import predict
from bert_recipe.training.plan import open_runs
from bert_recipe.training.setup import build_trainer, make_loader, start_runtime
from bert_recipe.utils.command_line import Arguments
from bert_recipe.utils.device import select_device

STS_COLUMNS = {"text-column": "sentence1", "pair-column": "sentence2", "label-column": "score"}
EMBEDDINGS = {
    "squad-embedding": {},
    "sts-b-embedding": STS_COLUMNS,
}  # tasks, and columns of their files
PAIRS_RATE = "training_pairs_per_cpu_second"
WARMUP, PREDICTED_AT_ONCE = 0.1, 32


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

    def run(self) -> dict[str, float]:
        seconds: list[float] = []
        with tempfile.TemporaryDirectory(prefix="compare_fine_tuning_") as work:
            parsed = run_embeddings.parse_arguments([*self.flags, f"--output-dir={work}"])
            config = make_run_config(parsed)
            with start_runtime(config, "embeddings") as runtime:
                started = time.process_time()
                [run] = open_runs(config, run_embeddings.task_options(parsed), runtime).values()
                (dev,) = run.data.sets
                texts = 2 * len(run.data.dataset) + len(dev.dataset)
                tokenization = 2 * (time.process_time() - started) / texts  # of a pair
                trainer = build_trainer(run, runtime)
                trainer.train(timed(make_loader(trainer), seconds))
                vectors, _ = predict(
                    trainer.parallel, dev.dataset, "sequence", config.prediction.batch_size, runtime
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

    def run(self) -> dict[str, Any]:
        args = self.args
        num_pairs = len(self.train.rows)
        max_steps = math.ceil(args.epochs * num_pairs / args.batch_size)
        config = ScheduleConfig(args.learning_rate, warmup_proportion=WARMUP)
        loss = PairsLoss(self.model, self.score)
        trainer = TransformersTrainer(
            loss, num_pairs, self.batch, config, max_steps, args.batch_size, self.seed, args.amp
        )
        started = time.process_time()
        trainer.train()
        rate = max_steps * args.batch_size / (time.process_time() - started)
        self.model.eval()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=args.amp):
            vectors = self.model.encode(self.dev.texts, batch_size=PREDICTED_AT_ONCE)
        columns = None if self.score is None else [self.score]
        options = EmbeddingTaskOptions(label_column=columns)
        scores = EmbeddingTask(options).finish(self.dev, vectors, None)
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
