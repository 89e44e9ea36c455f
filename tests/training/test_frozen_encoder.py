"""Classifiers that are fitted to the vectors of an encoder: --frozen-encoder."""

import csv
import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from conftest import TINY, VOCAB_FILE, read_json
from encoder_cases import MODERNBERT
from glue_runs import own_files, scores_in, sentences
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, KFold
from small_runs import files_of
from transformers import AutoModel, AutoTokenizer, pipeline

import compare
import inference
import run_glue
from bert_recipe.checkpoint.record import read_record
from bert_recipe.config.fine_tuning_defaults import BY_RULE
from bert_recipe.model.encoders.registry import config_from_dict, make_model
from bert_recipe.tasks.classification.frozen import FrozenEncoder
from bert_recipe.tokenization.files import find_tokenizer
from bert_recipe.tokenization.tokenizer import load_tokenizer
from bert_recipe.training import frozen_encoder
from bert_recipe.utils.errors import UserError

STRENGTHS = [1, 3, 10, 30, 100]
BERT = {**TINY, "num_hidden_layers": 2}


def make_encoder(folder, kind):
    """A model folder with random weights, large enough that vectors of texts differ."""
    config = BERT
    vocab_size = len(VOCAB_FILE.read_text(encoding="utf-8").splitlines())
    if kind == "modernbert":
        config = {**MODERNBERT, "vocab_size": vocab_size, "initializer_range": 0.5}
    torch.manual_seed(0)
    head = "masked_lm" if kind == "modernbert" else "pretraining"
    folder.mkdir()
    (folder / "vocab.txt").write_text(VOCAB_FILE.read_text(encoding="utf-8"), encoding="utf-8")
    tokenizer = load_tokenizer(find_tokenizer(folder))
    make_model(head, config_from_dict(config)).save_pretrained(folder, tokenizer)
    return folder


def run(files, encoder, output, *flags, tasks=("--do-train", "--do-eval")):
    command = ["--init-checkpoint", encoder, "--output-dir", output, "--max-seq-length", 16]
    command += ["--device", "cpu", *own_files(files, *tasks)]
    return run_glue.main([*map(str, [*command, *flags])])


@pytest.fixture(params=["bert", "modernbert"])
def fitted(request, glue_files, tmp_path):
    encoder = make_encoder(tmp_path / "encoder", request.param)
    assert run(glue_files, encoder, tmp_path / "a", "--frozen-encoder") == 0
    return encoder, tmp_path / "a" / "encoder" / "classification"


def texts_and_labels(count, seed):
    rows = sentences(count, seed)
    return [text for text, _ in rows], ["ny"[int(label)] for _, label in rows]


def vectors_of(encoder, texts):
    """Normalized means of tokens of length 1, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = AutoModel.from_pretrained(encoder).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    means = (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.layer_norm(means, means.shape[1:]).numpy() / means.shape[1] ** 0.5


def searched(estimator, scoring, vectors, values, **strengths):
    """The best of scikit-learn's estimators in cross-validation, fitted to all rows."""
    rows = np.random.default_rng(0).permutation(len(vectors))
    folds = [(rows[train], rows[held_out]) for train, held_out in KFold(5).split(rows)]
    return GridSearchCV(estimator, strengths, scoring=scoring, cv=folds).fit(vectors, values)


def expected_probabilities(encoder):
    """By transformers and scikit-learn, for the development file."""
    train, labels = texts_and_labels(48, 0)
    dev, _ = texts_and_labels(21, 1)
    estimator = LogisticRegression(max_iter=1000)
    search = searched(estimator, "neg_log_loss", vectors_of(encoder, train), labels, C=STRENGTHS)
    return search.predict_proba(vectors_of(encoder, dev))


def predicted(path):
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    return np.array([[float(row[f"probability {label}"]) for label in "ny"] for row in rows])


