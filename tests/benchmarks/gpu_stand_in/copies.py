"""Copies to and from the stand-in for a GPU that run late: prints if the loader, a checkpoint and
offloaded weights have the right values. With `without-waits`, the program waits for nothing, and
overwrites what the loader made.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from small_runs import InMemoryDataset

from bert_recipe.checkpoint.model_card import ModelParts
from bert_recipe.checkpoint.record import RunRecord
from bert_recipe.checkpoint.rows import TensorRows
from bert_recipe.checkpoint.writer import Checkpoint, CheckpointWriter
from bert_recipe.config import LoaderConfig
from bert_recipe.data_loading.loader import StepLoader
from bert_recipe.model.encoders.bert import BertConfig
from bert_recipe.model.token_stream import to_device
from bert_recipe.parallel.offload import OffloadedWeights
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.distributed import DistributedContext

GPU = torch.device("cuda", 0)
VOCAB_FILE = Path("vocab/bert-base-uncased-vocab.txt")
STEPS = 20
synchronize = torch.cuda.synchronize


def loader(overwrites: bool) -> bool:
    dataset = InMemoryDataset([24, 5, 17, 9] * 16)
    config = LoaderConfig(4, 8, 24, 4, num_workers=2)
    copied = []
    for batch in itertools.islice(StepLoader(dataset, config, seed=0, pin_memory=True), STEPS):
        for micro_batch in batch.micro_batches:
            copied.append(to_device(micro_batch, GPU))
            for tensor in micro_batch.values():
                if overwrites and isinstance(tensor, torch.Tensor):
                    tensor.zero_()
    synchronize()
    batches = itertools.islice(StepLoader(dataset, config, seed=0), STEPS)
    expected = itertools.chain.from_iterable(batch.micro_batches for batch in batches)
    return all(
        torch.equal(torch.as_tensor(copied_batch[name]).cpu(), torch.as_tensor(value))
        for copied_batch, micro_batch in zip(copied, expected, strict=True)
        for name, value in micro_batch.items()
    )


def checkpoint(folder: Path) -> bool:
    """Of tensors that change after the call."""
    values = {name: torch.rand(100, 7) for name in ("weight", "bias")}
    tensors = {name: value.to(GPU) for name, value in values.items()}
    rows = [TensorRows(name, tuple(tensor.shape), tensor) for name, tensor in tensors.items()]
    record = RunRecord({}, {}, phase="phase1", num_samples=1)
    parts = ModelParts(BertTokenizer(VOCAB_FILE))
    files = ("model.safetensors", "model_optimizer.safetensors")
    writer = CheckpointWriter(folder, DistributedContext())
    config, rows_of_files = BertConfig(5, 4, 1, 1, 4), dict.fromkeys(files, rows)
    content = Checkpoint(1, rows_of_files, config, "BertModel", {"step": 1}, record, parts)
    writer.prepare(content)
    writer.write(content)
    for tensor in tensors.values():
        tensor.copy_(torch.zeros(100, 7).pin_memory(), non_blocking=True)
    writer.wait()
    synchronize()
    written = [load_file(folder / "1" / name) for name in files]
    return all(torch.equal(file[name], value) for file in written for name, value in values.items())


def offload() -> bool:
    """Gradients reach the masters before the optimizer reads them, and weights the model before it
    changes them.
    """
    weight = torch.rand(64, 64)
    gradients = torch.rand(3, 64, 64)
    model = torch.nn.Linear(64, 64, bias=False)
    model.weight.data.copy_(weight)
    masters = OffloadedWeights(model.to(GPU))
    synchronize()
    is_right, on_device = True, []
    for gradient in gradients:
        model.weight.grad = gradient.to(GPU)
        masters.pull_gradients()
        on_device.append((model.weight.detach().clone(), weight.clone()))
        is_right &= torch.equal(masters.masters["weight"].grad, gradient)
        weight -= gradient
        masters.masters["weight"].data.sub_(gradient)
        masters.push_weights()
    synchronize()
    return is_right and all(torch.equal(stored.cpu(), expected) for stored, expected in on_device)


def main(folder: str, *mode: str) -> None:
    if mode:
        torch.cuda.synchronize = torch.cuda.Event.synchronize = lambda *_: None
    results = {
        "loader": loader(bool(mode)),
        "checkpoint": checkpoint(Path(folder)),
        "offload": offload(),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
