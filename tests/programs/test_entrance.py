"""modeling.py, optimizer.py, tokenizer.py, loss.py and lr_scheduler.py: pages of names for people
who import them from a checkout.
"""

import ast
import re
import textwrap
from dataclasses import replace
from importlib import import_module

import pytest
import transformers
from conftest import ROOT, TINY
from hugging_face import SIZES

import modeling
import optimizer
from bert_recipe.config import OptimizerConfig
from bert_recipe.optimization import registry

pytestmark = pytest.mark.fast


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


def test_a_head_that_the_folder_lacks_is_said_and_a_missing_layer_is_an_error(tmp_path, capsys):
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    modeling.BertForQuestionAnswering.from_pretrained(tmp_path)
    assert "has no qa_outputs.bias, qa_outputs.weight: they start from" in capsys.readouterr().out
    with pytest.raises(Exception, match="holds a bert model, which RobertaModel cannot load"):
        modeling.RobertaModel.from_pretrained(tmp_path)
