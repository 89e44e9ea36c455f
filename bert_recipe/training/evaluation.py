"""Evaluation (a task's metrics over a data set) and prediction (the model's output for each
sample).

Legend: n samples.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert_recipe.data_loading.loader import (
    StreamDataset,
    batches_in_order,
    filler_micro_batch,
    to_tensors,
)
from bert_recipe.data_loading.packing import MicroBatchLimits, filler_stream, stream_sizes
from bert_recipe.metrics.sinks import Reporter
from bert_recipe.model.token_stream import BatchCounts, MicroBatch, TokenStream, to_device
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import SeparableTask
from bert_recipe.tasks.text_sequences import SequenceDataset
from bert_recipe.utils.collectives import all_reduce
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.progress import progress_bar

# Around the work that a rank does by itself: there are no collectives in it, unless the strategy
# gathers parameters.
Guard = Callable[[], AbstractContextManager[None]]
# Of a benchmark: batches of the warmup, and batches after it; a prediction ends after these.
Measured = tuple[int, int]


def only_numbers(scores: dict[str, Any]) -> dict[str, float]:
    """The scores that are numbers, without tables."""
    return {name: value for name, value in scores.items() if isinstance(value, int | float)}


def with_nulls(metrics: dict[str, float]) -> dict[str, float | None]:
    """`metrics` for JSON, which has no NaN: those that are not defined are None."""
    return {name: None if math.isnan(value) else value for name, value in metrics.items()}


def describe(metrics: dict[str, float], form: str) -> str:
    return "  ".join(
        f"{name} not defined" if math.isnan(value) else f"{name} {value:{form}}"
        for name, value in metrics.items()
    )


@torch.no_grad()
def sums_without_dropout(
    parallel: ParallelModel,
    sums_of: Callable[..., dict[str, Tensor]],
    micro_batches: Iterable[MicroBatch],
    runtime: Runtime,
    guard: Guard = nullcontext,
) -> dict[str, float]:
    """The sums of a task's `sums_of(model, micro_batch)` over this rank's micro-batches; called on
    all ranks.
    """
    parallel.model.eval()
    # On the device: a read would wait for each batch before the next is prepared.
    sums: dict[str, Tensor] = {}
    with guard():
        for micro_batch in micro_batches:
            with runtime.precision.context(runtime.device):
                batch_sums = sums_of(
                    parallel.plain_module, parallel.inputs(micro_batch, runtime.device)
                )
            for name, value in batch_sums.items():
                sums[name] = sums.get(name, 0.0) + value.double()
    runtime.distributed.wait_for_device(runtime.device)
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))


def evaluate(
    parallel: ParallelModel,
    task: SeparableTask,
    dataset: StreamDataset,
    limits: MicroBatchLimits,
    runtime: Runtime,
    count: int | None = None,
    guard: Guard = nullcontext,
) -> dict[str, float]:
    """The task's metrics over `dataset`, or `count` samples of it at equal distances, without
    dropout, on all ranks, which share the samples.
    """
    distributed = runtime.distributed
    pin_memory = runtime.device.type == "cuda"  # other copies wait for the GPU
    count = min(count or len(dataset), len(dataset))
    chosen = np.arange(count) * len(dataset) // count
    mine = chosen[distributed.rank :: distributed.world_size]
    counts = np.zeros(len(BatchCounts._fields))
    is_main = distributed.is_main
    with progress_bar(len(mine), "evaluation", "sequence", enabled=is_main) as bar:

        def micro_batches() -> Iterator[MicroBatch]:
            for batch in batches_in_order(dataset, mine, limits, pin_memory):
                yield from batch.micro_batches
                counts[:] += batch.counts
                bar.update(len(batch.lengths))

        make_filler = partial(filler_micro_batch, dataset.stream_labels, limits, pin_memory)
        filled = parallel.equalize_inference(micro_batches(), make_filler)
        sums = sums_without_dropout(parallel, task.sums, filled, runtime, guard)
    summed = distributed.all_reduce_sum([*counts, *sums.values()])
    values = dict(zip(sums, summed[len(counts) :], strict=True))
    return task.metrics(values, BatchCounts(*summed[: len(counts)]))


def prediction_batches(
    lengths: np.ndarray, batch_size: int, measured: Measured | None, rank: int, world_size: int
) -> list[np.ndarray]:
    """This rank's batches of similar lengths, shuffled to estimate the remaining time; for a
    benchmark a subset.
    """
    by_length = np.argsort(-lengths, kind="stable")
    batches = np.split(by_length, range(batch_size, len(by_length), batch_size))
    order = np.random.default_rng(0).permutation(len(batches))
    if measured is not None:
        order = order[: sum(measured) * world_size]
    return [batches[place] for place in order[rank::world_size]]


def predict(
    parallel: ParallelModel,
    dataset: SequenceDataset,
    logits_axis: str,
    batch_size: int,
    runtime: Runtime,
    guard: Guard = nullcontext,
    measured: Measured | None = None,
    width: int | None = None,
) -> tuple[np.ndarray, dict[str, float]]:
    """Returns the model's logits, float32, [rows, C] with a row per sequence or token of the data
    set (`logits_axis`), and the inference speed, on all ranks, which share the samples. Raises
    UserError for logits that are not finite. width: their number, C, if a hook replaces the logits
    of the model.
    """
    distributed = runtime.distributed
    parallel.model.eval()
    ranks = distributed.rank, distributed.world_size
    batches = prediction_batches(dataset.lengths, batch_size, measured, *ranks)
    num_sizes = stream_sizes(runtime.device, runtime.precision.dtype)
    longest = int(dataset.lengths.max(initial=1))
    limits = MicroBatchLimits.for_batch(batch_size, longest, 0, num_sizes)
    num_rows = len(dataset.input_ids) if logits_axis == "token" else len(dataset)
    logits = np.zeros((num_rows, width or parallel.model.num_outputs), np.float32)
    times = PredictionTimes(runtime.reporter)
    # Buffers of parameters that are gathered here first serve the updates later, too.
    without_gradients = torch.no_grad if parallel.gathers_parameters else torch.inference_mode
    # Graphs for predictions are not worth their compilation.
    with (
        without_gradients(),
        guard(),
        parallel.eager(),
        progress_bar(len(batches), "prediction", "batch", enabled=distributed.is_main) as bar,
    ):
        for indices in parallel.equalize_inference(batches, lambda: np.zeros(0, np.int64)):
            started = time.perf_counter()
            output = predict_batch(parallel, dataset, indices, limits, runtime)
            if not len(indices):  # filler, while other ranks have more batches
                continue
            rows = dataset.rows(indices, logits_axis)
            logits[rows] = output[: len(rows)].float().cpu().numpy()  # the rest is filler
            times.add(time.perf_counter() - started, len(indices))
            bar.update()
    if distributed.world_size > 1:
        # Rows of other ranks are zero.
        all_reduce(torch.from_numpy(logits), distributed.cpu_group)
    check_finite(logits)
    return logits, inference_speed([*map(len, batches)], times.seconds, measured, runtime)


def predict_batch(
    parallel: ParallelModel,
    dataset: SequenceDataset,
    indices: np.ndarray,
    limits: MicroBatchLimits,
    runtime: Runtime,
) -> Tensor:
    """The logits of the sequences `indices`, or of filler if there are none."""
    if len(indices) == 1 and runtime.precision.dtype == torch.float32:
        limits = replace(limits, num_sizes=None)  # for attention's path without a mask
    stream = filler_stream(dataset.stream_labels)
    if len(indices):
        stream = dataset.stream(indices)
    micro_batch = to_tensors(stream, dataset.stream_labels, limits, pin_memory=False)
    max_seqlen = int(dataset.lengths[indices].max(initial=1))
    tokens = TokenStream.from_batch(to_device(micro_batch, runtime.device), max_seqlen)
    with runtime.precision.context(runtime.device):
        return parallel.plain_module(tokens).logits


class PredictionTimes:
    """The seconds of each batch. Logs the time of each 1,000 samples, under NVIDIA's keys."""

    def __init__(self, reporter: Reporter):
        self.reporter = reporter
        self.seconds: list[float] = []
        self.num_samples = 0
        self.thousand_started = time.perf_counter()

    def add(self, seconds: float, count: int) -> None:
        """Adds a batch of `count` samples."""
        self.seconds.append(seconds)
        thousands = self.num_samples // 1000
        self.num_samples += count
        if self.num_samples // 1000 > thousands:
            before = self.thousand_started
            self.thousand_started = time.perf_counter()
            elapsed = self.thousand_started - before
            record = {"sample_number": self.num_samples, "time_per_1000": elapsed}
            self.reporter.log("PARAMETER", record)


def check_finite(logits: np.ndarray) -> None:
    if not np.isfinite(logits).all():
        raise UserError(
            "the model's logits are not finite: its weights are damaged, use another checkpoint"
        )


def inference_speed(
    sizes: list[int], seconds: list[float], measured: Measured | None, runtime: Runtime
) -> dict[str, float]:
    """Sequences per second over all ranks, and the latency of this rank's batches, both without
    warmup batches.
    """
    warmup = 1 if measured is None else measured[0]
    counted = slice(min(warmup, max(len(seconds) - 1, 0)), None)
    rate = sum(sizes[counted]) / max(sum(seconds[counted]), 1e-9)
    (total_rate,) = runtime.distributed.all_reduce_sum([rate])
    milliseconds = 1000 * np.array(seconds[counted] or [0.0])
    return {
        "inference_sequences_per_second": total_rate,
        "latency_ms_median": float(np.median(milliseconds)),
        "latency_ms_p90": float(np.percentile(milliseconds, 90)),
        "latency_ms_p99": float(np.percentile(milliseconds, 99)),
    }
