"""Classification and regression of texts and pairs of texts.

A text has one class, any number of labels (multi-label), or a number (regression). Legend: n
samples, N sequences of a stream, C labels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_recipe.checkpoint.sentence_folders import CLASSIFIER_MODULES, EmbeddingSettings
from bert_recipe.config import LearningOptions
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.loss import summed_cross_entropy
from bert_recipe.model.token_stream import IGNORED_LABEL, BatchCounts, MicroBatch, TokenStream
from bert_recipe.tasks.baselines import constant_loss, once
from bert_recipe.tasks.classification.baselines import LabelledTexts, class_baselines
from bert_recipe.tasks.classification.files import Examples, read_examples
from bert_recipe.tasks.classification.frozen import FrozenEncoder
from bert_recipe.tasks.classification.scores import (
    constant_prediction,
    load_metrics,
    score,
    scored_name,
    submission_name,
    undefined_reason,
    write_predictions,
    write_scored,
)
from bert_recipe.tasks.classification.specs import LABEL_SEPARATOR, TaskSpec, set_prefix
from bert_recipe.tasks.doubtful_rows import (
    warn_of_blank,
    warn_of_contradictions,
    warn_of_predicted_blanks,
)
from bert_recipe.tasks.labels import (
    check_spelling,
    is_number,
    known_label,
    other_separator,
    sort_labels,
)
from bert_recipe.tasks.mistakes import mistake_lines, most_confident
from bert_recipe.tasks.own_files import MAX_SEQ_LENGTH
from bert_recipe.tasks.reading import DEFAULT_READING, ReadingOptions
from bert_recipe.tasks.splits import Split
from bert_recipe.tasks.task import FineTuningTask, PredictionSet, SeparableTask
from bert_recipe.tasks.text_sequences import TextDataset
from bert_recipe.utils.errors import UserError, listed
from bert_recipe.utils.output_tables import names_like
from bert_recipe.utils.progress import print_line, print_once

if TYPE_CHECKING:
    from bert_recipe.tokenization.tokenizer import Tokenizer

REGRESSION_LABELS = ("score",)
DEFAULT_LABELS = ("LABEL_0", "LABEL_1")  # of a config without names
MAX_CLASS_WEIGHT = 10  # a class of one sample in a thousand would decide the updates it is in
MAX_TRIAL = 10  # texts of a file that may be a trial, where each has a label of its own


@dataclass(frozen=True)
class ClassificationTask(LearningOptions, FineTuningTask, SeparableTask):
    """Classification or regression of texts and text pairs.

    spec: columns, labels in the task's order, and metrics.
    eval_files: files to score, by the name of the set.
    predict_files: files to predict.
    stored_labels: labels of a fine-tuned model in the order of its outputs.
    balanced: weight the loss of a class by n / (C * its samples), as scikit-learn does, but at most
        by MAX_CLASS_WEIGHT; `class_weights` [C]. Each of several labels is a question of two
        classes, absent and present; `class_weights` are then those of absent labels and of present
        ones [2C].
    reading: how the files are read.
    baseline_rows: what the baselines learn from, of the training file.
    guessing_loss: see Task.
    frozen: of an encoder that is not trained, for which a classifier is fitted, or None.
    """

    spec: TaskSpec
    max_seq_length: int = MAX_SEQ_LENGTH
    name: str = ""
    train_file: Path | None = None
    eval_files: Mapping[str, Path] = field(default_factory=dict)
    predict_files: Mapping[str, Path] = field(default_factory=dict)
    stored_labels: tuple[str, ...] = ()
    balanced: bool = False
    class_weights: tuple[float, ...] = ()
    reading: ReadingOptions = DEFAULT_READING
    split: Split | None = None
    baseline_rows: LabelledTexts | None = field(default=None, compare=False, repr=False)
    guessing_loss: float | None = None
    frozen: FrozenEncoder | None = field(default=None, compare=False, repr=False)

    logits_axis = "sequence"

    @property
    def head(self) -> str:
        return "sequence_classification" if self.frozen is None else "sentence_embedding"

    @property
    def advice(self) -> str:
        if self.frozen is None:
            return super().advice
        return "to train the encoder, without --frozen-encoder, or another encoder"

    def identity(self) -> dict[str, Any]:
        return {} if self.frozen is None else {"frozen encoder": True}

    def configure(self, config: ModelConfig) -> ModelConfig:
        config = super().configure(config)
        if self.frozen is None:
            return config
        return replace(config, embedding_pooling=self.frozen.settings.pooling)

    def for_start(self, folder: Path) -> "ClassificationTask":
        if self.frozen is None:
            return self
        # A classifier in the folder is replaced.
        settings = EmbeddingSettings.read(folder, CLASSIFIER_MODULES)
        return replace(self, frozen=FrozenEncoder(settings))

    def logits_of(self, outputs: np.ndarray) -> np.ndarray:
        return outputs if self.frozen is None else self.frozen.logits(outputs)

    def text_dataset(
        self, tokenizer: "Tokenizer", examples: Examples, values: np.ndarray | None = None
    ) -> TextDataset:
        """The texts of `examples`, of a frozen encoder with its prompt. values: see TextDataset."""
        texts, pairs = examples.texts, examples.pairs
        if self.frozen is not None:
            texts, pairs = self.frozen.prompted(texts, pairs)
        return TextDataset(tokenizer, self.max_seq_length, texts, pairs, values)

    @property
    def scored_files(self) -> tuple[Path, ...]:
        return tuple(self.eval_files.values())

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
    def score_names(self) -> tuple[str, ...]:
        prefixes = [set_prefix(name) for name in self.spec.sets]
        return tuple(prefix + name for prefix in prefixes for name in self.spec.metrics)

    @property
    def initial_loss(self) -> float | None:
        if self.multi_label or self.spec.negatives:
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
        loss, correct = summed_cross_entropy(logits_NC, labels_N, weights, self.label_smoothing)
        return {"loss": loss, "correct": correct}

    def loss_of_guessing(self, values: np.ndarray) -> float:
        """The task's `guessing_loss` for the labels `values` (see `label_values`)."""
        weights = np.array(self.class_weights) if self.class_weights else None
        if self.spec.negatives:
            share = float(np.mean(values > 0))
            return constant_loss(np.array([1 - share, share]))
        if self.spec.regression:
            return float(np.var(values))
        if self.multi_label:
            present_C = values.mean(axis=0)
            shares_C2 = np.stack([1 - present_C, present_C], axis=1)
            weights_C2 = [None] * len(shares_C2) if weights is None else weights.reshape(2, -1).T
            return float(np.mean(list(map(constant_loss, shares_C2, weights_C2))))
        share_C = np.bincount(values, minlength=len(self.spec.labels)) / len(values)
        return constant_loss(share_C, weights, self.label_smoothing)

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

    def training_set(self, tokenizer: "Tokenizer") -> tuple["ClassificationTask", "TextDataset"]:
        everything = self.read_labelled(self.training_file)
        examples, task = everything, self
        if self.split is not None:
            examples = everything.where(~self.held_out(everything, self.split))
            if self.split.group_column is not None and not self.spec.regression:
                check_learnt(everything, examples, self.split.group_column)
        if not self.spec.regression and not self.spec.labels:
            task = replace(self, spec=replace(self.spec, labels=find_labels(everything, self.spec)))
        values = label_values(examples, task.spec)
        warn_of_doubtful(examples, task.spec)
        if self.balanced:
            task = replace(task, class_weights=balanced_weights(examples.path, values, task.spec))
        task = replace(task, guessing_loss=task.loss_of_guessing(values))
        if self.baseline and self.eval_files:
            num_classes = max(1, len(task.spec.labels))
            task = replace(task, baseline_rows=LabelledTexts.draw(examples, values, num_classes))
        dataset = self.text_dataset(tokenizer, examples, values)
        self.say_what_is_cut(examples.path, dataset)
        return task, dataset

    def for_model(self, config: ModelConfig, folder: Path) -> "ClassificationTask":
        """The task with the labels of the fine-tuned model in `folder`, and its classifier if that
        was fitted. Raises UserError for a model of another kind of task, or with other labels than
        the task has.
        """
        return replace(self.with_labels_of(config, folder), frozen=FrozenEncoder.read(folder))

    def with_labels_of(self, config: ModelConfig, folder: Path) -> "ClassificationTask":
        check_pairs(config, folder, self.text_pairs)
        self.check_kind(config, folder)
        if self.spec.regression:
            return self
        task_labels = self.spec.labels  # none, if the files decide
        # transformers names the outputs LABEL_0, LABEL_1, ..., and writes no names of two of them.
        model_labels = config.labels or DEFAULT_LABELS
        has_names = any(label != f"LABEL_{index}" for index, label in enumerate(model_labels))
        if not has_names:
            if not task_labels:
                labels = self.numbered(len(model_labels))
                return replace(self, spec=replace(self.spec, labels=labels))
            if len(task_labels) == len(model_labels):
                return self
        labels = task_labels or sort_labels(self.spec.label_columns or model_labels)
        stored_labels = tuple(known_label(label, labels) for label in model_labels)
        if sorted(stored_labels) != sorted(labels):
            names = f"{listed(model_labels)}, and {self.spec.name} has {listed(labels)}"
            raise UserError(
                f"{folder} predicts {names}: use a model that was fine-tuned on this task"
            )
        return replace(self, spec=replace(self.spec, labels=labels), stored_labels=stored_labels)

    def check_kind(self, config: ModelConfig, folder: Path) -> None:
        """Raises UserError unless the model in `folder` predicts what the task needs for each text:
        one label, several labels, or a number.
        """
        has_labels = bool(config.labels)
        is_other_number = has_labels and config.is_number != self.spec.regression
        if config.multi_label == self.multi_label and not is_other_number:
            return
        kind = "several labels" if config.multi_label else "one label"
        if config.is_number:
            kind = "a number"
        advice = "use another one, or another task"
        if self.spec.negatives:
            advice = "a reranker has one number: train it again with --negative-columns"
        raise UserError(f"{folder} is a model of {kind} per text: {advice}")

    def numbered(self, count: int) -> tuple[str, ...]:
        """The names of `count` outputs that have none: their numbers if the files to score have
        those as labels, else LABEL_0 and so on.
        """
        numbers = tuple(str(index) for index in range(count))
        labels: set[str] = set()
        if not self.multi_label:
            for path in self.eval_files.values():
                labels.update(read_examples(path, self.spec, True, reading=self.reading).labels)
        if labels and all(known_label(label, numbers) in numbers for label in labels):
            return numbers
        return tuple(f"LABEL_{index}" for index in range(count))

    def prediction_sets(self, tokenizer: "Tokenizer") -> list[PredictionSet]:
        if self.eval_files:
            load_metrics()  # fail on a missing package before training
        sets = []
        for files, labelled in ((self.eval_files, True), (self.predict_files, False)):
            for set_name, path in files.items():
                if labelled:
                    examples = self.read_labelled(path)
                else:
                    examples = read_examples(path, self.spec, False, True, self.reading)
                if labelled and self.split is not None:
                    examples = examples.where(self.held_out(examples, self.split))
                values = label_values(examples, self.spec) if labelled else None
                finish = partial(self.finish, examples, values, set_name)
                undefined = None
                baselines = None
                if values is not None:
                    undefined = self.undefined_reason(values, set_name)
                if values is not None and self.baseline_rows is not None:
                    parts = (self.baseline_rows, examples, values, self.spec, set_name)
                    baselines = once(partial(class_baselines, *parts))
                dataset = self.text_dataset(tokenizer, examples)
                if self.train_file is None:
                    self.say_what_is_cut(path, dataset)
                if not labelled:
                    warn_of_unread(path, examples)
                sets.append(PredictionSet(dataset, finish, labelled, undefined, baselines))
        return sets

    def read_labelled(self, path: Path) -> Examples:
        """The rows of a file with labels, and with groups if they are held out by group."""
        group_column = None if self.split is None else self.split.group_column
        return read_examples(path, self.spec, True, False, self.reading, group_column)

    def say_what_is_cut(self, path: Path, dataset: TextDataset) -> None:
        """Says which share of a file the model does not see; of folds that of the first one."""
        if self.split is None or self.split.fold == 0:
            dataset.say_what_is_cut(path)

    def held_out(self, examples: Examples, split: Split) -> np.ndarray:
        """Whether each row of the training file is for development, [number of rows] booleans. Rows
        with the same texts stay together, and so do those of a reranker's query.
        """
        keys: list[Any] = list(examples.texts)
        if examples.pairs is not None and not self.spec.negatives:
            keys = list(zip(examples.texts, examples.pairs, strict=True))
        classes: list[Any] = list(examples.label_sets)
        if self.spec.regression:
            classes = [None] * len(examples)  # all rows are of one class
        return split.held_out(keys, classes, examples.groups)

    def undefined_reason(self, values: np.ndarray, set_name: str) -> str | None:
        """Why the score that selects the best checkpoint is not defined for a file, or None."""
        metric = self.metric.removeprefix(set_prefix(set_name))
        is_of_set = metric in self.spec.metrics
        return undefined_reason(values, self.spec, metric) if is_of_set else None

    def finish(
        self,
        examples: Examples,
        values: np.ndarray | None,
        set_name: str,
        logits_nC: np.ndarray,
        folder: Path | None,
    ) -> dict[str, Any]:
        """Writes the predictions, and returns the scores for the label `values` if there are
        some.
        """
        if self.stored_labels:  # a model from another library may have the labels in another order
            logits_nC = logits_nC[
                :, [self.stored_labels.index(label) for label in self.spec.labels]
            ]
        if values is None:
            if folder is None:
                return {}
            path = write_predictions(
                folder, examples, logits_nC, self.spec, set_name, self.reading.table_format
            )
            print_line(f"predictions for {len(examples)} samples in {path}")
            return {}
        scores = score(logits_nC, values, self.spec, set_name)
        if folder is None:
            return scores
        if warning := constant_prediction(logits_nC, values, self.spec):
            print_line(warning)
        path, mistakes = write_scored(
            folder,
            examples,
            logits_nC,
            values,
            self.spec,
            set_name,
            self.reading.table_format,
        )
        if self.spec.is_custom and not self.spec.regression:
            for line in mistake_lines(mistakes, len(examples), path):
                print_line(line)
        return scores | most_confident(mistakes, set_prefix(set_name))


