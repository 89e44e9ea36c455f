#!/usr/bin/env python3
"""Full optimizer steps of this project beside those of transformers' BertForPreTraining: same weights, same sequences
of real text with their real lengths, same precision, same optimizer, dropout 0.1, taking turns in one run.

    python3 benchmarks/pretraining_step.py --model mini --amp
    python3 benchmarks/pretraining_step.py --model large --amp --seq-length 512 --batch-size 32 --device cuda --compile

The peer at its best: sdpa attention, fused AdamW, rows padded to the longest one; torch.compile with --compile. On a
CPU it runs twice: as `python3` starts it, and with the allocator and thread settings that this project's runs have.
Prints tokens that are not padding; ratios are of medians over rounds. Batches are made ahead, so `data` is in no rate.
Needs transformers, and shards of the length (--input-dir); without them it makes some from the sample corpus.
"""

import re
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.contenders import fused_adamw, make_runtime, make_trainer
from benchmarks.peers import MODELS, median_and_spread, surroundings, write_result
from benchmarks.sides import OURS, PEER, TUNED_PEER, Side
from data_preparation.books import clean_book
from modeling import BertConfig, BertForPreTraining, training_flops
from pretraining_dataset import PretrainingDataset
from run_pretraining import Pretraining
from run_setup import compile_model
from token_stream import Limits, StepBatch, make_step_batch, sample_order
from trainer import Totals, to_device
from utils import command_line
from utils.distributed import Precision, peak_flops, use_threads
from utils.errors import UserError, run_main
from utils.measure import Stopwatch, synchronize
from utils.progress import print_line, progress_bar

PREDICTIONS = {128: 20, 512: 80}


def parse_arguments(argv=None) -> command_line.Arguments:
    parser = command_line.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="mini", help="architecture")
    parser.add_argument("--seq-length", type=int, choices=sorted(PREDICTIONS), default=128, help="of the shards")
    parser.add_argument("--batch-size", type=command_line.positive_int, default=32, help="sequences a micro-batch")
    parser.add_argument(
        "--gradient-merge-steps",
        type=command_line.positive_int,
        default=1,
        help="micro-batches a step; ours packs the same sequences into fewer where they are short",
    )
    parser.add_argument("--input-dir", type=Path, help="folder of shards; by default made from the sample corpus")
    parser.add_argument("--optimizer", choices=("Lamb", "AdamW"), default="AdamW", help="ours; the peer has AdamW")
    parser.add_argument("--amp", action=command_line.BooleanFlag, help="bfloat16 for both, float32 without")
    parser.add_argument(
        "--use-pure-fp16",
        action=command_line.BooleanFlag,
        help="ours held in bfloat16, with float32 masters and moments; the peer as with --amp",
    )
    parser.add_argument("--tf32", action=command_line.BooleanFlag, help="TF32 for both, on a GPU")
    parser.add_argument(
        "--compile", action=command_line.BooleanFlag, help="torch.compile for both, ours in fixed sizes"
    )
    parser.add_argument("--full", action=command_line.BooleanFlag, help="only sequences of full length")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where")
    parser.add_argument("--rounds", type=command_line.positive_int, default=5, help="turns that each side gets")
    parser.add_argument("--steps", type=command_line.positive_int, default=4, help="steps a turn")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


def make_shards(folder: Path, seq_length: int) -> Path:
    """Shards of the sample corpus, cut at full stops: what is compared needs no better sentences, nor nltk."""
    text, shards = folder / "text", folder / "hdf5"
    text.mkdir()
    for book in sorted((ROOT / "data" / "sample" / "books").glob("*.txt")):
        documents = clean_book(book.read_text(encoding="utf-8"))
        lines = ("\n".join(re.split(r"(?<=[.!?]) ", " ".join(document.paragraphs))) for document in documents)
        (text / book.name).write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    vocab = ROOT / "vocab" / "bert-base-uncased-vocab.txt"
    command = [
        *(sys.executable, ROOT / "create_pretraining_data.py", "--input-dir", text, "--output-dir", shards),
        *("--vocab-file", vocab, "--max-seq-length", seq_length),
        *("--max-predictions-per-seq", PREDICTIONS[seq_length]),
    ]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return shards


