"""What each contender of a benchmark is made of, so that all are given the same: device, precision, learning rate,
optimizer, samples."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from lr_scheduler import make_schedule
from modeling import BertPreTrainedModel
from optimizer import MasterWeights, make_optimizer, parameter_groups
from token_stream import StepBatch
from trainer import Provenance, Runtime, Settings, Task, Totals, Trainer
from utils.distributed import Processes, select_device, select_precision
from utils.logger import Reporter

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-6, 0.01


def make_runtime(device_name: str, amp: bool, pure: bool = False, tf32: bool = False) -> Runtime:
    """Where and how to compute; 16 bits are bfloat16."""
    device = select_device(device_name)
    return Runtime(device, select_precision(amp, "bfloat16", pure, tf32, device), Processes(), Reporter(None))


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


def train_on(trainer: Trainer, batch: StepBatch) -> None:
    """One whole step."""
    trainer.training_step(batch, Totals(batch.num_sequences, batch.num_tokens, batch.num_targets))
    trainer.optimizer_step()


def fused_adamw(model: nn.Module) -> torch.optim.AdamW:
    """The peer's optimizer, with our groups and numbers."""
    groups = parameter_groups(model.named_parameters(), WEIGHT_DECAY)
    return torch.optim.AdamW(groups, LEARNING_RATE, BETAS, EPSILON, fused=True)


class RandomSamples:
    """Samples of unequal lengths over the whole vocabulary; see token_stream.StreamDataset."""

    def __init__(self, count: int, seq_length: int, vocab_size: int):
        random = np.random.default_rng(0)
        self.lengths = random.integers(seq_length // 8, seq_length + 1, count)
        self.lengths[: count // 2] = seq_length
        self.ids = random.integers(0, vocab_size, (count, seq_length))
        self.labels = random.integers(0, 2, count)

    def __len__(self) -> int:
        return len(self.lengths)

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        return np.column_stack([self.lengths[indices], np.maximum(self.lengths[indices] // 7, 1)])

    def stream(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        lengths, masked = self.sizes(indices).T
        starts = np.cumsum(lengths) - lengths
        rows = list(zip(indices, lengths, strict=True))
        return {
            "input_ids": np.concatenate([self.ids[i, :n] for i, n in rows]),
            "token_type_ids": np.concatenate([np.arange(n) * 2 // n for n in lengths]),
            "position_ids": np.concatenate([np.arange(n) for n in lengths]),
            "cu_seqlens": np.append(0, np.cumsum(lengths)).astype(np.int32),
            "mlm_positions": np.concatenate([s + 1 + np.arange(m) for s, m in zip(starts, masked, strict=True)]),
            "mlm_labels": np.concatenate([self.ids[i, 1 : m + 1] for i, m in zip(indices, masked, strict=True)]),
            "nsp_labels": self.labels[indices],
        }
