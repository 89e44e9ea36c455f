"""convert_checkpoint.py on ModernBERT's own training checkpoints. FlexBERT's forward pass is written out here."""

import datetime
import json
import math
import random

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from checkpoint_files import Malicious, convert, converted
from conftest import assert_refused

from checkpoint.weights import load_pretrained
from encoders.modernbert import ModernBertForMaskedLM

SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
WORDS = [*SPECIAL, *(f"word{n}" for n in range(40))]
VOCAB = len(WORDS)  # 45, in memory 48
HIDDEN, LAYERS, HEADS, INNER, WINDOW, EVERY = 32, 4, 2, 48, 4, 3
CONTENT = {  # the keys that FlexBERT's config has beside BERT's
    **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
    **{"intermediate_size": INNER, "hidden_act": "gelu", "head_pred_act": "gelu", "normalization": "layernorm"},
    **{"initializer_range": 0.02, "init_cutoff_factor": 2.0, "mlp_dropout_prob": 0.0, "embed_dropout_prob": 0.0},
    **{"attention_probs_dropout_prob": 0.0, "norm_kwargs": {"eps": 1e-5, "bias": False}, "pooling_type": "cls"},
    **{"attention_layer": "rope", "bert_layer": "prenorm", "embedding_layer": "sans_pos", "mlp_layer": "glu"},
    **{"embed_norm": True, "final_norm": True, "skip_first_prenorm": True, "head_pred_norm": True},
    **{"rotary_emb_interleaved": False, "rotary_emb_dim": None, "rotary_emb_base": 160000.0},
    **{"local_attn_rotary_emb_base": 10000.0, "sliding_window": WINDOW, "global_attn_every_n_layers": EVERY},
    **{"max_position_embeddings": 512, "model_type": "flex_bert", "padding": "unpadded", "head_class_dropout": 0.0},
}


