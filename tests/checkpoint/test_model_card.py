"""Model cards as huggingface_hub reads them, and cards that somebody has edited."""

from dataclasses import replace

import pytest
from conftest import TINY
from huggingface_hub import ModelCard as HubCard

import run_glue
import run_squad
from bert_recipe.checkpoint.model_card import (
    CARD_FILE,
    ModelCard,
    ModelParts,
    card_of,
    copy_card,
    is_replaceable,
    write_card,
)
from bert_recipe.checkpoint.record import RunRecord
from bert_recipe.model.encoders.bert import BertConfig

CLASSES = ModelCard(
    'my model: "x"',
    "bert",
    "BertForSequenceClassification",
    labels=("a|b", "gr\u00fcn: # no", "- c"),
    facts={"training file": "a b.csv"},
    command="python3 run_glue.py --text-column 'a b'",
    base="bert-base-uncased",
    scores={"accuracy": 0.5, "f1_macro": float("nan")},
    scored_file="dev: 1.csv",
)


def test_the_hub_reads_task_library_base_and_scores(tmp_path):
    write_card(tmp_path, CLASSES)
    card = HubCard.load(tmp_path / CARD_FILE)
    assert (card.data.library_name, card.data.pipeline_tag) == (
        "transformers",
        "text-classification",
    )
    assert card.data.base_model == "bert-base-uncased" and card.data.tags == ["bert"]
    (result,) = card.data.eval_results  # a score that is not defined is left out
    assert (result.dataset_name, result.metric_type) == ("dev: 1.csv", "accuracy")
    assert result.metric_value == 0.5
    write_card(tmp_path, replace(CLASSES, scored_file="\udcff.csv", facts={"file": "\udcff"}))
    (result,) = HubCard.load(tmp_path / CARD_FILE).data.eval_results
    assert result.dataset_name == "\ufffd.csv"  # its name is not UTF-8
    assert "| labels | `a\\|b`, `gr\u00fcn: # no`, `- c` |" in card.text
    embedding = ModelCard("m", "bert", "BertModel", is_embedding=True)
    data = HubCard(embedding.text()).data
    assert (data.library_name, data.pipeline_tag) == (
        "sentence-transformers",
        "sentence-similarity",
    )


HOSTILE = "a <img src=x onerror=y> [b](http://c) `d` ```e``` \\ *f* & | g\n# h"


def test_names_are_shown_as_they_are(tmp_path):
    """Names of files, models and labels are no HTML, links or code of the page."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt().enable("table")
    card = replace(
        CLASSES,
        name=HOSTILE,
        architecture=f"{HOSTILE}ForSequenceClassification",
        labels=(HOSTILE, "``", "plain"),
        facts={"training file": HOSTILE, HOSTILE: "x"},
        command=f"python3 run_glue.py --text-column '{HOSTILE}\n```\n<b>'",
        scored_file=HOSTILE,
    )
    write_card(tmp_path, card)
    tokens = markdown.parse(HubCard.load(tmp_path / CARD_FILE).text)
    inner = [child for token in tokens for child in token.children or ()]
    assert not [token for token in inner if token.type in ("html_inline", "link_open", "image")]
    assert [token.content.split("-->")[1] for token in tokens if token.type == "html_block"] == [
        "\n"  # the signature
    ]
    texts = ["".join(child.content for child in token.children or ()) for token in tokens]
    shown = " ".join(HOSTILE.split())
    assert texts.count(shown) == 3 and f"Scores on {shown}" in texts  # the name and both facts
    assert "``, plain" in "".join(texts)
    fences = [token.content for token in tokens if token.type == "fence"]
    assert card.command + "\n" in fences


@pytest.mark.parametrize(
    ("program", "flags", "scored"),
    [
        (run_glue, "--eval-fraction 0.2 --predict-file new.csv", "20% of train.csv, held out"),
        (run_glue, "--num-folds 5 --predict-file new.csv", "one of 5 parts of train.csv, held out"),
        (run_glue, "--eval-file dev.csv --predict-file new.csv", "dev.csv"),
        (run_squad, "--predict-file dev.json", "dev.json"),
    ],
)
def test_scores_are_of_the_data_that_was_scored(program, flags, scored):
    words = ["--init-checkpoint", "m", "--output-dir", "o", "--do-train", "--do-eval"]
    words += ["--train-file", "d/train.csv"]
    if program is run_glue:
        words += ["--do-predict", "--text-column", "t", "--label-column", "l"]
    args = program.parse_arguments([*words, *flags.split()])
    record = RunRecord({}, {}, args.as_dict(), "classification")
    model = "BertForSequenceClassification", BertConfig(**TINY)
    card = card_of(*model, record, ModelParts(None), 1, {"f1": 0.5})
    assert f"## Scores on {scored}\n" in card.text()


@pytest.mark.parametrize(
    ("values", "predicts"),
    [
        ({"labels": ("a", "b")}, "a class for each text."),
        ({"labels": ("a", "b"), "text_pairs": True}, "a class for each pair of texts."),
        ({"labels": ("a", "b"), "multi_label": True}, "several labels for each text."),
        ({"labels": ("stars",)}, "a number for each text."),
    ],
)
def test_a_card_says_what_a_classifier_predicts(values, predicts):
    config = BertConfig(**TINY, **values)
    record = RunRecord({}, {}, phase="classification")
    text = card_of("BertForSequenceClassification", config, record, ModelParts(None), 1).text()
    assert f"BertForSequenceClassification: {predicts}\n" in text


@pytest.mark.parametrize("text_pairs", [None, False, True])
def test_the_command_of_a_model_of_pairs_gives_both_texts(tmp_path, text_pairs):
    config = BertConfig(**TINY, labels=("a", "b"), text_pairs=text_pairs)
    record = RunRecord({}, {}, phase="classification")
    text = card_of("BertForSequenceClassification", config, record, ModelParts(None), 1).text()
    assert '--init-checkpoint FOLDER --text "' in text
    assert ('" --text-pair "' in text) == bool(text_pairs)


def test_a_card_that_somebody_wrote_or_edited_is_kept(tmp_path):
    step, old, new = (tmp_path / name for name in ("10", "best", "new"))
    for folder in (step, old, new):
        folder.mkdir()
        write_card(folder, CLASSES)
    path = old / CARD_FILE
    assert is_replaceable(path)
    write_card(old, ModelCard("other", "bert", "BertModel"))
    assert path.read_text().count("# other") == 1
    path.write_text(path.read_text().replace("# other", "# Ours"))
    write_card(old, CLASSES)
    assert "# Ours" in path.read_text()
    copy_card(step, new, old)
    assert (new / CARD_FILE).read_text() == path.read_text()
    path.unlink()
    copy_card(step, new, old)
    assert (new / CARD_FILE).read_text() == (step / CARD_FILE).read_text()
