"""The optimizer-step loop that all tasks share: next batch, gradients, update, log. Checkpoints,
evaluations and benchmarks hang off it (training/).

Steps do not synchronize with the GPU: the learning rate, the loss scale and the number of updates
are on the device and are read only for logs and checkpoints.
"""

import contextlib
import hashlib
import itertools
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from bert_recipe.checkpoint.best import BestCheckpoint
from bert_recipe.checkpoint.folder import checkpoint_steps
from bert_recipe.checkpoint.spans import waiting
from bert_recipe.checkpoint.state import TrainState
from bert_recipe.metrics.sinks import RESUMED_STEP
from bert_recipe.metrics.text import format_duration, format_metrics, step_metrics
from bert_recipe.metrics.throughput import GlobalBatchStats
from bert_recipe.metrics.update_profile import UpdateProfile
from bert_recipe.model.costs.flops import training_flops
from bert_recipe.model.token_stream import StepBatch
from bert_recipe.optimization.lr_scheduler import LearningRate
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.compilation import compilation_errors
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import SeparableTask
from bert_recipe.training.callbacks import Callback, Update, is_due, measuring_window
from bert_recipe.training.evaluation import sums_without_dropout
from bert_recipe.training.evaluation_callback import Evaluations
from bert_recipe.training.run import Run
from bert_recipe.utils.device import FreedMemory
from bert_recipe.utils.distributed import translate_peer_failure
from bert_recipe.utils.errors import PeerError, UserError
from bert_recipe.utils.measure import Stopwatch
from bert_recipe.utils.progress import progress_bar
from bert_recipe.utils.stop_signal import StopAtOnce, StopSignal

MAX_SKIPPED_STEPS = 25  # updates in a row without a finite gradient, after which a run stops


