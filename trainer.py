"""The optimizer-step loop that pre-training and fine-tuning share: accumulate, clip, step, log, checkpoint, stop.

A run is exact to resume because nothing in it depends on what came before but the weights, the optimizer's state and
one integer: the samples consumed. The data's order is a function of it, and so is the random state of each step.

On a GPU no step makes the host wait: learning rate, loss scale and the number of updates live on the device, and are
read where something is logged or saved.
"""

import contextlib
import hashlib
import platform
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modeling import training_flops
from optimizer import LossScale, MasterWeights, apply_step, total_norm
from token_stream import Limits, StepBatch, StreamDataset, stream_in_order
from utils import checkpoint as checkpoints
from utils.distributed import Precision, Processes, others_may_end, peak_flops
from utils.errors import UserError
from utils.logger import Reporter, duration, metrics_text
from utils.measure import Stopwatch, peak_memory_bytes, synchronize
from utils.progress import print_line, progress_bar


class Task(Protocol):
    """What is being learned."""

    def sums(self, model: nn.Module, micro_batch: dict[str, Any]) -> dict[str, Tensor]:
        """Forward pass: named sums over the micro-batch, scalars on the device."""

    def loss(self, sums: dict[str, Tensor], num_sequences: float, num_targets: float) -> Tensor:
        """The sums' share in the loss of a batch with that many sequences and targets in all."""

    def metrics(self, sums: dict[str, float], num_sequences: float, num_targets: float) -> dict[str, float]:
        """What to log of the sums over a whole batch, `loss` first."""


@dataclass(frozen=True)
class Settings:
    """What a run is to do, apart from what it learns."""

    max_steps: int
    checkpoint_folder: Path
    steps_this_run: int | None = None
    seed: int = 42
    max_grad_norm: float = 1.0
    max_skipped_steps: int = 25
    log_freq: int = 10
    steps_per_checkpoint: int = 100
    eval_steps: int = 0
    benchmark: bool = False
    benchmark_steps: int = 20
    benchmark_warmup_steps: int = 20
    model_prefix: str = "model"


@dataclass(frozen=True)
class Provenance:
    """What a checkpoint folder holds besides the run's state."""

    phase: str
    arguments: dict[str, Any]
    num_samples: int
    vocab_file: Path
    do_lower_case: bool


@dataclass(frozen=True)
class Runtime:
    """Where and how a run computes, and where it reports."""

    device: torch.device
    precision: Precision
    processes: Processes
    reporter: Reporter


@dataclass
class Totals:
    """Counts of one global batch, or of several, over all ranks."""

    sequences: float = 0
    tokens: float = 0
    targets: float = 0
    flops: float = 0
    micro_batches: float = 0
    stop: float = 0

    def __iadd__(self, other: "Totals") -> "Totals":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


class StopSignal:
    """Turns SIGTERM and SIGINT into a request that the loop honours after the step at hand. A second SIGINT ends the
    program at once."""

    def __init__(self):
        self.received: int | None = None
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGTERM, signal.SIGINT):
            self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = number


