#!/usr/bin/env python3
"""SQuAD fine-tuning steps and inference beside transformers' BertForQuestionAnswering: same weights, same features
with their real lengths, same precision, taking turns in one run.

    python3 benchmarks/squad.py --model mini --amp
    python3 benchmarks/squad.py --model large --amp --device cuda --train-batch-size 32

The peer (sdpa attention, fused AdamW) runs twice: on batches padded to their longest sequence, and padded to
--max-seq-length as is usual; on a CPU the first also with the allocator and thread settings of this project's runs.

Training is full optimizer steps with dropout, on the same batches for all. Inference is at batch 1 for latency and at
--predict-batch-size for throughput, where every turn of every side takes the same windows, the file's first. Ours gets
them sorted by length, as run_squad.py predicts; the peer, where it pads to the longest, in the order of the file, which
is how transformers' run_qa.py evaluates, and sorted as ours, which its scripts do not do and leaves it little padding.
Ratios are of medians over rounds. Needs transformers.
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

from benchmarks.contenders import fused_adamw, make_runtime, make_trainer, train_on
from benchmarks.peers import MODELS, median_and_spread, surroundings, write_result
from benchmarks.sides import OURS, Side
from modeling import BertConfig, BertForQuestionAnswering
from run_squad import QuestionAnswering
from squad_dataset import SquadDataset, read_squad
from token_stream import Limits, make_step_batch, sample_order
from tokenizer import BertTokenizer
from trainer import to_device
from utils import command_line
from utils.distributed import select_device
from utils.errors import run_main
from utils.measure import synchronize
from utils.progress import print_line, progress_bar

VOCAB_FILE = ROOT / "vocab" / "bert-base-uncased-vocab.txt"
LONGEST = "padded to the longest"
FILE_ORDER, BY_LENGTH = "in file order", "sorted by length"


def parse_arguments(argv=None) -> command_line.Arguments:
    parser = command_line.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="mini", help="architecture, with random weights")
    parser.add_argument(
        "--squad-file", type=Path, default=ROOT / "data/sample/squad/train-v1.1.json", help="where features come from"
    )
    parser.add_argument("--max-seq-length", type=command_line.positive_int, default=384, help="tokens of a window")
    parser.add_argument("--train-batch-size", type=command_line.positive_int, default=32, help="sequences a step")
    parser.add_argument("--predict-batch-size", type=command_line.positive_int, default=32, help="for the throughput")
    parser.add_argument("--amp", action=command_line.BooleanFlag, help="bfloat16 for both, float32 without")
    parser.add_argument("--tf32", action=command_line.BooleanFlag, help="TF32 for both, on a GPU")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where")
    parser.add_argument("--rounds", type=command_line.positive_int, default=5, help="turns that each side gets")
    parser.add_argument(
        "--steps",
        type=command_line.positive_int,
        default=2,
        help="batches a turn in training; 16 times as many for latency",
    )
    parser.add_argument(
        "--predict-windows", type=command_line.positive_int, default=512, help="windows a turn for the throughput"
    )
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


class Turn(NamedTuple):
    batches: int
    sequences: int
    seconds: float


class Contender(ABC):
    """One side: its features, its model with the weights of seed 0, and the batches of each kind of work."""

    def __init__(self, args: command_line.Arguments):
        self.args = args
        self.runtime = make_runtime(args.device, args.amp, tf32=args.tf32)
        self.dataset = SquadDataset(
            read_squad(args.squad_file),
            BertTokenizer(VOCAB_FILE),
            max_seq_length=args.max_seq_length,
            training=True,
            version_2_with_negative=True,
        )
        torch.manual_seed(0)
        bert_config = BertConfig.from_json_file(ROOT / "bert_configs" / f"{MODELS[args.model]}.json")
        self.model = BertForQuestionAnswering(bert_config).to(self.runtime.device)

    @abstractmethod
    def train(self, features: np.ndarray) -> None:
        """One optimizer step, dropout included."""

    @abstractmethod
    def predict(self, features: np.ndarray) -> np.ndarray:
        """Start and end logits [2, T] of the real tokens."""

    def first_logits(self) -> np.ndarray:
        return self.predict(self.batches("inference", 0, FILE_ORDER)[0])

    def mean_length(self) -> float:
        return float(self.dataset.lengths.mean())

    def padding(self, order: str) -> float:
        """How many times as many tokens the windows for the throughput have when padded to each batch's longest."""
        lengths = [self.dataset.lengths[batch] for batch in self.batches("inference", 0, order)]
        return float(sum(len(batch) * batch.max() for batch in lengths) / sum(batch.sum() for batch in lengths))

    def batches(self, what: str, number: int, order: str) -> list[np.ndarray]:
        """The features of one turn: the same windows in each for the throughput; else those that come next in the
        random order of training, more batches of them for latency, as the first ones of a turn find cold caches."""
        if what == "inference":
            length_F = self.dataset.lengths[: self.args.predict_windows]
            return prediction_batches(length_F, self.args.predict_batch_size, order)
        if what == "training":
            size, count = self.args.train_batch_size, self.args.steps
        else:
            size, count = 1, 16 * self.args.steps
        positions = np.arange(number * count * size, (number + 1) * count * size)
        return np.split(sample_order(positions, len(self.dataset), seed=1), count)

    def turn(self, what: str, number: int, order: str) -> Turn:
        batches = self.batches(what, number, order)
        do, device = self.train if what == "training" else self.predict, self.runtime.device
        synchronize(device)
        started = time.perf_counter()
        for features in batches:
            do(features)
        synchronize(device)
        return Turn(len(batches), sum(map(len, batches)), time.perf_counter() - started)


