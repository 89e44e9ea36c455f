"""Rows that are most likely mistakes are named with their lines before training."""

import math
from pathlib import Path

import pytest
from conftest import VOCAB_FILE, write_json_lines

from bert_recipe.tasks.classification.options import ClassificationOptions
from bert_recipe.tasks.classification.task import ClassificationTask
from bert_recipe.tasks.doubtful_rows import warn_of_far_numbers
from bert_recipe.tasks.embeddings.files import read_tuples
from bert_recipe.tasks.embeddings.options import EmbeddingTaskOptions
from bert_recipe.tasks.embeddings.task import EmbeddingTask
from bert_recipe.tasks.fine_tuning import warn_of_known_texts, warn_of_repeats
from bert_recipe.tasks.ner.files import read_sentences
from bert_recipe.tasks.text_sequences import TextDataset, warn_of_vocabulary
from bert_recipe.tokenization.tokenizer import BertTokenizer

TOKENIZER = BertTokenizer(VOCAB_FILE)
ONE, PAIR = ("text", None, "label"), ("text", "pair", "label")
NUMBER, SEVERAL = {"regression": True}, {"task_name": "multi-label"}


def train(path: Path, content: str, columns, **options) -> None:
    path.write_text(content, encoding="utf-8")
    text, pair, label = columns
    flags = ClassificationOptions(
        train_file=path, text_column=text, pair_column=pair, label_column=[label], **options
    )
    ClassificationTask.learning(flags, TOKENIZER)


@pytest.mark.parametrize(
    ("content", "columns", "options", "says"),
    [
        (
            "text,label\na,x\nb,y\na,y\na,x\nb,x\n",
            *(ONE, {}),
            "2 texts have contradicting labels: line 2 (x) and line 4 (y), line 3 (y) and line 6",
        ),
        (
            "text,label\na,1\nb,2\na,1.0\na,3\n",
            *(ONE, NUMBER),
            "1 text has contradicting labels: line 2 (1.0) and line 5 (3.0)",
        ),
        (
            "text,label\na,x|y\nb,y\na,y|x\nb,x\n",
            *(ONE, SEVERAL),
            "1 text has contradicting labels: line 3 (y) and line 5 (x)",
        ),
        (
            "text,pair,label\na,b,x\na,c,y\na,b,y\n",
            *(PAIR, {}),
            "1 text has contradicting labels: line 2 (x) and line 4 (y)",
        ),
        ("text,label\na,x\n,y\n\u200b,y\n", ONE, {}, "2 rows have an empty text: lines 3, 4"),
        ("text,pair,label\na,b,x\na,,y\n", PAIR, {}, "1 row has an empty text: line 3"),
        ("text,label\na,x\nnan,y\n", ONE, {}, "1 row has a text such as 'nan': line 3"),
        ("text,label\na,x\nb,None\nc,x\nd,NA\n", ONE, {}, "the label 'NA', 'None' is most likely"),
    ],
)
def test_doubtful_rows_of_texts_are_named(tmp_path, capsys, content, columns, options, says):
    train(tmp_path / "train.csv", content, columns, **options)
    assert says in capsys.readouterr().out


def test_a_file_without_doubtful_rows_has_no_warning(tmp_path, capsys):
    content = 'text,pair,label\na,b,x\nb,a,y\na,b,x\n"a ""b""",c,y\n'
    train(tmp_path / "train.csv", content, PAIR)
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        (list(range(200)), None),
        ([*range(198), 1998, 19997], "2 of 200 numbers make 100% of the squared distances"),
        ([*range(198), 1998, 19997], "median, 99.5: line 201 (19997), line 200 (1998): training"),
        ([*range(199), 9999], "1 of 200 numbers make 99%"),  # none of the others is far
        ([*range(199), 9999], "if they are right, limit the range"),  # 0 has no logarithm
        ([*range(1, 200), 9999], "if they are right, learn the logarithms"),
        ([math.exp(0.1 * number) for number in range(100)], None),
        ([math.exp(number) for number in range(100)], "line 101 (9.88903e+42)"),
        ([2] * 60, None),
        ([2] * 59 + [3], "1 of 60 numbers make 100%"),
        ([0] * 10 + [1000], None),  # of few rows nothing follows
    ],
)
def test_numbers_that_are_far_from_the_others_are_named(numbers, says, capsys):
    warn_of_far_numbers(Path("train.csv"), numbers, range(2, len(numbers) + 2))
    output = capsys.readouterr().out
    assert output == "" if says is None else says in output