class Contender(ABC):
    """One side: its model with the weights of seed 0, its batches, and what it measured."""

    def __init__(self, args: command_line.Arguments, folder: Path):
        self.args = args
        self.runtime = make_runtime(args.device, args.amp, args.use_pure_fp16, args.tf32)
        self.stopwatch = Stopwatch(self.runtime.device)
        bert_config = BertConfig.from_json_file(ROOT / "bert_configs" / f"{MODELS[args.model]}.json")
        started = time.perf_counter()
        dataset = PretrainingDataset(folder, bert_config.vocab_size)
        self.batches = [self.load_batch(dataset, indices) for indices in samples_of_steps(args, dataset)]
        self.data_seconds = time.perf_counter() - started
        torch.manual_seed(0)
        self.model = BertForPreTraining(bert_config).to(self.runtime.device)

    @abstractmethod
    def load_batch(self, dataset: PretrainingDataset, indices: np.ndarray) -> StepBatch:
        """The samples of one step, as this side takes them."""

    @abstractmethod
    def step(self, batch: StepBatch) -> None:
        """One optimizer step, timed by part."""

    def data_milliseconds(self) -> float:
        """What making a batch took; it happens before the steps, as it does beside them in training."""
        return 1e3 * self.data_seconds / len(self.batches)

    def turn(self, number: int) -> dict:
        """One turn's steps: what they were, and the seconds of each kind of work in them."""
        batches = self.batches[number * self.args.steps : (number + 1) * self.args.steps]
        self.stopwatch.seconds()
        started = time.perf_counter()
        for batch in batches:
            self.step(batch)
        synchronize(self.runtime.device)
        return {
            "seconds": time.perf_counter() - started,
            "parts": {kind: sum(laps) for kind, laps in self.stopwatch.seconds().items()},
            "tokens": sum(batch.num_tokens for batch in batches),
            "sequences": sum(batch.num_sequences for batch in batches),
            "flops": sum(training_flops(self.model.config, b.lengths, b.num_targets) for b in batches),
        }


class Ours(Contender):
    """The project's own loop, as run_pretraining.py drives it."""

    def __init__(self, args: command_line.Arguments, folder: Path):
        super().__init__(args, folder)
        if args.compile:
            compile_model(self.model, "model")
        task = Pretraining(True, args.seq_length)
        self.trainer = make_trainer(self.model, task, args.optimizer, self.runtime)
        self.stopwatch = self.trainer.stopwatch

    def load_batch(self, dataset: PretrainingDataset, indices: np.ndarray) -> StepBatch:
        return make_step_batch(dataset, indices, limits_of(self.args, dataset, fixed=self.args.compile))

    def step(self, batch: StepBatch) -> None:
        self.trainer.training_step(batch, Totals(batch.num_sequences, batch.num_tokens, batch.num_targets))
        with self.stopwatch.lap("optimizer"):
            self.trainer.optimizer_step()


