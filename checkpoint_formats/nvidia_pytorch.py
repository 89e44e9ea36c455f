"""Checkpoints of NVIDIA's PyTorch BERT: `ckpt_<step>.pt`, published `.pt` files, and fine-tuned `pytorch_model.bin`."""

from pathlib import Path

from torch import Tensor

from bert_config import BertConfig
from checkpoint.model_files import read_torch_file, state_dict_of
from checkpoint_formats.source_weights import SourceWeights, find_file, translate

# A checkpoint from the middle of a run holds its data loader, with a NumPy copy of a shard in it.
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


def read(source: Path, _config: BertConfig) -> SourceWeights:
    """Reads the entry `model` of a checkpoint, or a bare state dict; what stands beside `model` is not used."""
    path = find_file(source, ".pt")
    value = read_torch_file(path, inert=DATA_LOADER_CLASSES)
    is_checkpoint = isinstance(value, dict) and "model" in value and not isinstance(value["model"], Tensor)
    weights = translate(path, state_dict_of(value["model"] if is_checkpoint else value, path), hugging_face_name)
    if is_checkpoint:
        for name in value:
            if name != "model":
                weights.skip("state of the training run", str(name))
    return weights


def hugging_face_name(name: str) -> str:
    """NVIDIA's fused linear and activation is `dense_act`, where Hugging Face has `dense`."""
    return name.replace(".dense_act.", ".dense.")
