"""Classification and regression of texts and pairs of texts.

A text has one class, any number of labels (multi-label), or a number (regression). Legend: n
samples, N sequences of a stream, C labels.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.encoders.heads import FirstOutputs
from bert_recipe.model.loss import summed_cross_entropy
from bert_recipe.model.token_stream import IGNORED_LABEL, BatchCounts, MicroBatch, TokenStream
from bert_recipe.tasks.baselines import WARNING, once
from bert_recipe.tasks.classification.baselines import LabelledTexts, class_baselines
from bert_recipe.tasks.classification.files import Examples, read_examples
from bert_recipe.tasks.classification.frozen import FrozenEncoder
from bert_recipe.tasks.classification.labels import (
    balanced_weights,
    check_kind,
    check_learnt,
    check_pairs,
    find_labels,
    first_log_odds,
    label_values,
    labels_of_model,
    loss_of_guessing,
    mean_and_deviation,
)
from bert_recipe.tasks.classification.options import ClassificationOptions
from bert_recipe.tasks.classification.scores import (
    class_predictions,
    constant_prediction,
    load_metrics,
    score,
    scored_name,
    submission_name,
    undefined_reason,
    write_scored,
    write_submission,
)
from bert_recipe.tasks.classification.specs import TaskSpec, set_prefix
from bert_recipe.tasks.doubtful_rows import (
    warn_of_blank,
    warn_of_contradictions,
    warn_of_far_numbers,
    warn_of_predicted_blanks,
)
from bert_recipe.tasks.fine_tuning import FineTuningTask
from bert_recipe.tasks.mistakes import mistake_lines, most_confident
from bert_recipe.tasks.own_files import MAX_SEQ_LENGTH
from bert_recipe.tasks.predicted_rows import (
    PredictedRows,
    Prediction,
    read_table,
    write_predicted,
)
from bert_recipe.tasks.splits import Split
from bert_recipe.tasks.task import PredictionSet, SeparableTask
from bert_recipe.tasks.text_sequences import TextDataset
from bert_recipe.utils.json_files import JsonObject
from bert_recipe.utils.output_tables import names_like
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.tables import Row

if TYPE_CHECKING:
    from bert_recipe.tokenization.tokenizer import Tokenizer

REGRESSION_LABELS = ("score",)


@dataclass(frozen=True)
class ClassificationTask(FineTuningTask, SeparableTask):
    """Classification or regression of texts and text pairs.

    spec: columns, labels in the task's order, and metrics.
    stored_labels: labels of a fine-tuned model in the order of its outputs.
    class_weights: with --class-weights balanced, the weight [C] of the loss of each class: n /
        (C * its samples), as in scikit-learn, but at most MAX_CLASS_WEIGHT. Each of several labels
        is a question of two classes, absent and present; the weights are then those of absent
        labels and of present ones [2C].
    baseline_rows: what the baselines learn from, of the training file.
    guessing_loss, numbers, first_outputs: see Task.
    frozen: of an encoder that is not trained, for which a classifier is fitted, or None.
    frequent_share: share of the most frequent class in the training file, with the rows that are
        held out; None without classes.
    """

    options: ClassificationOptions
    spec: TaskSpec
    max_seq_length: int = MAX_SEQ_LENGTH
    stored_labels: tuple[str, ...] = ()
    class_weights: tuple[float, ...] = ()
    split: Split | None = None
    baseline_rows: LabelledTexts | None = field(default=None, compare=False, repr=False)
    guessing_loss: float | None = None
    numbers: tuple[float, float] | None = None
    first_outputs: FirstOutputs | None = None
    frozen: FrozenEncoder | None = field(default=None, compare=False, repr=False)
    defaults_kind: str | None = "texts"
    frequent_share: float | None = field(default=None, compare=False, repr=False)

    logits_axis = "sequence"

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def head(self) -> str:
        return "sequence_classification" if self.frozen is None else "sentence_embedding"

    @property
    def advice(self) -> str:
        if self.frozen is None:
            return super().advice
        return "to train the encoder, without --frozen-encoder, or another encoder"

    @property
    def chance_advice(self) -> str:
        if self.frozen is not None:
            return self.advice
        return "more labelled rows, if need be thousands, with a larger encoder"

    def identity(self) -> dict[str, Any]:
        return {} if self.frozen is None else {"frozen encoder": True}

    def configure(self, config: ModelConfig) -> ModelConfig:
        config = super().configure(config)
        if self.frozen is None:
            return config
        return replace(config, embedding_pooling=self.frozen.settings.pooling)

    def logits_of(self, outputs: np.ndarray) -> np.ndarray:
        return outputs if self.frozen is None else self.frozen.logits(outputs)

    @property
    def scored_files(self) -> tuple[Path, ...]:
        return tuple(self.options.eval_files.values())

    @property
    def multi_label(self) -> bool:
        return self.spec.multi_label

    @property
    def text_pairs(self) -> bool:
        return self.spec.pair is not None

    @property
    def labels(self) -> tuple[str, ...]:
        return REGRESSION_LABELS if self.spec.regression else self.stored_labels or self.spec.labels

    @property
    def initial_loss(self) -> float | None:
        if self.multi_label:
            return self.guessing_loss
        if self.spec.negatives:
            return math.log(2)
        return None if self.spec.regression else math.log(len(self.spec.labels))

    @property
    def result_files(self) -> tuple[str, ...]:
        sets = self.spec.sets
        names = [submission_name(self.spec, set_name) for set_name in sets]
        if self.spec.is_custom:
            names = names_like(self.spec.name)
        for set_name in sets:
            names += names_like(scored_name(set_name))
        return tuple(names)

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        logits_NC = model(TokenStream.from_batch(micro_batch, self.max_seq_length)).logits
        labels_N = micro_batch["labels"]
        if self.spec.regression:
            return {"loss": self.number_loss(logits_NC.squeeze(1).float(), micro_batch)}
        weights = None
        if self.class_weights:
            weights = tensor_on(logits_NC.device, self.class_weights)
        if self.multi_label:
            return multi_label_sums(logits_NC.float(), labels_N, weights)
        loss, correct = summed_cross_entropy(
            logits_NC, labels_N, weights, self.options.label_smoothing
        )
        return {"loss": loss, "correct": correct}

    def number_loss(self, numbers_N: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Squared error, or of a reranker's logits binary cross-entropy."""
        is_real_N = micro_batch["labels"] != IGNORED_LABEL
        scores_N = micro_batch["scores"]
        if self.spec.negatives:
            losses_N = F.binary_cross_entropy_with_logits(numbers_N, scores_N, reduction="none")
            return losses_N.where(is_real_N, 0.0).sum()
        return (numbers_N - scores_N).where(is_real_N, 0.0).square().sum()

    def metrics(self, sums: dict[str, float], counts: BatchCounts) -> dict[str, float]:
        metrics = super().metrics(sums, counts)
        if not self.spec.regression:
            metrics = metrics | {"accuracy": sums["correct"] / counts.sequences}
        return metrics

    @classmethod
    def learning(
        cls,
        options: ClassificationOptions,
        tokenizer: "Tokenizer",
        start: Path | None = None,
        split: Split | None = None,
    ) -> tuple["ClassificationTask", "TextDataset"]:
        spec = options.spec
        everything = read_labelled(options.training_file, spec, options, split)
        examples = everything
        if split is not None:
            examples = everything.where(~held_out(everything, spec, split))
            if split.group_column is not None and not spec.regression:
                check_learnt(everything, examples, split.group_column)
        if not spec.regression and not spec.labels:
            spec = replace(spec, labels=find_labels(everything, spec))
        values = label_values(examples, spec)
        frequent_share = None
        if not spec.regression and not spec.multi_label:
            counts = Counter(everything.labels)
            frequent_share = max(counts.values()) / counts.total()
        warn_of_doubtful(examples, spec)
        weights: tuple[float, ...] = ()
        if options.class_weights == "balanced":
            weights = balanced_weights(examples.path, values, spec)
        numbers = None
        if spec.regression and not spec.negatives:
            numbers = mean_and_deviation(values, examples.path)
        first_outputs: FirstOutputs | None = numbers
        if spec.multi_label:
            first_outputs = (tuple(first_log_odds(values, weights).tolist()), 1.0)
        baseline_rows = None
        if options.baseline and options.eval_files:
            baseline_rows = LabelledTexts.draw(examples, values, max(1, len(spec.labels)))
        frozen = None
        if options.frozen_encoder:
            frozen = FrozenEncoder.of_encoder(start, spec.pair is not None)
        task = cls(
            options,
            spec,
            options.max_seq_length,
            class_weights=weights,
            split=split,
            baseline_rows=baseline_rows,
            guessing_loss=loss_of_guessing(values, spec, weights, options.label_smoothing),
            numbers=numbers,
            first_outputs=first_outputs,
            frozen=frozen,
            defaults_kind="texts" if frozen is None else None,
            frequent_share=frequent_share,
        )
        dataset = task.text_dataset(tokenizer, examples.texts, examples.pairs, values)
        if split is not None and split.group_column is not None:
            dataset.groups = examples.groups
        task.say_what_is_cut(examples.path, dataset)
        return task, dataset

    @classmethod
    def fine_tuned(
        cls,
        options: ClassificationOptions,
        max_seq_length: int,
        config: ModelConfig,
        folder: Path,
    ) -> "ClassificationTask":
        """The task with the labels of the fine-tuned model in `folder`, and its classifier if that
        was fitted. Raises UserError for a model of another kind of task, or with other labels than
        the task has.
        """
        spec = options.spec
        check_pairs(config, folder, spec.pair is not None)
        check_kind(config, folder, spec)
        stored_labels: tuple[str, ...] = ()
        if not spec.regression:
            labels, stored_labels = labels_of_model(config, folder, spec, options)
            spec = replace(spec, labels=labels)
        frozen = FrozenEncoder.read(folder)
        return cls(options, spec, max_seq_length, stored_labels, frozen=frozen)

    def text_dataset(
        self,
        tokenizer: "Tokenizer",
        texts: list[str],
        pairs: list[str] | None,
        values: np.ndarray | None = None,
    ) -> TextDataset:
        """Texts, as a frozen encoder reads them. values: see TextDataset."""
        columns = texts, pairs
        if self.frozen is not None:
            texts, pairs = self.frozen.prompted(texts, pairs)
        texts_per_row = len(texts) // max(1, len(columns[0]))
        if values is not None:
            values = values.repeat(texts_per_row, axis=0)
        dataset = TextDataset(tokenizer, self.max_seq_length, texts, pairs, values)
        dataset.texts_per_row, dataset.columns = texts_per_row, columns
        return dataset

    def prediction_sets(self, tokenizer: "Tokenizer") -> list[PredictionSet]:
        options = self.options
        if options.eval_files:
            load_metrics()  # fail on a missing package before training
        sets = []
        for name, path in options.eval_files.items():
            sets.append(self.scored_set(tokenizer, name, path))
        for name, path in options.predict_files.items():
            if options.is_published:
                sets.append(self.submission_set(tokenizer, name, path))
            else:
                sets.append(self.rows_set(tokenizer, path))
        return sets

    def scored_set(self, tokenizer: "Tokenizer", set_name: str, path: Path) -> PredictionSet:
        examples = read_labelled(path, self.spec, self.options, self.split)
        if self.split is not None:
            examples = examples.where(held_out(examples, self.spec, self.split))
        values = label_values(examples, self.spec)
        baselines = None
        if self.baseline_rows is not None:
            parts = (self.baseline_rows, examples, values, self.spec, set_name)
            baselines = once(partial(class_baselines, *parts))
        dataset = self.text_dataset(tokenizer, examples.texts, examples.pairs)
        if self.options.train_file is None and not self.options.is_published:
            self.say_what_is_cut(path, dataset)
        finish = partial(self.finish, examples, values, set_name)
        undefined = self.undefined_reason(values, set_name)
        return PredictionSet(dataset, finish, True, undefined, baselines)

    def submission_set(self, tokenizer: "Tokenizer", set_name: str, path: Path) -> PredictionSet:
        """A published task's file to predict."""
        examples = read_examples(path, self.spec, False, True, self.options)
        warn_of_unread(path, examples)
        dataset = self.text_dataset(tokenizer, examples.texts, examples.pairs)

        def finish(logits_nC: np.ndarray, folder: Path | None) -> JsonObject:
            if folder is not None:
                logits_nC = self.in_order(logits_nC)
                path = write_submission(folder, examples, logits_nC, self.spec, set_name)
                print_line(f"predictions for {len(examples)} samples in {path}")
            return {}

        return PredictionSet(dataset, finish, False)

    def rows_set(self, tokenizer: "Tokenizer", path: Path) -> PredictionSet:
        """A user's own file to predict."""
        table_format = self.options.table_format
        rows = [row for _, row in read_table(path, self.spec.text_columns, table_format)]
        names = dict(zip(("text", "pair"), self.spec.text_columns, strict=False))
        fields = [{field: row[name] for field, name in names.items()} for row in rows]
        dataset, predict = self.rows_to_predict(tokenizer, fields)
        if self.options.train_file is None:
            self.say_what_is_cut(path, cast(TextDataset, dataset))

        def finish(logits_nC: np.ndarray, folder: Path | None) -> JsonObject:
            if folder is not None:
                predictions = predict(logits_nC)
                write_predicted(folder / self.spec.name, rows, predictions, path, table_format)
            return {}

        return PredictionSet(dataset, finish, False)

    def rows_to_predict(self, tokenizer: "Tokenizer", rows: Sequence[Row]) -> PredictedRows:
        """rows: with `text`, and `pair` if the task has pairs."""
        pairs = [row["pair"] for row in rows] if self.text_pairs else None
        dataset = self.text_dataset(tokenizer, [row["text"] for row in rows], pairs)

        def predict(logits_nC: np.ndarray) -> list[Prediction]:
            return class_predictions(self.in_order(logits_nC), self.spec)

        return PredictedRows(dataset, predict)

    def in_order(self, logits_nC: np.ndarray) -> np.ndarray:
        """The logits in the task's order of labels: a model from another library may have
        another.
        """
        if not self.stored_labels:
            return logits_nC
        return logits_nC[:, [self.stored_labels.index(label) for label in self.spec.labels]]

    def say_what_is_cut(self, path: Path, dataset: TextDataset) -> None:
        """Says which share of a file the model does not see; of folds that of the first one."""
        if self.split is None or self.split.fold == 0:
            dataset.say_what_is_cut(path)

    def undefined_reason(self, values: np.ndarray, set_name: str) -> str | None:
        """Why the score that selects the best checkpoint is not defined for a file, or None."""
        metric = self.metric.removeprefix(set_prefix(set_name))
        is_of_set = metric in self.spec.metrics
        return undefined_reason(values, self.spec, metric) if is_of_set else None

    def finish(
        self,
        examples: Examples,
        values: np.ndarray,
        set_name: str,
        logits_nC: np.ndarray,
        folder: Path | None,
    ) -> JsonObject:
        """Writes the scored rows, and returns the scores for the label `values`."""
        logits_nC = self.in_order(logits_nC)
        scores = score(logits_nC, values, self.spec, set_name)
        if folder is None:
            return scores
        if warning := constant_prediction(logits_nC, values, self.spec):
            scores[WARNING] = f"{set_name}: {warning}" if set_name else warning
        path, mistakes = write_scored(
            folder,
            examples,
            logits_nC,
            values,
            self.spec,
            set_name,
            self.options.table_format,
        )
        if self.spec.is_custom and not self.spec.regression:
            for line in mistake_lines(mistakes, len(examples), path):
                print_line(line)
        return scores | most_confident(mistakes, set_prefix(set_name))


