"""Configuration of a run: one frozen dataclass per module. Fields that `option` makes have a flag, whose help text
explains them; `arguments.py` parses the flags and fills in the other fields.

Tags of a flag: `result` marks a hyperparameter that is recorded with the run (see checkpoint/identity.py), `deepspeed`
is the equivalent key in DeepSpeed's JSON file, and `alone` is the value that the doctor's run uses.
Does not import torch, so that parsing is fast.
"""

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from utils.command_line import (
    REQUIRED,
    bounded_float,
    fraction,
    non_negative_float,
    option,
    optional_path,
    plain_name,
    positive_float,
    positive_int,
    random_seed,
)

OPTIMIZERS = ("Lamb", "AdamW", "Muon", "FusedLAMB")
DECAYS = ("poly", "linear", "cosine", "exponential", "constant", "noam", "warmup_exp_decay_exp", "warmup_stable_decay")
AMP_DTYPES = ("bfloat16", "float16")
ACTIVATION_CHECKPOINTS = ("none", "selective", "full")
RESHARD_MODES = ("default", "always", "never")
COMPILE_MODES = ("none", "layers", "model")
CUSTOM = "custom"  # the model name of an architecture that has no file in bert_configs/
BERT_MODELS = (
    *("bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-large-cased"),
    *("modernbert-base", "modernbert-large", CUSTOM),
)
DEFAULT_BERT_MODEL = "bert-large-uncased"

# Flags that have no effect without training. --optimizer and --log-freq are not listed: NVIDIA's prediction commands
# pass them too.
TRAIN = ("--do-train",)
LAMB = (*TRAIN, "--optimizer Lamb")
POLY, EXPONENTIAL = (*TRAIN, "--lr-decay poly"), (*TRAIN, "--lr-decay warmup_exp_decay_exp")
TRAPEZOID = (*TRAIN, "--lr-decay warmup_stable_decay")


def is_step(name: str) -> bool:
    """Whether `name` is a step's folder name: a number without leading zeros."""
    return name == "0" or (name.isascii() and name.isdigit() and name[0] != "0" and len(name) < 20)


def checkpoint_step(text: str) -> str | None:
    if text != "auto" and text.lower() != "none" and not is_step(text):
        raise argparse.ArgumentTypeError(f"expected None, auto or a step, not {text}")
    return None if text.lower() == "none" else text


minutes = bounded_float(0, 10_000, exclusive=True)


# fmt: off
@dataclass(frozen=True)
class RuntimeConfig:
    """Device, precision and log files. `amp`: compute in 16 bits with float32 weights; `pure_fp16`: the model's weights
    are in `amp_dtype`, one of AMP_DTYPES. `messages`: lines to print at startup. `reports_in_folder`: also log to
    `report.json` in the run's folder."""

    report_file: Path | None = option("--report-file --json-summary", optional_path, None,
        "file for DLLogger's JSON lines; by default report.json in the run's folder", alone=None)
    log_file: Path | None = option("--log-file", optional_path, None, "file for DLLogger's text lines", alone=None)
    tensorboard_dir: Path | None = option("--tensorboard-dir", optional_path, None, "folder for TensorBoard's logs",
        alone=None)
    device: str = option("--device", ("auto", "cuda", "cpu"), "auto", "auto: a GPU if there is one")
    cpu_affinity: bool = option("--enable-cpu-affinity", bool, True, "bind each process to the cores near its GPU")
    timeout_minutes: float = option("--distributed-timeout-minutes", minutes, 5,
        "minutes to wait at the start for all processes")
    collective_timeout_minutes: float = option("--collective-timeout-minutes", minutes, 30,
        "minutes to wait for another process later; more than the verification of a checkpoint takes")
    tf32: bool = option("--tf32", bool, False, "float32 matrix products in TF32, on GPUs that have it", result=True)
    fp8: bool = option("--fp8", bool, False,
        "matrix products of the layers in float8, with torchao, on GPUs from Ada and Hopper on; combine with --compile",
        ("--amp or --use-pure-fp16",), excludes=("--deepspeed", "--estimate-memory"), result=True)
    amp: bool = False
    amp_dtype: str = "bfloat16"
    pure_fp16: bool = False
    messages: tuple[str, ...] = ()
    reports_in_folder: bool = False


