"""Accents apart from casing, against transformers on German, French and Vietnamese verse."""

import json
import unicodedata
from pathlib import Path

import pytest
from conftest import TINY, VOCAB_FILE, read_json
from pretraining_from_text import pretrain
from small_runs import steps_folder, train
from tokenizers import BertWordPieceTokenizer
from transformers import BertTokenizerFast

import inference
from bert_recipe.tokenization.files import SPECIAL_TOKENS, Casing, find_tokenizer
from bert_recipe.tokenization.tokenizer import load_tokenizer
from bert_recipe.utils.errors import UserError
from data import prepare

GOETHE = """Wer reitet so spät durch Nacht und Wind? Es ist der Vater mit seinem Kind.
Du liebes Kind, komm, geh mit mir! Gar schöne Spiele spiel ich mit dir; manch bunte Blumen
sind an dem Strand, meine Mutter hat manch gülden Gewand. DIE KÖNIGIN grüßt die Töchter."""
HUGO = """Demain, dès l’aube, à l’heure où blanchit la campagne, je partirai. Vois-tu, je sais que
tu m’attends. J’irai par la forêt, j’irai par la montagne. Je ne puis demeurer loin de toi
plus longtemps. ÉTÉ, FORÊT, GARÇON, NAÏVE."""
NGUYEN_DU = """Trăm năm trong cõi người ta, chữ tài chữ mệnh khéo là ghét nhau. Trải qua một cuộc bể
dâu, những điều trông thấy mà đau đớn lòng. ĐIỀU NGƯỜI."""
LINES = [line for text in (GOETHE, HUGO, NGUYEN_DU) for line in text.splitlines()]
KEPT = {"do_lower_case": True, "strip_accents": False}
FLAGS = {
    Casing(True, False): ["--no-strip-accents"],
    Casing(False, True): ["--no-do-lower-case", "--strip-accents"],
    Casing(True, True): [],
    Casing(False, False): ["--no-do-lower-case"],
}


def train_vocabulary(folder: Path, *flags: str) -> Path:
    """The folder of a vocabulary of LINES."""
    text = folder / "text" / "verse.txt"
    text.parent.mkdir(parents=True)
    text.write_text("\n".join(LINES * 3), encoding="utf-8")
    command = ["vocabulary", "--sharded", str(text.parent), "--output-dir", str(folder)]
    sizes = ["--vocab-size", "700", "--unused", "3", "--num-workers", "1"]
    prepare.main([*command, *sizes, *flags])
    return folder / "vocab"


@pytest.mark.parametrize("casing", FLAGS)
def test_a_new_vocabulary_has_the_tokens_of_transformers_with_its_config(casing, tmp_path):
    folder = train_vocabulary(tmp_path, *FLAGS[casing])
    ours = load_tokenizer(find_tokenizer(folder))
    theirs = BertTokenizerFast.from_pretrained(folder)
    assert Casing(ours.do_lower_case, ours.strip_accents) == casing
    assert ("ö" in ours.vocab) != casing.strip_accents
    for line in LINES:
        assert ours.unk_token_id not in ours.encode(line)
        for form in ("NFC", "NFD"):
            text = unicodedata.normalize(form, line)
            expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, spans = ours.encode_text(text)
            assert ids.tolist() == expected["input_ids"] == ours.encode(text)
            if not casing.strip_accents:
                assert list(map(tuple, spans.tolist())) == expected["offset_mapping"]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_other_new_tokenizers_keep_accents_too(kind, tmp_path):
    for name, flags in (("kept", ["--no-strip-accents"]), ("stripped", [])):
        size = "900" if kind == "bpe" else "300"
        folder = train_vocabulary(
            tmp_path / name, "--tokenizer", kind, "--vocab-size", size, *flags
        )
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        assert tokenizer.do_lower_case
        assert ("ö" in " ".join(tokenizer.words("DIE KÖNIGIN"))) == (name == "kept")


@pytest.mark.parametrize(
    ("word", "settings", "expected"),
    [
        ("über", None, Casing(True, False)),
        ("uber", None, Casing(True, True)),
        ("Über", None, Casing(False, False)),
        ("über", {"do_lower_case": True}, Casing(True, True)),  # as in transformers
        ("uber", {"do_lower_case": True, "strip_accents": False}, Casing(True, False)),
        ("Uber", {"do_lower_case": False, "strip_accents": True}, Casing(False, True)),
    ],
)
def test_accents_are_known_by_the_config_else_by_the_words(word, settings, expected, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS.values(), word]))
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    assert Casing(tokenizer.do_lower_case, tokenizer.strip_accents) == expected


def test_a_list_and_a_json_that_keep_accents_are_one_tokenizer(tmp_path):
    folder = train_vocabulary(tmp_path, "--no-strip-accents")
    fast = BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=True, strip_accents=False)
    fast.save(str(folder / "tokenizer.json"))
    listed = load_tokenizer(find_tokenizer(folder))
    assert not listed.is_json
    (folder / "vocab.txt").unlink()
    as_json = load_tokenizer(find_tokenizer(folder))
    assert all(listed.encode(line) == as_json.encode(line) for line in LINES)


def test_a_run_keeps_the_accents_of_its_shards_whatever_lies_beside_the_vocabulary(
    inputs, tmp_path
):
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(KEPT))
    (tmp_path / "vocab.txt").write_bytes(VOCAB_FILE.read_bytes())
    flags = ("--max-predictions-per-seq", 5)
    folder, command = pretrain(inputs, tmp_path, tmp_path / "vocab.txt", TINY, *flags)
    settings.unlink()
    train([*command, "--output-dir", str(tmp_path / "again")])
    for path in (folder, steps_folder(tmp_path / "again") / "2"):
        stored = read_json(path / "tokenizer_config.json")
        assert KEPT.items() <= stored.items()
        assert load_tokenizer(find_tokenizer(path)).tokenize("Zürich") == ["[UNK]"]
    ask = ["--init-checkpoint", str(folder), "--device", "cpu", "--fill-mask", "a [MASK]"]
    with pytest.raises(UserError, match=r"is lower-cased with accents, and .* is lower-cased: use"):
        inference.main([*ask, "--vocab-file", str(tmp_path / "vocab.txt")])
