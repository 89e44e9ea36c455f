#!/usr/bin/env python3
"""SQuAD fine-tuning steps and inference beside transformers' BertForQuestionAnswering: same weights, same features
with their real lengths, same precision, taking turns in one run.

    python3 benchmarks/squad.py --model mini --amp
    python3 benchmarks/squad.py --model large --amp --device cuda --train-batch-size 32

The peer (sdpa attention, fused AdamW) runs twice: on batches padded to their longest sequence, and padded to
--max-seq-length as is usual; on a CPU the first also with the allocator and thread settings of this project's runs.
Training is full optimizer steps with dropout; inference is at --predict-batch-size for
throughput and at batch 1 for latency. Ratios are of medians over rounds. Needs transformers.
"""

import copy
import importlib.metadata
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.contenders import fused_adamw, make_runtime, make_trainer  # noqa: E402
from benchmarks.peers import MODELS, median_and_spread, surroundings, write_result  # noqa: E402
from benchmarks.sides import OURS, Side  # noqa: E402
from modeling import BertConfig, BertForQuestionAnswering  # noqa: E402
from run_squad import QuestionAnswering  # noqa: E402
from squad_dataset import SquadDataset, read_squad  # noqa: E402
from token_stream import Limits, make_step_batch, sample_order  # noqa: E402
from tokenizer import BertTokenizer  # noqa: E402
from trainer import Totals, to_device  # noqa: E402
from utils import config  # noqa: E402
from utils.distributed import select_device  # noqa: E402
from utils.errors import run_main  # noqa: E402
from utils.logger import show  # noqa: E402
from utils.measure import synchronize  # noqa: E402
from utils.progress import progress_bar  # noqa: E402

VOCAB_FILE = ROOT / "vocab" / "bert-base-uncased-vocab.txt"


def parse_arguments(argv=None) -> config.Arguments:
    parser = config.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="mini", help="architecture, with random weights")
    parser.add_argument(
        "--squad-file", type=Path, default=ROOT / "data/sample/squad/train-v1.1.json", help="where features come from"
    )
    parser.add_argument("--max-seq-length", type=config.positive_int, default=384, help="tokens of a window")
    parser.add_argument("--train-batch-size", type=config.positive_int, default=32, help="sequences a step")
    parser.add_argument("--predict-batch-size", type=config.positive_int, default=32, help="for the throughput")
    parser.add_argument("--amp", action=config.BooleanFlag, help="bfloat16 for both, float32 without")
    parser.add_argument("--tf32", action=config.BooleanFlag, help="TF32 for both, on a GPU")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where")
    parser.add_argument("--rounds", type=config.positive_int, default=5, help="turns that each side gets")
    parser.add_argument("--steps", type=config.positive_int, default=2, help="batches a turn")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


def steps_a_turn(what: str, args: config.Arguments) -> int:
    """Batches of one sequence are so short that a turn takes more of them: the first ones find cold caches."""
    return args.steps * (16 if what == "latency" else 1)


class Contender(ABC):
    """One side: its features, its model with the weights of seed 0, and the batches of each kind of work."""

    def __init__(self, args: config.Arguments):
        self.args = args
        self.runtime = make_runtime(args)
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
        sizes = {"training": args.train_batch_size, "inference": args.predict_batch_size, "latency": 1}
        self.batches = {
            what: batches_of(self.dataset, size, (args.rounds + 1) * steps_a_turn(what, args), what != "training")
            for what, size in sizes.items()
        }

    @abstractmethod
    def train(self, features: np.ndarray) -> None:
        """One optimizer step, dropout included."""

    @abstractmethod
    def predict(self, features: np.ndarray) -> np.ndarray:
        """Start and end logits [2, T] of the real tokens."""

    def first_logits(self) -> np.ndarray:
        return self.predict(batches_of(self.dataset, self.args.predict_batch_size, 1, by_length=False)[0])

    def mean_length(self) -> float:
        return float(self.dataset.lengths.mean())

    def turn(self, what: str, number: int) -> tuple[int, float]:
        """Does one turn's batches; the sequences in them and the seconds they took."""
        steps = steps_a_turn(what, self.args)
        batches = self.batches[what][number * steps : (number + 1) * steps]
        do, device = self.train if what == "training" else self.predict, self.runtime.device
        synchronize(device)
        started = time.perf_counter()
        for features in batches:
            do(features)
        synchronize(device)
        return sum(map(len, batches)), time.perf_counter() - started