@dataclass(frozen=True)
class ModelSelection:
    """Flags that select architecture, vocabulary and casing (see checkpoint/model_choice.py). `is_named`: `name` was
    given explicitly. None: taken from the model folder, the config or the vocabulary."""

    name: str = option("--bert-model", BERT_MODELS, DEFAULT_BERT_MODEL, "architecture")
    config_file: Path | None = option("--config-file", optional_path, None,
        "the architecture's JSON file; by default bert_configs/<bert-model>.json, required for custom")
    vocab_file: Path | None = option("--vocab-file", optional_path, None,
        "vocabulary or tokenizer.json; by default vocab/<bert-model>-vocab.txt")
    pre_layer_norm: bool = option("--pre-layer-norm", bool, False,
        "LayerNorm before attention and feed-forward, as in DeepSpeed's bing_bert")
    global_rope_theta: float | None = option("--global-rope-theta", bounded_float(1, 1e12), None,
        "ModernBERT's theta of the rotary positions of global layers, larger for longer sequences; by default that of "
        "the config")
    dropout: float | None = option("--dropout", fraction, None,
        "dropout of hidden states and attention; by default that of the config", TRAIN)
    is_named: bool = False
    do_lower_case: bool | None = None


@dataclass(frozen=True)
class RunRecord:
    """Identity of a run (see checkpoint/identity.py). `identity` and `hyperparameters` are JSON values by name; None
    means unknown."""

    identity: dict[str, Any]
    hyperparameters: dict[str, Any]


@dataclass(frozen=True)
class TrainerConfig:
    """Length of a run, and how often it logs, evaluates and saves. `eval_steps` 0: only at the end. `record`: None on
    ranks other than the main one, and for benchmarks."""

    max_steps: int
    checkpoint_folder: Path = option("--output-dir", Path, REQUIRED, "folder for checkpoints and results")
    log_freq: int = option("--log-freq --logging-steps", positive_int, 10, "updates between log lines",
        deepspeed="steps_per_print")
    steps_per_checkpoint: int = option("--num-steps-per-checkpoint --save-steps", positive_int, 100,
        "updates between checkpoints", TRAIN)
    steps_this_run: int | None = option("--steps-this-run", positive_int, None, "stop after this many updates", TRAIN,
        excludes=("--benchmark",))
    benchmark: bool = option("--benchmark", bool, False, "measure speed; save nothing but the report", alone=False)
    benchmark_steps: int = option("--benchmark-steps", positive_int, 20, "updates that are measured", ("--benchmark",))
    benchmark_warmup_steps: int = option("--benchmark-warmup-steps", positive_int, 20,
        "updates before the measured ones", ("--benchmark",))
    max_grad_norm: float = option("--max-grad-norm", positive_float, 1.0, "gradients are clipped to this norm", TRAIN,
        result=True, deepspeed="gradient_clipping")
    max_skipped_steps: int = option("--max-skipped-steps", positive_int, 25,
        "stop after this many updates in a row without a finite gradient", TRAIN)
    record: RunRecord | None = None
    eval_steps: int = 0


