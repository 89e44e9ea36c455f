"""The loader: packs samples into micro-batches and yields the global batches of a run in order.

Legend: n samples.
"""

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from bert_recipe.config import LoaderConfig
from bert_recipe.data_loading.packing import (
    Label,
    MicroBatchLimits,
    filler_stream,
    pack,
    pad_stream,
)
from bert_recipe.data_loading.sample_order import rank_positions, sample_order, sample_seeds
from bert_recipe.model.token_stream import MicroBatch, StepBatch

STEPS_AHEAD = 2  # per worker


class Samples(Protocol):
    """Loaded samples with the numbers of tokens, labelled tokens and sequences of each, [n]."""

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def num_labelled(self) -> np.ndarray: ...

    @property
    def num_sequences(self) -> np.ndarray: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...

    def stream(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The samples `rows` as one token stream (see model/token_stream.py)."""


class StreamDataset(Protocol):
    """A data set read as token streams, which have the labels `stream_labels`. A sample has at most
    `max_labelled_per_sample` labelled (masked) tokens, and is at most `max_sequences_per_sample`
    sequences.
    """

    @property
    def stream_labels(self) -> tuple[Label, ...]: ...

    @property
    def max_labelled_per_sample(self) -> int: ...

    @property
    def max_sequences_per_sample(self) -> int: ...

    def __len__(self) -> int: ...

    def digest(self) -> str: ...

    def read(
        self, indices: np.ndarray, seeds: np.ndarray | None = None, progress: float = 0.0
    ) -> Samples:
        """The samples `indices` [n]. What is random in them, such as masks, follows from `seeds`
        [n], or is the same each time without them, for evaluation. progress: share of the run's
        updates that are done, for schedules.
        """


def to_tensors(
    stream: dict[str, np.ndarray],
    labels: tuple[Label, ...],
    limits: MicroBatchLimits,
    pin_memory: bool,
) -> MicroBatch:
    """A stream (see model/token_stream.py) as tensors on the CPU, in the sizes of `limits`.

    labels: those in the stream.
    pin_memory: for copies to a GPU that the host does not wait for.
    """
    num_sequences = len(stream["cu_seqlens"]) - 1
    longest = limits.max_seqlen
    if not limits.is_compiled:
        longest = int(np.diff(stream["cu_seqlens"]).max())
    if limits.num_sizes is not None or limits.is_compiled:
        stream = pad_stream(stream, labels, limits)
    tensors: MicroBatch = {name: torch.from_numpy(array) for name, array in stream.items()}
    if pin_memory:
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    if limits.num_sizes is None:
        tensors["max_seqlen"] = longest
    return tensors | {"num_sequences": num_sequences}


@functools.lru_cache(maxsize=4)
def filler_micro_batch(
    labels: tuple[Label, ...], limits: MicroBatchLimits, pin_memory: bool = False
) -> MicroBatch:
    return to_tensors(filler_stream(labels), labels, limits, pin_memory) | {"num_sequences": 0}


def make_step_batch(
    dataset: StreamDataset,
    indices: np.ndarray,
    limits: MicroBatchLimits,
    first_position: int = 0,
    pin_memory: bool = False,
    seeds: np.ndarray | None = None,
    progress: float = 0.0,
) -> StepBatch:
    """Reads the samples `indices` and packs them into micro-batches. seeds, progress: see
    StreamDataset.
    """
    samples = dataset.read(indices, seeds, progress)
    costs = np.column_stack([samples.lengths, samples.num_labelled, samples.num_sequences])
    groups = pack(costs, (limits.tokens, limits.labelled_tokens, limits.sequences))
    labels = dataset.stream_labels
    return StepBatch(
        first_position,
        [to_tensors(samples.stream(group), labels, limits, pin_memory) for group in groups],
        samples.lengths,
        samples.num_labelled,
        functools.partial(filler_micro_batch, labels, limits, pin_memory),
        dict(samples.metrics),
    )


def global_batches(config: LoaderConfig, first: int = 0) -> Iterator[tuple[int, int]]:
    """The first position and the size of each global batch from position `first` on."""
    while True:
        size = config.global_batch_size
        warmup = config.batch_size_warmup_sequences
        if first < warmup:
            initial = config.initial_global_batch_size
            size = initial + (size - initial) * first // warmup
        yield first, size
        first += size


@dataclass(frozen=True)
class StepLoader:
    """Infinite iterator over one rank's parts of the global batches, starting at `first_position`.

    Optimizer step k uses the positions [first + k*G, first + (k+1)*G) of the sample order, where G
    is the global batch size. During its warmup, G is a function of the position at which a batch
    starts, so a resumed run has the same batches. Batches continue across epochs, so no batch is
    short. Worker threads prefetch; their number does not affect the batches. updates: length of the
    whole run, for what changes during it; None if nothing does.
    """

    dataset: StreamDataset
    config: LoaderConfig
    seed: int
    first_position: int = 0
    rank: int = 0
    world_size: int = 1
    pin_memory: bool = False
    limits: MicroBatchLimits | None = None
    updates: int | None = None

    def load(self, step: int) -> StepBatch:
        """This rank's part of global batch number `step`, counted from `first_position`."""
        return self._load(*next(itertools.islice(self._global_batches(), step, None)))

    def _global_batches(self) -> Iterator[tuple[int, int, float]]:
        """The first position and the size of each global batch, and the share of the updates that
        are done before.
        """
        batches = global_batches(self.config, self.first_position)
        if self.updates is None:
            for first, size in batches:
                yield first, size, 0.0
            return
        earlier_batches = itertools.takewhile(
            lambda batch: batch[0] < self.first_position, global_batches(self.config)
        )
        updates_done = sum(1 for _ in earlier_batches)
        for number, (first, size) in enumerate(batches, updates_done):
            yield first, size, min(number / max(self.updates - 1, 1), 1.0)

    def _load(self, first: int, global_batch_size: int, progress: float) -> StepBatch:
        positions = rank_positions(first, global_batch_size, self.rank, self.world_size)
        indices = sample_order(positions, len(self.dataset), self.seed)
        limits = self.limits or MicroBatchLimits.of(self.config)
        seeds = sample_seeds(positions, self.seed)
        return make_step_batch(
            self.dataset, indices, limits, first, self.pin_memory, seeds, progress
        )

    def __iter__(self) -> Iterator[StepBatch]:
        global_batches = self._global_batches()
        num_workers = self.config.num_workers
        if num_workers == 0:
            yield from itertools.starmap(self._load, global_batches)
            return
        executor = ThreadPoolExecutor(num_workers, thread_name_prefix="loader")
        try:
            ahead = deque(
                executor.submit(self._load, *next(global_batches))
                for _ in range(STEPS_AHEAD * num_workers)
            )
            while True:
                batch = ahead.popleft().result()
                ahead.append(executor.submit(self._load, *next(global_batches)))
                yield batch
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def batches_in_order(
    dataset: StreamDataset, indices: np.ndarray, limits: MicroBatchLimits, pin_memory: bool = False
) -> Iterator[StepBatch]:
    """Yields the samples `indices` once, in batches of bounded memory; for evaluation."""
    for start in range(0, len(indices), limits.sequences):
        yield make_step_batch(
            dataset, indices[start : start + limits.sequences], limits, start, pin_memory
        )
