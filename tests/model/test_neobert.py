"""NeoBERT against its published formulas, written out in float64; transformers has no class for it.

Legend: S tokens of a sequence, H heads, D head size, E hidden size.
"""

import json

import pytest
import torch
from encoder_cases import CPU_IMPLEMENTATIONS, LENGTHS, SIZES, make_input, relative_error
from safetensors.torch import save_file
from torch import Tensor

import modeling
from bert_recipe.model.encoders.registry import config_from_dict, make_model

pytestmark = pytest.mark.fast

# The keys of the published config.json, and those that it has for other code only.
VALUES = {
    **SIZES,
    **{"model_type": "neobert", "intermediate_size": 52, "max_length": 512, "norm_eps": 1e-2},
    **{"embedding_init_range": 0.02, "decoder_init_range": 0.02, "dim_head": 16},
    **{"pad_token_id": 0, "architectures": ["NeoBERTLMHead"], "torch_dtype": "float32"},
}
HEADS = ("masked_lm", "sequence_classification", "token_classification", "question_answering")
HEADS += ("sentence_embedding",)


def rms_norm(states_SE: Tensor, weight_E: Tensor) -> Tensor:
    return weight_E * states_SE / (states_SE.square().mean(-1, keepdim=True) + 1e-2).sqrt()


def rotate(states_SHD: Tensor) -> Tensor:
    """Each pair of neighbours, as a complex number, times exp(i * position / 10000^(2f/D))."""
    length, _, size = states_SHD.shape
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2).double() / size)
    angles = torch.arange(length).double()[:, None] * frequencies
    pairs = torch.view_as_complex(states_SHD.unflatten(-1, (-1, 2)))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(turned).flatten(-2)


def attend(weights: dict[str, Tensor], normed_SE: Tensor, num_heads: int) -> Tensor:
    heads = (normed_SE @ weights["qkv.weight"].T).unflatten(-1, (num_heads, -1)).chunk(3, dim=-1)
    query = rotate(heads[0])
    key = rotate(heads[1])
    value = heads[2]
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    context = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    return context.flatten(1) @ weights["wo.weight"].T


def encode(weights: dict[str, Tensor], ids_S: Tensor, num_layers: int, num_heads: int) -> Tensor:
    """The last hidden states of one sequence."""
    hidden_SE = weights["model.encoder.weight"][ids_S]
    for layer in range(num_layers):
        prefix = f"model.transformer_encoder.{layer}."
        own = {
            name.removeprefix(prefix): value
            for name, value in weights.items()
            if name.startswith(prefix)
        }
        normed_SE = rms_norm(hidden_SE, own["attention_norm.weight"])
        hidden_SE = hidden_SE + attend(own, normed_SE, num_heads)
        both = rms_norm(hidden_SE, own["ffn_norm.weight"]) @ own["ffn.w12.weight"].T
        gate, inner = both.chunk(2, dim=-1)
        hidden_SE = hidden_SE + (gate * torch.sigmoid(gate) * inner) @ own["ffn.w3.weight"].T
    return rms_norm(hidden_SE, weights["model.layer_norm.weight"])


def expected_output(head: str, weights: dict[str, Tensor], states: list[Tensor]) -> Tensor:
    """What the head makes of the states of each sequence."""
    first_NE = torch.stack([sequence[0] for sequence in states])
    all_TE = torch.cat(states)
    if head == "masked_lm":
        return all_TE @ weights["decoder.weight"].T + weights["decoder.bias"]
    if head == "sentence_embedding":
        return torch.stack([sequence.mean(0) for sequence in states])
    if head == "sequence_classification":
        dense = (first_NE @ weights["dense.weight"].T + weights["dense.bias"]).tanh()
        return dense @ weights["classifier.weight"].T + weights["classifier.bias"]
    name = "qa_outputs" if head == "question_answering" else "classifier"
    return all_TE @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def randomized(head: str) -> modeling.NeoBertModel:
    torch.manual_seed(0)
    model = make_model(head, config_from_dict(VALUES)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.2 + ("norm" in name))
    return model


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
@pytest.mark.parametrize("head", HEADS)
def test_outputs_and_gradients_are_those_of_the_published_formulas(head, implementation):
    model = randomized(head)
    model.base_model.attention_implementation = implementation
    weights = {name: p.double().requires_grad_() for name, p in model.state_dict().items()}
    stream, padded, _ = make_input()
    rows = [ids[:length] for ids, length in zip(padded["input_ids"], LENGTHS, strict=True)]
    sizes = SIZES["num_hidden_layers"], SIZES["num_attention_heads"]
    expected = expected_output(head, weights, [encode(weights, ids, *sizes) for ids in rows])
    output = model(stream)
    logits = output.prediction_logits[:, :130] if head == "masked_lm" else output.logits
    assert relative_error(logits, expected) < 1e-5
    torch.manual_seed(2)
    factors = torch.randn_like(logits)
    (logits * factors).sum().backward()
    (expected * factors.double()).sum().backward()
    for name, p in model.named_parameters():
        assert relative_error(p.grad[: len(weights[name])], weights[name].grad) < 1e-5, name


def test_its_folder_has_the_published_names_and_keys(tmp_path):
    model = randomized("masked_lm")
    layer = {"qkv": (96, 32), "wo": (32, 32), "ffn.w12": (80, 32), "ffn.w3": (32, 40)}
    layer |= dict.fromkeys(("attention_norm", "ffn_norm"), (32,))
    shapes = {
        f"model.transformer_encoder.{index}.{name}.weight": shape
        for index in range(4)
        for name, shape in layer.items()
    }
    shapes |= {"model.encoder.weight": (130, 32), "model.layer_norm.weight": (32,)}
    shapes |= {"decoder.weight": (130, 32), "decoder.bias": (130,)}
    assert {name: tuple(p.shape) for name, p in model.state_dict().items()} == shapes
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    values = {"architectures": [model.architecture], **model.config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert {key: values[key] for key in VALUES.keys() & values.keys() - {"architectures"}} == {
        key: VALUES[key] for key in VALUES.keys() & values.keys() - {"architectures"}
    }
    assert values["auto_map"]["AutoModel"] == "chandar-lab/NeoBERT--model.NeoBERT"
    loaded = modeling.NeoBertForMaskedLM.from_pretrained(tmp_path)
    assert all(p.equal(loaded.state_dict()[name]) for name, p in model.state_dict().items())