def warn_of_doubtful(examples: Examples, spec: TaskSpec) -> None:
    """Warns of empty texts, and of equal ones with other labels."""
    columns = [examples.texts] if examples.pairs is None else [examples.texts, examples.pairs]
    texts = list(zip(*columns, strict=True))
    labels: list[Any]
    if spec.multi_label:
        labels = [tuple(sorted(label_set)) for label_set in examples.label_sets]
    elif spec.regression:
        labels = [float(label) for label in examples.labels]
    else:
        labels = [*examples.labels]
    warn_of_contradictions(examples.path, zip(texts, labels, examples.lines, strict=True))
    warn_of_blank(examples.path, zip(texts, examples.lines, strict=True))


def warn_of_unread(path: Path, examples: Examples) -> None:
    """Warns of empty texts to predict, whose prediction says nothing of them."""
    texts = zip(examples.texts, examples.pairs or examples.texts, strict=True)
    warn_of_predicted_blanks(path, zip(texts, examples.lines, strict=True))


def check_pairs(config: ModelConfig, folder: Path, given: bool) -> None:
    """Raises UserError if the model in `folder` was fine-tuned on single texts and pairs are given,
    or vice versa.
    """
    if config.text_pairs not in (None, given):
        what = (
            "single texts: leave out the second ones"
            if given
            else "pairs of texts: give the second ones, too"
        )
        raise UserError(f"{folder} was fine-tuned on {what}, or use another model")


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


