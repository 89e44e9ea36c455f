"""Google's TensorFlow BERT: `bert_model.ckpt.index` and `.data-...`. Linear weights are [in, out] (`kernel`)."""

import re
from pathlib import Path

import torch

from bert_config import BertConfig
from checkpoint_formats.source_weights import SourceWeights, find_file
from checkpoint_formats.tensor_bundle import TensorBundle
from utils.errors import UserError
from utils.progress import progress_bar

OPTIMIZER_STATE = re.compile(r"(/adam_[mv]|^global_step)$")
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
HEADS = {"cls/squad/": "qa_outputs.", "": "classifier.", "cls/seq_relationship/": "cls.seq_relationship."}


def read(source: Path, _config: BertConfig) -> SourceWeights:
    path = find_file(source, ".index")
    bundle = TensorBundle(path)
    if OBJECT_GRAPH in bundle.entries:
        raise UserError(
            f"{path} is an object-based checkpoint of TensorFlow 2 (Keras): only name-based checkpoints are read "
            f"(bert/encoder/layer_0/...), as Google published them"
        )
    weights = SourceWeights(path)
    placed = {name: entry for name, entry in bundle.entries.items() if not OPTIMIZER_STATE.search(name)}
    for variable in sorted(bundle.entries.keys() - placed.keys()):
        weights.skip("optimizer state", variable)
    with progress_bar(sum(entry.size for entry in placed.values()), "reading", delay=1) as bar:
        for variable, entry in placed.items():
            tensor = torch.from_numpy(bundle.read(variable))
            is_kernel = variable.endswith("/kernel") and tensor.dim() == 2
            weights.add(hugging_face_name(variable), tensor.T.contiguous() if is_kernel else tensor, variable)
            bar.update(entry.size)
    return weights


def hugging_face_name(variable: str) -> str:
    """`bert/encoder/layer_0/output/dense/kernel` as `bert.encoder.layer.0.output.dense.weight`. The heads' matrices
    (`output_weights`) and the embeddings have no `kernel` in their names, and are laid out as in PyTorch."""
    if head := re.fullmatch(r"(.*/|)output_(weights|bias)", variable):
        if head[1] in HEADS:
            return HEADS[head[1]] + ("weight" if head[2] == "weights" else "bias")
        return f"{head[1].replace('/', '.')}{head[2]}"  # cls.predictions.bias
    name = re.sub(r"/layer_(\d+)/", r"/layer/\1/", variable)
    if name.endswith("_embeddings"):
        name += "/weight"
    name = name.replace("/LayerNorm/gamma", "/LayerNorm/weight").replace("/LayerNorm/beta", "/LayerNorm/bias")
    return re.sub(r"/kernel$", "/weight", name).replace("/", ".")
