"""Checks on a device that every fast path computes the same as the plain one.

Each attention implementation alone, on a stream of unequal lengths, is compared with a float64 loop
over the sequences (attention_check.py).

The reference of whole steps is this project in float32 with padded attention on the CPU. Without
dropout, the loss and the gradient of every parameter are compared with it, tensor by tensor, as
||difference|| / ||reference||. With dropout, the gradient is compared with differences of the loss
along three directions, with the same dropout masks. Optimizers are compared with themselves on the
CPU, and the loss of many rows with float64.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.attention_check import implementation_checks, relative_error
from benchmarks.common.shards import write_random_shards
from benchmarks.common.training import load_bert_config, measured_trainer
from bert_recipe.config import LoaderConfig, ParallelConfig
from bert_recipe.data_loading.loader import make_step_batch
from bert_recipe.data_loading.packing import MicroBatchLimits
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.metrics.throughput import GlobalBatchStats
from bert_recipe.model.attention import default_implementation
from bert_recipe.model.encoders.bert import BertForPreTraining
from bert_recipe.model.encoders.modernbert import ModernBertConfig, ModernBertForMaskedLM
from bert_recipe.model.loss import FLOAT32_ROWS, linear_cross_entropy
from bert_recipe.model.token_stream import StepBatch
from bert_recipe.optimization.precision import Precision, has_float16
from bert_recipe.parallel.ddp import ReplicatedMasters, ReplicatedModel
from bert_recipe.parallel.fsdp import ShardedModel
from bert_recipe.parallel.offload import OffloadedModel
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.pretraining import PretrainingTask
from bert_recipe.training.trainer import Trainer

FLOAT32, BFLOAT16, FLOAT16 = Precision(), Precision(torch.bfloat16), Precision(torch.float16)
PURE_BFLOAT16 = Precision(torch.bfloat16, pure=True)
# Of each tensor.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
PURE_LIMIT = 1e-1  # of 16-bit weights: sums over tokens, as for biases, are rounded to 16 bits too
LOSS_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 3e-3}
# The central difference of losses has an error of its own: rounding, and the third derivative.
DIRECTION_LIMITS = {torch.float32: 1e-2, torch.bfloat16: 5e-2}
DIRECTIONS = {
    "value": "attention.self.value.weight",
    "feed-forward": "intermediate.dense.weight",
    "embedding": "word_embeddings.weight",
}
# Muon increases small singular values, and with them their rounding.
OPTIMIZER_LIMITS = {"Lamb": 1e-5, "AdamW": 1e-5, "Muon": 1e-3, "NorMuon": 1e-3}
APEX_LIMIT = 1e-4  # ten updates by other kernels, each with the rounding of the one before
FLOAT16_SCALE = 2.0**15  # of the loss, without which small gradients underflow
STRATEGIES = {
    "DDP": ReplicatedModel,
    "DDP, 16-bit weights": ReplicatedMasters,
    "FSDP2": ShardedModel,
    "CPU offload": OffloadedModel,
}
Check = Callable[[], dict]  # its result says what was found, and `ok`


class Sizes(NamedTuple):
    """What is computed: `batch_size` sequences of up to `seq_length` tokens."""

    model: str = "base"
    seq_length: int = 128
    batch_size: int = 16


class Case(NamedTuple):
    """A way to compute a step; `attention` is a key of attention.IMPLEMENTATIONS or `auto`."""

    precision: Precision
    attention: str = "auto"
    compile: str = "none"
    activation_checkpoint: str = "none"
    has_filler: bool = False
    encoder: str = "bert"


REFERENCE = Case(FLOAT32, "padded")


def all_checks(sizes: Sizes, device: torch.device) -> dict[str, Check]:
    """By title, in the order of what is least settled on a GPU."""
    fast = default_implementation(device, torch.bfloat16)
    checks = attention_checks(sizes, device)
    for name in OPTIMIZER_LIMITS:
        checks[name] = partial(check_optimizer, sizes, device, name)
    if device.type == "cuda":
        checks["apex's FusedLAMB"] = partial(check_fused_lamb, sizes, device)
    for title, case in cases(device).items():
        checks[title] = partial(check_gradients, sizes, device, case)
    for name in STRATEGIES:
        checks[f"{name}, one process"] = partial(check_strategy, sizes, device, name)
    for title, case in {"fp32": Case(FLOAT32), f"{fast}, bf16": Case(BFLOAT16, fast)}.items():
        for part in DIRECTIONS:
            checks[f"dropout, {title}, {part}"] = partial(
                check_direction, sizes, device, case, part
            )
    checks["loss of many rows"] = partial(check_loss, device)
    return checks


def attention_checks(sizes: Sizes, device: torch.device) -> dict[str, Check]:
    config = load_bert_config(sizes.model)
    head_size = config.hidden_size // config.num_attention_heads
    return implementation_checks(config.num_attention_heads, head_size, sizes.seq_length, device)


def cases(device: torch.device) -> dict[str, Case]:
    fast, fast32 = (
        default_implementation(device, dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    named_cases = {
        "compiled layers, bf16": Case(BFLOAT16, compile="layers"),
        "compiled model, bf16": Case(BFLOAT16, compile="model"),
        "compiled, checkpointing, bf16": Case(BFLOAT16, "auto", "layers", "full"),
        "compiled, 16-bit weights": Case(PURE_BFLOAT16, compile="model"),
        "padded, fp32": REFERENCE,
        f"{fast32}, fp32": Case(FLOAT32, fast32),
        f"{fast32}, fp32, filler": Case(FLOAT32, fast32, has_filler=True),
        "padded, bf16": Case(BFLOAT16, "padded"),
        f"{fast}, bf16": Case(BFLOAT16, fast),
        f"{fast}, bf16, filler": Case(BFLOAT16, fast, has_filler=True),
        "activation checkpointing, bf16": Case(BFLOAT16, activation_checkpoint="full"),
        "selective checkpointing, bf16": Case(BFLOAT16, activation_checkpoint="selective"),
        "16-bit weights": Case(PURE_BFLOAT16),
        "ModernBERT, fp32": Case(FLOAT32, encoder="modernbert"),
        "ModernBERT, bf16": Case(BFLOAT16, encoder="modernbert"),
    }
    if has_float16(device):
        named_cases[f"{fast}, fp16"] = Case(FLOAT16, fast)
    return named_cases


# --- steps ----------------------------------------------------------------------------------------


def prepare_step(
    sizes: Sizes, case: Case, device: torch.device, dropout: bool, optimizer: str = "Lamb"
) -> tuple[Trainer, StepBatch]:
    """A trainer with the weights of seed 0, and a batch."""
    config, model_class = load_bert_config(sizes.model), BertForPreTraining
    if not dropout:
        config = dataclasses.replace(
            config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    if case.encoder == "modernbert":
        model_class, width = ModernBertForMaskedLM, config.hidden_size
        config = ModernBertConfig(
            config.vocab_size,
            width,
            4,
            config.num_attention_heads,
            width * 3 // 2,
            local_attention=sizes.seq_length // 4,
        )
    masked = sizes.seq_length // 7 + 1
    loader = LoaderConfig(sizes.batch_size, sizes.batch_size, sizes.seq_length, masked)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = model_class(config)
    task = PretrainingTask(case.encoder == "bert", sizes.seq_length)
    runtime = Runtime(device, case.precision)
    num_sizes = 1 if case.has_filler else None
    limits = MicroBatchLimits.of(loader, num_sizes, is_compiled=case.compile != "none")
    with tempfile.TemporaryDirectory() as folder:
        shape = (sizes.batch_size, sizes.seq_length, masked, config.vocab_size)
        shards = write_random_shards(Path(folder), *shape, lengths_of(sizes))
        dataset = PretrainingDataset(shards, config.vocab_size)
        indices = np.arange(sizes.batch_size)
        batch = make_step_batch(dataset, indices, limits, pin_memory=device.type == "cuda")
    strategies = {"compile": case.compile, "activation_checkpoint": case.activation_checkpoint}
    trainer = measured_trainer(
        model, task, dataset, runtime, sizes.batch_size, optimizer=optimizer, **strategies
    )
    if case.precision.needs_loss_scale:
        trainer.parallel.loss_scale.value.fill_(FLOAT16_SCALE)
    if case.attention != "auto":
        model.base_model.attention_implementation = case.attention
    return trainer, batch


def lengths_of(sizes: Sizes) -> np.ndarray:
    """Of the samples: the second half of them is shorter, and no product of matrices has only
    multiples of 16.
    """
    random = np.random.default_rng(0)
    lengths = random.integers(sizes.seq_length // 8, sizes.seq_length + 1, sizes.batch_size)
    lengths[: sizes.batch_size // 2] = sizes.seq_length
    lengths[-1] -= lengths.sum() % 16 == 0
    return lengths


def step_loss(trainer: Trainer, batch: StepBatch) -> float:
    """The loss of `batch`; its gradients are left in the trainer's parameters."""
    for p in trainer.parallel.named_parameters().values():
        p.grad = None
    stats = GlobalBatchStats.of(batch)
    sums = trainer.training_step(batch, stats)
    return float(trainer.task.loss(sums, stats.counts).double())


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    """In float64 on the CPU. Without those of the keys' biases, which are zero in exact arithmetic:
    computed, they are only rounding errors.
    """
    scale = float(trainer.parallel.loss_scale.value)
    return {
        name: p.grad.double().cpu() / scale
        for name, p in trainer.parallel.named_parameters().items()
        if not name.endswith("key.bias")
    }


