"""The flags of run_squad.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bert_recipe.tasks.fine_tuning import FineTuningOptions
from bert_recipe.tasks.squad.files import SquadOptions

if TYPE_CHECKING:
    from bert_recipe.checkpoint.model_folder import ModelFolder
    from bert_recipe.model.encoders.config import ModelConfig


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
