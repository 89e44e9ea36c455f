"""The flags of run_squad.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bert_recipe.tasks.fine_tuning import FineTuningOptions
from bert_recipe.tasks.reading import SkipOptions
from bert_recipe.utils.command_line import (
    bounded_int,
    finite_float,
    option,
    optional_path,
    positive_int,
    value_of,
)

if TYPE_CHECKING:
    from bert_recipe.checkpoint.model_folder import ModelFolder
    from bert_recipe.model.encoders.config import ModelConfig


PREDICT = ("--do-eval or --do-predict",)
V2_PREDICT = (*PREDICT, "--version-2-with-negative")
DOC_STRIDE, QUERY_LENGTH = 128, 64
length = bounded_int(1, 2**20)


@dataclass(frozen=True)
class SquadOptions(SkipOptions):
    """How windows are made and answers are chosen."""

    max_seq_length: int = value_of("--max-seq-length", 384)
    predict_file: Path | None = option(
        "--predict-file --eval-file --validation-file --test-file",
        optional_path,
        None,
        "file to predict, and with --do-eval to score",
        PREDICT,
    )
    doc_stride: int | None = option(
        "--doc-stride",
        positive_int,
        None,
        f"tokens between the starts of windows; by default {DOC_STRIDE}, or a window's if it has "
        "fewer",
    )
    max_query_length: int | None = option(
        "--max-query-length",
        length,
        None,
        f"maximum tokens of a question; by default {QUERY_LENGTH}, or fewer if a sequence has less "
        "room",
    )
    n_best_size: int = option(
        "--n-best-size",
        length,
        20,
        "candidate starts, ends and answers per question",
        PREDICT,
        post_processing=True,
    )
    max_answer_length: int = option(
        "--max-answer-length",
        positive_int,
        30,
        "maximum tokens of an answer",
        PREDICT,
        post_processing=True,
    )
    version_2_with_negative: bool = option(
        "--version-2-with-negative",
        bool,
        False,
        "SQuAD v2.0: questions may have no answer",
        post_processing=True,
    )
    null_score_diff_threshold: float = option(
        "--null-score-diff-threshold",
        finite_float,
        0.0,
        "v2.0: predict no answer if its score exceeds the best answer's by more than this",
        V2_PREDICT,
        post_processing=True,
    )

    @property
    def query_length(self) -> int:
        """Most tokens of a question; by default with room for a text beside it."""
        room = max(self.max_seq_length // 2, self.max_seq_length - 36)
        return self.max_query_length or min(QUERY_LENGTH, room)


@dataclass(frozen=True)
class SquadTaskOptions(SquadOptions, FineTuningOptions):
    """What the flags of run_squad.py say."""

    task_path = "squad.task.SquadTask"
    head = "question_answering"

    @property
    def score_names(self) -> tuple[str, ...]:
        return ("f1", "exact" if self.version_2_with_negative else "exact_match")

    @classmethod
    def fine_tuned_length(cls, config: ModelConfig, folder: ModelFolder) -> int:
        return min(SquadOptions.max_seq_length, super().fine_tuned_length(config, folder))
