"""Evaluation: a task's metrics over a whole data set."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from data_loader import MicroBatch, StreamDataset, batches_in_order, filler_micro_batch, to_device
from packing import MicroBatchLimits
from parallelize import ParallelModel
from runtime import Runtime
from tasks import Task
from utils.progress import progress_bar


@torch.no_grad()
def evaluate(
    parallel: ParallelModel, task: Task, dataset: StreamDataset, limits: MicroBatchLimits, runtime: Runtime
) -> dict[str, float]:
    """The task's metrics over all of `dataset`, without dropout. Every rank evaluates its share, and all get the
    result."""
    distributed = runtime.distributed
    parallel.model.eval()
    mine = np.arange(distributed.rank, len(dataset), distributed.world_size)
    counts = np.zeros(2)
    sums: dict[str, float] = {}
    with progress_bar(len(mine), "evaluation", "sequence", enabled=distributed.is_main) as bar:

        def micro_batches() -> Iterator[MicroBatch]:
            for batch in batches_in_order(dataset, mine, limits):
                yield from batch.micro_batches
                counts[:] += len(batch.lengths), batch.num_targets.sum()
                bar.update(len(batch.lengths))

        make_filler = partial(filler_micro_batch, dataset.stream_arrays, limits)
        for micro_batch in parallel.equalize_inference(micro_batches(), make_filler):
            with runtime.precision.context(runtime.device):
                found = task.sums(parallel.model, to_device(micro_batch, runtime.device))
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    sequences, targets, *values = distributed.all_reduce_sum([*counts, *sums.values()])
    return task.metrics(dict(zip(sums, values, strict=True)), sequences, targets)
