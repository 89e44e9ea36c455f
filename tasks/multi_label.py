"""Multi-label text classification: each text has any number of labels.

Legend: n samples, N sequences of a stream, C labels.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from data_loading.loader import MicroBatch
from data_loading.packing import IGNORED_LABEL, TokenStream
from tasks.glue import ClassificationTask, class_table, sort_labels
from tasks.glue_files import LABEL_SEPARATOR, Examples, TextTask
from utils.errors import UserError


def multi_label_task(text: str, pair: str | None, label: str) -> TextTask:
    """A task for a custom file. The labels of a text are separated by `|`, or a list in JSON lines."""
    metrics = ("f1_micro", "f1_macro", "exact_match")
    return TextTask("predictions", text, pair, label, (), metrics, exact_columns=True, multi_label=True)


def split(labels: str) -> list[str]:
    return labels.split(LABEL_SEPARATOR) if labels else []


@dataclass(frozen=True)
class MultiLabelTask(ClassificationTask):
    """Multi-label classification with binary cross-entropy; implements tasks.FineTuningTask."""

    multi_label = True
    metric = "f1_micro"
    initial_loss = math.log(2)

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        logits_NC = model(TokenStream.from_batch(micro_batch, self.max_seq_length)).logits.float()
        labels_NC = micro_batch["labels"]
        is_real_N = labels_NC[:, 0] != IGNORED_LABEL
        losses_NC = F.binary_cross_entropy_with_logits(logits_NC, labels_NC.clamp(min=0).float(), reduction="none")
        correct_N = ((logits_NC > 0) == (labels_NC > 0)).all(dim=1) & is_real_N
        return {"loss": losses_NC.mean(dim=1).where(is_real_N, 0.0).sum(), "correct": correct_N.sum()}

    def find_labels(self, examples: Examples) -> tuple[str, ...]:
        labels = {label for labels in examples.labels for label in split(labels)}
        if not labels:
            raise UserError(f"{examples.path}: no text has a label: check the column of labels")
        return sort_labels(labels)

    def values(self, examples: Examples) -> np.ndarray:
        """Multi-hot labels [n, C]. Raises UserError naming the line of an unknown label."""
        ids = {label: index for index, label in enumerate(self.spec.labels)}
        values_nC = np.zeros((len(examples), len(ids)), np.int64)
        for row, (line, labels) in enumerate(zip(examples.lines, examples.labels, strict=True)):
            for label in split(labels):
                if label not in ids:
                    raise UserError(f"{examples.path}, line {line}: label {label!r}, expected one of {', '.join(ids)}")
                values_nC[row, ids[label]] = 1
        return values_nC

    def score(self, values_nC: np.ndarray, set_name: str, logits_nC: np.ndarray, folder: Path | None) -> dict[str, Any]:
        """Micro F1, macro F1, and the fraction of texts with all labels correct."""
        found_nC = self.in_order(logits_nC) > 0
        right_C, wrong_C = (values_nC * found_nC).sum(axis=0), (values_nC != found_nC).sum(axis=0)
        f1_C = 2 * right_C / np.maximum(2 * right_C + wrong_C, 1)
        precision_C, recall_C = (right_C / np.maximum(side_nC.sum(axis=0), 1) for side_nC in (found_nC, values_nC))
        scores = (
            2 * right_C.sum() / max(2 * right_C.sum() + wrong_C.sum(), 1),
            f1_C.mean(),
            (values_nC == found_nC).all(axis=1).mean(),
        )
        columns = [precision_C.tolist(), recall_C.tolist(), f1_C.tolist(), values_nC.sum(axis=0).tolist()]
        return dict(zip(self.spec.metrics, map(float, scores), strict=True)) | {
            "per_class": class_table(self.spec.labels, columns)
        }

    def words(self, logits_nC: np.ndarray) -> Iterable[str]:
        labels = np.array(self.spec.labels)
        return [LABEL_SEPARATOR.join(labels[row_C > 0]) for row_C in logits_nC]