def loss_and_gradients(
    sizes: Sizes, case: Case, device: torch.device
) -> tuple[float, dict[str, Tensor]]:
    """Of every parameter, without dropout."""
    trainer, batch = prepare_step(sizes, case, device, dropout=False)
    return step_loss(trainer, batch), gradients_of(trainer)


@cache
def reference(sizes: Sizes, encoder: str = "bert") -> tuple[float, dict[str, Tensor]]:
    return loss_and_gradients(sizes, REFERENCE._replace(encoder=encoder), torch.device("cpu"))


def compare(
    sizes: Sizes, loss: float, gradients: dict[str, Tensor], precision: Precision, encoder: str
) -> dict:
    """The relative errors of the loss and of the worst gradient."""
    expected_loss, expected = reference(sizes, encoder)
    errors = {name: relative_error(gradients[name], e) for name, e in expected.items()}
    worst = max(errors, key=lambda name: errors[name] if np.isfinite(errors[name]) else np.inf)
    loss_error = abs(loss - expected_loss) / expected_loss
    loss_limit, limit = LOSS_LIMITS[precision.dtype], LIMITS[precision.dtype]
    if precision.pure:
        limit = PURE_LIMIT
    are_right = all(error < limit for error in errors.values())
    return {
        "loss": loss_error,
        "gradient": errors[worst],
        "worst": worst,
        "limit": limit,
        "ok": loss_error < loss_limit and are_right,
    }


