"""What a program does besides training."""

from dataclasses import dataclass
from pathlib import Path

from bert_recipe.config.flag_values import FINE_TUNING, TRAIN, batch
from bert_recipe.utils.command_line import (
    fraction_below_one,
    option,
    optional_path,
    positive_int,
)

PREDICT = ("--do-eval or --do-predict",)


@dataclass(frozen=True)
class PredictionConfig:
    """How files are predicted."""

    batch_size: int = option(
        "--predict-batch-size --eval-batch-size --per-device-eval-batch-size",
        batch,
        32,
        "sequences per GPU and forward pass",
        needs=PREDICT,
        only=FINE_TUNING,
    )


def score_name(text: str) -> str:
    return text.removeprefix("eval_")  # as Trainer names it


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """How fine-tuning tasks learn, and which of their scores selects the best model."""

    label_smoothing: float = option(
        "--label-smoothing --label-smoothing-factor",
        fraction_below_one,
        0.0,
        "share of the target that all classes have in equal parts; of SQuAD all tokens",
        needs=TRAIN,
        excludes=("--frozen-encoder",),
        result=True,
        only=FINE_TUNING,
    )
    metric_for_best_model: str | None = option(
        "--metric-for-best-model",
        score_name,
        None,
        "the score that selects the best checkpoint, named as evaluations print it; by default the "
        "task's first",
        needs=("--eval-steps",),
        only=FINE_TUNING,
    )
    baseline: bool = option(
        "--baseline",
        bool,
        True,
        "beside the scores, those of simple methods that learn from the same file in seconds, such "
        "as the most frequent class and tf-idf; --no-baseline leaves them out",
        needs=(*TRAIN, "--do-eval"),
        only=FINE_TUNING,
    )


@dataclass(frozen=True)
class PretrainingConfig:
    """What run_pretraining.py reads, and which phase it is."""

    input_dir: Path | None = option(
        "--input-dir", Path, None, "folder of HDF5 shards, or one shard"
    )
    eval_dir: Path | None = option("--eval-dir", optional_path, None, "folder of held-out shards")
    max_eval_samples: int | None = option(
        "--max-eval-samples",
        positive_int,
        None,
        "evaluate on so many samples of --eval-dir, at equal distances, instead of on all",
        ("--eval-dir",),
        result=True,
    )
    verify_data: bool = option(
        "--verify-data", bool, False, "before training, compare the shards with their checksums"
    )
    phase1: bool = option(
        "--phase1",
        bool,
        False,
        "save checkpoints in the folder phase1 (the default)",
        excludes=("--phase2",),
    )
    phase2: bool = option("--phase2", bool, False, "save checkpoints in the folder phase2")


@dataclass(frozen=True)
class FineTuningConfig:
    """What a fine-tuning program does, besides pre-training, which only trains. The task has the
    files.
    """

    do_train: bool = option("--do-train", bool, False, "fine-tune on the training file")
    do_eval: bool = option(
        "--do-eval", bool, False, "predict the development file and score the predictions"
    )
    do_predict: bool = option("--do-predict", bool, False, "write predictions")
    train_file: Path | None = option(
        "--train-file", optional_path, None, "file to train on", needs=TRAIN
    )