def read_labelled(
    path: Path, spec: TaskSpec, options: ClassificationOptions, split: Split | None
) -> Examples:
    """The rows of a file with labels, and with groups if they are held out by group."""
    group_column = None if split is None else split.group_column
    return read_examples(path, spec, True, False, options, group_column)


def held_out(examples: Examples, spec: TaskSpec, split: Split) -> np.ndarray:
    """Whether each row of the training file is for development, [number of rows] booleans. Rows
    with the same texts stay together, and so do those of a reranker's query.
    """
    keys: list[Any] = list(examples.texts)
    if examples.pairs is not None and not spec.negatives:
        keys = list(zip(examples.texts, examples.pairs, strict=True))
    labels = examples.label_sets
    if spec.regression:
        labels = [()] * len(examples)
    return split.held_out(keys, labels, examples.groups)


def warn_of_doubtful(examples: Examples, spec: TaskSpec) -> None:
    """Warns of empty texts, and of equal ones with other labels."""
    columns = [examples.texts] if examples.pairs is None else [examples.texts, examples.pairs]
    texts = list(zip(*columns, strict=True))
    labels: list[Any]
    if spec.multi_label:
        labels = [tuple(sorted(label_set)) for label_set in examples.label_sets]
    elif spec.regression:
        labels = [float(label) for label in examples.labels]
        if not spec.negatives:
            warn_of_far_numbers(examples.path, labels, examples.lines)
    else:
        labels = [*examples.labels]
    warn_of_contradictions(examples.path, zip(texts, labels, examples.lines, strict=True))
    warn_of_blank(examples.path, zip(texts, examples.lines, strict=True))


