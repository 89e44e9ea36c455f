"""The doctor's checks of a run: packages, device, disk, data, folder, overfitting, memory, time and
losses.

Updates use the production trainer. Each check reports a line, or raises UserError.
"""

import contextlib
import itertools
import math
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from os.path import lexists
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from bert_recipe.checkpoint.folder import checkpoint_steps
from bert_recipe.checkpoint.run_folder import RunFolder
from bert_recipe.checkpoint.start import NamedStart, StartPoint, decide_start
from bert_recipe.checkpoint.weights import has_head
from bert_recipe.checkpoint.writer import KEPT_CHECKPOINTS
from bert_recipe.config import OptimizerConfig, RunConfig, ScheduleConfig
from bert_recipe.config.task import LearningOptions
from bert_recipe.data_loading.loader import make_step_batch
from bert_recipe.data_loading.packing import Label
from bert_recipe.data_preparation.samples.sample_statistics import MAX_RANDOM_NEXT
from bert_recipe.metrics.sinks import RecordingSink, Reporter
from bert_recipe.metrics.text import format_duration
from bert_recipe.model.costs.flops import training_flops
from bert_recipe.model.token_stream import IGNORED_LABEL, TOKEN_ARRAYS, StepBatch
from bert_recipe.optimization.precision import slow_bfloat16
from bert_recipe.parallel.compilation import missing_for_compile
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tokenization.files import MAX_UNKNOWN
from bert_recipe.tokenization.tokenizer import Tokenizer, sizes_of_words
from bert_recipe.training.memory_estimate import MemorySettings, estimate_memory, num_parameters
from bert_recipe.training.run import Run
from bert_recipe.training.setup import build_trainer
from bert_recipe.training.trial import FOLDS, num_trials
from bert_recipe.utils import requirements
from bert_recipe.utils.errors import UserError, error_message, machine_problem, one_line
from bert_recipe.utils.memory import available_memory
from bert_recipe.utils.progress import print_line

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT_BYTES = 12  # per parameter: weights and two moments in float32
LIBRARY_BYTES = {"cuda": 2**30, "cpu": 2**29}  # per process; CUDA and NCCL, or torch alone
CHECKED_SAMPLES = 2000
# Words of as many pieces and more; share from which the vocabulary does not fit.
SPLIT_PIECES, MAX_SPLIT = (4, 0.05)
# Overfitting: a small model of the same class, without dropout.
OVERFIT_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 512,
}
OVERFIT_TOKENS, OVERFIT_STEPS, OVERFIT_LOSS = 1024, 80, 0.3
# As many masked tokens of short samples are learnt by heart in these steps; of a sample with more,
# which are harder to tell apart, those at its beginning.
OVERFIT_MASKED, OVERFIT_BEGINNING = 200, 100
# Time measurement: as many sequences as take about this time at a conservative speed.
MEASURED_SECONDS = 3.0
CPU_FLOPS_PER_THREAD, GPU_FLOPS = 40e9, 50e12
# Tolerances of the loss checks.
INITIAL_LOSS_BELOW, INITIAL_LOSS_ABOVE, DIVERGED_ABOVE = 0.5, 1.0, 1.0


class Findings:
    """Prints each finding as one line and counts those that are wrong."""

    def __init__(self) -> None:
        self.num_wrong = 0
        self.may_start = True  # see decide_start

    def report(self, level: str, text: str) -> None:
        """level: ok, warning or wrong."""
        print_line(f"{level:<8} {one_line(text)}")
        self.num_wrong += level == "wrong"

    def judge(self, text: str, is_right: bool, advice: str, level: str = "wrong") -> None:
        """Reports `text`, with advice if it is not right."""
        self.report("ok" if is_right else level, text if is_right else f"{text}: {advice}")

    @contextlib.contextmanager
    def check(self) -> Iterator[None]:
        """Reports a UserError, or an error of the machine, as a finding."""
        try:
            yield
        except (UserError, OSError) as error:
            if (message := error_message(error)) is None:
                raise
            self.report("wrong", message)

    def decide_start(self, named: NamedStart, folder: RunFolder, settings: RunConfig) -> StartPoint:
        """Where a run starts; if that is refused, which is reported, the weights that the flags
        name.
        """
        with self.check():
            return decide_start(named, folder, settings)
        self.may_start = False
        return StartPoint.of_weights(named.folder)


