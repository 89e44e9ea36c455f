"""Values and conditions that flags of several configs share."""

from bert_recipe.utils.command_line import bounded_int, positive_int
from bert_recipe.utils.resources import resource_folder

PRE_TRAINING, FINE_TUNING = "pre-training", "fine-tuning"  # values of the tag `only`
CONFIGS = resource_folder("bert_configs")
CUSTOM = "custom"  # the model name of an architecture that has no file in bert_configs/

# Flags without effect when not training. Not --optimizer and --log-freq: NVIDIA's prediction
# commands pass them too.
TRAIN = ("--do-train",)

MAX_BATCH = 2**24  # sequences per update or micro-batch
MAX_LENGTH = 2**20  # tokens per sequence

batch = bounded_int(1, MAX_BATCH)
length = bounded_int(1, MAX_LENGTH)


def is_step(name: str) -> bool:
    """Whether `name` is a step's folder name: a number without leading zeros."""
    if name == "0":
        return True
    return name.isascii() and name.isdigit() and name[0] != "0" and len(name) < 20


def positive_int_or_minus_one(text: str) -> int:
    return -1 if text in ("-1", "-1.0") else positive_int(text)  # -1.0 in NVIDIA's scripts
