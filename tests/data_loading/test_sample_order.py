"""The order of samples: a permutation per epoch, a pure function of seed and position."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_recipe.data_loading.sample_order import rank_positions, sample_order

pytestmark = pytest.mark.fast

SEEDS = st.integers(-(2**70), 2**70)


@given(num_samples=st.integers(1, 3000), epoch=st.integers(0, 10**9), seed=SEEDS)
def test_each_epoch_visits_each_sample_once(num_samples, epoch, seed):
    positions = np.arange(epoch * num_samples, (epoch + 1) * num_samples)
    assert sorted(sample_order(positions, num_samples, seed)) == list(range(num_samples))


def order_in_python(position, num_samples, seed):
    """The sample at one position, in Python's integers."""

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


@given(
    num_samples=st.integers(1, 2**45),
    seed=SEEDS,
    positions=st.lists(st.integers(0, 2**60), min_size=1, max_size=20),
)
def test_order_matches_its_definition_at_any_positions(num_samples, seed, positions):
    """A checkpoint holds the data's state as a position, so the order is a file format and must not
    change.
    """
    expected = [order_in_python(position, num_samples, seed) for position in positions]
    assert sample_order(np.array(positions), num_samples, seed).tolist() == expected


@given(
    first=st.integers(0, 2**60),
    global_batch_size=st.integers(1, 5000),
    world_size=st.integers(1, 64),
)
def test_ranks_divide_the_global_batch_in_order_and_evenly_to_one_sequence(
    first, global_batch_size, world_size
):
    shares = [
        rank_positions(first, global_batch_size, rank, world_size) for rank in range(world_size)
    ]
    positions = list(itertools.chain.from_iterable(share.tolist() for share in shares))
    assert positions == list(range(first, first + global_batch_size))
    sizes = {len(share) for share in shares}
    assert sizes <= {global_batch_size // world_size, -(-global_batch_size // world_size)}
