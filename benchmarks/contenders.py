"""What each contender of a benchmark is made of, so that all are given the same: device, precision, learning rate,
optimizer."""

from pathlib import Path

import torch
from torch import nn

from lr_scheduler import make_schedule
from modeling import BertPreTrainedModel
from optimizer import MasterWeights, make_optimizer, parameter_groups
from trainer import Provenance, Runtime, Settings, Task, Trainer
from utils import config
from utils.distributed import Processes, select_device, select_precision
from utils.logger import Reporter

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-6, 0.01


def make_runtime(args: config.Arguments) -> Runtime:
    """Where and how to compute, by --device, --amp, --use-pure-fp16 and --tf32."""
    device = select_device(args.device)
    precision = select_precision(
        args.amp, "bfloat16", getattr(args, "use_pure_fp16", False), getattr(args, "tf32", False), device
    )
    return Runtime(device, precision, Processes(), Reporter(None))


def make_trainer(model: BertPreTrainedModel, task: Task, optimizer: str, runtime: Runtime) -> Trainer:
    """The project's own loop over `model`; it saves nothing."""
    learning_rate = torch.tensor(LEARNING_RATE, device=runtime.device)
    masters = MasterWeights(model) if runtime.precision.pure else None
    named_parameters = list((masters or model).named_parameters())
    if masters is not None:
        model.to(runtime.precision.dtype)
    return Trainer(
        model,
        task,
        make_optimizer(optimizer, named_parameters, learning_rate, BETAS, EPSILON, WEIGHT_DECAY),
        learning_rate,
        make_schedule("constant", LEARNING_RATE, 10**4, 0.0),
        Settings(max_steps=10**4, checkpoint_folder=Path("unused"), benchmark=True),
        Provenance("benchmark", {}, 0, Path("unused"), True),
        runtime,
        masters=masters,
    )


def fused_adamw(model: nn.Module) -> torch.optim.AdamW:
    """The peer's optimizer, with our groups and numbers."""
    groups = parameter_groups(model.named_parameters(), WEIGHT_DECAY)
    return torch.optim.AdamW(groups, LEARNING_RATE, BETAS, EPSILON, fused=True)
