"""Token classification: samples and loss against transformers, scores against seqeval, and the
program on a rule.
"""

import csv
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    TINY,
    VOCAB_FILE,
    fine_tuning_words,
    read_json,
    read_json_lines,
    write_json_lines,
)
from hugging_face import bert_tokenizer
from safetensors.torch import load_file
from transformers import BertConfig as HFConfig
from transformers import BertForTokenClassification as HFForTokenClassification
from transformers import pipeline

import run_ner
from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.data_loading.loader import filler_micro_batch, make_step_batch
from bert_recipe.data_loading.packing import MicroBatchLimits
from bert_recipe.model.encoders.bert import BertForTokenClassification
from bert_recipe.reporting.scored_rows import read_scored_rows
from bert_recipe.tasks.ner.files import Sentence, read_sentences
from bert_recipe.tasks.ner.options import TokenClassificationOptions
from bert_recipe.tasks.ner.scores import entity_scores
from bert_recipe.tasks.ner.tags import entities
from bert_recipe.tasks.ner.task import TokenClassificationTask
from bert_recipe.tasks.ner.token_labels import TaggedDataset
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.errors import UserError

TOKENIZER = BertTokenizer(VOCAB_FILE)
LABELS = ("O", "B-LOC", "B-PER", "I-PER")
NAMES, TOWNS = ["Anna", "Boris", "Peter Smith", "Dmitri Jones"], ["Paris", "Cairo", "Rome", "Oslo"]


