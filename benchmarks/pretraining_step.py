#!/usr/bin/env python3
"""Speed of whole pre-training steps, compared with transformers' BERT or ModernBERT.

    python3 benchmarks/pretraining_step.py --model mini --amp --compile-peers
    python3 benchmarks/pretraining_step.py --model modernbert-base --amp

Both get the same weights, 32 sequences of real text of up to 128 tokens, precision, optimizer
(AdamW), dropout (0.1), threads and allocator, and take turns. --compile-peers adds transformers
compiled, where this project is not; gpu_first_hour.py compiles both. transformers runs with flash
attention on a GPU where it is installed, else with sdpa, and on a CPU a second time with eager
attention, since either may be the faster one; with fused AdamW and rows padded to the longest one.
Its class for BERT computes the logits of all tokens and cannot be told otherwise, so the class's
model and heads are called by themselves, with the masked tokens only. BERT's pooler reads the first
token of each row, so the rows cannot be flattened. ModernBERT's class computes the logits of masked
tokens only, as here, and with flash attention no padding. Rates count
real tokens, without padding. Batches are made before the steps, so `data` is part of no rate. Needs
transformers.
"""

import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.results import (
    MODELS,
    MODERN_MODELS,
    benchmark_parser,
    config_file,
    format_quartiles,
    paired_ratio,
    quartiles,
    write_result,
)
from benchmarks.common.shards import make_shards
from benchmarks.common.training import (
    MAX_GRAD_NORM,
    fused_adamw,
    measured_trainer,
    train_step,
)
from benchmarks.common.transformers_training import (
    PEER_ATTENTION,
    describe,
    masked_lm_model,
    peer_attention,
    silence_imports,
)
from benchmarks.common.worker import (
    THIS_PROJECT,
    TRANSFORMERS,
    Worker,
    measure_in_turns,
)
from bert_recipe.checkpoint.model_folder import read_config
from bert_recipe.config import LoaderConfig
from bert_recipe.data_loading.loader import make_step_batch
from bert_recipe.data_loading.packing import MicroBatchLimits, stream_sizes
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.data_loading.sample_order import sample_order
from bert_recipe.model.encoders.registry import make_model
from bert_recipe.model.token_stream import IGNORED_LABEL, StepBatch, to_device
from bert_recipe.optimization.precision import Precision
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.pretraining import PretrainingTask
from bert_recipe.utils.command_line import Arguments, Flag, positive_int
from bert_recipe.utils.device import select_device, set_num_threads
from bert_recipe.utils.errors import run_main
from bert_recipe.utils.measure import Stopwatch, synchronize
from bert_recipe.utils.progress import print_line

FLAGS = (
    Flag("--model", (*MODELS, *MODERN_MODELS), "mini", "architecture"),
    Flag("--device", ("auto", "cuda", "cpu"), "auto", "device"),
    Flag("--amp", bool, False, "bfloat16 instead of float32"),
    Flag("--compile-peers", bool, False, "also measure transformers compiled"),
    PEER_ATTENTION,
    Flag("--rounds", positive_int, 5, "turns of each implementation"),
    Flag("--steps", positive_int, 4, "steps per turn"),
)


def parse_arguments(argv=None) -> Arguments:
    parser = benchmark_parser(__doc__, *FLAGS)
    parser.set_defaults(seq_length=128, batch_size=32, gradient_merge_steps=1, compile="none")
    return parser.parse_args(argv)


def make_runtime(args: Arguments) -> Runtime:
    return Runtime(
        select_device(args.device), Precision(torch.bfloat16 if args.amp else torch.float32)
    )


class Implementation:
    """A model with the weights of seed 0, its batches, and its steps. Subclasses have `load_batch`,
    which makes a batch of the samples of one step, and `step`, which makes one optimizer step whose
    parts are timed by `stopwatch`.
    """

    def __init__(self, args: Arguments, folder: Path):
        self.args = args
        self.runtime = make_runtime(args)
        self.stopwatch = Stopwatch(self.runtime.device)
        self.is_bert = args.model not in MODERN_MODELS
        self.config = read_config(config_file(args.model))
        self.dataset = dataset = PretrainingDataset(folder, self.config.vocab_size)
        sizes = args.batch_size, args.batch_size * args.gradient_merge_steps
        self.loader = LoaderConfig(*sizes, dataset.sequence_length, dataset.max_labelled_per_sample)
        shape = (args.rounds + 1) * args.steps, sizes[1]  # the samples of all steps of all rounds
        samples = sample_order(np.arange(shape[0] * shape[1]), len(dataset), seed=1).reshape(shape)
        started = time.perf_counter()
        self.batches = [self.load_batch(dataset, indices) for indices in samples]
        self.data_seconds = (time.perf_counter() - started) / len(self.batches)  # to make a batch
        torch.manual_seed(0)
        self.model = make_model("pretraining", self.config)

    def turn(self, number: int) -> dict:
        """The steps of one turn: their time, in all and by part, and their tokens. On a
        GPU, a step that is not timed comes first, and the memory of activations is given back at
        the end: both models' would not fit.
        """
        batches = self.batches[number * self.args.steps : (number + 1) * self.args.steps]
        is_cuda = self.runtime.device.type == "cuda"
        if is_cuda:
            self.step(batches[0])
            synchronize(self.runtime.device)
        self.stopwatch.seconds()
        started = time.perf_counter()
        for batch in batches:
            self.step(batch)
        synchronize(self.runtime.device)
        seconds = time.perf_counter() - started
        parts = {kind: sum(laps) for kind, laps in self.stopwatch.seconds().items()}
        if is_cuda:
            torch.cuda.empty_cache()
        return {
            "seconds": seconds,
            "parts": {"data": self.data_seconds * len(batches), **parts},
            "tokens": sum(int(batch.lengths.sum()) for batch in batches),
        }


