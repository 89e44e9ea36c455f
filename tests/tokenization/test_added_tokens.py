"""Special and added tokens in the texts of tasks: as AutoTokenizer of transformers has them."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import TINY, VOCAB_FILE
from transformers import AddedToken, AutoTokenizer

from bert_recipe.checkpoint.model_choice import have_same_tokens
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.data_preparation.samples.corpus import read_corpus
from bert_recipe.tokenization.files import find_tokenizer
from bert_recipe.tokenization.tokenizer import load_tokenizer, model_files

pytestmark = pytest.mark.fast

TEXTS = (
    "The [E1] Covid19 [/E1] wave: covid19s,COVID19 [e1]x[E1]  [/E1]\tend",
    "a [SEP] b[MASK] c [CLS][PAD] [UNK]z [sep] [unused3]. [unused1]",
    "Zo\u00eb\u0301 [E1] caf\u00e9\u0301[/E1] \u6f22[E1]\u5b57 covid19\u0301",
)
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": True}
OPENING = {**PLAIN, "content": "[E1]", "rstrip": True, "normalized": False, "special": True}
CLOSING = {**PLAIN, "content": "[/E1]", "lstrip": True, "normalized": False, "special": True}
WORD = {**PLAIN, "content": "Covid19", "special": False}
MASK = {**PLAIN, "content": "[MASK]", "lstrip": True, "normalized": False, "special": True}
CONFIG, UNCASED = "tokenizer_config.json", {"do_lower_case": True}

# The files beside a vocab.txt.
FOLDERS = {
    "no files": {},
    "extra tokens": {CONFIG: {**UNCASED, "extra_special_tokens": ["[E1]", "[/E1]", "[unused1]"]}},
    "additional tokens": {CONFIG: {**UNCASED, "additional_special_tokens": ["[E1]", "[unused3]"]}},
    "named tokens": {CONFIG: {**UNCASED, "extra_special_tokens": {"entity_token": "[unused3]"}}},
    "added tokens": {
        CONFIG: {
            **UNCASED,
            "additional_special_tokens": ["[E1]", "[/E1]"],
            "added_tokens_decoder": {
                "30523": CLOSING,
                "30522": OPENING,
                "30524": WORD,
                "103": MASK,
            },
        }
    },
    "whole words": {
        CONFIG: {**UNCASED, "added_tokens_decoder": {"30522": {**WORD, "single_word": True}}}
    },
    "older files": {
        CONFIG: UNCASED,
        "added_tokens.json": {"covid19": 30523, "[unused3]": 4, "[/E1]": 30522},
        "special_tokens_map.json": {"mask_token": MASK},
    },
    "cased": {CONFIG: {"do_lower_case": False, "added_tokens_decoder": {"30522": WORD}}},
}


def make_folder(path: Path, files: dict[str, dict]) -> Path:
    path.mkdir(exist_ok=True)
    shutil.copyfile(VOCAB_FILE, path / "vocab.txt")
    for name, content in {"config.json": {**TINY, "model_type": "bert"}, **files}.items():
        (path / name).write_text(json.dumps(content))
    return path


def assert_tokens_are_those_of_transformers(folder: Path) -> None:
    ours, theirs = load_tokenizer(find_tokenizer(folder)), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab == theirs.get_vocab()
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, spans = ours.encode_text(text)
        assert ids.tolist() == expected["input_ids"]
        for (start, end), their_span in zip(
            spans.tolist(), expected["offset_mapping"], strict=True
        ):
            shown = text[start:end].rstrip("\u0301")  # ours include stripped accents
            assert (start, shown) == (their_span[0], text[slice(*their_span)].rstrip("\u0301"))


@pytest.mark.parametrize("kind", FOLDERS)
def test_tokens_added_beside_a_vocabulary_are_those_of_transformers(kind, tmp_path):
    folder = make_folder(tmp_path / "model", FOLDERS[kind])
    assert_tokens_are_those_of_transformers(folder)


@pytest.mark.parametrize("keeps_list", [True, False])
def test_tokens_added_with_transformers_are_read_from_its_folder(keeps_list, tmp_path):
    folder = make_folder(tmp_path / "model", {CONFIG: UNCASED})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    markers = ["[E1]", AddedToken("[/E1]", lstrip=True, rstrip=True)]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    tokenizer.add_tokens([AddedToken("Covid19", single_word=True), "[unused3]"])
    tokenizer.save_pretrained(folder)
    if not keeps_list:
        (folder / "vocab.txt").unlink()
    assert_tokens_are_those_of_transformers(folder)


@pytest.mark.parametrize("needs_json", [True, False])
@pytest.mark.parametrize("kind", ["extra tokens", "added tokens", "older files"])
def test_a_checkpoint_keeps_the_added_tokens(kind, needs_json, tmp_path):
    source = make_folder(tmp_path / "model", FOLDERS[kind])
    copy = make_folder(tmp_path / "copy", {})
    (copy / "vocab.txt").unlink()
    tokenizer = ModelFolder(source).tokenizer
    for name, content in model_files(tokenizer, 512, needs_json).items():
        (copy / name).write_bytes(content)
    assert_tokens_are_those_of_transformers(copy)
    assert [tokenizer.encode(text) for text in TEXTS] == [
        ModelFolder(copy).tokenizer.encode(text) for text in TEXTS
    ]
    assert needs_json or have_same_tokens(ModelFolder(copy).tokenizer, tokenizer)
    shutil.copyfile(VOCAB_FILE, tmp_path / "vocab.txt")
    assert not have_same_tokens(tokenizer, load_tokenizer(tmp_path / "vocab.txt"))


def test_a_corpus_has_added_words_but_no_special_tokens(tmp_path):
    folder = make_folder(tmp_path / "model", FOLDERS["added tokens"])
    tokenizer = ModelFolder(folder).tokenizer
    (tmp_path / "corpus.txt").write_text("\n".join([*TEXTS, "", "covid19  [E1] [MASK]"]))
    corpus = read_corpus(tmp_path / "corpus.txt", tokenizer)
    reference = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    lines = [*TEXTS, "covid19  [E1] [MASK]"]
    expected = [i for line in lines for i in reference(line, add_special_tokens=False)["input_ids"]]
    assert corpus.ids.tolist() == expected
    assert tokenizer.vocab["Covid19"] in corpus.ids
    special = {tokenizer.vocab[token] for token in ("[E1]", "[/E1]", "[SEP]", "[MASK]")}
    assert not special & {*corpus.ids.tolist()}
