"""Configuration of a run: one frozen dataclass per module. Fields that `option` makes have a flag,
whose help text explains them; `arguments.py` parses the flags and fills in the other fields.

Tags of a flag: `result` marks a hyperparameter that is recorded with the run (see
checkpoint/identity.py), `deepspeed` is the equivalent key in DeepSpeed's JSON file, and `only` is
the kind of program that has the flag, PRE_TRAINING or FINE_TUNING; by default all have it. Does not
import torch, so that parsing is fast.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from utils.command_line import (
    REQUIRED,
    bounded_float,
    bounded_int,
    fraction,
    fraction_below_one,
    non_negative_float,
    non_negative_int,
    option,
    optional_path,
    plain_name,
    positive_float,
    positive_int,
    random_seed,
)

PRE_TRAINING, FINE_TUNING = "pre-training", "fine-tuning"  # values of the tag `only`
OPTIMIZERS = ("Lamb", "AdamW", "Muon", "NorMuon")
DECAYS = (
    "poly",
    "linear",
    "cosine",
    "exponential",
    "constant",
    "noam",
    "warmup_exp_decay_exp",
    "warmup_stable_decay",
)
AMP_DTYPES = ("bfloat16", "float16")
ACTIVATION_CHECKPOINTS = ("none", "selective", "full")
RESHARD_MODES = ("default", "always", "never")
COMPILE_MODES = ("none", "layers", "model")
CONFIGS = Path(__file__).resolve().parent / "bert_configs"
CUSTOM = "custom"  # the model name of an architecture that has no file in bert_configs/
BERT_MODELS = (*sorted(path.stem for path in CONFIGS.glob("*.json")), CUSTOM)
DEFAULT_BERT_MODEL = "bert-large-uncased"

# Flags without effect when not training. Not --optimizer and --log-freq: NVIDIA's prediction
# commands pass them too.
TRAIN = ("--do-train",)
LAMB = (*TRAIN, "--optimizer Lamb")
POLY, EXPONENTIAL = (*TRAIN, "--lr-decay poly"), (*TRAIN, "--lr-decay warmup_exp_decay_exp")
TRAPEZOID = (*TRAIN, "--lr-decay warmup_stable_decay")
SIXTEEN_BITS = ("--amp or --use-pure-fp16 or --fp16",)
SHARDED, PREDICT = ("--data-parallel-shard-degree",), ("--do-eval or --do-predict",)
NOT_DEEPSPEED = ("--deepspeed",)

MAX_BATCH = 2**24  # sequences per update or micro-batch
MAX_LENGTH = 2**20  # tokens per sequence


def is_step(name: str) -> bool:
    """Whether `name` is a step's folder name: a number without leading zeros."""
    return name == "0" or (name.isascii() and name.isdigit() and name[0] != "0" and len(name) < 20)


def checkpoint_step(text: str) -> str | None:
    if text != "auto" and text.lower() != "none" and not is_step(text):
        raise argparse.ArgumentTypeError(f"expected None, auto or a step, not {text}")
    return None if text.lower() == "none" else text


def positive_int_or_minus_one(text: str) -> int:
    return -1 if text == "-1" else positive_int(text)


minutes = bounded_float(0, 10_000, exclusive=True)
mask_share = bounded_float(0, 1, exclusive=True)


def mask_rate(text: str) -> float | str:
    """A share, or a schedule of two, which stays text (see masking.mask_rates)."""
    first, colon, last = text.partition(":")
    return f"{mask_share(first)}:{mask_share(last)}" if colon else mask_share(text)


batch, length = bounded_int(1, MAX_BATCH), bounded_int(1, MAX_LENGTH)


