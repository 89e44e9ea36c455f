#!/usr/bin/env python3
"""SQuAD fine-tuning steps and inference beside transformers' BertForQuestionAnswering: same weights, same features
with their real lengths, same precision, interleaved in one run.

    python3 benchmarks/squad.py --model mini --amp
    python3 benchmarks/squad.py --model large --amp --device cuda --train-batch-size 32

The peer (sdpa attention, fused AdamW) runs twice: on batches padded to their longest sequence, and padded to
--max-seq-length as is usual. Training is full optimizer steps with dropout; inference is at --predict-batch-size for
throughput and at batch 1 for latency. Ratios are of medians over rounds. Needs transformers.
"""

import importlib.metadata
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peers import median_and_spread, surroundings, write_result  # noqa: E402
from benchmarks.pretraining_step import LEARNING_RATE, MODELS  # noqa: E402
from benchmarks.sides import OURS, Clock  # noqa: E402
from lr_scheduler import make_schedule  # noqa: E402
from modeling import BertConfig, BertForQuestionAnswering  # noqa: E402
from optimizer import make_optimizer, parameter_groups  # noqa: E402
from run_squad import QuestionAnswering  # noqa: E402
from squad_dataset import SquadDataset, read_squad  # noqa: E402
from token_stream import Limits, make_step_batch, sample_order  # noqa: E402
from tokenizer import BertTokenizer  # noqa: E402
from trainer import Provenance, Runtime, Settings, Totals, Trainer, to_device  # noqa: E402
from utils import config  # noqa: E402
from utils.distributed import Processes, select_device, select_precision, use_threads  # noqa: E402
from utils.errors import run_main  # noqa: E402
from utils.logger import Reporter, progress_bar, show  # noqa: E402

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


class Ours:
    """The project's training loop and model on token streams."""

    def __init__(
        self, model: BertForQuestionAnswering, dataset: SquadDataset, args: config.Arguments, runtime: Runtime
    ):
        self.model, self.dataset, self.runtime = model, dataset, runtime
        self.limits = Limits.for_batch(args.train_batch_size, args.max_seq_length, 0)
        learning_rate = torch.tensor(LEARNING_RATE, device=runtime.device)
        named = list(model.named_parameters())
        self.trainer = Trainer(
            model,
            QuestionAnswering(args.max_seq_length),
            make_optimizer("AdamW", named, learning_rate, (0.9, 0.999), 1e-6, 0.01),
            learning_rate,
            make_schedule("constant", LEARNING_RATE, 10**4, 0.0),
            Settings(max_steps=10**4, checkpoint_folder=Path("unused"), benchmark=True),
            Provenance("benchmark", {}, 0, Path("unused"), True),
            runtime,
        )

    def train(self, features: np.ndarray) -> None:
        batch = make_step_batch(self.dataset, features, self.limits)
        self.trainer.training_step(batch, Totals(batch.num_sequences, batch.num_tokens, batch.num_targets))
        self.trainer.optimizer_step()

    @torch.inference_mode()
    def predict(self, features: np.ndarray) -> np.ndarray:
        """Start and end logits [2, T]."""
        self.model.eval()
        stream = {name: torch.from_numpy(array) for name, array in self.dataset.stream(features).items()}
        inputs = {name: stream[name] for name in ("input_ids", "token_type_ids", "position_ids", "cu_seqlens")}
        max_seqlen = int(self.dataset.lengths[features].max())
        with self.runtime.precision.context(self.runtime.device):
            output = self.model(**to_device(inputs, self.runtime.device), max_seqlen=max_seqlen)
        return torch.stack(output).float().cpu().numpy()


class Transformers:
    """transformers' model in a plain loop over the same features, padded to `length`, or to the longest."""

    def __init__(self, model: BertForQuestionAnswering, dataset: SquadDataset, length: int | None, runtime: Runtime):
        from transformers import BertConfig as PeerConfig
        from transformers import BertForQuestionAnswering as PeerModel

        self.dataset, self.length, self.runtime = dataset, length, runtime
        self.model = PeerModel(PeerConfig(**model.config.to_dict(), attn_implementation="sdpa")).to(runtime.device)
        self.model.load_state_dict(model.state_dict())
        groups = parameter_groups(self.model.named_parameters(), 0.01)
        self.optimizer = torch.optim.AdamW(groups, LEARNING_RATE, (0.9, 0.999), 1e-6, fused=True)

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
        """Start and end logits [2, T] of the real tokens."""
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


