"""`--benchmark`: the speed of updates after a warmup."""

from bert_recipe.checkpoint.state import TrainState
from bert_recipe.metrics.text import format_metrics
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.training.callbacks import Callback, Update, measuring_window
from bert_recipe.training.run import Run
from bert_recipe.utils.measure import Stopwatch, synchronize
from bert_recipe.utils.stop_signal import StopSignal


class Benchmark(Callback):
    """Metrics of all updates after the warmup, with the time per phase of an update."""

    def __init__(self, run: Run, state: TrainState, stopwatch: Stopwatch, runtime: Runtime):
        self.state, self.stopwatch, self.reporter = state, stopwatch, runtime.reporter
        self.window = measuring_window(runtime)
        self.warmup_left = run.settings.trainer.benchmark_warmup_steps

    def start(self, stop: StopSignal) -> None:
        self.window.restart()

    def after_update(self, update: Update) -> None:
        self.window.count(update.stats, update.waited)
        self.warmup_left -= 1
        if self.warmup_left == 0:
            self.stopwatch.seconds()  # discards the warmup
            synchronize(self.window.device)
            self.window.restart()

    def finish(self, stopped_by: int | None, final_loss: float | None) -> None:
        if stopped_by is not None:
            return
        self.state.read_clock()
        steps = self.window.steps
        metrics = self.window.final_metrics() | self.stopwatch.medians_in_milliseconds(steps)
        nvidias = {
            "training_sequences_per_second": metrics["sequences_per_second"],
            "e2e_train_time": self.state.train_seconds,
            "raw_train_time": self.state.raw_train_seconds,
            "final_loss": final_loss,
        }
        text = f"benchmark of {steps} steps: {format_metrics(metrics)}"
        self.reporter.log((), metrics | nvidias, text)
