"""What a step on a GPU does, on tensors without values: torch's meta device takes the paths of
every device but the CPU, and raises an error if a program reads a number, for which it would have
to wait for a GPU.
"""

import numpy as np
import pytest
import torch
from small_runs import InMemoryDataset
from torch.distributed.utils import _to_kwargs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bert_recipe.config import LoaderConfig, OptimizerConfig
from bert_recipe.data_loading.loader import make_step_batch
from bert_recipe.data_loading.packing import Label, MicroBatchLimits
from bert_recipe.metrics.throughput import GlobalBatchStats
from bert_recipe.model.costs.flops import training_flops
from bert_recipe.model.encoders.bert import BertConfig, BertForPreTraining, BertForQuestionAnswering
from bert_recipe.model.encoders.modernbert import ModernBertConfig, ModernBertForMaskedLM
from bert_recipe.model.token_stream import STREAM_INPUTS
from bert_recipe.optimization.precision import LossScale, Precision
from bert_recipe.optimization.protocol import apply_step
from bert_recipe.optimization.registry import make_optimizer
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.pretraining import PretrainingTask
from bert_recipe.tasks.squad.options import SquadTaskOptions
from bert_recipe.tasks.squad.task import SquadTask
from bert_recipe.training import setup as run_setup
from bert_recipe.training.evaluation import evaluate
from bert_recipe.training.library import make_settings, make_trainer
from bert_recipe.training.trainer import Trainer

pytestmark = pytest.mark.fast

META = torch.device("meta")
TINY = BertConfig(
    1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=128
)
MODERN = ModernBertConfig(
    1000, 64, 4, num_attention_heads=1, intermediate_size=96, local_attention=8
)


LENGTHS = (24, 24, 24, 24, 22, 17, 13, 8)


