"""`save_pretrained` into a folder that has other files: what is read afterwards is what was saved.
What could not be read again is not saved.
"""

from dataclasses import replace

import encoder_cases
import pytest
import tokenizers
import torch
import transformers
from conftest import TINY, VOCAB_FILE, read_json
from tokenizer_kinds import file_of

from bert_recipe import (
    BertConfig,
    BertForMaskedLM,
    BertForSentenceEmbedding,
    BertForSequenceClassification,
    BertModel,
)
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.checkpoint.sentence_folders import EmbeddingSettings
from bert_recipe.model.encoders.registry import MODELS, config_from_dict
from bert_recipe.tokenization.tokenizer import load_tokenizer
from bert_recipe.utils.errors import UserError

IDS = torch.randint(10, 90, (2, 9), generator=torch.Generator().manual_seed(1))


def of_size(vocab_size: int, **values) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(**{**TINY, "vocab_size": vocab_size}, **values)
    model = BertForSequenceClassification(config)
    model.init_weights()
    return model.eval()


def kinds_of_tokenizers(folder):
    """A list of tokens, BERT's as JSON that keeps accents, and byte-level BPE."""
    made = tokenizers.BertWordPieceTokenizer(str(VOCAB_FILE), strip_accents=False)
    made.save(str(folder / "accents.json"))
    return {
        "list": load_tokenizer(VOCAB_FILE),
        "accents": load_tokenizer(folder / "accents.json"),
        "bpe": load_tokenizer(file_of("bpe")),
    }


@pytest.mark.parametrize("first", ["list", "accents", "bpe"])
@pytest.mark.parametrize("second", ["list", "accents", "bpe"])
def test_the_tokenizer_that_is_read_is_the_one_saved_last(first, second, tmp_path):
    kinds = kinds_of_tokenizers(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "special_tokens_map.json").write_text('{"additional_special_tokens": ["ship"]}')
    (folder / "added_tokens.json").write_text('{"ship": 9999}')
    text = "A gripp\u00efng film, The SHIP's."
    for kind in (first, second):
        of_size(kinds[kind].vocab_size).save_pretrained(folder, kinds[kind])
        expected = kinds[kind].encode(text)
        assert load_tokenizer(folder).encode(text) == expected
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert theirs(text, add_special_tokens=False)["input_ids"] == expected


def test_a_model_is_not_saved_beside_an_adapter_which_would_be_put_on_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    with pytest.raises(UserError, match=r"has an adapter.*choose another folder"):
        of_size(TINY["vocab_size"]).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_config.json"]


def test_of_an_earlier_model_in_shards_nothing_is_read(tmp_path):
    config = transformers.BertConfig(**TINY, num_labels=3)
    theirs = transformers.BertForSequenceClassification(config)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "calibration.json").write_text('{"temperature": 3.0, "rows": 9}')
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    model = of_size(TINY["vocab_size"])
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits)


def test_starting_weights_are_known_by_the_files_that_are_read(tmp_path):
    """Not by others, such as the state of the run that made them."""
    config = transformers.BertConfig(**TINY)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    of_size(TINY["vocab_size"]).save_pretrained(tmp_path / "whole")
    for folder in (tmp_path / "shards", tmp_path / "whole"):
        digest = ModelFolder(folder).weights_digest
        (folder / "model_optimizer.safetensors").write_bytes(b"other")
        assert ModelFolder(folder).weights_digest == digest
        weights = min(folder.glob("model*.safetensors"))
        weights.write_bytes(weights.read_bytes() + b"x")
        assert ModelFolder(folder).weights_digest != digest