class Transformers(Contender):
    """transformers' model in a plain loop over the same sequences, padded to the longest."""

    def __init__(self, args: command_line.Arguments, folder: Path):
        super().__init__(args, folder)
        from transformers import BertConfig as PeerConfig
        from transformers import BertForPreTraining as PeerModel

        peer = PeerModel(PeerConfig(**self.model.config.to_dict(), attn_implementation="sdpa"))
        peer.load_state_dict(self.model.state_dict(), strict=False)
        peer.tie_weights()
        self.peer, self.model = peer.to(self.runtime.device).train(), self.model.to("meta")
        self.precision = Precision(self.runtime.precision.dtype)  # by autocast, also where ours holds 16-bit weights
        self.optimizer = fused_adamw(self.peer)
        self.forward = torch.compile(self.peer) if args.compile else self.peer

    def load_batch(self, dataset: PretrainingDataset, indices: np.ndarray) -> StepBatch:
        limits = limits_of(self.args, dataset, fixed=False)
        parts = [make_step_batch(dataset, some, limits) for some in indices.reshape(-1, self.args.batch_size)]
        rows = [pad(stream) for part in parts for stream in part.micro_batches]
        lengths, targets = (np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "targets"))
        return StepBatch(0, rows, lengths, targets)

    def step(self, batch: StepBatch) -> None:
        for rows in batch.micro_batches:
            with self.stopwatch.lap("forward"), self.precision.context(self.runtime.device):
                loss = self.forward(**to_device(rows, self.runtime.device)).loss / len(batch.micro_batches)
            with self.stopwatch.lap("backward"):
                loss.backward()
        with self.stopwatch.lap("optimizer"):
            torch.nn.utils.clip_grad_norm_(self.peer.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def pad(stream: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A stream as the padded rows and labels that transformers takes."""
    lengths = stream["cu_seqlens"].diff().tolist()
    labels = torch.full_like(stream["input_ids"], -100)
    labels[stream["mlm_positions"]] = stream["mlm_labels"]

    def rows(values: torch.Tensor, filler: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(values.split(lengths), batch_first=True, padding_value=filler)

    return {
        "input_ids": rows(stream["input_ids"], 0),
        "token_type_ids": rows(stream["token_type_ids"], 0),
        "attention_mask": rows(torch.ones_like(labels), 0),
        "labels": rows(labels, -100),
        "next_sentence_label": stream["nsp_labels"],
    }


def limits_of(args: command_line.Arguments, dataset: PretrainingDataset, fixed: bool) -> Limits:
    return Limits.for_batch(args.batch_size, dataset.sequence_length, dataset.predictions_per_sequence, fixed)


def samples_of_steps(args: command_line.Arguments, dataset: PretrainingDataset) -> np.ndarray:
    """The samples of as many steps as there are, [steps, samples]; batches are made once, as what is compared is the
    step."""
    shape = (args.rounds + 1) * args.steps, args.batch_size * args.gradient_merge_steps
    if args.full:
        (full,) = (dataset.sizes(np.arange(len(dataset)))[:, 0] == dataset.sequence_length).nonzero()
        if not len(full):
            raise UserError(f"{dataset.folder} has no sample of full length: leave --full out, or give other shards")
        return np.resize(full, shape)
    return sample_order(np.arange(shape[0] * shape[1]), len(dataset), seed=1).reshape(shape)


def measure(args: command_line.Arguments, folder: Path) -> dict:
    runtime = make_runtime(args.device, args.amp, args.use_pure_fp16, args.tf32)
    device = runtime.device
    sides = {
        PEER: Side(Transformers, (args, folder), is_tuned=False),
        OURS: Side(Ours, (args, folder), is_tuned=True),
    }
    if device.type == "cpu":
        sides[TUNED_PEER] = Side(Transformers, (args, folder), is_tuned=True)
    turns: dict[str, list[dict]] = {name: [] for name in sides}
    with progress_bar((args.rounds + 1) * len(sides), "rounds", "turn") as bar:
        for number in range(args.rounds + 1):
            for name, side in sides.items():
                turns[name].append(side.call("turn", number))
                bar.update()
    measured = {name: turns_of_side[1:] for name, turns_of_side in turns.items()}  # the first is a warm-up

    use_threads()  # as the sides did, for what is reported
    peak = peak_flops(device, runtime.precision)
    result = {"surroundings": surroundings(device), "arguments": args.as_dict(), "sides": {}}
    work = {kind: sum(turn[kind] for turn in measured[OURS]) for kind in ("tokens", "sequences", "flops")}
    rates = {name: [turn["tokens"] / turn["seconds"] for turn in found] for name, found in measured.items()}
    for name, found in measured.items():
        tokens = median_and_spread(rates[name])
        flops = tokens["median"] * work["flops"] / work["tokens"]
        result["sides"][name] = {
            "tokens_per_second": tokens,
            "sequences_per_second": tokens["median"] * work["sequences"] / work["tokens"],
            "model_tflops": flops / 1e12,
            "utilization": flops / peak if peak else None,
            "milliseconds": {"data": sides[name].call("data_milliseconds")}
            | {
                kind: 1e3 / args.steps * median_and_spread([turn["parts"][kind] for turn in found])["median"]
                for kind in found[0]["parts"]
            },
            "peak_memory_gib": sides[name].peak_memory_gib(),
        }
    medians = {name: figures["tokens_per_second"]["median"] for name, figures in result["sides"].items()}
    result["ours_is_faster_by"] = {
        name: median_and_spread([ours / theirs for ours, theirs in zip(rates[OURS], rates[name], strict=True)])
        | {"ratio_of_medians": medians[OURS] / medians[name]}
        for name in sides
        if name != OURS
    }
    for side in sides.values():
        side.close()
    return result


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(args, args.input_dir or make_shards(Path(scratch), args.seq_length))
    precision = "pure-bf16" if args.use_pure_fp16 else "bf16" if args.amp else "tf32" if args.tf32 else "fp32"
    where = "gpu" if result["surroundings"]["device"].startswith("NVIDIA") else "cpu"
    name = f"pretraining_step-{where}-{args.model}-{args.seq_length}-{precision}"
    path = write_result(args.output, name, result)
    print_line(f"{'':27}{'tokens/s':>9} {'(quartiles)':>17} {'seq/s':>8} {'TFLOP/s':>8}  milliseconds a step")
    for side, figures in result["sides"].items():
        tokens = figures["tokens_per_second"]
        parts = ", ".join(f"{kind} {value:.0f}" for kind, value in figures["milliseconds"].items())
        print_line(
            f"{side:27}{tokens['median']:9,.0f} {tokens['low']:8,.0f}-{tokens['high']:<8,.0f} "
            f"{figures['sequences_per_second']:8.1f} {figures['model_tflops']:8.3f}  {parts}, "
            f"peak memory {figures['peak_memory_gib']:.1f} GiB"
        )
    for side, ratio in result["ours_is_faster_by"].items():
        print_line(f"ours / {side}: {ratio['ratio_of_medians']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})")
    print_line(f"written to {path}")
    return 0


if __name__ == "__main__":
    run_main(main)
