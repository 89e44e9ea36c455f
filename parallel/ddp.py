"""Data parallelism with one replica per process (torch's DDP)."""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from data_loading.loader import MicroBatch, StepBatch
from modeling import BertPreTrainedModel
from parallel.base import ParallelModel
from precision import Precision


class ReplicatedModel(ParallelModel):
    """One replica per rank (DDP). Gradients are summed, not averaged: losses are divided by global counts already."""

    def __init__(self, model: BertPreTrainedModel, precision: Precision, device: torch.device):
        super().__init__(model, precision)
        device_ids = [device.index] if device.type == "cuda" else None
        self.module = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
        self.module.register_comm_hook(None, sum_gradients)
        self.reduces_masters = False
        self.is_warm = False

    def needs_warm_up(self) -> bool:
        # DDP rebuilds its buckets after the first pass. The sums of three ranks or more depend on the order of
        # addition, and so on the buckets: without this, the first step of a resumed run differs by rounding.
        is_warm, self.is_warm = self.is_warm, True
        return not is_warm

    def begin_step(self, max_micro_batches: int) -> None:
        # DDP reduces the model's own gradients. Those of a 16-bit model are summed over micro-batches in its masters.
        self.reduces_masters = self.masters is not None and max_micro_batches > 1

    def equalize(self, batch: StepBatch) -> list[MicroBatch]:
        return batch.filled_to(1)  # DDP reduces gradients in the backward pass, so every rank needs one

    def gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager:
        return self.module.no_sync() if self.reduces_masters or not is_last else contextlib.nullcontext()

    def reduce_gradients(self) -> None:
        if self.reduces_masters:
            grads = [p.grad for p in self.named_parameters().values() if p.grad is not None]
            for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
                work.wait()


def sum_gradients(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that sums; the default one averages."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda reduced: reduced.value()[0])
