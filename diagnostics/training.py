"""The doctor's checks of a run: data, folder, overfitting of one batch, time per update, and losses.

Updates use the production trainer. Legend: n samples.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoint.identity import check_record
from checkpoint.state import find_start
from data_loading.loader import StepBatch, make_step_batch
from data_loading.packing import MicroBatchLimits
from diagnostics.estimates import MemorySettings, RunSize, devices_line, format_time, time_line
from diagnostics.machine import Findings, needed_and_free_memory
from metrics import RecordingSink, Reporter
from parallel.runtime import Runtime
from reporting.records import has_records, read_runs
from run_config import OptimizerConfig, ScheduleConfig, StartConfig
from run_setup import TrainingPlan
from tasks.pretraining import PretrainingDataset
from tokenizer import BertTokenizer
from utils.errors import UserError
from utils.progress import print_line

CHECKED_SAMPLES = 2000
UNKNOWN_WORDS = 0.05  # fraction of all tokens
# Overfitting: a small model of the same class, without dropout.
OVERFIT_SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
OVERFIT_TOKENS, OVERFIT_STEPS, OVERFIT_LOSS = 1024, 80, 0.3
# Time measurement: as many sequences as take about this time at a conservative speed.
MEASURED_SECONDS = 3.0
CPU_FLOPS_PER_THREAD, GPU_FLOPS = 40e9, 50e12
# Tolerances of the loss checks.
INITIAL_LOSS_BELOW, INITIAL_LOSS_ABOVE = 0.5, 1.0
FREQUENCY_LOSS_ABOVE, DIVERGED_ABOVE = 0.5, 1.0
SETTLED_STEP = 200  # by then, a run has learned word frequencies
LONG_RUN_SECONDS = 10 * 86400


# --- data and folder --------------------------------------------------------------------------------------------------


def check_data(findings: Findings, plan: TrainingPlan, _runtime: Runtime) -> None:
    """Reads and checks samples. Length, vocabulary and config were checked when `plan` was made."""
    dataset, vocab_file, indices = plan.dataset, plan.choice.vocab_file, sample_indices(plan)
    samples = dataset.read(indices)
    token_ids = samples.stream(np.arange(len(indices)))["input_ids"]
    unknown = float((token_ids == BertTokenizer(vocab_file).unk_token_id).mean())
    if unknown > UNKNOWN_WORDS:
        findings.report(
            "wrong",
            f"{unknown:.0%} of the tokens are [UNK]: the vocabulary or its casing does not fit the text: choose "
            f"another --vocab-file or casing",
        )
    updates = len(dataset) / plan.config.loader.global_batch_size
    text = (
        f"data: {len(dataset):,} samples, an epoch is {updates:,.1f} updates; in {len(indices):,} of them all ids are "
        f"in range, {unknown:.2%} of the tokens are unknown, and the mean length is {samples.lengths.mean():.0f}"
    )
    findings.report("ok", text)


def sample_indices(plan: TrainingPlan, count: int = CHECKED_SAMPLES) -> np.ndarray:
    """Up to `count` indices, evenly spaced over the data set."""
    return np.unique(np.linspace(0, len(plan.dataset) - 1, count).astype(np.int64))


def check_folder(findings: Findings, plan: TrainingPlan, _runtime: Runtime) -> None:
    """Checks that the run may write to its folder, and reports where it starts."""
    folder, record, start = plan.config.trainer.checkpoint_folder, plan.config.trainer.record, plan.config.start
    saves = record is not None and not start.overwrite
    if saves:
        check_record(folder, record, print_line)
    found = find_start(start, folder, saves)
    findings.report(
        "ok", f"starts from {found['checkpoint'] or found['weights'] or 'random weights'}; writes to {folder}"
    )


# --- training ---------------------------------------------------------------------------------------------------------


def train(
    plan: TrainingPlan, runtime: Runtime, steps: int, batches: Iterable[StepBatch]
) -> tuple[list[float], dict[str, Any]]:
    """Trains as with --benchmark, with a constant learning rate and without checkpoints. Returns the losses of `steps`
    updates, and the metrics of all but the first."""
    recorder, config = RecordingSink(), plan.config
    settings = replace(
        config.trainer, benchmark=True, benchmark_warmup_steps=1, benchmark_steps=steps - 1, record=None, log_freq=1
    )
    schedule = ScheduleConfig(config.trainer.max_steps, config.schedule.learning_rate, "constant")
    plan = replace(plan, config=replace(config, trainer=settings, schedule=schedule))
    trainer = plan.build_trainer(replace(runtime, reporter=Reporter([recorder])))
    trainer.train(batches)
    records = dict(recorder.records)
    if () not in records:  # stopped by a signal
        raise KeyboardInterrupt
    return [records[step]["loss"] for step in sorted(records.keys() - {(), "PARAMETER"})], records[()]


def batch_of(plan: TrainingPlan, count: int, batch_size: int) -> StepBatch:
    loader = replace(plan.config.loader, batch_size=batch_size)
    return make_step_batch(plan.dataset, sample_indices(plan, count), MicroBatchLimits.of(loader))


def check_overfitting(findings: Findings, plan: TrainingPlan, runtime: Runtime) -> None:
    """Checks that a small model of the run's class can overfit one batch of the run's data."""
    count = min(len(plan.dataset), max(4, OVERFIT_TOKENS // plan.config.loader.max_seq_length))
    small = replace(plan.choice.config, **OVERFIT_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = replace(
        plan.config,
        optimizer=OptimizerConfig("AdamW", weight_decay=0.0),
        schedule=replace(plan.config.schedule, learning_rate=3e-3),
        start=StartConfig(),
    )
    plan = replace(plan, choice=replace(plan.choice, config=small), config=config)
    losses, _ = train(plan, runtime, OVERFIT_STEPS, itertools.repeat(batch_of(plan, count, count)))
    text = f"a small model overfits {count} samples: loss {losses[0]:.2f} -> {losses[-1]:.3f} in {OVERFIT_STEPS} steps"
    if not losses[-1] < OVERFIT_LOSS:
        raise UserError(f"{text}, which should be near 0: the labels do not fit the inputs, or this device miscomputes")
    findings.report("ok", text)


def check_updates(
    findings: Findings,
    plan: TrainingPlan,
    runtime: Runtime,
    settings: MemorySettings,
    checkpoint_seconds: float | None,
) -> None:
    """Trains the real model for a few updates and checks the time, the first loss and the learning rate. Slow updates
    are measured on fewer sequences and scaled. settings: those of the run."""
    loader, trainer, processes = plan.config.loader, plan.config.trainer, settings.world_size
    per_process = -(-loader.global_batch_size // processes)
    measured = sequences_to_measure(plan, runtime, per_process)
    micro_batches = -(-measured // loader.batch_size)
    alone = replace(settings, parallel=runtime.parallel, world_size=1, micro_batches=micro_batches, saves=False)
    needed, free = needed_and_free_memory(plan.make_model(), alone)
    if needed > free:
        findings.report("warning", "time: not measured, because the model does not fit one process here")
        return
    weights = plan.config.start.from_phase1_final_params or plan.config.start.from_pretrained_params
    config = replace(plan.config, start=StartConfig(from_pretrained_params=weights))
    batch = batch_of(plan, measured, min(loader.batch_size, measured))
    losses, metrics = train(replace(plan, config=config), runtime, 3, itertools.repeat(batch))

    optimizer = metrics["optimizer_ms"] / 1e3
    measured = len(batch.lengths)  # fewer, if the data set is small
    update = (metrics["step_seconds"] - optimizer) * per_process / measured + optimizer
    per_sequence = metrics["model_tflops"] * 1e12 / metrics["sequences_per_second"]
    flops = per_sequence * loader.global_batch_size
    size = RunSize(trainer.max_steps, loader.global_batch_size, update, flops, runtime.device.type, processes)
    how = "measured" if measured == per_process else f"measured on {measured} of {per_process} sequences and scaled"
    how += ", without communication" if processes > 1 else ""
    is_long = size.seconds > LONG_RUN_SECONDS
    advice = f": use more devices, fewer steps or a smaller model; {devices_line(size)}" if is_long else ""
    findings.report("warning" if is_long else "ok", f"time: {time_line(size)} ({how}){advice}")
    if checkpoint_seconds is not None:
        interval = update * trainer.steps_per_checkpoint
        is_slow = checkpoint_seconds > interval
        text = f"a checkpoint takes {format_time(checkpoint_seconds)}, and one is due every {format_time(interval)}"
        advice = ": raise --num-steps-per-checkpoint, or choose a faster disk" if is_slow else ""
        findings.report("warning" if is_slow else "ok", f"{text}{advice}")
    check_first_loss(findings, plan, losses[0], has_weights=weights is not None)
    check_learning_rate(findings, plan, losses)


def sequences_to_measure(plan: TrainingPlan, runtime: Runtime, per_process: int) -> int:
    """Number of sequences that take about MEASURED_SECONDS; on a GPU at least a micro-batch; all if only slightly
    more."""
    loader, on_gpu = plan.config.loader, runtime.device.type == "cuda"
    flops = plan.make_model().training_flops([loader.max_seq_length], loader.max_predictions_per_seq)
    speed = GPU_FLOPS if on_gpu else CPU_FLOPS_PER_THREAD * torch.get_num_threads()
    count = max(loader.batch_size if on_gpu else 1, int(MEASURED_SECONDS * speed / flops))
    return per_process if 2 * count >= per_process else count


# --- losses -----------------------------------------------------------------------------------------------------------


def check_first_loss(findings: Findings, plan: TrainingPlan, loss: float, has_weights: bool) -> None:
    expected = plan.initial_loss
    text = f"the first loss is {loss:.2f}"
    if not math.isfinite(loss):
        raise UserError(f"{text}: use --amp-dtype bfloat16 or float32, and check the starting weights")
    if expected is not None and has_weights:
        text += f", that of random weights {expected:.2f}"
        if loss > expected + INITIAL_LOSS_ABOVE or (plan.config.loader.max_predictions_per_seq and loss > expected - 1):
            raise UserError(f"{text}: the starting weights do not know this data: check vocabulary, casing and folder")
    elif expected is not None:
        text += f", expected {expected:.2f} of random weights"
        if not expected - INITIAL_LOSS_BELOW <= loss <= expected + INITIAL_LOSS_ABOVE:
            raise UserError(f"{text}: check initializer_range and vocab_size in the config")
    findings.report("ok", text)


def check_learning_rate(findings: Findings, plan: TrainingPlan, losses: list[float]) -> None:
    """losses: of updates on one batch, all at the peak learning rate."""
    rate, shown = plan.config.schedule.learning_rate, ", ".join(f"{loss:.2f}" for loss in losses)
    text = f"at learning rate {rate:g} without warmup, the losses of one batch are {shown}"
    if not all(loss < losses[0] + DIVERGED_ABOVE for loss in losses):  # or NaN
        raise UserError(f"{text}: lower --learning-rate")
    findings.report("ok", text)


def check_run_losses(findings: Findings, plan: TrainingPlan, output_dir: Path, report_file: Path | None = None) -> None:
    """Checks the losses that the run has logged so far, if any."""
    losses = logged_losses(plan, output_dir, report_file)
    if not losses:
        findings.report("ok", f"no losses of this run are logged in {output_dir} yet")
        return
    step, last = losses[-1]
    lowest = min(finite := [loss for _, loss in losses if math.isfinite(loss)] or [math.nan])
    settled = max(plan.config.schedule.warmup_proportion * plan.config.trainer.max_steps, SETTLED_STEP)
    limit = frequency_loss(plan)
    text = f"the run's loss went from {losses[0][1]:.2f} at step {losses[0][0]} to {last:.2f} at step {step}"
    advice = "look at the report page, and lower --learning-rate"
    if not last <= lowest + DIVERGED_ABOVE:  # or NaN
        raise UserError(f"{text}: it diverges: {advice}")
    if plan.initial_loss is not None and max(finite) > plan.initial_loss + INITIAL_LOSS_ABOVE + 1:
        raise UserError(f"{text}, with {max(finite):.2f} between, far above that of random weights: {advice}")
    if limit is not None and step > settled and lowest > limit + FREQUENCY_LOSS_ABOVE:
        raise UserError(
            f"{text}, and by now it should be below {limit:.2f}, that of a model which only knows word frequencies: "
            f"check the data, or change --learning-rate"
        )
    known = "" if limit is None else f"; a model that only knows word frequencies has {limit:.2f}"
    findings.report("ok", f"{text}{known}")


def logged_losses(plan: TrainingPlan, output_dir: Path, report_file: Path | None) -> list[tuple[int, float]]:
    """The steps and losses in the log of this phase."""
    for path in filter(None, (output_dir, report_file)):
        for stage in (stage for run in read_runs([path]) for stage in run.stages) if has_records(path) else ():
            is_same_folder = Path(stage.settings.get("output_dir", "")).absolute() == output_dir.absolute()
            if is_same_folder and stage.name == plan.config.metadata.phase:
                return [(point.step, point.metrics["loss"]) for point in stage.points if "loss" in point.metrics]
    return []


def frequency_loss(plan: TrainingPlan) -> float | None:
    """The loss of a model that predicts token frequencies: the entropy of the labels with the Miller-Madow correction
    for n labels, plus ln 2 for next-sentence prediction."""
    dataset, indices = plan.dataset, sample_indices(plan)
    if not isinstance(dataset, PretrainingDataset):
        return None
    labels = dataset.rows("masked_lm_ids", indices)[dataset.rows("masked_lm_positions", indices) > 0]
    counts = np.bincount(labels.astype(np.int64).ravel())
    counts = counts[counts > 0]
    share = counts / counts.sum()
    entropy = float(-(share * np.log(share)).sum()) + (len(counts) - 1) / (2 * counts.sum())
    return entropy + (math.log(2) if dataset.has_next_sentence else 0.0)