# fmt: off
@dataclass(frozen=True)
class RuntimeConfig:
    """Device, processes and logs. `messages`: to print first. `reports_in_folder`: also log to the
    run's folder.
    """

    report_file: Path | None = option("--report-file --json-summary", optional_path, None,
        "file for DLLogger's JSON lines; by default report.json in the run's folder")
    log_file: Path | None = option("--log-file", optional_path, None, "file for DLLogger's text lines")
    tensorboard_dir: Path | None = option("--tensorboard-dir", optional_path, None, "folder for TensorBoard's logs")
    wandb_project: str | None = option("--wandb-project", str, None, "project of Weights & Biases")
    show_config: bool | None = option("--show-config", bool, None,
        "print all settings at the start (true) or none (false); by default those that differ from the defaults")
    device: str = option("--device", ("auto", "cuda", "cpu"), "auto", "auto: a GPU if there is one")
    cpu_affinity: bool = option("--enable-cpu-affinity", bool, True, "bind each process to the cores near its GPU")
    deterministic: bool = option("--deterministic", bool, False,
        "kernels that add in a fixed order: equal runs on GPUs are equal to the bit; slower", excludes=NOT_DEEPSPEED)
    timeout_minutes: float = option("--distributed-timeout-minutes", minutes, 5,
        "minutes to wait at the start for all processes")
    collective_timeout_minutes: float = option("--collective-timeout-minutes", minutes, 30,
        "minutes to wait for another process later; more than the verification of a checkpoint takes")
    messages: tuple[str, ...] = ()
    reports_in_folder: bool = False


@dataclass(frozen=True)
class PrecisionConfig:
    """`amp`: compute in 16 bits with float32 weights; `pure_fp16`: the model's weights are in
    `amp_dtype`, too. `arguments.precision_config` resolves `--fp16` and what is not given.
    """

    amp: bool = option("--amp", bool, False, "compute in 16 bits, with float32 weights", result=True)
    fp16: bool = option("--fp16", bool, False, (
        "the same as --amp --amp-dtype float16 with dynamic "
        "loss scaling"
    ),
        result=True)
    amp_dtype: str = option("--amp-dtype", AMP_DTYPES, None,
        "the 16-bit type; by default bfloat16, or float16 with a loss scaling flag", SIXTEEN_BITS, result=True)
    pure_fp16: bool = option("--use-pure-fp16", bool, False,
        "keep the model in --amp-dtype; the optimizer has float32 copies", result=True)
    loss_scale: float = option("--scale-loss", positive_float, 1.0, "loss scale of float16", SIXTEEN_BITS, result=True)
    dynamic_loss_scale: bool = option("--use-dynamic-loss-scaling", bool, False,
        "adapt the loss scale, starting at --scale-loss, or at 2^20 without it", SIXTEEN_BITS, result=True)
    tf32: bool = option("--tf32", bool, False, "float32 matrix products in TF32, on GPUs that have it", result=True)
    fp8: bool = option("--fp8", bool, False,
        "matrix products of the layers in float8, with torchao, on GPUs from Ada and Hopper on; "
        "combine with --compile",
        ("--amp or --use-pure-fp16",), excludes=("--deepspeed", "--estimate-memory"), result=True)


@dataclass(frozen=True)
class ModelSelection:
    """Flags that select architecture, vocabulary and casing (see checkpoint/model_choice.py).
    `is_named`: `name` was given explicitly. None: taken from the model folder, the config or the
    vocabulary.
    """

    name: str = option("--bert-model", BERT_MODELS, DEFAULT_BERT_MODEL, "architecture")
    config_file: Path | None = option("--config-file", optional_path, None,
        "the architecture's JSON file; by default bert_configs/<bert-model>.json, required for custom")
    vocab_file: Path | None = option("--vocab-file", optional_path, None,
        "vocabulary or tokenizer.json; by default vocab/<bert-model>-vocab.txt")
    pre_layer_norm: bool = option("--pre-layer-norm --preln", bool, False,
        "LayerNorm before attention and feed-forward, as in DeepSpeed's bing_bert")
    global_rope_theta: float | None = option("--global-rope-theta", bounded_float(1, 1e12), None,
        "ModernBERT's theta of rotary positions in global layers, larger for longer texts; by default the config's")
    dropout: float | None = option("--dropout", fraction_below_one, None,
        "dropout of hidden states and attention; by default that of the config", TRAIN)
    do_lower_case: bool | None = option("--do-lower-case", bool, None,
        "lower-case and strip accents; by default if the vocabulary has no capital letters", only=FINE_TUNING)
    is_named: bool = False

    @property
    def given_name(self) -> str | None:
        """The model's name if a flag gives it; None if it is that of the folder that the run starts
        from, if any.
        """
        if self.is_named or self.config_file is None:
            return self.name if self.is_named else None
        return self.config_file.stem if self.config_file.resolve().parent == CONFIGS else CUSTOM