def counts_of(values: np.ndarray, spec: TaskSpec) -> dict[str, int]:
    """The number of samples of each label. values: see `label_values`."""
    if spec.multi_label:
        counts_C = values.sum(axis=0)
    else:
        counts_C = np.bincount(values, minlength=len(spec.labels))
    return dict(zip(spec.labels, counts_C.tolist(), strict=True))


def balanced_weights(path: Path, values: np.ndarray, spec: TaskSpec) -> tuple[float, ...]:
    """`ClassificationTask.class_weights` by the number of samples of each class. Example: classes
    of 10, 10 and 80 samples have the weights 3.33, 3.33 and 0.42.

    path: the training file, for messages.
    values: see `label_values`.

    Raises UserError if a class has no sample.
    """
    counts = counts_of(values, spec)
    num_samples = len(values)
    labels = list(counts)
    with_label_C = np.array(list(counts.values()))
    if spec.multi_label:
        # Two classes for each label: the samples without it, and those with it.
        class_sizes = np.concatenate([num_samples - with_label_C, with_label_C])
        class_labels = labels + labels
        num_classes = 2
    else:
        class_sizes = with_label_C
        class_labels = labels
        num_classes = len(labels)
    smallest = int(class_sizes.argmin())
    label = class_labels[smallest]
    if class_sizes[smallest] == 0:
        what = "no sample" if counts[label] == 0 else "only samples"
        raise UserError(
            f"what is trained on in {path} has {what} of {label!r}: leave out --class-weights, or "
            f"that label"
        )
    weights = num_samples / (num_classes * class_sizes)
    if weights[smallest] > MAX_CLASS_WEIGHT:
        print_once(
            f"note: {path}: --class-weights balanced is limited to {MAX_CLASS_WEIGHT}; {label!r} "
            f"with {class_sizes[smallest]} samples would have {weights[smallest]:.0f}"
        )
    return tuple(weights.clip(max=MAX_CLASS_WEIGHT).tolist())


