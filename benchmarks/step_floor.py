#!/usr/bin/env python3
"""What a compiled training step of BERT has to do, as torch's compiler counts it in the program that it made:
operations and bytes by kind of work, and the time that they take at the device's best rates.

    python3 benchmarks/step_floor.py --model large --seq-length 128 --batch-size 256 --use-pure-fp16
    python3 benchmarks/step_floor.py --model tiny --batch-size 4 --device cpu

Bytes are counted once for each buffer that a kernel reads or writes, so they are a floor only for this division into
kernels. The best rates are measured (one large copy, one large product in bfloat16) or given. On a GPU the kernels of
one step are then timed by the same kinds, and stand beside their floors.
"""

import contextlib
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.contenders import RandomSamples, make_runtime, make_trainer, train_on
from benchmarks.peers import MODELS, surroundings, write_result
from modeling import BertConfig, BertForPreTraining
from run_pretraining import Pretraining
from run_setup import compile_model
from token_stream import Limits, StepBatch, make_step_batch
from trainer import Trainer
from utils import command_line
from utils.distributed import use_threads
from utils.errors import run_main
from utils.measure import synchronize
from utils.progress import print_line

PRODUCTS, ATTENTION, FUSED, OTHERS, OPTIMIZER = "matrix products", "attention", "fused kernels", "others", "optimizer"
KINDS = (PRODUCTS, ATTENTION, FUSED, OTHERS, OPTIMIZER)
# Numbers of 4 bytes that LAMB's foreach form reads and writes a parameter, see Lamb._adapt_together.
OPTIMIZER_BYTES = 4 * 15
# Parts of the names of CUDA kernels; the first kind that fits counts.
KERNEL_NAMES = {
    ATTENTION: ("flash", "fmha", "attention"),
    PRODUCTS: ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
    FUSED: ("triton",),
    OPTIMIZER: ("multi_tensor", "adam", "foreach"),
}


@dataclass
class Work:
    """Of one kind, in one step."""

    kernels: int = 0
    num_bytes: float = 0
    flops: float = 0


def parse_arguments(argv=None) -> command_line.Arguments:
    parser = command_line.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="base", help="architecture")
    parser.add_argument("--seq-length", type=command_line.positive_int, default=128, help="tokens of every sequence")
    parser.add_argument("--batch-size", type=command_line.positive_int, default=32, help="sequences a step")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where")
    parser.add_argument("--amp", action=command_line.BooleanFlag, default=True, help="bfloat16 by autocast")
    parser.add_argument("--use-pure-fp16", action=command_line.BooleanFlag, help="bfloat16 weights and float32 masters")
    parser.add_argument(
        "--time-kernels", action=command_line.BooleanFlag, default=True, help="on a GPU, time the kernels of a step too"
    )
    parser.add_argument(
        "--gigabytes-per-second", type=command_line.positive_float, help="of a copy, in place of measuring"
    )
    parser.add_argument("--tflops", type=command_line.positive_float, help="of a product, in place of measuring")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


class CompilerCounts:
    """Collects what torch's compiler says of each kernel of the graphs that it compiles meanwhile."""

    def __init__(self) -> None:
        self.work = {kind: Work() for kind in KINDS}

    def __enter__(self) -> "CompilerCounts":
        import torch._functorch.config
        import torch._inductor.config
        from torch._inductor.graph import GraphLowering

        # A graph that an earlier run left in a cache would not be counted.
        self.settings = contextlib.ExitStack()
        self.settings.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
        self.settings.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        self.graph, self.compile = GraphLowering, GraphLowering.compile_to_module

        def compile_and_count(graph: GraphLowering):
            module = self.compile(graph)
            for node in graph.scheduler.nodes:
                self._count(node)
            return module

        GraphLowering.compile_to_module = compile_and_count
        return self

    def __exit__(self, *_: object) -> None:
        self.graph.compile_to_module = self.compile
        self.settings.close()

    def _count(self, node) -> None:
        num_bytes = node.get_read_write_buffers_sizes()
        if not num_bytes:  # an output of a kernel with several
            return
        kernel = getattr(node.node, "python_kernel_name", None) or "" if node.is_extern() else None
        if kernel is None:
            kind = FUSED
        elif "flash" in kernel or "attention" in kernel:
            kind = ATTENTION
        else:
            kind = PRODUCTS if kernel.endswith(("mm", "linear_pointwise", "mkl_linear")) else OTHERS
        self.work[kind].kernels += 1
        self.work[kind].num_bytes += num_bytes
        self.work[kind].flops += node.estimate_flops() or 0


