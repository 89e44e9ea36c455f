#!/usr/bin/env python3
"""Full optimizer steps of this project beside those of transformers' BertForPreTraining: same weights, same sequences
of real text with their real lengths, same precision, same optimizer, dropout 0.1, interleaved in one run.

    python3 benchmarks/pretraining_step.py --model mini --amp
    python3 benchmarks/pretraining_step.py --model large --amp --seq-length 512 --batch-size 32 --device cuda --compile

The peer at its best: sdpa attention, fused AdamW, rows padded to the longest one; torch.compile with --compile.
Prints tokens that are not padding; the ratio is one of medians over rounds. Needs transformers, and shards of the
length (--input-dir); without them it makes some from the sample corpus.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peers import median_and_spread, peak_memory_bytes, surroundings, write_result  # noqa: E402
from lr_scheduler import make_schedule  # noqa: E402
from modeling import BertConfig, BertForPreTraining, training_flops  # noqa: E402
from optimizer import make_optimizer, parameter_groups  # noqa: E402
from pretraining_dataset import PretrainingDataset  # noqa: E402
from run_pretraining import Pretraining  # noqa: E402
from token_stream import Limits, StepBatch, StepLoader  # noqa: E402
from trainer import Provenance, Runtime, Settings, Totals, Trainer, to_device  # noqa: E402
from utils import config  # noqa: E402
from utils.distributed import Processes, peak_flops, select_device, select_precision, use_threads  # noqa: E402
from utils.errors import run_main  # noqa: E402
from utils.logger import Reporter, progress_bar, show  # noqa: E402

MODELS = {"tiny": "bert-tiny-uncased", "mini": "bert-mini-uncased", "base": "bert-base-uncased"}
MODELS["large"] = "bert-large-uncased"
LEARNING_RATE = 1e-4
PREDICTIONS = {128: 20, 512: 80}


def parse_arguments(argv=None) -> config.Arguments:
    parser = config.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="mini", help="architecture")
    parser.add_argument("--seq-length", type=int, choices=sorted(PREDICTIONS), default=128, help="of the shards")
    parser.add_argument("--batch-size", type=config.positive_int, default=32, help="sequences a step")
    parser.add_argument("--input-dir", type=Path, help="folder of shards; by default made from the sample corpus")
    parser.add_argument("--optimizer", choices=("Lamb", "AdamW"), default="AdamW", help="ours; the peer has AdamW")
    parser.add_argument("--amp", action=config.BooleanFlag, help="bfloat16 for both, float32 without")
    parser.add_argument("--tf32", action=config.BooleanFlag, help="TF32 for both, on a GPU")
    parser.add_argument("--compile", action=config.BooleanFlag, help="torch.compile for both")
    parser.add_argument("--full", action=config.BooleanFlag, help="only sequences of full length")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where")
    parser.add_argument("--rounds", type=config.positive_int, default=5, help="turns that each side gets")
    parser.add_argument("--steps", type=config.positive_int, default=4, help="steps a turn")
    parser.add_argument("--only", choices=("ours", "transformers"), help="one side alone")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


def make_shards(folder: Path, seq_length: int) -> Path:
    """Shards of the sample corpus."""
    text, shards = folder / "formatted" / "books", folder / "hdf5"
    books, vocab = ROOT / "data" / "sample" / "books", ROOT / "vocab" / "bert-base-uncased-vocab.txt"
    for command in (
        ["data/prepare.py", "format", "books", books, "--output-dir", folder],
        ["create_pretraining_data.py", "--input-dir", text, "--output-dir", shards, "--vocab-file", vocab,
         "--max-seq-length", seq_length, "--max-predictions-per-seq", PREDICTIONS[seq_length]],
    ):  # fmt: skip
        command = [sys.executable, *map(str, command)]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return shards


class Clock:
    """Seconds by kind of work; waits for the device at each reading."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, list[float]] = {}
        self.last = 0.0

    def start(self) -> None:
        self._wait()
        self.last = time.perf_counter()

    def lap(self, kind: str) -> None:
        self._wait()
        now = time.perf_counter()
        self.seconds.setdefault(kind, []).append(now - self.last)
        self.last = now

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Ours:
    """The project's own loop, as run_pretraining.py drives it."""

    def __init__(self, model: BertForPreTraining, args: config.Arguments, runtime: Runtime):
        learning_rate = torch.tensor(LEARNING_RATE, device=runtime.device)
        named = list(model.named_parameters())
        optimizer = make_optimizer(args.optimizer, named, learning_rate, (0.9, 0.999), 1e-6, 0.01)
        settings = Settings(max_steps=10**4, checkpoint_folder=Path("unused"), benchmark=True)
        provenance = Provenance("benchmark", {}, 0, Path("unused"), True)
        schedule = make_schedule("constant", LEARNING_RATE, settings.max_steps, 0.0)
        self.trainer = Trainer(
            model, Pretraining(True, args.seq_length), optimizer, learning_rate, schedule, settings, provenance, runtime
        )

    def step(self, batch: StepBatch, clock: Clock) -> None:
        run = self.trainer
        totals = Totals(batch.num_sequences, batch.num_tokens, batch.num_targets)
        clock.start()
        run.training_step(batch, totals)
        clock.lap("forward_backward")
        run.optimizer_step()
        clock.lap("optimizer")


