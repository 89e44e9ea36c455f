"""Objects of the library can be copied, pickled and found under their names, as processes that are
spawned, torch.save and other libraries need.
"""

import copy
import pickle
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from conftest import ROOT
from torch import nn

import bert_recipe
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.heads import ModelsByHead
from bert_recipe.model.encoders.registry import MODELS
from bert_recipe.model.loss import linear_cross_entropy
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.optimization.lamb import Lamb
from bert_recipe.optimization.muon import Muon, NorMuon, muon_groups
from bert_recipe.optimization.protocol import parameter_groups

STREAM = TokenStream.from_sequences([[2, 7, 9, 3], [2, 8, 3]])
MODEL_CLASSES = [
    (config_class, model_class)
    for config_class, by_head in MODELS.items()
    for model_class in dict.fromkeys(by_head.values())
] + [
    (config_class, getattr(bert_recipe, config_class.__name__.replace("Config", "Model")))
    for config_class in MODELS
]


def small_model(config_class: type, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    sizes = {"vocab_size": 70, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return model_class(config_class(**sizes, intermediate_size=12)).eval()


@pytest.mark.parametrize(
    ("config_class", "model_class"), MODEL_CLASSES, ids=lambda value: value.__name__
)
def test_a_copy_and_a_pickle_of_a_model_compute_what_it_does(config_class, model_class):
    model = small_model(config_class, model_class)
    expected = model(STREAM)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert type(other) is model_class and other.config == model.config
        for value, theirs in zip(expected, other(STREAM), strict=True):
            assert value is None or torch.equal(value, theirs)


def test_each_model_class_lies_where_it_says_and_is_a_name_of_the_package():
    tables: list[ModelsByHead] = [*MODELS.values()]
    for model_class in {model_class for by_head in tables for model_class in by_head.values()}:
        assert getattr(import_module(model_class.__module__), model_class.__name__) is model_class
        assert getattr(bert_recipe, model_class.__name__) is model_class


def test_a_model_class_loads_folders_wherever_it_is_imported_from(tmp_path):
    config_class, model_class = MODEL_CLASSES[0]
    small_model(config_class, model_class).save_pretrained(tmp_path)
    code = (
        f"from {model_class.__module__} import {model_class.__name__} as Model\n"
        f"print(type(Model.from_pretrained({str(tmp_path)!r})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [model_class.__name__], done.stderr


class TwoMatrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.hidden_modules = [self.first]


OPTIMIZERS = {
    "LAMB": lambda model: Lamb(parameter_groups(model, 0.01), 0.1),
    "LAMB in few kernels": lambda model: Lamb(parameter_groups(model, 0.01), 0.1, foreach=True),
    "Muon": lambda model: Muon(muon_groups(model, 0.01), 0.1),
    "NorMuon": lambda model: NorMuon(
        muon_groups(model, 0.01), 0.1, momentum=0.9, product_dtype=torch.bfloat16
    ),
}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, transposed: bool = False) -> None:
    """Three updates; transposed: with gradients of another layout in memory."""
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            gradient = torch.randn(p.shape, generator=generator)
            p.grad = gradient.t().contiguous().t() if transposed else gradient
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copies_of_an_optimizer_make_its_updates(name):
    model = TwoMatrices()
    optimizer = OPTIMIZERS[name](model)
    trained(model, optimizer)
    copies = [
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),  # noqa: S301
    ]
    trained(model, optimizer)
    for other_model, other_optimizer in copies:
        trained(other_model, other_optimizer)
        for p, other in zip(model.parameters(), other_model.parameters(), strict=True):
            assert torch.equal(p, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_counts_by_its_values_not_by_its_layout_in_memory(name):
    torch.manual_seed(0)
    model = TwoMatrices()
    other = copy.deepcopy(model)
    trained(model, OPTIMIZERS[name](model))
    trained(other, OPTIMIZERS[name](other), transposed=True)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("lr", value) for value in ("x", None, -1.0, float("nan"), torch.ones(2))],
        *[("betas", value) for value in ((0.9, 1.0), (0.9,), ("a", 0.9))],
        *[("eps", value) for value in (-1.0, "x")],
    ],
)
@pytest.mark.parametrize("optimizer", [Lamb, NorMuon])
def test_a_setting_that_is_no_number_of_its_range_is_an_error(optimizer, setting, value):
    model = TwoMatrices()
    groups = muon_groups(model, 0.01) if optimizer is NorMuon else parameter_groups(model, 0.01)
    with pytest.raises(ValueError, match=setting):
        optimizer(groups, **{"lr": 0.1, setting: value})


@pytest.mark.parametrize("label", [-1, -101, 5])
def test_a_label_that_is_no_word_is_an_error(label):
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(
            torch.ones(2, 3), torch.ones(5, 3), torch.zeros(5), torch.tensor([1, label])
        )