@pytest.fixture(autouse=True)
def meta_kernels(monkeypatch):
    """Some releases of torch have the fused optimizers only for devices with values. They write in
    place and return nothing. An optimizer checks the learning rate that it is created with, so it
    is created with a number.
    """

    def make_meta_optimizer(config, model, lr, parameters, *process_groups):
        optimizer = make_optimizer(config, model, 1e-4, parameters, *process_groups)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return optimizer

    monkeypatch.setattr(run_setup, "make_optimizer", make_meta_optimizer)
    library = torch.library.Library("aten", "IMPL", "Meta")
    for overload in ("_fused_adamw_", "_fused_adamw_.tensor_lr"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{overload}", "Meta"):
            library.impl(overload, lambda *_, **__: None)
    yield
    library._destroy()


class Questions(InMemoryDataset):
    """The same sequences, with positions of answers instead of masked tokens."""

    stream_labels = tuple(Label(name, "sequence") for name in ("start_positions", "end_positions"))

    def stream(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        stream = super().stream(indices)
        inputs = {name: stream[name] for name in STREAM_INPUTS}
        return inputs | {
            "start_positions": self.labels[indices],
            "end_positions": self.labels[indices] + 1,
        }


def make_meta_trainer(
    model_class, task, dataset, precision, attention, config=TINY, optimizer="Lamb"
) -> Trainer:
    with META:
        model = model_class(config)
    values = {"max_steps": 9, "learning_rate": 1e-4, "lr_decay": "constant"}
    settings = make_settings("unused", benchmark=True, optimizer=optimizer, **values)
    trainer = make_trainer(model, task, dataset, settings, Runtime(META, precision))
    trainer.parallel.loss_scale = LossScale(2.0**16, True, META)
    model.base_model.attention_implementation = attention
    return trainer


PRECISIONS = {
    "bfloat16": (Precision(torch.bfloat16, pure=True), "flash"),
    "float16 with loss scaling": (Precision(torch.float16, pure=True), "flash"),
    "float32": (Precision(), "efficient"),
    "float32, padded": (Precision(), "padded"),
}
MODELS = {
    "pre-training": (BertForPreTraining, PretrainingTask(True, 24), InMemoryDataset, TINY, "Lamb"),
    "SQuAD": (BertForQuestionAnswering, SquadTask(SquadTaskOptions(), 24), Questions, TINY, "Lamb"),
    "ModernBERT with Muon": (
        ModernBertForMaskedLM,
        PretrainingTask(False, 24),
        InMemoryDataset,
        MODERN,
        "Muon",
    ),
}
# ModernBERT, which has layers with and without a window, with all kinds of attention and of sizes.
CASES = [("ModernBERT with Muon", name, fixed) for name in PRECISIONS for fixed in (False, True)]
CASES += [("pre-training", name, name != "float32") for name in PRECISIONS]
CASES += [("SQuAD", "bfloat16", True), ("SQuAD", "float16 with loss scaling", False)]


@pytest.mark.parametrize(("model", "numbers", "fixed"), CASES)
def test_no_step_reads_a_number_from_the_device(model, numbers, fixed):
    """`fixed`: micro-batches have one size, with filler."""
    model_class, task, dataset_class, config, optimizer = MODELS[model]
    precision, attention = PRECISIONS[numbers]
    loader = LoaderConfig(4, 8, 24, 4)
    limits = MicroBatchLimits.of(loader, num_sizes=1 if fixed else None)
    dataset = dataset_class(LENGTHS)
    trainer = make_meta_trainer(model_class, task, dataset, precision, attention, config, optimizer)
    batch = make_step_batch(dataset, np.arange(8), limits)
    assert len(batch.micro_batches) > 1
    for _ in range(2):
        sums = trainer.training_step(batch, GlobalBatchStats.of(batch))
        assert all(value.device == META for value in sums.values())
        trainer.optimizer_step()
    with pytest.raises(RuntimeError, match="meta tensors"):
        float(trainer.grad_norm)


def test_an_evaluation_reads_the_device_after_its_last_batch_only(monkeypatch):
    dataset = InMemoryDataset(3 * LENGTHS)
    loader = LoaderConfig(4, 8, 24, 4)
    trainer = make_meta_trainer(
        BertForPreTraining, PretrainingTask(True, 24), dataset, Precision(), "padded"
    )
    batches = []
    limits = MicroBatchLimits.of(loader)
    sums = PretrainingTask.sums
    monkeypatch.setattr(PretrainingTask, "sums", lambda *args: batches.append(args) or sums(*args))
    with pytest.raises(RuntimeError, match="meta"):
        evaluate(
            trainer.parallel,
            trainer.task,
            dataset,
            limits,
            trainer.runtime,
        )
    assert len(batches) > 2


def test_ddp_copies_each_input_of_the_model_to_its_device():
    """What DDP's forward pass does with its inputs where it has a device, which it has on GPUs
    only.
    """
    loader = LoaderConfig(4, 4, 24, 4)
    limits = MicroBatchLimits.of(loader)
    dataset = InMemoryDataset(LENGTHS[-4:])
    batch = make_step_batch(dataset, np.arange(4), limits)
    (micro_batch,) = batch.micro_batches
    trainer = make_meta_trainer(
        BertForPreTraining, PretrainingTask(True, 24), dataset, Precision(), "padded"
    )
    copied = []

    def ddp(*inputs, **named):
        (inputs,), (named,) = _to_kwargs(
            inputs, named, META, use_side_stream_for_tensor_copies=False
        )
        copied.extend((inputs, named))
        return trainer.parallel.plain_module(*inputs, **named)

    sums = trainer.task.sums(ddp, micro_batch)
    assert all(value.device == META for value in sums.values())
    (on_meta,), named = copied
    assert on_meta.keys() == micro_batch.keys() and named == {"objective": trainer.task.objective}
    for name, value in micro_batch.items():
        if isinstance(value, torch.Tensor):
            assert on_meta[name].device == META
        else:
            assert on_meta[name] == value


def test_a_step_with_flash_attention_computes_the_flops_of_the_formula():
    length, sequences = 128, 8
    bert_config = BertConfig(
        1000, 64, num_hidden_layers=12, num_attention_heads=1, intermediate_size=256
    )
    dataset = InMemoryDataset([length] * sequences)
    dataset.num_labelled[:] = length - 1  # with [CLS], the heads read every token
    loader = LoaderConfig(sequences, sequences, length, length)
    batch = make_step_batch(dataset, np.arange(sequences), MicroBatchLimits.of(loader))
    task = PretrainingTask(True, length)
    precision = Precision(torch.bfloat16, pure=True)
    trainer = make_meta_trainer(BertForPreTraining, task, dataset, precision, "flash", bert_config)
    with FlopCounterMode(display=False) as counter:
        trainer.training_step(batch, GlobalBatchStats.of(batch))
    counts = {
        str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()
    }
    attention = counts.pop("aten._flash_attention_forward")
    # The backward pass computes the scores again, which the formula, made of what is needed, does
    # not count.
    assert counts.pop("aten._flash_attention_backward") == 2.5 * attention
    formula = training_flops(trainer.parallel.model, batch.lengths, batch.num_labelled.sum())
    assert sum(counts.values()) + 3 * attention == pytest.approx(formula, rel=1e-9)


BASE = {"vocab_size": 50_368, "hidden_size": 768, "num_hidden_layers": 22}
BASE |= {"num_attention_heads": 12, "intermediate_size": 1152}


class Launches(TorchDispatchMode):
    """Counts the kernels that a GPU would run. One launch of a foreach operation has up to 36
    tensors and 320 blocks of 65,536 elements.
    """

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not operation.is_view:
            first = args[0] if args else None
            tensors = first if isinstance(first, (list, tuple)) else []
            blocks = sum(-(-tensor.numel() // 65536) for tensor in tensors)
            self.count += max(-(-blocks // 320), -(-len(tensors) // 36), 1)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_matrices_of_one_shape_are_orthogonalized_with_few_launches(name):
    with META:
        model = ModernBertForMaskedLM(ModernBertConfig(**BASE))
        optimizer = run_setup.make_optimizer(OptimizerConfig(name), model, torch.tensor(0.01), None)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        for launches in (Launches(), Launches()):  # the first update makes the state
            with launches:
                apply_step(optimizer, torch.tensor(1.0), torch.tensor(0.0))
    assert 100 < launches.count <= 400
