"""Training a WordPiece vocabulary."""

import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import run_program
from transformers import BertTokenizer as HuggingFaceTokenizer

from bert_recipe.data_preparation.options import VocabularyOptions
from bert_recipe.data_preparation.text.vocabulary import (
    read_beginnings,
    stripped_marks,
    train_vocabulary,
)
from bert_recipe.tokenization.tokenizer import BertTokenizer

STEMS = ["walk", "talk", "jump", "play", "turn", "open", "call", "help"]
ENDINGS = ["", "s", "ed", "ing", "er"]


@pytest.fixture
def text(tmp_path) -> Path:
    rng = random.Random(4)
    words = [stem + ending for stem in STEMS for ending in ENDINGS]
    lines = [
        " ".join(rng.choices(words, k=12)).capitalize() + " in Zürich, 漢字." for _ in range(400)
    ]
    path = tmp_path / "formatted.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


OPTIONS = VocabularyOptions(size=110, unused=9)


def test_special_tokens_come_first_and_the_size_is_kept(text):
    tokens = train_vocabulary([text], OPTIONS)
    assert tokens[:14] == [
        "[PAD]",
        *(f"[unused{n}]" for n in range(9)),
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
    ]
    assert len(tokens) == len(set(tokens)) == 110


def test_frequent_words_are_whole_and_every_word_can_be_spelt(text, tmp_path):
    vocab_file = tmp_path / "vocab.txt"
    vocab_file.write_text(
        "\n".join(train_vocabulary([text], replace(OPTIONS, size=1000))) + "\n", encoding="utf-8"
    )
    ours = BertTokenizer(vocab_file, do_lower_case=True)
    assert ours.tokenize("Walking helps.") == ["walking", "helps", "."]
    for line in text.read_text(encoding="utf-8").splitlines():
        assert ours.unk_token_id not in ours.encode(line)
    reference = HuggingFaceTokenizer(str(vocab_file), do_lower_case=True)
    sentence = "Walkers turned, helping Zürich 漢字!"
    assert ours.tokenize(sentence) == reference.tokenize(sentence)


def test_casing_is_kept_or_folded_as_asked(text):
    cased = train_vocabulary([text], replace(OPTIONS, do_lower_case=False))
    uncased = train_vocabulary([text], OPTIONS)
    assert "Z" in cased and "##ü" in cased
    assert not any(token != token.lower() for token in uncased if not token.startswith("["))
    assert "##ü" not in uncased


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Die Königin für für die schöne Stadt.", "13.3% .* as für becomes fur: give --no-do-lo"),
        ("हिन्दी की कि की भाषा", "as हिन्दी becomes हिनदी"),
        ("ไปกรุงเทพที่นี่ดีที่สุด", "as ที่ becomes ท:"),  # not the whole clause
        ("The café was near the sea. " + "The ship went on. " * 20, None),
    ],
)
def test_marks_that_a_new_vocabulary_would_lose_are_told(text, says):
    marks = stripped_marks(text)
    assert (marks is None) == (says is None)
    assert says is None or re.search(says, marks)


def test_the_result_does_not_depend_on_the_process_or_its_threads(text):
    program = (
        "import sys; from pathlib import Path; "
        "from bert_recipe.data_preparation.text.vocabulary import *; "
        "print(train_vocabulary([Path(sys.argv[1])], VocabularyOptions(size=160)))"
    )
    environments = [
        {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads} for threads in ("1", "3")
    ]
    results = [
        run_program(sys.executable, "-c", program, text, env=environment)
        for environment in environments
    ]
    assert results[0].returncode == 0 and results[0].stdout == results[1].stdout


def test_rare_characters_fall_to_the_limit_of_the_alphabet(text):
    tokens = train_vocabulary([text], replace(OPTIONS, alphabet=20))
    assert "漢" not in tokens
    assert "e" in tokens


def test_the_alphabet_follows_the_text(tmp_path, text):
    """Chinese has thousands of characters that a thousand would leave unknown."""
    characters = [chr(0x4E00 + number) for number in range(3000)]
    lines = ["".join(characters[:2400]) * 20, "".join(characters[2400:])[:20]]  # the last: 0.04%
    chinese = tmp_path / "chinese.txt"
    chinese.write_text("\n".join(lines), encoding="utf-8")
    tokens = set(train_vocabulary([chinese], replace(OPTIONS, size=5000)))
    assert tokens.issuperset(characters[:2390]) and not tokens.issuperset(characters)
    limited = train_vocabulary([chinese], replace(OPTIONS, size=5000, alphabet=500))
    assert len(tokens.intersection(characters)) > len(set(limited).intersection(characters)) == 500
    few = train_vocabulary([text], OPTIONS)  # all its characters are fewer than a thousand
    assert few == train_vocabulary([text], replace(OPTIONS, alphabet=1000))


def test_the_sample_is_spread_over_the_files(tmp_path):
    paths = []
    for name in ("alpha", "beta"):
        paths.append(tmp_path / f"{name}.txt")
        paths[-1].write_text((name + " ") * 30 + "\n" + f"{name}x\n" * 400_000)
    sample = "".join(read_beginnings(paths, megabytes=1))
    assert len(sample) < 1_100_000 and "alpha " in sample and "beta " in sample
    for num_lines in (100, 1):  # of paragraphs, and of files
        many = []
        for number in range(50):
            many.append(tmp_path / f"{number}.txt")
            many[-1].write_text(f"{number}x {'語 ' * (10_000 // num_lines)}\n" * num_lines)
        sample = "".join(read_beginnings(many, megabytes=1))
        assert len(sample.encode()) <= 1_000_000
        assert all(f"{number}x " in sample for number in range(50))
