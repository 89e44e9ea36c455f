"""ModernBERT's own training checkpoints: Composer's `ep0-ba1000-rank0.pt`, with the names of its
FlexBERT modules.

The file has the weights, the model's config and the tokenizer. Its other objects (states of the
optimizer, of random generators, of metrics) are replaced by placeholders; nothing in it is
executed.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch

from bert_recipe.checkpoint.formats.nvidia_pytorch import InertObject
from bert_recipe.checkpoint.formats.source_weights import (
    MODERNBERT,
    SourceWeights,
    find_file,
    rename,
)
from bert_recipe.checkpoint.formats.torch_files import read_torch_file, state_dict_of
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject

# The file's max_position_embeddings has no effect, because positions are rotary.
MAX_POSITIONS = 8192
# What transformers' ModernBERT cannot express, with the only value that is read. `None` is the same
# as a missing key.
EXPECTED = {
    **{
        "attention_layer": "rope",
        "bert_layer": "prenorm",
        "embedding_layer": "sans_pos",
        "mlp_layer": "glu",
    },
    **{"embed_norm": True, "final_norm": True, "skip_first_prenorm": True, "head_pred_norm": True},
    **{"rotary_emb_interleaved": False, "rotary_emb_dim": None, "rotary_emb_scale_base": None},
    **{"initial_attention_layer": None, "tie_word_embeddings": True},
}
SAME_KEYS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("initializer_range", "mlp_dropout_prob", "global_attn_every_n_layers"),
)
RENAMES = (
    (r"^(module\.)?(model\.)?", ""),  # Composer's and the data-parallel wrapper's
    (r"_orig_mod\.", ""),  # torch.compile's
    (r"^bert\.(encoder\.)?", "model."),
)


def read(source: Path) -> SourceWeights:
    path = find_file(source, ".pt")
    try:
        others = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (ValueError, RuntimeError, OSError, KeyError):
        # read_torch_file says what is wrong with the file.
        others = []
    value = read_torch_file(path, [(InertObject, name) for name in others])
    state = value.get("state") if isinstance(value, dict) else None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UserError(
            f"{path} has no state of a model: give a checkpoint that Composer wrote, of one rank"
        )
    weights = SourceWeights(path, layout=MODERNBERT)
    tensors = {}
    for source_name, tensor in state_dict_of(state["model"], path).items():
        tensors[rename(source_name, RENAMES)] = (source_name, tensor)
    for name, (source_name, tensor) in fuse_qkv(tensors).items():
        if not name.endswith("inv_freq"):
            weights.add(name, tensor, source_name)
    weights.drop_tied_copies()
    for name in sorted({*map(str, state), *map(str, value)} - {"state", "model", "integrations"}):
        weights.skip("state of the training run", name)
    try:
        add_config_and_tokenizer(weights, state)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: its integrations are not in Composer's form ({error!r}): write it again"
        ) from error
    return weights


def fuse_qkv(tensors: dict[str, tuple[str, torch.Tensor]]) -> dict[str, tuple[str, torch.Tensor]]:
    """Stacks separate query, key and value (Wq, Wk, Wv) as Wqkv, transformers' name. tensors: by
    name, with the name in the file, which is that of the query for a stacked tensor.
    """
    fused = dict(tensors)
    for name in tensors:
        match = re.fullmatch(r"(.*\.attn\.)Wq\.(weight|bias)", name)
        if match is None:
            continue
        prefix, kind = match.groups()
        parts = [f"{prefix}W{part}.{kind}" for part in "qkv"]
        if all(part in fused for part in parts):
            source_names, qkv = zip(*(fused.pop(part) for part in parts), strict=True)
            fused[f"{prefix}Wqkv.{kind}"] = (source_names[0], torch.cat(qkv))
    return fused


def add_config_and_tokenizer(weights: SourceWeights, state: JsonObject) -> None:
    """Adds what Composer stores of the Hugging Face model, if it is there: its config, and its
    tokenizer's files.
    """
    saved = (state.get("integrations") or {}).get("huggingface") or {}
    config = (saved.get("model") or {}).get("config") or {}
    content = config.get("content")
    if content:
        names = weights.tensors.keys()
        weights.config_values = modernbert_config(weights.path, content, names)
    for name, entry in (saved.get("tokenizer") or {}).items():
        extension = entry["file_extension"]
        if extension == ".json":
            text = json.dumps(entry["content"], ensure_ascii=False)
        elif extension == ".txt":
            text = "\n".join(entry["content"])
        else:
            continue
        weights.tokenizer_files[f"{name}{extension}"] = text.encode()


def modernbert_config(path: Path, content: JsonObject, names: Any) -> JsonObject:
    """The content of `config.json`. Raises UserError unless it is transformers' ModernBERT. names:
    of all tensors.
    """
    for key, expected in EXPECTED.items():
        value = content.get(key, expected)
        if value != expected:
            raise UserError(
                f"{path}: its config has {key} {value!r}; ModernBERT in transformers has "
                f"{expected!r}"
            )
    if "layernorm" not in str(content.get("normalization", "layernorm")):
        raise UserError(
            f"{path}: its config has normalization {content['normalization']!r}, not layernorm"
        )
    try:
        theta = content["rotary_emb_base"]
        local = content.get("local_attn_rotary_emb_base", -1)
        every, window = content["global_attn_every_n_layers"], content["sliding_window"]
        values = {key.removesuffix("_prob"): content[key] for key in SAME_KEYS} | {
            "model_type": "modernbert",
            "architectures": [MODERNBERT.architecture(names)],
            "max_position_embeddings": MAX_POSITIONS,
            "hidden_activation": content["hidden_act"],
            "classifier_activation": content.get("head_pred_act", content["hidden_act"]),
            "norm_eps": content["norm_kwargs"]["eps"],
            "attention_dropout": content["attention_probs_dropout_prob"],
            "embedding_dropout": content["embed_dropout_prob"],
            "classifier_dropout": content.get("head_class_dropout", 0.0),
            "classifier_pooling": content.get("pooling_type", "mean"),
            "initializer_cutoff_factor": content.get("init_cutoff_factor", 2.0),
            "global_rope_theta": theta,
            "local_rope_theta": theta if local in (None, -1) else local,
        }
        has_local_layers = every > 0 and window > 0
        if has_local_layers:
            values["local_attention"] = window
        else:
            values["global_attn_every_n_layers"] = 1  # all are global
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path}: its config lacks {error}: give --config-file, transformers' config.json"
        ) from error
    biases = {
        "norm_bias": "final_norm.bias",
        "attention_bias": "attn.Wo.bias",
        "mlp_bias": "mlp.Wo.bias",
        "classifier_bias": "head.dense.bias",
        "decoder_bias": "decoder.bias",
    }
    for key, ending in biases.items():
        values[key] = any(name.endswith(ending) for name in names)
    return values
