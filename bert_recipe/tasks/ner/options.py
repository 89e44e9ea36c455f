"""The flags of run_ner.py: files of sentences."""

from __future__ import annotations

from dataclasses import dataclass

from bert_recipe.tasks.fine_tuning import FineTuningOptions
from bert_recipe.tasks.ner.columns import SentenceColumns
from bert_recipe.tasks.own_files import OwnFileOptions, SplitOptions
from bert_recipe.tasks.reading import ReadingOptions
from bert_recipe.utils.command_line import option


@dataclass(frozen=True)
class SentenceFileOptions(OwnFileOptions):
    """The user's own files of sentences, and their columns, which are found if not given."""

    text_column: str | None = option(
        "--text-column --text-column-name --text-column-names",
        str,
        None,
        "column of the words: a name, or a number from 1 where columns have no names",
    )
    label_column: str | None = option(
        "--label-column --label-column-name",
        str,
        None,
        "column of the tags, likewise",
        ("--do-train or --do-eval",),
    )


@dataclass(frozen=True)
class TokenClassificationOptions(
    SentenceFileOptions, ReadingOptions, SplitOptions, FineTuningOptions
):
    """What the flags of run_ner.py say."""

    task_path = "ner.task.TokenClassificationTask"
    head = "token_classification"
    score_names = ("f1", "precision", "recall", "accuracy")

    @property
    def columns(self) -> SentenceColumns:
        return SentenceColumns(self.text_column, self.label_column, self.group_column)
