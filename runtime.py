"""Where and how a run computes, and where it reports."""

from dataclasses import dataclass, field

import torch

from metrics import Reporter
from parallelize import ParallelConfig
from precision import Precision
from utils.distributed import DistributedContext


@dataclass(frozen=True)
class Runtime:
    """Where and how a run computes, and where it reports."""

    device: torch.device
    precision: Precision = field(default_factory=Precision)
    distributed: DistributedContext = field(default_factory=DistributedContext)
    reporter: Reporter = field(default_factory=Reporter)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