def warn_of_unread(path: Path, examples: Examples) -> None:
    """Warns of empty texts to predict, whose prediction says nothing of them."""
    texts = zip(examples.texts, examples.pairs or examples.texts, strict=True)
    warn_of_predicted_blanks(path, zip(texts, examples.lines, strict=True))


@lru_cache(maxsize=4)
def tensor_on(device: torch.device, values: tuple[float, ...]) -> Tensor:
    """One tensor for all updates: a copy to a GPU would make the host wait each time."""
    return torch.tensor(values, device=device)


def multi_label_sums(
    logits_NC: Tensor, labels_NC: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    """Binary cross-entropy, and the number of samples with all labels right. weights: of absent and
    of present labels [2C].
    """
    is_real_N = labels_NC[:, 0] != IGNORED_LABEL
    losses_NC = F.binary_cross_entropy_with_logits(
        logits_NC, labels_NC.clamp(min=0).float(), reduction="none"
    )
    if weights is not None:
        absent_C, present_C = weights.chunk(2)
        losses_NC = losses_NC * torch.where(labels_NC > 0, present_C, absent_C)
    correct_N = ((logits_NC > 0) == (labels_NC > 0)).all(dim=1) & is_real_N
    return {"loss": losses_NC.mean(dim=1).where(is_real_N, 0.0).sum(), "correct": correct_N.sum()}
