"""The optimizer-step loop and its batches."""

from dataclasses import dataclass
from pathlib import Path

from bert_recipe.config.flag_values import (
    FINE_TUNING,
    MAX_LENGTH,
    PRE_TRAINING,
    TRAIN,
    batch,
    length,
    positive_int_or_minus_one,
)
from bert_recipe.utils.command_line import (
    REQUIRED,
    bounded_float,
    bounded_int,
    non_negative_int,
    option,
    positive_float,
    positive_int,
)

mask_share = bounded_float(0, 1, exclusive=True)


def mask_rate(text: str) -> float | str:
    """A share, or a schedule of two, which stays text (see masking.mask_rates)."""
    first, colon, last = text.partition(":")
    return f"{mask_share(first)}:{mask_share(last)}" if colon else mask_share(text)


@dataclass(frozen=True)
class TrainerConfig:
    """Length of a run, and how often it logs, evaluates and saves. `eval_steps` 0: only at the
    end.
    """

    max_steps: int = option(
        "--max-steps",
        positive_int_or_minus_one,
        REQUIRED,
        "number of updates; in fine-tuning at most, and -1 means as many as the epochs need",
        needs=TRAIN,
    )
    checkpoint_folder: Path = option(
        "--output-dir", Path, REQUIRED, "folder for checkpoints and results"
    )
    epochs: float | None = option(
        "--epochs --num-train-epochs",
        bounded_float(0, 1e6, exclusive=True),
        None,
        "passes over the training data",
        needs=TRAIN,
        only=FINE_TUNING,
    )
    log_freq: int = option(
        "--log-freq --logging-steps --print-steps",
        positive_int,
        10,
        "updates between log lines",
    )
    eval_steps: int = option(
        "--eval-steps",
        non_negative_int,
        0,
        "updates between evaluations, which keep the checkpoint with the best score (in "
        "pre-training with the lowest loss); 0: only at the end",
        needs=("--eval-dir", "--do-train", "--do-eval"),
        excludes=("--benchmark",),
        result=True,
    )
    early_stopping: int | None = option(
        "--early-stopping --early-stopping-patience",
        positive_int,
        None,
        "stop after this many evaluations without a better score",
        needs=("--eval-steps",),
        result=True,
    )
    steps_per_checkpoint: int = option(
        "--num-steps-per-checkpoint --save-steps",
        positive_int,
        100,
        "updates between checkpoints",
        needs=TRAIN,
    )
    steps_this_run: int | None = option(
        "--steps-this-run",
        positive_int,
        None,
        "stop after this many updates",
        needs=TRAIN,
        excludes=("--benchmark",),
    )
    benchmark: bool = option(
        "--benchmark",
        bool,
        False,
        "measure speed; resume nothing, and save nothing but the report",
    )
    benchmark_steps: int = option(
        "--benchmark-steps", positive_int, 20, "updates that are measured", needs=("--benchmark",)
    )
    benchmark_warmup_steps: int = option(
        "--benchmark-warmup-steps",
        positive_int,
        20,
        "updates before the measured ones",
        needs=("--benchmark",),
    )
    profile_update: int | None = option(
        "--profile-update",
        positive_int,
        None,
        "write a trace and a table of the time of this update to the folder profile of the run",
        needs=TRAIN,
    )
    keep_every: int | None = option(
        "--keep-every",
        positive_int,
        None,
        "keep the checkpoints whose step is a multiple of this, besides the newest three",
        needs=TRAIN,
    )
    freeze_layers: int | None = option(
        "--freeze-layers",
        positive_int,
        None,
        "do not train the embeddings and so many of the first layers",
        needs=TRAIN,
        result=True,
    )
    freeze_encoder_steps: int | None = option(
        "--freeze-encoder-steps",
        non_negative_int,
        None,
        "number of first updates that train the head alone, at 10 times the peak learning rate; by "
        "default, if the starting weights have no head, until its loss falls by less than 1% in 50 "
        "updates, at most a fifth of the run",
        needs=("--from-pretrained-params or --from-phase1-final-params",),
        result=True,
        only=PRE_TRAINING,
    )
    max_grad_norm: float = option(
        "--max-grad-norm",
        positive_float,
        1.0,
        "gradients are clipped to this norm",
        needs=TRAIN,
        result=True,
    )

    @property
    def measured_batches(self) -> tuple[int, int] | None:
        """Batches of a benchmark's warmup, and batches that it measures; None without one."""
        if not self.benchmark:
            return None
        return self.benchmark_warmup_steps, self.benchmark_steps


@dataclass(frozen=True)
class LoaderConfig:
    """`batch_size`: sequences of full length per micro-batch; `global_batch_size`: sequences per
    optimizer step over all ranks, from --gradient-merge-steps if not given; it grows linearly from
    `initial_global_batch_size` while the first `batch_size_warmup_sequences` of the run are read.
    """

    batch_size: int = option(
        "--batch-size --train-batch-size --per-device-train-batch-size",
        batch,
        32,
        "sequences per GPU and micro-batch",
    )
    global_batch_size: int = option(
        "--global-batch-size",
        batch,
        None,
        "sequences per update over all GPUs, instead of --gradient-merge-steps",
        needs=TRAIN,
    )
    max_seq_length: int = option(
        "--max-seq-length --max-length",
        bounded_int(8, MAX_LENGTH),  # with room for texts beside the special tokens
        512,
        "maximum tokens of a sequence, by default no more than the model has positions; in "
        "pre-training the length of the shards' sequences",
    )
    max_masked: int = option(
        "--max-predictions-per-seq",
        length,
        0,
        "most masked tokens of a sequence; 0: as the shards have, or as --masked-lm-prob takes",
        only=PRE_TRAINING,
    )
    gradient_merge_steps: int = option(
        "--gradient-merge-steps --gradient-accumulation-steps",
        batch,
        1,
        "micro-batches per GPU and update, whose gradients are summed",
        needs=TRAIN,
        excludes=("--global-batch-size",),
    )
    num_workers: int = option(
        "--num-workers --dataloader-num-workers",
        bounded_int(0, 1024),
        1,
        "threads that read data ahead",
        needs=TRAIN,
    )
    masked_lm_prob: float | str | None = option(
        "--masked-lm-prob --mlm-probability",
        mask_rate,
        None,
        "for shards made with --dynamic-masking: share of the tokens to mask, by default 0.15; "
        "FIRST:LAST, such as 0.3:0.15, changes linearly over the run",
        result=True,
        only=PRE_TRAINING,
    )
    whole_word_mask: bool = option(
        "--whole-word-mask",
        bool,
        False,
        "for shards made with --dynamic-masking: mask whole words",
        result=True,
        only=PRE_TRAINING,
    )
    initial_global_batch_size: int = option(
        "--initial-global-batch-size",
        batch,
        0,
        "sequences of the first update over all GPUs; the batch grows linearly to the full one",
        needs=("--batch-size-warmup-sequences",),
        result=True,
        only=PRE_TRAINING,
    )
    batch_size_warmup_sequences: int = option(
        "--batch-size-warmup-sequences",
        positive_int,
        0,
        "sequences of the run that are read while the batch grows",
        needs=("--initial-global-batch-size",),
        result=True,
        only=PRE_TRAINING,
    )