class Ours(Contender):
    """The project's training loop and model on token streams."""

    def __init__(self, args: config.Arguments):
        super().__init__(args)
        self.predictor = copy.deepcopy(self.model).eval()
        self.predictor.prepare_for_inference(self.runtime.precision.dtype)
        self.limits = Limits.for_batch(args.train_batch_size, args.max_seq_length, 0)
        self.trainer = make_trainer(self.model, QuestionAnswering(args.max_seq_length), "AdamW", self.runtime)

    def train(self, features: np.ndarray) -> None:
        batch = make_step_batch(self.dataset, features, self.limits)
        self.trainer.training_step(batch, Totals(batch.num_sequences, batch.num_tokens, batch.num_targets))
        self.trainer.optimizer_step()

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

    def __init__(self, args: config.Arguments, length: int | None):
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


def batches_of(dataset: SquadDataset, size: int, count: int, by_length: bool) -> list[np.ndarray]:
    """`count` batches in the order of training, or as prediction makes them: the same features sorted by length."""
    features = sample_order(np.arange(size * count), len(dataset), seed=1)
    if not by_length:
        return np.split(features, count)
    batches = np.split(features[np.argsort(-dataset.lengths[features], kind="stable")], count)
    return [batches[place] for place in np.random.default_rng(1).permutation(count)]


def figures_of(turns: dict[str, list[tuple[int, float]]], steps: int) -> dict[str, dict]:
    """Sequences a second and milliseconds a batch, as medians over rounds with their quartiles, and how many times as
    fast as each peer we are, as a ratio of medians and with the quartiles of the rounds' ratios."""
    rates = {side: [sequences / seconds for sequences, seconds in turn] for side, turn in turns.items()}
    figures = {}
    for side, turn in turns.items():
        ratios = median_and_spread([ours / theirs for ours, theirs in zip(rates[OURS], rates[side], strict=True)])
        medians = [median_and_spread(rates[name])["median"] for name in (OURS, side)]
        figures[side] = {
            "sequences_per_second": median_and_spread(rates[side]),
            "milliseconds_a_batch": median_and_spread([1e3 * seconds / steps for _, seconds in turn]),
            "ours_is_faster_by": ratios | {"ratio_of_medians": medians[0] / medians[1]},
        }
    return figures


def measure(args: config.Arguments) -> dict:
    device = select_device(args.device)
    longest, full = "padded to the longest", f"padded to {args.max_seq_length}"
    sides = {
        longest: Side(Transformers, (args, None), is_tuned=False),
        full: Side(Transformers, (args, args.max_seq_length), is_tuned=False),
        OURS: Side(Ours, (args,), is_tuned=True),
    }
    if device.type == "cpu":
        sides[f"{longest}, our settings"] = Side(Transformers, (args, None), is_tuned=True)
    logits = {name: side.call("first_logits") for name, side in sides.items()}
    result = {
        "surroundings": surroundings(device) | {"transformers": importlib.metadata.version("transformers")},
        "arguments": config.jsonable(args) | {"squad_file": args.squad_file.name},
        "mean_length": sides[OURS].call("mean_length"),
        "largest_difference_of_logits": max(float(np.abs(found - logits[OURS]).max()) for found in logits.values()),
    }
    kinds = ("inference", "latency", "training")
    with progress_bar(len(kinds) * (args.rounds + 1) * len(sides), "rounds", "turn") as bar:
        for what in kinds:
            turns: dict[str, list[tuple[int, float]]] = {name: [] for name in sides}
            for number in range(args.rounds + 1):
                for name, side in sides.items():
                    turns[name].append(side.call("turn", what, number))
                    bar.update()
            measured = {name: turn[1:] for name, turn in turns.items()}  # the first is a warm-up
            result[what] = figures_of(measured, steps_a_turn(what, args))
    for side in sides.values():
        side.close()
    return result


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    result = measure(args)
    precision = "bf16" if args.amp else "tf32" if args.tf32 else "fp32"
    where = "gpu" if result["surroundings"]["device"].startswith("NVIDIA") else "cpu"
    path = write_result(args.output, f"squad-{where}-{args.model}-{precision}", result)
    for what in ("training", "inference", "latency"):
        show(f"{what:38}{'seq/s':>9} {'(quartiles)':>17} {'ms a batch':>11}  ours is faster by")
        for side, figures in result[what].items():
            rate, ratio = figures["sequences_per_second"], figures["ours_is_faster_by"]
            show(
                f"  {side:36}{rate['median']:9.1f} {rate['low']:8.1f}-{rate['high']:<8.1f} "
                f"{figures['milliseconds_a_batch']['median']:11.1f}"
                + (
                    ""
                    if side == OURS
                    else f"  {ratio['ratio_of_medians']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
                )
            )
    show(f"the same weights' logits differ by at most {result['largest_difference_of_logits']:.2g} before training")
    show(f"written to {path}")


if __name__ == "__main__":
    run_main(main)
