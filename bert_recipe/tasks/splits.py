"""Samples for development taken from the training file: a share of it, or folds in turn."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from bert_recipe.utils.errors import UserError


@dataclass(frozen=True)
class Split:
    """fraction: share of the samples that is held out.
    num_folds: instead of it, as many parts, each of which is held out once; `fold`, from 0, is that
        of this run.
    seed: of the drawing.
    """

    fraction: float | None
    num_folds: int | None
    seed: int
    fold: int = 0

    def held_out(self, keys: Sequence[Hashable], classes: Sequence[Hashable]) -> np.ndarray:
        """Whether each sample is held out, [number of samples] booleans. Stratified: each class has
        its share, up to one sample.

        keys: samples with equal keys, such as equal texts, stay together.
        classes: the class of each sample. One with a single key is in the folds, but not in a
            fraction, which would leave nothing to learn.

        Raises UserError if no sample is held out.
        """
        class_of_key: dict[Hashable, Hashable] = {}
        for key, sample_class in zip(keys, classes, strict=True):
            class_of_key.setdefault(key, sample_class)
        keys_of_class: dict[Hashable, list[Hashable]] = {}
        for key, sample_class in class_of_key.items():
            keys_of_class.setdefault(sample_class, []).append(key)
        # The keys class by class, shuffled inside a class. Every n-th one is held out, so that all
        # classes have their share.
        generator = np.random.default_rng(self.seed)
        shuffled: list[Hashable] = []
        for class_keys in keys_of_class.values():
            if self.fraction is None or len(class_keys) > 1:
                order = generator.permutation(len(class_keys))
                shuffled += [class_keys[index] for index in order]
        if self.fraction is None:
            chosen = set(shuffled[self.fold :: self.num_folds])
        else:
            # Of the first k keys, floor(k * fraction + offset) are held out.
            offset = generator.random()
            counts = np.floor(np.arange(len(shuffled) + 1) * self.fraction + offset)
            chosen = {shuffled[index] for index in np.flatnonzero(np.diff(counts))}
        if not chosen:
            flag = "--num-folds" if self.fraction is None else "--eval-fraction"
            raise UserError(f"{flag} holds out none of {len(keys)} samples: give more samples")
        return np.array([key in chosen for key in keys])