def interleaved(
    what: str, work: dict[str, Callable[[np.ndarray], object]], batches: list[np.ndarray], rounds: int, clock: Clock
) -> dict[str, dict]:
    """Each side does the same batches in turn, the first turn being a warm-up. Sequences a second and milliseconds a
    batch, as medians over rounds with their quartiles, and how many times as fast as each peer we are."""
    turns = np.array_split(np.arange(len(batches)), rounds + 1)
    seconds: dict[str, list[float]] = {side: [] for side in work}
    with progress_bar(len(turns) * len(work), what, "turn") as bar:
        for turn in turns:
            for side, do in work.items():
                clock.start()
                started = time.perf_counter()
                for place in turn:
                    do(batches[place])
                clock.lap(side)
                seconds[side].append(time.perf_counter() - started)
                bar.update()
    figures = {}
    sequences = [sum(len(batches[place]) for place in turn) for turn in turns]
    for side, spent in seconds.items():
        rates = [n / s for n, s in zip(sequences[1:], spent[1:], strict=True)]
        per_batch = [1e3 * s / len(turn) for s, turn in zip(spent[1:], turns[1:], strict=True)]
        times = [theirs / ours for theirs, ours in zip(spent[1:], seconds[OURS][1:], strict=True)]
        figures[side] = {
            "sequences_per_second": median_and_spread(rates),
            "milliseconds_a_batch": median_and_spread(per_batch),
            "ours_is_faster_by": median_and_spread(times),
        }
    return figures


def measure(args: config.Arguments) -> dict:
    device = select_device(args.device)
    use_threads()
    precision = select_precision(args.amp, "bfloat16", False, args.tf32, device)
    runtime = Runtime(device, precision, Processes(), Reporter(None))
    dataset = SquadDataset(
        read_squad(args.squad_file),
        BertTokenizer(VOCAB_FILE),
        max_seq_length=args.max_seq_length,
        training=True,
        version_2_with_negative=True,
    )
    torch.manual_seed(0)
    bert_config = BertConfig.from_json_file(ROOT / "bert_configs" / f"{MODELS[args.model]}.json")
    model = BertForQuestionAnswering(bert_config).to(device)
    peers = {"padded to the longest": None, f"padded to {args.max_seq_length}": args.max_seq_length}
    sides = {name: Transformers(model, dataset, length, runtime) for name, length in peers.items()}
    sides[OURS] = Ours(model, dataset, args, runtime)

    some = batches_of(dataset, args.predict_batch_size, 1, by_length=False)[0]
    logits = {name: side.predict(some) for name, side in sides.items()}
    difference = max(float(np.abs(logits[name] - logits[OURS]).max()) for name in peers)

    count = (args.rounds + 1) * args.steps
    clock = Clock(device)
    tasks = {
        "inference": ("predict", args.predict_batch_size, True),
        "latency": ("predict", 1, True),
        "training": ("train", args.train_batch_size, False),
    }
    figures = {
        what: interleaved(
            what,
            {name: getattr(side, method) for name, side in sides.items()},
            batches_of(dataset, size, count, by_length),
            args.rounds,
            clock,
        )
        for what, (method, size, by_length) in tasks.items()
    }
    return {
        "surroundings": surroundings(device) | {"transformers": importlib.metadata.version("transformers")},
        "arguments": config.jsonable(args) | {"squad_file": args.squad_file.name},
        "mean_length": float(dataset.lengths.mean()),
        "largest_difference_of_logits": difference,
        **figures,
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    result = measure(args)
    precision = "bf16" if args.amp else "tf32" if args.tf32 else "fp32"
    where = "gpu" if result["surroundings"]["device"].startswith("NVIDIA") else "cpu"
    path = write_result(args.output, f"squad-{where}-{args.model}-{precision}", result)
    for what in ("training", "inference", "latency"):
        show(f"{what:24}{'seq/s':>9} {'(quartiles)':>17} {'ms a batch':>11}  ours is faster by")
        for side, figures in result[what].items():
            rate, ratio = figures["sequences_per_second"], figures["ours_is_faster_by"]
            show(
                f"  {side:22}{rate['median']:9.1f} {rate['low']:8.1f}-{rate['high']:<8.1f} "
                f"{figures['milliseconds_a_batch']['median']:11.1f}"
                + ("" if side == OURS else f"  {ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})")
            )
    show(f"the same weights' logits differ by at most {result['largest_difference_of_logits']:.2g} before training")
    show(f"written to {path}")


if __name__ == "__main__":
    run_main(main)
