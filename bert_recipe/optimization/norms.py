"""Norms of gradients, of whole tensors and of shards."""

import torch
import torch.distributed as dist
from torch import Tensor

from bert_recipe.utils.collectives import all_gather

# Elements per kernel call on a CPU: few enough for its caches, enough to hide the cost of a call.
CHUNK = 2**19


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """||tensor||^2 of each tensor, [len(tensors)] float64 on their device.

    On a CPU, torch's norm accumulates in float32: its error is 0.1% for 24 million random numbers.
    Chunks accumulated in float64 have an error of 0.0001% and are faster.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).double().square()
    squares = [
        sum(torch.dot(c, c).item() for c in tensor.reshape(-1).split(CHUNK)) for tensor in tensors
    ]
    return torch.tensor(squares, dtype=torch.float64)


def tensor_norms(tensors: list[Tensor], shard_group: "dist.ProcessGroup | None" = None) -> Tensor:
    """||tensor|| of each tensor, [len(tensors)] float32 on their device. With `shard_group`,
    `tensors` are this rank's rows and the norms of the whole tensors are computed with one
    all-gather.
    """
    squares = squared_norms(tensors)
    if shard_group is not None:
        squares = sum_over_shards(squares, shard_group)
    return squares.sqrt().float()


def total_norm(tensors: list[Tensor], shard_group: "dist.ProcessGroup | None" = None) -> Tensor:
    """Norm of all tensors concatenated, a float32 scalar on their device; over the whole tensors if
    they are shards.
    """
    if shard_group is not None:
        return sum_over_shards(squared_norms(tensors).sum()[None], shard_group)[0].sqrt().float()
    if not tensors or tensors[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(tensors).float()
    return tensor_norms(tensors).norm()


def sum_over_shards(values: Tensor, group: "dist.ProcessGroup") -> Tensor:
    """The sums of `values` over the ranks of `group`, added on each rank. The order of an
    all-reduce depends on the network, so that the copies of a hybrid mesh could get norms, and then
    weights, that differ in the last bit.
    """
    parts = [torch.empty_like(values) for _ in range(group.size())]
    all_gather(parts, values, group)
    return torch.stack(parts).sum(dim=0)