class ThisProject(Implementation):
    """The training loop of run_pretraining.py."""

    def __init__(self, args: Arguments, folder: Path):
        super().__init__(args, folder)
        task = PretrainingTask(self.is_bert, args.seq_length)
        self.trainer = measured_trainer(
            self.model,
            task,
            self.dataset,
            self.runtime,
            self.loader.batch_size,
            global_batch_size=self.loader.global_batch_size,
            compile=args.compile,
        )
        self.stopwatch = self.trainer.stopwatch

    def settings(self) -> dict[str, Any]:
        return {"optimizer": "AdamW", "compiled": self.args.compile != "none"}

    def load_batch(self, dataset: PretrainingDataset, indices: np.ndarray) -> StepBatch:
        dtype = self.runtime.precision.dtype
        compiled = self.args.compile != "none"
        limits = MicroBatchLimits.of(
            self.loader,
            stream_sizes(self.runtime.device, dtype),
            sequences_per_sample=dataset.max_sequences_per_sample,
            is_compiled=compiled,
        )
        return make_step_batch(
            dataset, indices, limits, pin_memory=self.runtime.device.type == "cuda"
        )

    def step(self, batch: StepBatch) -> None:
        train_step(self.trainer, batch)


class Transformers(Implementation):
    """transformers' model in a plain loop over the same sequences.

    compiled: also without --compile.
    attention: by default that of the arguments.
    """

    def __init__(
        self, args: Arguments, folder: Path, compiled: bool = False, attention: str | None = None
    ):
        super().__init__(args, folder)
        self.compiled = compiled or args.compile != "none"
        silence_imports()
        from transformers import BertConfig, BertForPreTraining

        values = self.config.to_dict() | {"attn_implementation": attention or peer_attention(args)}
        if self.is_bert:
            model = BertForPreTraining(BertConfig(**values))
        else:  # with flash attention it computes no padding
            values = {"model_type": "modernbert", "pad_token_id": 0} | values
            model = masked_lm_model(values)
        model.load_state_dict(self.model.state_dict(), strict=False)
        model.tie_weights()
        self.model = model.to(self.runtime.device).train()
        self.optimizer = fused_adamw(self.model)
        training_model = MaskedOnlyBert(self.model) if self.is_bert else self.model
        self.forward = torch.compile(training_model) if self.compiled else training_model

    def settings(self) -> dict[str, Any]:
        more = {"optimizer": "AdamW, fused", "compiled": self.compiled}
        if self.is_bert:
            more |= {
                "class": "BertModel, BertPreTrainingHeads",
                "logits of masked tokens only": True,
            }
        return describe(self.model, self.args.amp) | more

    def load_batch(self, dataset: PretrainingDataset, indices: np.ndarray) -> StepBatch:
        rows = indices.reshape(-1, self.args.batch_size)
        limits = MicroBatchLimits.of(
            self.loader, sequences_per_sample=dataset.max_sequences_per_sample
        )
        parts = [make_step_batch(dataset, some, limits) for some in rows]
        pin = self.runtime.device.type == "cuda"
        return dataclasses.replace(
            parts[0],
            micro_batches=[
                pad(stream, pin, self.is_bert) for part in parts for stream in part.micro_batches
            ],
            lengths=np.concatenate([part.lengths for part in parts]),
            num_labelled=np.concatenate([part.num_labelled for part in parts]),
        )

    def step(self, batch: StepBatch) -> None:
        for rows in batch.micro_batches:
            with self.stopwatch.lap("forward"), self.runtime.precision.context(self.runtime.device):
                loss = self.forward(**to_device(rows, self.runtime.device)).loss / len(
                    batch.micro_batches
                )
            with self.stopwatch.lap("backward"):
                loss.backward()
        with self.stopwatch.lap("optimizer"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


class Output(NamedTuple):
    loss: torch.Tensor


class MaskedOnlyBert(nn.Module):
    """What someone who knows transformers' parts writes to compute no logits but those of masked
    tokens. The loss is that of `BertForPreTraining`.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(
        self,
        masked_positions: torch.Tensor,
        labels: torch.Tensor,
        next_sentence_label: torch.Tensor,
        **inputs: torch.Tensor,
    ) -> Output:
        """masked_positions: in the flattened rows; labels: of these."""
        output = self.model.bert(**inputs)
        hidden = output.last_hidden_state.flatten(0, 1)[masked_positions]
        loss = cross_entropy(self.model.cls.predictions(hidden), labels)
        next_sentence_logits = self.model.cls.seq_relationship(output.pooler_output)
        loss = loss + cross_entropy(next_sentence_logits, next_sentence_label)
        return Output(loss)


def pad(
    stream: dict[str, torch.Tensor], pin_memory: bool, is_bert: bool = True
) -> dict[str, torch.Tensor]:
    """A token stream as the padded rows and labels that transformers takes, for BERT the inputs of
    MaskedOnlyBert. Without filler there is no mask of attention, which would rule out faster
    kernels.
    """
    lengths = stream["cu_seqlens"].diff().tolist()
    labels = torch.full_like(stream["input_ids"], IGNORED_LABEL)
    labels[stream["mlm_positions"]] = stream["mlm_labels"]

    def rows(values: torch.Tensor, filler: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            values.split(lengths), batch_first=True, padding_value=filler
        )

    padded = {
        "input_ids": rows(stream["input_ids"], 0),
        "labels": rows(labels, IGNORED_LABEL),
    }
    if len(set(lengths)) > 1:
        padded["attention_mask"] = rows(torch.ones_like(labels), 0)
    if is_bert:
        padded["token_type_ids"] = rows(stream["token_type_ids"], 0)
        padded["next_sentence_label"] = stream["nsp_labels"]
        labels = padded["labels"].flatten()
        padded["masked_positions"] = (labels != IGNORED_LABEL).nonzero().flatten()
        padded["labels"] = labels[padded["masked_positions"]]
    return {name: tensor.pin_memory() for name, tensor in padded.items()} if pin_memory else padded


def measure(args: Arguments, folder: Path) -> dict:
    sides = {TRANSFORMERS: Transformers, THIS_PROJECT: ThisProject}
    workers = {name: Worker(side, (args, folder)) for name, side in sides.items()}
    if make_runtime(args).device.type == "cpu" and not args.peer_attention:
        workers[f"{TRANSFORMERS}, eager"] = Worker(Transformers, (args, folder, False, "eager"))
    if args.compile_peers:
        workers[f"{TRANSFORMERS}, compiled"] = Worker(Transformers, (args, folder, True))
    turns, settings, memory = measure_in_turns(workers, args.rounds)
    rates = {
        name: [turn["tokens"] / turn["seconds"] for turn in its_turns]
        for name, its_turns in turns.items()
    }
    figures = {}
    for name, its_turns in turns.items():
        milliseconds = {
            kind: 1e3
            / args.steps
            * quartiles([turn["parts"][kind] for turn in its_turns])["median"]
            for kind in its_turns[0]["parts"]
        }
        figures[name] = {
            "tokens_per_second": quartiles(rates[name]),
            "milliseconds": milliseconds,
            "peak_memory_gib": memory[name],
        }
    our_rates = rates.pop(THIS_PROJECT)
    speedups = {name: paired_ratio(our_rates, peer_rates) for name, peer_rates in rates.items()}
    return {
        "arguments": {name: value for name, value in args.as_dict().items() if name != "output"},
        "settings": settings,
        "implementations": figures,
        "speedup": speedups,
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    runtime = make_runtime(args)
    set_num_threads()  # as the workers do, for machine_info
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(args, make_shards(Path(scratch), args.seq_length))
    print_line(f"{'':30}{'tokens/s (quartiles)':>24}  milliseconds per step")
    for name, figures in result["implementations"].items():
        milliseconds = ", ".join(
            f"{kind} {value:.0f}" for kind, value in figures["milliseconds"].items()
        )
        print_line(
            f"{name:30}{format_quartiles(figures['tokens_per_second'], ',.0f'):>24} "
            f" {milliseconds}, peak memory {figures['peak_memory_gib']:.1f} GiB"
        )
    for name, ratio in result["speedup"].items():
        print_line(f"{THIS_PROJECT} / {name}: {format_quartiles(ratio)}")
    parts = [
        "pretraining_step",
        runtime.device.type,
        args.model,
        str(args.seq_length),
        "bf16" if args.amp else "fp32",
    ]
    write_result(args.output, "-".join(parts), runtime.device, result)


if __name__ == "__main__":
    run_main(main)