def published_names() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    rows = -(-VOCAB // 8) * 8
    names = {"bert.embeddings.tok_embeddings.weight": (rows, HIDDEN), "decoder.bias": (rows,)}
    for layer in range(LAYERS):
        prefix = f"bert.encoder.layers.{layer}."
        names |= {prefix + "attn.Wqkv.weight": (3 * HIDDEN, HIDDEN), prefix + "attn.Wo.weight": (HIDDEN, HIDDEN)}
        names |= {prefix + "mlp.Wi.weight": (2 * INNER, HIDDEN), prefix + "mlp.Wo.weight": (HIDDEN, INNER)}
        names |= {f"{prefix}{norm}.weight": (HIDDEN,) for norm in ("attn_norm", "mlp_norm")[layer == 0 :]}
    norms = ("bert.embeddings.norm.weight", "bert.final_norm.weight", "head.norm.weight")
    names |= dict.fromkeys(norms, (HIDDEN,)) | {"head.dense.weight": (HIDDEN, HIDDEN)}
    tensors = {name: torch.randn(shape) * 0.3 + (1 if "norm" in name else 0) for name, shape in names.items()}
    return tensors | {"decoder.weight": tensors["bert.embeddings.tok_embeddings.weight"]}


def flexbert_logits(w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Logits [S, V] of one sequence [S], in float64."""
    w = {name: tensor.double() for name, tensor in w.items()}

    def norm(x, name):
        return F.layer_norm(x, (HIDDEN,), w[f"{name}.weight"], eps=1e-5)

    x = norm(w["bert.embeddings.tok_embeddings.weight"][ids], "bert.embeddings.norm")
    position, size = torch.arange(len(ids), dtype=torch.float64), HIDDEN // HEADS
    for layer in range(LAYERS):
        prefix, is_global = f"bert.encoder.layers.{layer}.", layer % EVERY == 0
        inner = x if layer == 0 else norm(x, prefix + "attn_norm")
        q, k, v = (inner @ w[prefix + "attn.Wqkv.weight"].T).view(len(ids), 3, HEADS, size).unbind(1)
        angle = position[:, None] / (160000.0 if is_global else 10000.0) ** (torch.arange(0, size, 2) / size)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        turned = []
        for states in (q, k):
            first, second = states.chunk(2, dim=-1)
            turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
        scores = torch.einsum("qhd,khd->hqk", *turned) / math.sqrt(size)
        if not is_global:
            distance = (position[:, None] - position).abs()
            scores = scores.masked_fill(distance > WINDOW // 2, -torch.inf)
        context = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + context @ w[prefix + "attn.Wo.weight"].T
        value, gate = (norm(x, prefix + "mlp_norm") @ w[prefix + "mlp.Wi.weight"].T).chunk(2, dim=-1)
        x = x + (F.gelu(value) * gate) @ w[prefix + "mlp.Wo.weight"].T
    x = norm(F.gelu(norm(x, "bert.final_norm") @ w["head.dense.weight"].T), "head.norm")
    return x @ w["decoder.weight"].T + w["decoder.bias"]


class Metric:
    """An object of the training code."""


def write_composer(path, tensors: dict[str, torch.Tensor], prefix="model.", content=CONTENT, **entries) -> None:
    """A file of the form that Composer writes."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    files = {
        "tokenizer": {"file_extension": ".json", "content": json.loads(tokenizer.to_str())},
        "tokenizer_config": {"file_extension": ".json", "content": {"tokenizer_class": "PreTrainedTokenizerFast"}},
    }
    model = {"config": {"file_extension": ".json", "content": content, "class": "FlexBertForMaskedLM"}}
    state = {
        "model": {prefix + name: tensor for name, tensor in tensors.items()},
        "integrations": {"huggingface": {"model": model, "tokenizer": files}},
        "optimizers": {"StableAdamW": {"state": {0: torch.ones(2)}}},
        "timestamp": {"Timestamp": {"batch": 3, "total_wct": datetime.timedelta(seconds=3)}},
        "train_metrics": {"loss": Metric()},
        **entries,
    }
    rng = [{"python": random.getstate(), "numpy": np.random.default_rng(0).bit_generator.state, "array": np.ones(2)}]
    torch.save({"state": state, "rng": rng}, path)


def assert_same_logits(folder, tensors) -> None:
    ids = torch.randint(0, VOCAB, (17,), generator=torch.Generator().manual_seed(3))
    expected = flexbert_logits(tensors, ids)[:, :VOCAB]
    ours = load_pretrained(ModernBertForMaskedLM, folder).eval()(ids[None]).prediction_logits[0]
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()(ids[None]).logits[0]
    for found in (ours, theirs):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", ["published", "unfused", "compiled", "without padding"])
def test_a_checkpoint_has_flexberts_logits_and_its_tokenizer(tmp_path, names):
    tensors = published_names()
    written, prefix = tensors, "model."
    if names == "unfused":
        written = {}
        for name, tensor in tensors.items():
            parts = zip(("Wq", "Wk", "Wv"), tensor.chunk(3), strict=True) if "Wqkv" in name else [("", tensor)]
            written |= {name.replace("Wqkv", part): piece for part, piece in parts}
    elif names == "compiled":
        written = {name.replace("layers.1.", "layers.1._orig_mod."): tensor for name, tensor in tensors.items()}
        prefix = "module.model."
    elif names == "without padding":
        written = {name: t[:VOCAB] if len(t) == 48 and t.dim() < 3 else t for name, t in tensors.items()}
        written = {name: tensors[name] if "layers" in name else t for name, t in written.items()}
    write_composer(tmp_path / "ep0-ba3-rank0.pt", written, prefix)
    output = converted("composer", tmp_path / "ep0-ba3-rank0.pt", tmp_path / "out", beside=False)
    assert ("cut 3 rows that pad the vocabulary from 45 to 48" in output) == (names != "without padding")
    assert "not used (state of the training run): optimizers, rng, timestamp and 1 more" in output
    assert_same_logits(tmp_path / "out", tensors)
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
    write_composer(tmp_path / "a.pt", published_names(), content={**CONTENT, **change}, **entries)
    assert_refused(convert("composer", tmp_path / "a.pt", tmp_path / "out", beside=False), words)


def test_nothing_in_the_file_is_executed(tmp_path):
    write_composer(tmp_path / "bad.pt", published_names(), callbacks=Malicious(tmp_path / "executed"))
    assert_refused(convert("composer", tmp_path / "bad.pt", tmp_path / "out", beside=False), "posix.system")
    assert not (tmp_path / "executed").exists()
    flag = convert("composer", tmp_path / "bad.pt", tmp_path / "out", "--hidden-act", "gelu", beside=False)
    assert_refused(flag, "--hidden-act has no effect")
    torch.save([1], tmp_path / "other.pt")
    assert_refused(
        convert("composer", tmp_path / "other.pt", tmp_path / "out", beside=False), "has no state of a model"
    )
