"""Token streams: the model's one input layout, the order in which samples are visited, and how they are packed.

A micro-batch is whole sequences laid end to end without padding, as a dict of arrays:

    input_ids, token_type_ids, position_ids  [T]    every token of the micro-batch
    cu_seqlens                               [N+1]  where each sequence starts; the last entry is T
    mlm_positions, mlm_labels                [M]    pre-training: masked tokens, as places in the stream
    nsp_labels                               [N]    pre-training: 1 where sentence B is random
    start_positions, end_positions           [N]    SQuAD: the answer's tokens, counted from the sequence's start

A data set that can be streamed has `__len__`, `sizes(indices)`, which gives the tokens and the targets of each sample
as an int array [n, 2], and `stream(indices)`, which gives the dict above in the order of `indices`.

Legend: T tokens in the stream, N sequences, M masked tokens, G sequences in a global batch.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

FEISTEL_ROUNDS = 6
IGNORED_LABEL = -100  # what torch's cross-entropy ignores


class StreamDataset(Protocol):
    def __len__(self) -> int: ...

    def sizes(self, indices: np.ndarray) -> np.ndarray: ...

    def stream(self, indices: np.ndarray) -> dict[str, np.ndarray]: ...


# --- the order of samples ---------------------------------------------------------------------------------------------


def mix64(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit words that spreads every bit."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample_order(positions: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """Which sample stands at each of the `positions` of an endless run through the data.

    Epoch e covers the positions [e*n, (e+1)*n) and visits each of the n samples once, in an order of its own. The
    order is a keyed permutation, a Feistel network walked until it lands inside [0, n), so a look-up needs neither
    memory nor what came before it (Black and Rogaway, 2002, "Ciphers with arbitrary finite domains").
    """
    positions = np.asarray(positions, dtype=np.uint64)
    epoch = positions // np.uint64(num_samples)
    place = positions % np.uint64(num_samples)
    half_bits = np.uint64(max(1, (max(num_samples - 1, 1).bit_length() + 1) // 2))
    half_mask = np.uint64((1 << int(half_bits)) - 1)
    base_key = mix64(mix64(np.full_like(epoch, seed % 2**64)) + epoch + np.uint64(1))
    round_keys = [mix64(base_key + np.uint64(round_ + 1)) for round_ in range(FEISTEL_ROUNDS)]

    outside = np.arange(len(place))
    while len(outside):
        left, right = place[outside] >> half_bits, place[outside] & half_mask
        for key in round_keys:
            left, right = right, left ^ (mix64(right + key[outside]) & half_mask)
        place[outside] = (left << half_bits) | right
        outside = outside[place[outside] >= num_samples]
    return place.astype(np.int64)


# --- packing ----------------------------------------------------------------------------------------------------------


def pack(sizes: np.ndarray, limits: Sequence[int]) -> list[np.ndarray]:
    """Groups samples into micro-batches: places into `sizes`, longest samples first, each sample once.

    `sizes` [n, K] holds K costs a sample and `limits` K the most of each cost that a micro-batch may hold. A
    micro-batch is closed only when the next sample would not fit, so where any B samples fit the limits, each closed
    one holds at least B, and n samples take at most ceil(n / B) micro-batches. Samples of equal length end up side
    by side, which attention on the CPU turns into batches without a mask.
    """
    order = np.argsort(-sizes[:, 0], kind="stable")
    totals = np.cumsum(sizes[order], axis=0)
    if (sizes > np.asarray(limits)).any():
        raise ValueError(f"a sample of size {sizes.max(axis=0)} does not fit a micro-batch of {tuple(limits)}")
    groups, start, before = [], 0, np.zeros(sizes.shape[1], dtype=totals.dtype)
    while start < len(order):
        fits = [np.searchsorted(totals[:, k], before[k] + limits[k], side="right") for k in range(sizes.shape[1])]
        end = int(min(fits))
        groups.append(order[start:end])
        start, before = end, totals[end - 1]
    return groups


def pad_stream(
    stream: dict[str, np.ndarray], tokens: int, sequences: int, targets: int, max_seqlen: int
) -> dict[str, np.ndarray]:
    """`stream` brought to fixed sizes, for graphs that are compiled or captured once: T = `tokens`, N = `sequences` +
    ceil(`tokens` / `max_seqlen`), M = `targets`. Filler tokens form sequences of their own, of at most `max_seqlen`
    tokens, and every filler target has the label that losses ignore."""
    filled = dict(stream)
    real_tokens = len(stream["input_ids"])
    sequences += -(-tokens // max_seqlen)
    for name in ("input_ids", "token_type_ids"):
        filled[name] = np.pad(stream[name], (0, tokens - real_tokens))
    filler_positions = np.arange(tokens - real_tokens) % max_seqlen
    filled["position_ids"] = np.concatenate([stream["position_ids"], filler_positions])
    starts = np.arange(real_tokens + max_seqlen, tokens + max_seqlen, max_seqlen).clip(max=tokens)
    ends = np.concatenate([stream["cu_seqlens"], starts])
    if len(ends) > sequences + 1:
        raise ValueError(f"{len(ends) - 1} sequences do not fit the {sequences} of a fixed-size stream")
    filled["cu_seqlens"] = np.pad(ends, (0, sequences + 1 - len(ends)), constant_values=tokens).astype(np.int32)
    if "mlm_labels" in stream:
        missing = (0, targets - len(stream["mlm_labels"]))
        filled["mlm_positions"] = np.pad(stream["mlm_positions"], missing)
        filled["mlm_labels"] = np.pad(stream["mlm_labels"], missing, constant_values=IGNORED_LABEL)
    for name in ("nsp_labels", "start_positions", "end_positions"):
        if name in stream:
            missing = (0, sequences - len(stream[name]))
            filled[name] = np.pad(stream[name], missing, constant_values=IGNORED_LABEL)
    return filled


# --- from samples to micro-batches ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The most that a micro-batch may hold. `fixed` asks for streams of exactly these sizes (see `pad_stream`)."""

    tokens: int
    sequences: int
    targets: int
    max_seqlen: int
    fixed: bool = False

    @classmethod
    def for_batch(cls, batch_size: int, max_seqlen: int, targets_per_sequence: int, fixed: bool = False) -> "Limits":
        """Room for any `batch_size` sequences, and for up to four times as many where they are short."""
        return cls(batch_size * max_seqlen, 4 * batch_size, batch_size * targets_per_sequence, max_seqlen, fixed)


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of one global batch. `micro_batches` hold tensors; `lengths` the tokens of each sequence."""

    first_position: int
    micro_batches: list[dict[str, torch.Tensor]]
    lengths: np.ndarray
    targets: np.ndarray

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_targets(self) -> int:
        return int(self.targets.sum())


def make_step_batch(
    dataset: StreamDataset, indices: np.ndarray, limits: Limits, first_position: int = 0, pin_memory: bool = False
) -> StepBatch:
    """Reads the samples `indices` and packs them into micro-batches."""
    sizes = dataset.sizes(indices)
    costs = np.column_stack([sizes, np.ones(len(indices), dtype=sizes.dtype)])
    groups = pack(costs, (limits.tokens, limits.targets, limits.sequences))
    micro_batches = []
    for group in groups:
        stream = dataset.stream(indices[group])
        if limits.fixed:
            stream = pad_stream(stream, limits.tokens, limits.sequences, limits.targets, limits.max_seqlen)
        tensors = {name: torch.from_numpy(array) for name, array in stream.items()}
        micro_batches.append({k: t.pin_memory() for k, t in tensors.items()} if pin_memory else tensors)
    return StepBatch(first_position, micro_batches, sizes[:, 0], sizes[:, 1])


class StepLoader:
    """Iterates over the global batches from `first_position` on, giving this rank's share of each; it never ends.

    Optimizer step k takes the positions [first + k*G, first + (k+1)*G) of `sample_order`, through epoch ends without
    a short batch; rank r takes the r-th of `world_size` equal parts. `num_workers` threads read ahead (NumPy lets go
    of the interpreter while it copies); the batches do not depend on how many there are.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        limits: Limits,
        global_batch_size: int,
        seed: int,
        first_position: int = 0,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 1,
        pin_memory: bool = False,
    ):
        if global_batch_size % world_size:
            raise ValueError(f"a global batch of {global_batch_size} does not divide among {world_size} ranks")
        self.dataset, self.limits, self.seed, self.pin_memory = dataset, limits, seed, pin_memory
        self.global_batch_size, self.first_position = global_batch_size, first_position
        self.per_rank = global_batch_size // world_size
        self.rank, self.num_workers = rank, num_workers

    def load(self, step: int) -> StepBatch:
        """This rank's share of the `step`-th batch, counted from `first_position`."""
        global_start = self.first_position + step * self.global_batch_size
        start = global_start + self.rank * self.per_rank
        indices = sample_order(np.arange(start, start + self.per_rank), len(self.dataset), self.seed)
        return make_step_batch(self.dataset, indices, self.limits, global_start, self.pin_memory)

    def __iter__(self) -> Iterator[StepBatch]:
        if self.num_workers == 0:
            yield from map(self.load, itertools.count())
            return
        executor = ThreadPoolExecutor(self.num_workers, thread_name_prefix="loader")
        steps = itertools.count()
        try:
            ahead = deque(executor.submit(self.load, next(steps)) for _ in range(2 * self.num_workers))
            while True:
                batch = ahead.popleft().result()
                ahead.append(executor.submit(self.load, next(steps)))
                yield batch
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def stream_in_order(dataset: StreamDataset, indices: np.ndarray, limits: Limits) -> Iterator[StepBatch]:
    """The samples `indices`, each once, in batches that bound the memory read at a time; for evaluation."""
    for start in range(0, len(indices), limits.sequences):
        chunk = indices[start : start + limits.sequences]
        yield make_step_batch(dataset, chunk, limits, first_position=start)
