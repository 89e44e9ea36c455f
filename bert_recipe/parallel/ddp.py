"""Data parallelism with one replica per process: torch's DDP, and float32 gradient reduction for
16-bit weights.
"""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bert_recipe.config import ParallelConfig, RunConfig
from bert_recipe.model.token_stream import MicroBatch, StepBatch
from bert_recipe.optimization.precision import MasterWeights, Precision
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.utils.collectives import start_all_reduce


class Replicated(ParallelModel):
    """One replica per rank."""

    moves_gradients = True

    def set_up(self, config: ParallelConfig, precision: Precision, device: torch.device) -> None:
        super().set_up(config, precision, device)
        self.saves_rows = dist.get_rank() == 0
        self.replica_group = dist.group.WORLD

    @classmethod
    def unsupported(cls, config: RunConfig, device: torch.device) -> list[str]:
        if config.parallel.cpu_offload:
            return [
                "--enable-cpu-offload with several processes needs --data-parallel-shard-degree: "
                "give -1"
            ]
        return []


class ReplicatedModel(Replicated):
    """One replica per rank (DDP). Gradients are summed, not averaged, because losses are divided by
    global counts.

    Gradients are views of DDP's buckets and keep their memory: otherwise those of the micro-batches
    without a reduction would be allocated beside the buckets.
    """

    keeps_gradients = True

    def set_up(self, config: ParallelConfig, precision: Precision, device: torch.device) -> None:
        super().set_up(config, precision, device)
        self.gpus = [device.index] if device.type == "cuda" else []
        self.module = DistributedDataParallel(
            self.plain_module, device_ids=self.gpus or None, gradient_as_bucket_view=True
        )
        self.module.register_comm_hook(None, sum_gradients)
        self.is_warm = False

    def micro_batches(self, batch: StepBatch, max_count: int) -> Iterator[MicroBatch]:
        if not self.is_warm:
            yield from self._warm_up(batch)
        # DDP reduces in the backward pass, so every rank needs one.
        micro_batches = batch.filled_to(1)
        for number, micro_batch in enumerate(micro_batches, 1):
            self.module.require_backward_grad_sync = number == len(micro_batches)
            yield micro_batch

    def _warm_up(self, batch: StepBatch) -> Iterator[MicroBatch]:
        """Yields the first micro-batch twice, without loss. DDP rebuilds its buckets after the
        first pass, and with three or more ranks the sums depend on the buckets. Without this, the
        first step of a resumed run would differ by rounding. The second pass puts gradients into
        the new buckets.
        """
        for _ in range(2):
            self.model.zero_grad()  # frees the first buckets
            with torch.random.fork_rng(self.gpus):
                yield batch.first_without_labels()
        self.model.zero_grad(set_to_none=False)
        self.is_warm = True


def sum_gradients(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook that sums gradients instead of averaging them."""
    future = start_all_reduce(bucket.buffer()).get_future()
    return future.then(lambda reduced: reduced.value()[0])


class ReplicatedMasters(Replicated):
    """One replica per rank of a 16-bit model. Gradients are summed over micro-batches and ranks in
    float32, in flat buckets. During the last backward pass, the reduction of a bucket starts when
    all its gradients are ready.
    """

    masters: MasterWeights
    BUCKET_ELEMENTS = 25 * 2**18  # 25 MiB, as in DDP

    def set_up(self, config: ParallelConfig, precision: Precision, device: torch.device) -> None:
        super().set_up(config, precision, device)
        self.buckets: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}  # views of the buckets
        self.sizes: list[int] = []  # number of parameters per bucket
        self.missing: list[int] = []  # number of gradients per bucket that are not ready yet
        self.works: list[dist.Work] = []  # started reductions, in bucket order
        self.is_last = False

    def _make_buckets(self) -> None:
        """Makes the buffers in which gradients are reduced, each of several parameters, and the
        hooks that fill them.
        """
        masters = self.masters.masters
        groups: list[list[str]] = [[]]
        trained = [name for name, p in self.masters.model_parameters.items() if p.requires_grad]
        for name in reversed(trained):  # approximately the order of the backward pass
            groups[-1].append(name)
            if sum(masters[n].numel() for n in groups[-1]) >= self.BUCKET_ELEMENTS:
                groups.append([])
        for number, names in enumerate(filter(None, groups)):
            sizes = [masters[name].numel() for name in names]
            self.buckets.append(torch.zeros(sum(sizes), device=masters[names[0]].device))
            self.sizes.append(len(names))
            for name, part in zip(names, self.buckets[-1].split(sizes), strict=True):
                self.gradients[name] = part.view_as(masters[name])
                hook = functools.partial(self._take_gradient, name, number)
                self.masters.model_parameters[name].register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def _take_gradient(self, name: str, bucket: int, p: nn.Parameter) -> None:
        if p.grad is not None:  # the hook runs after it is made
            self.gradients[name].add_(p.grad)
        p.grad = None
        if self.is_last:
            self.missing[bucket] -= 1
            self._reduce(lambda number: self.missing[number] == 0)

    def _reduce(self, is_ready: Callable[[int], bool]) -> None:
        """Starts the reduction of the next ready buckets, in the same order on all ranks."""
        for number in range(len(self.works), len(self.buckets)):
            if not is_ready(number):
                return
            self.works.append(start_all_reduce(self.buckets[number]))

    def micro_batches(self, batch: StepBatch, max_count: int) -> Iterator[MicroBatch]:
        if not self.buckets:
            self._make_buckets()
        torch._foreach_zero_(self.buckets)
        self.missing = list(self.sizes)
        self.works = []
        micro_batches = batch.filled_to(1)  # every rank needs sums to log
        for number, micro_batch in enumerate(micro_batches, 1):
            self.is_last = number == len(micro_batches)
            yield micro_batch
        self._reduce(lambda _number: True)  # a parameter may have no gradient
        for work in self.works:
            work.wait()
        for name, gradient in self.gradients.items():
            self.masters.masters[name].grad = gradient

    def backward(self, loss: Tensor) -> None:
        (loss * self.loss_scale.value).backward()
