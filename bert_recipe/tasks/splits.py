"""Samples for development taken from the training file: a share of it, or folds in turn."""

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject
from bert_recipe.utils.progress import print_once

MAX_LABELS = 50  # whose shares are met in groups; the rest counts as the last one


@dataclass(frozen=True)
class Split:
    """fraction: share of the samples that is held out.
    num_folds: instead of it, as many parts, each of which is held out once; `fold`, from 0, is that
        of this run.
    seed: of the drawing.
    group_column: samples with the same value in it, such as the sentences of a document, stay
        together, instead of those with equal texts.
    """

    fraction: float | None
    num_folds: int | None
    seed: int
    fold: int = 0
    group_column: str | None = None

    def settings(self) -> JsonObject:
        """The fields as they are stored, also by versions without groups."""
        settings = asdict(self)
        if self.group_column is None:
            del settings["group_column"]
        return settings

    @property
    def shares(self) -> list[float]:
        """Of the parts, of which that number `fold` is held out."""
        if self.fraction is not None:
            return [self.fraction, 1 - self.fraction]
        num_folds = self.num_folds or 1
        return [1 / num_folds] * num_folds

    def held_out(
        self,
        keys: Sequence[Hashable],
        labels: Sequence[tuple[Hashable, ...]],
        groups: Sequence[str] = (),
    ) -> np.ndarray:
        """Whether each sample is held out, [number of samples] booleans. Stratified: each label has
        its share, up to one sample; of several labels, the rarest one (Sechidis et al., 2011).

        keys: samples with equal keys, such as equal texts, stay together.
        labels: of each sample. One with a single key is in the folds, but not in a fraction, which
            would leave nothing to learn.
        groups: of each sample, if there is a `group_column`.

        Raises UserError if no sample is held out.
        """
        if self.group_column is not None:
            return self.held_out_groups(groups, labels)
        labels_of_key: dict[Hashable, tuple[Hashable, ...]] = {}
        for key, sample_labels in zip(keys, labels, strict=True):
            labels_of_key.setdefault(key, sample_labels)
        counts_of_label = Counter(itertools.chain(*labels_of_key.values()))
        keys_of_rarest: dict[Hashable, list[Hashable]] = {}
        for key, key_labels in labels_of_key.items():
            rarest = min(key_labels, key=counts_of_label.__getitem__, default=None)
            if self.fraction is None or counts_of_label.get(rarest) != 1:
                keys_of_rarest.setdefault(rarest, []).append(key)
        # The keys label by label, shuffled inside a label. Every n-th one is held out, so that all
        # labels have their share.
        generator = np.random.default_rng(self.seed)
        shuffled: list[Hashable] = []
        for label_keys in keys_of_rarest.values():
            order = generator.permutation(len(label_keys))
            shuffled += [label_keys[index] for index in order]
        if self.fraction is None:
            chosen = set(shuffled[self.fold :: self.num_folds])
        else:
            # Of the first k keys, floor(k * fraction + offset) are held out.
            offset = generator.random()
            counts = np.floor(np.arange(len(shuffled) + 1) * self.fraction + offset)
            indices = np.flatnonzero(np.diff(counts))
            if shuffled and not len(indices):  # a small share of few samples
                indices = generator.integers(0, len(shuffled), 1)
            chosen = {shuffled[index] for index in indices}
        if not chosen:
            what = f"holds out none of {len(keys)} samples"
            if self.fraction is None:
                raise UserError(f"--num-folds {what}: give more samples")
            raise UserError(
                f"--eval-fraction {what}: no label has two different texts; check the labels, or "
                "give an --eval-file"
            )
        return np.array([key in chosen for key in keys])

    def held_out_groups(
        self, groups: Sequence[str], labels: Sequence[tuple[Hashable, ...]]
    ) -> np.ndarray:
        """`held_out` of whole groups, where shares and labels are met as far as groups allow."""
        names, group_of_sample = np.unique(np.array(groups), return_inverse=True)
        flag = f"--group-column {self.group_column}"
        if len(names) == 1:
            raise UserError(
                f"{flag}: all {len(groups)} samples are of the group {groups[0]!r}: give a column "
                "with several"
            )
        if self.num_folds is not None and len(names) < self.num_folds:
            raise UserError(
                f"{flag}: {len(names)} groups are fewer than --num-folds {self.num_folds}: give "
                f"--num-folds {len(names)} or less"
            )
        frequent = Counter(itertools.chain(*labels)).most_common(MAX_LABELS)
        columns = {label: column for column, (label, _) in enumerate(frequent)}
        counts_GC = np.zeros((len(names), len(frequent) + 1))
        for group, sample_labels in zip(group_of_sample, labels, strict=True):
            counts_GC[group, -1] += 1
            for label in sample_labels:
                counts_GC[group, columns.get(label, len(frequent) - 1)] += 1
        part_of_group = divide_groups(counts_GC, self.shares, np.random.default_rng(self.seed))
        held_out = part_of_group[group_of_sample] == self.fold
        print_once(
            f"note: {flag}: {held_out.sum()} of {len(groups)} samples are held out, "
            f"{(part_of_group == self.fold).sum()} of {len(names)} groups"
        )
        return held_out


def divide_groups(
    counts_GC: np.ndarray, shares: Sequence[float], generator: np.random.Generator
) -> np.ndarray:
    """The part of each group [G]. Large groups are placed first, each where the counts come closest
    to the parts' shares of each label and of all samples. No part is empty if there are as many
    groups.

    counts_GC: samples of each group with each label, and in the last column all of the group.
    """
    sizes_G = counts_GC[:, -1]
    order = generator.permutation(len(sizes_G))
    # Of about the same size, by a factor of two, in random order.
    order = order[np.argsort(-np.floor(np.log2(sizes_G[order])), kind="stable")]
    targets_PC = np.outer(shares, counts_GC.sum(axis=0))
    placed_PC = np.zeros_like(targets_PC)
    part_of_group = np.zeros(len(sizes_G), np.int64)
    for group in order:
        # How much the squared differences to the targets grow, relative to the targets.
        growth_PC = counts_GC[group] * (counts_GC[group] + 2 * (placed_PC - targets_PC))
        part = int((growth_PC / targets_PC).sum(axis=1).argmin())
        placed_PC[part] += counts_GC[group]
        part_of_group[group] = part
    if not (part_of_group == 0).any():  # of a small share
        part_of_group[sizes_G.argmin()] = 0
    return part_of_group
