"""Pre-LN BERT against a written-out loop, and what its folders say."""

import json
import math

import pytest
import torch
from conftest import TINY, assert_refused
from small_runs import RunInputs, run_here, steps_folder, train
from transformers import AutoModel

from checkpoint.weights import load_pretrained
from encoders.bert import BertConfig, BertForPreTraining

CONFIG = BertConfig(
    **{**TINY, "vocab_size": 1000, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    pre_layer_norm=True,
)


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(weights, name, x):
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.sqrt(centred.square().mean(-1, keepdim=True) + CONFIG.layer_norm_eps)
    return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def last_hidden_states(weights, ids):
    """One sequence, one operation after another: LayerNorm, attention, add; LayerNorm, feed-forward, add."""
    embeddings = "bert.embeddings."
    x = weights[embeddings + "word_embeddings.weight"][ids]
    x = x + weights[embeddings + "token_type_embeddings.weight"][0]
    x = x + weights[embeddings + "position_embeddings.weight"][: len(ids)]
    x = layer_norm(weights, embeddings + "LayerNorm", x)
    size = CONFIG.hidden_size // CONFIG.num_attention_heads
    for number in range(CONFIG.num_hidden_layers):
        layer = f"bert.encoder.layer.{number}."
        inner = layer_norm(weights, layer + "attention.output.LayerNorm", x)
        query, key, value = (linear(weights, f"{layer}attention.self.{n}", inner) for n in ("query", "key", "value"))
        heads = []
        for head in range(CONFIG.num_attention_heads):
            part = slice(head * size, (head + 1) * size)
            scores = query[:, part] @ key[:, part].T / math.sqrt(size)
            heads.append(scores.softmax(-1) @ value[:, part])
        x = x + linear(weights, layer + "attention.output.dense", torch.cat(heads, -1))
        inner = layer_norm(weights, layer + "output.LayerNorm", x)
        inner = linear(weights, layer + "intermediate.dense", inner)
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        x = x + linear(weights, layer + "output.dense", inner)
    return layer_norm(weights, "bert.encoder.LayerNorm", x)


def test_hidden_states_and_gradients_are_those_of_a_written_out_loop():
    torch.manual_seed(0)
    model = BertForPreTraining(CONFIG).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    ids = torch.randint(0, 1000, (13,))
    expected = last_hidden_states(weights, ids)
    found = model.bert(ids[None]).last_hidden_state[0]
    torch.testing.assert_close(found, expected)

    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (found * direction).sum().backward()
    for name, p in model.named_parameters():
        if name.startswith("bert.encoder"):
            torch.testing.assert_close(p.grad, weights[name].grad, msg=name)


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pre_ln")
    inputs = RunInputs.make(folder / "inputs")
    train(inputs.command(folder, "--max-steps", 2, "--pre-layer-norm"))
    return inputs, steps_folder(folder) / "2"


def test_a_folder_says_that_it_is_pre_ln_and_opens_here(trained_folder):
    _, folder = trained_folder
    config = json.loads((folder / "config.json").read_text())
    assert config["pre_layer_norm"] is True
    assert load_pretrained(BertForPreTraining, folder).config.pre_layer_norm


def test_transformers_refuses_the_folder_instead_of_computing_post_ln(trained_folder):
    with pytest.raises(ValueError, match="bert_pre_layer_norm"):
        AutoModel.from_pretrained(trained_folder[1])


def test_weights_of_the_other_kind_are_refused(trained_folder, tmp_path):
    inputs, folder = trained_folder
    result = run_here(inputs.command(tmp_path, "--max-steps", 1, "--from-pretrained-params", folder))
    assert_refused(result, "config.json", "pre_layer_norm is True")