def find_labels(examples: Examples, spec: TaskSpec) -> tuple[str, ...]:
    """The labels in a custom training file, sorted; by value if all are numbers."""
    if spec.label_columns:
        check_spelling(examples.path, spec.label_columns)
        return sort_labels(spec.label_columns)
    labels = {label for label_set in examples.label_sets for label in label_set}
    if not labels:
        raise UserError(f"{examples.path}: no text has a label: check the column of labels")
    if spec.multi_label:
        check_several(examples.path, examples.label_sets, labels, spec)
    else:
        check_single(examples, labels)
    check_spelling(examples.path, labels)
    return sort_labels(labels)


def check_learnt(everything: Examples, training: Examples, group_column: str) -> None:
    """Warns of labels that only held-out groups have. Raises UserError if no two are learnt."""
    label_sets = {*training.label_sets}
    unlearnt = set().union(*everything.label_sets) - set().union(*label_sets)
    if not unlearnt:
        return
    where = f"--group-column {group_column}: only held-out groups have {listed(sorted(unlearnt))}"
    if len(label_sets) < 2:
        raise UserError(f"{where}, and one label is left to learn: give another column")
    print_once(f"warning: {where}, which the model does not learn")


def check_single(examples: Examples, labels: set[str]) -> None:
    """Raises UserError if `labels`, one per text, cannot be classes, and warns if each may be
    several labels.
    """
    if len(labels) < 2:
        raise UserError(
            f"{examples.path}: all labels are {min(labels)!r}: there must be at least two"
        )
    fractions = []
    if all(map(is_number, labels)):
        fractions = [label for label in labels if float(label) % 1]
    if len(labels) == len(examples) > MAX_TRIAL:
        advice = "add --regression" if fractions else "check the column of labels"
        raise UserError(f"{examples.path}: each text has a label of its own: {advice}")
    if fractions:
        print_once(
            f"note: {examples.path}: labels such as {min(fractions)} are {len(labels)} classes: "
            f"add --regression if they are numbers"
        )
    separator = other_separator(labels)
    parts = {part for label in labels for part in label.split(separator)}
    if separator is not None and len(parts) < len(labels):
        joined = min(label for label in labels if separator in label)
        print_once(
            f"warning: {examples.path}: {joined!r} is one class; if these are several labels, "
            f"use --task-name multi-label --label-separator {separator!r}"
        )


