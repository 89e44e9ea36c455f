"""Pre-LN BERT against torch's encoder, and what its folders say."""

import pytest
import torch
from conftest import NO_DROPOUT, TINY, assert_refused, read_json
from small_runs import run_here, steps_folder, train
from torch import nn
from transformers import AutoModel

from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.model.encoders.bert import BertConfig, BertForPreTraining
from bert_recipe.model.token_stream import TokenStream

CONFIG = BertConfig(**{**TINY, "vocab_size": 1000, **NO_DROPOUT}, pre_layer_norm=True)


def reference(model: BertForPreTraining) -> nn.TransformerEncoder:
    """torch's pre-LN encoder with the weights of `model`."""
    sizes = CONFIG.hidden_size, CONFIG.num_attention_heads, CONFIG.intermediate_size
    options = {
        "activation": "gelu",
        "layer_norm_eps": CONFIG.layer_norm_eps,
        "batch_first": True,
        "norm_first": True,
    }
    layer = nn.TransformerEncoderLayer(*sizes, dropout=0.0, **options, dtype=torch.float64)
    norm = nn.LayerNorm(CONFIG.hidden_size, CONFIG.layer_norm_eps, dtype=torch.float64)
    encoder = nn.TransformerEncoder(
        layer, CONFIG.num_hidden_layers, norm, enable_nested_tensor=False
    )
    encoder.norm.load_state_dict(model.bert.encoder.LayerNorm.state_dict())
    for theirs, ours in zip(encoder.layers, model.bert.encoder.layer, strict=True):
        qkv = ours.attention.self.fuse_qkv()
        theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias = (
            nn.Parameter(p.detach()) for p in qkv
        )
        for name, module in {
            **{
                "self_attn.out_proj": ours.attention.output.dense,
                "norm1": ours.attention.output.LayerNorm,
            },
            **{
                "linear1": ours.intermediate.dense,
                "linear2": ours.output.dense,
                "norm2": ours.output.LayerNorm,
            },
        }.items():
            theirs.get_submodule(name).load_state_dict(module.state_dict())
    return encoder


def test_hidden_states_and_gradients_are_those_of_torchs_encoder():
    torch.manual_seed(0)
    model = BertForPreTraining(CONFIG).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    encoder = reference(model)
    stream = TokenStream.from_padded(torch.randint(0, 1000, (1, 13)))[0]
    embedded = model.bert.embeddings(stream).detach()
    expected, hidden = encoder(embedded[None])[0], model.bert(stream).last_hidden_state
    torch.testing.assert_close(hidden, expected)
    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (hidden * direction).sum().backward()
    for ours, theirs in zip(model.bert.layers, encoder.layers, strict=True):
        qkv = [
            module.weight.grad for module in (ours.attention.self.query, ours.attention.self.key)
        ]
        qkv.append(ours.attention.self.value.weight.grad)
        torch.testing.assert_close(torch.cat(qkv), theirs.self_attn.in_proj_weight.grad)
        torch.testing.assert_close(ours.output.dense.weight.grad, theirs.linear2.weight.grad)
        torch.testing.assert_close(
            ours.attention.output.LayerNorm.weight.grad, theirs.norm1.weight.grad
        )


def test_a_folder_says_that_it_is_pre_ln_and_post_ln_is_refused_for_it(inputs, tmp_path):
    train(inputs.command(tmp_path / "pre-LN", "--max-steps", 2, "--pre-layer-norm"))
    folder = steps_folder(tmp_path / "pre-LN") / "2"
    assert read_json(folder / "config.json")["pre_layer_norm"] is True
    assert load_pretrained(BertForPreTraining, folder).config.pre_layer_norm
    with pytest.raises(ValueError, match="bert_pre_layer_norm"):  # instead of computing post-LN
        AutoModel.from_pretrained(folder)
    result = run_here(
        inputs.command(tmp_path, "--max-steps", 1, "--from-pretrained-params", folder)
    )
    assert_refused(result, "config.json", "pre_layer_norm is True")
