"""convert_checkpoint.py on ModernBERT's own training checkpoints: a model of transformers under
FlexBERT's names.
"""

import datetime
import json
import random
import re

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from checkpoint_files import Malicious, convert, converted, large_weights
from conftest import assert_refused

from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.model.encoders.modernbert import ModernBertForMaskedLM

SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
WORDS = [*SPECIAL, *(f"word{n}" for n in range(40))]
VOCAB = len(WORDS)  # 45, in memory 48
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 48, "global_attn_every_n_layers": 3}
WINDOW = 4
CONTENT = {  # the keys that FlexBERT's config has beside BERT's
    **SIZES,
    **{"hidden_act": "gelu", "head_pred_act": "gelu", "normalization": "layernorm"},
    **{
        "initializer_range": 0.02,
        "init_cutoff_factor": 2.0,
        "mlp_dropout_prob": 0.0,
        "embed_dropout_prob": 0.0,
    },
    **{
        "attention_probs_dropout_prob": 0.0,
        "norm_kwargs": {"eps": 1e-5, "bias": False},
        "pooling_type": "cls",
    },
    **{
        "attention_layer": "rope",
        "bert_layer": "prenorm",
        "embedding_layer": "sans_pos",
        "mlp_layer": "glu",
    },
    **{"embed_norm": True, "final_norm": True, "skip_first_prenorm": True, "head_pred_norm": True},
    **{"rotary_emb_interleaved": False, "rotary_emb_dim": None, "rotary_emb_base": 160000.0},
    **{"local_attn_rotary_emb_base": 10000.0, "sliding_window": WINDOW},
    **{
        "max_position_embeddings": 512,
        "model_type": "flex_bert",
        "padding": "unpadded",
        "head_class_dropout": 0.0,
    },
}


def reference_model() -> transformers.ModernBertForMaskedLM:
    ids = dict.fromkeys(
        ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0
    )
    config = transformers.ModernBertConfig(**SIZES, **ids, local_attention=WINDOW)
    return large_weights(transformers.ModernBertForMaskedLM(config))


def published_names(
    model: transformers.ModernBertForMaskedLM, multiple: int = 8
) -> dict[str, torch.Tensor]:
    """The weights as FlexBERT names them and pads them to a multiple of 8 rows."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        name = re.sub("^model.layers", "bert.encoder.layers", name).replace("model.", "bert.")
        padding = -len(tensor) % multiple if len(tensor) == VOCAB else 0
        tensors[name] = torch.cat([tensor, torch.ones(padding, *tensor.shape[1:])])
    return tensors


class Metric:
    """An object of the training code."""


def write_composer(
    path, tensors: dict[str, torch.Tensor], prefix="model.", content=CONTENT, **entries
) -> None:
    """A file of the form that Composer writes."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    files = {
        "tokenizer": {"file_extension": ".json", "content": json.loads(tokenizer.to_str())},
        "tokenizer_config": {
            "file_extension": ".json",
            "content": {"tokenizer_class": "PreTrainedTokenizerFast"},
        },
    }
    model = {
        "config": {"file_extension": ".json", "content": content, "class": "FlexBertForMaskedLM"}
    }
    state = {
        "model": {prefix + name: tensor for name, tensor in tensors.items()},
        "integrations": {"huggingface": {"model": model, "tokenizer": files}},
        "optimizers": {"StableAdamW": {"state": {0: torch.ones(2)}}},
        "timestamp": {"Timestamp": {"batch": 3, "total_wct": datetime.timedelta(seconds=3)}},
        "train_metrics": {"loss": Metric()},
        **entries,
    }
    rng = [
        {
            "python": random.getstate(),
            "numpy": np.random.default_rng(0).bit_generator.state,
            "array": np.ones(2),
        }
    ]
    torch.save({"state": state, "rng": rng}, path)


@pytest.mark.parametrize("names", ["published", "unfused", "compiled", "without padding"])
def test_a_checkpoint_has_its_logits_and_its_tokenizer(tmp_path, names):
    model = reference_model()
    prefix = "module.model." if names == "compiled" else "model."
    tensors = published_names(model, 1 if names == "without padding" else 8)
    if names == "unfused":
        fused = {name: tensors.pop(name) for name in list(tensors) if "Wqkv" in name}
        for name, tensor in fused.items():
            tensors |= {
                name.replace("qkv", part): rows
                for part, rows in zip("qkv", tensor.chunk(3), strict=True)
            }
    elif names == "compiled":
        tensors = {
            name.replace("layers.1.", "layers.1._orig_mod."): tensor
            for name, tensor in tensors.items()
        }
    write_composer(tmp_path / "ep0-ba3-rank0.pt", tensors, prefix)
    output = converted("composer", tmp_path / "ep0-ba3-rank0.pt", tmp_path / "out", beside=False)
    assert ("cut 3 rows that pad the vocabulary from 45 to 48" in output) == (
        names != "without padding"
    )
    assert "not used (state of the training run): optimizers, rng, timestamp and 1 more" in output
    ids = torch.randint(0, VOCAB, (1, 17), generator=torch.Generator().manual_seed(3))
    ours = (
        load_pretrained(ModernBertForMaskedLM, tmp_path / "out")
        .eval()(ids)
        .prediction_logits[..., :VOCAB]
    )
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()(ids).logits
    for logits in (ours, theirs):
        torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("word3 word4", add_special_tokens=False)["input_ids"] == [8, 9]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_layer": "base"}, "attention_layer 'base'"),
        ({"normalization": "rmsnorm"}, "normalization 'rmsnorm'"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved True"),
        ({"rotary_emb_base": None}, "global_rope_theta is None"),
        ({"num_hidden_layers": 3}, "layers.3"),
        ({"hidden_act": "silu"}, "hidden_activation is 'silu'"),
        ({"integrations": {"huggingface": {"tokenizer": ["x"]}}}, "not in Composer's form"),
    ],
)
def test_what_transformers_cannot_express_is_refused(tmp_path, change, words):
    entries = change if "integrations" in change else {}
    write_composer(
        tmp_path / "a.pt",
        published_names(reference_model()),
        content={**CONTENT, **change},
        **entries,
    )
    assert_refused(convert("composer", tmp_path / "a.pt", tmp_path / "out", beside=False), words)


def test_nothing_in_the_file_is_executed(tmp_path):
    write_composer(
        tmp_path / "bad.pt",
        published_names(reference_model()),
        callbacks=Malicious(tmp_path / "executed"),
    )
    assert_refused(
        convert("composer", tmp_path / "bad.pt", tmp_path / "out", beside=False), "posix.system"
    )
    assert not (tmp_path / "executed").exists()
    flag = convert(
        "composer", tmp_path / "bad.pt", tmp_path / "out", "--hidden-act", "gelu", beside=False
    )
    assert_refused(flag, "--hidden-act has no effect")
    torch.save([1], tmp_path / "other.pt")
    assert_refused(
        convert("composer", tmp_path / "other.pt", tmp_path / "out", beside=False),
        "has no state of a model",
    )
