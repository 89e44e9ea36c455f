"""BERT's and RoBERTa's configs: the shipped files, and errors that name the key."""

import pytest
import transformers
from conftest import ROOT, TINY

from bert_recipe.checkpoint.model_folder import read_config
from bert_recipe.model.encoders.bert import BertConfig, BertForSequenceClassification

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("given", "expected"), [(0.3, 0.3), (0.0, 0.0), (None, 0.1)])
def test_dropout_before_a_classifier_is_that_of_transformers(given, expected):
    config = BertConfig.from_dict({**TINY, "model_type": "bert", "classifier_dropout": given})
    assert config.head_dropout == expected and config.to_dict().get("classifier_dropout") == given
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(**config.to_dict()))
    assert BertForSequenceClassification(config).dropout.prob == theirs.dropout.p == expected
    assert config.with_dropout(0.2).head_dropout == 0.2


@pytest.mark.parametrize(
    "name", ["bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-large-cased"]
)
def test_shipped_configs_fit_the_shipped_vocabularies(name):
    config = read_config(ROOT / "bert_configs" / f"{name}.json")
    size = (1024, 24, 16) if "large" in name else (768, 12, 12)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == size
    assert config.intermediate_size == 4 * config.hidden_size
    words = (ROOT / "vocab" / f"{name}-vocab.txt").read_text(encoding="utf-8").splitlines()
    assert config.vocab_size == len(words)