def check_gradients(sizes: Sizes, device: torch.device, case: Case) -> dict:
    computed = loss_and_gradients(sizes, case, device)
    return compare(sizes, *computed, case.precision, case.encoder)


def check_strategy(sizes: Sizes, device: torch.device, name: str) -> dict:
    """A strategy for several GPUs with one process (NCCL on a GPU, gloo on a CPU), or CPU
    offload.
    """
    precision = PURE_BFLOAT16 if "16-bit" in name else FLOAT32
    trainer, batch = prepare_step(sizes, REFERENCE, device, dropout=False)
    model = trainer.parallel.model
    if name == "FSDP2":
        named = (*model.named_parameters(), *model.named_buffers())
        weights = [(key, value.detach().clone()) for key, value in named]
        model.initial_values = lambda: weights
    with one_process_group(device):
        trainer.parallel = STRATEGIES[name](model, ParallelConfig(), Runtime(device, precision))
        loss = step_loss(trainer, batch)
        return compare(sizes, loss, gradients_of(trainer), precision, "bert")


@contextlib.contextmanager
def one_process_group(device: torch.device) -> Iterator[None]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_direction(sizes: Sizes, device: torch.device, case: Case, part: str) -> dict:
    """With dropout: g . d for the normalized gradient d of some parameters, against a central
    difference of losses.
    """
    trainer, batch = prepare_step(sizes, case, device, dropout=True)
    loss = step_loss(trainer, batch)
    named = trainer.parallel.named_parameters()
    weights = [p for name, p in named.items() if DIRECTIONS[part] in name]
    gradients = [p.grad.clone() for p in weights]
    slope = float(torch.stack([grad.double().norm() for grad in gradients]).norm())
    # A step that changes the loss by far more than its rounding, and not by more than is nearly
    # linear.
    step = (0.002 if case.precision.dtype == torch.float32 else 0.01) * loss / slope
    losses = []
    for sign in (1, -2):
        with torch.no_grad():
            for p, grad in zip(weights, gradients, strict=True):
                p.add_(grad, alpha=sign * step / slope)
        losses.append(step_loss(trainer, batch))
    error = abs((losses[0] - losses[1]) / (2 * step) / slope - 1)
    limit = DIRECTION_LIMITS[case.precision.dtype]
    return {"gradient": error, "limit": limit, "ok": error < limit}