class Trainer:
    """Trains from `state`.

    callbacks: see training/.
    stopwatch: of the phases of an update.
    """

    def __init__(
        self,
        run: Run,
        state: TrainState,
        learning_rate: LearningRate,
        runtime: Runtime,
        callbacks: Sequence[Callback],
        stopwatch: Stopwatch,
    ):
        self.run, self.task, self.state, self.runtime = run, run.task, state, runtime
        self.config = config = run.settings.trainer
        self.parallel, self.device = cast(ParallelModel, state.parallel), runtime.device
        self.distributed, self.reporter = runtime.distributed, runtime.reporter
        self.callbacks, self.stopwatch = callbacks, stopwatch
        self.window = measuring_window(runtime)
        self.freed_memory = FreedMemory()
        # Of the run, for the log; a benchmark may be longer than the run.
        self.num_steps = state.last_step if config.benchmark else run.max_steps
        self.profile = UpdateProfile(
            config.profile_update if self.distributed.is_main and not run.is_trial else None,
            max(state.last_step, run.max_steps),
            run.folder.path,
            self.distributed.rank,
            self.device,
        )
        # With CPU offload, not the device of the forward pass.
        device = self.parallel.optimizer_device
        self.learning_rate = learning_rate
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.grad_norm = torch.zeros((), device=device)
        self.last_loss: float | None = None  # that was logged
        self.stop = StopSignal()

    def train(self, loader: Iterable[StepBatch]) -> int:
        """Claims what the run writes to and trains until the last step of this process, or until
        this run must stop. Returns the exit code of the process.
        """
        self._claim()
        state = self.state
        batches = iter(loader)
        started: dict[str, Any] = {"train_start": True}
        if state.step > 0:  # later records before this one are of updates that are made again
            started[RESUMED_STEP] = state.step
        self.reporter.log("PARAMETER", started)
        with self.stop, self._progress_bar() as bar, self._guards():
            with contextlib.suppress(StopAtOnce):
                for callback in self.callbacks:
                    callback.start(self.stop)
                if state.step == 0 and self.run.logs_start:
                    batches = self._log_start(batches)
                self._make_updates(batches, bar)
            bar.close()
            for callback in self.callbacks:
                callback.finish(self.stop.received, self.last_loss)
        has_stopped = state.step < state.last_step and not self.is_exhausted
        is_interrupted = self.stop.received == signal.SIGINT
        return self.stop.exit_code if has_stopped or is_interrupted else 0

    def _claim(self) -> None:
        """First the logs, since a log that cannot be written must not cost the run which
        --overwrite removes from the folder.
        """
        run, state = self.run, self.state
        settings = {"processes": self.distributed.world_size} | state.versions
        self.reporter.log("PARAMETER", run.logged_settings(state.identity) | settings)
        for callback in self.callbacks:
            callback.claim()
        if run.saves and self.distributed.is_main and not self.is_finished:
            run.folder.remove_results(run.result_files)

    def _make_updates(self, batches: Iterator[StepBatch], bar: Any) -> None:
        """The loop of updates. Raises StopAtOnce if a signal ends what need not be completed."""
        state, device = self.state, self.device
        self.window.restart()
        while state.step < state.last_step and not self.is_exhausted:
            started = time.perf_counter()
            local_batch = self._next(batches)
            waited = time.perf_counter() - started
            batch, stats, max_micro_batches, stops = self._exchange(local_batch, self._wants_stop())
            with self.profile.around(state.step + 1):
                with self._compiling():
                    sums = self.training_step(batch, stats, max_micro_batches)
                self.optimizer_step()
            state.samples_consumed += int(stats.sequences)
            state.step += 1  # unless the update is skipped, see _read_step
            self.window.count(stats, waited)
            update = Update(state.step, stats, sums, waited, stops)
            logs = update.step == 1 or is_due(update.step, self.config.log_freq, state.last_step)
            if logs or device.type == "cpu" or self._is_anything_due(update):
                self.distributed.wait_for_device(device)
                self._read_step(int(stats.sequences))
            state.raw_train_seconds += time.perf_counter() - started
            bar.update(state.step - bar.n)
            if logs:
                self._log(sums, stats, batch, bar)
            with self.window.paused():
                for callback in self.callbacks:
                    callback.after_update(update)
            if stops:
                return

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """Around the passes of an update. If it is the first one and compiles, a signal ends it at
        once, since it takes long and nothing is lost, and an error says what to do.
        """
        if not self.parallel.model.is_compiled or self.state.step > self.state.first_step:
            yield
            return
        with self.stop.raising(), compilation_errors():
            yield

    @property
    def evaluations(self) -> Evaluations | None:
        """The callback that evaluates, if there is one."""
        kind = Evaluations
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    @property
    def best(self) -> BestCheckpoint | None:
        """The evaluations that choose the best checkpoint, if the run keeps one."""
        return None if self.evaluations is None else self.evaluations.best

    @property
    def best_step(self) -> int:
        """The step whose weights the run ends with: the best one, or the last."""
        best_step = None if self.best is None else self.best.best_step
        return self.state.step if best_step is None else best_step

    @property
    def is_exhausted(self) -> bool:
        """Whether early stopping has ended the run."""
        return any(callback.is_exhausted() for callback in self.callbacks)

    @property
    def is_finished(self) -> bool:
        """Whether all updates are made, or early stopping has ended the run."""
        return self.is_exhausted or self.state.step >= self.run.max_steps

    def _progress_bar(self) -> tqdm:
        run, first, last = self.run, self.state.step, self.state.last_step
        is_main, lines = self.distributed.is_main, run.is_trial  # which logs nothing
        return progress_bar(last, run.record.phase, "step", first, enabled=is_main, lines=lines)

    @contextlib.contextmanager
    def _guards(self) -> Iterator[None]:
        """Those of the callbacks, which also see the failures of other ranks."""
        with contextlib.ExitStack() as guards:
            for callback in self.callbacks:
                guards.enter_context(callback.guard())
            with translate_peer_failure():
                yield

    def _wants_stop(self) -> bool:
        return self.stop.received is not None or any(
            callback.wants_stop() for callback in self.callbacks
        )

    def _is_anything_due(self, update: Update) -> bool:
        return any(callback.is_due(update) for callback in self.callbacks)

    def training_step(
        self, batch: StepBatch, stats: GlobalBatchStats, max_micro_batches: int | None = None
    ) -> dict[str, Tensor]:
        """Computes the gradients of the global batch's loss, summed over micro-batches and ranks.
        Returns this rank's sums. max_micro_batches: maximum over ranks; None with one rank.
        """
        parallel = self.parallel
        count = max_micro_batches or len(batch.micro_batches)
        parallel.model.train()
        seed = seed_of_step(self.run.record.seed, batch.first_position, self.distributed.rank)
        torch.manual_seed(seed)
        micro_batches = batch.filled_to(count)
        forward = self.task.for_batch(micro_batches, parallel.plain_module, self.runtime, seed)
        step_sums: dict[str, Tensor] = {}
        for micro_batch in parallel.micro_batches(batch, count):
            with self.stopwatch.lap("forward"):
                with self.runtime.precision.context(self.device):
                    sums = forward.sums(parallel.module, parallel.inputs(micro_batch, self.device))
                loss = self.task.loss(sums, stats.counts)
            with self.stopwatch.lap("backward"):
                parallel.backward(loss)
            for name, value in sums.items():
                step_sums[name] = step_sums.get(name, 0.0) + value.detach()
        return step_sums

    def optimizer_step(self) -> None:
        """Updates the weights. If the gradients are not finite, only the loss scale changes."""
        state = self.state
        with self.stopwatch.lap("optimizer"):
            self.learning_rate.advance(state.device_step)
            self.grad_norm, not_finite = self.parallel.step(
                state.optimizer, self.config.max_grad_norm, waiting(state.spans, state.step)
            )
            self.parallel.loss_scale.update(not_finite.float())
            state.device_step += ~not_finite
            self.skipped_in_a_row.copy_(torch.where(not_finite, self.skipped_in_a_row + 1, 0))

    def _next(self, batches: Iterator[StepBatch]) -> StepBatch | UserError:
        """The next batch, or the error of this rank's data, which `_exchange` raises on all
        ranks.
        """
        try:
            return next(batches)
        except UserError as error:
            return error

    def _exchange(
        self, batch: StepBatch | UserError, wants_stop: bool
    ) -> tuple[StepBatch, GlobalBatchStats, int, bool]:
        """Returns the batch; reduced over ranks, the counts of the global batch and the maximum
        number of micro-batches; and whether any rank wants to stop. Raises UserError on all ranks
        if the data of one cannot be read.
        """
        stats = GlobalBatchStats()  # of this rank
        micro_batches = [0] * self.distributed.world_size
        if isinstance(batch, StepBatch):
            lengths, counts = batch.sequence_lengths, batch.counts
            flops = training_flops(self.parallel.model, lengths, counts.labelled_tokens)
            stats = GlobalBatchStats(counts.sequences, counts.tokens, counts.labelled_tokens, flops)
            micro_batches[self.distributed.rank] = len(batch.micro_batches)
        values = [float(value) for value in astuple(stats)]
        failed = isinstance(batch, UserError)
        summed = self.distributed.all_reduce_sum([*values, failed, wants_stop, *micro_batches])
        failures, stops, *all_micro_batches = summed[len(values) :]
        if isinstance(batch, UserError) or failures:
            peer_error = PeerError("another process cannot read its data")
            error = batch if isinstance(batch, UserError) else peer_error
            error.on_all_ranks = True
            raise error
        stats = GlobalBatchStats(*summed[: len(values)])
        return batch, stats, int(max(all_micro_batches)), stops > 0

    def _read_step(self, global_batch_size: int) -> None:
        """Reads the number of updates from the device. Raises UserError after too many skipped
        steps in a row.
        """
        state = self.state
        state.step, skipped = torch.stack([state.device_step, self.skipped_in_a_row]).tolist()
        if skipped < MAX_SKIPPED_STEPS:
            return
        first = state.samples_consumed - skipped * global_batch_size
        last = state.samples_consumed - 1
        advice = "lower --learning-rate, or look at that data"
        if any(self.distributed.all_reduce_sum([not self.parallel.has_finite_weights()])):
            advice = "the weights are not finite either and are not saved; lower --learning-rate"
        if self.run.saves and checkpoint_steps(self.run.folder.path):
            advice += f"; earlier checkpoints are in {self.run.folder}"
        scale = float(self.parallel.loss_scale.value)
        raise UserError(
            f"the loss or its gradient was not finite in {skipped} steps in a row, over the sample "
            f"positions {first} to {last}, after update {state.step} (loss scale {scale:g}): "
            f"{advice}"
        )

    def _log(
        self, sums: dict[str, Tensor], stats: GlobalBatchStats, batch: StepBatch, bar: tqdm
    ) -> None:
        values = torch.stack([value.double() for value in sums.values()]).tolist()
        metrics = self._metrics(dict(zip(sums, values, strict=True)), stats) | batch.metrics
        metrics["learning_rate"] = float(self.learning_rate.value)
        metrics["grad_norm"] = float(self.grad_norm)
        self.freed_memory.bound()
        if self.runtime.precision.needs_loss_scale:
            metrics["loss_scale"] = float(self.parallel.loss_scale.value)
        metrics.update(self.window.metrics())
        self.window.restart()
        self.last_loss = metrics["loss"]
        left = format_duration(metrics["step_seconds"] * (bar.total - self.state.step))
        place = self.state.place(self.num_steps)
        text = f"{place}  {format_metrics(step_metrics(metrics))}  {left} left"
        nvidias = {"step_cost": metrics["step_seconds"], "step_samples": stats.sequences}
        nvidias["seqs_per_sec"] = metrics["sequences_per_second"]
        self.reporter.log(self.state.epoch_and_step, metrics | nvidias, text)
        bar.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)

    def _metrics(self, sums: dict[str, float], stats: GlobalBatchStats) -> dict[str, float]:
        """The task's metrics of a global batch from this rank's sums."""
        summed = dict(zip(sums, self.distributed.all_reduce_sum([*sums.values()]), strict=True))
        return self.task.metrics(summed, stats.counts)

    def _log_start(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """Logs the starting weights' loss of the first batch, without dropout. Returns all
        batches.
        """
        batch, stats, max_micro_batches, _ = self._exchange(self._next(batches), False)
        filled = batch.filled_to(max_micro_batches)
        with self.parallel.eager():  # a graph for one batch is not worth its compilation
            sums = sums_without_dropout(
                self.parallel, cast(SeparableTask, self.task).sums, filled, self.runtime
            )
            metrics = self._metrics(sums, stats)
        place = self.state.place(self.num_steps)
        text = f"{place}  before the first update, without dropout: {format_metrics(metrics)}"
        self.reporter.log(self.state.epoch_and_step, metrics, text)
        return itertools.chain([batch], batches)


def seed_of_step(seed: int, position: int, rank: int) -> int:
    """The random seed of one step on one rank: a function of the run's seed and the position in the
    data.
    """
    digest = hashlib.sha256(f"{seed}/{position}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