class Ours(Contender):
    """The project's training loop and model on token streams."""

    def __init__(self, args: command_line.Arguments):
        super().__init__(args)
        self.predictor = copy.deepcopy(self.model).eval()
        self.predictor.prepare_for_inference(self.runtime.precision.dtype)
        self.limits = Limits.for_batch(args.train_batch_size, args.max_seq_length, 0)
        self.trainer = make_trainer(self.model, QuestionAnswering(args.max_seq_length), "AdamW", self.runtime)

    def train(self, features: np.ndarray) -> None:
        train_on(self.trainer, make_step_batch(self.dataset, features, self.limits))

    @torch.inference_mode()
    def predict(self, features: np.ndarray) -> np.ndarray:
        stream = {name: torch.from_numpy(array) for name, array in self.dataset.stream(features).items()}
        inputs = {name: stream[name] for name in ("input_ids", "token_type_ids", "position_ids", "cu_seqlens")}
        max_seqlen = int(self.dataset.lengths[features].max())
        with self.runtime.precision.context(self.runtime.device):
            output = self.predictor(**to_device(inputs, self.runtime.device), max_seqlen=max_seqlen)
        return torch.stack(output).float().cpu().numpy()


class Transformers(Contender):
    """transformers' model in a plain loop over the same features, padded to `length`, or to the longest."""

    def __init__(self, args: command_line.Arguments, length: int | None):
        super().__init__(args)
        from transformers import BertConfig as PeerConfig
        from transformers import BertForQuestionAnswering as PeerModel

        self.length = length
        peer = PeerModel(PeerConfig(**self.model.config.to_dict(), attn_implementation="sdpa"))
        peer.load_state_dict(self.model.state_dict())
        self.model = peer.to(self.runtime.device)
        self.optimizer = fused_adamw(self.model)

    def padded(self, features: np.ndarray, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        stream = self.dataset.stream(features)
        length_N = self.dataset.lengths[features]
        real_NS = np.arange(self.length or length_N.max()) < length_N[:, None]
        batch = {"attention_mask": torch.from_numpy(real_NS.astype(np.int64))}
        for name in names:
            values = stream[name]
            if len(values) != len(features):  # a value a token
                values = np.zeros(real_NS.shape, np.int64)
                values[real_NS] = stream[name]
            batch[name] = torch.from_numpy(values)
        return to_device(batch, self.runtime.device)

    def train(self, features: np.ndarray) -> None:
        self.model.train()
        batch = self.padded(features, ("input_ids", "token_type_ids", "start_positions", "end_positions"))
        with self.runtime.precision.context(self.runtime.device):
            loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.inference_mode()
    def predict(self, features: np.ndarray) -> np.ndarray:
        self.model.eval()
        batch = self.padded(features, ("input_ids", "token_type_ids"))
        with self.runtime.precision.context(self.runtime.device):
            output = self.model(**batch)
        logits = torch.stack([output.start_logits, output.end_logits])
        return logits.float().cpu().numpy()[:, batch["attention_mask"].cpu().numpy().astype(bool)]


def prediction_batches(length_F: np.ndarray, size: int, order: str) -> list[np.ndarray]:
    """All features once: as the file has them, or of like length together and these batches in random order, as
    run_squad.py takes them."""
    cuts = range(size, len(length_F), size)
    if order == FILE_ORDER:
        return np.split(np.arange(len(length_F)), cuts)
    batches = np.split(np.argsort(-length_F, kind="stable"), cuts)
    return [batches[place] for place in np.random.default_rng(1).permutation(len(batches))]


def figures_of(turns: dict[str, list[Turn]]) -> dict[str, dict]:
    """Sequences a second and milliseconds a batch, as medians over rounds with their quartiles, and how many times as
    fast as each peer we are, as a ratio of medians and with the quartiles of the rounds' ratios."""
    rates = {side: [turn.sequences / turn.seconds for turn in of_side] for side, of_side in turns.items()}
    figures = {}
    for side, of_side in turns.items():
        ratios = median_and_spread([ours / theirs for ours, theirs in zip(rates[OURS], rates[side], strict=True)])
        medians = [median_and_spread(rates[name])["median"] for name in (OURS, side)]
        figures[side] = {
            "sequences_per_second": median_and_spread(rates[side]),
            "milliseconds_a_batch": median_and_spread([1e3 * turn.seconds / turn.batches for turn in of_side]),
            "ours_is_faster_by": ratios | {"ratio_of_medians": medians[0] / medians[1]},
        }
    return figures


def rows_of(what: str, sides: dict[str, Side]) -> dict[str, tuple[Side, str]]:
    """What a round of this work measures: each side, and for the throughput in which order it gets the windows. The
    order does not matter where all are padded to the same length."""
    rows = {}
    for name, side in sides.items():
        if what == "inference" and name.startswith(LONGEST):
            rows |= {f"{name}, {order}": (side, order) for order in (FILE_ORDER, BY_LENGTH)}
        else:
            rows[name] = (side, BY_LENGTH if name == OURS else FILE_ORDER)
    return rows


def measure(args: command_line.Arguments) -> dict:
    device = select_device(args.device)
    sides = {
        LONGEST: Side(Transformers, (args, None), is_tuned=False),
        f"padded to {args.max_seq_length}": Side(Transformers, (args, args.max_seq_length), is_tuned=False),
        OURS: Side(Ours, (args,), is_tuned=True),
    }
    if device.type == "cpu":
        sides[f"{LONGEST}, our settings"] = Side(Transformers, (args, None), is_tuned=True)
    logits = {name: side.call("first_logits") for name, side in sides.items()}
    result = {
        "surroundings": surroundings(device) | {"transformers": importlib.metadata.version("transformers")},
        "arguments": args.as_dict() | {"squad_file": args.squad_file.name},
        "mean_length": sides[OURS].call("mean_length"),
        "tokens_with_padding_to_the_longest": {
            order: sides[OURS].call("padding", order) for order in (FILE_ORDER, BY_LENGTH)
        },
        "largest_difference_of_logits": max(float(np.abs(found - logits[OURS]).max()) for found in logits.values()),
    }
    work = {what: rows_of(what, sides) for what in ("inference", "latency", "training")}
    with progress_bar(sum(map(len, work.values())) * (args.rounds + 1), "rounds", "turn") as bar:
        for what, rows in work.items():
            turns: dict[str, list[Turn]] = {name: [] for name in rows}
            for number in range(args.rounds + 1):
                for name, (side, order) in rows.items():
                    turns[name].append(side.call("turn", what, number, order))
                    bar.update()
            result[what] = figures_of({name: turn[1:] for name, turn in turns.items()})  # the first is a warm-up
    for side in sides.values():
        side.close()
    return result


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    result = measure(args)
    precision = "bf16" if args.amp else "tf32" if args.tf32 else "fp32"
    where = "gpu" if result["surroundings"]["device"].startswith("NVIDIA") else "cpu"
    path = write_result(args.output, f"squad-{where}-{args.model}-{precision}", result)
    width = max(map(len, result["inference"]))
    for what in ("training", "inference", "latency"):
        print_line(f"{what:{width + 2}}{'seq/s':>9} {'(quartiles)':>17} {'ms a batch':>11}  ours is faster by")
        for side, figures in result[what].items():
            rate, ratio = figures["sequences_per_second"], figures["ours_is_faster_by"]
            faster = f"  {ratio['ratio_of_medians']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
            print_line(
                f"  {side:{width}}{rate['median']:9.1f} {rate['low']:8.1f}-{rate['high']:<8.1f} "
                f"{figures['milliseconds_a_batch']['median']:11.1f}{'' if side == OURS else faster}"
            )
    padding = ", ".join(f"{ratio:.2f} {order}" for order, ratio in result["tokens_with_padding_to_the_longest"].items())
    print_line(f"inference's tokens, padded to the longest of each batch, per real token: {padding}")
    print_line(
        f"the same weights' logits differ by at most {result['largest_difference_of_logits']:.2g} before training"
    )
    print_line(f"written to {path}")


if __name__ == "__main__":
    run_main(main)
