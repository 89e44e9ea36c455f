"""Samples for development taken from the training file: a share of it, or folds in turn."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from bert_recipe.utils.errors import UserError


@dataclass(frozen=True)
class Split:
    """fraction: share of the samples that is held out. num_folds: instead of it, as many parts,
    each of which is held out once; `fold`, from 0, is that of this run. seed: of the drawing.
    """

    fraction: float | None
    num_folds: int | None
    seed: int
    fold: int = 0

    def held_out(self, keys: Sequence[Hashable], classes: Sequence[Hashable]) -> np.ndarray:
        """Whether each sample is held out. Each class has its share, up to one sample, and samples
        with equal keys, such as equal texts, stay together. A class with one key is in the folds,
        but not in a fraction, which would leave nothing to learn. Raises UserError if no sample is
        held out.
        """
        class_of: dict[Hashable, Hashable] = {}
        for key, own_class in zip(keys, classes, strict=True):
            class_of.setdefault(key, own_class)
        groups: dict[Hashable, list[Hashable]] = {}
        for key, own_class in class_of.items():
            groups.setdefault(own_class, []).append(key)
        random = np.random.default_rng(self.seed)
        order: list[Hashable] = []
        for group in groups.values():
            if self.fraction is None or len(group) > 1:
                order += [group[place] for place in random.permutation(len(group))]
        if self.fraction is None:
            chosen = set(order[self.fold :: self.num_folds])
        else:
            # Every 1/fraction-th of the sorted order is held out.
            counts = np.floor(np.arange(len(order) + 1) * self.fraction + random.random())
            chosen = {order[place] for place in np.flatnonzero(np.diff(counts))}
        if not chosen:
            flag = "--num-folds" if self.fraction is None else "--eval-fraction"
            raise UserError(f"{flag} holds out none of {len(keys)} samples: give more samples")
        return np.array([key in chosen for key in keys])
