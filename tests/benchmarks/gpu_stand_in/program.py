"""Runs command lines on the stand-in for a GPU, with torch's fake process group. Kernels and
collectives do nothing, so what reads their results is replaced; a read inside an update is an
error.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.parallel import ddp
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.training import evaluation, trainer
from bert_recipe.training import setup as run_setup
from bert_recipe.training.trainer import Trainer
from bert_recipe.utils.distributed import DistributedContext

GPU = torch.device("cuda", 0)
collectives: list[str] = []


def count(name: str) -> None:
    collective = getattr(dist, name)

    def counted(*args, **kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if any(tensor.is_cuda for tensor in tensors):
            collectives.append(name)
        return collective(*args, **kwargs)

    setattr(dist, name, counted)


@contextlib.contextmanager
def fake_group(_device, *_timeouts):
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        yield DistributedContext()
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    yield DistributedContext(0, world_size, 0, min(world_size, 8), cpu_group=dist.group.WORLD)
    dist.destroy_process_group()


def sum_gradients(_state, bucket):
    """The fake group has no result to wait for."""
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def initial_values(self, _parts=""):
    for name, p in (*self.named_parameters(), *self.named_buffers()):
        yield name, torch.empty(p.shape, device=GPU)


def without_waiting(function, is_checked=lambda *_: True):
    """The function, in which a call that makes the host wait for the GPU is an error, if
    `is_checked`.
    """

    def checked(*args, **kwargs):
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error" if is_checked(*args) else before)
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return checked


def is_warm(checked: Trainer, *_) -> bool:
    """The first update compiles. With offload, FSDP2 waits for the gradients that it adds on the
    CPU.
    """
    checked.calls = getattr(checked, "calls", 0) + 1
    parallel = checked.parallel
    return checked.calls > 2 and not (
        parallel.optimizer_device.type == "cpu" and parallel.shard_group is not None
    )


def adam_with_any_rate(init):
    """Adam's constructor looks at the rate, which may be a tensor on the GPU."""

    def made(self, params, lr=1e-3, *args, **options):
        init(self, params, 1e-3 if isinstance(lr, torch.Tensor) else lr, *args, **options)
        for group in (self.defaults, *self.param_groups):
            group["lr"] = lr

    return made


def patch() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.optim.Adam.__init__ = adam_with_any_rate(torch.optim.Adam.__init__)
    Trainer._read_step, ParallelModel.has_finite_weights = lambda *_: None, lambda _: True
    Trainer.training_step = without_waiting(Trainer.training_step, is_warm)
    Trainer.optimizer_step = without_waiting(Trainer.optimizer_step, is_warm)
    evaluation.check_finite = lambda _: None
    # Of an evaluation, all but the last read. A prediction reads what each forward pass gives.
    checked_sums = without_waiting(evaluation.sums_without_dropout)
    evaluation.sums_without_dropout = trainer.sums_without_dropout = checked_sums
    PreTrainedModel.__call__ = without_waiting(
        PreTrainedModel.__call__, lambda model, *_: not model.training
    )
    PreTrainedModel.init_weights, PreTrainedModel.initial_values = lambda *_: None, initial_values
    DistributedContext.new_group = lambda _self, ranks=None, backend=None: dist.new_group(
        ranks, backend="fake"
    )
    DistributedContext.wait_for_device = lambda *_: torch.cuda.set_sync_debug_mode("default")
    run_setup.init_distributed, ddp.sum_gradients = fake_group, sum_gradients
    single = hasattr(dist, "all_gather_single")
    for name in ("all_reduce", *(("all_gather_single", "reduce_scatter_single") if single else ())):
        count(name)


def run(argv: list[str], world_size: int, program: str = "run_pretraining") -> dict:
    os.environ.update(
        WORLD_SIZE=str(world_size), RANK="0", LOCAL_RANK="0", MASTER_ADDR="none", MASTER_PORT="1"
    )
    for collect in (
        torch._dynamo.reset,
        gc.collect,
        torch.cuda.empty_cache,
        torch.cuda.reset_peak_memory_stats,
    ):
        collect()
    collectives.clear()
    counters.clear()
    before = torch.cuda.memory_allocated()
    try:
        importlib.import_module(program).main(argv)
    except BaseException:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        return {"error": traceback.format_exc()[-3000:]}
    return {
        "error": "",
        "graphs": counters["stats"]["unique_graphs"],
        "peak": torch.cuda.max_memory_allocated() - before,
        "collectives": {name: collectives.count(name) for name in {*collectives}},
    }


def main(cases: str, results: str) -> None:
    patch()
    outcomes = {name: run(*case) for name, case in json.loads(Path(cases).read_text()).items()}
    Path(results).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