class Trainer:
    """Trains `model` on the batches of `loader`; `step` updates are made so far, from `samples_consumed` samples."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: torch.optim.Optimizer,
        learning_rate: Tensor,
        schedule: Callable[[int], float],
        settings: Settings,
        provenance: Provenance,
        runtime: Runtime,
        loss_scale: LossScale | None = None,
        masters: MasterWeights | None = None,
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    ):
        self.model, self.task, self.optimizer = model, task, optimizer
        self.settings, self.provenance = settings, provenance
        self.runtime, self.device = runtime, runtime.device
        self.precision, self.processes, self.reporter = runtime.precision, runtime.processes, runtime.reporter
        self.loss_scale = loss_scale or LossScale(1.0, dynamic=False, device=self.device)
        self.masters = masters
        self.evaluate = evaluate
        self.learning_rate = learning_rate
        self.schedule = torch.tensor(
            [schedule(k) for k in range(settings.max_steps + 1)], dtype=torch.float32, device=self.device
        )
        self.replica = replicate(model, self.device, self.processes)
        self.writer = checkpoints.CheckpointWriter(settings.checkpoint_folder)
        self.stopwatch = Stopwatch(self.device, enabled=settings.benchmark)
        self.step = self.saved_step = 0
        self.samples_consumed = 0
        self.device_step = torch.zeros((), dtype=torch.int64, device=self.device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=self.device)
        self.grad_norm = torch.zeros((), device=self.device)

    # --- the loop ---

    def train(self, loader: Iterable[StepBatch]) -> int:
        """Trains to `max_steps` (or as far as this run is to go) and returns the process's exit code."""
        settings, last_step = self.settings, self._last_step()
        self._begin()
        batches, meter = iter(loader), Meter(self)
        with StopSignal() as stop, self._progress_bar(last_step) as bar, self._nothing_is_lost():
            while self.step < last_step:
                with meter.waiting_for_data():
                    batch = next(batches)
                totals = self._totals(batch, stop.received is not None or self.writer.error is not None)
                self.step += 1  # until `_read_back` knows better
                logs = is_due(self.step, settings.log_freq, last_step)
                evaluates = settings.eval_steps > 0 and is_due(self.step, settings.eval_steps, last_step)
                saves = totals.stop > 0 or is_due(self.step, settings.steps_per_checkpoint, last_step)

                sums = self.training_step(batch, totals)
                with self.stopwatch.lap("optimizer"):
                    self.optimizer_step()
                self.samples_consumed += int(totals.sequences)
                meter.count(totals)
                if logs or evaluates or saves or self.device.type == "cpu":
                    self._read_back(int(totals.sequences))
                bar.update(self.step - bar.n)

                if logs:
                    self._log(sums, totals, meter, bar)
                if settings.benchmark:
                    if meter.start_after(settings.benchmark_warmup_steps):
                        self.stopwatch.seconds()
                else:
                    with meter.paused():
                        if evaluates:
                            self._log_evaluation()
                        if saves:
                            self.save()
                if totals.stop:
                    break
            bar.close()
            self._finish(stop.received, meter)
        return 128 + signal.SIGINT if stop.received == signal.SIGINT else 0

    def training_step(self, batch: StepBatch, totals: Totals) -> dict[str, Tensor]:
        """Gradients of the global batch's loss, summed over micro-batches and ranks; returns this rank's sums."""
        self.model.train()
        torch.manual_seed(seed_of_step(self.settings.seed, batch.first_position, self.processes.rank))
        step_sums: dict[str, Tensor] = {}
        # DDP sums the model's own gradients over ranks; a 16-bit model's, of several micro-batches, are in its masters.
        all_reduce_masters = self.masters is not None and totals.micro_batches > self.processes.world_size > 1
        for number, micro_batch in enumerate(batch.micro_batches, 1):
            is_last = number == len(batch.micro_batches)
            with self._gradients_stay_here(all_reduce_masters or not is_last):
                with self.stopwatch.lap("forward"):
                    with self.precision.context(self.device):
                        sums = self.task.sums(self.replica, to_device(micro_batch, self.device))
                    loss = self.task.loss(sums, totals.sequences, totals.targets)
                with self.stopwatch.lap("backward"):
                    (loss * self.loss_scale.value).backward()
                    if self.masters is not None:
                        self.masters.add_gradients()
            for name, value in sums.items():
                step_sums[name] = step_sums.get(name, 0.0) + value.detach()
        if all_reduce_masters:
            for work in [dist.all_reduce(grad, async_op=True) for grad in self._gradients()]:
                work.wait()
        return step_sums

    def optimizer_step(self) -> None:
        """Unscales, clips and steps; where the gradient is not finite, nothing moves but the loss scale."""
        self.grad_norm = total_norm(self._gradients()) / self.loss_scale.value
        not_finite = ~torch.isfinite(self.grad_norm)
        clip = (self.grad_norm / self.settings.max_grad_norm).clamp(min=1.0)
        # Not schedule[...], which reads an index without dimensions on the host.
        self.learning_rate.copy_(self.schedule.take(self.device_step.clamp(max=len(self.schedule) - 1)))
        apply_step(self.optimizer, self.loss_scale.value * clip, not_finite.float())
        if self.masters is not None:
            self.masters.push_weights()
        self.optimizer.zero_grad()
        self.loss_scale.update(not_finite.float())
        self.device_step += ~not_finite
        self.skipped_in_a_row.copy_(torch.where(not_finite, self.skipped_in_a_row + 1, 0))

    # --- its parts ---

    def _begin(self) -> None:
        if self.processes.is_main:
            if not self.settings.benchmark:
                checkpoints.prepare_folder(self.settings.checkpoint_folder)
                # Weights and two moments, in float32.
                num_bytes = 12 * sum(p.numel() for p in self.model.parameters())
                self.writer.reserve(num_bytes, pinned=self.device.type == "cuda")
            self.reporter.log("PARAMETER", self.provenance.arguments)

    def _last_step(self) -> int:
        if self.settings.benchmark:
            return self.step + self.settings.benchmark_warmup_steps + self.settings.benchmark_steps
        if self.settings.steps_this_run is None:
            return self.settings.max_steps
        return min(self.settings.max_steps, self.step + self.settings.steps_this_run)

    def _progress_bar(self, last_step: int):
        return progress_bar(
            last_step, self.provenance.phase, "step", self.step, enabled=self.processes.is_main, lines=False
        )

    def _totals(self, batch: StepBatch, stop: bool) -> Totals:
        flops = training_flops(self.model.config, batch.lengths, batch.num_targets)
        counts = [batch.num_sequences, batch.num_tokens, batch.num_targets, flops, len(batch.micro_batches), stop]
        return Totals(*self.processes.all_sum(counts))

    def _gradients(self) -> list[Tensor]:
        return [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _gradients_stay_here(self, stay: bool):
        if stay and isinstance(self.replica, DistributedDataParallel):
            return self.replica.no_sync()
        return contextlib.nullcontext()

    def _read_back(self, global_batch_size: int) -> None:
        """Learns from the device how many updates were made, and gives up after too many skips in a row."""
        self.step, skipped = torch.stack([self.device_step, self.skipped_in_a_row]).tolist()
        if skipped < self.settings.max_skipped_steps:
            return
        first = self.samples_consumed - skipped * global_batch_size
        advice = (
            f"lower --learning-rate, or look at that data; checkpoints are in {self.settings.checkpoint_folder}"
            if self._weights_are_finite()
            else "the weights are not finite either and are not saved; go on from an earlier checkpoint or other "
            "weights, with a lower --learning-rate"
        )
        raise UserError(
            f"the loss or its gradient was not finite in {skipped} steps in a row, over the sample positions {first} "
            f"to {self.samples_consumed - 1}, after update {self.step} (loss scale {float(self.loss_scale.value):g}): "
            f"{advice}"
        )

    @contextlib.contextmanager
    def _nothing_is_lost(self):
        """Saves what was learned when the run ends in an error that is not the program's own: damaged data, another
        process that has ended. Between any two updates, and in the middle of one, the state is that of the last."""
        try:
            with others_may_end():
                yield
        except UserError:
            self.step = int(self.device_step)
            if not self.settings.benchmark and self._weights_are_finite():
                self.save()
                self.writer.wait()
            raise

    def _weights_are_finite(self) -> bool:
        return all(bool(torch.isfinite(p).all()) for p in self.model.parameters())

    def _log(self, sums: dict[str, Tensor], totals: Totals, meter: "Meter", bar) -> None:
        values = torch.stack([value.double() for value in sums.values()]).tolist()
        summed = dict(zip(sums, self.processes.all_sum(values), strict=True))
        metrics = self.task.metrics(summed, totals.sequences, totals.targets)
        metrics["learning_rate"] = float(self.learning_rate)
        metrics["grad_norm"] = float(self.grad_norm)
        if self.precision.needs_loss_scale:
            metrics["loss_scale"] = float(self.loss_scale.value)
        metrics.update(meter.read())
        left = duration(metrics["step_seconds"] * (bar.total - self.step))
        self.reporter.log((self.step,), metrics, f"{self._place()}  {metrics_text(metrics)}  {left} left")
        bar.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)

    def _log_evaluation(self) -> None:
        metrics = self.evaluate(self.model)
        text = f"{self._place()}  evaluation: {metrics_text(metrics)}"
        self.reporter.log((self.step,), {f"eval_{name}": value for name, value in metrics.items()}, text)

    def _place(self) -> str:
        return f"step {self.step}/{self.settings.max_steps}"

    def _finish(self, stopped_by: int | None, meter: "Meter") -> None:
        if self.settings.benchmark:
            if stopped_by is None:
                figures = meter.read_all() | self.stopwatch.medians_in_milliseconds(meter.whole_steps)
                text = f"benchmark of {meter.whole_steps} steps: {metrics_text(figures)}"
                self.reporter.log((), figures, text)
            return
        self.writer.wait()
        folder = self.settings.checkpoint_folder / str(self.step)
        reached = f"{self.provenance.phase}: step {self.step} of {self.settings.max_steps}"
        if stopped_by is not None and self.step < self.settings.max_steps:
            reached += f", stopped by {signal.Signals(stopped_by).name}: the same command goes on from here"
        self.reporter.log((), {"step": self.step, "checkpoint": str(folder)}, f"{reached}; checkpoint in {folder}")

    # --- state ---

    def save(self) -> None:
        """Hands the run's state to the background writer; only the main process writes."""
        if not self.processes.is_main or self.step == self.saved_step:
            return
        self.saved_step = self.step
        config = {"architectures": [type(self.model).__name__], "model_type": "bert", **self.model.config.to_dict()}
        self.writer.write(
            checkpoints.Checkpoint(
                step=self.step,
                model=self._weights(),
                config=config,
                optimizer=self._optimizer_tensors(),
                progress=self._progress(),
                vocab_file=self.provenance.vocab_file,
                do_lower_case=self.provenance.do_lower_case,
                prefix=self.settings.model_prefix,
            )
        )

    def _progress(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "samples_consumed": self.samples_consumed,
            "phase": self.provenance.phase,
            "seed": self.settings.seed,
            "random_state": "torch.manual_seed(seed_of_step(seed, samples_consumed, rank)) before each step",
            "num_samples": self.provenance.num_samples,
            "world_size": self.processes.world_size,
            "optimizer": type(self.optimizer).__name__,
            "optimizer_step": [group.get("step") for group in self.optimizer.param_groups],
            "loss_scale": self.loss_scale.state_dict(),
            "arguments": self.provenance.arguments,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }

    def load_weights(self, folder: Path, tell: Callable[[str], None] = print_line) -> None:
        """Takes the weights in a checkpoint or model folder, and nothing else."""
        tensors = checkpoints.read_tensors(folder / checkpoints.MODEL_FILE)
        checkpoints.check_same_kind(folder, self.model.config.to_dict(), self.provenance.vocab_file)
        checkpoints.load_weights(self.model, tensors, folder, tell)
        if self.masters is not None:  # these take what the model's narrower type would have rounded
            given = checkpoints.canonical_names(tensors, self.model)
            with torch.no_grad():
                for name, p in self.masters.named_parameters():
                    if name in given:
                        p.copy_(self._fill(given[name], p))

    def resume(self, folder: Path) -> None:
        """Goes on from a checkpoint folder: weights, optimizer, schedule, loss scale and data position."""
        prefix = self.settings.model_prefix
        progress = checkpoints.read_progress(folder, prefix)
        if progress["phase"] != self.provenance.phase:
            raise UserError(
                f"checkpoint {folder} is of {progress['phase']}, and this is {self.provenance.phase}: to start from "
                f"its weights, give it to --from-phase1-final-params or --from-pretrained-params instead"
            )
        if progress["optimizer"] != type(self.optimizer).__name__:
            raise UserError(
                f"checkpoint {folder} was made with {progress['optimizer']}, not {type(self.optimizer).__name__}: "
                f"use the same --optimizer, or take only its weights with --from-pretrained-params"
            )
        self.load_weights(folder)
        self._load_optimizer(checkpoints.read_optimizer(folder, prefix), progress, folder)
        self.loss_scale.load_state_dict(progress["loss_scale"])
        self.step = self.saved_step = progress["step"]
        self.device_step.fill_(self.step)
        self.samples_consumed = progress["samples_consumed"]
        if not self.processes.is_main:
            return
        print_line(f"resumed from {folder}: step {self.step}, {self.samples_consumed} samples consumed")
        for what, now, then in [
            ("--seed", self.settings.seed, progress["seed"]),
            ("the number of samples", self.provenance.num_samples, progress["num_samples"]),
        ]:
            if now != then:
                print_line(f"warning: {what} was {then} and is {now} now: samples come in another order from here on")

    def _weights(self) -> dict[str, Tensor]:
        """The model's float32 weights under their names."""
        if self.masters is None:
            return self.model.state_dict()
        return {name: self._cut(name, p) for name, p in self.masters.named_parameters()}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": self._cut(name, value)
            for name, p in self._named_parameters()
            for key, value in self.optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor)
        }

    def _load_optimizer(self, tensors: dict[str, Tensor], progress: dict[str, Any], folder: Path) -> None:
        parameters = dict(self._named_parameters())
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition(".")
            if name not in parameters:
                raise UserError(
                    f"checkpoint {folder}: the optimizer's {full_name} belongs to no parameter of the model"
                )
            p = parameters[name]
            self.optimizer.state[p][key] = self._fill(tensor, p).to(p.device, copy=True)
        for group, step in zip(self.optimizer.param_groups, progress["optimizer_step"], strict=True):
            if step is not None:
                group["step"] = step

    def _named_parameters(self):
        return self.model.named_parameters() if self.masters is None else self.masters.named_parameters()

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        """Leaves out the vocabulary's filler rows, which exist in memory only."""
        config = self.model.config
        if name.endswith("word_embeddings.weight") and tensor.dim() == 2:
            return tensor[: config.vocab_size]
        return tensor

    @staticmethod
    def _fill(tensor: Tensor, like: Tensor) -> Tensor:
        if tensor.dim() == 2 and len(tensor) < len(like):
            return F.pad(tensor, (0, 0, 0, len(like) - len(tensor)))
        return tensor


