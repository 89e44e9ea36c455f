"""The flags of run_embeddings.py: files of pairs of texts, and sentence embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bert_recipe.checkpoint.sentence_folders import POOLINGS, read_text_settings
from bert_recipe.config.flag_values import TRAIN
from bert_recipe.tasks.fine_tuning import FineTuningOptions
from bert_recipe.tasks.own_files import ScoredFileOptions
from bert_recipe.tasks.reading import NumberReadingOptions
from bert_recipe.utils.command_line import (
    any_text,
    option,
    optional_path,
    positive_float,
    positive_int,
)

if TYPE_CHECKING:
    from bert_recipe.checkpoint.model_folder import ModelFolder
    from bert_recipe.model.encoders.config import ModelConfig

MARGIN_MSE = "margin-mse"
LOSSES = ("contrastive", "cosent", "cosine", MARGIN_MSE)
UNSCORED = ("--label-column",)
SIMILARITY_SCORES = ("spearman", "pearson")


@dataclass(frozen=True)
class PairFileOptions(ScoredFileOptions):
    """The user's own files of pairs of texts, and their columns."""

    text_column: str | None = option(
        "--text-column --text-column-name --text-column-names",
        str,
        None,
        "column of the first text; .txt and SQuAD's .json have no columns",
    )
    pair_column: str | None = option(
        "--pair-column",
        str,
        None,
        "column of the second text, which has a similar meaning",
        ("--text-column",),
    )
    label_column: list[str] | None = option(
        "--label-column --label-column-name",
        str,
        None,
        "column of the similarity of a pair; with --embedding-loss margin-mse those of the scores "
        "of --pair-column and of each of --negative-columns",
        ("--text-column", "--do-train or --do-eval"),
        options={"nargs": "+"},
    )


@dataclass(frozen=True)
class EmbeddingOptions:
    """How sentence embeddings are trained and scored."""

    negative_columns: list[str] | None = option(
        "--negative-columns",
        str,
        None,
        "columns of texts that are similar to --pair-column, but wrong",
        ("--pair-column", *TRAIN),
        options={"nargs": "+", "metavar": "NAME"},
    )
    num_negatives: int | None = option(
        "--num-negatives",
        positive_int,
        None,
        "how many texts of --negative-columns a sample has, where these have lists of texts",
        ("--negative-columns",),
        result=True,
    )
    corpus_file: Path | None = option(
        "--corpus-file",
        optional_path,
        None,
        "further texts among which the second texts of --eval-file have to be found",
        ("--do-eval", "--text-column"),
    )
    corpus_column: str | None = option(
        "--corpus-column",
        str,
        None,
        "column of the texts in --corpus-file; by default --pair-column",
        ("--corpus-file",),
    )
    embedding_loss: str | None = option(
        "--embedding-loss",
        LOSSES,
        None,
        "contrastive: the second text among all others of the global batch; cosent: order of the "
        "pairs by their score; "
        "cosine: squared error of the cosine; margin-mse: squared error of the cosine's margin "
        "between second text and negative, for scores of a cross-encoder in --label-column. By "
        "default contrastive, with --label-column cosent",
        TRAIN,
        result=True,
    )
    temperature: float = option(
        "--temperature", positive_float, 0.05, "divisor of cosines in the loss", TRAIN, result=True
    )
    symmetric_loss: bool = option(
        "--symmetric-loss",
        bool,
        False,
        "contrastive: also the first text among all first texts",
        TRAIN,
        UNSCORED,
        result=True,
    )
    matryoshka_dims: list[int] | None = option(
        "--matryoshka-dims",
        positive_int,
        None,
        "also train the first N dimensions alone, for each N that is given; the losses are summed",
        TRAIN,
        options={"nargs": "+"},
        result=True,
    )
    pooling: str | None = option(
        "--pooling",
        tuple(POOLINGS),
        None,
        "mean of the tokens, or the first token; by default as the starting folder says, else mean",
    )
    query_prompt: str | None = option(
        "--query-prompt", any_text, None, "put before first texts", result=True
    )
    prompt_column: str | None = option(
        "--prompt-column",
        str,
        None,
        "column of what is put before the first text of a row instead of --query-prompt",
        ("--text-column",),
        result=True,
    )
    document_prompt: str | None = option(
        "--document-prompt", any_text, None, "put before all other texts", result=True
    )


@dataclass(frozen=True)
class EmbeddingTaskOptions(
    PairFileOptions, NumberReadingOptions, EmbeddingOptions, FineTuningOptions
):
    """What the flags of run_embeddings.py say."""

    task_path = "embeddings.task.EmbeddingTask"
    head = "sentence_embedding"

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of the anchor and its positive; none for a .txt file."""
        if self.text_column is None or self.pair_column is None:
            return ()
        return (self.text_column, self.pair_column)

    @property
    def score(self) -> str | None:
        """The column of the similarity of a pair."""
        if self.embedding_loss == MARGIN_MSE or not self.label_column:
            return None
        return self.label_column[0]

    @property
    def teacher(self) -> tuple[str, ...]:
        """The columns of the scores for margin MSE (see read_tuples)."""
        return tuple(self.label_column or ()) if self.embedding_loss == MARGIN_MSE else ()

    @property
    def score_names(self) -> tuple[str, ...]:
        from bert_recipe.tasks.embeddings.retrieval import RETRIEVAL_SCORES

        return SIMILARITY_SCORES if self.score is not None else RETRIEVAL_SCORES

    @property
    def min_batch(self) -> int:
        """A single pair has no negatives, and its loss is 0."""
        return 1 if self.embedding_loss == "cosine" or self.negative_columns else 2

    @property
    def sequences_per_sample(self) -> int:
        return 2 + (self.num_negatives or len(self.negative_columns or ()))

    @classmethod
    def fine_tuned_length(cls, config: ModelConfig, folder: ModelFolder) -> int:
        longest = super().fine_tuned_length(config, folder)
        return min(read_text_settings(folder.path)["max_seq_length"] or longest, longest)
