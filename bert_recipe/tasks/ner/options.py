"""The flags of run_ner.py: files of sentences."""

from dataclasses import dataclass

from bert_recipe.tasks.own_files import OwnFileOptions
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