def sentences(count: int, seed: int) -> list[tuple[list[str], list[str]]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        name = rng.choice(NAMES).split()
        words = [*name, rng.choice(["lived in", "left", "saw"]), rng.choice(TOWNS), "."]
        tags = [*["B-PER", "I-PER"][: len(name)], "O", "B-LOC", "O"]
        verb = words[len(name)].split()
        rows.append(
            ([*name, *verb, *words[-2:]], [*tags[: len(name)], *["O"] * len(verb), "B-LOC", "O"])
        )
    return rows


def write_conll(path: Path, rows) -> Path:
    lines = ["-DOCSTART- -X- O", ""]
    for words, tags in rows:
        lines += [*(f"{word} NN {tag}" for word, tag in zip(words, tags, strict=True)), ""]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("num_sizes", [None, 1])
def test_samples_loss_and_gradient_are_those_of_transformers(tmp_path, num_sizes):
    rows = [
        *sentences(3, 0),
        (["unaffable", "naïvely", "10\u00a0000", "Anna"], ["O", "O", "O", "B-PER"]),
    ]
    dataset = TaggedDataset(
        read_sentences(write_conll(tmp_path / "a.txt", rows), True), TOKENIZER, 32, LABELS
    )
    encoded = bert_tokenizer()(
        [words for words, _ in rows],
        is_split_into_words=True,
        return_tensors="pt",
        padding="max_length",
        max_length=32,
    )
    labels = torch.full(encoded["input_ids"].shape, -100)
    for row, (_, tags) in enumerate(rows):
        before = None
        for place, word in enumerate(encoded.word_ids(row)):
            if word is not None and word != before:
                labels[row, place] = LABELS.index(tags[word])
            before = word
        stream = dataset.stream(np.array([row]))
        length = dataset.lengths[row]
        assert stream["input_ids"].tolist() == encoded["input_ids"][row, :length].tolist()
        assert stream["tags"].tolist() == labels[row, :length].tolist()

    torch.manual_seed(0)
    peer = HFForTokenClassification(HFConfig(**TINY, id2label=dict(enumerate(LABELS)))).eval()
    peer.save_pretrained(tmp_path)
    expected = peer(**encoded, labels=labels)
    expected.loss.backward()
    model = load_pretrained(BertForTokenClassification, tmp_path).eval()
    torch.testing.assert_close(
        model(**encoded).logits[0, :5], expected.logits[0, :5], rtol=1e-4, atol=1e-5
    )
    task = TokenClassificationTask(TokenClassificationOptions(), 32, LABELS)
    limits = MicroBatchLimits.for_batch(4, 32, 32, num_sizes)
    batch = make_step_batch(dataset, np.arange(4), limits)
    (micro_batch,) = batch.micro_batches
    total = task.loss(task.sums(model, micro_batch), batch.counts)
    filler_batch = filler_micro_batch(dataset.stream_labels, limits)
    filler = task.loss(task.sums(model, filler_batch), batch.counts)
    (total + filler).backward()
    assert filler.item() == 0
    assert total.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    for (name, p), (_, other) in zip(
        model.named_parameters(), peer.named_parameters(), strict=True
    ):
        torch.testing.assert_close(p.grad[: len(other)], other.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_each_scored_word_is_written_and_sentences_with_mistakes_are_told(tmp_path):
    sentences = [(["Anna", "Smith", "left"], ["B-PER", "I-PER", "O"]), (["Oslo"], ["B-LOC"])]
    path = write_conll(tmp_path / "dev.conll", sentences)
    task = TokenClassificationTask(TokenClassificationOptions(eval_file=path), 32, LABELS)
    (scored_set,) = task.prediction_sets(TOKENIZER)
    logits = np.zeros((len(scored_set.dataset.input_ids), len(LABELS)), np.float32)
    predicted = ["B-PER", "O", "O", "B-LOC"]
    places = [LABELS.index(tag) for tag in predicted]
    logits[scored_set.dataset.first_tokens, places] = np.log(9)  # 9 of 12
    scores = scored_set.finish(logits, tmp_path)
    text = (tmp_path / "eval_predictions.tsv").read_text()
    assert re.sub(r"0\.75\d+", "0.75", text).splitlines()[2:] == [
        "Anna\tB-PER\tB-PER\t0.75",
        "Smith\tI-PER\tO\t0.75",
        "left\tO\tO\t0.75",
        "",
        "Oslo\tB-LOC\tB-LOC\t0.75",
        "",
    ]
    mistake = {"text": "Anna Smith left", "label": "Anna Smith: PER", "prediction": "Anna: PER"}
    assert scores["most_confident_mistakes"] == [mistake | {"confidence": pytest.approx(0.75)}]
    assert "warning" not in scores
    logits[:, LABELS.index("O")] = 9
    assert scored_set.finish(logits, tmp_path)["warning"] == "no entity is predicted in 2 sentences"


def test_a_word_with_a_tab_does_not_shift_the_columns_of_predictions(tmp_path):
    row = {"tokens": ["A\tB", "left"], "ner_tags": ["B-PER", "O"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    files = {"eval_file": tmp_path / "a.jsonl", "predict_file": tmp_path / "a.jsonl"}
    task = TokenClassificationTask(TokenClassificationOptions(**files), 32, LABELS)
    for each in task.prediction_sets(TOKENIZER):
        each.finish(np.zeros((len(each.dataset.input_ids), len(LABELS)), np.float32), tmp_path)
    (predicted,) = read_json_lines(tmp_path / "predictions.jsonl")
    assert predicted["tokens"] == row["tokens"]
    assert len(predicted["predicted ner_tags"]) == 2
    with (tmp_path / "eval_predictions.tsv").open(newline="") as file:
        rows = [row[:2] for row in csv.reader(file, delimiter="\t") if row]
    assert rows == [["word", "tag"], ["A\tB", "B-PER"], ["left", "O"]]


def test_parts_of_speech_are_scored_by_accuracy_and_predicted_for_each_word(tmp_path):
    (tmp_path / "train.conll").write_text("the DET\ncat NOUN\nsat VERB\n")
    (tmp_path / "dev.conll").write_text("a DET\ndog NOUN\nran VERB\nup ADV\n")
    files = {"train_file": tmp_path / "train.conll", "eval_file": tmp_path / "dev.conll"}
    options = TokenClassificationOptions(max_seq_length=32, **files)
    task, _ = TokenClassificationTask.learning(options, TOKENIZER)
    assert (task.labels, task.metric) == (("DET", "NOUN", "VERB"), "accuracy")
    (each,) = task.prediction_sets(TOKENIZER)
    logits = np.zeros((len(each.dataset.input_ids), 3), np.float32)
    logits[each.dataset.first_tokens, [0, 1, 1, 2]] = 1
    scores = each.finish(logits, tmp_path)
    assert scores["accuracy"] == 0.5
    assert scores["per_class"]["NOUN"] == {"precision": 0.5, "recall": 1, "f1": 2 / 3, "support": 1}
    assert "f1" not in scores
    task.write(each.dataset, logits, tmp_path)
    assert (
        tmp_path / "predictions.tsv"
    ).read_text() == "a\tDET\ndog\tNOUN\nran\tNOUN\nup\tVERB\n\n"
    options = replace(options, metric_for_best_model="f1")
    with pytest.raises(UserError, match="--metric-for-best-model f1 is no score of this task"):
        TokenClassificationTask.learning(options, TOKENIZER)
    text = task.dataset([Sentence(text="Dogs ran!")], TOKENIZER)
    logits = np.eye(3)[[0, 1, 2, 0, 0]]
    assert [
        (each["start"], each["end"], each["label"])
        for each in task.predictions(text, logits)[0].columns["spans"]
    ] == [
        (0, 4, "NOUN"),
        (5, 8, "VERB"),
        (8, 9, "DET"),
    ]


@pytest.mark.parametrize(
    ("words", "labelled"),
    [
        ([("unaffable", "B-PER"), ("naïvely", "O")], ["B-PER", "O"]),
        ([("北京", "B-LOC"), ("很", "O"), ("大", "O")], ["B-LOC", "I-LOC", "O", "O"]),
        ([("東京", "B-LOC"), ("へ", "O")], ["B-LOC", "I-LOC", "O"]),
        ([("北", "B-LOC"), ("京", "I-LOC")], ["B-LOC", "I-LOC"]),
        ([("北京", "NN"), ("在", "IN")], ["NN", "NN", "IN"]),
    ],
)
def test_all_tokens_of_a_word_are_labelled_if_a_bare_text_does_not_show_where_words_begin(
    words, labelled, tmp_path
):
    last = "O" if labelled[0][:2] == "B-" else "IN"
    train = tmp_path / "a.txt"
    rows = [f"{word}\t{tag}\n" for word, tag in words]
    train.write_text("".join([*rows, f"\nin\t{last}\n"]))
    options = TokenClassificationOptions(max_seq_length=32, train_file=train)
    task, dataset = TokenClassificationTask.learning(options, TOKENIZER)
    tags = [task.labels[label] for label in dataset.labels["tags"] if label >= 0]
    assert tags == [*labelled, last]


def test_a_long_sentence_is_read_in_parts_and_each_word_has_one_prediction(tmp_path):
    words = ["Anna", "unaffable" * 20, "\x07", *["naïvely", "in"] * 30]
    path = write_conll(tmp_path / "a.txt", [(words, ["B-PER", *["O"] * (len(words) - 1)])])
    dataset = TaggedDataset(read_sentences(path, True), TOKENIZER, 16, LABELS)
    assert len(dataset) > 5 and dataset.lengths.max() <= 16
    # A word of control characters has no token, and no label.
    assert len(set(dataset.first_tokens.tolist())) == len(words) - 1 == dataset.num_labelled.sum()
    logits = np.zeros((len(dataset.input_ids), len(LABELS)))
    logits[dataset.first_tokens[3], 1] = 1
    task = TokenClassificationTask(TokenClassificationOptions(), labels=LABELS)
    task.write(dataset, logits, tmp_path)
    lines = (tmp_path / "predictions.tsv").read_text().split("\n\n")[0].split("\n")
    assert len(lines) == len(words)
    assert [place for place, line in enumerate(lines) if line.endswith("B-LOC")] == [4]


def test_words_without_tokens_neither_begin_nor_end_an_entity(tmp_path):
    """They have no tag to predict; an entity of such a word alone is missed."""
    words = ["\x07", "Anna", "\x07", "Smith", "\x07", "in", "\x07"]
    tags = ["B-PER", "I-PER", "I-PER", "I-PER", "I-PER", "O", "B-LOC"]
    sentences = read_sentences(write_conll(tmp_path / "a.txt", [(words, tags)]), True)
    dataset = TaggedDataset(sentences, TOKENIZER, 64, LABELS)
    assert dataset.unit_tags() == [["B-PER", "I-PER", "O"]]
    logits = np.zeros((len(dataset.input_ids), len(LABELS)))
    learnt = [LABELS.index(tag) for tag in dataset.unit_tags()[0]]
    logits[dataset.first_tokens, learnt] = 1
    task = TokenClassificationTask(TokenClassificationOptions(), labels=LABELS)
    scores = task.score(dataset, logits, tmp_path)
    assert (scores["precision"], scores["recall"], scores["accuracy"]) == (1, 0.5, 1)
    assert scores["per_class"]["PER"]["f1"] == 1 and scores["per_class"]["LOC"]["support"] == 1
    task.write(dataset, logits, tmp_path)
    lines = (tmp_path / "predictions.tsv").read_text().splitlines()
    assert [line.rpartition("\t")[2] for line in lines[:-1]] == ["O", *tags[:1], *tags[2:4], *"OOO"]


def scores_of(expected: list[list[str]], predicted: list[list[str]]) -> dict:
    return entity_scores(*([entities(tags) for tags in side] for side in (expected, predicted)))


def test_entities_are_those_of_seqeval():
    """Expected: get_entities of seqeval 1.2.2, with ends after the last word."""
    cases = {
        "B-PER I-PER O B-LOC": {("PER", 0, 2), ("LOC", 3, 4)},
        "I-PER I-PER I-LOC": {("PER", 0, 2), ("LOC", 2, 3)},
        "B-PER B-PER I-PER": {("PER", 0, 1), ("PER", 1, 3)},
        "S-PER B-LOC E-LOC E-LOC": {("PER", 0, 1), ("LOC", 1, 3), ("LOC", 3, 4)},
        "O O": set(),
    }
    for tags, expected in cases.items():
        assert entities(tags.split()) == expected, tags
    scores = scores_of([["B-PER", "I-PER", "O"], ["B-LOC"]], [["B-PER", "O", "O"], ["B-LOC"]])
    types = scores.pop("per_class")
    assert scores == {"precision": 0.5, "recall": 0.5, "f1": 0.5}
    assert types["LOC"] == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1}
    assert types["PER"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1}
    scores = scores_of([["B-PER", "O"]], [["O", "B-LOC"]])
    types = scores.pop("per_class")
    undefined = None
    assert scores == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert types["PER"] == {"precision": undefined, "recall": 0.0, "f1": 0.0, "support": 1}
    assert types["LOC"] == {"precision": 0.0, "recall": undefined, "f1": 0.0, "support": 0}


def run(folder: Path, *flags) -> Path:
    (folder / "config.json").write_text(json.dumps({**TINY, "hidden_dropout_prob": 0.0}))
    if "--do-train" in flags:
        flags += ("--train-batch-size", 8, "--learning-rate", 0.01, "--epochs", 15)
    flags = ("--max-seq-length", 24, *flags)
    assert run_ner.main(fine_tuning_words(folder / "config.json", folder / "out", *flags)) == 0
    return folder / "out" / "custom" / "ner"


def test_columns_are_learnt_scored_and_predicted_and_transformers_finds_the_same(tmp_path):
    train, dev = (
        write_conll(tmp_path / f"{name}.conll", sentences(24, seed))
        for seed, name in enumerate("ab")
    )
    files = ("--train-file", train, "--eval-file", dev, "--predict-file", dev)
    folder = run(tmp_path, "--do-train", "--do-eval", "--do-predict", *files)
    assert read_json(folder / "scores.json")["f1"] == 1
    expected = [
        "\n".join(f"{word}\t{tag}" for word, tag in zip(*row, strict=True))
        for row in sentences(24, 1)
    ]
    assert (folder / "predictions.tsv").read_text() == "\n\n".join(expected) + "\n\n"

    find = pipeline(
        "token-classification",
        model=str(folder / "45"),
        device="cpu",
        aggregation_strategy="simple",
    )
    predicted = [
        (entity["entity_group"], entity["word"]) for entity in find("Peter Smith lived in Rome.")
    ]
    assert predicted == [("PER", "peter smith"), ("LOC", "rome")]
    again = run(
        tmp_path,
        "--do-eval",
        "--eval-file",
        dev,
        "--init-checkpoint",
        folder,
        "--output-dir",
        tmp_path / "b",
    )
    assert read_json(again.parents[2] / "b/custom/ner/scores.json")["f1"] == 1


def test_a_new_output_layer_begins_at_the_shares_of_the_tags(tmp_path):
    rows = sentences(24, 0)
    table = write_conll(tmp_path / "a.conll", rows)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    flags = ("--do-train", "--train-file", table, "--max-steps", 1, "--learning-rate", 1e-9)
    flags += ("--max-seq-length", 24)
    assert run_ner.main(fine_tuning_words(tmp_path / "config.json", tmp_path, *flags)) == 0
    saved = tmp_path / "custom/ner/1/model.safetensors"
    names = read_json(saved.with_name("config.json"))["id2label"]
    tags = [tag for _, sentence_tags in rows for tag in sentence_tags]
    shares = [tags.count(names[str(index)]) / len(tags) for index in range(len(names))]
    bias = load_file(saved)["classifier.bias"]
    torch.testing.assert_close(bias.exp(), torch.tensor(shares), rtol=1e-5, atol=0)


def test_json_lines_have_spans_of_characters(tmp_path):
    rows = []
    for words, tags in sentences(24, 0):
        text = " ".join(words[:-1]) + "."
        spans = []
        for kind, first, stop in sorted(entities(tags), key=lambda entity: entity[1]):
            end = text.index(words[stop - 1]) + len(words[stop - 1])
            spans.append({"start": text.index(words[first]), "end": end, "label": kind})
        rows.append({"text": text, "spans": spans})
    path = tmp_path / "a.jsonl"
    write_json_lines(path, rows)
    train = tmp_path / "train.jsonl"
    write_json_lines(train, rows[::-1])
    files = ("--train-file", train, "--eval-file", path, "--predict-file", path)
    folder = run(tmp_path, "--do-train", "--do-eval", "--do-predict", *files)
    assert read_json(folder / "scores.json")["f1"] == 1
    expected = [row | {"predicted spans": row["spans"]} for row in rows]
    assert read_json_lines(folder / "predictions.jsonl") == expected


def test_the_flags_of_transformers_example_choose_columns(tmp_path):
    for name, row in ("train", {"w": ["Anna", "left"], "t": ["B-PER", "O"]}), ("new", {"w": ["a"]}):
        (tmp_path / f"{name}.json").write_text(json.dumps([row]))
    words = ["--do-train", "--do-predict", "--output-dir", str(tmp_path)]
    words += ["--train-file", f"{tmp_path}/train.json", "--test-file", f"{tmp_path}/new.json"]
    words += ["--text_column_name", "w", "--label_column_name", "t", "--bert-model", "custom"]
    options = run_ner.task_options(run_ner.parse_arguments(words))
    task, dataset = TokenClassificationTask.learning(options, TOKENIZER)
    assert (task.labels, dataset.sentences[0].words) == (("O", "B-PER"), ["Anna", "left"])
    (predicted,) = task.prediction_sets(TOKENIZER)
    assert predicted.dataset.sentences[0].words == ["a"]


def test_a_comment_is_not_predicted_as_words(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("# text = Anna lives\n#\nAnna\nlives\n")
    (sentence,) = read_sentences(path, tagged=False)
    assert sentence.words == ["#", "Anna", "lives"]
    path.write_text("Anna\n# Anna lives\nlives\n")
    says = "line 2: '# Anna lives' has another number of columns (3) than"
    with pytest.raises(UserError, match=re.escape(says)):
        read_sentences(path, tagged=False)


def test_types_that_the_model_has_not_learnt_are_named(tmp_path, capsys):
    path = tmp_path / "a.conll"
    task = TokenClassificationTask(
        TokenClassificationOptions(eval_file=path), labels=("O", "B-PER")
    )
    path.write_text("Anna B-PER\nin O\nRome B-LOC\n")
    task.prediction_sets(TOKENIZER)
    assert (
        "has entities of LOC, and the model has learnt PER: they count as not found"
        in capsys.readouterr().out
    )
    path.write_text("Rome B-LOC\n")
    with pytest.raises(
        UserError, match="has entities of LOC, and the model has learnt PER: use a model"
    ):
        task.prediction_sets(TOKENIZER)


def test_without_entities_their_scores_are_not_defined():
    scores = scores_of([["O", "O"]], [["O", "O"]])
    assert all(math.isnan(scores[name]) for name in ("precision", "recall", "f1"))
    scores = scores_of([["O", "O"]], [["B-PER", "O"]])
    assert scores["precision"] == 0 and math.isnan(scores["f1"])
    assert scores_of([["B-PER"]], [["O"]])["f1"] == 0


def test_words_and_texts_of_one_file_are_predicted_each_in_its_form(tmp_path):
    rows = [{"tokens": ["Anna", "sang"]}, {"text": "Anna sang"}]
    task = TokenClassificationTask(TokenClassificationOptions(), 32, LABELS)
    for order in (rows, rows[::-1]):
        write_json_lines(tmp_path / "a.jsonl", order)
        dataset = task.dataset(read_sentences(tmp_path / "a.jsonl", tagged=False), TOKENIZER)
        logits = np.zeros((dataset.token_bounds[-1], len(LABELS)), np.float32)
        names = [{*prediction.columns} for prediction in task.predictions(dataset, logits)]
        assert names == [{"ner_tags"} if "tokens" in row else {"spans"} for row in order]


def test_words_and_texts_of_one_file_are_scored_together_as_texts(tmp_path):
    spans = [{"start": 0, "end": 10, "label": "PER"}, {"start": 16, "end": 20, "label": "LOC"}]
    text = {"text": "Anna Smith left Oslo", "spans": spans}
    words = {"tokens": text["text"].split(), "ner_tags": ["B-PER", "I-PER", "O", "B-LOC"]}
    for order in ([words, text], [text, words]):
        write_json_lines(tmp_path / "a.jsonl", order)
        options = TokenClassificationOptions(eval_file=tmp_path / "a.jsonl")
        (scored_set,) = TokenClassificationTask(options, 32, LABELS).prediction_sets(TOKENIZER)
        logits = np.zeros((len(scored_set.dataset.input_ids), len(LABELS)), np.float32)
        predicted = [LABELS.index(tag) for tag in ("B-PER", "I-PER", "O", "O")]
        logits[scored_set.dataset.first_tokens, predicted * 2] = 1
        scores = scored_set.finish(logits, tmp_path)
        expected = {"text": text["text"], "entities": spans, "predicted": spans[:1]}
        assert read_json_lines(tmp_path / "eval_predictions.jsonl") == [expected] * 2
        (tmp_path / "scores.json").write_text(json.dumps({"f1": scores["f1"]}))
        scored_rows = read_scored_rows([tmp_path])[""]
        assert scored_rows.scores["f1"].value() == pytest.approx(scores["f1"])


def test_words_and_texts_of_one_file_are_learnt_each_in_its_form(tmp_path):
    words = {"tokens": ["Dmitri", "sang"], "ner_tags": ["B-PER", "O"]}
    text = {"text": "Dmitri sang", "spans": [{"start": 0, "end": 6, "label": "PER"}]}
    labels = []
    for order in ([words, text], [text, words]):
        write_json_lines(tmp_path / "a.jsonl", order)
        sentences = read_sentences(tmp_path / "a.jsonl", tagged=True)
        dataset = TaggedDataset(sentences, TOKENIZER, 32, LABELS, label_all_tokens=True)
        labels.append(np.split(dataset.labels["tags"], dataset.token_bounds[1:-1]))
    for tags in labels[0] + labels[1]:
        assert tags.tolist() == labels[0][0].tolist()
