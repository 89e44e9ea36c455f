#!/usr/bin/env python3
"""Speed of SQuAD fine-tuning and inference, compared with transformers' BertForQuestionAnswering.

    python3 benchmarks/squad.py --model mini --amp
    python3 benchmarks/squad.py --model large --amp --device cuda

All get the same weights, features and precision, and take turns. transformers (sdpa attention, fused AdamW) runs with
batches padded to their longest sequence and padded to --max-seq-length; on a CPU the first also with the CPU settings
of this project's runs.

Training is whole optimizer steps with dropout. Inference is measured at batch 1 for latency, and at
--predict-batch-size for throughput on the first windows of the file. This project sorts them by length, as run_squad.py
does. transformers gets them in file order, as its run_qa.py evaluates, and also sorted by length if it pads to the
longest. Needs transformers.
"""

import copy
import importlib.metadata
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common.results import compare, format_quartiles, precision_name, quartiles, write_result
from benchmarks.common.training import (
    MAX_GRAD_NORM,
    MODELS,
    fused_adamw,
    load_bert_config,
    make_runtime,
    make_trainer,
    train_step,
)
from benchmarks.common.worker import SAME_SETTINGS, THIS_PROJECT, Worker, take_turns
from data_loading.loader import make_step_batch, to_device, to_tensors
from data_loading.packing import MicroBatchLimits, stream_sizes
from data_loading.sample_order import sample_order
from encoders.bert import BertForQuestionAnswering
from evaluation import prediction_batches, prediction_limits
from run_config import LoaderConfig, ParallelConfig, PredictionConfig
from tasks.squad import SquadTask
from tasks.squad_features import LABELS, SquadDataset
from tasks.squad_file import SquadOptions, read_squad
from token_stream import TokenStream
from tokenizer import BertTokenizer
from utils.command_line import ArgumentParser, Arguments, BooleanFlag, positive_int
from utils.device import select_device, set_num_threads
from utils.errors import run_main
from utils.measure import synchronize
from utils.progress import print_line

VOCAB_FILE = ROOT / "vocab" / "bert-base-uncased-vocab.txt"
PADDED_TO_LONGEST = "padded to the longest"
FILE_ORDER, BY_LENGTH = "in file order", "sorted by length"
INPUTS = ("input_ids", "token_type_ids")


