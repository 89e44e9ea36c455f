"""Training with DeepSpeed's engine: its hooks, reductions, ZeRO optimizers and offload.

Data order, losses, schedule, loss scale and checkpoints are those of this project. DeepSpeed
averages gradients over ranks, so losses are multiplied by the number of ranks to get sums.

DeepSpeed's state is read and written in place, through undocumented attributes (PRIVATE), because
its own checkpoints are pickles and need the same number of processes.
"""

import atexit
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_recipe.config import EXPERIMENTAL_OPTIMIZERS, EngineConfig, ParallelConfig, RunConfig
from bert_recipe.config.deepspeed_config import (
    DEEPSPEED_VERSIONS,
    installed_version,
    note_on_version,
)
from bert_recipe.model.token_stream import MicroBatch, StepBatch
from bert_recipe.optimization.adamw import AdamW
from bert_recipe.optimization.precision import Precision
from bert_recipe.optimization.protocol import adam_state
from bert_recipe.optimization.registry import spec_named
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.utils.distributed import set_timeout
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.progress import print_line

# What ZeroModel reads and calls of DeepSpeed's optimizers: of stage 1 in bfloat16, of stages 1 and
# 2, and of stage 3. A version that is not tested may lack them.
PRIVATE_BF16 = ("update_lp_params", "bf16_groups", "fp32_groups_flat_partition")
PRIVATE_1_AND_2 = ("update_lp_params", "bit16_groups", "single_partition_of_fp32_groups")
PRIVATE_3 = (
    *("fp16_groups", "fp32_partitioned_groups_flat", "grad_position"),
    *("get_param_id", "persistent_parameters", "_partition_all_parameters"),
    "_reassign_or_swap_out_partitioned_parameters",
)


def load_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for `device` and returns the module."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed needs it even with one process
    # DeepSpeed compiles C++ ops with ninja, which is beside python if the virtual environment is
    # not activated.
    os.environ["PATH"] = os.pathsep.join(
        [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    )
    # DeepSpeed calls deprecated functions of torch.
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed
    return deepspeed


def refused_by_engine(config: dict[str, Any], device: torch.device) -> list[str]:
    """What DeepSpeed refuses in `zero_optimization` of its configuration."""
    load_deepspeed(device)
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**config["zero_optimization"])
    except ValueError as error:
        return [f"--deepspeed-config: {error}"]
    return []


def refused_flags(config: RunConfig) -> list[str]:
    """The flags in `config` that have no effect on DeepSpeed's engine."""
    parallel, trainer = config.parallel, config.trainer
    is_asked = {
        "--data-parallel-shard-degree": parallel.shard_degree > 1,
        "--data-parallel-replicate-degree": parallel.replicate_degree is not None,
        "--enable-cpu-offload": parallel.cpu_offload,
        "--compile": parallel.compiles,
        "--deterministic": config.runtime.deterministic,
        "--profile-update": trainer.profile_update is not None,
        "--freeze-layers": trainer.freeze_layers is not None,
        "--layerwise-lr-decay": config.optimizer.layerwise_lr_decay != 1,
        f"--optimizer {config.optimizer.name}": config.optimizer.name in EXPERIMENTAL_OPTIMIZERS,
        "--initial-global-batch-size": config.loader.initial_global_batch_size > 0,
        "--estimate-memory": config.estimate_memory is not None,
    }
    return [flag for flag in is_asked if is_asked[flag]]


