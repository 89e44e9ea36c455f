"""Checkpoints of NVIDIA's Paddle BERT: `.pdparams`, a pickled dictionary of NumPy arrays.

`paddle.static.save`, which the recipe uses, names parameters by creation order (`linear_6.w_0`);
`paddle.save` of a state dict names them by module
(`bert.encoder.layers.1.self_attn.q_proj.weight`). Both are read. Linear weights are [in, out] in
Paddle and [out, in] in PyTorch.
"""

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_recipe.checkpoint.formats.source_weights import SourceWeights, find_file, rename
from bert_recipe.checkpoint.formats.torch_files import forbidden_class
from bert_recipe.utils.errors import UserError

reconstruct = np.empty(0).__reduce__()[0]  # of whichever module this NumPy has it in
STRUCTURED_NAMES_KEY = "StructuredToParameterName@@"  # paddle.save adds it to a state dict
EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
# Structured names to Hugging Face's.
RENAMES = (
    (r"^bert\.embeddings\.layer_norm\.", "bert.embeddings.LayerNorm."),
    (r"^bert\.encoder\.layers\.", "bert.encoder.layer."),
    (r"\.self_attn\.q_proj\.", ".attention.self.query."),
    (r"\.self_attn\.k_proj\.", ".attention.self.key."),
    (r"\.self_attn\.v_proj\.", ".attention.self.value."),
    (r"\.self_attn\.out_proj\.", ".attention.output.dense."),
    (r"\.norm1\.", ".attention.output.LayerNorm."),
    (r"\.linear1\.", ".intermediate.dense."),
    (r"\.linear2\.", ".output.dense."),
    (r"\.norm2\.", ".output.LayerNorm."),
    (r"^cls\.predictions\.transform\.", "cls.predictions.transform.dense."),
    (r"^cls\.predictions\.layer_norm\.", "cls.predictions.transform.LayerNorm."),
    (r"^cls\.predictions\.decoder_weight$", "cls.predictions.decoder.weight"),
    (r"^cls\.predictions\.decoder_bias$", "cls.predictions.bias"),
    (r"^classifier\.", "qa_outputs."),  # the recipe's only fine-tuning task is SQuAD
)


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles NumPy arrays and plain containers only; raises UserError for any other class,
    without importing it.
    """

    ALLOWED = {  # noqa: RUF012
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): reconstruct,
        ("_codecs", "encode"): str.encode,  # of the bytes of arrays, in pickles of protocol 2
        ("collections", "OrderedDict"): OrderedDict,
    }

    def __init__(self, file: Any, path: Path):
        super().__init__(file)
        self.path = path

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in self.ALLOWED:
            raise forbidden_class(self.path, f"{module_name}.{global_name}")
        return self.ALLOWED[module_name, global_name]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            value = ArrayUnpickler(file, path).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(
            f"{path} is not a complete .pdparams file: check that it is one, or fetch it again"
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f"{path} holds a {type(value).__name__}, not a dictionary: give a model's .pdparams"
        )
    value.pop(STRUCTURED_NAMES_KEY, None)
    for name, array in value.items():
        if (
            not isinstance(name, str)
            or not isinstance(array, np.ndarray)
            or array.dtype.kind != "f"
        ):
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise UserError(
                f"{path}: {name!r} is {kind}, not an array of floats: give a model's .pdparams"
            )
    return value


def read(source: Path) -> SourceWeights:
    path = find_file(source, ".pdparams")
    arrays = read_arrays(path)
    fused = [name for name in arrays if "qkv_proj" in name]
    first = arrays.get("linear_0.w_0")
    if first is not None and first.ndim == 2 and first.shape[1] == 3 * first.shape[0]:
        fused.append("linear_0.w_0")
    if fused:
        raise UserError(
            f"{path}: {fused[0]} holds query, key and value in one tensor (trained with "
            f"--fuse-mha), and the file "
            f"does not specify their order: convert it in the container that wrote it first"
        )
    has_mlm_head = "bert_lm_prediction_head_0.b_0" in arrays
    num_norms = sum(name.startswith("layer_norm_") and name.endswith("w_0") for name in arrays)
    structured = static_names((num_norms - 1 - has_mlm_head) // 2, has_mlm_head)
    weights = SourceWeights(path)
    for source_name, array in arrays.items():
        name = rename(structured.get(source_name, source_name), RENAMES)
        tensor = torch.from_numpy(array)
        is_linear = tensor.dim() == 2 and "embeddings" not in name and "decoder" not in name
        weights.add(name, tensor.T.contiguous() if is_linear else tensor, source_name)
    weights.drop_tied_copies()
    # Of paddle.nn.TransformerEncoderLayer, which the recipe does not change.
    weights.notes.append(
        "LayerNorm's epsilon is 1e-05 in the encoder layers of the Paddle recipe: with the "
        "config's, logits differ slightly"
    )
    return weights


def static_names(num_layers: int, has_mlm_head: bool) -> dict[str, str]:
    """The parameters' names in a static program, with their structured names.

    Paddle numbers the layers of each class in the model's order, except that LayerNorms come after
    their Linears.
    """
    layers = [f"bert.encoder.layers.{layer}." for layer in range(num_layers)]
    linear = [layer + part for layer in layers for part in (*ATTENTION, "linear1", "linear2")] + [
        "bert.pooler.dense"
    ]
    layer_norm = ["bert.embeddings.layer_norm"] + [
        layer + part for layer in layers for part in ("norm1", "norm2")
    ]
    names = {
        f"embedding_{i}.w_0": f"bert.embeddings.{table}.weight"
        for i, table in enumerate(EMBEDDINGS)
    }
    if has_mlm_head:
        linear += ["cls.predictions.transform", "cls.seq_relationship"]
        layer_norm += ["cls.predictions.layer_norm"]
        names["bert_lm_prediction_head_0.b_0"] = "cls.predictions.decoder_bias"
    else:
        linear += ["classifier"]
    for kind, modules in (("linear", linear), ("layer_norm", layer_norm)):
        for i, module in enumerate(modules):
            names[f"{kind}_{i}.w_0"] = f"{module}.weight"
            names[f"{kind}_{i}.b_0"] = f"{module}.bias"
    return names
