"""Sample order (shuffling): a pure function of seed, epoch and position."""

import numpy as np

FEISTEL_ROUNDS = 6
FIRST_SHIFT, SECOND_SHIFT, THIRD_SHIFT = np.array([30, 27, 31], np.uint64)
FIRST_FACTOR, SECOND_FACTOR = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def mix64(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit words that
    mixes all bits.
    """
    values = values ^ (values >> FIRST_SHIFT)
    values *= FIRST_FACTOR
    values ^= values >> SECOND_SHIFT
    values *= SECOND_FACTOR
    values ^= values >> THIRD_SHIFT
    return values


def sample_order(positions: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """Sample indices [n], int64, at `positions` [n] of an infinite sequence of epochs.

    Epoch e consists of the positions [e * num_samples, (e + 1) * num_samples) and visits every
    sample once, in its own order. The order is a keyed permutation: a Feistel network with cycle
    walking, which takes O(1) memory and time per look-up (Black and Rogaway, 2002, "Ciphers with
    arbitrary finite domains").
    """
    positions = np.asarray(positions, dtype=np.uint64)
    epoch = positions // np.uint64(num_samples)
    place = positions % np.uint64(num_samples)
    half_bits = np.uint64(max(1, (max(num_samples - 1, 1).bit_length() + 1) // 2))
    half_mask = np.uint64((1 << int(half_bits)) - 1)
    base_key = mix64(mix64(np.full_like(epoch, seed % 2**64)) + epoch + np.uint64(1))
    round_keys = [mix64(base_key + np.uint64(round_ + 1)) for round_ in range(FEISTEL_ROUNDS)]

    # The network permutes more numbers than there are samples: those that it takes out of their
    # range go through it again.
    outside = np.arange(len(place))
    while len(outside):
        left = place[outside] >> half_bits
        right = place[outside] & half_mask
        for key in round_keys:
            left, right = right, left ^ (mix64(right + key[outside]) & half_mask)
        place[outside] = (left << half_bits) | right
        outside = outside[place[outside] >= num_samples]
    return place.astype(np.int64)


def sample_seeds(positions: np.ndarray, seed: int) -> np.ndarray:
    """A random number for each of the `positions` [n], uint64: a function of position and seed."""
    # Unlike the keys of `sample_order`.
    base = mix64(np.array([seed % 2**64 ^ 0x6D61736B], np.uint64))
    return mix64(mix64(np.asarray(positions, np.uint64) + np.uint64(1)) ^ base)


def rank_positions(first: int, global_batch_size: int, rank: int, world_size: int) -> np.ndarray:
    """One rank's part of the positions [first, first + global_batch_size). Sizes differ by at most
    one.
    """
    start, stop = (global_batch_size * r // world_size for r in (rank, rank + 1))
    return np.arange(first + start, first + stop)