class DeepSpeedModel(ParallelModel):
    """ZeRO stage 0: one replica per rank, whose gradients DeepSpeed reduces. The engine's
    configuration is that of `EngineConfig`.
    """

    moves_gradients = True
    cannot_freeze = "--deepspeed"

    def set_up(self, config: ParallelConfig, precision: Precision, device: torch.device) -> None:
        super().set_up(config, precision, device)
        self.config, self.device = cast(EngineConfig, config.engine).values, device
        self.saves_rows = self.distributed.is_main
        if precision.autocast:  # on GPUs, DeepSpeed disables an enclosing autocast
            module = self.plain_module
            module.forward = precision.context(device)(module.forward)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        if not dist.is_initialized():  # single process
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            atexit.register(dist.destroy_process_group)
        deepspeed = load_deepspeed(self.device)
        # It asks for torch's own class, and this is that without sparse gradients.
        supported = deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS
        if AdamW not in supported:
            supported.append(AdamW)
        if self.distributed.is_main and (note := note_on_version()):
            print_line(note)
        if self.device.type == "cpu" and self.distributed.local_rank == 0:
            print_line(
                "DeepSpeed's first run on a machine compiles its CPU operations: about a minute"
            )
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.engine = deepspeed.initialize(
                    model=self.plain_module, optimizer=optimizer, config=self.config
                )[0]
        except RuntimeError as error:
            if not any(sign in str(error) for sign in ("building extension", "Ninja is required")):
                raise
            raise UserError(
                "DeepSpeed cannot compile its CPU operations: install ninja and a C++ compiler, or "
                "set CXX to yours"
            ) from error
        self.module = self.engine
        # Also those of DeepSpeed, which have torch's default.
        for group in dist.distributed_c10d._world.pg_map:
            set_timeout(group, self.distributed.collective_minutes)

    @classmethod
    def unsupported(cls, config: RunConfig, device: torch.device) -> list[str]:
        sentences = [
            f"{flag} cannot be combined with --deepspeed: leave one of them out"
            for flag in refused_flags(config)
        ]
        optimizer = config.optimizer.name
        if spec_named(optimizer).state is not adam_state:  # such as Muon's
            sentences.append(
                f"--optimizer {optimizer} needs whole matrices, which --deepspeed divides: use "
                "AdamW, or FSDP2"
            )
        return sentences or refused_by_engine(
            cast(EngineConfig, config.parallel.engine).values, device
        )

    def micro_batches(self, batch: StepBatch, max_count: int) -> Iterator[MicroBatch]:
        self.engine.set_gradient_accumulation_boundary(False)
        yield from batch.filled_to(1)
        grads = [p.grad for p in self.named_parameters().values() if p.grad is not None]
        self.engine.buffered_allreduce_fallback(grads=grads)

    def backward(self, loss: Tensor) -> None:
        scaled = loss * self.loss_scale.value * self.distributed.world_size
        self.engine.backward(scaled, scale_wrt_gas=False)
        if self.masters is not None:
            self.masters.add_gradients()


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + count) of a parameter, at [offset, offset + count) of DeepSpeed's
    vector `flat`.
    """

    flat: Tensor
    offset: int
    start: int
    count: int

    def of(self, vector: Tensor) -> Tensor:
        return vector.detach()[self.offset : self.offset + self.count]


def check_private_attributes(optimizer: object, stage: int) -> None:
    """Raises UserError if DeepSpeed's optimizer of a ZeRO stage lacks what ZeroModel needs, as in
    a version that was not tested.
    """
    needed = PRIVATE_3 if stage == 3 else PRIVATE_1_AND_2
    if stage == 1 and hasattr(optimizer, PRIVATE_BF16[1]):
        needed = PRIVATE_BF16
    missing = [name for name in needed if not hasattr(optimizer, name)]
    if missing:
        raise UserError(
            f"DeepSpeed {installed_version()} cannot be used at ZeRO stage {stage} in this "
            f"precision: its {type(optimizer).__name__} has no {missing[0]}: use another stage, or "
            f"pip install deepspeed=={DEEPSPEED_VERSIONS[-1]}"
        )


class ZeroModel(DeepSpeedModel):
    """ZeRO stages 1 to 3: optimizer states, gradients and parameters are partitioned over ranks by
    elements.

    `named_parameters` are views of DeepSpeed's optimizer memory: the elements that this rank
    updates, as vectors.
    """

    shards_only_state = True

    def set_up(self, config: ParallelConfig, precision: Precision, device: torch.device) -> None:
        super().set_up(config, precision, device)
        self.stage = self.config["zero_optimization"]["stage"]
        self.gathers_parameters = self.stage == 3
        # If the model is now in 16 bits, its initial weights in float32. DeepSpeed has its own.
        self.initial_masters = self.masters
        self.masters = None
        self.fragments: dict[str, Fragment] = {}
        self.shard_group, self.saves_rows = dist.group.WORLD, True

    @property
    def optimizer_device(self) -> torch.device:
        offload = (
            self.config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
        )
        return self.device if offload == "none" else torch.device("cpu")

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        names = {p: name for name, p in self.model.named_parameters()}
        super().prepare(optimizer)
        self.shard_group = dist.group.WORLD  # which a single process has only now
        self.zero = self.engine.optimizer
        check_private_attributes(self.zero, self.stage)
        if self.stage == 3:
            fragments = self._fragments_of_stage_3()
        else:
            fragments = self._fragments_of_stages_1_and_2()
        self.fragments = {names[p]: fragment for p, fragment in fragments}
        self.parameters = {
            name: nn.Parameter(fragment.of(fragment.flat))
            for name, fragment in self.fragments.items()
        }
        self._init_state(optimizer)
        self._restore_initial_weights()

    def _init_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Zeros where DeepSpeed left no state, as in the optimizer's first step."""
        shapes = {name: fragment.flat.shape for name, fragment in self.fragments.items()}
        for name, state in adam_state(self.model, shapes).items():
            flat = self.fragments[name].flat  # shared by several parameters
            if flat not in optimizer.state:
                optimizer.state[flat] = {
                    key: flat.new_zeros(tensor.shape) for key, tensor in state.items()
                }

    def _restore_initial_weights(self) -> None:
        """Undoes that DeepSpeed made its float32 weights from 16-bit ones."""
        if self.initial_masters is None:
            return
        for name, master in self.initial_masters.masters.items():
            fragment = self.fragments[name]
            stop = fragment.start + fragment.count
            self.parameters[name].data.copy_(master.detach().flatten()[fragment.start : stop])
        self.initial_masters = None

    def _fragments_of_stages_1_and_2(self) -> Iterator[tuple[nn.Parameter, Fragment]]:
        if hasattr(self.zero, PRIVATE_BF16[1]):
            groups, flats = self.zero.bf16_groups, self.zero.fp32_groups_flat_partition
        else:
            groups, flats = self.zero.bit16_groups, self.zero.single_partition_of_fp32_groups
        for group, flat in zip(groups, flats, strict=True):
            for p in group:
                mapping = p._hp_mapping
                if mapping is None:
                    yield p, Fragment(flat, 0, p.numel(), 0)
                else:
                    ours, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
                    yield p, Fragment(flat, ours.start, whole.start, whole.numel)

    def _fragments_of_stage_3(self) -> Iterator[tuple[nn.Parameter, Fragment]]:
        for p in self.model.parameters():
            group, offset, length = self.zero.grad_position[self.zero.get_param_id(p)]
            start = min(length * self.distributed.rank, p.ds_numel)
            yield (
                p,
                Fragment(
                    self.zero.fp32_partitioned_groups_flat[group],
                    offset,
                    start,
                    min(length, p.ds_numel - start),
                ),
            )

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self.parameters if self.fragments else dict(self.model.named_parameters())

    def optimizer_state(self, optimizer: torch.optim.Optimizer, name: str) -> dict[str, Tensor]:
        fragment = self.fragments[name]
        state = optimizer.state[fragment.flat]
        return {key: fragment.of(value) if value.dim() else value for key, value in state.items()}

    def row_start(self, name: str) -> int:
        return self.fragments[name].start

    @torch.no_grad()
    def write_back(self) -> None:
        if self.stage < 3:
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if self.zero.persistent_parameters:  # small parameters, not partitioned
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)

    def micro_batches(self, batch: StepBatch, max_count: int) -> Iterator[MicroBatch]:
        for number, micro_batch in enumerate(batch.filled_to(max_count), 1):
            self.engine.set_gradient_accumulation_boundary(number == max_count)
            yield micro_batch

    def backward(self, loss: Tensor) -> None:
        if self.config["fp16"]["enabled"]:  # DeepSpeed scales here and unscales in its step
            self.zero.override_loss_scale(float(self.loss_scale.value))
        self.engine.backward(loss * self.distributed.world_size, scale_wrt_gas=False)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        waiting: Collection[str] = (),
    ) -> tuple[Tensor, Tensor]:
        self.engine.step()  # clips to `gradient_clipping`, which is --max-grad-norm
        device = self.loss_scale.value.device
        norm = torch.as_tensor(
            self.engine.get_global_grad_norm(), dtype=torch.float32, device=device
        )
        return norm, torch.tensor(not self.engine.was_step_applied(), device=device)


def engine_strategy(config: dict[str, Any]) -> type[ParallelModel]:
    """The strategy for the engine's configuration."""
    return ZeroModel if config["zero_optimization"]["stage"] else DeepSpeedModel
