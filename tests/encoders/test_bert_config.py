"""BERT's and RoBERTa's configs: the shipped files, and errors that name the key."""

import json

import pytest
import transformers
from conftest import ROOT, TINY
from encoder_cases import ROBERTA

from bert_recipe.checkpoint.model_folder import read_config
from bert_recipe.model.encoders.bert import BertConfig, BertForSequenceClassification
from bert_recipe.utils.errors import UserError


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hiden_size": 3}, "unknown key 'hiden_size': correct it, or add model_type"),
        ({"num_hidden_layers": ...}, "missing key 'num_hidden_layers'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"hidden_size": "32"}, "whole number"),
        # Of Jina's models, and of MPNet's: there is nothing to correct.
        ({"position_embedding_type": "alibi"}, r"only 'absolute' is supported: use another model"),
        ({"model_type": "mpnet"}, r"'mpnet', and only bert, mod.* such a model \(docs/[^:]*\)$"),
        *(
            ({**ROBERTA, "model_type": "roberta", **change}, words)
            for change, words in (
                (
                    {"position_embedding_type": "relative_key"},
                    "position_embedding_type is 'relative_key'",
                ),
                ({"pad_token_id": -1}, "pad_token_id is -1"),
                ({"pad_token_id": None}, "pad_token_id is None"),
                ({"is_decoder": True}, "is_decoder is True"),
                ({"hidden_size": None}, "hidden_size is None"),
            )
        ),
    ],
)
def test_wrong_key_or_value_is_named(tmp_path, change, words):
    values = {key: value for key, value in {**TINY, **change}.items() if value is not ...}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=words):
        read_config(path)


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