def parse_arguments(argv=None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="mini", help="architecture, with random weights")
    add("--squad-file", type=Path, default=ROOT / "data/sample/squad/train-v1.1.json", help="SQuAD JSON with answers")
    add("--max-seq-length", type=positive_int, default=384, help="tokens of a window")
    add("--train-batch-size", type=positive_int, default=32, help="sequences per step")
    add("--predict-batch-size", type=positive_int, default=32, help="sequences per batch for the throughput")
    add("--amp", action=BooleanFlag, help="bfloat16 instead of float32")
    add("--tf32", action=BooleanFlag, help="TF32 on a GPU")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="device")
    add("--rounds", type=positive_int, default=5, help="turns of each implementation")
    add("--steps", type=positive_int, default=2, help="batches per turn in training; 16 times as many for latency")
    add("--predict-windows", type=positive_int, default=512, help="windows per turn for the throughput")
    add("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


class Turn(NamedTuple):
    batches: int
    sequences: int
    seconds: float


class Implementation(ABC):
    """The features, a model with the weights of seed 0, and the batches of each kind of work."""

    def __init__(self, args: Arguments):
        self.args = args
        self.runtime = make_runtime(args.device, args.amp, tf32=args.tf32)
        self.dataset = SquadDataset(
            read_squad(args.squad_file),
            BertTokenizer(VOCAB_FILE),
            SquadOptions(max_seq_length=args.max_seq_length, version_2_with_negative=True),
            training=True,
        )
        torch.manual_seed(0)
        self.model = BertForQuestionAnswering(load_bert_config(args.model)).to(self.runtime.device)

    @abstractmethod
    def train(self, features: np.ndarray) -> None:
        """One optimizer step with dropout."""

    @abstractmethod
    def predict(self, features: np.ndarray) -> np.ndarray:
        """Start and end logits [2, T] of the real tokens."""

    def first_logits(self) -> np.ndarray:
        return self.predict(self.batches("inference", 0, FILE_ORDER)[0])

    def mean_length(self) -> float:
        return float(self.dataset.lengths.mean())

    def padded_tokens(self, order: str) -> float:
        """Tokens per real token of the windows for the throughput, if each batch is padded to its longest window."""
        lengths = [self.dataset.lengths[batch] for batch in self.batches("inference", 0, order)]
        return float(sum(len(batch) * batch.max() for batch in lengths) / sum(batch.sum() for batch in lengths))

    def batches(self, work: str, number: int, order: str) -> list[np.ndarray]:
        """The features of turn `number`: always the same windows for the throughput, else the next ones in the random
        order of training."""
        if work == "inference":
            lengths = self.dataset.lengths[: self.args.predict_windows]
            return ordered_batches(lengths, self.args.predict_batch_size, order)
        size, count = (self.args.train_batch_size, self.args.steps) if work == "training" else (1, 16 * self.args.steps)
        positions = np.arange(number * count * size, (number + 1) * count * size)
        return np.split(sample_order(positions, len(self.dataset), seed=1), count)

    def turn(self, work: str, order: str, number: int) -> Turn:
        batches = self.batches(work, number, order)
        function, device = self.train if work == "training" else self.predict, self.runtime.device
        synchronize(device)
        started = time.perf_counter()
        for features in batches:
            function(features)
        synchronize(device)
        return Turn(len(batches), sum(map(len, batches)), time.perf_counter() - started)


class ThisProject(Implementation):
    """The training loop and inference of run_squad.py."""

    def __init__(self, args: Arguments):
        super().__init__(args)
        self.inference_model = copy.deepcopy(self.model).eval()
        self.inference_model.prepare_for_inference(self.runtime.precision.dtype)
        num_sizes = stream_sizes(self.runtime.device, self.runtime.precision.dtype, compiled=False)
        batch_size = args.train_batch_size
        self.loader = LoaderConfig(batch_size, batch_size, args.max_seq_length, num_sizes=num_sizes)
        task = SquadTask(args.max_seq_length)
        self.trainer = make_trainer(self.model, task, self.loader, self.runtime, "AdamW", ParallelConfig())

    def train(self, features: np.ndarray) -> None:
        train_step(self.trainer, make_step_batch(self.dataset, features, MicroBatchLimits.of(self.loader)))

    @torch.inference_mode()
    def predict(self, features: np.ndarray) -> np.ndarray:
        stream = {name: array for name, array in self.dataset.stream(features).items() if name not in LABELS}
        inputs = to_tensors(stream, (), prediction_limits(self.dataset, len(features), self.runtime), pin_memory=False)
        max_seqlen = int(self.dataset.lengths[features].max())
        with self.runtime.precision.context(self.runtime.device):
            output = self.inference_model(TokenStream.from_batch(to_device(inputs, self.runtime.device), max_seqlen))
        tokens = int(self.dataset.lengths[features].sum())
        return torch.stack(output)[:, :tokens].float().cpu().numpy()


class Transformers(Implementation):
    """transformers' model in a plain loop over the same features, padded to `length`, or to the longest if None."""

    def __init__(self, args: Arguments, length: int | None):
        super().__init__(args)
        from transformers import BertConfig, BertForQuestionAnswering

        self.length = length
        model = BertForQuestionAnswering(BertConfig(**self.model.config.to_dict(), attn_implementation="sdpa"))
        model.load_state_dict(self.model.state_dict())
        self.model = model.to(self.runtime.device)
        self.optimizer = fused_adamw(self.model)

    def padded(self, features: np.ndarray, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        stream = self.dataset.stream(features)
        length_N = self.dataset.lengths[features]
        real_NS = np.arange(self.length or length_N.max()) < length_N[:, None]
        batch = {"attention_mask": torch.from_numpy(real_NS.astype(np.int64))}
        for name in names:
            values = stream[name]
            if name in INPUTS:
                values = np.zeros(real_NS.shape, np.int64)
                values[real_NS] = stream[name]
            batch[name] = torch.from_numpy(values)
        return to_device(batch, self.runtime.device)

    def train(self, features: np.ndarray) -> None:
        self.model.train()
        batch = self.padded(features, INPUTS + LABELS)
        with self.runtime.precision.context(self.runtime.device):
            loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.inference_mode()
    def predict(self, features: np.ndarray) -> np.ndarray:
        self.model.eval()
        batch = self.padded(features, INPUTS)
        with self.runtime.precision.context(self.runtime.device):
            output = self.model(**batch)
        logits = torch.stack([output.start_logits, output.end_logits])
        return logits.float().cpu().numpy()[:, batch["attention_mask"].cpu().numpy().astype(bool)]


def ordered_batches(lengths: np.ndarray, size: int, order: str) -> list[np.ndarray]:
    """All features once, in the order of the file, or as run_squad.py takes them."""
    if order == BY_LENGTH:
        return prediction_batches(lengths, PredictionConfig(size), rank=0, world_size=1)
    return np.split(np.arange(len(lengths)), range(size, len(lengths), size))


def figures_of(turns: dict[str, list[Turn]]) -> dict[str, dict]:
    """Sequences per second and milliseconds per batch, and the speedup of this project over each implementation."""
    rates = {name: [turn.sequences / turn.seconds for turn in found] for name, found in turns.items()}
    return {
        name: {
            "sequences_per_second": quartiles(rates[name]),
            "milliseconds_per_batch": quartiles([1e3 * turn.seconds / turn.batches for turn in found]),
            "speedup": compare(rates[THIS_PROJECT], rates[name]),
        }
        for name, found in turns.items()
    }


def measured_rows(work: str, workers: dict[str, Worker]) -> dict[str, tuple[Worker, str]]:
    """What to measure: each implementation, and the order in which it gets the windows. The order makes no difference
    if all are padded to the same length."""
    rows = {}
    for name, worker in workers.items():
        if work == "inference" and name.startswith(PADDED_TO_LONGEST):
            rows |= {f"{name}, {order}": (worker, order) for order in (FILE_ORDER, BY_LENGTH)}
        else:
            rows[name] = (worker, BY_LENGTH if name == THIS_PROJECT else FILE_ORDER)
    return rows


def measure(args: Arguments, device: torch.device) -> dict:
    workers = {
        PADDED_TO_LONGEST: Worker(Transformers, (args, None), same_settings=False),
        f"padded to {args.max_seq_length}": Worker(Transformers, (args, args.max_seq_length), same_settings=False),
        THIS_PROJECT: Worker(ThisProject, (args,), same_settings=True),
    }
    if device.type == "cpu":
        workers[f"{PADDED_TO_LONGEST}, {SAME_SETTINGS}"] = Worker(Transformers, (args, None), same_settings=True)
    logits = {name: worker.call("first_logits") for name, worker in workers.items()}
    this_project = workers[THIS_PROJECT]
    result = {
        "transformers": importlib.metadata.version("transformers"),
        "arguments": args.as_dict() | {"squad_file": args.squad_file.name},
        "mean_length": this_project.call("mean_length"),
        "tokens_per_real_token": {
            order: this_project.call("padded_tokens", order) for order in (FILE_ORDER, BY_LENGTH)
        },
        "largest_difference_of_logits": max(
            float(np.abs(found - logits[THIS_PROJECT]).max()) for found in logits.values()
        ),
    }
    for work in ("inference", "latency", "training"):
        turns = {
            name: lambda number, worker=worker, order=order, work=work: worker.call("turn", work, order, number)
            for name, (worker, order) in measured_rows(work, workers).items()
        }
        result[work] = figures_of(take_turns(turns, args.rounds, work))
    for worker in workers.values():
        worker.close()
    return result


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    device = select_device(args.device)
    set_num_threads()  # as the workers do, for machine_info
    result = measure(args, device)
    name = f"squad-{device.type}-{args.model}-{precision_name(args.amp, tf32=args.tf32)}"
    path = write_result(args.output, name, device, result)
    width = max(map(len, result["inference"])) + 2
    for work in ("training", "inference", "latency"):
        print_line(f"{work:{width}}{'seq/s (quartiles)':>24}{'ms per batch':>14}  speedup of {THIS_PROJECT}")
        for name, figures in result[work].items():
            rate = format_quartiles(figures["sequences_per_second"], ".1f")
            milliseconds = figures["milliseconds_per_batch"]["median"]
            ratio = format_quartiles(figures["speedup"], first="ratio_of_medians")
            print_line(f"  {name:{width - 2}}{rate:>24}{milliseconds:14.1f}  {'' if name == THIS_PROJECT else ratio}")
    tokens = ", ".join(f"{ratio:.2f} {order}" for order, ratio in result["tokens_per_real_token"].items())
    print_line(f"inference with batches padded to the longest: tokens per real token {tokens}")
    print_line(f"largest difference of logits with the same weights: {result['largest_difference_of_logits']:.2g}")
    print_line(f"written to {path}")


if __name__ == "__main__":
    run_main(main)