def best_rates(args: command_line.Arguments, device: torch.device) -> tuple[float, float]:
    """Bytes a second of a large copy, counting those read and those written; FLOP/s of a large product."""
    size = 8192 if device.type == "cuda" else 2048
    source = torch.randn(size * size, device=device)
    target = torch.empty_like(source)
    left, right = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    rates = []
    for given, unit, work, function in (
        (args.gigabytes_per_second, 1e9, 2 * source.nbytes, lambda: target.copy_(source)),
        (args.tflops, 1e12, 2 * size**3, lambda: left @ right),
    ):
        rates.append(given * unit if given else work / median_seconds(function, device))
    return rates[0], rates[1]


def median_seconds(function, device: torch.device, rounds: int = 10) -> float:
    seconds = []
    for _ in range(3 + rounds):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[3:])


def full_batch(args: command_line.Arguments, vocab_size: int) -> StepBatch:
    samples = RandomSamples(args.batch_size, args.seq_length, vocab_size)
    samples.lengths[:] = args.seq_length
    targets = int(samples.sizes(np.arange(1))[0, 1])
    limits = Limits.for_batch(args.batch_size, args.seq_length, targets, fixed=True)
    return make_step_batch(samples, np.arange(args.batch_size), limits)


def kernel_milliseconds(trainer: Trainer, batch: StepBatch) -> dict[str, float]:
    """What the kernels of a step take on a GPU, by kind."""
    found = dict.fromkeys(KINDS, 0.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train_on(trainer, batch)
        torch.cuda.synchronize()
    for event in profile.key_averages():
        name = event.key.lower()
        kinds = [kind for kind, parts in KERNEL_NAMES.items() if any(part in name for part in parts)]
        found[kinds[0] if kinds else OTHERS] += event.self_device_time_total / 1e3
    return found


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    use_threads()
    runtime = make_runtime(args.device, args.amp, args.use_pure_fp16)
    device = runtime.device
    bert_config = BertConfig.from_json_file(ROOT / "bert_configs" / f"{MODELS[args.model]}.json")
    torch.manual_seed(0)
    model = BertForPreTraining(bert_config).to(device)
    trainer = make_trainer(model, Pretraining(True, args.seq_length), "Lamb", runtime)
    compile_model(model, "model")
    batch = full_batch(args, bert_config.vocab_size)

    print_line("compiling")
    with CompilerCounts() as counts:
        train_on(trainer, batch)
    work = counts.work
    if work[ATTENTION].kernels:  # of whose operations the compiler knows nothing; elsewhere they are matrix products
        # 4 s^2 h forward and twice as many backward, a sequence and layer.
        squares = float((batch.lengths.astype(np.float64) ** 2).sum())
        work[ATTENTION].flops = 12 * squares * bert_config.hidden_size * bert_config.num_hidden_layers
    work[OPTIMIZER] = Work(num_bytes=OPTIMIZER_BYTES * sum(p.numel() for p in model.parameters()))
    bandwidth, flops = best_rates(args, device)
    measured = kernel_milliseconds(trainer, batch) if args.time_kernels and device.type == "cuda" else {}

    result = {"surroundings": surroundings(device), "arguments": args.as_dict(), "kinds": {}}
    result |= {"gigabytes_per_second": bandwidth / 1e9, "tflops": flops / 1e12}
    print_line(f"floors at {bandwidth / 1e9:,.0f} GB/s and {flops / 1e12:,.1f} TFLOP/s")
    print_line(
        f"{'':16}{'kernels':>8}{'GB':>9}{'TFLOP':>9}{'floor ms':>10}" + (f"{'measured ms':>13}" if measured else "")
    )
    for kind, found in work.items():
        floor = 1e3 * max(found.num_bytes / bandwidth, found.flops / flops)
        result["kinds"][kind] = {**vars(found), "floor_milliseconds": floor, "milliseconds": measured.get(kind)}
        row = f"{kind:16}{found.kernels:8}{found.num_bytes / 1e9:9.3f}{found.flops / 1e12:9.3f}{floor:10.2f}"
        print_line(row + (f"{measured[kind]:13.2f}" if measured else ""))
    total = sum(entry["floor_milliseconds"] for entry in result["kinds"].values())
    result["floor_milliseconds"] = total
    print_line(f"in all {total:.2f} ms: at most {1e3 * batch.num_tokens / total:,.0f} tokens/s")
    print_line(
        f"written to {write_result(args.output, f'step_floor-{device.type}-{args.model}-{args.seq_length}', result)}"
    )
    return 0


if __name__ == "__main__":
    run_main(main)