@dataclass(frozen=True)
class RunRecord:
    """Identity of a run (see checkpoint/identity.py) and its hyperparameters, as JSON values by
    name; None: unknown.
    """

    identity: dict[str, Any]
    hyperparameters: dict[str, Any]


@dataclass(frozen=True)
class TrainerConfig:
    """Length of a run, and how often it logs, evaluates and saves. `eval_steps` 0: only at the end.
    `record`: None on ranks other than the main one, and for benchmarks. `logs_start`: log the loss
    before the first update.
    """

    max_steps: int = option("--max-steps", positive_int_or_minus_one, REQUIRED,
        "number of updates; in fine-tuning at most, and -1 means as many as the epochs need", TRAIN)
    checkpoint_folder: Path = option("--output-dir", Path, REQUIRED, "folder for checkpoints and results")
    epochs: float | None = option("--epochs --num-train-epochs", bounded_float(0, 1e6, exclusive=True), None,
        "passes over the training data", TRAIN, only=FINE_TUNING)
    log_freq: int = option("--log-freq --logging-steps --print-steps", positive_int, 10, "updates between log lines",
        deepspeed="steps_per_print")
    eval_steps: int = option("--eval-steps", non_negative_int, 0,
        "updates between evaluations; fine-tuning keeps the checkpoint with the best score; 0: "
        "only at the end",
        ("--eval-dir", "--do-train", "--do-eval"), excludes=("--benchmark",))
    steps_per_checkpoint: int = option("--num-steps-per-checkpoint --save-steps", positive_int, 100,
        "updates between checkpoints", TRAIN)
    steps_this_run: int | None = option("--steps-this-run", positive_int, None, "stop after this many updates", TRAIN,
        excludes=("--benchmark",))
    benchmark: bool = option("--benchmark", bool, False, "measure speed; save nothing but the report")
    benchmark_steps: int = option("--benchmark-steps", positive_int, 20, "updates that are measured", ("--benchmark",))
    benchmark_warmup_steps: int = option("--benchmark-warmup-steps", positive_int, 20,
        "updates before the measured ones", ("--benchmark",))
    keep_every: int | None = option("--keep-every", positive_int, None,
        "keep the checkpoints whose step is a multiple of this, besides the newest three", TRAIN)
    save_initial: bool = option("--save-initial", bool, False, (
        "save the starting weights as step "
        "0, which is kept"
    ),
        TRAIN, excludes=("--benchmark",))
    ema: float | None = option("--ema", fraction_below_one, None,
        "save the exponential moving average of the weights with this decay, too, as the model "
        "folder ema, and "
        "evaluate it on --eval-dir", excludes=(*NOT_DEEPSPEED, "--benchmark"), result=True, only=PRE_TRAINING)
    max_grad_norm: float = option("--max-grad-norm", positive_float, 1.0, "gradients are clipped to this norm", TRAIN,
        result=True, deepspeed="gradient_clipping")
    max_skipped_steps: int = option("--max-skipped-steps", positive_int, 25,
        "stop after this many updates in a row without a finite gradient", TRAIN)
    record: RunRecord | None = None
    logs_start: bool = False