def test_every_reader_computes_what_transformers_and_scikit_learn_do(fitted, glue_files, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder, folder = fitted
    expected = expected_probabilities(encoder)
    close = {"atol": 2e-4}
    np.testing.assert_allclose(predicted(folder / "eval_predictions.csv"), expected, **close)
    assert read_json(folder / "1" / "config.json")["id2label"] == {"0": "n", "1": "y"}

    files = ("--input", glue_files / "dev.csv", "--output", tmp_path / "out.csv")
    words = ("--init-checkpoint", folder, *files, "--text-column", "review", "--device", "cpu")
    assert inference.main([*map(str, words)]) == 0
    np.testing.assert_allclose(predicted(tmp_path / "out.csv"), expected, **close)

    dev, _ = texts_and_labels(21, 1)
    model = sentence_transformers.SentenceTransformer(str(folder / "1"), device="cpu")
    logits = torch.from_numpy(model.encode(dev))
    np.testing.assert_allclose(logits.softmax(1).numpy(), expected, **close)

    evaluation = ("--do-eval",)
    assert run(glue_files, folder, tmp_path / "b", tasks=evaluation) == 0
    (again,) = (tmp_path / "b").rglob("scores.json")
    assert scores_in(again.parent) == scores_in(folder)


def test_a_head_that_can_hold_the_classifier_serves_transformers_too(glue_files, tmp_path):
    encoder = make_encoder(tmp_path / "encoder", "modernbert")
    assert run(glue_files, encoder, tmp_path / "a", "--frozen-encoder") == 0
    folder = tmp_path / "a" / "encoder" / "classification" / "1"
    classify = pipeline("text-classification", model=str(folder), top_k=None, device="cpu")
    dev, _ = texts_and_labels(21, 1)
    scores = [{row["label"]: row["score"] for row in rows} for rows in classify(dev)]
    shares = np.array([[row["n"], row["y"]] for row in scores])
    np.testing.assert_allclose(shares, expected_probabilities(encoder), atol=2e-4)


def test_the_fit_is_repeated_and_compared_like_any_run(glue_files, tmp_path, capsys):
    encoder = make_encoder(tmp_path / "encoder", "bert")
    flags = ("--frozen-encoder", "--num-seeds", 2)
    for _ in range(2):
        assert run(glue_files, encoder, tmp_path / "a", *flags) == 0
    printed = capsys.readouterr().out
    assert BY_RULE not in printed and "no checkpoint" not in printed  # nothing is trained
    record = read_record(tmp_path / "a/encoder/classification/seed-42")
    assert record.hyperparameters["--learning-rate"] is None
    training = ("--num-seeds", 2, "--max-steps", 1)
    assert run(glue_files, encoder, tmp_path / "b", *training) == 0
    folders = [str(tmp_path / name / "encoder" / "classification") for name in "ab"]
    capsys.readouterr()
    compare.main(folders)
    assert "21 rows" in capsys.readouterr().out
    assert "baselines" in read_json(tmp_path / "a/encoder/classification/seed-42/scores.json")
    card = (tmp_path / "a/encoder/classification/seed-42/1/README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "SentenceTransformer" in card

    with pytest.raises(Exception, match="frozen encoder"):
        run(glue_files, encoder, tmp_path / "b", *flags)
    with pytest.raises(Exception, match="frozen encoder"):
        run(glue_files, encoder, tmp_path / "a", *training, "--resume-from-checkpoint")
    assert run(glue_files, encoder, tmp_path / "b", *flags, "--overwrite") == 0
    before = files_of(tmp_path / "b" / "encoder")
    tensors = load_file(encoder / "model.safetensors")
    tensors["bert.embeddings.word_embeddings.weight"].zero_()
    save_file(tensors, encoder / "model.safetensors")
    with pytest.raises(UserError, match="word embeddings are zero"):
        run(glue_files, encoder, tmp_path / "b", *flags, "--overwrite")
    assert files_of(tmp_path / "b" / "encoder") == before


def test_a_fitted_folder_is_a_start_and_pairs_and_folds_are_fitted(glue_files, tmp_path):
    encoder = make_encoder(tmp_path / "encoder", "bert")
    assert run(glue_files, encoder, tmp_path / "a", "--frozen-encoder") == 0
    fitted = tmp_path / "a" / "encoder" / "classification"
    assert run(glue_files, fitted, tmp_path / "b", "--frozen-encoder") == 0
    assert run(glue_files, fitted, tmp_path / "c", "--max-steps", 1) == 0
    (again,) = (tmp_path / "b").rglob("scores.json")
    assert scores_in(again.parent) == scores_in(fitted)

    mnli = ("--task-name", "mnli", "--data-dir", glue_files / "MNLI", "--do-train", "--do-eval")
    words = ["--init-checkpoint", encoder, "--output-dir", tmp_path / "d", "--frozen-encoder"]
    words += ["--max-seq-length", 16]
    assert run_glue.main([*map(str, [*words, *mnli])]) == 0
    question = ("--text", "a great ship", "--text-pair", "a stone", "--device", "cpu")
    model = tmp_path / "d" / "encoder" / "mnli"
    assert inference.main(["--init-checkpoint", str(model), *question]) == 0

    columns = own_files(glue_files, "--do-train")
    folds = ["--init-checkpoint", encoder, "--output-dir", tmp_path / "e", *columns, "--do-eval"]
    folds += [
        "--max-seq-length",
        16,
        "--num-folds",
        3,
        "--frozen-encoder",
        "--class-weights",
        "balanced",
    ]
    assert run_glue.main([*map(str, folds)]) == 0


def test_the_default_prompt_and_casing_are_part_of_the_classifier(glue_files, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = make_encoder(tmp_path / "encoder", "bert")
    options = {"prompts": {"query": "stone house "}, "default_prompt_name": "query"}
    model = sentence_transformers.SentenceTransformer(str(encoder), device="cpu", **options)
    model.save(str(tmp_path / "prompted"))
    assert run(glue_files, tmp_path / "prompted", tmp_path / "a", "--frozen-encoder") == 0
    folder = tmp_path / "a" / "prompted" / "classification"
    again = sentence_transformers.SentenceTransformer(str(folder / "1"), device="cpu")
    dev, _ = texts_and_labels(21, 1)
    shares = torch.from_numpy(again.encode(dev)).softmax(1).numpy()
    np.testing.assert_allclose(predicted(folder / "eval_predictions.csv"), shares, atol=2e-4)


PAIRS = ("--text-column", "text", "--pair-column", "pair", "--label-column", "label")


def write_pairs(path, num_rows, seed):
    """Rows with the label y if both texts are the same."""
    texts = [text for text, _ in sentences(2 * num_rows, seed)]
    rows = []
    for place, (first, second) in enumerate(zip(texts[::2], texts[1::2], strict=True)):
        rows.append(
            {"text": first, "pair": first if place % 2 else second, "label": "ny"[place % 2]}
        )
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def compared_by_transformers(encoder, rows):
    """Cosine, products and absolute differences of the means of tokens, as torch computes them."""
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = AutoModel.from_pretrained(encoder).eval()
    features = []
    for row in rows:
        means = []
        for text in (row["text"], row["pair"]):
            batch = tokenizer(text, truncation=True, max_length=16, return_tensors="pt")
            with torch.no_grad():
                means.append(model(**batch).last_hidden_state[0].mean(dim=0))
        first, second = (torch.nn.functional.normalize(mean, dim=0) for mean in means)
        parts = [(first @ second)[None], first * second * len(first) ** 0.5 / 3]
        features.append(torch.cat([*parts, (first - second).abs() / 3]).numpy())
    return np.array(features)


def test_pairs_are_compared_by_their_vectors_as_by_transformers_and_scikit_learn(tmp_path, capsys):
    encoder = make_encoder(tmp_path / "encoder", "modernbert")
    files = [tmp_path / name for name in ("train.csv", "dev.csv")]
    train, dev = (write_pairs(path, 40, seed) for seed, path in enumerate(files))
    command = ["--init-checkpoint", encoder, "--output-dir", tmp_path / "a", "--device", "cpu"]
    command += ["--max-seq-length", 16, "--train-file", files[0], "--eval-file", files[1], *PAIRS]
    command += ["--do-train", "--do-eval", "--frozen-encoder"]
    assert run_glue.main([*map(str, command)]) == 0

    labels = [row["label"] for row in train]
    estimator = LogisticRegression(max_iter=1000)
    compared = compared_by_transformers(encoder, train)
    classifier = searched(estimator, "neg_log_loss", compared, labels, C=STRENGTHS)
    expected = classifier.predict_proba(compared_by_transformers(encoder, dev))
    folder = tmp_path / "a" / "encoder" / "classification"
    np.testing.assert_allclose(predicted(folder / "eval_predictions.csv"), expected, atol=2e-4)
    assert read_json(folder / "scores.json")["accuracy"] > 0.9

    # Other readers: a prediction alone, a file, and the vectors of one text.
    words = ["--init-checkpoint", folder, "--device", "cpu"]
    table = ["--input", files[1], "--output", tmp_path / "out.csv", *PAIRS[:4]]
    assert inference.main([*map(str, [*words, *table])]) == 0
    np.testing.assert_allclose(predicted(tmp_path / "out.csv"), expected, atol=2e-4)
    again = [*words, "--output-dir", tmp_path / "b", "--do-eval", "--eval-file", files[1], *PAIRS]
    assert run_glue.main([*map(str, again)]) == 0
    (scores,) = (tmp_path / "b").rglob("scores.json")
    assert scores_in(scores.parent) == scores_in(folder)
    with pytest.raises(UserError, match="pairs of texts"):
        inference.main([*map(str, [*words, "--text", "a great ship"])])
    card = (folder / "1" / "README.md").read_text()
    assert "--text-pair" in card and "logits" not in card and "pipeline_tag" in card
    assert "| samples | 40 |" in card

    # Its scores stand beside those of a trained encoder, also if a run is resumed.
    capsys.readouterr()
    command[command.index(tmp_path / "a")] = tmp_path / "c"
    command[command.index("--frozen-encoder")] = "--max-steps"
    for steps in (1, 2):
        assert run_glue.main([*map(str, [*command, steps, "--resume-from-checkpoint"])]) == 0
        output = capsys.readouterr().out
        assert "note: --frozen-encoder has accuracy" in output
        assert "try --frozen-encoder, or more labelled rows" in output
        beside = read_json(tmp_path / "c" / "encoder" / "classification" / "scores.json")
        assert beside["baselines"]["--frozen-encoder"]["accuracy"] == scores_in(folder)["accuracy"]


def test_all_seeds_of_a_trained_encoder_stand_beside_one_fit_of_its_vectors(
    glue_files, tmp_path, monkeypatch
):
    encoder = make_encoder(tmp_path / "encoder", "bert")
    assert run(glue_files, encoder, tmp_path / "a", "--frozen-encoder") == 0
    expected = scores_in(tmp_path / "a" / "encoder" / "classification")["accuracy"]
    fits, fit = [], FrozenEncoder.fit
    monkeypatch.setattr(FrozenEncoder, "fit", lambda *args: fits.append(1) or fit(*args))
    assert run(glue_files, encoder, tmp_path / "b", "--max-steps", 1, "--num-seeds", 2) == 0
    paths = [*(tmp_path / "b").rglob("scores.json")]
    assert len(paths) == 3 and len(fits) == 1
    for path in paths:
        assert read_json(path)["baselines"]["--frozen-encoder"]["accuracy"] == expected


def test_a_signal_in_a_fit_names_no_flag_that_a_fit_refuses(
    glue_files, tmp_path, monkeypatch, capsys
):
    encoder = make_encoder(tmp_path / "encoder", "bert")
    stop = partial(os.kill, os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(frozen_encoder, "predict_all", lambda *_: stop())
    assert run(glue_files, encoder, tmp_path / "a", "--frozen-encoder") == 0
    out = capsys.readouterr().out
    assert out.endswith("stopped by a signal: rerun the same command to resume\n")


def test_the_fit_that_is_repeated_to_predict_has_the_calibration_of_before(glue_files, tmp_path):
    encoder = make_encoder(tmp_path / "encoder", "bert")
    both = ("--do-train", "--do-predict")
    folder = tmp_path / "a" / "encoder" / "classification"
    assert run(glue_files, encoder, tmp_path / "a", "--frozen-encoder", tasks=both) == 0
    before = np.log(predicted(folder / "predictions.csv"))
    (folder / "1" / "calibration.json").write_text('{"temperature": 2.0, "rows": 9}')
    assert run(glue_files, encoder, tmp_path / "a", "--frozen-encoder", tasks=both) == 0
    after = np.log(predicted(folder / "predictions.csv"))
    margins = [values[:, 1] - values[:, 0] for values in (before, after)]
    np.testing.assert_allclose(margins[1], margins[0] / 2, atol=1e-4)


@pytest.mark.parametrize("way", [("--frozen-encoder",), ("--max-steps", "1")])
def test_characters_that_the_vocabulary_lacks_are_named_once(tmp_path, capsys, way):
    encoder, table = make_encoder(tmp_path / "encoder", "bert"), tmp_path / "train.csv"
    table.write_text("text,label\n" + "😀 one,y\n🙃 two,n\n" * 8, encoding="utf-8")
    command = ["--init-checkpoint", encoder, "--output-dir", tmp_path / "out", "--do-train"]
    command += ["--train-file", table, "--text-column", "text", "--label-column", "label"]
    assert run_glue.main([*map(str, command), "--num-seeds", "2", "--device", "cpu", *way]) == 0
    assert capsys.readouterr().out.count("of the training file are [UNK]") == 1


NUMBERS = ("--regression", "--label-column", "number")
LABELS = ("--task-name", "multi-label", "--label-column", "good", "short", "never", "always")
TEXTS = ("--text-column", "text")


def write_table(path, num_rows, seed, num_texts=1):
    """Rows with a number around 2,000, and four labels, of which no text has one, and all texts
    have another.
    """
    texts = sentences(num_rows, seed)
    others = [text for text, _ in sentences(num_rows, seed + 10)]
    rows = []
    for (text, good), other in zip(texts, others, strict=True):
        row = {"text": text, "number": 2000 + 10 * len(text.split()) - 35 * int(good)}
        row |= {"good": good, "short": int(len(text) < 30), "never": 0, "always": 1}
        if num_texts == 2:
            row["pair"] = text if row["short"] else other
            row["number"] = 2000 + 5 * row["short"]
        rows.append(row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def expected_outputs(flags, vectors, rows, scored):
    """Numbers, or the probability of each label, by scikit-learn."""
    if flags == NUMBERS:
        values = [row["number"] for row in rows]
        alphas = [10, 3, 1, 0.3, 0.1, 0.03]
        search = searched(Ridge(), "neg_mean_squared_error", vectors, values, alpha=alphas)
        return search.predict(scored)[:, None]
    losses, fits = [], []
    for strength in STRENGTHS:
        estimator, loss, columns = LogisticRegression(C=strength, max_iter=1000), 0, []
        for label in ("good", "short"):
            values = [int(row[label]) for row in rows]
            search = searched(estimator, "neg_log_loss", vectors, values)
            loss -= search.best_score_
            columns.append(search.predict_proba(scored)[:, 1])
        losses.append(loss)
        constant = 0.5 / (len(rows) + 1)
        columns += [np.full(len(scored), share) for share in (constant, 1 - constant)]
        fits.append(np.stack(columns, axis=1))
    return fits[int(np.argmin(losses))]


def outputs_in(path, flags, column="score"):
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = [column] if flags == NUMBERS else [f"probability {label}" for label in LABELS[3:]]
    return np.array([[float(row[name]) for name in names] for row in rows])


@pytest.mark.parametrize("flags", [NUMBERS, LABELS], ids=["numbers", "labels"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_numbers_and_labels_are_those_of_scikit_learn_for_every_reader(kind, flags, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = make_encoder(tmp_path / "encoder", kind)
    train, dev = tmp_path / "train.csv", tmp_path / "dev.csv"
    rows, scored = write_table(train, 60, 0), write_table(dev, 20, 1)
    command = ["--init-checkpoint", encoder, "--output-dir", tmp_path / "a", "--device", "cpu"]
    command += ["--max-seq-length", 16, "--train-file", train, "--eval-file", dev, *TEXTS, *flags]
    command += ["--do-train", "--do-eval", "--do-predict", "--predict-file", dev]
    assert run_glue.main([*map(str, command), "--frozen-encoder"]) == 0

    texts = [row["text"] for row in scored]
    vectors = vectors_of(encoder, [row["text"] for row in rows])
    expected = expected_outputs(flags, vectors, rows, vectors_of(encoder, texts))
    close = {"rtol": 1e-5, "atol": 5e-4}
    (scores,) = (tmp_path / "a").rglob("scores.json")
    folder = scores.parent
    written = outputs_in(folder / "eval_predictions.csv", flags, "prediction")
    np.testing.assert_allclose(written, expected, **close)
    np.testing.assert_allclose(outputs_in(folder / "predictions.csv", flags), expected, **close)
    words = ["--init-checkpoint", folder, "--device", "cpu", *TEXTS]
    assert (
        inference.main([*map(str, [*words, "--input", dev, "--output", tmp_path / "o.csv"])]) == 0
    )
    np.testing.assert_allclose(outputs_in(tmp_path / "o.csv", flags), expected, **close)

    model = sentence_transformers.SentenceTransformer(str(folder / "1"), device="cpu")
    outputs = torch.from_numpy(model.encode(texts))
    outputs = outputs if flags == NUMBERS else outputs.sigmoid()
    config, card = read_json(folder / "1" / "config.json"), (folder / "1" / "README.md").read_text()
    names = ["score"] if flags == NUMBERS else list(LABELS[3:])
    order = [config["label2id"][name] for name in names]
    np.testing.assert_allclose(outputs.numpy()[:, order], expected, **close)
    assert len(config["id2label"]) == len(names) and "by a linear layer on" in card
    problem = "regression" if flags == NUMBERS else "multi_label_classification"
    assert config["problem_type"] == problem
    if kind == "modernbert":
        options = {"model": str(folder / "1"), "top_k": None, "device": "cpu"}
        classify = pipeline("text-classification", **options)
        shares = [{entry["label"]: entry["score"] for entry in row} for row in classify(texts)]
        values = [[row[name] for name in names] for row in shares]
        np.testing.assert_allclose(values, expected, **close)


@pytest.mark.parametrize("flags", [NUMBERS, LABELS], ids=["numbers", "labels"])
def test_their_score_stands_beside_that_of_a_trained_encoder(flags, tmp_path, capsys):
    """Of pairs; the run that trains is too short to learn."""
    encoder = make_encoder(tmp_path / "encoder", "modernbert")
    train, dev = tmp_path / "train.csv", tmp_path / "dev.csv"
    write_table(train, 60, 0, num_texts=2)
    write_table(dev, 40, 1, num_texts=2)
    command = ["--init-checkpoint", encoder, "--device", "cpu", "--max-seq-length", 16, *TEXTS]
    command += ["--train-file", train, "--eval-file", dev, "--pair-column", "pair", *flags]
    stored = []
    for name, way in (("a", ["--frozen-encoder"]), ("b", ["--max-steps", 1])):
        words = [*command, *way, "--output-dir", tmp_path / name, "--do-train", "--do-eval"]
        assert run_glue.main([*map(str, words)]) == 0
        (path,) = (tmp_path / name).rglob("scores.json")
        stored.append(read_json(path))
    metric = "pearson" if flags == NUMBERS else "f1_micro"
    beside = stored[1]["baselines"]["--frozen-encoder"][metric]
    assert beside == pytest.approx(stored[0][metric], abs=1e-4) and beside > 0.9
    assert f"note: --frozen-encoder has {metric}" in capsys.readouterr().out
