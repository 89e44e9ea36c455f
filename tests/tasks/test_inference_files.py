"""inference.py on whole files, against transformers."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_json_lines
from hugging_face import LARGE, bert_tokenizer, logits_of_transformers, save
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertTokenizerFast,
    pipeline,
)

import inference
from bert_recipe.checkpoint.sentence_folders import EmbeddingSettings, classifier_files
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import lock_folder

TEXTS = [
    "a gripping film",
    "dull, and twice as long as it should be",
    "naïve",
    "so so",
    "the sea",
    "a, b\nc",
]


@pytest.fixture
def folder(tmp_path):
    """Saves a model with large random weights as a folder."""

    def make(model_class, **config) -> Path:
        torch.manual_seed(0)
        return save(model_class(BertConfig(**LARGE, **config)), tmp_path / "model")

    return make


def run(model: Path, source: Path, target: Path, *flags) -> None:
    words = [
        "--init-checkpoint",
        model,
        "--device",
        "cpu",
        "--input",
        source,
        "--output",
        target,
        *flags,
    ]
    assert inference.main([str(word) for word in words]) == 0


def write_csv(path: Path, texts=TEXTS) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "review"), *enumerate(texts)])
    return path


def rows_of(path: Path) -> list[dict]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    if ".jsonl" in path.suffixes:
        return [json.loads(line) for line in text.splitlines()]
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    return list(csv.DictReader(text.splitlines(keepends=True), delimiter=delimiter))


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.csv.gz", "out.jsonl.gz"])
def test_rows_keep_their_columns_and_get_the_probabilities_of_transformers(folder, tmp_path, name):
    labels = {0: "bad", 1: "good", 2: "so so"}
    model = folder(
        BertForSequenceClassification, id2label=labels, label2id={v: k for k, v in labels.items()}
    )
    source = write_csv(tmp_path / "in.csv")
    target = tmp_path / name
    run(model, source, target, "--text-column", "review", "--batch-size", 2)
    rows = rows_of(target)
    assert [row["id"] for row in rows] == [str(index) for index in range(len(TEXTS))]
    assert [row["review"] for row in rows] == TEXTS
    for row, text in zip(rows, TEXTS, strict=True):
        expected = logits_of_transformers(BertForSequenceClassification, model, text).softmax(0)
        assert row["label"] == labels[int(expected.argmax())]
        assert float(row["confidence"]) == pytest.approx(float(expected.max()), abs=1e-5)
        assert [float(row[f"probability {label}"]) for label in labels.values()] == pytest.approx(
            expected.tolist(), abs=1e-5
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in.csv", "model", name])


def test_the_same_command_continues_and_another_starts_anew(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(inference, "ROWS_PER_PART", 2)
    model = folder(BertForSequenceClassification, num_labels=2)
    source = write_csv(tmp_path / "in.csv")
    run(model, source, tmp_path / "whole.csv", "--text-column", "review")
    flags = (model, source, tmp_path / "parts.csv", "--text-column", "review")
    predicted = []
    calls = [2, *[0] * 4]
    real = inference.LoadedModel.predict

    def counted(model, rows):
        predicted.append(len(rows.dataset))
        if calls and len(predicted) > calls[0]:
            raise KeyboardInterrupt
        return real(model, rows)

    def interrupted(*more) -> list:
        predicted.clear()
        with pytest.raises(KeyboardInterrupt):
            run(*flags, *more)
        calls.pop(0)
        return [path for path in (tmp_path / "parts.csv.parts").iterdir() if path.is_dir()]

    monkeypatch.setattr(inference.LoadedModel, "predict", counted)
    (parts,) = interrupted()
    assert len(interrupted("--max-seq-length", "32")) == 2
    (model / "tokenizer_config.json").write_text("{}")  # one that was not there
    assert len(interrupted()) == 3
    (model / "tokenizer_config.json").unlink()
    labels = b'{"id2label": {"0": "x", "1": "y"},'
    for count, (name, old, new) in enumerate(
        (("config.json", b"{", labels), ("vocab.txt", b"\nparis\n", b"\nlyon.\n"))
    ):
        content = (model / name).read_bytes()
        (model / name).write_bytes(content.replace(old, new, 1))
        assert len(interrupted()) == 4 + count
        (model / name).write_bytes(content)
    part = (parts / "0.json").read_text()
    # An edited part is predicted again.
    (parts / "0.json").write_text(part.replace('"label": "', '"label": "x'))
    lock = lock_folder(parts.parent)
    for more in ((), ("--batch-size", 1)):  # another program on the same --output
        with pytest.raises(UserError, match="is in use by process"):
            run(*flags, *more)
    lock.close()
    predicted.clear()
    run(*flags)
    assert predicted == [2] * 2
    assert (tmp_path / "parts.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.parametrize("kind", [BertForSequenceClassification, BertForTokenClassification])
def test_each_line_of_a_text_file_has_a_row(folder, tmp_path, kind):
    """Also blank ones, which have no entities."""
    labels = {0: "O", 1: "B-PER"}
    model = folder(kind, id2label=labels, label2id={v: k for k, v in labels.items()})
    (tmp_path / "in.txt").write_text("Anna left\n\n  Eva \n\n")
    run(model, tmp_path / "in.txt", tmp_path / "out.jsonl", "--text-column", "text")
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row["text"] for row in rows] == ["Anna left", "", "  Eva ", ""]
    if kind is BertForTokenClassification:
        assert rows[1]["spans"] == rows[3]["spans"] == []


def test_no_column_of_the_input_is_lost(folder, tmp_path):
    """Predictions get other names; rows of JSON lines may have different keys, of any type."""
    model = folder(BertForSequenceClassification, num_labels=2)
    rows = [
        {"t": "a film", "x": [1, {"y": None}]},
        {"t": "b", "label": "mine", "predicted label": 0, "n": 10**30},
    ]
    write_json_lines(tmp_path / "in.jsonl", rows)
    run(model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--text-column", "t")
    for row, written in zip(rows, rows_of(tmp_path / "out.jsonl"), strict=True):
        assert {name: written[name] for name in row} == row
        assert (
            written["predicted predicted label"] in ("LABEL_0", "LABEL_1")
            and "probability LABEL_0" in written
        )
    parquet = pytest.importorskip("pyarrow.parquet")
    for row in rows:
        row.pop("n", row.pop("x", None))
    write_json_lines(tmp_path / "in.jsonl", rows)
    run(model, tmp_path / "in.jsonl", tmp_path / "out.parquet", "--text-column", "t")
    assert [row["label"] for row in parquet.read_table(tmp_path / "out.parquet").to_pylist()] == [
        None,
        "mine",
    ]


@pytest.mark.parametrize(
    ("encoding", "delimiter", "flags", "start"),
    [
        ("cp1252", ";", ["--delimiter", ";", "--encoding", "cp1252"], "\ufefft;n;"),
        ("cp1252", "|", ["--delimiter", "|", "--encoding", "cp1252"], "\ufefft|n|"),
        ("utf-8-sig", ";", [], "\ufefft;n;"),
        ("utf-8", "\t", [], "t\tn\t"),
        ("utf-8", ",", ["--encoding", "utf-8"], "t,n,"),
    ],
)
def test_a_spreadsheet_opens_predictions_as_it_opened_the_input(
    folder, tmp_path, encoding, delimiter, flags, start
):
    """The delimiter of the input, and UTF-8, which a spreadsheet takes for another encoding unless
    it begins with a byte order mark.
    """
    model = folder(BertForSequenceClassification, num_labels=2)
    text = f"t{delimiter}n\ncafé{delimiter}1\n"
    (tmp_path / "in.csv").write_bytes(text.encode(encoding))
    for name in ("out.csv", "out.jsonl"):
        run(model, tmp_path / "in.csv", tmp_path / name, "--text-column", "t", *flags)
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert (row["t"], row["n"]) == ("café", "1")
    written = (tmp_path / "out.csv").read_text(encoding="utf-8")
    assert written.startswith(start)
    (opened,) = csv.DictReader(written.removeprefix("\ufeff").splitlines(), delimiter=delimiter)
    assert (opened["t"], opened["n"], opened["label"]) == ("café", "1", row["label"])


def test_questions_are_answered_as_one_by_one(folder, tmp_path, capsys):
    model = folder(BertForQuestionAnswering)
    passages = ["In 1900 Anna lived in Paris.", "Boris was an old pilot in Cairo."]
    questions = ["Where did Anna live?", "What was Boris?"]
    rows = [
        {"q": q, "c": c, "n": n} for n, (q, c) in enumerate(zip(questions, passages, strict=True))
    ]
    write_json_lines(tmp_path / "in.jsonl", rows)
    run(
        model,
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        "--question-column",
        "q",
        "--context-column",
        "c",
    )
    capsys.readouterr()
    for row, answered in zip(rows, rows_of(tmp_path / "out.jsonl"), strict=True):
        assert {name: answered[name] for name in row} == row
        words = [
            "--init-checkpoint",
            model,
            "--device",
            "cpu",
            "--question",
            row["q"],
            "--context",
            row["c"],
        ]
        inference.main([str(word) for word in words])
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == [
            f"answer       {answered['answer']}",
            f"probability  {answered['probability']:.3f}",
        ]


@pytest.mark.parametrize(
    ("kind", "texts", "flags"),
    [
        (BertForMaskedLM, ("A [MASK]", ""), ("--text-column", "t")),
        (
            BertForQuestionAnswering,
            ("Anna", ""),
            ("--question-column", "t", "--context-column", "c"),
        ),
    ],
)
def test_an_empty_row_of_a_table_has_an_empty_result(folder, tmp_path, kind, texts, flags):
    lines = ["t,c", *(f"{text},{text}" for text in texts)]
    (tmp_path / "in.csv").write_text("".join(line + "\n" for line in lines))
    run(folder(kind), tmp_path / "in.csv", tmp_path / "out.csv", *flags)
    _, row = rows_of(tmp_path / "out.csv")
    assert row.get("answer", "") == row.get("filled", "") == ""


def test_masked_words_of_a_file_are_those_of_transformers(folder, tmp_path, capsys):
    model = folder(BertForMaskedLM)
    texts = [
        "The capital of France is [MASK].",
        "A [MASK] of two [MASK], and more words after them",
        "[MASK]",
    ]
    run(
        model,
        write_csv(tmp_path / "in.csv", texts),
        tmp_path / "out.jsonl",
        "--text-column",
        "review",
    )
    fill = pipeline(
        "fill-mask", model=str(model), tokenizer=bert_tokenizer(), device="cpu", top_k=5
    )
    for text, row in zip(texts, rows_of(tmp_path / "out.jsonl"), strict=True):
        expected = fill(text)
        expected = expected if isinstance(expected[0], list) else [expected]
        assert [list(words) for words in row["words"]] == [
            [e["token_str"] for e in candidates] for candidates in expected
        ]
        for words, each in zip(row["words"], expected, strict=True):
            assert list(words.values()) == pytest.approx(
                [entry["score"] for entry in each], abs=1e-5
            )
        filled = text
        for words in row["words"]:
            filled = filled.replace("[MASK]", next(iter(words)), 1)
        assert (row["review"], row["filled"]) == (text, filled)
    capsys.readouterr()
    inference.main(["--init-checkpoint", str(model), "--device", "cpu", "--fill-mask", texts[0]])
    (words,) = rows_of(tmp_path / "out.jsonl")[0]["words"]
    (answer, *lines) = capsys.readouterr().out.splitlines()
    assert answer == f"text         The capital of France is {next(iter(words))}."
    assert lines == ["n best", *(f"  {value:.3f}  {word}" for word, value in words.items())]


def test_entities_of_a_file_are_those_of_transformers(folder, tmp_path, capsys):
    labels = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}
    model = folder(
        BertForTokenClassification, id2label=labels, label2id={v: k for k, v in labels.items()}
    )
    texts = ["Anna Smith lived in Paris", "the sea , at night"]
    run(
        model,
        write_csv(tmp_path / "in.csv", texts),
        tmp_path / "out.jsonl",
        "--text-column",
        "review",
    )
    capsys.readouterr()
    options = {"tokenizer": bert_tokenizer(), "device": "cpu", "aggregation_strategy": "first"}
    classify = pipeline("token-classification", model=str(model), **options)
    for text, row in zip(texts, rows_of(tmp_path / "out.jsonl"), strict=True):
        expected = [(text[e["start"] : e["end"]], e["entity_group"]) for e in classify(text)]
        assert [(text[s["start"] : s["end"]], s["label"]) for s in row["spans"]] == expected
        assert (
            inference.main(["--init-checkpoint", str(model), "--device", "cpu", "--text", text])
            == 0
        )
        lines = capsys.readouterr().out.splitlines()
        assert lines == [
            "entities",
            *([f"  {kind}  {words}" for words, kind in expected] or ["  (none found)"]),
        ]


def mean_embeddings(model: Path, texts: list[str]) -> np.ndarray:
    """As sentence-transformers: the mean over the attention mask."""
    tokenizer = BertTokenizerFast.from_pretrained(model)
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(model).eval()(**encoded).last_hidden_state
    mask = encoded["attention_mask"][..., None].float()
    return ((hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)).numpy()


@pytest.mark.parametrize("model_class", [BertModel, BertForSequenceClassification])
def test_embeddings_of_any_encoder_are_means(folder, tmp_path, model_class):
    model = folder(model_class)
    run(
        model,
        write_csv(tmp_path / "in.csv"),
        tmp_path / "out.jsonl",
        "--text-column",
        "review",
        "--embed",
    )
    vectors = np.array([row["embedding"] for row in rows_of(tmp_path / "out.jsonl")])
    np.testing.assert_allclose(vectors, mean_embeddings(model, TEXTS), atol=1e-5)


def test_parts_of_a_file_are_known_by_the_weights_of_a_classifier_of_vectors(tmp_path):
    """It is fitted anew into the same folder, where the encoder stays."""
    weight, bias = np.ones((2, 4), np.float32), np.zeros(2, np.float32)
    model = inference.LoadedModel(tmp_path / "model", None, None)
    source = write_csv(tmp_path / "in.csv")
    words = ["--init-checkpoint", model.folder, "--input", source, "--output", tmp_path / "o.csv"]
    args = inference.parse_arguments([*map(str, words), "--text-column", "review"])
    identities = []
    for factor in (1, 1, 2):
        files = classifier_files(EmbeddingSettings(), weight * factor, bias, 16)
        for name, content in files.items():
            (model.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (model.folder / name).write_bytes(content)
        identities.append(inference.identity_of(model, args))
    assert identities[0] == identities[1] != identities[2]
