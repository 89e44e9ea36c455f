"""The order of samples, packing, filler, and the global batches that a loader makes of them."""

import itertools

import numpy as np
import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st

from loss import pretraining_sums
from modeling import BertConfig, BertForPreTraining
from pretraining_dataset import PretrainingDataset
from token_stream import Limits, StepLoader, make_step_batch, pack, pad_stream, sample_order, stream_in_order

SEEDS = st.integers(-(2**70), 2**70)


# --- the order of samples ---------------------------------------------------------------------------------------------


@given(num_samples=st.integers(1, 3000), epoch=st.integers(0, 10**9), seed=SEEDS)
def test_each_epoch_visits_each_sample_once(num_samples, epoch, seed):
    positions = np.arange(epoch * num_samples, (epoch + 1) * num_samples)
    assert sorted(sample_order(positions, num_samples, seed)) == list(range(num_samples))


@given(
    num_samples=st.integers(1, 2**45), seed=SEEDS, positions=st.lists(st.integers(0, 2**60), min_size=1, max_size=20)
)
def test_a_look_up_depends_on_nothing_else_that_is_asked(num_samples, seed, positions):
    together = sample_order(np.array(positions), num_samples, seed)
    alone = [sample_order(np.array([position]), num_samples, seed)[0] for position in positions]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < num_samples)).all()


def test_epochs_and_seeds_have_orders_of_their_own():
    n = 500
    epochs = [sample_order(np.arange(e * n, (e + 1) * n), n, seed=7) for e in range(4)]
    seeds = [sample_order(np.arange(n), n, seed) for seed in (0, 1, -1, 12439, 2**63, 2**64 + 2)]
    for one, other in itertools.combinations([*epochs, *seeds], 2):
        # Two random permutations share one place on average.
        assert (one == other).sum() < 10


def order_written_out(position, num_samples, seed):
    """The order as whole numbers of any size, one position at a time."""

    def mix(word):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            word = (word ^ (word >> shift)) * factor % 2**64
        return word

    epoch, place = divmod(position, num_samples)
    bits = 1
    while 4**bits < num_samples:
        bits += 1
    key = mix((mix(seed % 2**64) + epoch + 1) % 2**64)
    while True:
        left, right = divmod(place, 2**bits)
        for round_ in range(1, 7):
            round_key = mix((key + round_) % 2**64)
            left, right = right, left ^ mix((right + round_key) % 2**64) % 2**bits
        place = left * 2**bits + right
        if place < num_samples:
            return place


@given(num_samples=st.integers(1, 2**45), seed=SEEDS, position=st.integers(0, 2**60))
def test_what_a_position_means_never_changes(num_samples, seed, position):
    """A checkpoint holds the data's state as a position, so the order is a file format: it is written out here."""
    assert sample_order(np.array([position]), num_samples, seed) == [order_written_out(position, num_samples, seed)]