# --- parts ----------------------------------------------------------------------------------------


def check_loss(device: torch.device) -> dict:
    """Output matrix and cross-entropy of more rows than are computed at once, against float64."""
    generator = torch.Generator().manual_seed(0)
    rows = FLOAT32_ROWS[device.type] + 5
    shapes = ((rows, 64), (1024, 64), (1024,))
    layer = [torch.randn(*shape, generator=generator) for shape in shapes]
    labels = torch.randint(0, 1024, (rows,), generator=generator)
    labels[::7] = -100
    exact = [tensor.double().requires_grad_() for tensor in layer]
    expected = F.cross_entropy(F.linear(*exact), labels, reduction="sum")
    expected.backward()
    layer_on_device = [tensor.to(device).requires_grad_() for tensor in layer]
    total, _ = linear_cross_entropy(*layer_on_device, labels.to(device))
    total.backward()
    errors = [
        relative_error(ours.grad.cpu(), theirs.grad)
        for ours, theirs in zip(layer_on_device, exact, strict=True)
    ]
    loss_error, limit = abs(float(total.detach()) / float(expected.detach()) - 1), 1e-5
    is_right = max(loss_error, *errors) < limit
    return {"loss": loss_error, "gradient": max(errors), "limit": limit, "ok": is_right}


def updates_of(
    sizes: Sizes, case: Case, device: torch.device, optimizer: str, scales: Sequence[float]
) -> tuple[Tensor, int]:
    """What the updates change in all weights, and their number. scales: of each update's random
    gradients; an infinite one has to change nothing.
    """
    trainer, _ = prepare_step(sizes, case, device, dropout=False, optimizer=optimizer)
    parameters = trainer.parallel.named_parameters().values()
    generator = torch.Generator().manual_seed(0)
    before = [p.detach().cpu().double() for p in parameters]
    for scale in scales:
        for p in parameters:
            p.grad = (scale * torch.randn(p.shape, generator=generator)).to(device)
        trainer.optimizer_step()
    after = [p.detach().cpu().double() for p in parameters]
    changes = torch.cat([(b - a).flatten() for a, b in zip(before, after, strict=True)])
    return changes, int(trainer.state.device_step)


def compare_updates(
    expected: tuple[Tensor, int], actual: tuple[Tensor, int], count: int, limit: float
) -> dict:
    error = relative_error(actual[0], expected[0])
    is_right = error < limit and expected[1] == actual[1] == count
    return {"update": error, "limit": limit, "ok": is_right}


def check_optimizer(sizes: Sizes, device: torch.device, name: str) -> dict:
    """Three updates of a small ModernBERT or BERT against those on the CPU."""
    case = REFERENCE._replace(encoder="modernbert" if "Muon" in name else "bert")
    scales = (1.0, float("inf"), -3.0)
    expected, actual = (
        updates_of(sizes, case, where, name, scales) for where in (torch.device("cpu"), device)
    )
    return compare_updates(expected, actual, 2, OPTIMIZER_LIMITS[name])


def check_fused_lamb(sizes: Sizes, device: torch.device) -> dict:
    """Ten updates of apex's FusedLAMB against those of Lamb on the same GPU."""
    if find_spec("apex") is None:
        return {"skipped": "apex is not installed"}
    scales = (*range(1, 6), float("inf"), *range(-1, -6, -1))
    expected, actual = (
        updates_of(sizes, REFERENCE, device, name, scales) for name in ("Lamb", "FusedLAMB")
    )
    return compare_updates(expected, actual, 10, APEX_LIMIT)
