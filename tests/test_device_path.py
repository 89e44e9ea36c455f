"""What a step on a GPU does, on tensors without values: torch's meta device takes the paths of every device but the
CPU, and raises where a program reads a number, for which it would have to wait for a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.contenders import RandomSamples
from token_stream import Limits, make_step_batch
from utils.logger import Reporter

from lr_scheduler import make_schedule
from modeling import BertConfig, BertForPreTraining, BertForQuestionAnswering, BertPreTrainedModel
from optimizer import LossScale, MasterWeights, make_optimizer
from run_pretraining import Pretraining
from run_squad import QuestionAnswering
from trainer import Provenance, Runtime, Settings, Task, Totals, Trainer
from utils.distributed import Precision, Processes

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


class RandomQuestions(RandomSamples):
    """The same sequences, with the places of answers in place of masked tokens."""

    def stream(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        stream = super().stream(indices)
        inputs = {name: stream[name] for name in ("input_ids", "token_type_ids", "position_ids", "cu_seqlens")}
        return inputs | {"start_positions": self.labels[indices], "end_positions": self.labels[indices] + 1}


def make_trainer(model_class: type[BertPreTrainedModel], task: Task) -> Trainer:
    with META:
        model, learning_rate = model_class(TINY), torch.zeros(())
    model.bert.attention_implementation = "flash"
    masters = MasterWeights(model)
    model.bfloat16()
    optimizer = make_optimizer("Lamb", masters.named_parameters(), 1e-4, (0.9, 0.999), 1e-6, 0.01)
    for group in optimizer.param_groups:  # an optimizer reads the number that it is made with
        group["lr"] = learning_rate
    return Trainer(
        model,
        task,
        optimizer,
        learning_rate,
        make_schedule("constant", 1e-4, 10, 0.0),
        Settings(max_steps=10, checkpoint_folder=Path("unused"), benchmark=True),
        Provenance("benchmark", {}, 0, Path("unused"), True),
        Runtime(META, Precision(torch.bfloat16, pure=True), Processes(), Reporter(None)),
        loss_scale=LossScale(2.0**16, dynamic=True, device=META),
        masters=masters,
    )


@pytest.mark.parametrize("fixed", [False, True], ids=["real sizes", "fixed sizes"])
@pytest.mark.parametrize(
    ("model_class", "task", "samples_class"),
    [
        (BertForPreTraining, Pretraining(True, 24), RandomSamples),
        (BertForQuestionAnswering, QuestionAnswering(24), RandomQuestions),
    ],
    ids=["pre-training", "SQuAD"],
)
def test_no_step_reads_a_number_from_the_device(model_class, task, samples_class, fixed, fused_kernels_of_meta_tensors):
    trainer = make_trainer(model_class, task)
    samples = samples_class(8, 24, TINY.vocab_size)
    batch = make_step_batch(samples, np.arange(8), Limits.for_batch(4, 24, 4, fixed))
    assert len(batch.micro_batches) > 1
    for _ in range(2):
        sums = trainer.training_step(batch, Totals(batch.num_sequences, batch.num_tokens, batch.num_targets))
        assert all(value.device == META for value in sums.values())
        trainer.optimizer_step()
    with pytest.raises(RuntimeError, match="meta tensors"):
        float(trainer.grad_norm)
