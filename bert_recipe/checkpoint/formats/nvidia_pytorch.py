"""Checkpoints of NVIDIA's PyTorch BERT: `ckpt_<step>.pt`, published `.pt` files, and fine-tuned
`pytorch_model.bin`.

Since 2022 NVIDIA's model has the tanh form of GELU, before it the erf form; both configs say
`gelu`. The other entries of a checkpoint show which: the later code saves a gradient scaler, the
earlier one apex's master parameters.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from bert_recipe.checkpoint.formats.source_weights import SourceWeights, find_file, rename
from bert_recipe.checkpoint.formats.torch_files import read_torch_file, state_dict_of

# A checkpoint from the middle of a run contains its data loader with a shard as NumPy arrays.
DATA_LOADER_CLASSES = (
    "torch.utils.data.dataloader.DataLoader",
    "torch.utils.data.sampler.RandomSampler",
    "torch.utils.data.sampler.SequentialSampler",
    "torch.utils.data.sampler.BatchSampler",
    "torch.utils.data._utils.collate.default_collate",
    "__main__.pretraining_dataset",
    "__main__.WorkerInitObj",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
)
HIDDEN_ACTS = {"grad_scaler": "gelu_pytorch_tanh", "master params": "gelu", "files": "gelu"}


class InertObject:
    """Placeholder for an unneeded object in a pickle. Ignores its state."""

    def __new__(cls, *_args: Any) -> "InertObject":
        return super().__new__(cls)

    def __init__(self, *_args: Any):
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


def read(source: Path) -> SourceWeights:
    """Reads the entry `model` of a checkpoint, or a bare state dict. Ignores other entries."""
    path = find_file(source, ".pt")
    value = read_torch_file(path, [(InertObject, name) for name in DATA_LOADER_CLASSES])
    is_checkpoint = (
        isinstance(value, dict) and "model" in value and not isinstance(value["model"], Tensor)
    )
    weights = SourceWeights(path)
    for name, tensor in state_dict_of(value["model"] if is_checkpoint else value, path).items():
        # The fused linear and activation, NVIDIA's `dense_act`, is Hugging Face's `dense`;
        # `module.` is of DDP.
        weights.add(rename(name, ((r"^module\.", ""), (r"\.dense_act\.", ".dense."))), tensor, name)
    weights.drop_tied_copies()
    if is_checkpoint:
        weights.hidden_act = next((act for name, act in HIDDEN_ACTS.items() if name in value), None)
        for name in value:
            if name != "model":
                weights.skip("state of the training run", str(name))
    return weights