class Transformers:
    """transformers' model in a plain loop over the same sequences, padded to the longest."""

    def __init__(self, model: BertForPreTraining, args: config.Arguments, runtime: Runtime):
        from transformers import BertConfig as PeerConfig
        from transformers import BertForPreTraining as PeerModel

        values = {**model.config.to_dict(), "vocab_size": model.config.vocab_size}
        self.runtime = runtime
        self.model = PeerModel(PeerConfig(**values, attn_implementation="sdpa")).to(runtime.device).train()
        self.model.load_state_dict(model.state_dict(), strict=False)
        self.model.tie_weights()
        named = [(name, p) for name, p in self.model.named_parameters()]
        self.optimizer = torch.optim.AdamW(parameter_groups(named, 0.01), LEARNING_RATE, (0.9, 0.999), 1e-6, fused=True)
        self.forward = torch.compile(self.model) if args.compile else self.model

    def step(self, batch: StepBatch, clock: Clock) -> None:
        (micro_batch,) = batch.micro_batches
        padded = pad(micro_batch)
        clock.start()
        with self.runtime.precision.context(self.runtime.device):
            loss = self.forward(**to_device(padded, self.runtime.device)).loss
        loss.backward()
        clock.lap("forward_backward")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clock.lap("optimizer")


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


