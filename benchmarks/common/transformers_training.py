"""Training with transformers, as its examples do, with this project's schedule, optimizer groups and sample order."""

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common.training import MAX_GRAD_NORM, fused_adamw
from benchmarks.common.worker import TRANSFORMERS
from data_loading.sample_order import sample_order
from utils.progress import print_line, progress_bar

LOG_FREQ = 10  # updates between two readings of the loss, as in the programs


def silence_imports() -> None:
    """Call before transformers or torchao is imported: torchao logs the kernels that it cannot load."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def train_with_transformers(
    model: nn.Module,
    num_samples: int,
    make_batch: Callable[[np.ndarray], dict[str, Tensor]],
    schedule: Callable[[int], float],
    max_steps: int,
    batch_size: int,
    seed: int,
    amp: bool = False,
) -> float:
    """Trains a model of transformers for `max_steps` updates; returns the seconds. `make_batch` gets the numbers of the
    batch's samples; every epoch has an order of its own. amp: bfloat16 autocast."""
    device = next(model.parameters()).device
    optimizer = fused_adamw(model)
    order = sample_order(np.arange(max_steps * batch_size), num_samples, seed)
    model.train()
    started = time.perf_counter()
    with progress_bar(max_steps, TRANSFORMERS, "step") as bar:
        for step in range(max_steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
            batch = make_batch(order[step * batch_size : (step + 1) * batch_size])
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            bar.update()
            if (step + 1) % LOG_FREQ == 0 or step + 1 == max_steps:
                print_line(f"{TRANSFORMERS}: step {step + 1}/{max_steps}  loss {float(loss.detach()):.4g}")
    return time.perf_counter() - started
