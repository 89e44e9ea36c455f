"""The loader: global batches in their order, at any number of ranks and worker threads."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from small_runs import InMemoryDataset

from bert_recipe.config import LoaderConfig
from bert_recipe.data_loading.loader import StepLoader, batches_in_order, make_step_batch
from bert_recipe.data_loading.packing import CPU_SIZES, MicroBatchLimits, stream_sizes
from bert_recipe.data_loading.sample_order import sample_order
from bert_recipe.model.kernels.linear import float32_linear
from bert_recipe.model.token_stream import HOST_VALUES, TokenStream, to_device

pytestmark = pytest.mark.fast

LENGTHS = np.random.default_rng(5).integers(2, 17, 50)


def config(global_batch_size=12, **options) -> LoaderConfig:
    return LoaderConfig(4, global_batch_size, max_seq_length=16, max_masked=2, **options)


LIMITS = MicroBatchLimits.of(config())


def samples_in(batch) -> list[int]:
    """The samples of one rank's batch; each starts with its index as a token."""
    return [
        int(micro_batch["input_ids"][start])
        for micro_batch in batch.micro_batches
        for start in micro_batch["cu_seqlens"][:-1].tolist()
    ]


def global_batches(count, first_position=0, world_size=1, **options):
    """The samples of each of the first `count` global batches, from all ranks."""
    loaders = [
        iter(
            StepLoader(
                InMemoryDataset(LENGTHS), config(**options), 9, first_position, rank, world_size
            )
        )
        for rank in range(world_size)
    ]
    return [
        sorted(itertools.chain(*(samples_in(next(loader)) for loader in loaders)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 16])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_global_batches_follow_the_order_at_any_number_of_ranks_and_workers(
    world_size, num_workers
):
    """Also where the ranks do not divide the global batch, and where some have no sequence."""
    batches = global_batches(15, world_size=world_size, num_workers=num_workers)
    order = sample_order(np.arange(15 * 12), len(LENGTHS), seed=9).tolist()
    assert batches == [sorted(order[k * 12 : (k + 1) * 12]) for k in range(15)]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 3])