@dataclass(frozen=True)
class LoaderConfig:
    """`batch_size`: sequences of full length per micro-batch; `global_batch_size`: sequences per
    optimizer step over all ranks, from --gradient-merge-steps if not given; it grows linearly from
    `initial_global_batch_size` while the first `batch_size_warmup_sequences` of the run are read.
    """

    batch_size: int = option("--batch-size --train-batch-size --per-device-train-batch-size", batch, 32,
        "sequences per GPU and micro-batch")
    global_batch_size: int = option("--global-batch-size", batch, None,
        "sequences per update over all GPUs, instead of --gradient-merge-steps", TRAIN)
    max_seq_length: int = option("--max-seq-length --max-length", length, 512,
        "maximum tokens of a sequence; in pre-training the length of the shards' sequences")
    max_masked: int = option("--max-predictions-per-seq", length, 0,
        "most masked tokens of a sequence; by default the shards', or what --masked-lm-prob takes", only=PRE_TRAINING)
    gradient_merge_steps: int = option("--gradient-merge-steps --gradient-accumulation-steps", batch, 1,
        "micro-batches per GPU and update, whose gradients are summed", TRAIN, excludes=("--global-batch-size",))
    num_workers: int = option("--num-workers --dataloader-num-workers", bounded_int(0, 1024), 1,
        "threads that read data ahead", TRAIN)
    masked_lm_prob: float | str | None = option("--masked-lm-prob --mlm-probability", mask_rate, None,
        "for shards made with --dynamic-masking: share of the tokens to mask, by default 0.15; "
        "FIRST:LAST, such as "
        "0.3:0.15, changes linearly over the run", result=True, only=PRE_TRAINING)
    eval_masked_lm_prob: float | None = option("--eval-masked-lm-prob", mask_share, None,
        "the same share for --eval-dir, by default 0.15; the masks are the same in every evaluation", ("--eval-dir",),
        result=True, only=PRE_TRAINING)
    whole_word_mask: bool = option("--whole-word-mask", bool, False,
        "for shards made with --dynamic-masking: mask whole words", result=True, only=PRE_TRAINING)
    causal_proportion: float = option("--causal-proportion", fraction_below_one, 0.0,
        "for shards made with --dynamic-masking and --no-nsp: share of the updates, the first "
        "ones, that predict the "
        "next token, with causal attention; as many tokens as would be masked", result=True, only=PRE_TRAINING)
    initial_global_batch_size: int = option("--initial-global-batch-size", batch, 0,
        "sequences of the first update over all GPUs; the batch grows linearly to the full one",
        ("--batch-size-warmup-sequences",), excludes=NOT_DEEPSPEED, result=True, only=PRE_TRAINING)
    batch_size_warmup_sequences: int = option("--batch-size-warmup-sequences", positive_int, 0,
        "sequences of the run that are read while the batch grows", ("--initial-global-batch-size",), result=True,
        only=PRE_TRAINING)


@dataclass(frozen=True)
class OptimizerConfig:
    """Clipping is part of `grad_scale` (see optimizers.protocol.apply_step)."""

    name: str = option("--optimizer", OPTIMIZERS, "Lamb",
        "Muon and NorMuon update the matrices of hidden layers, and AdamW the rest", result=True)
    eps: float = option("--epsilon --adam-epsilon", positive_float, 1e-6, "epsilon of the optimizer", TRAIN,
        result=True, deepspeed="optimizer.params.eps")
    weight_decay: float = option("--weight-decay", non_negative_float, 0.01,
        "weight decay; none on biases and LayerNorms", TRAIN, result=True, deepspeed="optimizer.params.weight_decay")
    bias_correction: bool = option("--lamb-bias-correction", bool, True, "bias-correct Lamb's moments", LAMB,
        result=True)
    adapt_undecayed: bool = option("--lamb-adapt-undecayed", bool, False,
        "use trust ratios for biases and LayerNorms too, as DeepSpeed's LAMB", LAMB, result=True)
    beta1: float = option("--beta1 --adam-beta1", fraction_below_one, 0.9, "decay of the first moment", TRAIN,
        result=True)
    beta2: float = option("--beta2 --adam-beta2", fraction_below_one, 0.999, "decay of the second moment", TRAIN,
        result=True)
    min_trust: float = option("--lamb-min-coeff", non_negative_float, 0.0, "lower bound of Lamb's trust ratios", LAMB,
        result=True, deepspeed="optimizer.params.min_coeff")
    max_trust: float | None = option("--lamb-max-coeff", positive_float, None,
        "upper bound of Lamb's trust ratio; by default none", LAMB, result=True, deepspeed="optimizer.params.max_coeff")

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2

    @property
    def trust_bounds(self) -> tuple[float, float] | None:
        """Minimum and maximum of Lamb's trust ratios, or None without any."""
        maximum = math.inf if self.max_trust is None else self.max_trust
        return (self.min_trust, maximum) if self.min_trust > 0 or maximum < math.inf else None