def test_pairs_of_embeddings_have_words_and_one_score(tmp_path, capsys):
    path = tmp_path / "train.csv"
    path.write_text("text,pair,label\na,b,1\na,b,2\na,c,1\n")
    read_tuples(path, ("text", "pair"), "label")
    says = "1 pair of texts has contradicting labels: line 2 (1.0) and line 3 (2.0)"
    assert says in capsys.readouterr().out


def test_contradicting_sentences_are_named(tmp_path, capsys):
    path = tmp_path / "train.jsonl"
    rows = []
    for text, spans in (
        ("Anna Smith came", [(0, 4, "PER")]),
        ("Parisians left", [(0, 5, "LOC")]),
        ("in West-Berlin, 东京人", [(8, 14, "LOC"), (16, 18, "LOC")]),
        ("Anna Smith came", [(0, 10, "PER")]),
    ):
        keys = ("start", "end", "label")
        rows.append({"text": text, "spans": [dict(zip(keys, span, strict=True)) for span in spans]})
    write_json_lines(path, rows)
    read_sentences(path, True)
    output = capsys.readouterr().out
    assert "1 sentence has contradicting labels: line 1 (0-4 PER) and line 4" in output


def test_texts_to_score_that_were_trained_on_are_counted(tmp_path, capsys):
    train, dev = tmp_path / "train.csv", tmp_path / "dev.csv"
    train.write_text("text,label\na,x\nb,y\nc,x\n")
    for rows, says in (
        ("a,x\nd,y\ne,x\nd,x\n", "1 of 3 texts to score (33.3%) are in the training file"),
        ("a,x\nb,y\na,y\n", "2 of 2 texts to score (100.0%) are in the training file"),
        ("d,x\ne,y\n", ""),
    ):
        dev.write_text("text,label\n" + rows)
        columns = {"text_column": "text", "label_column": ["label"]}
        files = {"train_file": train, "eval_file": dev, "do_eval": True}
        options = ClassificationOptions(**columns, **files)
        task, dataset = ClassificationTask.learning(options, TOKENIZER)
        scored_sets = task.prediction_sets(TOKENIZER)
        capsys.readouterr()
        warn_of_known_texts(dataset, scored_sets)
        output = capsys.readouterr().out
        assert says in output
        assert bool(output) == bool(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a b c", ""),
        ("😀 🙃 😀", "60% of the tokens of the training file are [UNK]"),
        ("the pneumoconiosis rose", "into tokens of 2.2 letters"),
        ("a pneumoconiosis " + "in the end it rose " * 16, ""),  # 3.4
        ("passages rose " * 2, ""),  # as in Turkish, half of the words have two tokens
        ("the end rose 10.4821 0x7f3a91 b48120", ""),  # numbers and codes
        ("10.4821", ""),
        ("-", ""),
    ],
)
def test_a_vocabulary_that_does_not_fit_the_texts_is_named(text, says, tmp_path, capsys):
    train = tmp_path / "train.csv"
    train.write_text(f"text,pair,label\n{text},{text},x\n{text},{text},y\n", encoding="utf-8")
    columns = {"text_column": "text", "label_column": ["label"], "train_file": train}
    _, classified = ClassificationTask.learning(ClassificationOptions(**columns), TOKENIZER)
    pairs = {"text_column": "text", "pair_column": "pair", "train_file": train}
    _, embedded = EmbeddingTask.learning(EmbeddingTaskOptions(**pairs), TOKENIZER)
    for dataset in (classified, embedded):
        capsys.readouterr()
        warn_of_vocabulary(dataset, TOKENIZER)
        output = capsys.readouterr().out
        assert says in output
        assert bool(output) == bool(says)


@pytest.mark.parametrize("text", ["공원으로 갑니다", "ከመንግሥት ኢትዮጵያ"])
def test_a_syllable_that_is_one_character_has_two_letters(text, tmp_path, capsys):
    """Words in two tokens, as a vocabulary of the language has them."""
    halves = [half for word in text.split() for half in (word[:2], "##" + word[2:])]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *halves]))
    tokenizer = BertTokenizer(vocabulary, do_lower_case=False)
    assert len(tokenizer.encode(text)) == 4
    warn_of_vocabulary(TextDataset(tokenizer, 16, [text]), tokenizer)
    assert not capsys.readouterr().out


def test_an_update_that_repeats_samples_is_named(capsys):
    warn_of_repeats(10, 128)
    says = "an update takes 128 samples, and there are 10: each is in it up to 13 times"
    assert says in capsys.readouterr().out
    warn_of_repeats(128, 128)
    assert not capsys.readouterr().out