class Meter:
    """Speed since the last reading: sequences, real tokens and model FLOPs a second, and the share of time in which
    the loop waited for data. Time in `paused` (evaluation, checkpoints) counts for nothing."""

    def __init__(self, trainer: Trainer):
        self.device, self.world_size = trainer.device, trainer.processes.world_size
        self.peak = peak_flops(trainer.device, trainer.precision)
        self.steps_seen = 0
        self._restart()
        self.whole_started, self.whole, self.whole_steps = time.perf_counter(), Totals(), 0
        self.whole_waited = 0.0

    def _restart(self) -> None:
        self.started, self.waited, self.steps, self.totals = time.perf_counter(), 0.0, 0, Totals()

    @contextlib.contextmanager
    def waiting_for_data(self):
        before = time.perf_counter()
        yield
        waited = time.perf_counter() - before
        self.waited += waited
        self.whole_waited += waited

    @contextlib.contextmanager
    def paused(self):
        before = time.perf_counter()
        yield
        self.started += time.perf_counter() - before

    def count(self, totals: Totals) -> None:
        self.totals += totals
        self.whole += totals
        self.steps += 1
        self.whole_steps += 1
        self.steps_seen += 1

    def start_after(self, warmup_steps: int) -> bool:
        """Forgets everything once `warmup_steps` have been made; says whether this was the moment."""
        if self.steps_seen != warmup_steps:
            return False
        synchronize(self.device)
        self.whole_started, self.whole, self.whole_steps = time.perf_counter(), Totals(), 0
        self.whole_waited = 0.0
        return True

    def read(self) -> dict[str, float]:
        figures = self._figures(self.totals, self.steps, time.perf_counter() - self.started)
        figures["data_wait"] = self.waited / max(time.perf_counter() - self.started, 1e-9)
        self._restart()
        return figures

    def read_all(self) -> dict[str, float]:
        """The figures since the start, or since `start_after`."""
        synchronize(self.device)
        seconds = time.perf_counter() - self.whole_started
        figures = self._figures(self.whole, self.whole_steps, seconds)
        figures["data_wait"] = self.whole_waited / max(seconds, 1e-9)
        if (peak_memory := peak_memory_bytes(self.device)) is not None:
            figures["peak_memory_gib"] = peak_memory / 2**30
        return figures

    def _figures(self, totals: Totals, steps: int, seconds: float) -> dict[str, float]:
        figures = {
            "step_seconds": seconds / max(steps, 1),
            "sequences_per_second": totals.sequences / seconds,
            "tokens_per_second": totals.tokens / seconds,
            "model_tflops": totals.flops / seconds / 1e12 / self.world_size,
        }
        if self.peak is not None:
            figures["utilization"] = totals.flops / seconds / self.world_size / self.peak
        if self.device.type == "cuda":
            figures["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return figures


def replicate(model: nn.Module, device: torch.device, processes: Processes) -> nn.Module:
    """`model` as one of several replicas whose gradients are summed (not averaged: losses are divided by global
    counts already); the model itself in a run of one process."""
    if processes.world_size == 1:
        return model
    device_ids = [device.index] if device.type == "cuda" else None
    replica = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)

    def sum_gradients(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda reduced: reduced.value()[0])

    replica.register_comm_hook(None, sum_gradients)
    return replica


