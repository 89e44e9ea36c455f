"""The settings of a command, as they were typed: frozen dataclasses, which nothing replaces. Fields
that `option` makes have a flag, whose help text explains them. `config/arguments.py` parses the
flags. What follows from them, from the model and from the data is in training/run.py.

Tags of a flag: `result` marks a hyperparameter that is recorded with the run (see
checkpoint/identity.py), `only` is the kind of program that has the flag, PRE_TRAINING or
FINE_TUNING, by default both, `encoder_option` marks a flag that changes the field of its name in a
model's config, and `post_processing` one that turns a model's output into predictions (see
checkpoint/record.py). Does not import torch, so that parsing is fast.
"""

from dataclasses import dataclass, field

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
    EngineConfig,
    ParallelConfig,
    PrecisionConfig,
    RuntimeConfig,
)
from bert_recipe.config.start import ModelSelection, StartConfig
from bert_recipe.config.task import (
    FineTuningConfig,
    LearningOptions,
    PredictionConfig,
    PretrainingConfig,
)
from bert_recipe.config.training import LoaderConfig, TrainerConfig
from bert_recipe.utils.command_line import (
    Arguments,
    option,
    plain_name,
    positive_int,
    random_seed,
)

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
    "EngineConfig",
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
    "RuntimeConfig",
    "ScheduleConfig",
    "StartConfig",
    "TrainerConfig",
    "is_step",
]


@dataclass(frozen=True)
class RunConfig:
    """The settings of a command, which `arguments.make_run_config` makes from its flags.

    world_size: number of processes.
    arguments: all that was typed, also for the task.
    """

    trainer: TrainerConfig
    loader: LoaderConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    parallel: ParallelConfig
    start: StartConfig
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
        excludes=("--frozen-encoder",),
        options={"nargs": "?", "const": 0, "metavar": "PROCESSES"},
    )
    seed: int = option(
        "--seed", random_seed, 42, "seed of initial weights, dropout and the order of samples"
    )
    prefix: str = option(
        "--model-prefix",
        plain_name,
        "model",
        "prefix of the file names of the training state",
        needs=TRAIN,
        excludes=("--frozen-encoder",),
    )
    arguments: Arguments = field(default_factory=Arguments)

    @property
    def chosen_by_rule(self) -> frozenset[str]:
        """Names of arguments without a value, which the rule of fine_tuning_defaults.py chooses, or
        on resume the run's record.
        """
        args = self.arguments
        values = ("learning_rate", "warmup_proportion", "epochs", "max_steps")
        names = {name for name in values if name in args and not args.given(name)}
        if "batch_size" in args and args.batch_size is None and args.global_batch_size is None:
            names.add("global_batch_size")
        return frozenset(names)


# The groups of flags in --help. A kind of program lacks the configs of other kinds.
FLAG_GROUPS = {
    "task": (PretrainingConfig, FineTuningConfig, PredictionConfig, LearningOptions),
    "model and start": (ModelSelection, StartConfig),
    "run": (TrainerConfig, RunConfig),
    "batches": (LoaderConfig,),
    "optimizer and schedule": (OptimizerConfig, ScheduleConfig),
    "memory and parallelism": (ParallelConfig,),
    "precision": (PrecisionConfig,),
    "device and logs": (RuntimeConfig,),
}
OWN_CONFIGS = {PRE_TRAINING: PretrainingConfig, FINE_TUNING: FineTuningConfig}
