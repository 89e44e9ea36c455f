"""A training step on a GPU, on tensors without values: torch's meta device takes the code paths of every device but the
CPU, and raises where a program reads a number, for which it would have to wait for a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import InMemoryDataset

from bert_config import BertConfig
from data_loader import make_step_batch
from lr_scheduler import ScheduleConfig, make_schedule
from metrics import GlobalBatchStats
from modeling import BertForPreTraining, BertForQuestionAnswering, BertPreTrainedModel
from optimizer import OptimizerConfig, make_optimizer
from packing import MicroBatchLimits
from parallelize import ParallelModel
from precision import LossScale, Precision
from tasks.pretraining import PretrainingTask
from tasks.squad import SquadTask
from train_state import CheckpointMetadata, TrainState
from trainer import Runtime, Task, Trainer, TrainerConfig
from utils.distributed import DistributedContext

META = torch.device("meta")
TINY = BertConfig(1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=128)


@pytest.fixture
def fused_kernels_of_meta_tensors():
    """Some torch releases have these for devices with values only. They write in place and return nothing."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for overload in ("_fused_adamw_", "_fused_adamw_.tensor_lr"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{overload}", "Meta"):
            library.impl(overload, lambda *_, **__: None)
    yield
    library._destroy()


class InMemoryQuestions(InMemoryDataset):
    """The same sequences with answer positions instead of masked tokens."""

    def stream(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        stream = super().stream(indices)
        inputs = {name: stream[name] for name in ("input_ids", "token_type_ids", "position_ids", "cu_seqlens")}
        positions = np.zeros(len(indices), np.int64)
        return inputs | {"start_positions": positions, "end_positions": positions + 1}


def make_trainer(model_class: type[BertPreTrainedModel], task: Task) -> Trainer:
    precision = Precision(torch.bfloat16, pure=True)
    with META:
        model, learning_rate = model_class(TINY), torch.zeros(())
    model.bert.attention_implementation = "flash"
    parallel = ParallelModel(model, precision)
    optimizer = make_optimizer(OptimizerConfig("Lamb"), parallel.named_parameters().items(), 1e-4)
    for group in optimizer.param_groups:  # the optimizer's constructor reads its learning rate
        group["lr"] = learning_rate
    metadata = CheckpointMetadata("benchmark", {}, 0, 42, Path("unused"), do_lower_case=True)
    state = TrainState(parallel, optimizer, LossScale(2.0**16, True, META), metadata, DistributedContext())
    return Trainer(
        task,
        parallel,
        state,
        learning_rate,
        make_schedule(ScheduleConfig(10, 1e-4, "constant")),
        TrainerConfig(max_steps=10, checkpoint_folder=Path("unused"), benchmark=True),
        Runtime(META, precision),
    )


@pytest.mark.parametrize("fixed", [False, True], ids=["real sizes", "fixed sizes"])
@pytest.mark.parametrize(
    ("model_class", "task", "dataset_class"),
    [
        (BertForPreTraining, PretrainingTask(True, 24), InMemoryDataset),
        (BertForQuestionAnswering, SquadTask(24), InMemoryQuestions),
    ],
    ids=["pre-training", "SQuAD"],
)
def test_no_step_reads_a_number_from_the_device(model_class, task, dataset_class, fixed, fused_kernels_of_meta_tensors):
    trainer = make_trainer(model_class, task)
    dataset = dataset_class(np.random.default_rng(0).integers(12, 25, 8))
    batch = make_step_batch(dataset, np.arange(8), MicroBatchLimits.for_batch(4, 24, 4, fixed))
    assert len(batch.micro_batches) > 1
    stats = GlobalBatchStats(len(batch.lengths), batch.lengths.sum(), batch.num_targets.sum())
    for _ in range(2):
        sums = trainer.training_step(batch, stats)
        assert all(value.device == META for value in sums.values())
        trainer.optimizer_step()
    with pytest.raises(RuntimeError, match="meta tensors"):
        float(trainer.grad_norm)
