"""Runs the calls of benchmarks/gpu_first_hour.py on the stand-in for a GPU, with a small model and
without compiling. What reads the results of kernels is replaced, and so is the profiler, whose
library needs the real driver.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from program import patch
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import gpu_first_hour
from benchmarks.common import device_checks, watched
from bert_recipe.training.trainer import Trainer

LOSS = 9.0
metrics = Trainer._metrics


@contextlib.contextmanager
def fake_group(_device: torch.device) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class NoProfile(contextlib.AbstractContextManager):
    def __exit__(self, *_) -> None:
        pass

    def key_averages(self) -> "NoProfile":
        return self

    def table(self, **_) -> str:
        return ""


def is_eager(mode: gpu_first_hour.Mode) -> bool:
    return "layers" not in mode.flags and "none" in mode.flags


def main(folder: str, output: str) -> None:
    os.environ["WORLD_SIZE"] = "1"
    patch()
    Trainer._metrics = lambda self, sums, stats: metrics(self, dict.fromkeys(sums, LOSS), stats)
    watched.profile = NoProfile
    device_checks.one_process_group = fake_group
    gpu_first_hour.reference_losses = lambda *_: [LOSS] * gpu_first_hour.TOY_UPDATES
    modes = gpu_first_hour.MODES.items()
    gpu_first_hour.MODES = {name: mode for name, mode in modes if is_eager(mode)}
    for name in ("checks", "training", "tasks", "speed"):
        paths = ("--folder", folder, "--output", output)
        gpu_first_hour.main([name, "--toy", "--device", "cuda", *paths])


if __name__ == "__main__":
    main(*sys.argv[1:])
