"""Runtime objects of a run."""

from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from bert_recipe.metrics.sinks import Reporter
from bert_recipe.optimization.precision import Precision
from bert_recipe.utils.distributed import DistributedContext


@dataclass(frozen=True)
class Runtime:
    """Device, precision, processes and log of a run. locks: of folders, until its end."""

    device: torch.device
    precision: Precision = field(default_factory=Precision)
    distributed: DistributedContext = field(default_factory=DistributedContext)
    reporter: Reporter = field(default_factory=Reporter)
    locks: ExitStack = field(default_factory=ExitStack)
