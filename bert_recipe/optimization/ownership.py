"""Divides work on whole matrices among ranks: each matrix has an owner, which computes its update
and sends it to the others. For optimizers that multiply matrices, such as Muon.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bert_recipe.utils import collectives


class OwnedMatrix(Protocol):
    """A matrix that one rank updates.

    p: this rank's rows of a parameter; all of them unless parameters are sharded.
    rows: number of rows on all ranks.
    cost: of its update, in any unit.
    """

    @property
    def p(self) -> Tensor: ...

    @property
    def rows(self) -> int: ...

    @property
    def cost(self) -> int: ...


SomeMatrix = TypeVar("SomeMatrix", bound=OwnedMatrix)


class Owners:
    """The ranks that share the work.

    shard_group: process group over which the rows of parameters are divided, as torch.chunk does,
        or None.
    replica_group: that of ranks with the same parameters and gradients, or None.
    """

    def __init__(
        self,
        shard_group: "dist.ProcessGroup | None" = None,
        replica_group: "dist.ProcessGroup | None" = None,
    ):
        self.shard_group = shard_group
        self.group = replica_group if shard_group is None else shard_group
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.num_ranks = 1 if self.group is None else dist.get_world_size(self.group)

    def update(
        self,
        batches: Sequence[Sequence[SomeMatrix]],
        inputs: Callable[[Sequence[SomeMatrix]], Sequence[Tensor]],
        compute: Callable[[Sequence[SomeMatrix], Sequence[Tensor]], Tensor],
        apply: Callable[[Sequence[SomeMatrix], Tensor], None],
    ) -> None:
        """Updates batches of matrices, which are computed together.

        inputs: takes a batch; returns this rank's rows of what each matrix's update is computed
            from.
        compute: takes matrices of a batch that this rank owns, and their whole inputs; returns
            their results, as many rows, one below the other.
        apply: takes a batch and this rank's rows of its results.
        """
        if self.group is None:
            for batch in batches:  # each at once, which needs memory for one batch only
                apply(batch, compute(batch, inputs(batch)))
            return
        matrices = [matrix for batch in batches for matrix in batch]
        owners = divide([matrix.cost for matrix in matrices], self.num_ranks)
        owner_of = {id(matrix.p): owner for matrix, owner in zip(matrices, owners, strict=True)}

        # Each step is done for all batches before the next one, so that no rank waits while an
        # owner computes. First, owners gather the inputs of their matrices.
        whole_inputs: dict[int, Tensor] = {}  # by id of `p`, as the results
        for batch in batches:
            for matrix, rows in zip(batch, inputs(batch), strict=True):
                whole = self.gather(rows, matrix.rows, owner_of[id(matrix.p)])
                if whole is not None:
                    whole_inputs[id(matrix.p)] = whole

        results: dict[int, Tensor] = {}
        for batch in batches:
            owned = [matrix for matrix in batch if id(matrix.p) in whole_inputs]
            if owned:
                stacked = compute(owned, [whole_inputs.pop(id(matrix.p)) for matrix in owned])
                parts = stacked.split([matrix.rows for matrix in owned])
                for matrix, result in zip(owned, parts, strict=True):
                    results[id(matrix.p)] = result

        for batch in batches:
            received = []
            for matrix in batch:
                result = results.pop(id(matrix.p), None)  # None on ranks that do not own it
                received.append(self.scatter(result, matrix, owner_of[id(matrix.p)]))
            apply(batch, joined(received))

    def gather(self, rows: Tensor, num_rows: int, owner: int) -> Tensor | None:
        """On the owner, the whole matrix of `num_rows` rows; on other ranks None."""
        if self.shard_group is None:
            return rows if owner == self.rank else None
        size = -(-num_rows // self.num_ranks)  # of a shard, but for the last ones
        whole = None
        if owner == self.rank:
            whole = rows.new_empty(self.num_ranks * size, rows.shape[1])
        parts = None if whole is None else list(whole.split(size))
        padded = F.pad(rows, (0, 0, 0, size - len(rows)))
        collectives.gather(padded, parts, self.shard_group, owner)
        return None if whole is None else whole[:num_rows]

    def scatter(self, whole: Tensor | None, matrix: OwnedMatrix, owner: int) -> Tensor:
        """This rank's rows of the owner's `whole` matrix."""
        if self.shard_group is None:
            rows = matrix.p.new_empty(matrix.p.shape) if whole is None else whole.contiguous()
            collectives.broadcast(rows, self.group, owner)
            return rows
        size = -(-matrix.rows // self.num_ranks)
        rows = matrix.p.new_empty(size, matrix.p.shape[1])
        parts = None
        if whole is not None:
            padded = F.pad(whole, (0, 0, 0, self.num_ranks * size - len(whole)))
            parts = list(padded.split(size))
        collectives.scatter(rows, parts, self.shard_group, owner)
        return rows[: len(matrix.p)]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of all tensors; a copy only if there are several."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def divide(costs: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that does each task: the most expensive first, each to the rank with the least
    work.
    """
    owners = [0] * len(costs)
    work = [0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = work.index(min(work))
        work[owners[index]] += costs[index]
    return owners
