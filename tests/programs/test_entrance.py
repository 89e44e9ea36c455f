"""modeling.py, optimizer.py, tokenizer.py, loss.py and lr_scheduler.py: pages of names for people
who import them from a checkout.
"""

import ast
import re
import textwrap
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import transformers
from conftest import ROOT, TINY

import modeling
import optimizer
from bert_recipe.config import OptimizerConfig
from bert_recipe.optimization import registry

pytestmark = pytest.mark.fast

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "vocab_size": 90,
    "pad_token_id": 0,
}


def test_every_model_and_optimizer_can_be_imported_by_its_name():
    for models in modeling.MODELS.values():
        for model_class in models.values():
            assert getattr(modeling, model_class.__name__) is model_class
    config = modeling.BertConfig(**{**TINY, "vocab_size": 90})
    model = modeling.BertForMaskedLM(config)
    for name in registry.SPECS:
        made = registry.make_optimizer(replace(OptimizerConfig(), name=name), model, 0.01)
        assert type(made) is getattr(optimizer, name)


@pytest.mark.parametrize("page", ["modeling", "optimizer", "tokenizer", "loss", "lr_scheduler"])
def test_a_page_names_the_files_that_define_what_it_lists_and_its_example_runs(page, monkeypatch):
    text = (ROOT / f"{page}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert len(tree.body) == 1 + len(imports), "a page has no code of its own"
    for node in imports:
        for alias in node.names:
            assert alias.name != "*"
            value = getattr(import_module(node.module), alias.name)
            defined_in = getattr(value, "__module__", node.module)
            assert node.module in (defined_in, "torch.optim", "bert_recipe.config"), alias.name
    (example,) = re.findall(r"\n\n((?:    .*\n|\n)+)", ast.get_docstring(tree, clean=False))
    monkeypatch.chdir(ROOT)
    exec(compile(textwrap.dedent(example), f"{page}.py", "exec"), {})  # noqa: S102


@pytest.mark.parametrize("kind", ["Bert", "ModernBert", "Roberta"])
def test_an_encoder_has_the_states_of_transformers(tmp_path, kind):
    """Models with heads: test_encoders.py."""
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    theirs = getattr(transformers, f"{kind}Model")(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = getattr(modeling, f"{kind}Model").from_pretrained(tmp_path)
    assert not ours.training
    ids = torch.randint(10, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    expected, states = theirs(ids).last_hidden_state, ours(ids).last_hidden_state
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


def test_a_head_that_the_folder_lacks_is_said_and_a_missing_layer_is_an_error(tmp_path, capsys):
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    modeling.BertForQuestionAnswering.from_pretrained(tmp_path)
    assert "has no qa_outputs.bias, qa_outputs.weight: they start from" in capsys.readouterr().out
    with pytest.raises(Exception, match="holds a bert model, which RobertaModel cannot load"):
        modeling.RobertaModel.from_pretrained(tmp_path)
