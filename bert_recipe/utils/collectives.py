"""torch.distributed's collectives on tensors, for contiguous memory: its operators send and fill
the raw memory of a tensor, whatever its strides are, without an error. Here, what is sent is copied
if it is not contiguous, and what is written to must be contiguous.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


def all_reduce(
    tensor: Tensor, group: "ProcessGroup | None" = None, op: "dist.ReduceOp.RedOpType | None" = None
) -> None:
    """Replaces `tensor` by its sum over the ranks, or by another reduction `op`."""
    check_contiguous(tensor)
    dist.all_reduce(tensor, dist.ReduceOp.SUM if op is None else op, group=group)


def start_all_reduce(tensor: Tensor) -> "Work":
    """Starts to replace `tensor` by its sum over all ranks."""
    check_contiguous(tensor)
    return dist.all_reduce(tensor, async_op=True)


def all_gather(parts: Sequence[Tensor], tensor: Tensor, group: "ProcessGroup | None") -> None:
    """Fills `parts` with the `tensor` of each rank."""
    check_contiguous(*parts)
    dist.all_gather(list(parts), tensor.contiguous(), group=group)


def broadcast(tensor: Tensor, group: "ProcessGroup | None", source: int) -> None:
    """Replaces `tensor` by that of the rank `source` of the group."""
    check_contiguous(tensor)
    dist.broadcast(tensor, group=group, group_src=source)


def gather(
    tensor: Tensor, parts: Sequence[Tensor] | None, group: "ProcessGroup | None", target: int
) -> None:
    """Fills `parts` of the rank `target` of the group with the `tensor` of each rank. Other ranks
    have no parts.
    """
    if parts is not None:
        check_contiguous(*parts)
        parts = list(parts)
    dist.gather(tensor.contiguous(), parts, group=group, group_dst=target)


def scatter(
    tensor: Tensor, parts: Sequence[Tensor] | None, group: "ProcessGroup | None", source: int
) -> None:
    """Fills `tensor` with this rank's one of the `parts` of the rank `source` of the group. Other
    ranks have no parts.
    """
    check_contiguous(tensor)
    if parts is not None:
        parts = [part.contiguous() for part in parts]
    dist.scatter(tensor, parts, group=group, group_src=source)


def check_contiguous(*tensors: Tensor) -> None:
    """Raises ValueError for a tensor that a collective would fill in another order."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"a collective writes to contiguous tensors only, not to strides {tensor.stride()}"
                f" of shape {tuple(tensor.shape)}"
            )