@dataclass(frozen=True)
class ScheduleConfig:
    """`gamma` applies to exponential. The schedule begins at update `first_step` and ends at
    `total_steps`.
    """

    total_steps: int
    learning_rate: float = option("--learning-rate --lr", non_negative_float, REQUIRED, "peak learning rate", TRAIN,
        result=True, deepspeed="optimizer.params.lr")
    decay: str = option("--lr-decay --lr-scheduler-type", DECAYS, "poly", "schedule after the warmup", TRAIN,
        result=True)
    warmup_proportion: float = option("--warmup-proportion --warmup-ratio", fraction, 0.0,
        "share of the updates for the warmup", TRAIN, result=True)
    warmup_start_lr: float = option("--warmup-start-lr", non_negative_float, 0.0,
        "learning rate at the start of the warmup; for poly", POLY, result=True)
    power: float = option("--lr-decay-power", positive_float, 1.0, (
        "power of poly; NVIDIA's "
        "PyTorch recipe has 0.5"
    ),
        POLY, result=True)
    rate: float = option("--lr-decay-rate", positive_float, 0.9,
        "decay rate of warmup_exp_decay_exp; of exponential, where it is 0.95 by default",
        (*TRAIN, "--lr-decay warmup_exp_decay_exp or --lr-decay exponential"), result=True)
    decay_steps: float = option("--lr-decay-steps", positive_int, 250, (
        "updates per decay of "
        "warmup_exp_decay_exp"
    ),
        EXPONENTIAL, result=True)
    offset: float = option("--lr-offset", non_negative_float, 0.0, (
        "added to the learning rate by "
        "warmup_exp_decay_exp"
    ),
        EXPONENTIAL, result=True)
    decay_proportion: float = option("--lr-decay-proportion", fraction, 0.1,
        "share of the updates for the decay at the end; for warmup_stable_decay", TRAPEZOID, result=True)
    gamma: float = 0.95
    first_step: int = 0


@dataclass(frozen=True)
class ParallelConfig:
    """`shard_degree`: number of ranks that share one copy of the model, after
    `arguments.parallel_config` never -1. `deepspeed`: configuration of DeepSpeed's engine, or None.
    """

    compile: str = option("--compile", COMPILE_MODES, "none",
        "torch.compile: each layer, and on GPUs the loss (starts sooner), or the whole model; "
        "needs a C++ compiler",
        TRAIN, excludes=("--deepspeed",))
    activation_checkpoint: str = option("--activation-checkpoint", ACTIVATION_CHECKPOINTS, "none",
        "compute activations again in the backward pass: those of each layer (full), or all but "
        "the outputs of linear "
        "layers (selective)", TRAIN)
    cpu_offload: bool = option("--enable-cpu-offload", bool, False,
        "on GPUs, with one process or sharded: keep optimizer state, gradients and float32 "
        "parameters on the CPU, and "
        "run the optimizer there", excludes=NOT_DEEPSPEED)
    shard_degree: int = option("--data-parallel-shard-degree", positive_int_or_minus_one, 1,
        "processes that share one copy of parameters, gradients and optimizer state (FSDP2); 1: "
        "every process has its "
        "own (DDP); -1: all processes share one", excludes=NOT_DEEPSPEED)
    replicate_degree: int | None = option("--data-parallel-replicate-degree", positive_int, None,
        "copies of the model; by default the number of processes divided by the shard degree", excludes=NOT_DEEPSPEED)
    reshard_after_forward: str = option("--fsdp-reshard-after-forward", RESHARD_MODES, "default",
        "when sharded: free gathered parameters after the forward pass always, never (they are "
        "kept for the whole "
        "update), or by default those of the layers", SHARDED, excludes=NOT_DEEPSPEED)
    uses_deepspeed: bool = option("--deepspeed", bool, False, (
        "train with DeepSpeed's engine; see "
        "--deepspeed-config"
    ),
        TRAIN)
    deepspeed_config: Path | None = option("--deepspeed-config", optional_path, None,
        "DeepSpeed's JSON file; docs/coming_from_deepspeed.md says what its keys do here", ("--deepspeed",))
    local_rank: int | None = option("--local-rank", non_negative_int, None, argparse.SUPPRESS)  # of its launcher
    deepspeed: dict[str, Any] | None = None