def test_a_checkpoint_of_a_run_is_not_written_to(tmp_path):
    model = of_size(TINY["vocab_size"])
    model.save_pretrained(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"is a checkpoint of a run.*choose another folder"):
        of_size(TINY["vocab_size"], labels=("a", "b", "c")).save_pretrained(tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_model_that_was_prepared_for_inference_is_not_saved(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        model = of_size(TINY["vocab_size"])
        model.prepare_for_inference(dtype)
        with pytest.raises(UserError, match="prepared for inference"):
            model.save_pretrained(tmp_path / "packed")
    with torch.device("meta"):
        nothing = BertModel(BertConfig(**TINY))
    with pytest.raises(UserError, match="is not whole"):
        nothing.save_pretrained(tmp_path / "packed")
    with pytest.raises(UserError, match="600 tokens"):
        of_size(TINY["vocab_size"]).save_pretrained(
            tmp_path / "packed", load_tokenizer(file_of("bpe"))
        )
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("labels", [("a", "a"), (1, 2), ("a", None)])
def test_labels_that_cannot_be_read_are_no_labels(labels, tmp_path):
    of_size(TINY["vocab_size"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="labels"):
        BertConfig(**TINY, labels=labels)
    with pytest.raises(ValueError, match="labels"):
        BertForSequenceClassification.from_pretrained(tmp_path, labels=labels)
    for wrong in ({"num_labels": 0}, {"num_labels": -1}, {"num_labels": 3, "labels": ("a", "b")}):
        with pytest.raises(ValueError, match="num_labels"):
            BertForSequenceClassification.from_pretrained(tmp_path, **wrong)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_an_embedding_model_is_the_same_here_and_in_sentence_transformers(pooling, tmp_path):
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(0)
    config = BertConfig(**TINY, embedding_pooling=pooling)
    model = BertForSentenceEmbedding(config)
    model.init_weights()
    model.eval()
    tokenizer = load_tokenizer(VOCAB_FILE)
    model.save_pretrained(tmp_path, tokenizer)
    ids = [tokenizer.cls_token_id, *tokenizer.encode("a great ship"), tokenizer.sep_token_id]
    expected = model(torch.tensor([ids])).logits[0].detach()
    again = BertForSentenceEmbedding.from_pretrained(tmp_path)
    torch.testing.assert_close(again(torch.tensor([ids])).logits[0], expected)
    theirs = SentenceTransformer(str(tmp_path), device="cpu").encode("a great ship")
    torch.testing.assert_close(torch.tensor(theirs), expected, rtol=1e-4, atol=1e-5)


def test_a_head_that_is_tied_does_not_take_weights_that_are_not(tmp_path):
    config = transformers.BertConfig(**TINY, tie_word_embeddings=False)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="tie_word_embeddings is False"):
        BertForMaskedLM.from_pretrained(tmp_path)


CONFIGS = {
    "bert": encoder_cases.BERT,
    "modernbert": encoder_cases.MODERNBERT,
    "roberta": encoder_cases.ROBERTA,
    "distilbert": encoder_cases.DISTILBERT,
    "electra": {**encoder_cases.BERT, "embedding_size": 16},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_model_that_is_saved_and_loaded_is_the_same(kind, tmp_path):
    config = config_from_dict({**CONFIGS[kind], "model_type": kind})
    for head, model_class in MODELS[type(config)].items():
        torch.manual_seed(0)
        model = model_class(replace(config, labels=("x", "y", "z")))
        model.init_weights()
        model.save_pretrained(tmp_path / head)
        again = load_pretrained(model_class, tmp_path / head)
        assert (again.config, again.config.labels) == (model.config, model.config.labels)
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name


def test_a_model_of_embeddings_keeps_what_is_done_around_it(tmp_path):
    """Normalization, prompts, casing and the length of texts."""
    settings = EmbeddingSettings("first", True, {"query": "find: "}, do_lower_case=True)
    config = BertConfig(**TINY, embedding_pooling="first")
    BertForSentenceEmbedding(config).save_pretrained(tmp_path / "a")
    for name, content in settings.files(config.hidden_size, 24).items():
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_bytes(content)
    BertForSentenceEmbedding.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    stored = EmbeddingSettings.read(tmp_path / "b")
    assert stored == EmbeddingSettings.read(tmp_path / "a") and stored.normalize
    assert stored.prompts == settings.prompts and stored.do_lower_case
    assert read_json(tmp_path / "b" / "sentence_bert_config.json")["max_seq_length"] == 24
