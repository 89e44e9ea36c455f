"""The learning rate, the batch and the epochs of fine-tuning that no flag gives: one rule, by the
model and the rows.
"""

import math
from dataclasses import dataclass

BY_RULE = "by the model and the rows"  # what --help shows as the default
WARMUP_PROPORTION = 0.1
REFERENCE_WIDTH, REFERENCE_RATE = 1024, 2.4e-5  # NVIDIA's rate for BERT-large on GLUE
WIDTH_POWER = 1.75
LAMB_RATE, RANDOM_LAMB_RATE = 1e-3, 4e-3
MUON_FACTOR = 2.0
RANDOM_WEIGHTS_FACTOR = 2.0
WORDS_FACTOR, EMBEDDINGS_FACTOR = 2.0, 0.2
FEW_ROWS_BATCH, LARGEST_BATCH = 16, 32
MANY_ROWS = 5000
MIN_UPDATES, MIN_UPDATES_OF_WORDS = 150, 450
UPDATES_PER_LABEL, MAX_UPDATES_OF_LABELS = 25, 1200
MIN_TRAVEL = 0.02  # rate times updates: about how far Adam moves a weight
EPOCHS, MAX_EPOCHS = 3, 20
SQUAD_RATE = 5e-5  # NVIDIA's recipe, for many questions


@dataclass(frozen=True)
class FineTuningDefaults:
    """batch_size: sequences per update over all processes."""

    learning_rate: float
    batch_size: int
    epochs: float
    warmup_proportion: float = WARMUP_PROPORTION


def fine_tuning_defaults(
    kind: str | None,
    width: int,
    optimizer: str,
    num_rows: int,
    from_random_weights: bool = False,
    num_labels: int = 2,
) -> FineTuningDefaults:
    """The values for a run.

    Rate: 2.4e-5 * (1024 / width)^1.75 for AdamW; twice that for Muon and NorMuon, which learn less
    at AdamW's rate; 1e-3 for LAMB, whose updates are relative to the weights (one seed: "Other
    optimizers" in benchmarks/what_was_tried.md). Twice these for tags of words, most of which are
    O. From random weights twice AdamW's rate, and 4e-3 for LAMB. The best rate falls as 1 / width
    (Yang et al., 2022, "Tensor Programs V"); wider encoders are also deeper, and published rates
    fall faster: up to 3e-4 for narrow ones (Turc et al., 2019), 2e-5 to 5e-5 for BERT-base (Devlin
    et al., 2019), 2.4e-5 for BERT-large (NVIDIA). The power is fitted (scores: docs/defaults.md). A
    fifth for embeddings, which have no new layer to train: with the whole, what was learned is
    forgotten.

    Updates: few rows need many epochs. Mosbach et al. (2021, "On the Stability of Fine-tuning
    BERT") and Zhang et al. (2021, "Revisiting Few-sample BERT Fine-tuning") find that failed runs
    on few rows are mostly too short, and advise up to 20 epochs, a warmup over a tenth of them and
    Adam's bias correction, which the optimizers here have. So batches of 16 below 5,000 rows, and
    as many epochs as make 150 updates, for tags 450, for texts 25 for each label if that is more,
    up to 1,200; and more where AdamW's rate is lower, so that their product is 0.02; at least 3
    epochs and at most 20. From 5,000 rows on batches of 32 and 3 epochs. From random weights
    batches of 32.

    SQuAD's rate for AdamW is 5e-5 from 5,000 questions on, as in NVIDIA's recipe.

    kind: of the task, see Task.defaults_kind.
    width: hidden_size of the encoder.
    optimizer: its name.
    num_rows: rows, pairs, questions, or tagged sentences and parts of those longer than a sequence,
        of the whole training file. A question counts once, however many windows it has: more
        windows make more updates than the least, which costs time, and hold no more answers.
    from_random_weights: whether nothing is pre-trained.
    num_labels: of the texts.
    """
    has_many_rows = num_rows >= MANY_ROWS
    batch_size = FEW_ROWS_BATCH
    if has_many_rows or from_random_weights:
        batch_size = LARGEST_BATCH
    batch_size = min(batch_size, num_rows)
    is_lamb = "lamb" in optimizer.lower()
    adamw_rate = REFERENCE_RATE * (REFERENCE_WIDTH / width) ** WIDTH_POWER
    rate = LAMB_RATE if is_lamb else adamw_rate
    is_words = kind == "words"
    updates = max(MIN_UPDATES_OF_WORDS if is_words else MIN_UPDATES, MIN_TRAVEL / adamw_rate)
    if kind == "texts":
        updates = max(updates, min(UPDATES_PER_LABEL * num_labels, MAX_UPDATES_OF_LABELS))
    if from_random_weights:
        rate = RANDOM_LAMB_RATE if is_lamb else RANDOM_WEIGHTS_FACTOR * rate
    elif is_words:
        rate *= WORDS_FACTOR
    elif kind == "embeddings":
        rate *= EMBEDDINGS_FACTOR
    epochs = math.ceil(updates * batch_size / num_rows)
    if has_many_rows:
        epochs = EPOCHS
        if kind == "questions" and not is_lamb:
            rate = SQUAD_RATE
    if "muon" in optimizer.lower() and not from_random_weights:
        rate *= MUON_FACTOR
    epochs = max(EPOCHS, min(epochs, MAX_EPOCHS))
    return FineTuningDefaults(two_digits(rate), batch_size, epochs)


def two_digits(number: float) -> float:
    return float(f"{number:.1e}")