@dataclass(frozen=True)
class StartConfig:
    """Initial state of a run. `result_files`: files that `overwrite` removes besides checkpoints."""

    from_pretrained_params: Path | None = option((
        "--from-pretrained-params --init-checkpoint "
        "--model-name-or-path"
    ),
        optional_path, None,
        "checkpoint or Hugging Face model folder to load weights from, and nothing else")
    from_checkpoint: Path | None = option("--from-checkpoint", optional_path, None,
        "checkpoint to resume: weights, optimizer, schedule and data position")
    last_step_of_checkpoint: str | None = option("--last-step-of-checkpoint", checkpoint_step, None,
        "None: --from-checkpoint is a checkpoint folder; N: it is the folder of steps that holds "
        "N; auto: the newest "
        "valid checkpoint in that folder of steps, or a start from step 1 if it has none yet", ("--from-checkpoint",))
    resume: bool = option("--resume-from-checkpoint", bool, False,
        "resume this run's newest checkpoint, or start from step 1 without one", TRAIN, excludes=("--from-checkpoint",))
    overwrite: bool = option("--overwrite --overwrite-output-dir", bool, False,
        "remove another run's checkpoints and results from this run's folder", TRAIN, excludes=("--benchmark",))
    from_phase1_final_params: Path | None = option("--from-phase1-final-params", optional_path, None,
        "phase 1's last checkpoint: weights for the first step of phase 2; ignored once phase 2 "
        "has a checkpoint",
        ("--phase2",), excludes=("--from-pretrained-params",), only=PRE_TRAINING)
    lr_rewarmup: bool = option("--lr-rewarmup --rewarmup", bool, False,
        "start phase 2 with phase 1's optimizer state and number of updates too, and with a new "
        "schedule, as "
        "DeepSpeed's bing_bert; --max-steps then counts the updates of both phases", ("--from-phase1-final-params",),
        result=True, only=PRE_TRAINING)
    result_files: tuple[str, ...] = ()

    def of_seed(self, name: str) -> Self:
        """For the run of the seed with subfolder `name`: its own checkpoints, and phase 1's if that
        had seeds.
        """
        checkpoint, phase1 = self.from_checkpoint, self.from_phase1_final_params
        if not name:
            return self
        if phase1 is not None:
            own = phase1.parent / name / phase1.name if is_step(phase1.name) else phase1 / name
            phase1 = own if own.is_dir() else phase1
        return replace(self, from_checkpoint=checkpoint and checkpoint / name, from_phase1_final_params=phase1)


@dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint besides the run's state."""

    arguments: dict[str, Any]
    seed: int = option("--seed", random_seed, 42, "seed of initial weights, dropout and the order of samples")
    prefix: str = option("--model-prefix", plain_name, "model", "prefix of the file names of the training state", TRAIN)
    phase: str = ""
    num_samples: int = 0
    data: str | None = None  # digest
    data_files: str | None = None  # digest of the sizes and times of the data's files
    hyperparameters: dict[str, Any] = field(default_factory=dict)  # see RunConfig
    tokenizer: Any = None  # a tokenizer.Tokenizer
    max_length: int | None = None  # of the texts of fine-tuning, in tokens
    files: Mapping[str, bytes] = field(default_factory=dict)  # further files of the model folder, by name


@dataclass(frozen=True)
class PredictionConfig:
    """A benchmark measures `benchmark_steps` batches after the warmup."""

    batch_size: int = option("--predict-batch-size --eval-batch-size --per-device-eval-batch-size", batch, 32,
        "sequences per GPU and forward pass", PREDICT, only=FINE_TUNING)
    seed: int = 42
    benchmark: bool = False
    benchmark_steps: int = 20
    benchmark_warmup_steps: int = 20