def load_batches(args: config.Arguments, vocab_size: int) -> list[StepBatch]:
    """As many batches as there are steps, made once: what is compared is the step."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.input_dir or make_shards(Path(scratch), args.seq_length)
        dataset = PretrainingDataset(folder, vocab_size)
        limits = Limits.for_batch(args.batch_size, dataset.sequence_length, dataset.predictions_per_sequence)
        loader = StepLoader(dataset, limits, args.batch_size, seed=1, num_workers=0)
        wanted, found = (args.rounds + 1) * args.steps, []
        if not args.full:
            return [loader.load(k) for k in range(wanted)]
        sizes = dataset.sizes(torch.arange(len(dataset)).numpy())
        whole = (sizes[:, 0] == dataset.sequence_length).nonzero()[0]
        from token_stream import make_step_batch

        for k in range(wanted):
            chosen = whole[(torch.arange(args.batch_size) + k * args.batch_size).numpy() % len(whole)]
            found.append(make_step_batch(dataset, chosen, limits, k * args.batch_size))
        return found


def measure(args: config.Arguments) -> dict:
    device = select_device(args.device)
    precision = select_precision(args.amp, "bfloat16", False, args.tf32, device)
    use_threads()
    runtime = Runtime(device, precision, Processes(), Reporter(None))
    bert_config = BertConfig.from_json_file(ROOT / "bert_configs" / f"{MODELS[args.model]}.json")
    batches = load_batches(args, bert_config.vocab_size)
    torch.manual_seed(0)
    model = BertForPreTraining(bert_config).to(device)
    sides = {}
    if args.only != "ours":
        sides["transformers"] = Transformers(model, args, runtime)
    if args.only != "transformers":
        sides["ours"] = Ours(model, args, runtime)

    rates: dict[str, list[float]] = {name: [] for name in sides}
    clocks = {name: Clock(device) for name in sides}
    work: dict[str, float] = {"tokens": 0, "sequences": 0, "flops": 0}
    with progress_bar((args.rounds + 1) * len(sides), "rounds", "turn") as bar:
        for round_ in range(args.rounds + 1):  # the first is a warm-up
            turn = batches[round_ * args.steps : (round_ + 1) * args.steps]
            for name, side in sides.items():
                clock = Clock(device) if round_ == 0 else clocks[name]
                started = time.perf_counter()
                for batch in turn:
                    side.step(batch, clock)
                seconds = time.perf_counter() - started
                if round_:
                    rates[name].append(sum(batch.num_tokens for batch in turn) / seconds)
                bar.update()
            if round_:
                work["tokens"] += sum(batch.num_tokens for batch in turn)
                work["sequences"] += sum(batch.num_sequences for batch in turn)
                work["flops"] += sum(training_flops(bert_config, b.lengths, b.num_targets) for b in turn)

    result = {"surroundings": surroundings(device), "arguments": config.jsonable(args), "sides": {}}
    peak = peak_flops(device, precision)
    for name, clock in clocks.items():
        tokens = median_and_spread(rates[name])
        flops = tokens["median"] * work["flops"] / work["tokens"]
        result["sides"][name] = {
            "tokens_per_second": tokens,
            "sequences_per_second": tokens["median"] * work["sequences"] / work["tokens"],
            "model_tflops": flops / 1e12,
            "utilization": flops / peak if peak else None,
            "milliseconds": {kind: 1e3 * median_and_spread(s)["median"] for kind, s in clock.seconds.items()},
        }
    if len(sides) == 2:
        ours, theirs = (result["sides"][name]["tokens_per_second"]["median"] for name in ("ours", "transformers"))
        result["ratio"] = ours / theirs
        turns = zip(rates["ours"], rates["transformers"], strict=True)
        result["ratio_spread"] = median_and_spread([o / t for o, t in turns])
    result["peak_memory_gib"] = peak_memory_bytes(device) / 2**30
    return result


def add_peak_memory(result: dict, argv: list[str]) -> None:
    """Peak memory of each side, from a process of its own."""
    for name in list(result["sides"]):
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch) / "alone.json"
            alone = ["--only", name, "--rounds", "1", "--steps", "2", "--output", str(output)]
            subprocess.run([sys.executable, __file__, *argv, *alone], check=True, capture_output=True)
            result["sides"][name]["peak_memory_gib"] = json.loads(output.read_text())["peak_memory_gib"]


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    result = measure(args)
    if args.only is None:
        add_peak_memory(result, argv)
    precision = "bf16" if args.amp else "tf32" if args.tf32 else "fp32"
    where = "gpu" if result["surroundings"]["device"].startswith("NVIDIA") else "cpu"
    name = f"pretraining_step-{where}-{args.model}-{args.seq_length}-{precision}"
    path = write_result(args.output, name, result)
    show(f"{'':13}{'tokens/s':>10} {'(quartiles)':>17} {'seq/s':>8} {'TFLOP/s':>8}  milliseconds")
    for side, figures in result["sides"].items():
        tokens = figures["tokens_per_second"]
        parts = ", ".join(f"{kind} {value:.0f}" for kind, value in figures["milliseconds"].items())
        show(
            f"{side:13}{tokens['median']:10,.0f} {tokens['low']:8,.0f}-{tokens['high']:<8,.0f} "
            f"{figures['sequences_per_second']:8.1f} {figures['model_tflops']:8.3f}  {parts}"
            + (f", peak memory {figures['peak_memory_gib']:.1f} GiB" if "peak_memory_gib" in figures else "")
        )
    if "ratio" in result:
        spread = result["ratio_spread"]
        show(f"ours / transformers: {result['ratio']:.2f} ({spread['low']:.2f}-{spread['high']:.2f})")
    show(f"written to {path}")
    return 0


if __name__ == "__main__":
    run_main(main)
