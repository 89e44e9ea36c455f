"""What a run starts from."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from bert_recipe.config.flag_values import (
    CONFIGS,
    CUSTOM,
    FINE_TUNING,
    PRE_TRAINING,
    TRAIN,
    is_step,
)
from bert_recipe.utils.command_line import (
    Flag,
    bounded_float,
    fraction_below_one,
    option,
    optional_path,
)

BERT_MODELS = (*sorted(path.stem for path in CONFIGS.glob("*.json")), CUSTOM)
DEFAULT_BERT_MODEL = "bert-large-uncased"


def checkpoint_step(text: str) -> str | None:
    if text != "auto" and text.lower() != "none" and not is_step(text):
        raise argparse.ArgumentTypeError(f"expected None, auto or a step, not {text}")
    return None if text.lower() == "none" else text


@dataclass(frozen=True)
class ModelSelection:
    """Flags that select architecture, vocabulary and casing (see checkpoint/model_choice.py).
    None: taken from the model folder, the config or the vocabulary; `name` is None unless it is
    given.
    """

    name: str | None = field(
        default=None,
        metadata={"flag": Flag("--bert-model", BERT_MODELS, DEFAULT_BERT_MODEL, "architecture")},
    )
    config_file: Path | None = option(
        "--config-file",
        optional_path,
        None,
        "the architecture's JSON file; by default bert_configs/<bert-model>.json, required for "
        "custom",
    )
    vocab_file: Path | None = option(
        "--vocab-file",
        optional_path,
        None,
        "vocabulary or tokenizer.json; by default vocab/<bert-model>-vocab.txt",
    )
    pre_layer_norm: bool = option(
        "--pre-layer-norm --preln",
        bool,
        False,
        "LayerNorm before attention and feed-forward, as in DeepSpeed's bing_bert",
        encoder_option=True,
    )
    global_rope_theta: float | None = option(
        "--global-rope-theta",
        bounded_float(1, 1e12),
        None,
        "ModernBERT's theta of rotary positions in global layers, larger for longer texts; by "
        "default the config's",
        encoder_option=True,
    )
    dropout: float | None = option(
        "--dropout",
        fraction_below_one,
        None,
        "dropout of hidden states and attention; by default that of the config",
        needs=TRAIN,
        excludes=("--frozen-encoder",),
    )
    do_lower_case: bool | None = option(
        "--do-lower-case",
        bool,
        None,
        "lower-case the text, and strip accents unless the tokenizer keeps them; by default if "
        "the vocabulary has no capital letters",
        only=FINE_TUNING,
    )

    @property
    def given_name(self) -> str | None:
        """The model's name if a flag gives it; None if it is that of the folder that the run starts
        from, if any.
        """
        if self.name is not None or self.config_file is None:
            return self.name
        if self.config_file.resolve().parent == CONFIGS:
            return self.config_file.stem
        return CUSTOM


@dataclass(frozen=True)
class StartConfig:
    """Initial state of a run."""

    from_pretrained_params: Path | None = option(
        "--from-pretrained-params --init-checkpoint --model-name-or-path",
        optional_path,
        None,
        "checkpoint or Hugging Face model folder to start from: its weights, and unless these are "
        "given, its config, vocabulary and casing; not its optimizer or step",
    )
    from_checkpoint: Path | None = option(
        "--from-checkpoint",
        optional_path,
        None,
        "checkpoint to resume: weights, optimizer, schedule and data position",
    )
    last_step_of_checkpoint: str | None = option(
        "--last-step-of-checkpoint",
        checkpoint_step,
        None,
        "None: --from-checkpoint is a checkpoint folder; N: it is the folder of steps that holds "
        "N; auto: the newest valid checkpoint in that folder of steps, or a start from step 1 if "
        "it has none yet",
        needs=("--from-checkpoint",),
    )
    resume: bool = option(
        "--resume-from-checkpoint",
        bool,
        False,
        "resume this run's newest checkpoint, or start from step 1 without one",
        needs=TRAIN,
        excludes=("--from-checkpoint", "--frozen-encoder"),
    )
    overwrite: bool = option(
        "--overwrite --overwrite-output-dir",
        bool,
        False,
        "remove another run's checkpoints and results from this run's folder",
        needs=TRAIN,
        excludes=("--benchmark",),
    )
    from_phase1_final_params: Path | None = option(
        "--from-phase1-final-params",
        optional_path,
        None,
        "phase 1's last checkpoint: weights for the first step of phase 2; ignored once phase 2 "
        "has a checkpoint",
        needs=("--phase2",),
        excludes=("--from-pretrained-params",),
        only=PRE_TRAINING,
    )
    lr_rewarmup: bool = option(
        "--lr-rewarmup --rewarmup",
        bool,
        False,
        "start phase 2 with phase 1's optimizer state and number of updates too, and with a new "
        "schedule, as DeepSpeed's bing_bert; --max-steps then counts the updates of both phases",
        needs=("--from-phase1-final-params",),
        result=True,
        only=PRE_TRAINING,
    )
