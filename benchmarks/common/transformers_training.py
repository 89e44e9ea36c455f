"""Training with transformers, as its examples do, with this project's schedule, optimizer groups
and sample order.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.common.training import MAX_GRAD_NORM, fused_adamw
from benchmarks.common.worker import TRANSFORMERS
from data_loading.sample_order import sample_order
from lr_scheduler import make_schedule
from run_config import ScheduleConfig
from utils.progress import print_line, progress_bar

LOG_FREQ = 10  # updates between two readings of the loss, as in the programs


def silence_imports() -> None:
    """Call before transformers or torchao is imported: torchao logs the kernels that it cannot
    load.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


class SavedState:
    """Where a run saves its state every `interval` updates, and continues from: model, optimizer,
    random generators.
    """

    def __init__(self, path: Path, interval: int, generator: torch.Generator):
        self.path, self.interval, self.generator = path, interval, generator

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step % self.interval:
            return
        tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        tensors |= {"generator": self.generator.get_state(), "random": torch.get_rng_state()}
        save_file(tensors | {"step": torch.tensor(step)}, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Returns the number of updates done."""
        if not self.path.is_file():
            return 0
        tensors, states = load_file(self.path), defaultdict(dict)
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                states[int(index)][key] = value
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(tensors[f"model.{name}"])
        optimizer.load_state_dict(optimizer.state_dict() | {"state": dict(states)})
        self.generator.set_state(tensors["generator"])
        torch.set_rng_state(tensors["random"])
        return int(tensors["step"])


def train_with_transformers(
    model: nn.Module,
    num_samples: int,
    make_batch: Callable[[np.ndarray], dict[str, Tensor]],
    config: ScheduleConfig,
    batch_size: int,
    seed: int,
    amp: bool = False,
    state: SavedState | None = None,
) -> float:
    """Trains a model of transformers for all updates of `config`; returns the seconds. `make_batch`
    gets the numbers of the batch's samples; every epoch has an order of its own. amp: bfloat16
    autocast.
    """
    device = next(model.parameters()).device
    optimizer, schedule, max_steps = fused_adamw(model), make_schedule(config), config.total_steps
    order = sample_order(np.arange(max_steps * batch_size), num_samples, seed)
    first = state.load(model, optimizer) if state else 0
    model.train()
    started = time.perf_counter()
    with progress_bar(max_steps, TRANSFORMERS, "step") as bar:
        for step in range(first, max_steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
            batch = make_batch(order[step * batch_size : (step + 1) * batch_size])
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            if state:
                state.save(step + 1, model, optimizer)
            bar.update()
            if (step + 1) % LOG_FREQ == 0 or step + 1 == max_steps:
                print_line(
                    f"{TRANSFORMERS}: step {step + 1}/{max_steps}  loss {float(loss.detach()):.4g}"
                )
    return time.perf_counter() - started