def check_several(
    path: Path, cells: Sequence[Sequence[str]], labels: set[str], spec: TaskSpec
) -> None:
    """Raises UserError if the labels of texts are vectors of 0 and 1, or if each combination of
    labels is one label.
    """
    lengths = {len(cell) for cell in cells if cell}
    if len(lengths) == 1 and labels <= {"0", "1", "0.0", "1.0", "true", "false"}:
        (length,) = lengths
        what = "each text has 0 or 1" if length == 1 else f"each text has {length} times 0 or 1"
        raise UserError(
            f"{path}: {spec.label!r}: {what}, without the names of labels: give a column of 0 and "
            f"1 for each label, as --label-column NAME NAME, or lists of names"
        )
    separator = None if spec.label_separator else other_separator(labels)
    if separator is not None:
        joined = min(label for label in labels if separator in label)
        raise UserError(
            f"{path}: {joined!r} would be one label: give --label-separator {separator!r} if it is "
            f"several, else --label-separator {LABEL_SEPARATOR!r}"
        )


def label_values(examples: Examples, spec: TaskSpec) -> np.ndarray:
    """Ids [n], multi-hot labels [n, C], or numbers [n] for regression."""
    if spec.regression:
        return np.array([float(label) for label in examples.labels])
    ids = {label: index for index, label in enumerate(spec.labels)}
    if spec.multi_label:
        return np.array(
            [[label in cell for label in ids] for cell in examples.label_sets], np.int64
        )
    return np.array([ids[label] for label in examples.labels], np.int64)