@dataclass(frozen=True)
class LoaderConfig:
    """`batch_size`: sequences of full length per micro-batch; `global_batch_size`: sequences per optimizer step over
    all ranks; it grows linearly from `initial_global_batch_size` while the first `batch_size_warmup_sequences` of the
    run are read. `num_sizes`: see packing.stream_sizes. For shards without masks: `masked_lm_prob`, the share of the
    tokens to mask, or None for the default; `whole_word_mask`. `sequences`: maximum per micro-batch, None for
    4 * batch_size. `max_sequences_per_sample`: documents in a row of shards."""

    batch_size: int
    global_batch_size: int
    max_seq_length: int
    max_predictions_per_seq: int = 0
    num_workers: int = 1
    num_sizes: int | None = None
    max_sequences_per_sample: int = 1
    masked_lm_prob: float | None = None
    whole_word_mask: bool = False
    initial_global_batch_size: int = 0
    batch_size_warmup_sequences: int = 0
    sequences: int | None = None


@dataclass(frozen=True)
class OptimizerConfig:
    """Clipping is part of `grad_scale` (see optimizer.apply_step). `trust_bounds`: of Lamb."""

    name: str = option("--optimizer", OPTIMIZERS, "Lamb",
        "Muon updates the matrices of hidden layers, and AdamW the rest; FusedLAMB is apex's LAMB", result=True)
    eps: float = option("--epsilon --adam-epsilon", positive_float, 1e-6, "epsilon of the optimizer", TRAIN,
        result=True, deepspeed="optimizer.params.eps")
    weight_decay: float = option("--weight-decay", non_negative_float, 0.01,
        "weight decay; none on biases and LayerNorms", TRAIN, result=True, deepspeed="optimizer.params.weight_decay")
    bias_correction: bool = option("--lamb-bias-correction", bool, True, "bias-correct Lamb's moments", LAMB,
        result=True)
    adapt_undecayed: bool = option("--lamb-adapt-undecayed", bool, False,
        "use trust ratios for biases and LayerNorms too, as DeepSpeed's LAMB", LAMB, result=True)
    betas: tuple[float, float] = (0.9, 0.999)
    trust_bounds: tuple[float, float] | None = None


@dataclass(frozen=True)
class ScheduleConfig:
    """`gamma` applies to exponential. The schedule begins at update `first_step` and ends at `total_steps`."""

    total_steps: int
    learning_rate: float = option("--learning-rate --lr", non_negative_float, REQUIRED, "peak learning rate", TRAIN,
        result=True, deepspeed="optimizer.params.lr")
    decay: str = option("--lr-decay", DECAYS, "poly", "schedule after the warmup", TRAIN, result=True)
    warmup_proportion: float = option("--warmup-proportion --warmup-ratio", fraction, 0.0,
        "share of the updates for the warmup", TRAIN, result=True)
    warmup_start_lr: float = option("--warmup-start-lr", non_negative_float, 0.0,
        "learning rate at the start of the warmup; for poly", POLY, result=True)
    power: float = option("--lr-decay-power", positive_float, 1.0, "power of poly; NVIDIA's PyTorch recipe has 0.5",
        POLY, result=True)
    rate: float = option("--lr-decay-rate", positive_float, 0.9,
        "decay rate of warmup_exp_decay_exp; of exponential, where it is 0.95 by default",
        (*TRAIN, "--lr-decay warmup_exp_decay_exp or --lr-decay exponential"), result=True)
    decay_steps: float = option("--lr-decay-steps", positive_int, 250, "updates per decay of warmup_exp_decay_exp",
        EXPONENTIAL, result=True)
    offset: float = option("--lr-offset", non_negative_float, 0.0, "added to the learning rate by warmup_exp_decay_exp",
        EXPONENTIAL, result=True)
    decay_proportion: float = option("--lr-decay-proportion", fraction, 0.1,
        "share of the updates for the decay at the end; for warmup_stable_decay", TRAPEZOID, result=True)
    gamma: float = 0.95
    first_step: int = 0


