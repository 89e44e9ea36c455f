"""The optimizer-step loop that all tasks share: accumulate, clip, step, log, evaluate, save.

Steps do not synchronize with the GPU: the learning rate, the loss scale and the number of updates
are on the device and are read only for logs and checkpoints.
"""

import contextlib
import hashlib
import itertools
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from checkpoint.best import BestCheckpoint
from checkpoint.state import TrainState
from checkpoint.writer import CheckpointWriter
from evaluation import Evaluator, sums_without_dropout
from lr_scheduler import rate_table
from metrics.text import format_duration, format_metrics, step_metrics
from metrics.throughput import Benchmark, GlobalBatchStats, MeasuringWindow
from metrics.update_profile import UpdateProfile
from parallel.compilation import compilation_errors
from parallel.runtime import Runtime
from run_config import TrainerConfig
from tasks import Task
from token_stream import StepBatch
from utils.device import FreedMemory, peak_flops
from utils.distributed import RankFailure, translate_peer_failure
from utils.errors import PeerError, UserError
from utils.measure import Stopwatch
from utils.progress import progress_bar
from utils.stop_signal import StopAtOnce, StopSignal


class Trainer:
    """Trains from `state`.

    learning_rate: the tensor that the optimizer reads. schedule: its value by updates. evaluator:
    None without data to evaluate. best: keeps the best checkpoint, or None. settings: to log at the
    start.
    """

    def __init__(
        self,
        task: Task,
        state: TrainState,
        learning_rate: Tensor,
        schedule: Callable[[int], float],
        config: TrainerConfig,
        runtime: Runtime,
        evaluator: Evaluator | None = None,
        best: BestCheckpoint | None = None,
        settings: dict[str, Any] | None = None,
    ):
        self.task, self.parallel, self.state, self.optimizer = (
            task,
            state.parallel,
            state,
            state.optimizer,
        )
        self.config, self.runtime, self.device = config, runtime, runtime.device
        self.distributed, self.reporter = runtime.distributed, runtime.reporter
        self.evaluator, self.best = evaluator, best
        self.learning_rate, self.loss_scale = learning_rate, state.loss_scale
        # Updates of this run; those of a benchmark do not count.
        steps = (
            config.benchmark_warmup_steps + config.benchmark_steps
            if config.benchmark
            else config.steps_this_run
        )
        self.first_step, self.last_step = (
            state.step,
            state.step + steps if steps else config.max_steps,
        )
        if not config.benchmark:
            self.last_step = min(self.last_step, config.max_steps)
        device = (
            self.parallel.optimizer_device
        )  # with CPU offload, not the device of the forward pass
        self.rates = rate_table(schedule, self.first_step, self.last_step, device)
        sharded = self.parallel.shard_group is not None
        self.writer = CheckpointWriter(
            config.checkpoint_folder, self.distributed, sharded, config.keep_every
        )
        self.stopwatch = Stopwatch(self.device, enabled=config.benchmark)
        is_profiled = self.distributed.is_main or config.profile_all_ranks
        self.profile = UpdateProfile(
            config.profile_update if is_profiled else None,
            config.checkpoint_folder,
            self.distributed.rank,
            self.device,
        )
        self.profile.check(max(self.last_step, config.max_steps))
        self.saved_step = None if config.save_initial and state.step == 0 else state.step
        self.freed_memory = FreedMemory()
        self.all_ranks_fail = False  # at the same update
        run = {
            "SEED": state.metadata.seed,
            "processes": self.distributed.world_size,
            **state.versions,
        }
        self.settings = state.metadata.arguments | run | (settings or {})
        self.final_loss: float | None = None
        self.results: dict[str, float] = {}  # the last loss and evaluation
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.grad_norm = torch.zeros((), device=device)

    def train(self, loader: Iterable[StepBatch]) -> int:
        """Trains until `max_steps`, or until this run must stop, and returns the exit code of the
        process.
        """
        state, config, last_step = self.state, self.config, self.last_step
        self._begin()
        batches, window = iter(loader), self._new_window()
        benchmark = None
        if config.benchmark:
            benchmark = Benchmark(self._new_window(), self.stopwatch, config.benchmark_warmup_steps)
        phase, is_main = state.metadata.phase, self.distributed.is_main
        bar = progress_bar(last_step, phase, "step", state.step, enabled=is_main, lines=False)
        with StopSignal() as stop, bar, self._save_on_error():
            if state.step == 0 and config.save_initial:
                self.save()
            if state.step == 0 and config.logs_start and not benchmark:
                batches = self._log_start(batches)
                window.restart()
            while state.step < last_step and not (self.best and self.best.is_exhausted):
                started = time.perf_counter()
                batch = self._next(batches)
                waited = time.perf_counter() - started
                stats, max_micro_batches, stops = self._exchange(
                    batch, stop.received or self.writer.error or self.folder_moved()
                )
                step = state.step + 1  # this update, unless it is skipped
                logs = step == 1 or is_due(step, config.log_freq, last_step)
                evaluates = config.eval_steps > 0 and is_due(step, config.eval_steps, last_step)
                saves = stops or is_due(step, config.steps_per_checkpoint, last_step)

                try:
                    with self.profile.around(step):
                        with self._compiling(stop):
                            sums = self.training_step(batch, stats, max_micro_batches)
                        with self.stopwatch.lap("optimizer"):
                            self.optimizer_step()
                except StopAtOnce:
                    break
                state.samples_consumed += int(stats.sequences)
                window.count(stats, waited)
                state.step = step
                if logs or evaluates or saves or self.device.type == "cpu":
                    self.distributed.wait_for_device(self.device)
                    self._read_step(int(stats.sequences))
                if step == self.first_step + 1 and self.device.type == "cuda" and not benchmark:
                    self.writer.prepare(state.capture())
                bar.update(state.step - bar.n)

                state.raw_train_seconds += time.perf_counter() - started
                if logs:
                    self._log(sums, stats, batch, window, bar)
                if benchmark:
                    benchmark.count(stats, waited)
                else:
                    with window.paused():
                        if saves:
                            self._check_replicas()
                            self.save()
                        if evaluates:
                            self.log_evaluation()
                if stops:
                    break
            bar.close()
            if not benchmark:
                self._finish(stop.received)
            elif stop.received is None:
                state.read_clock()
                benchmark.log(
                    self.reporter, state.train_seconds, state.raw_train_seconds, self.final_loss
                )
        return 128 + signal.SIGINT if stop.received == signal.SIGINT else 0

    @contextlib.contextmanager
    def _compiling(self, stop: StopSignal) -> Iterator[None]:
        """Around a training step. If it is the first one and compiles, a signal ends it at once,
        since it takes long and nothing is lost, and an error says what to do.
        """
        if not self.parallel.model.is_compiled or self.state.step > self.first_step:
            yield
            return
        with stop.raising(), compilation_errors():
            yield

    def training_step(
        self, batch: StepBatch, stats: GlobalBatchStats, max_micro_batches: int | None = None
    ) -> dict[str, Tensor]:
        """Computes the gradients of the global batch's loss, summed over micro-batches and ranks.
        Returns this rank's sums. max_micro_batches: maximum over ranks; None with one rank.
        """
        parallel, count = self.parallel, max_micro_batches or len(batch.micro_batches)
        parallel.model.train()
        seed = seed_of_step(self.state.metadata.seed, batch.first_position, self.distributed.rank)
        torch.manual_seed(seed)
        micro_batches = batch.filled_to(count)
        forward = self.task.for_batch(micro_batches, parallel.plain_module, self.runtime, seed)
        step_sums: dict[str, Tensor] = {}
        for micro_batch in parallel.micro_batches(batch, count):
            with self.stopwatch.lap("forward"):
                with self.runtime.precision.context(self.device):
                    sums = forward.sums(parallel.module, parallel.inputs(micro_batch, self.device))
                loss = self.task.loss(sums, stats.sequences, stats.labelled_tokens)
            with self.stopwatch.lap("backward"):
                parallel.backward(loss, self.loss_scale.value)
            for name, value in sums.items():
                step_sums[name] = step_sums.get(name, 0.0) + value.detach()
        return step_sums

    def optimizer_step(self) -> None:
        """Updates the weights. If the gradients are not finite, only the loss scale changes."""
        update = (self.state.device_step - self.first_step).clamp(max=len(self.rates) - 1)
        self.learning_rate.copy_(self.rates.take(update))  # rates[update] would synchronize
        self.grad_norm, not_finite = self.parallel.step(
            self.optimizer, self.loss_scale.value, self.config.max_grad_norm
        )
        self.loss_scale.update(not_finite.float())
        self.state.device_step += ~not_finite
        if self.state.averages is not None:
            self.state.averages.update(not_finite)
        self.skipped_in_a_row.copy_(torch.where(not_finite, self.skipped_in_a_row + 1, 0))

    def _begin(self) -> None:
        if not self.config.benchmark:
            self.state.claim_folder(self.config.checkpoint_folder, self.config.record)
        self.reporter.log("PARAMETER", self.settings)
        self.reporter.log("PARAMETER", {"train_start": True})

    @property
    def is_evaluation_due(self) -> bool:
        """Whether this run resumes a checkpoint that is to be evaluated, which a stop may have
        prevented.
        """
        step, config = self.state.step, self.config
        if step == 0 or config.eval_steps == 0 or (self.best is not None and self.best.has(step)):
            return False
        return is_due(step, config.eval_steps, config.max_steps)

    @property
    def is_finished(self) -> bool:
        """Whether all updates are made, or early stopping has ended the run."""
        if self.best is not None and self.best.is_exhausted:
            return True
        return self.state.step >= self.config.max_steps

    def _new_window(self) -> MeasuringWindow:
        peak = peak_flops(self.device, self.runtime.precision.dtype)
        return MeasuringWindow(self.device, self.distributed.world_size, peak)

    def folder_moved(self) -> bool:
        """Whether the run's folder is not the one that it locked, on the main process."""
        return (
            self.state.lock is not None
            and self.state.lock.current_path() != self.config.checkpoint_folder
        )

    def _finish(self, stopped_by: int | None) -> None:
        self.writer.wait()
        state, folder, max_steps = self.state, self.config.checkpoint_folder, self.config.max_steps
        if self.writer.parent != folder:
            raise UserError(
                f"{folder} was renamed or removed while this run used it: step {state.step} is "
                f"saved in "
                f"{self.writer.parent}; move that back and rerun the same command"
            )
        reached = f"{state.metadata.phase}: step {state.step} of {max_steps}"
        if stopped_by is not None and state.step < max_steps:
            flags = state.metadata.arguments
            resumes = (
                flags.get("resume_from_checkpoint")
                or flags.get("last_step_of_checkpoint") == "auto"
            )
            reached += f", stopped by {signal.Signals(stopped_by).name}: rerun the same command"
            reached += " to resume" if resumes else " with --resume-from-checkpoint"
            reached += ", without --overwrite" if flags.get("overwrite") else ""
        state.read_clock()
        summary: dict[str, Any] = {"step": state.step}
        where = "nothing was to be saved"
        if state.step > 0 or self.config.save_initial:
            summary["checkpoint"] = str(folder / str(state.step))
            where = f"checkpoint in {summary['checkpoint']}"
        if self.final_loss is not None:
            summary |= {
                "e2e_train_time": state.train_seconds,
                "raw_train_time": state.raw_train_seconds,
            }
            rate = state.samples_consumed / max(state.raw_train_seconds, 1e-9)
            summary |= {"training_sequences_per_second": rate, "final_loss": self.final_loss}
        self.reporter.log((), summary, f"{reached}; {where}")

    def _next(self, batches: Iterator[StepBatch]) -> StepBatch | UserError:
        """The next batch, or the error of this rank's data, which `_exchange` raises on all
        ranks.
        """
        try:
            return next(batches)
        except UserError as error:
            return error

    def _exchange(
        self, batch: StepBatch | UserError, wants_stop: Any
    ) -> tuple[GlobalBatchStats, int, bool]:
        """Reduces over ranks: the counts of the global batch, the maximum number of micro-batches,
        and whether any rank wants to stop. Raises UserError on all ranks if the data of one cannot
        be read.
        """
        counts, micro_batches, failed = (
            [0.0] * 4,
            [0] * self.distributed.world_size,
            isinstance(batch, UserError),
        )
        if not failed:
            flops = self.parallel.model.training_flops(
                batch.sequence_lengths, batch.num_labelled.sum()
            )
            counts = [len(batch.lengths), batch.lengths.sum(), batch.num_labelled.sum(), flops]
            micro_batches[self.distributed.rank] = len(batch.micro_batches)
        values = self.distributed.all_reduce_sum(
            [*map(float, counts), failed, bool(wants_stop), *micro_batches]
        )
        failures, stop, *micro_batches = values[len(counts) :]
        if failures:
            self.all_ranks_fail = True
            raise batch if failed else PeerError("another process cannot read its data")
        return GlobalBatchStats(*values[: len(counts)]), int(max(micro_batches)), stop > 0

    def _read_step(self, global_batch_size: int) -> None:
        """Reads the number of updates from the device. Raises UserError after too many skipped
        steps in a row.
        """
        state = self.state
        state.step, skipped = torch.stack([state.device_step, self.skipped_in_a_row]).tolist()
        if skipped < self.config.max_skipped_steps:
            return
        first, last = (
            state.samples_consumed - skipped * global_batch_size,
            state.samples_consumed - 1,
        )
        advice = (
            f"lower --learning-rate, or look at that data; checkpoints are in "
            f"{self.config.checkpoint_folder}"
        )
        if any(self.distributed.all_reduce_sum([not self._weights_are_finite()])):
            advice = (
                "the weights are not finite either and are not saved; resume earlier, with a lower "
                "--learning-rate"
            )
        raise UserError(
            f"the loss or its gradient was not finite in {skipped} steps in a row, over the sample "
            f"positions {first} "
            f"to {last}, after update {state.step} (loss scale {float(self.loss_scale.value):g}): "
            f"{advice}"
        )

    def _weights_are_finite(self) -> bool:
        """Whether this rank's weights are finite."""
        return all(bool(torch.isfinite(p).all()) for p in self.parallel.named_parameters().values())

    def _log(
        self,
        sums: dict[str, Tensor],
        stats: GlobalBatchStats,
        batch: StepBatch,
        window: MeasuringWindow,
        bar,
    ):
        values = torch.stack([value.double() for value in sums.values()]).tolist()
        metrics = self._metrics(dict(zip(sums, values, strict=True)), stats) | batch.metrics
        metrics["learning_rate"] = float(self.learning_rate)
        metrics["grad_norm"] = float(self.grad_norm)
        self.freed_memory.bound()
        if self.runtime.precision.needs_loss_scale:
            metrics["loss_scale"] = float(self.loss_scale.value)
        metrics.update(window.metrics())
        window.restart()
        self.final_loss = self.results["loss"] = metrics["loss"]
        left = format_duration(metrics["step_seconds"] * (bar.total - self.state.step))
        text = f"{self._place()}  {format_metrics(step_metrics(metrics))}  {left} left"
        nvidias = {"step_cost": metrics["step_seconds"], "step_samples": stats.sequences}
        nvidias["seqs_per_sec"] = metrics["sequences_per_second"]
        self.reporter.log(self._log_step(), metrics | nvidias, text)
        bar.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)

    def _metrics(self, sums: dict[str, float], stats: GlobalBatchStats) -> dict[str, float]:
        """The task's metrics of a global batch from this rank's sums."""
        summed = dict(zip(sums, self.distributed.all_reduce_sum([*sums.values()]), strict=True))
        return self.task.metrics(summed, stats.sequences, stats.labelled_tokens)

    def _log_start(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """Logs the starting weights' losses, without dropout: of the first batch and of held-out
        data.
        """
        batch = self._next(batches)
        stats, max_micro_batches, _ = self._exchange(batch, False)
        filled = batch.filled_to(max_micro_batches)
        with self.parallel.eager():  # a graph for one batch is not worth its compilation
            sums = sums_without_dropout(self.parallel, self.task.sums, filled, self.runtime)
            metrics = self._metrics(sums, stats)
        text = (
            f"{self._place()}  before the first update, without dropout: {format_metrics(metrics)}"
        )
        self.reporter.log(self._log_step(), metrics, text)
        if self.evaluator is not None:
            self.log_evaluation()
        return itertools.chain([batch], batches)

    def log_evaluation(self) -> None:
        """Evaluates the weights, and their average, and keeps the model if it is the best."""
        scores = self.evaluator(self.parallel)
        metrics, text = scores, f"{self._place()}  evaluation: {format_metrics(scores)}"
        if self.state.averages is not None and self.state.step > 0:
            self.state.averages.exchange()
            try:
                averaged = self.evaluator(self.parallel)
            finally:
                self.state.averages.exchange()
            metrics = metrics | {f"ema_{name}": value for name, value in averaged.items()}
            text += f"  of the average: {format_metrics(averaged)}"
        named = {f"eval_{name}": value for name, value in metrics.items()}
        self.reporter.log(self._log_step(), named, text)
        self.results |= named
        if self.best is not None:
            self._keep_best(self.best, scores)

    def _keep_best(self, best: BestCheckpoint, scores: dict[str, float]) -> None:
        step, config = self.state.step, self.config
        if step == 0 or (step % config.eval_steps and step < config.max_steps):
            # Skipped updates only, or the end of --steps-this-run, where an uninterrupted run does
            # not evaluate.
            return
        if not best.add(step, scores):
            return
        if best.is_exhausted or best.newest_is_best:
            self.save()
            self.writer.wait()

        def write() -> None:
            if not self.folder_moved():  # else the run stops
                best.write(self.state.metadata.files)

        self.distributed.on_main(write)

    def _log_step(self) -> tuple[int, int]:
        """The epoch, counted from 0, and the number of the last update."""
        state = self.state
        return max(state.samples_consumed - 1, 0) // state.metadata.num_samples, state.step

    def _place(self) -> str:
        return f"{self.state.metadata.phase}  step {self.state.step}/{self.config.max_steps}"

    def save(self) -> None:
        """Passes the state to the background writer, unless this step is already saved. Called on
        all ranks.
        """
        if self.state.step == self.saved_step:
            return
        self.saved_step = self.state.step
        self.state.read_clock()
        if self.writer.is_writer:
            self.writer.finish()  # before the folder is looked for, which may go away meanwhile
            self.writer.move_to(self.state.current_folder(self.config.checkpoint_folder))
            self.writer.write(self.state.capture())

    def _check_replicas(self) -> None:
        """Warns if ranks that hold the same rows have different weights. Raises UserError on all
        ranks if these differ by more than rounding; then they are not saved.
        """
        if self.distributed.world_size == 1:
            return
        found, _ = self.distributed.gather_rows(
            torch.tensor([self.parallel.rows_checksum()], dtype=torch.float64)
        )
        copies = [found[found[:, 0] == place] for place in found[:, 0].unique()]
        if all((same[:, 1] == same[0, 1]).all() for same in copies):
            return
        what = f"step {self.state.step}: the copies of the weights on different processes"
        if all(same[:, 2].max() < 1.001 * same[:, 2].min() for same in copies):
            self.reporter.log(
                (), {}, f"warning: {what} differ by rounding, as on machines of different kinds"
            )
            return
        self.saved_step = self.state.step
        raise UserError(
            f"{what} are not equal, as after an error of a GPU: resume from the checkpoint before "
            f"it, without the "
            f"machine that is faulty"
        )

    @contextlib.contextmanager
    def _save_on_error(self) -> Iterator[None]:
        """On UserError (damaged data, a rank that failed), saves the last completed step and
        re-raises. Between two updates and inside one, the state is that of the last update. A
        sharded state can be saved only if all ranks come here; that of GPUs cannot if their
        collectives are aborted because a rank failed.
        """
        try:
            with translate_peer_failure():
                yield
        except UserError as error:
            if isinstance(error, RankFailure) and self.device.type == "cuda":
                raise
            self.state.step = int(self.state.device_step)
            saves = not self.config.benchmark and (
                self.all_ranks_fail or self.parallel.shard_group is None
            )
            is_finite = not saves or self._weights_are_finite()
            if self.all_ranks_fail:
                is_finite = not any(self.distributed.all_reduce_sum([not is_finite]))
            if saves and is_finite:
                self.save()
                self.writer.wait()
            raise
        finally:
            self.writer.finish()


def is_due(step: int, every: int, last_step: int) -> bool:
    """Whether `step` is a multiple of `every`, or the last step."""
    return (every > 0 and step % every == 0) or step >= last_step


def seed_of_step(seed: int, position: int, rank: int) -> int:
    """The random seed of one step on one rank: a function of the run's seed and the position in the
    data.
    """
    digest = hashlib.sha256(f"{seed}/{position}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
