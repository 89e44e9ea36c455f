"""The protocol of what hangs off the loop of updates."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from bert_recipe.metrics.throughput import GlobalBatchStats, MeasuringWindow
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.utils.device import peak_flops
from bert_recipe.utils.stop_signal import StopSignal


@dataclass(frozen=True)
class Update:
    """One pass of the loop.

    step: the number of the update, which is skipped if the gradient is not finite.
    stats: of the global batch.
    sums: of this rank, see Task.loss.
    waited: seconds that it waited for data.
    stops: whether the run stops after it.
    """

    step: int
    stats: GlobalBatchStats
    sums: dict[str, Tensor]
    waited: float
    stops: bool


class Callback:
    """Called by the trainer on all ranks, in the order of the trainer's callbacks. By default,
    nothing is done.
    """

    def claim(self) -> None:
        """Called before all others; an error here is not in the `guard`."""

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Encloses all of the following calls and the updates."""
        yield

    def start(self, stop: StopSignal) -> None:
        """Called before the first update of this process; may raise StopAtOnce. stop: the signals
        that end the run.
        """

    def wants_stop(self) -> bool:
        """Whether all ranks are to stop after the next update; may differ between ranks."""
        return False

    def is_exhausted(self) -> bool:
        """Whether training has ended before its last update; the same on all ranks."""
        return False

    def is_due(self, update: Update) -> bool:
        """Whether `after_update` needs the number of updates, which is read from the device."""
        return False

    def after_update(self, update: Update) -> None:
        """Called after each update. Its time is not in the measured throughput."""

    def finish(self, stopped_by: int | None, final_loss: float | None) -> None:
        """Called after the last update of this process. stopped_by: the signal that ended it."""


def is_due(step: int, every: int, last_step: int) -> bool:
    """Whether `step` is a multiple of `every`, or the last step."""
    return (every > 0 and step % every == 0) or step >= last_step


def measuring_window(runtime: Runtime) -> MeasuringWindow:
    peak = peak_flops(runtime.device, runtime.precision.dtype)
    return MeasuringWindow(runtime.device, runtime.distributed.world_size, peak)
