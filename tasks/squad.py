"""SQuAD v1.1 and v2.0 (Devlin et al., 2018, section 4.2): the span task, its scores and prediction files.

Legend: T tokens of all features.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from data_loading.loader import MicroBatch
from data_loading.packing import TokenStream
from loss import span_sum
from tasks import FineTuningTask, PredictionSet
from tasks.squad_answers import Predictions, decode
from tasks.squad_features import LABELS, SquadDataset
from tasks.squad_file import SquadOptions, read_squad
from tasks.squad_scores import evaluate
from utils.files import write_json
from utils.progress import print_line

PREDICTION_FILES = ("predictions.json", "nbest_predictions.json", "null_odds.json")


@dataclass(frozen=True)
class SquadTask(SquadOptions, FineTuningTask):
    """SQuAD's span task. scores: whether `predict_file` has answers to score."""

    train_file: Path | None = None
    predict_file: Path | None = None
    scores: bool = False

    name = "squad"
    head = "question_answering"
    logits_axis = "token"
    metric = "f1"
    result_files = PREDICTION_FILES

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        output = model(TokenStream.from_batch(micro_batch, self.max_seq_length))
        labels = [micro_batch[name] for name in LABELS]
        return {"loss": span_sum(*output, *labels, micro_batch["cu_seqlens"], self.max_seq_length)}

    def training_set(self, tokenizer) -> tuple["SquadTask", SquadDataset]:
        return self, SquadDataset(read_squad(self.train_file), tokenizer, self, training=True)

    def prediction_sets(self, tokenizer) -> list[PredictionSet]:
        if self.predict_file is None:
            return []
        dataset = SquadDataset(read_squad(self.predict_file), tokenizer, self)
        return [PredictionSet(dataset, partial(self.finish, dataset), self.scores)]

    def finish(self, dataset: SquadDataset, logits_T2: np.ndarray, folder: Path | None) -> dict[str, float]:
        predictions = decode(dataset, *logits_T2.T, self)
        if folder is not None:
            path = write_predictions(folder, predictions)
            print_line(f"answers to {len(predictions.answers)} questions in {path}")
        if not self.scores:
            return {}
        # The threshold on the null odds was applied when the answers were chosen.
        return evaluate(dataset.squad, predictions.answers, predictions.null_odds, na_prob_thresh=math.inf)


def write_predictions(folder: Path, predictions: Predictions) -> Path:
    """Writes PREDICTION_FILES to `folder`, each atomically, and returns the first path. The last file is for v2.0 only;
    otherwise an old one is removed."""
    answers_file, nbest_file, null_odds_file = (folder / name for name in PREDICTION_FILES)
    files = {nbest_file: predictions.nbest, answers_file: predictions.answers, null_odds_file: predictions.null_odds}
    for path, content in files.items():
        if content is None:
            path.unlink(missing_ok=True)
        else:
            write_json(path, content, indent=4)
    return answers_file
