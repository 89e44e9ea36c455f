"""Configuration of a run: one frozen dataclass per module, and the choices of flags.

`arguments.py` builds them from flags. Imports neither other modules of the project nor torch, so that parsing is fast.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class RuntimeConfig:
    """Device, precision and log files. `device`: auto, cuda or cpu. `amp`: compute in 16 bits with float32 weights;
    `pure_fp16`: the model's weights are in `amp_dtype`, one of AMP_DTYPES. `timeout_minutes` and
    `collective_timeout_minutes`: timeouts for other processes at startup and in collectives. `messages`: lines to print
    at startup. `reports_in_folder`: also log to `report.json` in the run's folder."""

    device: str = "auto"
    amp: bool = False
    amp_dtype: str = "bfloat16"
    pure_fp16: bool = False
    tf32: bool = False
    cpu_affinity: bool = False
    timeout_minutes: float = 5
    collective_timeout_minutes: float = 30
    report_file: Path | None = None
    log_file: Path | None = None
    tensorboard_dir: Path | None = None
    messages: tuple[str, ...] = ()
    reports_in_folder: bool = False


@dataclass(frozen=True)
class ModelSelection:
    """Flags that select architecture, vocabulary and casing (see checkpoint/model_choice.py). `is_named`: `name` was
    given explicitly. None: taken from the model folder, the config or the vocabulary."""

    name: str = DEFAULT_BERT_MODEL
    is_named: bool = False
    config_file: Path | None = None
    vocab_file: Path | None = None
    do_lower_case: bool | None = None
    pre_layer_norm: bool = False
    global_rope_theta: float | None = None
    dropout: float | None = None


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
    checkpoint_folder: Path
    record: RunRecord | None = None
    steps_this_run: int | None = None
    max_grad_norm: float = 1.0
    max_skipped_steps: int = 25
    log_freq: int = 10
    steps_per_checkpoint: int = 100
    eval_steps: int = 0
    benchmark: bool = False
    benchmark_steps: int = 20
    benchmark_warmup_steps: int = 20


@dataclass(frozen=True)
class LoaderConfig:
    """`batch_size`: sequences of full length per micro-batch; `global_batch_size`: sequences per optimizer step over
    all ranks; `num_sizes`: see packing.stream_sizes. For shards without masks: `masked_lm_prob`, the share of the
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
    sequences: int | None = None


@dataclass(frozen=True)
class OptimizerConfig:
    """`name` is one of OPTIMIZERS; the last three apply to Lamb. Clipping is part of `grad_scale` (see
    optimizer.apply_step)."""

    name: str = "Lamb"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    trust_bounds: tuple[float, float] | None = None
    adapt_undecayed: bool = False


@dataclass(frozen=True)
class ScheduleConfig:
    """`decay` is one of DECAYS; `power` applies to poly; `gamma` to exponential; `rate`, `decay_steps` and `offset` to
    warmup_exp_decay_exp; `decay_proportion` to warmup_stable_decay. The schedule begins at update `first_step` and ends
    at `total_steps`."""

    total_steps: int
    learning_rate: float
    decay: str = "poly"
    warmup_proportion: float = 0.0
    warmup_start_lr: float = 0.0
    power: float = 1.0
    gamma: float = 0.95
    rate: float = 0.9
    decay_steps: float = 250
    offset: float = 0.0
    decay_proportion: float = 0.1
    first_step: int = 0


@dataclass(frozen=True)
class ParallelConfig:
    """`compile`: one of COMPILE_MODES; `layers` compiles each layer, `model` the whole model.
    `activation_checkpoint`: one of ACTIVATION_CHECKPOINTS (see parallel/activation_checkpointing.py). `shard_degree`:
    number of ranks that share one copy of the model; 1 for DDP. `reshard_after_forward` and `cpu_offload`: see
    parallel/fsdp.shard_model. `deepspeed`: configuration of DeepSpeed's engine, or None."""

    compile: str = "none"
    activation_checkpoint: str = "none"
    shard_degree: int = 1
    reshard_after_forward: str = "default"
    cpu_offload: bool = False
    deepspeed: dict[str, Any] | None = None


@dataclass(frozen=True)
class StartConfig:
    """Initial state of a run; fields are named after the flags. `resume`: start from the newest checkpoint in the run's
    own folder. `result_files`: files that `overwrite` removes besides checkpoints."""

    from_checkpoint: Path | None = None
    last_step_of_checkpoint: str | None = None
    from_phase1_final_params: Path | None = None
    from_pretrained_params: Path | None = None
    overwrite: bool = False
    lr_rewarmup: bool = False
    result_files: tuple[str, ...] = ()
    resume: bool = False


@dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint besides the run's state."""

    arguments: dict[str, Any]
    seed: int
    prefix: str = "model"
    phase: str = ""
    num_samples: int = 0
    tokenizer: Any = None  # a tokenizer.Tokenizer


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
