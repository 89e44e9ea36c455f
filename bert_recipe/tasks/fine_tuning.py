"""Tasks on texts, with files to train on, to score and to predict."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

from bert_recipe.checkpoint.record import DevelopmentData
from bert_recipe.config import LearningOptions
from bert_recipe.model.encoders.config import check_length
from bert_recipe.tasks.own_files import MAX_SEQ_LENGTH
from bert_recipe.tasks.task import Number, PredictionSet, Task, TaskData, TaskOptions
from bert_recipe.tokenization.files import trained_length
from bert_recipe.utils.command_line import tagged_values, value_of
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import file_digest
from bert_recipe.utils.json_files import JsonObject, json_digest
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.text_files import table_parts

if TYPE_CHECKING:  # what imports torch, which --help and errors of the command line do not wait for
    from pathlib import Path

    import numpy as np

    from bert_recipe.checkpoint.model_choice import ModelChoice
    from bert_recipe.checkpoint.model_folder import ModelFolder
    from bert_recipe.config import LoaderConfig, RunConfig
    from bert_recipe.data_loading.loader import StreamDataset
    from bert_recipe.model.encoders.config import ModelConfig
    from bert_recipe.model.token_stream import BatchCounts
    from bert_recipe.parallel.runtime import Runtime
    from bert_recipe.tasks.splits import Split
    from bert_recipe.tasks.text_sequences import TextSamples
    from bert_recipe.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class FineTuningOptions(LearningOptions, TaskOptions):
    """What the flags say of a task on texts, with files to train on, to score and to predict.

    task_path: module and name of the class of the opened task.
    train_file: None without training.
    seed: of what is held out.
    """

    task_path: ClassVar[str]

    max_seq_length: int = value_of("--max-seq-length", MAX_SEQ_LENGTH)
    train_file: Path | None = value_of("--train-file", None)
    do_eval: bool = value_of("--do-eval", False)
    do_predict: bool = value_of("--do-predict", False)
    seed: int = value_of("--seed", 42)

    @property
    def min_batch(self) -> int:
        """Least sequences per update."""
        return 1

    @property
    def sequences_per_sample(self) -> int:
        return 1

    @property
    def task_class(self) -> type[FineTuningTask]:
        """The class of the opened task, which is imported only now, since it needs torch."""
        module, _, name = self.task_path.rpartition(".")
        task_class = getattr(import_module(f"bert_recipe.tasks.{module}"), name)
        return cast("type[FineTuningTask]", task_class)

    @property
    @abstractmethod
    def score_names(self) -> tuple[str, ...]:
        """Of the scores that can select the best checkpoint, as far as the flags say, the default
        first.
        """

    @property
    def training_file(self) -> Path:
        """The file to train on, of a run that trains."""
        if self.train_file is None:
            raise UserError("there is no file to train on: give --train-file")
        return self.train_file

    def split(self, fold: int = 0) -> Split | None:
        """What is held out of the training file, or None."""
        return None

    @classmethod
    def fine_tuned_length(cls, config: ModelConfig, folder: ModelFolder) -> int:
        """The most tokens of a sequence for the fine-tuned model in `folder` if the user gives
        none: as in fine-tuning, else the model's positions.
        """
        return trained_length(folder.tokenizer_settings, config.max_length)

    def in_sequences(
        self, loader: LoaderConfig, dataset: StreamDataset | None = None
    ) -> LoaderConfig:
        return replace(
            loader,
            batch_size=self.sequences_per_sample * loader.batch_size,
            global_batch_size=self.sequences_per_sample * loader.global_batch_size,
        )

    def check_metric(self, score_names: Sequence[str]) -> None:
        metric = self.metric_for_best_model
        if metric is not None and metric not in score_names:
            raise UserError(
                f"--metric-for-best-model {metric} is no score of this task: give one of "
                f"{', '.join(score_names)}"
            )

    def check_batch(self, global_batch: int, processes: int) -> None:
        if global_batch < processes:
            raise UserError(
                f"the global batch ({global_batch}) is smaller than the number of processes "
                f"({processes}): raise --global-batch-size, or start fewer processes"
            )
        if global_batch < self.min_batch:
            raise UserError(
                f"the global batch is {global_batch}, and the loss compares texts of a batch: "
                f"raise it"
            )

    def open(
        self,
        choice: ModelChoice,
        folder: ModelFolder | None,
        config: RunConfig,
        runtime: Runtime,
        fold: int = 0,
    ) -> TaskData:
        self.check_metric(self.score_names)
        gives_batch = "global_batch_size" not in config.chosen_by_rule
        if gives_batch:
            self.check_batch(config.loader.global_batch_size, config.world_size)
        options = self
        if not config.arguments.given("max_seq_length"):
            length = min(self.max_seq_length, choice.config.max_length)
            options = replace(self, max_seq_length=length)
        check_length("--max-seq-length", options.max_seq_length, choice.config)
        start = None if folder is None else folder.path
        task, dataset = self.task_class.learning(options, choice.tokenizer, start, self.split(fold))
        choice = replace(choice, config=task.configure(choice.config))
        sets = task.prediction_sets(choice.tokenizer)
        scored_sets = [prediction_set for prediction_set in sets if prediction_set.is_scored]
        selects_best = bool(config.trainer.eval_steps)
        warn_of_undefined(sets, task.metric, selects_best, runtime)
        if runtime.distributed.is_main:
            warn_of_known_texts(dataset, scored_sets)
            if gives_batch:
                warn_of_repeats(len(dataset), config.loader.global_batch_size)
        return TaskData(
            task,
            choice,
            dataset,
            sets=sets,
            development=task.development_data(scored_sets) if selects_best else None,
            max_length=task.stored_length(choice.config),
            files=task.model_files(choice.config),
            num_examples=dataset.num_examples,
        )


class FineTuningTask(Task, Protocol):
    """A task on texts. The loss is a mean over sequences by default.

    options: what the flags say.
    logits_axis: `token` or `sequence`.
    perfect_score: the highest value of `metric`.
    counted: what the rule of fine_tuning_defaults.py counts as rows.
    """

    options: FineTuningOptions
    logits_axis: str
    defaults_kind: str | None = "texts"
    counted: str = "rows"
    perfect_score: float = 1.0
    compiling_pays_from: int = 6000
    without_weights: str | None = "fine-tuning starts from random weights: give --init-checkpoint"

    @classmethod
    @abstractmethod
    def learning(
        cls,
        options: Any,
        tokenizer: Tokenizer,
        start: Path | None = None,
        split: Split | None = None,
    ) -> tuple[Self, TextSamples]:
        """The task that learns the labels of the training file, and the samples. start: the model
        folder that training starts from.
        """

    @classmethod
    @abstractmethod
    def fine_tuned(
        cls, options: Any, max_seq_length: int, config: ModelConfig, folder: Path
    ) -> Self:
        """The task of the fine-tuned model in `folder`. Raises UserError if that has other
        labels.
        """

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names of the model's outputs; empty if they have no names."""
        return ()

    @property
    def multi_label(self) -> bool:
        """See ModelConfig."""
        return False

    @property
    def text_pairs(self) -> bool | None:
        """See ModelConfig."""
        return None

    @property
    def max_sample_length(self) -> int:
        return self.options.sequences_per_sample * self.max_seq_length

    def stored_length(self, config: ModelConfig) -> int:
        """The most tokens of a text, as the model's folder says."""
        return self.max_seq_length

    @property
    def score_names(self) -> tuple[str, ...]:
        """Of the scores that can select the best checkpoint, the default first."""
        return self.options.score_names

    @property
    def advice(self) -> str:
        return "more --epochs, a smaller --train-batch-size or another --learning-rate"

    @property
    def chance_advice(self) -> str:
        """What to try where the scores are those of the most frequent class."""
        return self.advice

    @property
    def metric(self) -> str:
        return self.options.metric_for_best_model or self.score_names[0]

    def loss(self, sums: Mapping[str, Number], counts: BatchCounts) -> Number:
        return sums["loss"] / counts.sequences

    def metrics(self, sums: dict[str, float], counts: BatchCounts) -> dict[str, float]:
        return {"loss": self.loss(sums, counts)}

    def logged_settings(self, data: TaskData, batch_size: int, max_steps: int) -> JsonObject:
        return {
            "task": self.name,
            "training_samples": data.num_examples,
            "training_features": len(data.dataset),
            "train_batch_size": batch_size,
            "steps": max_steps,
        }

    def development_data(self, scored_sets: Sequence[PredictionSet]) -> DevelopmentData:
        reading = json_digest([scored_set.dataset.digest() for scored_set in scored_sets])
        flags = tagged_values(self.options, "post_processing")
        if self.options.metric_for_best_model is not None:
            flags["--metric-for-best-model"] = self.options.metric_for_best_model
        return DevelopmentData(self.development_digest(), reading, flags)

    @property
    @abstractmethod
    def scored_files(self) -> tuple[Path, ...]:
        """The files with labels that prediction_sets reads."""

    @property
    def development_files(self) -> tuple[Path, ...]:
        """The files that decide the scores."""
        return self.scored_files

    def development_digest(self) -> str:
        parts: list[Any] = [
            file_digest(part) for path in self.development_files for part in table_parts(path)
        ]
        if self.split is not None:
            parts.append(self.split.settings())
        return json_digest(parts)

    def configure(self, config: ModelConfig) -> ModelConfig:
        """The config of the task's model."""
        return replace(
            config, labels=self.labels, multi_label=self.multi_label, text_pairs=self.text_pairs
        )

    def model_files(self, config: ModelConfig) -> dict[str, bytes]:
        """Further files of a model folder, by name."""
        return {}

    def logits_of(self, outputs: np.ndarray) -> np.ndarray:
        """The logits of the outputs of the task's model, which may be vectors of a classifier that
        is fitted to them.
        """
        return outputs

    @abstractmethod
    def prediction_sets(self, tokenizer: Tokenizer) -> list[PredictionSet]:
        """The files to score and to predict."""


