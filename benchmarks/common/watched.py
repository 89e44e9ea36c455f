"""Runs a program and says what its updates did.

An update after the second that makes the host wait for the GPU is an error. Returned are the number
of graphs that were compiled before each update, the most memory, a profile of update 3, and whether
checkpoints have the weights that the device had. A fault happens in update 4: `none`, `memory` (a
tensor that is too large) or a signal.
"""

import importlib
import os
import signal
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.profiler import profile

from bert_recipe.checkpoint.folder import MODEL_FILE
from bert_recipe.checkpoint.writer import CheckpointWriter
from bert_recipe.training.trainer import Trainer

PROFILED, FAULTY = 3, 4  # updates


def fail(fault: str, device: torch.device) -> None:
    if fault == "memory":
        torch.empty(2**50, dtype=torch.uint8, device=device)
    elif fault != "none":
        os.kill(os.getpid(), signal.Signals[fault])


def watch(fault: str, program: str, argv: list[str]) -> dict:
    """Runs a program in this process; returns what its updates did. Raises what the program
    raises, and SystemExit if its exit code is not 0.
    """
    report = {"graphs": [], "checkpoints": {}, "peak": 0, "profile": ""}
    saved: dict[Path, dict[str, torch.Tensor]] = {}
    write = CheckpointWriter.write
    steps = {name: getattr(Trainer, name) for name in ("training_step", "optimizer_step")}

    def watched(name: str, self: Trainer, *args):
        update = len(report["graphs"])
        if name == "training_step" and update == FAULTY:
            fail(fault, self.device)
        if self.device.type == "cuda":  # the first updates allocate and compile
            torch.cuda.set_sync_debug_mode("default" if update <= 2 else "error")
        try:
            return steps[name](self, *args)
        finally:
            if self.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
                report["peak"] = torch.cuda.max_memory_allocated()

    def training_step(self: Trainer, *args):
        report["graphs"].append(counters["stats"]["unique_graphs"])
        if len(report["graphs"]) != PROFILED:
            return watched("training_step", self, *args)
        with profile() as profiler:
            sums = watched("training_step", self, *args)
        report["profile"] = profiler.key_averages().table(
            sort_by=f"self_{self.device.type}_time_total", row_limit=20
        )
        return sums

    def copied_write(self: CheckpointWriter, checkpoint) -> None:
        copies = {
            tensor.name: tensor.rows.detach().to("cpu", copy=True)
            for tensor in checkpoint.tensors["model.safetensors"]
        }
        saved[self.parent / str(checkpoint.step)] = copies
        write(self, checkpoint)

    with (
        patch.object(Trainer, "training_step", training_step),
        patch.object(Trainer, "optimizer_step", lambda self: watched("optimizer_step", self)),
        patch.object(CheckpointWriter, "write", copied_write),
    ):
        if code := importlib.import_module(program).main(argv):
            raise SystemExit(code)
    for folder, tensors in saved.items():
        if (folder / MODEL_FILE).is_file():
            file = load_file(folder / MODEL_FILE)
            report["checkpoints"][folder.name] = all(
                torch.equal(file[name], tensors[name]) for name in tensors
            )
    return report
