#!/usr/bin/env python3
"""Checks on a device that every fast path computes the same as the plain one. Run it first on a new
GPU.

    python3 benchmarks/device_checks.py --device cuda
    python3 benchmarks/device_checks.py --model tiny --device cpu
    python3 benchmarks/device_checks.py --model large --only "time of LAMB"

Each attention implementation alone, on a stream of unequal lengths, is compared with a float64 loop
over the sequences: output, gradient and dropout mask (common/attention_check.py); its time is
printed, too.

The reference of whole steps is this project in float32 with padded attention on the CPU. Without
dropout, the loss and the gradient of every parameter are compared with it, tensor by tensor, as
||difference|| / ||reference||. With dropout, the gradient is compared with differences of the loss
along three directions, with the same dropout masks. Optimizers are compared with themselves on the
CPU, and the loss of many rows with float64; both forms of LAMB are timed beside AdamW. On a GPU,
whole steps must not make the host wait for the device. A check that raises an error does not end
the others. The exit code is 1 if a check fails.
"""

import contextlib
import dataclasses
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention import (
    TRITON_HEAD_SIZES,
    TRITON_MAX_LENGTH,
    StreamLayout,
    default_implementation,
    prepare_attention,
)
from benchmarks.common.attention_check import check
from benchmarks.common.optimizer_time import time_lamb
from benchmarks.common.results import benchmark_parser, format_quartiles, write_result
from benchmarks.common.training import (
    RandomDataset,
    batch_stats,
    load_bert_config,
    make_trainer,
    train_step,
)
from benchmarks.common.transformers_training import silence_imports
from data_loading.loader import make_step_batch
from data_loading.packing import MicroBatchLimits
from encoders.bert import BertForPreTraining
from encoders.modernbert import ModernBertConfig, ModernBertForMaskedLM
from loss import FLOAT32_ROWS, linear_cross_entropy
from parallel.ddp import ReplicatedMasters, ReplicatedModel
from parallel.fsdp import ShardedModel
from parallel.offload import OffloadedModel
from parallel.runtime import Runtime
from parallelize import activate_flash_attention_4
from precision import Precision, has_float16
from run_config import LoaderConfig, ParallelConfig
from tasks.pretraining import PretrainingTask
from token_stream import StepBatch
from trainer import Trainer
from utils.command_line import Arguments, positive_int
from utils.device import select_device, set_num_threads
from utils.distributed import DistributedContext
from utils.errors import UserError, one_line, run_main
from utils.measure import Stopwatch
from utils.progress import print_line

FLOAT32, BFLOAT16, FLOAT16 = Precision(), Precision(torch.bfloat16), Precision(torch.float16)
PURE_BFLOAT16 = Precision(torch.bfloat16, pure=True)
# Of each tensor.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
FLOAT8_LIMIT = 3e-1
PURE_LIMIT = 1e-1  # of 16-bit weights: sums over tokens, as for biases, are rounded to 16 bits too
LOSS_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 3e-3}
# The central difference of losses has an error of its own: rounding, and the third derivative.
DIRECTION_LIMITS = {torch.float32: 1e-2, torch.bfloat16: 5e-2}
DIRECTIONS = {"value": "attention.self.value.weight", "feed-forward": "intermediate.dense.weight",
              "embedding": "word_embeddings.weight"}  # fmt: skip
# Muon multiplies in bfloat16.
OPTIMIZER_LIMITS = {"Lamb": 1e-5, "AdamW": 1e-5, "Muon": 2e-2, "NorMuon": 2e-2}
FLOAT16_SCALE = 2.0**15  # of the loss, without which small gradients underflow
STRATEGIES = ("DDP", "DDP, 16-bit weights", "FSDP2", "CPU offload")


def parse_arguments(argv=None) -> Arguments:
    parser = benchmark_parser(__doc__, "base")
    add = parser.add_argument
    add("--seq-length", type=positive_int, default=128, help="longest sequence")
    add("--batch-size", type=positive_int, default=16, help="sequences")
    add(
        "--only",
        default="",
        metavar="WORDS",
        help="only the checks with these words in their titles",
    )
    return parser.parse_args(argv)


class Case(NamedTuple):
    """A way to compute a step; `attention` is a key of attention.IMPLEMENTATIONS or `auto`."""

    title: str
    precision: Precision
    attention: str = "auto"
    compile: str = "none"
    activation_checkpoint: str = "none"
    has_filler: bool = False
    encoder: str = "bert"