def warn_of_undefined(
    sets: Sequence[PredictionSet], metric: str, selects_best: bool, runtime: Runtime
) -> None:
    """Warns of files to score for which `metric` is not defined. Raises UserError if it selects the
    best checkpoint.
    """
    for prediction_set in sets:
        if prediction_set.undefined is None:
            continue
        problem = f"{metric} is not defined for the file to score, since {prediction_set.undefined}"
        if selects_best:
            raise UserError(
                f"{problem}, and --eval-steps selects the best checkpoint by it: give another "
                f"file, or leave out --eval-steps"
            )
        if runtime.distributed.is_main:
            print_line(f"warning: {problem}")


def warn_of_known_texts(dataset: TextSamples, scored_sets: Sequence[PredictionSet]) -> None:
    """Says how many of the texts to score are in the training file, `dataset`."""
    known = dataset.distinct_sequences()
    for scored_set in scored_sets:
        texts = scored_set.dataset.distinct_sequences()
        count = len(texts & known)
        if count:
            share = f"{count / len(texts):.1%}"
            print_line(
                f"warning: {count} of {len(texts)} texts to score ({share}) are in the training "
                "file, up to --max-seq-length: the model may remember them, and the scores are too "
                "high"
            )


def warn_of_repeats(num_samples: int, global_batch: int) -> None:
    """Warns of updates that see the same sample several times."""
    if global_batch > num_samples:
        times = math.ceil(global_batch / num_samples)
        print_line(
            f"warning: an update takes {global_batch} samples, and there are {num_samples}: each "
            f"is in it up to {times} times: lower --train-batch-size"
        )
