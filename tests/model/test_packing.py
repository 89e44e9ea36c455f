"""Packing into micro-batches, filler, and the padded view of a token stream."""

import itertools

import numpy as np
import pytest
import torch
from conftest import NO_DROPOUT, TINY
from hypothesis import given
from hypothesis import strategies as st
from small_runs import InMemoryDataset

from bert_recipe.data_loading.packing import (
    MIN_SIZE_STEP,
    MicroBatchLimits,
    filler_stream,
    pack,
    pad_stream,
)
from bert_recipe.model.encoders.bert import BertConfig, BertForPreTraining
from bert_recipe.tasks.pretraining import PretrainingTask

pytestmark = pytest.mark.fast


@given(
    lengths=st.lists(st.integers(1, 64), max_size=200),
    batch_size=st.integers(1, 20),
    masked_per_sequence=st.integers(1, 10),
    data=st.data(),
)
def test_each_sample_is_packed_once_within_the_limits_and_without_more_batches_than_unpacked(
    lengths, batch_size, masked_per_sequence, data
):
    n = len(lengths)
    masked = data.draw(st.lists(st.integers(0, masked_per_sequence), min_size=n, max_size=n))
    costs = np.array([lengths, masked, [1] * n], dtype=np.int64).T
    limits = MicroBatchLimits.for_batch(batch_size, 64, masked_per_sequence)
    assert (limits.tokens, limits.labelled_tokens) == (
        64 * batch_size,
        masked_per_sequence * batch_size,
    )
    limits = (limits.tokens, limits.labelled_tokens, limits.sequences)
    groups = pack(costs, limits)
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(n))
    assert all((costs[group].sum(axis=0) <= limits).all() for group in groups)
    assert len(groups) <= -(-n // batch_size)
    # Longest first, so that sequences of equal length are neighbours.
    packed_lengths = [lengths[row] for group in groups for row in group]
    assert packed_lengths == sorted(lengths, reverse=True)


def test_short_sequences_need_fewer_micro_batches():
    assert len(pack(np.array([[16, 2, 1]] * 64), (8 * 64, 8 * 10, 4 * 8))) == 2


def test_sample_that_exceeds_the_limits_is_an_error_with_its_size():
    with pytest.raises(ValueError, match="65"):
        pack(np.array([[10, 1], [65, 1]]), (64, 5))


@given(
    lengths=st.lists(st.integers(2, 16), min_size=1, max_size=8),
    num_sizes=st.integers(1, 40),
    more=st.integers(0, 60),
)
def test_filler_is_behind_the_stream_and_belongs_to_no_sequence(lengths, num_sizes, more):
    stream = InMemoryDataset(lengths).stream(np.arange(len(lengths)))
    num_tokens = sum(lengths)
    num_labelled = len(stream["mlm_labels"])
    limits = MicroBatchLimits(
        num_tokens + more, len(lengths) + more, num_labelled + more, 16, num_sizes
    )
    padded = pad_stream(stream, InMemoryDataset.stream_labels, limits)
    for name, values in stream.items():
        assert padded[name][: len(values)].tolist() == values.tolist()
        assert padded[name].dtype == values.dtype
    assert num_tokens <= len(padded["input_ids"]) <= num_tokens + more
    assert len(padded["input_ids"]) <= num_tokens + max(MIN_SIZE_STEP, num_tokens // num_sizes)
    assert len(padded["cu_seqlens"]) - 1 == len(padded["nsp_labels"]) <= len(lengths) + more
    assert len(padded["mlm_positions"]) == len(padded["mlm_labels"]) <= num_labelled + more
    assert (padded["mlm_labels"][num_labelled:] == -100).all() and (
        padded["nsp_labels"][len(lengths) :] == -100
    ).all()
    assert (padded["cu_seqlens"][len(lengths) :] == num_tokens).all()
    assert (padded["mlm_positions"] < len(padded["input_ids"])).all()


def tiny_model(implementation):
    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig(**{**TINY, **NO_DROPOUT, "vocab_size": 1000}))
    model.bert.attention_implementation = implementation
    return model


def sums_and_gradients(model, stream, max_seqlen):
    stream = {name: torch.as_tensor(values) for name, values in stream.items()}
    model.zero_grad()
    sums = PretrainingTask(next_sentence=True, max_seq_length=max_seqlen).objective(model, stream)
    (sums["mlm_loss"] + sums["nsp_loss"]).backward()
    counts = {name: value.double() for name, value in sums.items()}
    return {**counts, **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("implementation", ["padded", "length_bucketed"])
@pytest.mark.parametrize("num_sizes", [1, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_filler_changes_no_loss_and_no_gradient(implementation, num_sizes, dtype, tolerance):
    model = tiny_model(implementation)
    lengths = [30, 30, 17, 9, 2]
    stream = InMemoryDataset(lengths).stream(np.arange(len(lengths)))
    padded = pad_stream(
        stream, InMemoryDataset.stream_labels, MicroBatchLimits(200, 8, 24, 32, num_sizes)
    )
    assert len(padded["input_ids"]) == {1: 128, 8: 96}[num_sizes]
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        expected = sums_and_gradients(model, stream, 30)
        filled = sums_and_gradients(model, padded, 32)
    for name, value in expected.items():
        assert filled[name].isfinite().all(), name
        if not name.endswith("key.bias"):  # zero in exact arithmetic
            assert (filled[name] - value).norm() <= tolerance * value.norm(), name


@pytest.mark.parametrize("implementation", ["padded", "length_bucketed"])
@pytest.mark.parametrize("fixed", [False, True])
def test_filler_stream_has_zero_loss_and_zero_gradient(implementation, fixed):
    stream = filler_stream(InMemoryDataset.stream_labels)
    assert stream.keys() == InMemoryDataset([3]).stream(np.array([0])).keys()
    if fixed:
        stream = pad_stream(
            stream, InMemoryDataset.stream_labels, MicroBatchLimits(40, 4, 6, 16, num_sizes=1)
        )
        assert len(stream["input_ids"]) == 16
    sums = sums_and_gradients(tiny_model(implementation), stream, 16)
    assert all(value.eq(0).all() for value in sums.values())
