"""Logs and processes, precision and parallelism."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_recipe.config.flag_values import TRAIN, positive_int_or_minus_one
from bert_recipe.utils.command_line import (
    bounded_float,
    non_negative_int,
    option,
    optional_path,
    positive_float,
    positive_int,
)

AMP_DTYPES = ("bfloat16", "float16")
ACTIVATION_CHECKPOINTS = ("none", "selective", "full")
RESHARD_MODES = ("default", "always", "never")
ATTENTIONS = ("auto", "triton", "flash-attn-4")
COMPILE_MODES = ("auto", "none", "layers", "model")
FLOAT32_LINEAR = ("auto", "torch")

SIXTEEN_BITS = ("--amp or --use-pure-fp16 or --fp16",)
SHARDED = ("--data-parallel-shard-degree",)

minutes = bounded_float(0, 10_000, exclusive=True)


@dataclass(frozen=True)
class RuntimeConfig:
    """Device, processes and logs."""

    report_file: Path | None = option(
        "--report-file --json-summary",
        optional_path,
        None,
        "file for DLLogger's JSON lines; by default report.json in the run's folder",
    )
    log_file: Path | None = option(
        "--log-file", optional_path, None, "file for DLLogger's text lines"
    )
    tensorboard_dir: Path | None = option(
        "--tensorboard-dir", optional_path, None, "folder for TensorBoard's logs"
    )
    wandb_project: str | None = option("--wandb-project", str, None, "project of Weights & Biases")
    show_config: bool | None = option(
        "--show-config",
        bool,
        None,
        "print all settings at the start (true) or none (false); by default those that differ from "
        "the defaults",
    )
    device: str = option("--device", ("auto", "cuda", "cpu"), "auto", "auto: a GPU if there is one")
    float32_linear: str = option(
        "--float32-linear",
        FLOAT32_LINEAR,
        "auto",
        "linear layers in float32 on a CPU. auto: by oneDNN where that is faster, on AMD's "
        "processors with AVX-512; torch: as torch does, with the results of other processors to "
        "rounding",
    )
    cpu_affinity: bool = option(
        "--enable-cpu-affinity", bool, True, "bind each process to the cores near its GPU"
    )
    deterministic: bool = option(
        "--deterministic",
        bool,
        False,
        "kernels that add in a fixed order: equal runs on GPUs are equal to the bit; slower",
    )
    timeout_minutes: float = option(
        "--distributed-timeout-minutes",
        minutes,
        5,
        "minutes to wait at the start for all processes",
    )
    collective_timeout_minutes: float = option(
        "--collective-timeout-minutes",
        minutes,
        30,
        "minutes to wait for another process later; more than the verification of a checkpoint "
        "takes",
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """`amp`: compute in 16 bits with float32 weights; `pure_fp16`: the model's weights are in
    `amp_dtype`, too. `arguments.resolved_values` resolves `--fp16` and what is not given.
    """

    amp: bool = option(
        "--amp --bf16", bool, False, "compute in 16 bits, with float32 weights", result=True
    )
    fp16: bool = option(
        "--fp16",
        bool,
        False,
        "the same as --amp --amp-dtype float16 with dynamic loss scaling",
        result=True,
    )
    amp_dtype: str = option(
        "--amp-dtype",
        AMP_DTYPES,
        None,
        "the 16-bit type; by default bfloat16, or float16 with a loss scaling flag",
        needs=SIXTEEN_BITS,
        result=True,
    )
    pure_fp16: bool = option(
        "--use-pure-fp16",
        bool,
        False,
        "keep the model in --amp-dtype; the optimizer has float32 copies",
        result=True,
    )
    loss_scale: float = option(
        "--scale-loss",
        positive_float,
        1.0,
        "loss scale of float16",
        needs=SIXTEEN_BITS,
        result=True,
    )
    dynamic_loss_scale: bool = option(
        "--use-dynamic-loss-scaling",
        bool,
        False,
        "adapt the loss scale, starting at --scale-loss, or at 2^20 without it",
        needs=SIXTEEN_BITS,
        result=True,
    )
    tf32: bool = option(
        "--tf32", bool, False, "float32 matrix products in TF32, on GPUs that have it", result=True
    )


@dataclass(frozen=True)
class EngineConfig:
    """What --deepspeed-config and the flags give DeepSpeed's engine.

    values: its configuration; the batch is added once it is known, see Run.parallel.
    notes: lines about defaults of DeepSpeed that do not exist here.
    """

    values: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParallelConfig:
    """shard_degree: number of ranks that share one copy of the model; after
        `arguments.shard_degree` never -1.
    engine: of --deepspeed, or None.
    """

    compile: str = option(
        "--compile",
        COMPILE_MODES,
        "auto",
        "torch.compile of each layer and, on GPUs, of the loss (layers: starts sooner), or of the "
        "whole model (model); needs a C++ compiler. auto: on GPUs the one that suits the other "
        "flags, in fine-tuning if there are enough updates",
        needs=TRAIN,
    )
    activation_checkpoint: str = option(
        "--activation-checkpoint",
        ACTIVATION_CHECKPOINTS,
        "none",
        "compute activations again in the backward pass: those of each layer (full), or all but "
        "the outputs of linear layers (selective)",
        needs=TRAIN,
    )
    attention: str = option(
        "--attention",
        ATTENTIONS,
        "auto",
        "on GPUs: a kernel in Triton for sequences of up to 512 tokens (triton), or the package "
        "flash-attn-4, for models without attention dropout; by default torch's",
    )
    cpu_offload: bool = option(
        "--enable-cpu-offload",
        bool,
        False,
        "on GPUs, with one process or sharded: keep optimizer state, gradients and float32 "
        "parameters on the CPU, and run the optimizer there",
    )
    shard_degree: int = option(
        "--data-parallel-shard-degree",
        positive_int_or_minus_one,
        1,
        "processes that share one copy of parameters, gradients and optimizer state (FSDP2); 1: "
        "every process has its own (DDP); -1: all processes share one",
    )
    replicate_degree: int | None = option(
        "--data-parallel-replicate-degree",
        positive_int,
        None,
        "copies of the model; by default the number of processes divided by the shard degree",
    )
    reshard_after_forward: str = option(
        "--fsdp-reshard-after-forward",
        RESHARD_MODES,
        "default",
        "when sharded: which gathered parameters are freed after the forward pass: those of the "
        "layers (default), all (always), or none until the update is done (never)",
        needs=SHARDED,
    )
    uses_deepspeed: bool = option(
        "--deepspeed",
        bool,
        False,
        "train with DeepSpeed's engine; see --deepspeed-config",
        needs=TRAIN,
    )
    deepspeed_config: Path | None = option(
        "--deepspeed-config",
        optional_path,
        None,
        "DeepSpeed's JSON file; docs/coming_from_deepspeed.md says what its keys do here",
        needs=("--deepspeed",),
    )
    # Set by its launcher.
    local_rank: int | None = option("--local-rank", non_negative_int, None, argparse.SUPPRESS)
    engine: EngineConfig | None = None

    @property
    def compiles(self) -> bool:
        """Whether the layers or the model are compiled; not known of `auto`, see Run.parallel."""
        return self.compile in ("layers", "model")