REFERENCE = Case("padded, fp32", FLOAT32, "padded")
FLOAT8 = Case("float8", Precision(torch.bfloat16, float8=True))


def cases(device: torch.device) -> list[Case]:
    fast, fast32 = (
        default_implementation(device, dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    float16 = [Case(f"{fast}, fp16", FLOAT16, fast)] if has_float16(device) else []
    return [
        *([REFERENCE] if device.type != "cpu" else []),
        Case(f"{fast32}, fp32", FLOAT32, fast32),
        Case(f"{fast32}, fp32, filler", FLOAT32, fast32, has_filler=True),
        Case("padded, bf16", BFLOAT16, "padded"),
        Case(f"{fast}, bf16", BFLOAT16, fast),
        *float16,
        Case(f"{fast}, bf16, filler", BFLOAT16, fast, has_filler=True),
        Case("activation checkpointing, bf16", BFLOAT16, activation_checkpoint="full"),
        Case("selective checkpointing, bf16", BFLOAT16, activation_checkpoint="selective"),
        Case("compiled layers, bf16", BFLOAT16, compile="layers"),
        Case("compiled model, bf16", BFLOAT16, compile="model"),
        Case("compiled, checkpointing, bf16", BFLOAT16, "auto", "layers", "full"),
        Case("16-bit weights", PURE_BFLOAT16),
        *([FLOAT8] if has_float8(device) else []),
        Case("ModernBERT, fp32", FLOAT32, encoder="modernbert"),
        Case("ModernBERT, bf16", BFLOAT16, encoder="modernbert"),
        Case("compiled, 16-bit weights", PURE_BFLOAT16, compile="model"),
    ]


def has_float8(device: torch.device) -> bool:
    """A CPU emulates it."""
    is_new = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    return is_new and find_spec("torchao") is not None


# --- steps ----------------------------------------------------------------------------------------


def prepare_step(
    args: Arguments, case: Case, device: torch.device, dropout: bool, optimizer: str = "Lamb"
) -> tuple[Trainer, StepBatch]:
    """A trainer with the weights of seed 0, and a batch."""
    bert_config, model_class = load_bert_config(args.model), BertForPreTraining
    if not dropout:
        bert_config = dataclasses.replace(
            bert_config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    if case.encoder == "modernbert":
        sizes = (
            bert_config.vocab_size,
            bert_config.hidden_size,
            4,
            bert_config.num_attention_heads,
        )
        model_class = ModernBertForMaskedLM
        bert_config = ModernBertConfig(
            *sizes, bert_config.hidden_size * 3 // 2, local_attention=args.seq_length // 4
        )
    masked = args.seq_length // 7 + 1
    loader = LoaderConfig(args.batch_size, args.batch_size, args.seq_length, masked)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = model_class(bert_config)
    task = PretrainingTask(case.encoder == "bert", args.seq_length)
    strategy = ParallelConfig(case.compile, case.activation_checkpoint)
    trainer = make_trainer(
        model, task, loader, Runtime(device, case.precision), optimizer, strategy
    )
    if case.precision.needs_loss_scale:
        trainer.state.loss_scale.value.fill_(FLOAT16_SCALE)
    if case.attention != "auto":
        model.base_model.attention_implementation = case.attention
    dataset = RandomDataset(args.batch_size, args.seq_length, bert_config.vocab_size)
    dataset.lengths[-1] -= dataset.lengths.sum() % 16 == 0  # no product has only multiples of 16
    pin = device.type == "cuda"
    return trainer, make_step_batch(
        dataset,
        np.arange(args.batch_size),
        MicroBatchLimits.of(
            loader, 1 if case.has_filler else None, is_compiled=case.compile != "none"
        ),
        pin_memory=pin,
    )


def step_loss(trainer: Trainer, batch: StepBatch) -> float:
    """The loss of `batch`; its gradients are left in the trainer's parameters."""
    for p in trainer.parallel.named_parameters().values():
        p.grad = None
    stats = batch_stats(batch)
    sums = trainer.training_step(batch, stats)
    return float(trainer.task.loss(sums, stats.sequences, stats.labelled_tokens).double())


def loss_and_gradients(
    args: Arguments, case: Case, device: torch.device
) -> tuple[float, dict[str, Tensor]]:
    """The loss without dropout, and the gradient of every parameter in float64 on the CPU."""
    trainer, batch = prepare_step(args, case, device, dropout=False)
    loss = step_loss(trainer, batch)
    # The gradient of the keys' biases is zero in exact arithmetic; computed, it is only rounding
    # errors.
    parameters = {
        n: p for n, p in trainer.parallel.named_parameters().items() if not n.endswith("key.bias")
    }
    scale = float(trainer.state.loss_scale.value)
    return loss, {name: p.grad.double().cpu() / scale for name, p in parameters.items()}


@cache
def reference(
    model: str, seq_length: int, batch_size: int, encoder: str = "bert"
) -> tuple[float, dict[str, Tensor]]:
    args = parse_arguments(
        ["--model", model, "--seq-length", str(seq_length), "--batch-size", str(batch_size)]
    )
    return loss_and_gradients(args, REFERENCE._replace(encoder=encoder), torch.device("cpu"))


def compare(
    args: Arguments,
    found: tuple[float, dict[str, Tensor]],
    precision: Precision,
    encoder: str = "bert",
) -> dict:
    """The relative errors of the loss and of the worst gradient."""
    (loss, gradients) = found
    expected_loss, expected = reference(args.model, args.seq_length, args.batch_size, encoder)
    errors = {name: float((gradients[name] - e).norm() / e.norm()) for name, e in expected.items()}
    worst = max(errors, key=lambda name: errors[name] if np.isfinite(errors[name]) else np.inf)
    loss_error, limit = abs(loss - expected_loss) / expected_loss, LIMITS[precision.dtype]
    limit = FLOAT8_LIMIT if precision.float8 else PURE_LIMIT if precision.pure else limit
    return {
        "loss": loss_error,
        "gradient": errors[worst],
        "worst": worst,
        "limit": limit,
        "passed": loss_error < LOSS_LIMITS[precision.dtype] * (1 + 9 * precision.float8)
        and all(error < limit for error in errors.values()),
    }


def check_gradients(args: Arguments, device: torch.device, case: Case) -> dict:
    return compare(args, loss_and_gradients(args, case, device), case.precision, case.encoder)


def check_strategy(args: Arguments, device: torch.device, name: str) -> dict:
    """A strategy for several GPUs with one process (NCCL on a GPU, gloo on a CPU), or CPU
    offload.
    """
    precision = PURE_BFLOAT16 if "16-bit" in name else FLOAT32
    trainer, batch = prepare_step(args, REFERENCE, device, dropout=False)
    model = trainer.parallel.model
    with one_process_group(device):
        if name == "FSDP2":
            weights = [
                (n, value.detach().clone())
                for n, value in (*model.named_parameters(), *model.named_buffers())
            ]
            model.initial_values = lambda: weights
            trainer.parallel = ShardedModel(
                model, ParallelConfig(), precision, device, DistributedContext()
            )
        elif name == "CPU offload":
            trainer.parallel = OffloadedModel(model, precision)
        else:
            make = ReplicatedMasters if precision.pure else partial(ReplicatedModel, device=device)
            trainer.parallel = make(model, precision)
        loss = step_loss(trainer, batch)
        gradients = {
            n: p.grad.double().cpu() for n, p in trainer.parallel.named_parameters().items()
        }
    return compare(args, (loss, gradients), precision)


@contextlib.contextmanager
def one_process_group(device: torch.device) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_direction(args: Arguments, device: torch.device, case: Case, part: str) -> dict:
    """With dropout: g . d for the normalized gradient d of some parameters, against a central
    difference of losses.
    """
    trainer, batch = prepare_step(args, case, device, dropout=True)
    step_loss(trainer, batch)
    weights = {
        n: p for n, p in trainer.parallel.named_parameters().items() if DIRECTIONS[part] in n
    }
    gradients = {name: p.grad.clone() for name, p in weights.items()}
    slope = float(torch.stack([g.double().norm() for g in gradients.values()]).norm())
    losses = []
    # A step that changes the loss by far more than its rounding, and not by more than is nearly
    # linear.
    change = 0.002 if case.precision.dtype == torch.float32 else 0.01
    step = change * step_loss(trainer, batch) / slope
    for sign in (1, -2):
        with torch.no_grad():
            for name, p in weights.items():
                p.add_(gradients[name], alpha=sign * step / slope)
        losses.append(step_loss(trainer, batch))
    error, limit = (
        abs((losses[0] - losses[1]) / (2 * step) / slope - 1),
        DIRECTION_LIMITS[case.precision.dtype],
    )
    return {"gradient": error, "limit": limit, "passed": error < limit}


# --- attention ------------------------------------------------------------------------------------

BOTH = (FLOAT32, BFLOAT16)
ATTENTION = {
    "cuda": {"efficient": BOTH, "padded": BOTH, "flash": (BFLOAT16,)},
    "cpu": {"length_bucketed": BOTH, "padded": BOTH},
}
STREAM_SEQUENCES, CALLS = 8, 8


def attentions(args: Arguments, device: torch.device) -> dict[str, tuple[Precision, ...]]:
    """The implementations that this machine has, with the precisions to check."""
    found, config = dict(ATTENTION[device.type]), load_bert_config(args.model)
    if device.type == "cuda":
        size = config.hidden_size // config.num_attention_heads
        if find_spec("triton") and args.seq_length <= TRITON_MAX_LENGTH:
            found |= {"triton": BOTH} if size in TRITON_HEAD_SIZES else {}
        if find_spec("flash_attn") and find_spec("flash_attn.cute"):
            found |= {"flash-attn-4": (BFLOAT16,)}
    return found


def check_attention(
    args: Arguments, device: torch.device, name: str, dtype: torch.dtype, dropout_prob: float
) -> dict:
    """One implementation with the model's heads; also milliseconds of a call, forward and with the
    backward pass.
    """
    config = load_bert_config(args.model)
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    torch.manual_seed(0)
    lengths = np.random.default_rng(0).integers(1, args.seq_length + 1, STREAM_SEQUENCES).tolist()
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    qkv_T3HD = torch.randn(
        sum(lengths), 3, heads, size, dtype=dtype, device=device, requires_grad=True
    )
    grad_THD = torch.randn(sum(lengths), heads, size, dtype=dtype, device=device)
    layout = StreamLayout(cu_seqlens, args.seq_length, sum(lengths))
    is_package = name == "flash-attn-4"
    if is_package:  # it overrides torch's operator
        activate_flash_attention_4()
    attend = prepare_attention("flash" if is_package else name, layout, dropout_prob > 0)
    found = check(attend, qkv_T3HD, grad_THD, lengths, dropout_prob)
    stopwatch = Stopwatch(device)
    with stopwatch.lap("forward_ms"):
        for _ in range(CALLS):
            attend(qkv_T3HD, dropout_prob)
    with stopwatch.lap("both_ms"):
        for _ in range(CALLS):
            torch.autograd.grad(attend(qkv_T3HD, dropout_prob), qkv_T3HD, grad_THD)
    milliseconds = {kind: 1e3 * lap / CALLS for kind, (lap,) in stopwatch.seconds().items()}
    if is_package:
        torch.nn.attention.restore_flash_attention_impl()
    return found | milliseconds | {"passed": found["wrong"] is None}


# --- parts ----------------------------------------------------------------------------------------


def check_loss(device: torch.device) -> dict:
    """Output matrix and cross-entropy of more rows than are computed at once, against float64."""
    generator = torch.Generator().manual_seed(0)
    rows = FLOAT32_ROWS[device.type] + 5
    layer = [
        torch.randn(*shape, generator=generator) for shape in ((rows, 64), (1024, 64), (1024,))
    ]
    labels = torch.randint(0, 1024, (rows,), generator=generator)
    labels[::7] = -100
    exact = [tensor.double().requires_grad_() for tensor in layer]
    expected = F.cross_entropy(F.linear(*exact), labels, reduction="sum")
    expected.backward()
    found = [tensor.to(device).requires_grad_() for tensor in layer]
    total, _ = linear_cross_entropy(*found, labels.to(device))
    total.backward()
    errors = [
        (ours.grad.cpu() - theirs.grad).norm() / theirs.grad.norm()
        for ours, theirs in zip(found, exact, strict=True)
    ]
    gradient_error = float(max(errors))
    loss_error = abs(float(total.detach()) / float(expected.detach()) - 1)
    passed = max(loss_error, gradient_error) < 1e-5
    return {"loss": loss_error, "gradient": gradient_error, "limit": 1e-5, "passed": passed}


def check_optimizer(args: Arguments, device: torch.device, name: str) -> dict:
    """Three updates of a small ModernBERT or BERT against those on the CPU; the second gradient is
    infinite, so that it has to change nothing.
    """
    updates, counts = [], []
    for where in (torch.device("cpu"), device):
        case = REFERENCE._replace(encoder="modernbert" if "Muon" in name else "bert")
        trainer, _ = prepare_step(args, case, where, dropout=False, optimizer=name)
        parameters, generator = (
            trainer.parallel.named_parameters(),
            torch.Generator().manual_seed(0),
        )
        before = [p.detach().cpu().double() for p in parameters.values()]
        for scale in (1.0, float("inf"), -3.0):
            for p in parameters.values():
                p.grad = (scale * torch.randn(p.shape, generator=generator)).to(where)
            trainer.optimizer_step()
        after = [p.detach().cpu().double() for p in parameters.values()]
        updates.append(torch.cat([(b - a).flatten() for a, b in zip(before, after, strict=True)]))
        counts.append(int(trainer.state.device_step))
    error, limit = (
        float((updates[1] - updates[0]).norm() / updates[0].norm()),
        OPTIMIZER_LIMITS[name],
    )
    return {"update": error, "limit": limit, "passed": error < limit and counts == [2, 2]}


def check_waiting(args: Arguments, device: torch.device, compile: str) -> dict:
    """Whole steps under CUDA's own check for calls that make the host wait for the device."""
    case = Case("", BFLOAT16, "auto", compile)
    trainer, batch = prepare_step(args, case, device, dropout=True)
    try:
        # The first steps may wait: they compile and allocate memory.
        for mode in ("default", "default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            train_step(trainer, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"passed": True}


# --- the list -------------------------------------------------------------------------------------


def all_checks(args: Arguments, device: torch.device) -> dict[str, Callable[[], dict]]:
    fast = default_implementation(device, torch.bfloat16)
    checks = {case.title: partial(check_gradients, args, device, case) for case in cases(device)}
    for name, precisions in attentions(args, device).items():
        for precision in precisions:
            for dropout_prob in (0.0,) if name == "flash-attn-4" else (0.0, 0.1):
                type_name = str(precision.dtype).removeprefix("torch.")
                title = f"attention {name}, {type_name}, dropout {dropout_prob:g}"
                checks[title] = partial(
                    check_attention, args, device, name, precision.dtype, dropout_prob
                )
    for name in STRATEGIES:
        checks[f"{name}, one process"] = partial(check_strategy, args, device, name)
    dropout_cases = [Case("fp32", FLOAT32), Case(f"{fast}, bf16", BFLOAT16, fast)]
    for case in dropout_cases:
        for part in DIRECTIONS:
            checks[f"dropout, {case.title}, {part}"] = partial(
                check_direction, args, device, case, part
            )
    checks["loss of many rows"] = partial(check_loss, device)
    for name in OPTIMIZER_LIMITS:
        checks[name] = partial(check_optimizer, args, device, name)
    checks["time of LAMB"] = partial(time_lamb, args.model, device)
    if device.type == "cuda":
        for name, compile in {
            "eager": "none",
            "compiled layers": "layers",
            "compiled model": "model",
        }.items():
            checks[f"no step waits, {name}"] = partial(check_waiting, args, device, compile)
    return checks


def run_check(title: str, check: Callable[[], dict]) -> dict:
    started = time.monotonic()
    try:
        result = check()
    except Exception as error:
        result = {"error": one_line(f"{type(error).__name__}: {error}")[:500], "passed": False}
    result = {"check": title, **result, "seconds": round(time.monotonic() - started, 2)}
    figures = [
        f"{key} {value:.1e}"
        for key, value in result.items()
        if isinstance(value, float) and key != "seconds"
    ]
    figures += [
        f"{key} {format_quartiles(value)}"
        for key, value in result.items()
        if isinstance(value, dict)
    ]
    notes = [
        result[key] for key in ("worst", "wrong", "error") if key in result and not result["passed"]
    ]
    print_line(f"{'ok  ' if result['passed'] else 'FAIL'} {title:46} {'  '.join(figures + notes)}")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    device, results = select_device(args.device), []
    set_num_threads()
    silence_imports()
    checks = all_checks(args, device)
    if not (chosen := [title for title in checks if args.only in title]):
        raise UserError(
            f"--only {args.only!r}: no check has these words; there are {'; '.join(checks)}"
        )
    try:
        for title in chosen:
            results.append(run_check(title, checks[title]))
    finally:
        result = {"arguments": args.as_dict(), "checks": results}
        write_result(args.output, f"device_checks-{device.type}-{args.model}", device, result)
    return 0 if all(check["passed"] for check in results) else 1


if __name__ == "__main__":
    run_main(main)