def check_packages(findings: Findings, config: RunConfig) -> None:
    for problem in (problems := requirements.problems([ROOT / "requirements.txt"])):
        findings.report("wrong", f"{problem}: run bash scripts/setup_environment.sh")
    if config.parallel.compile == "auto":
        device = MemorySettings(config).device
        if device.type == "cuda" and (missing := missing_for_compile(device)):
            text = "the run will not be compiled, which costs speed"
            findings.report("warning", f"{text}: torch.compile needs {', and '.join(missing)}")
    if not problems:
        versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
        findings.report("ok", f"{versions}, packages of requirements.txt")


def check_device(findings: Findings, runtime: Runtime, processes: int) -> None:
    """Reports the device. Its availability and precision were checked when `runtime` was made."""
    dtype = runtime.precision.dtype
    name = str(runtime.precision.dtype).removeprefix("torch.")
    if runtime.device.type == "cpu":
        findings.report(
            "ok", f"computes on the CPU in {name} with {torch.get_num_threads()} threads"
        )
        if shutil.which("nvidia-smi") is not None and not torch.cuda.is_available():
            version = (
                f"PyTorch {torch.__version__} finds no GPU: install a build of PyTorch for CUDA"
            )
            findings.report("warning", f"an NVIDIA driver is installed, but {version}")
        if slow := slow_bfloat16(runtime.precision, runtime.device):
            findings.report("warning", slow)
        return
    findings.report(
        "ok", f"computes in {name} on {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    )
    if dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        findings.report("warning", "GPUs with tensor cores are several times faster with --amp")
    if processes == 1 < torch.cuda.device_count():
        num_gpus = torch.cuda.device_count()
        findings.report(
            "warning",
            f"this machine has {num_gpus} GPUs, and the run uses one: start it with torchrun",
        )


def check_disk(findings: Findings, run: Run) -> None:
    """Checks that the run's folder is writable and has space for its checkpoints."""
    folder = run.folder.path
    size = CHECKPOINT_BYTES * num_parameters(run.make_model())
    existing = next(path for path in (folder, *folder.absolute().parents) if lexists(path))
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(
            f"--output-dir: cannot write to {existing}: {machine_problem(error)}"
        ) from error
    # Older checkpoints are removed only after a new one is written.
    missing = KEPT_CHECKPOINTS + 1 - min(len(checkpoint_steps(folder)), KEPT_CHECKPOINTS)
    free = shutil.disk_usage(existing).free
    needed = f"{missing} more checkpoints of {size / 1e9:.3g} GB"
    text = f"disk: {free / 1e9:,.1f} GB free for {folder}; it needs {needed}"
    advice = f"free {(missing * size - free) / 1e9:,.1f} GB, or choose another --output-dir"
    findings.judge(text, missing * size <= free, advice)


def check_memory(findings: Findings, run: Run, settings: MemorySettings) -> None:
    needed, free = needed_and_free_memory(run, settings)
    place = "GPU" if settings.device.type == "cuda" else "machine"
    there = f"{free / 2**30:.1f} GiB free on this {place}"
    text = f"memory: {needed / 2**30:.1f} GiB needed (estimated), {there}"
    advice = (
        "lower the batch size and raise --gradient-merge-steps as much, or see docs/memory.md for "
        "flags that help"
    )
    findings.judge(text, needed <= free, advice)


def needed_and_free_memory(run: Run, settings: MemorySettings) -> tuple[float, float]:
    """Estimated and free bytes: for one process on a GPU, for all processes on the CPU."""
    needed = estimate_memory(run.make_model(), settings).total
    needed += LIBRARY_BYTES[settings.device.type]
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()  # from earlier checks
        return needed, torch.cuda.mem_get_info()[0]
    return needed * settings.world_size, available_memory()


def check_data(findings: Findings, run: Run) -> None:
    """Reads and checks samples. Length, vocabulary and config were checked when `run` was made."""
    dataset = run.data.dataset
    indices = sample_indices(run, CHECKED_SAMPLES)
    samples = dataset.read(indices)
    stream = samples.stream(np.arange(len(indices)))
    unknown = float((stream["input_ids"] == run.data.choice.tokenizer.unk_token_id).mean())
    updates = len(dataset) / run.values.loader.global_batch_size
    text = (
        f"data: {len(dataset):,} samples, an epoch is {updates:,.1f} updates; in {len(indices):,} "
        f"of them all ids are in range, {unknown:.2%} of the tokens are [UNK], and the mean length "
        f"is {samples.lengths.mean():.0f}"
    )
    advice = "the vocabulary or its casing does not fit: choose another --vocab-file or casing"
    findings.judge(text, unknown <= MAX_UNKNOWN, advice)
    task = run.task
    if (random_next := task.random_next_share(stream)) is not None:
        text = f"next sentences: {random_next:.1%} are random"
        advice = "from such labels nothing is learned: make the samples again, with --no-nsp"
        is_right = 1 - MAX_RANDOM_NEXT <= random_next <= MAX_RANDOM_NEXT
        findings.judge(text, is_right, advice)
    if (passes := run.data.text_passes) is not None:
        check_amount(findings, run, len(dataset) * float(samples.lengths.mean()) / passes, passes)
    share = split_share(task.text_ids(stream), run.data.choice.tokenizer)
    if share is not None:
        text = f"words: {share:.1%} are split into {SPLIT_PIECES} or more pieces"
        advice = "data/prepare.py vocabulary --extend adds words of the text to the vocabulary"
        findings.judge(text, share <= MAX_SPLIT, advice, "warning")


def check_amount(findings: Findings, run: Run, tokens: float, passes: int) -> None:
    """Reports how much text there is for the model. tokens: of the text; passes: over it in the
    data set.
    """
    ratio = tokens / num_parameters(run.make_model())
    epochs = run.max_steps * run.values.loader.global_batch_size * passes / len(run.data.dataset)
    reading = f"the run reads it {epochs:,.3g} times"
    text = f"text: about {tokens:,.0f} tokens, {ratio:.2g} per parameter; {reading}"
    advice = "little for random weights; start from weights, or use a smaller model"
    needed = 1.0
    if run.start.weights is not None:
        needed, advice = 0.1, "little text: the run may make the model worse; score it on a task"
    findings.judge(text, ratio >= needed, advice, "warning")


def split_share(token_ids: np.ndarray, tokenizer: Tokenizer) -> float | None:
    """The share, of the words without digits in `token_ids` [T], of those with SPLIT_PIECES or more
    tokens; None if there are none, or if tokens do not show words.
    """
    sizes = sizes_of_words(token_ids, tokenizer)
    return None if sizes is None else float((sizes.tokens >= SPLIT_PIECES).mean())


def sample_indices(run: Run, count: int) -> np.ndarray:
    """Up to `count` indices, evenly spaced over the data set."""
    return np.unique(np.linspace(0, len(run.data.dataset) - 1, count).astype(np.int64))


def check_folder(findings: Findings, run: Run) -> None:
    """Checks that the run may write to its folder, and reports where it starts."""
    run.check_start()
    if findings.may_start:  # else that is reported
        start = run.start.source or "random weights"
        findings.report("ok", f"starts from {start}; writes to {run.folder}")


def train(
    run: Run, runtime: Runtime, steps: int, batches: Iterable[StepBatch]
) -> tuple[list[float], dict[str, Any]]:
    """Trains as with --benchmark, with a constant learning rate and without checkpoints. Returns
    the losses of `steps` updates, and the metrics of all but the first; step_seconds are those of
    the quickest, since other programs may have slowed the others down.
    """
    recorder = RecordingSink()
    trainer_config = replace(
        run.settings.trainer,
        benchmark=True,
        benchmark_warmup_steps=1,
        benchmark_steps=steps - 1,
        log_freq=1,
    )
    schedule = ScheduleConfig(run.values.schedule.learning_rate, "constant")
    trial = replace(
        run,
        settings=replace(run.settings, trainer=trainer_config),
        values=replace(run.values, schedule=schedule),
    )
    trainer = build_trainer(trial, replace(runtime, reporter=Reporter([recorder])))
    trainer.train(batches)
    # By (epoch, step), "PARAMETER" for the settings, or () for the result of the run.
    records = dict(recorder.records)
    if not records.get(()):  # stopped by a signal
        raise KeyboardInterrupt
    steps_made = sorted(records.keys() - {(), "PARAMETER"})
    losses = [records[step]["loss"] for step in steps_made]
    quickest = min(records[step]["step_seconds"] for step in steps_made[1:])
    return losses, records[()] | {"step_seconds": quickest}


def batch_of(run: Run, runtime: Runtime, count: int, batch_size: int) -> StepBatch:
    limits = run.limits(runtime, batch_size)
    return make_step_batch(run.data.dataset, sample_indices(run, count), limits)


def check_overfitting(findings: Findings, run: Run, runtime: Runtime) -> None:
    """Checks that a small model of the run's class can overfit one batch of the run's data."""
    dataset, length = run.data.dataset, run.task.max_sample_length
    masked = max(dataset.max_labelled_per_sample, 1)
    count = min(len(dataset), max(4, OVERFIT_TOKENS // length), max(1, OVERFIT_MASKED // masked))
    small = replace(run.data.choice.config, **OVERFIT_SIZES).with_dropout(0.0)
    choice = replace(run.data.choice, config=small)
    settings = replace(run.settings, optimizer=OptimizerConfig("AdamW", weight_decay=0.0))
    schedule = replace(run.values.schedule, learning_rate=3e-3)
    values = replace(run.values, schedule=schedule)
    task = run.task
    options = getattr(task, "options", None)
    if isinstance(options, LearningOptions):  # a smoothed loss does not come near 0
        task = replace(cast(Any, task), options=replace(options, label_smoothing=0.0))
    data = replace(run.data, choice=choice, task=task)
    run = replace(run, start=StartPoint(), data=data, settings=settings, values=values)
    batch = batch_of(run, runtime, count, count)
    what = f"{count} samples"
    is_masked = "mlm_positions" in batch.micro_batches[0]
    if is_masked and batch.num_labelled.sum() > OVERFIT_MASKED:
        batch = beginning_of(batch, dataset.stream_labels, OVERFIT_BEGINNING)
        what = "the beginning of a sample"
    losses, _ = train(run, runtime, OVERFIT_STEPS, itertools.repeat(batch))
    text = (
        f"a small model overfits {what}: loss {losses[0]:.2f} -> {losses[-1]:.3f} in "
        f"{OVERFIT_STEPS} steps"
    )
    advice = "it should be near 0: the labels do not fit the inputs, or this device miscomputes"
    variance = 1.0 if task.numbers is None else task.numbers[1] ** 2
    findings.judge(text, losses[-1] < OVERFIT_LOSS * variance, advice)


def beginning_of(batch: StepBatch, labels: Iterable[Label], num_masked: int) -> StepBatch:
    """The tokens of the first micro-batch before the one that is masked as number `num_masked` + 1.
    labels: of its streams.
    """
    first = batch.micro_batches[0]
    is_real_M = first["mlm_labels"] != IGNORED_LABEL
    num_tokens = int(first["mlm_positions"][is_real_M].sort().values[num_masked])
    bounds = first["cu_seqlens"]
    bounds = torch.cat([bounds[bounds < num_tokens], bounds.new_tensor([num_tokens])])
    num_sequences = len(bounds) - 1
    kept = {
        "token": slice(num_tokens),
        "sequence": slice(num_sequences),
        "masked": is_real_M & (first["mlm_positions"] < num_tokens),
    }
    cut = {name: first[name][kept["token"]] for name in TOKEN_ARRAYS}
    cut |= {label.name: first[label.name][kept[label.axis]] for label in labels}
    cut |= {"cu_seqlens": bounds, "num_sequences": num_sequences}
    if "max_seqlen" in first:
        cut["max_seqlen"] = int(bounds.diff().max())
    return replace(
        batch,
        micro_batches=[first | cut],
        lengths=np.array([num_tokens]),
        num_labelled=np.array([num_masked]),
    )


def check_updates(findings: Findings, run: Run, runtime: Runtime, processes: int) -> None:
    """Trains the real model for three updates on one batch. Reports the run's duration, and checks
    the losses. Slow updates are measured on fewer sequences and scaled. processes: number of those
    of the run.
    """
    loader, trials = run.values.loader, num_trials(run)
    per_process = -(-loader.global_batch_size // processes)
    measured = sequences_to_measure(run, runtime, per_process)
    trial_loader = replace(
        loader, global_batch_size=measured, max_seq_length=run.task.max_sample_length
    )
    trainer_config = replace(run.settings.trainer, benchmark=True)  # saves nothing
    settings = replace(run.settings, trainer=trainer_config, world_size=1)
    memory = MemorySettings(settings, trial_loader, run.parallel)
    needed, free = needed_and_free_memory(run, memory)
    if needed > free:
        findings.report(
            "warning", "time: not measured, because the model does not fit one process here"
        )
        return
    weights = run.start.weights
    batch = batch_of(run, runtime, measured, min(loader.batch_size, measured))
    trial = replace(run, start=StartPoint.of_weights(weights))
    losses, metrics = train(trial, runtime, 3, itertools.repeat(batch))

    optimizer = metrics["optimizer_ms"] / 1e3
    measured = len(batch.lengths)  # fewer, if the data set is small
    update = (metrics["step_seconds"] - optimizer) * per_process / measured + optimizer
    how = (
        "measured"
        if measured == per_process
        else f"measured on {measured} of {per_process} sequences and scaled"
    )
    how += ", without communication" if processes > 1 else ""
    total = run.max_steps
    if trials:
        total += trials * math.ceil((1 - 1 / FOLDS) * run.max_steps)
        how += f"; {total - run.max_steps:,} updates are of trials"
    findings.report(
        "ok",
        f"time: {total:,} updates of {loader.global_batch_size:,} sequences, each {update:.3g} "
        f"s, take {format_duration(total * update)} (h:mm:ss) on {processes} x "
        f"{runtime.device.type}, without evaluation and saving ({how})",
    )
    brings_head = weights is not None and has_head(run.make_model(), weights.tensors)
    check_first_loss(findings, run, losses[0], weights is not None, brings_head)
    check_learning_rate(findings, run, losses)


def sequences_to_measure(run: Run, runtime: Runtime, per_process: int) -> int:
    """Sequences that take about MEASURED_SECONDS, on a GPU at least a micro-batch; all if only
    slightly more.
    """
    loader = run.values.loader
    on_gpu = runtime.device.type == "cuda"
    flops = training_flops(
        run.make_model(),
        [run.task.max_sample_length],
        run.data.dataset.max_labelled_per_sample,
    )
    speed = GPU_FLOPS if on_gpu else CPU_FLOPS_PER_THREAD * torch.get_num_threads()
    count = max(loader.batch_size if on_gpu else 1, int(MEASURED_SECONDS * speed / flops))
    return per_process if 2 * count >= per_process else count


def check_first_loss(
    findings: Findings,
    run: Run,
    loss: float,
    has_weights: bool,
    brings_head: bool = True,
) -> None:
    """Compares the first loss with that of random weights.

    loss: of the first batch.
    has_weights: whether the run starts from weights.
    brings_head: whether these have the head; without, as in a folder of sentence-transformers, it
        is new.
    """
    task, text = run.task, f"the first loss is {loss:.2f}"
    if not math.isfinite(loss):
        advice = "use --amp-dtype bfloat16 or float32, and check the starting weights"
        findings.report("wrong", f"{text}: {advice}")
        return
    if task.initial_loss is None:
        findings.report("ok", text)
        return
    expected = task.initial_loss
    highest = expected + INITIAL_LOSS_ABOVE
    text = f"{text}, that of random weights {expected:.2f}"
    if not has_weights:
        is_usual = expected - INITIAL_LOSS_BELOW <= loss <= highest
        findings.judge(text, is_usual, "check initializer_range and vocab_size in the config")
    elif task.has_trained_head and brings_head:
        advice = "no better than random: check vocabulary, casing and --init-checkpoint"
        findings.judge(text, loss <= expected - 1, advice)
    elif task.has_trained_head and loss <= highest:
        advice = "worse than random, since the head is new: --freeze-encoder-steps trains it first"
        findings.judge(text, loss <= expected, advice, "warning")
    else:
        advice = "worse than random: check vocabulary, casing and --init-checkpoint"
        findings.judge(text, loss <= highest, advice)


def check_learning_rate(findings: Findings, run: Run, losses: list[float]) -> None:
    """losses: of updates on one batch, all at the peak learning rate."""
    rate = run.values.schedule.learning_rate
    shown = ", ".join(f"{loss:.2f}" for loss in losses)
    text = f"at learning rate {rate:g} without warmup, the losses of one batch are {shown}"
    is_right = all(loss < losses[0] + DIVERGED_ABOVE for loss in losses)  # and none is NaN
    findings.judge(text, is_right, "lower --learning-rate")
