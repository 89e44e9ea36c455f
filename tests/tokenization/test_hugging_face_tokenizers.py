"""Any `tokenizer.json`: ids as those of transformers, and the programs from text to predictions
with it.
"""

import contextlib
import json
import re
import shutil
import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
import tokenizers
import transformers
from conftest import ROOT, TINY, VOCAB_FILE, assert_refused, read_json
from hypothesis import given
from hypothesis import strategies as st
from pretraining_from_text import pretrain, write_books
from small_runs import run_here
from tokenizer_kinds import (
    MAKERS,
    NAMES,
    ROBERTA_KINDS,
    TEXT,
    TRICKY,
    file_of,
    modernbert,
    ours,
    theirs,
    trained,
)
from tokenizers import (
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

import create_pretraining_data
import inference
from bert_recipe.data_preparation.options import VocabularyOptions
from bert_recipe.data_preparation.samples import corpus
from bert_recipe.data_preparation.text.vocabulary import train_tokenizer
from bert_recipe.tasks.squad.files import read_squad
from bert_recipe.tasks.squad.options import SquadOptions
from bert_recipe.tasks.squad.task import SquadDataset
from bert_recipe.tasks.text_sequences import SequenceDataset
from bert_recipe.tokenization.files import find_tokenizer
from bert_recipe.tokenization.tokenizer import BertTokenizer, load_tokenizer
from bert_recipe.utils.errors import UserError

SQUAD = ROOT / "data" / "sample" / "squad"


@cache
def word_starts(kind: str):
    return ours(kind).word_starts()


def words_to_mask(tokenizer, text: str) -> list[str]:
    """The text of each word that whole-word masking masks together."""
    ids, _ = tokenizer.encode_text(text)
    begins = tokenizer.word_starts().find(ids[None], np.ones((1, len(ids)), bool))[0]
    words = np.split(ids, np.flatnonzero(begins)[1:])
    return [tokenizer._tokenizer.decode(word.tolist()).strip() for word in words]


def ordinary(text: str) -> str:
    return re.sub(r"\[(PAD|UNK|CLS|SEP|MASK|unused\d)\]|<[/\w]+>", "", text)


any_text = (st.text() | st.text(st.sampled_from(TRICKY), max_size=60) | st.sampled_from(TEXT)).map(
    ordinary
)
kinds = st.sampled_from(sorted(MAKERS))


# A token with lstrip takes the space before it.
special_text = st.lists(
    st.sampled_from([*NAMES, "<s>", "</s>", "<mask>", "<unk>", "[unused1]", " ", "a", "The", "\n"])
).map("".join)


@given(kinds, any_text | special_text)
def test_ids_and_offsets_are_those_of_transformers(kind, text):
    ids, spans = ours(kind).encode_text(text)
    expected = theirs(kind)(text, add_special_tokens=False, return_offsets_mapping=True)
    assert ids.tolist() == expected["input_ids"]
    assert (spans[1:] >= spans[:-1]).all() and (spans[:, 1] <= len(text)).all()
    for ours_, theirs_ in zip(spans.tolist(), expected["offset_mapping"], strict=True):
        # Spaces are left out later, and marks that were composed are in the letter's token.
        assert without_marks(text[slice(*ours_)]) == without_marks(text[slice(*theirs_)])
    assert ours(kind).tokenize(text) == theirs(kind).convert_ids_to_tokens(ids.tolist())


def without_marks(text: str) -> str:
    """`text` without space around it and marks at its end."""
    return regex.sub(r"[\p{M}\u1160-\u11ff]+$", "", text.strip())


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_marks_are_in_the_token_of_their_letter(kind):
    # Vietnamese has two marks on a letter, and Korean syllables end in a vowel or a consonant.
    text = unicodedata.normalize("NFD", "José từ Orléans đến Việt Nam, 가나 한국")
    _, spans = ours(kind).encode_text(text)
    in_tokens = {place for start, stop in spans.tolist() for place in range(start, stop)}
    assert {place for place in range(len(text)) if not text[place].isspace()} <= in_tokens


@given(kinds, st.lists(any_text, max_size=6))
def test_lines_of_a_document_have_the_ids_of_the_text_joined_by_spaces(kind, texts):
    lines = [" ".join(text.split()) for text in texts]  # an empty one begins a document
    ids, offsets = ours(kind).encode_lines("\n".join(lines).encode())
    documents = [
        part.strip("\n").replace("\n", " ") for part in re.split(r"\n\n+", "\n".join(lines))
    ]
    assert len(offsets) == len("\n".join(lines).split("\n")) + 1
    expected = [
        i
        for text in documents
        for i in theirs(kind, True)(text, add_special_tokens=False)["input_ids"]
    ]
    assert ids.tolist() == expected


@pytest.mark.parametrize("size", [1, 50])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_document_has_the_same_ids_however_its_file_is_read(kind, size, tmp_path, monkeypatch):
    lines = [
        "The house was dark.",
        "It rained, and 1945 was far.",
        " ",
        "A new one",
        "x" * 90 + " y" * 40,
    ]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(corpus, "READ_BLOCK", size)
    read = corpus.read_corpus(tmp_path / "text.txt", ours(kind))
    documents = [" ".join(lines[:2]), " ".join(lines[3:])]
    expected = [
        i
        for text in documents
        for i in theirs(kind, True)(text, add_special_tokens=False)["input_ids"]
    ]
    assert read.ids.tolist() == expected
    assert read.document_starts.tolist() == [0, 2, 4]


@pytest.mark.parametrize("kind", ROBERTA_KINDS)
def test_folders_of_roberta_xlm_r_and_camembert_have_the_ids_of_transformers(kind, tmp_path):
    ROBERTA_KINDS[kind]().save_pretrained(tmp_path)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(find_tokenizer(tmp_path))
    for first, second in pairwise([*TEXT[:200], "l'été à Zürich, 漢字 \u200b🙂", " a\u00a0 b"]):
        ids = [tokenizer.encode_text(text)[0] for text in (first, second)]
        pair = SequenceDataset(tokenizer, [ids, ids[:1]], {})
        assert peer(first)["input_ids"] == pair.stream(np.array([1]))["input_ids"].tolist()
        assert peer(first, second)["input_ids"] == pair.stream(np.array([0]))["input_ids"].tolist()
        assert not pair.stream(np.array([0]))["token_type_ids"].any()
    names = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
    assert tuple(tokenizer.special_tokens.values()) == names
    assert tokenizer.mask_token_id == peer.mask_token_id


@pytest.mark.parametrize("kind", [*MAKERS, "bert"])
def test_a_line_of_a_corpus_cannot_inject_special_tokens(kind):
    tokenizer = load_tokenizer(VOCAB_FILE) if kind == "bert" else ours(kind)
    special = {
        tokenizer.pad_token_id,
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
        tokenizer.mask_token_id,
    }
    for name in [*NAMES, *tokenizer.special_tokens.values()]:
        for text in (name, f"a {name} b", f"a{name}b", f"{name}{name}", f" {name.lower()}"):
            assert not special & set(tokenizer.encode_lines(text.encode())[0].tolist()), text
    assert tokenizer.encode("a \ud800 b") == tokenizer.encode("a \ufffd b")
    assert tokenizer.vocab[tokenizer.special_tokens["mask_token"]] == tokenizer.mask_token_id


def test_added_tokens_that_are_not_special_are_recognized():
    tokens = ours("modernbert").tokenize("if x:\n    at |||IP_ADDRESS||| [unused5]")
    assert "    " in tokens and "|||IP_ADDRESS|||" in tokens and "[unused5]" in tokens
    assert ours("modernbert").vocab_size == len(ours("modernbert").vocab)


@given(kinds, st.text(st.sampled_from("aeT5 .,!(-3n\n"), max_size=40))
def test_a_token_continues_a_word_of_letters_of_digits_or_of_others(kind, text):
    text = " ".join(text.split())
    ids, spans = ours(kind).encode_text(text)
    begins = word_starts(kind).find(ids[None], np.ones((1, len(ids)), bool))[0]
    for place in range(1, len(ids)):
        begin, end = spans[place]
        begin += len(text[begin:end]) - len(text[begin:end].lstrip())
        if begin < end and ours(kind).unk_token_id not in ids[place - 1 : place + 1]:
            continues = (
                re.fullmatch(r"[a-zA-Z]{2}|\d{2}|[^\w\s]{2}", text[begin - 1 : begin + 1])
                is not None
            )
            assert begins[place] != continues, ours(kind).tokenize(text)


def test_in_scripts_without_spaces_each_token_is_a_word_to_mask(tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"北京กิน", "大学", "ab", "c"]
    model = models.Unigram([(token, -1.0) for token in vocabulary], unk_id=1)
    made = tokenizers.Tokenizer(model)
    made.decoder = decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    # A Thai vowel sign continues its consonant.
    assert words_to_mask(tokenizer, "北京大学กินabc") == ["北", "京", "大学", "กิ", "นabc"]


@pytest.mark.parametrize("kind", ["bpe", "modernbert"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("the naïve café, “Übung”", "the|naïve|café|,|“|Übung|”"),
        ("患者服用药。", "患|者|服|用|药|。"),
        ("タワーへ ﾀﾜ", "タ|ワー|へ|ﾀ|ﾜ"),
        ("서울에서 만나요.", "서울에서|만나요|."),
        ("राम दिल्ली में है।", "राम|दिल्ली|में|है|।"),
        ("กินน้ำที่ ไป", "กิ|น|น้ำ|ที่|ไ|ป"),
        ("مُحَمَّد في، می\u200cخواهم", "مُحَمَّد|في|،|می\u200cخواهم"),
        ("a 😀👨‍👩‍👧 1️⃣", "a|😀|👨‍👩‍👧|1️⃣"),
    ],
)
def test_words_of_bytes_are_masked_whole_and_no_character_is_divided(kind, text, words):
    """The vocabulary is English: other characters are two to four tokens."""
    tokenizer = ours(kind)
    masked = words_to_mask(tokenizer, text)
    # Spaces of their own, before a character of bytes, are words without text.
    assert "|".join(filter(None, masked)) == words
    assert len(tokenizer.encode(text)) > 1.5 * len(words.split("|"))


def test_the_tokenizer_of_bert_as_json_is_the_fast_one_with_the_same_hash(tmp_path):
    fast = tokenizers.BertWordPieceTokenizer(str(VOCAB_FILE), lowercase=True)
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    listed = load_tokenizer(VOCAB_FILE)
    assert isinstance(tokenizer, BertTokenizer) and isinstance(listed, BertTokenizer)
    assert (tokenizer.vocab, tokenizer.vocab_sha256, tokenizer.do_lower_case) == (
        listed.vocab,
        listed.vocab_sha256,
        True,
    )
    content = read_json(tmp_path / "tokenizer.json")
    for part, key, value in (
        ("normalizer", "clean_text", False),
        ("normalizer", "strip_accents", False),
        ("pre_tokenizer", "type", "Whitespace"),
        ("model", "max_input_chars_per_word", 20),
    ):
        (tmp_path / "other.json").write_text(
            json.dumps({**content, part: {**content[part], key: value}})
        )
        other = load_tokenizer(tmp_path / "other.json")
        reference = tokenizers.Tokenizer.from_file(str(tmp_path / "other.json"))
        text = "An un\u0301affable sesquipedalianism\x00, isn't it"
        assert not isinstance(other, BertTokenizer)
        assert other.encode(text) == reference.encode(text, add_special_tokens=False).ids


def test_a_vocabulary_beside_a_json_is_used_only_if_it_has_the_same_ids(tmp_path):
    tokenizers.BertWordPieceTokenizer(str(VOCAB_FILE), lowercase=True).save(
        str(tmp_path / "tokenizer.json")
    )
    words = VOCAB_FILE.read_text().splitlines()
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    assert find_tokenizer(tmp_path).path == tmp_path / "vocab.txt"
    (tmp_path / "vocab.txt").write_text("\n".join([*words[:-2], words[-1], words[-2]]))
    assert find_tokenizer(tmp_path).path == tmp_path / "tokenizer.json"  # as transformers does


@pytest.fixture(scope="module")
def pretrained(inputs, tmp_path_factory):
    """Makes a checkpoint, one for each kind of tokenizer."""

    @cache
    def make(kind: str) -> Path:
        config = {**TINY, "vocab_size": ours(kind).vocab_size}
        if kind == "modernbert":
            config = read_json(ROOT / "bert_configs" / "modernbert-tiny.json")
            config["vocab_size"] = -(-ours(kind).vocab_size // 64) * 64
        return pretrain(
            inputs, tmp_path_factory.mktemp("pretrained"), file_of(kind), config, *RUNS[kind]
        )[0]

    return make


RUNS = {
    "bpe": ("--max-predictions-per-seq", 5, "--whole-word-mask"),
    "modernbert": ("--dynamic-masking", "--no-nsp", "--pack-documents"),
    "xlm-r": ("--max-predictions-per-seq", 5, "--no-nsp"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_pre_training_and_its_folder_have_the_tokenizer_as_it_came(
    kind, pretrained, tmp_path, capsys
):
    checkpoint = pretrained(kind)
    assert (checkpoint / "tokenizer.json").read_bytes() == file_of(kind).read_bytes()
    assert not (checkpoint / "vocab.txt").exists()
    text = "The house, 1945: it\u2019s caf\u00e9 \u6f22."
    peer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    cls, sep = ours(kind).cls_token_id, ours(kind).sep_token_id
    assert peer(text)["input_ids"] == [cls, *ours(kind).encode(text), sep]
    assert (peer.mask_token_id, peer.pad_token_id) == (
        ours(kind).mask_token_id,
        ours(kind).pad_token_id,
    )

    masked = peer(f"The {peer.mask_token} was very dark.", return_tensors="pt").input_ids
    logits = transformers.AutoModelForMaskedLM.from_pretrained(checkpoint).eval()(masked).logits
    best = int(logits[masked == peer.mask_token_id][0, : ours(kind).vocab_size].argmax())
    capsys.readouterr()
    for name in sorted({"[MASK]", peer.mask_token}):
        flags = ("--init-checkpoint", str(checkpoint), "--device", "cpu")
        assert inference.main([*flags, "--fill-mask", f"The {name} was very dark."]) == 0
        printed = re.search(r"n best\n +\S+ +(.*)", capsys.readouterr().out)[1]
        assert printed == peer.decode([best]).strip()


def test_answers_of_squad_are_found():
    squad = read_squad(SQUAD / "train-v1.1.json")
    for kind in MAKERS:
        dataset = SquadDataset(squad, ours(kind), SquadOptions(max_seq_length=384), training=True)
        checked = 0
        for feature, (start, end) in enumerate(
            zip(dataset.start_positions, dataset.end_positions, strict=True)
        ):
            if end:
                answer = squad.questions[dataset.question_index[feature]].answers[0].text.strip()
                text = dataset.span_text(feature, start, end)
                assert answer in text and len(text) <= len(answer) + 20, (kind, text, answer)
                checked += text == answer
        assert checked > 0.9 * len(squad.questions)


def test_files_that_are_no_tokenizer_for_bert_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    unigram = json.loads(file_of("unigram").read_text())
    for content, says in (
        ("{}", "is no complete tokenizer"),
        ('{"the": 5}', "is no complete tokenizer"),
        ('{"model": ', "not valid JSON"),
        ("[1, 2]", "has no"),
        (
            json.dumps(unigram | {"model": unigram["model"] | {"vocab": []}}),
            "is no complete tokenizer",
        ),
        (
            json.dumps(unigram | {"model": unigram["model"] | {"unk_id": None}}),
            "is no complete tokenizer .*unknown token",
        ),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=says):
            load_tokenizer(path)
    gpt2 = modernbert()
    gpt2["added_tokens"] = [t for t in gpt2["added_tokens"] if t["content"] == "<|endoftext|>"]
    gpt2["post_processor"] = None
    path.write_text(json.dumps(gpt2))
    with pytest.raises(
        UserError, match=r"has no .*cls_token, sep_token, mask_token, .*prepare.py vocabulary"
    ):
        load_tokenizer(path)
    names = {f"{role}_token": "<|endoftext|>" for role in ("pad", "unk", "cls", "sep", "mask")}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(names | {"mask_token": {"content": "a"}})
    )
    assert load_tokenizer(path).mask_token_id == gpt2["model"]["vocab"]["a"]


@pytest.mark.parametrize(
    "value", [None, 5, True, "x", [], [None], {}, {"5": None}, {"5": {"content": ["a"]}}]
)
def test_values_of_other_types_in_a_tokenizers_files_do_not_end_in_a_traceback(value, tmp_path):
    (tmp_path / "vocab.txt").write_bytes(VOCAB_FILE.read_bytes())
    shutil.copy(file_of("roberta"), tmp_path / "roberta.json")
    names = ("tokenizer_class", "do_lower_case", "added_tokens_decoder", "cls_token", "mask_token")
    for content in (value, *({name: value} for name in names)):
        for file in ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"):
            (tmp_path / file).write_text(json.dumps(content))
            for load in (
                lambda: find_tokenizer(tmp_path),
                lambda: load_tokenizer(tmp_path / "roberta.json"),
            ):
                with contextlib.suppress(UserError):
                    load()
            (tmp_path / file).unlink()


def test_a_regular_expression_that_backtracks_without_end_is_an_error(tmp_path):
    content = json.loads(file_of("bpe").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    text = "a" * 40 + "!"
    for encode in (lambda: tokenizer.encode(text), lambda: tokenizer.encode_lines(text.encode())):
        with pytest.raises(UserError, match="too slow"):
            encode()


def test_mismatches_and_flags_without_effect_are_refused(inputs, tmp_path):
    books = write_books(tmp_path)
    small = read_json(inputs.config) | {"vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(small))
    flags = (
        "--config-file",
        tmp_path / "config.json",
        "--vocab-file",
        file_of("bpe"),
        "--max-steps",
        1,
    )
    assert_refused(run_here(inputs.command(tmp_path, *flags)), "600 tokens", "vocab_size is 100")
    plain = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    trained(plain, trainers.BpeTrainer(vocab_size=300, special_tokens=NAMES, show_progress=False))
    plain.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="--whole-word-mask"):
        load_tokenizer(tmp_path / "tokenizer.json").word_starts()
    flags = (
        "--input-file",
        books,
        "--output-dir",
        tmp_path / "shards",
        "--vocab-file",
        file_of("roberta"),
    )
    with pytest.raises(UserError, match=r"RoBERTa's kind.* add --no-nsp"):
        create_pretraining_data.main([str(flag) for flag in flags])
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sentencepiece.bpe.model").touch()
    with pytest.raises(
        UserError, match=r"sentencepiece.bpe.model only: make tokenizer.json with transformers"
    ):
        find_tokenizer(tmp_path / "slow")
    with pytest.raises(UserError, match="raise --vocab-size"):
        train_tokenizer([books], VocabularyOptions("bpe", size=200))
    (tmp_path / "empty.txt").write_text(" \n")
    for kind in ("bpe", "unigram"):
        with pytest.raises(UserError, match=r"no words|no tokenizer can be trained"):
            train_tokenizer([tmp_path / "empty.txt"], VocabularyOptions(kind, size=900))
