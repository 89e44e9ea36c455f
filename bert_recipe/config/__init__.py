"""Configuration of a run: one frozen dataclass per module. Fields that `option` makes have a flag,
whose help text explains them; `config/arguments.py` parses the flags and fills in the other fields.

Tags of a flag: `result` marks a hyperparameter that is recorded with the run (see
checkpoint/identity.py), `only` is the kind of program that has the flag, PRE_TRAINING or
FINE_TUNING, by default both, and `encoder_option` marks a flag that changes the field of its name
in a model's config. Does not import torch, so that parsing is fast.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Self

from bert_recipe.config.flag_values import (
    CONFIGS,
    CUSTOM,
    FINE_TUNING,
    MAX_BATCH,
    MAX_LENGTH,
    PRE_TRAINING,
    TRAIN,
    is_step,
)
from bert_recipe.config.optimization import (
    DECAYS,
    EXPERIMENTAL_OPTIMIZERS,
    OPTIMIZERS,
    OptimizerConfig,
    ScheduleConfig,
)
from bert_recipe.config.runtime import (
    ACTIVATION_CHECKPOINTS,
    AMP_DTYPES,
    RESHARD_MODES,
    ParallelConfig,
    PrecisionConfig,
    RuntimeConfig,
)
from bert_recipe.config.start import CheckpointMetadata, ModelSelection, StartConfig
from bert_recipe.config.task import (
    FineTuningConfig,
    LearningOptions,
    PredictionConfig,
    PretrainingConfig,
)
from bert_recipe.config.training import DevelopmentData, LoaderConfig, RunRecord, TrainerConfig
from bert_recipe.utils.command_line import option, positive_int

__all__ = [
    "ACTIVATION_CHECKPOINTS",
    "AMP_DTYPES",
    "CONFIGS",
    "CUSTOM",
    "DECAYS",
    "EXPERIMENTAL_OPTIMIZERS",
    "FINE_TUNING",
    "FLAG_GROUPS",
    "MAX_BATCH",
    "MAX_LENGTH",
    "OPTIMIZERS",
    "OWN_CONFIGS",
    "PRE_TRAINING",
    "RESHARD_MODES",
    "CheckpointMetadata",
    "DevelopmentData",
    "FineTuningConfig",
    "LearningOptions",
    "LoaderConfig",
    "ModelSelection",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "PredictionConfig",
    "PretrainingConfig",
    "RunConfig",
    "RunRecord",
    "RuntimeConfig",
    "ScheduleConfig",
    "StartConfig",
    "TrainerConfig",
    "is_step",
]


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a run. `arguments.make_run_config` builds it from flags, once.
    `plan.plan_run` fills in what depends on data, model and device: folder, length, record and
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
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    model: ModelSelection = field(default_factory=ModelSelection)
    prediction: PredictionConfig = field(default_factory=PredictionConfig)
    fine_tuning: FineTuningConfig = field(default_factory=FineTuningConfig)
    world_size: int = 1
    num_seeds: int = option(
        "--num-seeds",
        positive_int,
        1,
        "number of runs, with the seeds from --seed up",
        needs=TRAIN,
        excludes=("--benchmark",),
    )
    estimate_memory: int | None = option(
        "--estimate-memory",
        positive_int,
        None,
        "print an estimate of the memory that each process needs, and exit; PROCESSES: by default "
        "those started now",
        options={"nargs": "?", "const": 0, "metavar": "PROCESSES"},
    )
    hyperparameters: dict[str, Any] = field(default_factory=dict)

    def with_values(self, **values: dict[str, Any]) -> Self:
        """A copy with other values in the configs that the keywords name."""
        return replace(
            self, **{name: replace(getattr(self, name), **values[name]) for name in values}
        )

    def alone(self) -> Self:
        """This run in one process: the same global batch, unsharded, without logs and profile,
        compiled only if asked for.
        """
        runtime = {
            name: getattr(self.runtime, name)
            for name in ("device", "cpu_affinity", "deterministic")
        }
        parallel: dict[str, Any] = {
            "shard_degree": 1,
            "replicate_degree": None,
            "cpu_offload": False,
        }
        if self.parallel.compile == "auto":
            parallel["compile"] = "none"  # which starts at once
        alone = self.with_values(
            parallel=parallel, trainer={"benchmark": False, "profile_update": None}
        )
        return replace(alone, runtime=RuntimeConfig(**runtime), world_size=1, num_seeds=1)

    def with_seed(self, seed: int) -> Self:
        own = self.with_argument("seed", seed)
        return own.with_values(metadata={"seed": seed}, prediction={"seed": seed})

    def with_record(self, values: dict[str, Any]) -> Self:
        """A copy that records other values of hyperparameters."""
        return replace(self, hyperparameters=self.hyperparameters | values)

    def with_argument(self, name: str, value: Any) -> Self:
        """A copy that logs another value of an argument."""
        return self.with_values(metadata={"arguments": self.metadata.arguments | {name: value}})


# The groups of flags in --help. A kind of program lacks the configs of other kinds.
FLAG_GROUPS = {
    "task": (PretrainingConfig, FineTuningConfig, PredictionConfig, LearningOptions),
    "model and start": (ModelSelection, StartConfig),
    "run": (TrainerConfig, RunConfig, CheckpointMetadata),
    "batches": (LoaderConfig,),
    "optimizer and schedule": (OptimizerConfig, ScheduleConfig),
    "memory and parallelism": (ParallelConfig,),
    "precision": (PrecisionConfig,),
    "device and logs": (RuntimeConfig,),
}
OWN_CONFIGS = {PRE_TRAINING: PretrainingConfig, FINE_TUNING: FineTuningConfig}