def test_the_order_looks_random():
    n, epochs = 1000, 40
    orders = np.stack([sample_order(np.arange(e * n, (e + 1) * n), n, seed=3) for e in range(epochs)])
    # Neighbours in the order are no nearer to each other than any two samples: n/3 apart on average.
    assert np.abs(np.diff(orders, axis=1)).mean() == pytest.approx(n / 3, rel=0.02)
    # The first tenth of an epoch draws from all tenths of the data alike: chi-squared with 9 degrees of freedom.
    counts = np.bincount(orders[:, : n // 10].ravel() // (n // 10), minlength=10)
    expected = epochs * n / 100
    assert ((counts - expected) ** 2 / expected).sum() < 28  # passed by 0.1% of random orders
    # A sample's places in the epochs have nothing to do with each other.
    places = np.argsort(orders, axis=1)
    correlations = np.corrcoef(places)[np.triu_indices(epochs, 1)]
    assert abs(correlations.mean()) < 0.01
    assert correlations.std() == pytest.approx(n**-0.5, rel=0.2)


# --- packing ----------------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 64), max_size=200),
    batch_size=st.integers(1, 20),
    targets_per_sequence=st.integers(1, 10),
    data=st.data(),
)
def test_packing_takes_each_sample_once_within_the_limits_in_at_most_as_many_batches(
    lengths, batch_size, targets_per_sequence, data
):
    n = len(lengths)
    targets = data.draw(st.lists(st.integers(0, targets_per_sequence), min_size=n, max_size=n))
    sizes = np.array([lengths, targets, [1] * n], dtype=np.int64).T
    limits = (64 * batch_size, targets_per_sequence * batch_size, 4 * batch_size)
    groups = pack(sizes, limits)
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(n))
    assert all((sizes[group].sum(axis=0) <= limits).all() for group in groups)
    assert len(groups) <= -(-n // batch_size)
    # Longest first, so that equal lengths are side by side.
    packed_lengths = [lengths[place] for group in groups for place in group]
    assert packed_lengths == sorted(lengths, reverse=True)


def test_short_sequences_take_fewer_micro_batches():
    sizes = np.array([[16, 2, 1]] * 64)
    assert len(pack(sizes, (8 * 64, 8 * 10, 4 * 8))) == 2


def test_a_sample_that_fits_no_micro_batch_is_an_error_with_its_size():
    with pytest.raises(ValueError, match="65"):
        pack(np.array([[10, 1], [65, 1]]), (64, 5))


# --- filler -----------------------------------------------------------------------------------------------------------


class Sentences:
    """A data set in memory. Sample i starts with the token i, so that a batch tells whose samples it holds."""

    def __init__(self, lengths, vocab_size=1000):
        random = np.random.default_rng(0)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.samples = [
            np.concatenate([[i], random.integers(0, vocab_size, length - 1)]) for i, length in enumerate(self.lengths)
        ]

    def __len__(self):
        return len(self.lengths)

    def sizes(self, indices):
        return np.column_stack([self.lengths[indices], self.targets(indices)])

    def targets(self, indices):
        return np.maximum(1, self.lengths[indices] // 7)

    def stream(self, indices):
        lengths = self.lengths[indices]
        cu_seqlens = np.append(0, np.cumsum(lengths))
        places = [start + 1 + np.arange(count) for start, count in zip(cu_seqlens, self.targets(indices), strict=False)]
        mlm_positions = np.concatenate(places) if places else np.zeros(0, np.int64)
        return {
            "input_ids": np.concatenate([self.samples[i] for i in indices]),
            "token_type_ids": np.concatenate([np.arange(n) * 2 // n for n in lengths]),
            "position_ids": np.concatenate([np.arange(n) for n in lengths]),
            "cu_seqlens": cu_seqlens.astype(np.int32),
            "mlm_positions": mlm_positions,
            "mlm_labels": mlm_positions % 97,
            "nsp_labels": np.asarray(indices) % 2,
        }


@given(
    lengths=st.lists(st.integers(2, 16), min_size=1, max_size=8),
    max_seqlen=st.integers(16, 20),
    more_tokens=st.integers(0, 60),
    more_sequences=st.integers(0, 3),
    more_targets=st.integers(0, 5),
)
def test_filler_brings_any_stream_to_the_sizes_asked_for(
    lengths, max_seqlen, more_tokens, more_sequences, more_targets
):
    stream = Sentences(lengths).stream(np.arange(len(lengths)))
    tokens, sequences = sum(lengths) + more_tokens, len(lengths) + more_sequences
    targets = len(stream["mlm_labels"]) + more_targets
    padded = pad_stream(stream, tokens, sequences, targets, max_seqlen)

    slots = sequences + -(-tokens // max_seqlen)
    sizes = {name: len(values) for name, values in padded.items()}
    assert sizes == {
        **dict.fromkeys(("input_ids", "token_type_ids", "position_ids"), tokens),
        **dict.fromkeys(("mlm_positions", "mlm_labels"), targets),
        "cu_seqlens": slots + 1,
        "nsp_labels": slots,
    }
    for name, values in stream.items():
        assert padded[name][: len(values)].tolist() == values.tolist()
    assert (padded["mlm_labels"][len(stream["mlm_labels"]) :] == -100).all()
    assert (padded["nsp_labels"][len(lengths) :] == -100).all()

    cu_seqlens = padded["cu_seqlens"]
    assert cu_seqlens.dtype == np.int32 and cu_seqlens[0] == 0 and cu_seqlens[-1] == tokens
    filled_lengths = np.diff(cu_seqlens)
    assert ((filled_lengths >= 0) & (filled_lengths <= max_seqlen)).all()
    positions = np.concatenate([np.arange(n) for n in filled_lengths])
    assert padded["position_ids"].tolist() == positions.tolist()
    assert (padded["mlm_positions"] < tokens).all()


def test_a_stream_with_too_many_sequences_is_refused():
    stream = Sentences([4] * 8).stream(np.arange(8))
    with pytest.raises(ValueError, match="do not fit"):
        pad_stream(stream, 32, 2, 8, 32)


def sums_and_gradients(model, stream, max_seqlen):
    stream = {name: torch.as_tensor(values) for name, values in stream.items()}
    labels = stream.pop("mlm_labels"), stream.pop("nsp_labels")
    model.zero_grad()
    sums = pretraining_sums(*model(**stream, max_seqlen=max_seqlen), *labels)
    (sums.mlm_loss + sums.nsp_loss).backward()
    counts = {name: value.double() for name, value in sums._asdict().items()}
    return {**counts, **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("implementation", ["padded", "by_length"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_filler_changes_no_loss_and_no_gradient(implementation, dtype, tolerance):
    torch.manual_seed(0)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForPreTraining(BertConfig(**{**TINY, **no_dropout, "vocab_size": 1000}))
    model.bert.attention_implementation = implementation
    lengths = [30, 30, 17, 9, 2]
    stream = Sentences(lengths).stream(np.arange(len(lengths)))
    padded = pad_stream(stream, 200, 8, 24, max_seqlen=32)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        plain = sums_and_gradients(model, stream, 30)
        filled = sums_and_gradients(model, padded, 32)
    for name, expected in plain.items():
        assert filled[name].isfinite().all(), name
        if not name.endswith("key.bias"):  # zero in exact arithmetic
            assert (filled[name] - expected).norm() <= tolerance * expected.norm(), name


# --- global batches ---------------------------------------------------------------------------------------------------

LIMITS = Limits.for_batch(batch_size=4, max_seqlen=16, targets_per_sequence=2)
LENGTHS = np.random.default_rng(5).integers(2, 17, 50)


def samples_in(batch) -> list[int]:
    """The samples of one rank's batch; each is known by its first token."""
    return [
        int(micro_batch["input_ids"][start])
        for micro_batch in batch.micro_batches
        for start in micro_batch["cu_seqlens"][:-1].tolist()
    ]


def global_batches(count, first_position=0, world_size=1, num_workers=0, global_batch_size=12):
    """The samples of each of the first `count` global batches, from all ranks."""
    loaders = [
        iter(
            StepLoader(Sentences(LENGTHS), LIMITS, global_batch_size, 9, first_position, rank, world_size, num_workers)
        )
        for rank in range(world_size)
    ]
    return [sorted(itertools.chain(*(samples_in(next(loader)) for loader in loaders))) for _ in range(count)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_global_batches_are_the_order_cut_into_pieces_at_any_number_of_ranks_and_workers(world_size, num_workers):
    found = global_batches(15, world_size=world_size, num_workers=num_workers)
    order = sample_order(np.arange(15 * 12), len(LENGTHS), seed=9).tolist()
    assert found == [sorted(order[k * 12 : (k + 1) * 12]) for k in range(15)]


def test_each_sample_is_seen_once_an_epoch_through_batches_that_cross_its_end():
    seen = list(itertools.chain(*global_batches(25)))  # 25 * 12 samples are six epochs of 50
    assert sorted(seen) == sorted(list(range(50)) * 6)


def test_a_global_batch_may_be_larger_than_the_data():
    (batch,) = global_batches(1, global_batch_size=120)
    counts = np.bincount(batch, minlength=50)
    assert counts.sum() == 120 and set(counts.tolist()) == {2, 3}


def test_a_loader_started_at_the_samples_consumed_goes_on_as_if_never_stopped():
    whole = global_batches(12)
    assert global_batches(7, first_position=5 * 12, world_size=2, num_workers=2) == whole[5:]


def test_a_batch_counts_its_samples_tokens_and_targets():
    data = Sentences(LENGTHS)
    batch = StepLoader(data, LIMITS, 12, seed=9, first_position=24).load(1)
    order = sample_order(np.arange(36, 48), len(data), seed=9)
    assert batch.first_position == 36
    assert batch.num_sequences == 12
    assert batch.num_tokens == LENGTHS[order].sum() == sum(len(m["input_ids"]) for m in batch.micro_batches)
    assert batch.num_targets == data.targets(order).sum() == sum(len(m["mlm_labels"]) for m in batch.micro_batches)
    assert len(batch.micro_batches) <= 3


def test_fixed_limits_give_every_micro_batch_the_same_shapes():
    fixed = Limits.for_batch(batch_size=4, max_seqlen=16, targets_per_sequence=2, fixed=True)
    loader = StepLoader(Sentences(LENGTHS), fixed, 12, seed=9, num_workers=0)
    batches = [micro_batch for step in range(6) for micro_batch in loader.load(step).micro_batches]
    shapes = {tuple((name, tuple(t.shape)) for name, t in micro_batch.items()) for micro_batch in batches}
    assert len(batches) >= 12 and len(shapes) == 1


def test_a_global_batch_that_does_not_divide_among_the_ranks_is_refused():
    with pytest.raises(ValueError, match="does not divide"):
        StepLoader(Sentences(LENGTHS), LIMITS, 12, seed=0, world_size=5)


def test_an_error_in_a_worker_reaches_whoever_iterates():
    class Damaged(Sentences):
        def stream(self, indices):
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(StepLoader(Damaged(LENGTHS), LIMITS, 12, seed=0, num_workers=2)))


def test_evaluation_reads_each_sample_once_within_the_limits():
    indices = np.arange(1, 50, 2)
    batches = list(stream_in_order(Sentences(LENGTHS), indices, LIMITS))
    assert sorted(itertools.chain(*map(samples_in, batches))) == indices.tolist()
    assert max(len(m["input_ids"]) for batch in batches for m in batch.micro_batches) <= LIMITS.tokens


def test_shards_on_disk_make_the_same_tensors_whatever_reads_them(shards):
    dataset = PretrainingDataset(shards, vocab_size=30522)
    limits = Limits.for_batch(4, 32, 5)
    threaded = iter(StepLoader(dataset, limits, 16, seed=1, num_workers=3))
    for step in range(6):
        batch = next(threaded)
        again = make_step_batch(dataset, sample_order(np.arange(step * 16, (step + 1) * 16), 64, seed=1), limits)
        for one, other in zip(batch.micro_batches, again.micro_batches, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
