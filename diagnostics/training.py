"""The doctor's checks of a run: its data, its folder, a batch to overfit, the time of an update, and its losses.

Legend: V vocabulary, n samples, P predictions per sequence.
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
from device import Runtime
from diagnostics.machine import Findings, needed_and_free_memory
from diagnostics.memory import MemorySettings
from diagnostics.run_time import RunSize, devices_line, format_time, time_line
from metrics import RecordingSink, Reporter, Step, training_flops
from model_choice import is_uncased
from reporting.records import Stage, has_records, read_runs
from run_config import OptimizerConfig, ScheduleConfig, StartConfig
from run_setup import TrainingPlan
from tasks.pretraining import PretrainingDataset
from tokenizer import BertTokenizer
from utils.command_line import Arguments
from utils.progress import print_line

CHECKED_SAMPLES = 2000
UNKNOWN_WORDS = 0.05  # share of all tokens
# A batch to overfit: a small model of the same class, without dropout.
OVERFIT_SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
OVERFIT_TOKENS, OVERFIT_STEPS, OVERFIT_LOSS = 1024, 80, 0.3
# What an update is measured on: as many sequences as take about this time at a cautious speed.
MEASURED_SECONDS = 3.0
CPU_FLOPS_PER_THREAD, GPU_FLOPS = 40e9, 50e12
# Tolerances of the loss checks.
INITIAL_LOSS_BELOW, INITIAL_LOSS_ABOVE = 0.5, 1.0
FREQUENCY_LOSS_ABOVE, DIVERGED_ABOVE = 0.5, 1.0
SETTLED_STEP = 200  # from here on, a run has learned word frequencies
LONG_RUN_SECONDS = 10 * 86400


# --- data and folder --------------------------------------------------------------------------------------------------


def check_data(findings: Findings, plan: TrainingPlan) -> None:
    """Length, vocabulary and config were checked when `plan` was made; this reads samples."""
    dataset, choice = plan.dataset, plan.choice
    indices = sample_indices(plan)
    samples = dataset.read(indices)
    token_ids = samples.stream(np.arange(len(indices)))["input_ids"]
    unknown = float((token_ids == BertTokenizer(choice.vocab_file).unk_token_id).mean())
    if unknown > UNKNOWN_WORDS:
        findings.wrong(
            f"{unknown:.0%} of the tokens are [UNK]: the vocabulary or its casing does not fit the text: choose "
            f"another --vocab-file or casing"
        )
    if isinstance(dataset, PretrainingDataset):
        made_lower_case = dataset.attributes.get("do_lower_case")
        if made_lower_case is not None and bool(made_lower_case) != is_uncased(choice.vocab_file):
            findings.wrong(
                f"the shards in {dataset.folder} were made with --do-lower-case {bool(made_lower_case)}, which is not "
                f"the casing of {choice.vocab_file}: make them again with the other casing"
            )
        if "vocab_sha256" not in dataset.attributes:
            findings.warning(
                f"the shards in {dataset.folder} do not say which vocabulary they were made with: check that it is "
                f"{choice.vocab_file}"
            )
    updates = len(dataset) / plan.config.loader.global_batch_size
    findings.ok(
        f"data: {len(dataset):,} samples, an epoch is {updates:,.1f} updates; in {len(indices):,} of them all ids are "
        f"in range, {unknown:.2%} of the tokens are unknown, and the mean length is {samples.lengths.mean():.0f}"
    )


def sample_indices(plan: TrainingPlan) -> np.ndarray:
    """Up to CHECKED_SAMPLES, evenly spread over the data set."""
    return np.unique(np.linspace(0, len(plan.dataset) - 1, CHECKED_SAMPLES).astype(np.int64))


def check_folder(findings: Findings, plan: TrainingPlan, args: Arguments) -> None:
    """Whether the run may write to its folder, and where it starts."""
    folder, record = plan.config.trainer.checkpoint_folder, plan.config.trainer.record
    if record is not None and not args.overwrite:
        check_record(folder, record, print_line)
    start = find_start(plan.config.start, folder, saves=record is not None and not args.overwrite)
    findings.ok(f"starts from {start['checkpoint'] or start['weights'] or 'random weights'}; writes to {folder}")


# --- training ---------------------------------------------------------------------------------------------------------


def train(
    plan: TrainingPlan, runtime: Runtime, warmup: int, steps: int, loader: Iterable[StepBatch] | None = None
) -> dict[Any, dict[str, float]]:
    """Trains as --benchmark does, saves nothing, and returns the figures by step."""
    recorder = RecordingSink()
    settings = replace(
        plan.config.trainer,
        benchmark=True,
        benchmark_warmup_steps=warmup,
        benchmark_steps=steps,
        record=None,
        log_freq=1,
    )
    plan = replace(plan, config=replace(plan.config, trainer=settings))
    trainer = plan.build_trainer(replace(runtime, reporter=Reporter([recorder])))
    trainer.train(loader or plan.make_loader(trainer))
    if () not in recorder.records:  # stopped by a signal
        raise KeyboardInterrupt
    return recorder.records


def losses_of(records: dict[Step, dict[str, Any]]) -> dict[int, float]:
    """The loss of each update, by its number."""
    return {step[-1]: figures["loss"] for step, figures in records.items() if step not in ((), "PARAMETER")}


def check_overfitting(findings: Findings, plan: TrainingPlan, runtime: Runtime) -> None:
    """A small model of the run's class must learn one batch of the run's data by heart."""
    loader = plan.config.loader
    count = min(len(plan.dataset), max(4, OVERFIT_TOKENS // loader.max_seq_length))
    indices = np.linspace(0, len(plan.dataset) - 1, count).astype(np.int64)
    batch = make_step_batch(plan.dataset, indices, MicroBatchLimits.of(replace(loader, batch_size=count)))
    small = replace(plan.choice.config, **OVERFIT_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = replace(
        plan.config,
        optimizer=OptimizerConfig("AdamW", weight_decay=0.0),
        schedule=ScheduleConfig(OVERFIT_STEPS, 3e-3, "constant", 0.05),
        start=StartConfig(),
    )
    plan = replace(plan, choice=replace(plan.choice, config=small), config=config)
    records = train(plan, runtime, 1, OVERFIT_STEPS - 1, itertools.repeat(batch))
    losses = losses_of(records)
    first, last = losses[min(losses)], losses[max(losses)]
    text = f"a small model overfits {count} samples: loss {first:.2f} -> {last:.3f} in {OVERFIT_STEPS} steps"
    if last < OVERFIT_LOSS:
        findings.ok(text)
    else:
        findings.wrong(f"{text}, which should be near 0: the labels do not fit the inputs, or this device miscomputes")


def check_speed(
    findings: Findings,
    plan: TrainingPlan,
    runtime: Runtime,
    settings: MemorySettings,
    checkpoint_seconds: float | None,
) -> None:
    """Measures an update of the real model in this process, on fewer sequences where it would take long, and scales
    it. settings: those of the run."""
    loader, trainer, processes = plan.config.loader, plan.config.trainer, settings.world_size
    per_process = -(-loader.global_batch_size // processes)
    measured = sequences_to_measure(plan, runtime, per_process)
    loader_cut = replace(loader, global_batch_size=measured, batch_size=min(loader.batch_size, measured))
    cut_settings = replace(
        settings,
        limits=MicroBatchLimits.of(loader_cut),
        batch_size=loader_cut.batch_size,
        micro_batches=-(-measured // loader_cut.batch_size),
        parallel=runtime.parallel,
        world_size=1,
        saves=False,
    )
    needed, free = needed_and_free_memory(plan.make_model(), cut_settings)
    if needed > free:
        findings.warning("time: not measured, because the model does not fit one process here")
        return
    start = StartConfig(from_pretrained_params=first_weights(plan.config.start))
    cut = replace(plan.config, loader=loader_cut, start=start)
    records = train(replace(plan, config=cut), runtime, warmup=1, steps=1 if measured == 1 else 2)
    figures = records[()]
    optimizer = figures["optimizer_ms"] / 1e3
    update = (figures["step_seconds"] - optimizer) * per_process / measured + optimizer
    per_sequence = figures["model_tflops"] * 1e12 / figures["sequences_per_second"]
    size = RunSize(
        trainer.max_steps,
        loader.global_batch_size,
        update,
        per_sequence * loader.global_batch_size,
        runtime.device.type,
        processes,
    )
    how = "measured" if measured == per_process else f"measured on {measured} of {per_process} sequences and scaled"
    if processes > 1:
        how += ", without communication"
    text = f"time: {time_line(size)} ({how})"
    if size.seconds > LONG_RUN_SECONDS:
        findings.warning(f"{text}: use more devices, fewer steps or a smaller model; {devices_line(size)}")
    else:
        findings.ok(text)
    if checkpoint_seconds is not None:
        interval = update * trainer.steps_per_checkpoint
        text = f"a checkpoint takes {format_time(checkpoint_seconds)}, and one is due every {format_time(interval)}"
        if checkpoint_seconds > interval:
            findings.warning(f"{text}: raise --num-steps-per-checkpoint, or choose a faster disk")
        else:
            findings.ok(text)
    check_first_loss(findings, plan, losses_of(records)[1], has_weights=start.from_pretrained_params is not None)


def sequences_to_measure(plan: TrainingPlan, runtime: Runtime, per_process: int) -> int:
    """As many as take about MEASURED_SECONDS, on a GPU at least a micro-batch; all if they are not many more."""
    loader = plan.config.loader
    flops = training_flops(plan.choice.config, [loader.max_seq_length], loader.max_predictions_per_seq)
    if runtime.device.type == "cuda":
        count = max(loader.batch_size, int(MEASURED_SECONDS * GPU_FLOPS / flops))
    else:
        count = max(1, int(MEASURED_SECONDS * CPU_FLOPS_PER_THREAD * torch.get_num_threads() / flops))
    return per_process if 2 * count >= per_process else count


def first_weights(start: StartConfig) -> Path | None:
    return start.from_phase1_final_params or start.from_pretrained_params


# --- losses -----------------------------------------------------------------------------------------------------------


def check_first_loss(findings: Findings, plan: TrainingPlan, loss: float, has_weights: bool) -> None:
    expected = plan.initial_loss
    if not math.isfinite(loss):
        findings.wrong(f"the first loss is {loss}: use --amp-dtype bfloat16 or float32, and check the starting weights")
    elif expected is None:
        findings.ok(f"the first loss is {loss:.2f}")
    elif has_weights:
        text = f"the first loss is {loss:.2f}, that of random weights {expected:.2f}"
        if loss > expected + INITIAL_LOSS_ABOVE or (plan.config.loader.max_predictions_per_seq and loss > expected - 1):
            findings.wrong(f"{text}: the starting weights do not know this data: check vocabulary, casing and folder")
        else:
            findings.ok(text)
    elif expected - INITIAL_LOSS_BELOW <= loss <= expected + INITIAL_LOSS_ABOVE:
        findings.ok(f"the first loss is {loss:.2f}, expected {expected:.2f} of random weights")
    else:
        findings.wrong(
            f"the first loss is {loss:.2f}, expected {expected:.2f} of random weights: check initializer_range and "
            f"vocab_size in the config"
        )


def check_run_losses(findings: Findings, plan: TrainingPlan, args: Arguments) -> None:
    """The losses that the run has logged so far, if it has."""
    stage = find_stage(plan, args)
    losses = [] if stage is None else [(point.step, point.metrics["loss"]) for point in stage.points]
    if not losses:
        findings.ok(f"no losses of this run are logged in {args.output_dir} yet")
        return
    step, last = losses[-1]
    finite = [loss for _, loss in losses if math.isfinite(loss)]
    warmup = args.warmup_proportion * plan.config.trainer.max_steps
    limit = frequency_loss(plan)
    text = f"the run's loss went from {losses[0][1]:.2f} at step {losses[0][0]} to {last:.2f} at step {step}"
    advice = "look at the report page, and lower --learning-rate"
    if not finite or last > min(finite) + DIVERGED_ABOVE or not math.isfinite(last):
        findings.wrong(f"{text}: it diverges: {advice}")
    elif plan.initial_loss is not None and max(finite) > plan.initial_loss + INITIAL_LOSS_ABOVE + 1:
        findings.wrong(f"{text}, with {max(finite):.2f} between, far above that of random weights: {advice}")
    elif limit is not None and step > max(warmup, SETTLED_STEP) and min(finite) > limit + FREQUENCY_LOSS_ABOVE:
        findings.wrong(
            f"{text}, and by now it should be below {limit:.2f}, that of a model which only knows word "
            f"frequencies: check the data, or change --learning-rate"
        )
    else:
        known = "" if limit is None else f"; a model that only knows word frequencies has {limit:.2f}"
        findings.ok(f"{text}{known}")


def find_stage(plan: TrainingPlan, args: Arguments) -> Stage | None:
    """The log of this phase in the run's folder."""
    stages = [
        stage
        for path in (args.output_dir, args.report_file)
        if path is not None and has_records(path)
        for run in read_runs([path])
        for stage in run.stages
        if Path(stage.settings.get("output_dir", "")).resolve() == args.output_dir.resolve()
        and stage.name == plan.config.metadata.phase
    ]
    return stages[0] if stages else None


def frequency_loss(plan: TrainingPlan) -> float | None:
    """The loss of a model that predicts each masked token by its frequency: the entropy of the labels with Miller and
    Madow's correction for a sample of n labels, plus ln 2 for the next sentence."""
    dataset = plan.dataset
    if not isinstance(dataset, PretrainingDataset):
        return None
    indices = sample_indices(plan)
    labels = dataset.rows("masked_lm_ids", indices)[dataset.rows("masked_lm_positions", indices) > 0]
    counts = np.bincount(labels.astype(np.int64).ravel())
    counts = counts[counts > 0]
    share = counts / counts.sum()
    entropy = float(-(share * np.log(share)).sum()) + (len(counts) - 1) / (2 * counts.sum())
    return entropy + (math.log(2) if dataset.has_next_sentence else 0.0)