def test_global_batch_grows_with_the_position_and_covers_the_order_without_gaps(
    world_size, num_workers
):
    options = {"initial_global_batch_size": 4, "batch_size_warmup_sequences": 60}
    batches = global_batches(15, world_size=world_size, num_workers=num_workers, **options)
    sizes = list(map(len, batches))
    position, expected = 0, []
    for _ in range(15):
        expected.append(4 + min(position, 60) * (12 - 4) // 60)
        position += expected[-1]
    assert sizes == expected and sizes[0] == 4 and sizes[-1] == 12
    order = sample_order(np.arange(position), len(LENGTHS), seed=9).tolist()
    assert list(itertools.chain(*batches)) == list(
        itertools.chain(
            *(
                sorted(order[end - size : end])
                for end, size in zip(np.cumsum(sizes), sizes, strict=True)
            )
        )
    )
    resumed = global_batches(10, sum(sizes[:5]), world_size, num_workers=num_workers, **options)
    assert resumed == batches[5:]


def test_global_batch_may_be_larger_than_the_data_set():
    (batch,) = global_batches(1, global_batch_size=120)
    counts = np.bincount(batch, minlength=50)
    assert counts.sum() == 120 and set(counts.tolist()) == {2, 3}


def test_batch_has_the_lengths_and_targets_of_its_sequences():
    dataset = InMemoryDataset(LENGTHS)
    batch = StepLoader(dataset, config(), seed=9, first_position=24).load(1)
    order = sample_order(np.arange(36, 48), len(dataset), seed=9)
    assert batch.first_position == 36
    assert batch.lengths.tolist() == LENGTHS[order].tolist()
    assert batch.num_labelled.tolist() == dataset.num_labelled[order].tolist()
    assert batch.lengths.sum() == sum(len(m["input_ids"]) for m in batch.micro_batches)
    assert batch.num_labelled.sum() == sum(len(m["mlm_labels"]) for m in batch.micro_batches)
    assert len(batch.micro_batches) <= 3


def shapes_of(micro_batches) -> set[tuple]:
    return {
        tuple(tuple(m[name].shape) for name in sorted({*m} - {*HOST_VALUES})) for m in micro_batches
    }


def test_streams_of_compiled_models_have_at_least_two_of_each_and_otherwise_no_filler():
    """Sizes of 0 and 1 would be constants in a graph, and the longest sequence is one."""
    dataset = InMemoryDataset(LENGTHS)
    limits = MicroBatchLimits.of(config(), is_compiled=True)
    plain = dataclasses.replace(limits, is_compiled=False)
    alone = make_step_batch(dataset, np.arange(1), limits)
    assert len(alone.micro_batches[0]["nsp_labels"]) == 2
    for indices in (np.arange(1), np.arange(20)):
        expected = make_step_batch(dataset, indices, plain).micro_batches
        micro_batches = make_step_batch(dataset, indices, limits).micro_batches
        for compiled, eager in zip(micro_batches, expected, strict=True):
            assert compiled["max_seqlen"] == limits.max_seqlen
            for name in {*eager} - {*HOST_VALUES}:
                size = len(eager[name])
                more = len(compiled[name]) - size
                assert more == max(2 + (name == "cu_seqlens") - size, 0), name
                assert torch.equal(compiled[name][:size], eager[name])
    filler = alone.make_filler()
    assert {len(filler[name]) for name in {*filler} - {*HOST_VALUES, "cu_seqlens"}} == {2}
    assert filler["cu_seqlens"].tolist() == [0, 2, 2]


def test_streams_without_fixed_sizes_tell_their_longest_sequence():
    for num_sizes in (None, 2):
        limits = dataclasses.replace(LIMITS, num_sizes=num_sizes)
        for micro_batch in make_step_batch(
            InMemoryDataset(LENGTHS), np.arange(20), limits
        ).micro_batches:
            stream = TokenStream.from_batch(to_device(micro_batch, torch.device("cpu")), 16)
            longest = 16 if num_sizes else int(micro_batch["cu_seqlens"].diff().max())
            assert (stream.max_seqlen, stream.has_filler) == (longest, num_sizes is not None)


@pytest.mark.parametrize(
    ("device", "dtype", "onednn", "expected"),
    [
        ("cpu", torch.bfloat16, False, CPU_SIZES),
        ("cpu", torch.float32, False, None),
        ("cpu", torch.float32, True, CPU_SIZES),
        ("cuda", torch.bfloat16, False, None),
    ],
)
def test_sizes_are_rounded_for_products_of_onednn(device, dtype, onednn, expected):
    with float32_linear(onednn):
        assert stream_sizes(torch.device(device), dtype) == expected


def test_rank_without_sequences_fills_its_step_with_filler():
    loader = StepLoader(
        InMemoryDataset(LENGTHS), config(global_batch_size=2), seed=9, rank=1, world_size=3
    )
    sizes = [
        len(rank_loader.load(0).lengths)
        for rank_loader in (loader, StepLoader(loader.dataset, loader.config, 9))
    ]
    assert sizes == [1, 2]
    empty = StepLoader(loader.dataset, loader.config, seed=9, rank=0, world_size=3).load(0)
    assert len(empty.lengths) == 0 and empty.micro_batches == []
    filled = empty.filled_to(2)
    assert len(filled) == 2 and len(loader.load(0).filled_to(1)) == 1
    assert filled[0].keys() == loader.load(0).micro_batches[0].keys()
    assert filled[0]["mlm_labels"].tolist() == filled[0]["nsp_labels"].tolist() == [-100]
    assert [
        micro_batch["num_sequences"] for micro_batch in (loader.load(0).micro_batches[0], filled[0])
    ] == [
        1,
        0,
    ]


def test_evaluation_reads_each_sample_once_within_the_limits():
    indices = np.arange(1, 50, 2)
    batches = list(batches_in_order(InMemoryDataset(LENGTHS), indices, LIMITS))
    assert sorted(itertools.chain(*map(samples_in, batches))) == indices.tolist()
    assert (
        max(len(m["input_ids"]) for batch in batches for m in batch.micro_batches) <= LIMITS.tokens
    )