def is_due(step: int, every: int, last_step: int) -> bool:
    """Whether `step` is one of every `every`, or the last."""
    return (every > 0 and step % every == 0) or step >= last_step


def seed_of_step(seed: int, position: int, rank: int) -> int:
    """The random state of one step on one rank, as a function of where the data is."""
    digest = hashlib.sha256(f"{seed}/{position}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def to_device(micro_batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in micro_batch.items()
    }


@torch.no_grad()
def evaluate(
    model: nn.Module, task: Task, dataset: StreamDataset, limits: Limits, runtime: Runtime
) -> dict[str, float]:
    """The task's metrics over all of `dataset`, without dropout, each rank taking its share."""
    device, processes = runtime.device, runtime.processes
    model.eval()
    mine = np.arange(processes.rank, len(dataset), processes.world_size)
    sums: dict[str, float] = {}
    sequences = targets = 0
    with progress_bar(len(mine), "evaluation", "sequence", enabled=processes.is_main) as bar:
        for batch in stream_in_order(dataset, mine, limits):
            for micro_batch in batch.micro_batches:
                with runtime.precision.context(device):
                    found = task.sums(model, to_device(micro_batch, device))
                for name, value in found.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
            sequences += batch.num_sequences
            targets += batch.num_targets
            bar.update(batch.num_sequences)
    sequences, targets, *values = processes.all_sum([sequences, targets, *sums.values()])
    return task.metrics(dict(zip(sums, values, strict=True)), sequences, targets)
