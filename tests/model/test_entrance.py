"""modeling.py and optimizer.py, for people who import them."""

from dataclasses import replace

import pytest
import torch
import transformers
from conftest import TINY

import modeling
import optimizer
from bert_recipe.config import OptimizerConfig

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
    for name in optimizer.SPECS:
        made = optimizer.make_optimizer(replace(OptimizerConfig(), name=name), model, 0.01)
        assert type(made) is getattr(optimizer, name)
        assert optimizer.spec_of(made) is optimizer.SPECS[name]


@pytest.mark.parametrize("kind", ["Bert", "ModernBert", "Roberta"])
def test_an_encoder_has_the_states_of_transformers(tmp_path, kind):
    """Models with heads: test_encoders.py."""
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    theirs = getattr(transformers, f"{kind}Model")(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = getattr(modeling, f"{kind}Model").from_pretrained(tmp_path)
    assert not ours.training
    ids = torch.randint(10, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    expected, found = theirs(ids).last_hidden_state, ours(ids).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_head_that_the_folder_lacks_is_said_and_a_missing_layer_is_an_error(tmp_path, capsys):
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    modeling.BertForQuestionAnswering.from_pretrained(tmp_path)
    assert "has no qa_outputs.bias, qa_outputs.weight: they start from" in capsys.readouterr().out
    with pytest.raises(Exception, match="holds a bert model, which RobertaModel cannot load"):
        modeling.RobertaModel.from_pretrained(tmp_path)