@dataclass(frozen=True)
class PretrainingConfig:
    """What run_pretraining.py reads, and which phase it is."""

    input_dir: Path | None = option("--input-dir", Path, None, "folder of HDF5 shards, or one shard")
    eval_dir: Path | None = option("--eval-dir", optional_path, None, "folder of held-out shards")
    verify_data: bool = option("--verify-data", bool, False,
        "before training, compare the shards with their checksums")
    phase1: bool = option("--phase1", bool, False, (
        "save checkpoints in the folder phase1 (the "
        "default)"
    ),
        excludes=("--phase2",))
    phase2: bool = option("--phase2", bool, False, "save checkpoints in the folder phase2")


@dataclass(frozen=True)
class FineTuningConfig:
    """What a fine-tuning program does. The task has the files. gives_length: whether
    --max-seq-length is given.
    """

    gives_length: bool = False
    do_train: bool = option("--do-train", bool, False, "fine-tune on the training file")
    do_eval: bool = option("--do-eval", bool, False, "predict the development file and score the predictions")
    do_predict: bool = option("--do-predict", bool, False, "write predictions")
    train_file: Path | None = option("--train-file", optional_path, None, "file to train on", TRAIN)
    early_stopping: int | None = option("--early-stopping --early-stopping-patience", positive_int, None,
        "stop after this many evaluations without a better score", ("--eval-steps",))
# fmt: on


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a run. `arguments.make_run_config` builds it from flags, once.
    `run_setup.plan_run` fills in what depends on data, model and device: folder, length, record and
    metadata.

    hyperparameters: flags that change results, by name, for the record.
    """

    trainer: TrainerConfig
    loader: LoaderConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    parallel: ParallelConfig
    start: StartConfig
    metadata: CheckpointMetadata
    precision: PrecisionConfig = PrecisionConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    model: ModelSelection = ModelSelection()
    prediction: PredictionConfig = PredictionConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    fine_tuning: FineTuningConfig = FineTuningConfig()
    world_size: int = 1
    # fmt: off
    num_seeds: int = option("--num-seeds", positive_int, 1, "number of runs, with the seeds from --seed up", TRAIN,
        excludes=("--benchmark",))
    estimate_memory: int | None = option("--estimate-memory", positive_int, None,
        "print an estimate of the memory that each process needs, and exit; PROCESSES: by default "
        "those started now",
        excludes=NOT_DEEPSPEED, options={"nargs": "?", "const": 0, "metavar": "PROCESSES"})
    # fmt: on
    hyperparameters: dict[str, Any] = field(default_factory=dict)

    def with_values(self, **values: dict[str, Any]) -> Self:
        """A copy with other values in the configs that the keywords name."""
        return replace(
            self, **{name: replace(getattr(self, name), **values[name]) for name in values}
        )

    def alone(self) -> Self:
        """This run in one process: the same global batch, unsharded, without logs."""
        runtime = {
            name: getattr(self.runtime, name)
            for name in ("device", "cpu_affinity", "deterministic")
        }
        parallel = {"shard_degree": 1, "replicate_degree": None, "cpu_offload": False}
        alone = self.with_values(parallel=parallel, trainer={"benchmark": False})
        return replace(alone, runtime=RuntimeConfig(**runtime), world_size=1)

    def with_seed(self, seed: int) -> Self:
        arguments = self.metadata.arguments | {"seed": seed}
        return self.with_values(
            metadata={"seed": seed, "arguments": arguments}, prediction={"seed": seed}
        )


# The groups of flags in --help. A kind of program lacks the configs of other kinds.
FLAG_GROUPS = {
    "task": (PretrainingConfig, FineTuningConfig, PredictionConfig),
    "model and start": (ModelSelection, StartConfig),
    "run": (TrainerConfig, RunConfig, CheckpointMetadata),
    "batches": (LoaderConfig,),
    "optimizer and schedule": (OptimizerConfig, ScheduleConfig),
    "memory and parallelism": (ParallelConfig,),
    "precision": (PrecisionConfig,),
    "device and logs": (RuntimeConfig,),
}
OWN_CONFIGS = {PRE_TRAINING: PretrainingConfig, FINE_TUNING: FineTuningConfig}
