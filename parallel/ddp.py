"""Data parallelism with one replica per process (torch's DDP)."""

from collections.abc import Iterator

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
        self.saves_rows = dist.get_rank() == 0
        self.gpus = [device.index] if device.type == "cuda" else []
        self.module = DistributedDataParallel(model, device_ids=self.gpus or None, gradient_as_bucket_view=True)
        self.module.register_comm_hook(None, sum_gradients)
        self.is_warm = False

    def micro_batches(self, batch: StepBatch, max_count: int) -> Iterator[MicroBatch]:
        if not self.is_warm:
            yield from self._warm_up(batch)
        # DDP reduces the model's own gradients. Those of a 16-bit model are summed over micro-batches in its masters.
        reduces_masters = self.masters is not None and max_count > 1
        micro_batches = batch.filled_to(1)  # DDP reduces gradients in the backward pass, so every rank needs one
        for number, micro_batch in enumerate(micro_batches, 1):
            self.module.require_backward_grad_sync = number == len(micro_batches) and not reduces_masters
            yield micro_batch
        if reduces_masters:
            grads = [p.grad for p in self.named_parameters().values() if p.grad is not None]
            for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
                work.wait()

    def _warm_up(self, batch: StepBatch) -> Iterator[MicroBatch]:
        """A micro-batch without loss. DDP rebuilds its buckets after the first pass, and the sums of three ranks or
        more depend on the buckets. Without this, the first step of a resumed run would differ by rounding."""
        with torch.random.fork_rng(self.gpus):
            yield batch.make_filler()
        for p in (*self.model.parameters(), *self.named_parameters().values()):
            p.grad = None
        self.is_warm = True


def sum_gradients(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that sums; the default one averages."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda reduced: reduced.value()[0])
