"""A Hugging Face folder brings its config, vocabulary, casing and weights, in each layout that the
hub has.
"""

import json
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, TINY, VOCAB_FILE, read_json
from small_runs import choose_model_of
from transformers import BertConfig, BertForQuestionAnswering, BertTokenizer

import run_squad
from bert_recipe.checkpoint.model_choice import choose_model
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.config import ModelSelection
from bert_recipe.model.encoders import bert
from bert_recipe.tokenization.tokenizer import BertTokenizer as OurTokenizer
from bert_recipe.utils.errors import UserError

# The published shapes but for their width.
BASE = {
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_size": 24,
    "intermediate_size": 48,
}
LARGE = {
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
}
MODELS = {"base-uncased": (BASE, "uncased", 30522), "large-cased": (LARGE, "cased", 28996)}


@pytest.fixture(scope="module", params=MODELS)
def source(request):
    """A model of transformers and its tokenizer."""
    shape, casing, vocab_size = MODELS[request.param]
    torch.manual_seed(1)
    model = BertForQuestionAnswering(BertConfig(**shape, vocab_size=vocab_size))
    vocab_file = ROOT / "vocab" / f"bert-base-{casing}-vocab.txt"
    return model, vocab_file, BertTokenizer(str(vocab_file), do_lower_case=casing == "uncased")


def save(model, folder, layout: str) -> None:
    model.save_pretrained(folder, max_shard_size="500KB" if layout == "shards" else "50GB")
    if layout == "shards":
        assert len(list(folder.glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize("layout", ["model.safetensors", "shards"])
def test_a_folder_brings_all_of_its_model(source, layout, tmp_path):
    theirs, vocab_file, tokenizer = source
    save(theirs, tmp_path, layout)
    tokenizer.save_pretrained(tmp_path)
    if layout != "shards":  # with them, tokenizer.json alone, as transformers 5 writes it
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "vocab.txt").write_bytes(vocab_file.read_bytes())
    assert (tmp_path / "vocab.txt").exists() == (layout != "shards")
    flags = [
        "--init-checkpoint",
        str(tmp_path),
        "--output-dir",
        "out",
        "--do-predict",
        "--predict-file",
        "dev.json",
    ]
    choice = choose_model_of(run_squad.parse_arguments(flags))
    for name in (
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
    ):
        assert getattr(choice.config, name) == getattr(theirs.config, name)
    assert list(choice.tokenizer.vocab) == vocab_file.read_text().split()

    longer = read_json(tmp_path / "config.json") | {"max_position_embeddings": 99}
    (tmp_path / "longer.json").write_text(json.dumps(longer))
    selection = ModelSelection(config_file=tmp_path / "longer.json")  # as in docs/modernbert.md
    other = choose_model(selection, ModelFolder(tmp_path))
    assert (other.config.max_length, other.tokenizer.vocab_file) == (
        99,
        choice.tokenizer.vocab_file,
    )
    (link := tmp_path / "my-model").symlink_to(tmp_path)
    for folder in (tmp_path, link):
        assert choose_model(ModelSelection(), ModelFolder(folder)).name == folder.name

    text = "The Caf\u00e9 in PARIS unaffable \u6771\u4eac"
    assert isinstance(choice.tokenizer, OurTokenizer)
    assert choice.tokenizer.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]

    loaded = load_pretrained(bert.BertForQuestionAnswering, tmp_path).state_dict()
    expected = theirs.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name][: len(tensor)].equal(tensor), name


def test_a_vocabulary_of_other_casing_than_the_models_is_refused_or_said(tmp_path):
    """The tokens are the same, but a cased model would get lower-cased texts."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", **TINY}))
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    for path in (folder / "vocab.txt", tmp_path / "vocab.txt"):
        path.write_bytes(VOCAB_FILE.read_bytes())
    selection = ModelSelection(vocab_file=tmp_path / "vocab.txt")
    with pytest.raises(UserError, match=r"vocab.txt is lower-cased, and the tokenizer of .*cased"):
        choose_model(selection, ModelFolder(folder))
    for casing in (True, False):
        said = replace(selection, do_lower_case=casing)
        choice = choose_model(said, ModelFolder(folder))
        assert choice.tokenizer.do_lower_case is casing