@dataclass(frozen=True)
class ParallelConfig:
    """`shard_degree`: number of ranks that share one copy of the model; 1 for DDP. `reshard_after_forward`: see
    parallel/fsdp.shard_model. `deepspeed`: configuration of DeepSpeed's engine, or None."""

    compile: str = option("--compile", COMPILE_MODES, "none",
        "torch.compile: each layer (starts sooner), or the whole model; needs a C++ compiler", TRAIN,
        excludes=("--deepspeed",))
    activation_checkpoint: str = option("--activation-checkpoint", ACTIVATION_CHECKPOINTS, "none",
        "compute activations again in the backward pass: those of each layer (full), or all but the outputs of linear "
        "layers (selective)", TRAIN)
    cpu_offload: bool = option("--enable-cpu-offload", bool, False,
        "on GPUs, with one process or sharded: keep optimizer state, gradients and float32 parameters on the CPU, and "
        "run the optimizer there", excludes=("--deepspeed",), alone=False)
    shard_degree: int = 1
    reshard_after_forward: str = "default"
    deepspeed: dict[str, Any] | None = None


@dataclass(frozen=True)
class StartConfig:
    """Initial state of a run; fields without a flag here are named after the flags. `result_files`: files that
    `overwrite` removes besides checkpoints."""

    from_pretrained_params: Path | None = option("--from-pretrained-params --init-checkpoint", optional_path, None,
        "checkpoint or Hugging Face model folder to load weights from, and nothing else")
    from_checkpoint: Path | None = option("--from-checkpoint", optional_path, None,
        "checkpoint to resume: weights, optimizer, schedule and data position")
    last_step_of_checkpoint: str | None = option("--last-step-of-checkpoint", checkpoint_step, None,
        "None: --from-checkpoint is a checkpoint folder; N: it is the folder of steps that holds N; auto: the newest "
        "valid checkpoint in that folder of steps, or a start from step 1 if it has none yet", ("--from-checkpoint",))
    resume: bool = option("--resume-from-checkpoint", bool, False,
        "resume the newest checkpoint in this run's own folder, or start from step 1 if it has none yet", TRAIN,
        excludes=("--from-checkpoint",))
    overwrite: bool = option("--overwrite --overwrite-output-dir", bool, False,
        "remove another run's checkpoints and results from this run's folder", TRAIN, excludes=("--benchmark",))
    from_phase1_final_params: Path | None = None
    lr_rewarmup: bool = False
    result_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint besides the run's state."""

    arguments: dict[str, Any]
    seed: int = option("--seed", random_seed, 42, "seed of initial weights, dropout and the order of samples")
    prefix: str = option("--model-prefix", plain_name, "model", "prefix of the file names of the training state", TRAIN)
    phase: str = ""
    num_samples: int = 0
    tokenizer: Any = None  # a tokenizer.Tokenizer
# fmt: on


@dataclass(frozen=True)
class PredictionConfig:
    """`batch_size`: sequences per device and forward pass. A benchmark measures `benchmark_steps` batches after the
    warmup."""

    batch_size: int
    seed: int = 42
    benchmark: bool = False
    benchmark_steps: int = 20
    benchmark_warmup_steps: int = 20


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a run. `arguments.make_run_config` builds it from flags. `run_setup.plan_run` fills in what
    depends on data, model and device: folder, length, record and metadata.

    epochs: passes over the data; limits the length of fine-tuning. hyperparameters: flags that change results, by name,
    for the record.
    """

    trainer: TrainerConfig
    loader: LoaderConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    parallel: ParallelConfig
    start: StartConfig
    metadata: CheckpointMetadata
    loss_scale: float = 1.0
    dynamic_loss_scale: bool = False
    runtime: RuntimeConfig = RuntimeConfig()
    model: ModelSelection = ModelSelection()
    prediction: PredictionConfig = PredictionConfig(1)
    world_size: int = 1
    epochs: float | None = None
    hyperparameters: dict[str, Any] = field(default_factory=dict)

    def with_values(self, **values: dict[str, Any]) -> Self:
        """A copy with other values in the configs that the keywords name."""
        return replace(self, **{name: replace(getattr(self, name), **values[name]) for name in values})
