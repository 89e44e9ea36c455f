"""--profile-update: what an update spends its time on, as a trace and a table."""

import contextlib
import gzip
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.measure import synchronize
from bert_recipe.utils.progress import print_line

ROWS = 60  # of the table


class UpdateProfile:
    """Profiles update number `update`, counted from 1; none if that is None. Writes to the folder
    `profile` of the run's `folder`: update_N_rank_R.json.gz, in Chrome's trace format, and
    update_N_rank_R.txt, a table.

    last: update of the run. Raises UserError if `update` is after it; it may be made already, since
        the same command resumes a run.
    """

    def __init__(
        self, update: int | None, last: int, folder: Path, rank: int, device: torch.device
    ):
        if update is not None and update > last:
            raise UserError(
                f"--profile-update {update}: the run has {last} updates: give one of them"
            )
        self.update, self.rank, self.device = update, rank, device
        self.trace = folder / "profile" / f"update_{update}_rank_{rank}.json.gz"
        self.table = self.trace.with_name(f"update_{update}_rank_{rank}.txt")

    @contextlib.contextmanager
    def around(self, update: int) -> Iterator[None]:
        """Around the forward and backward passes and the optimizer step of an update."""
        if update != self.update:
            yield
            return
        # Torch's profiler would print lines of its own on standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        synchronize(self.device)
        with profile(activities=activities) as profiler:
            started = time.perf_counter()
            yield
            synchronize(self.device)
            seconds = time.perf_counter() - started
        self._write(profiler, seconds)
        print_line(f"profile of update {update}: {self.table}")

    def _write(self, profiler: profile, seconds: float) -> None:
        on_gpu = self.device.type == "cuda"
        averages = profiler.key_averages()
        text = f"update {self.update}, rank {self.rank}, {self.device.type}: {seconds:.4f} s"
        if on_gpu:
            launches = sum(event.count for event in averages if "LaunchKernel" in event.key)
            text += f", of which the GPU computes {gpu_seconds(averages):.4f} s"
            text += f"; {launches:,} launches of kernels"
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = averages.table(sort_by=order, row_limit=ROWS, max_name_column_width=70)
        self.table.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.table, f"{text}\n\n{table}\n")
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(trace))
            write_atomically(self.trace, gzip.compress(trace.read_bytes()))


def gpu_seconds(averages: Iterable[FunctionEventAvg]) -> float:
    """The seconds that the GPU computed. The host's rows repeat the time of the kernels that they
    launch, and named ranges that of the kernels inside.
    """
    return sum(
        event.self_device_time_total / 1e6
        for event in averages
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
