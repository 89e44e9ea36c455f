"""Models as ONNX, where onnxruntime is installed: its output against transformers'."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, TINY, VOCAB_FILE, assert_refused
from small_runs import run_here

from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.pretrained import save_pretrained
from bert_recipe.checkpoint.sentence_folders import (
    EmbeddingSettings,
    classifier_files,
    pair_classifier_files,
)
from bert_recipe.model.encoders.bert import BertConfig
from bert_recipe.model.encoders.neobert import NeoBertConfig
from bert_recipe.model.encoders.registry import make_model
from bert_recipe.tokenization.tokenizer import load_tokenizer
from scripts import export_onnx

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
TEXTS = ["one", "two words", "three more words than before in this text", "four"]


def model_folder(folder: Path, kind: str) -> torch.nn.Module:
    """Writes a model of `kind` as this project does."""
    torch.manual_seed(0)
    num_labels = 2 if "Question" in kind else 3
    config = transformers.BertConfig(**TINY | {"num_hidden_layers": 1}, num_labels=num_labels)
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    transformers.BertTokenizer(str(VOCAB_FILE)).save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "kind", ["BertForTokenClassification", "BertForQuestionAnswering", "BertModel"]
)
def test_onnxruntime_gives_the_models_logits_for_other_sizes(kind, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder, target = tmp_path / "model", tmp_path / "onnx"
    model = model_folder(folder, kind)
    if kind == "BertModel":
        path = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "x.models.Pooling"}
        first = {"idx": 0, "name": "0", "path": "", "type": "x.models.Transformer"}
        (folder / "modules.json").write_text(json.dumps([first, path]))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        prompts = folder / "config_sentence_transformers.json"
        prompts.write_text('{"prompts": {"query": "find: ", "document": ""}}')
    (folder / "calibration.json").write_text('{"temperature": 1.5, "rows": 9}')
    words = ["--init-checkpoint", folder, "--output-dir", target, "--int8"]
    export_onnx.main(list(map(str, words)))
    assert (target / "calibration.json").is_file()
    advice = "note: put the prompts before the texts (query 'find: '), which the ONNX file does not"
    out = capsys.readouterr().out
    assert "note: divide the logits by 1.5, of calibration.json, which the ONNX" in out
    assert (advice in out) == (kind == "BertModel")
    batch = transformers.AutoTokenizer.from_pretrained(target)(
        TEXTS, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        output = model(**batch)
    if kind == "BertModel":
        mask = batch["attention_mask"][:, :, None]
        expected = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
    elif kind == "BertForQuestionAnswering":
        expected = torch.stack([output.start_logits, output.end_logits], dim=2)
    else:
        expected = output.logits
    for name, tolerance in (("model.onnx", 1e-4), ("model_int8.onnx", 0.2)):
        session = onnxruntime.InferenceSession(target / name)
        (logits,) = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
        np.testing.assert_allclose(logits, expected.numpy(), atol=tolerance)


def test_a_classifier_of_texts_is_exported_as_one_of_tokens(tmp_path):
    """Its module, without the export, which takes seconds."""
    model = model_folder(tmp_path, "BertForSequenceClassification")
    ids = torch.tensor([[101, 1996, 102]])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        logits = export_onnx.wrapped_model(ModelFolder.find(tmp_path)).eval()(ids, mask)
        torch.testing.assert_close(logits, model(ids, mask).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 1000])
def test_a_layer_on_a_frozen_encoder_gives_the_outputs_of_sentence_transformers(size, tmp_path):
    """Also large numbers, which differ by more."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder, target = tmp_path / "model", tmp_path / "onnx"
    model_folder(folder, "BertModel")
    weight_CE = size * np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    files = classifier_files(EmbeddingSettings(), weight_CE, weight_CE[:, 0], 64)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    export_onnx.main(["--init-checkpoint", str(folder), "--output-dir", str(target)])
    batch = transformers.AutoTokenizer.from_pretrained(target)(
        TEXTS, padding=True, return_tensors="np"
    )
    session = onnxruntime.InferenceSession(target / "model.onnx")
    (logits,) = session.run(["logits"], dict(batch))
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(logits, expected, atol=size * 1e-4)


@pytest.mark.parametrize("head", ["sequence_classification", "sentence_embedding"])
@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**TINY, pre_layer_norm=True),
        NeoBertConfig(**{size: TINY[size] for size in SIZES}),
    ],
    ids=["pre-LayerNorm BERT", "NeoBERT"],
)
def test_models_that_transformers_lacks_are_refused_and_run_no_code(
    config, head, tmp_path, monkeypatch
):
    monkeypatch.setattr(export_onnx, "PACKAGES", ("transformers",))  # before the others are used
    folder, target = tmp_path / "model", tmp_path / "onnx"
    model = make_model(head, replace(config, labels=("a", "b")))
    save_pretrained(model, folder, load_tokenizer(VOCAB_FILE))
    words = ["--init-checkpoint", str(folder), "--output-dir", str(target)]
    result = run_here(words, export_onnx.main)
    assert_refused(result, f"a {config.model_type} model", "a model of another architecture")
    assert not target.exists()


def test_a_classifier_that_compares_two_texts_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(export_onnx, "PACKAGES", ("transformers",))
    folder = tmp_path / "model"
    model_folder(folder, "BertModel")
    parts = (np.zeros((2, 65), np.float32), np.zeros(2, np.float32), 64)
    for name, content in pair_classifier_files(EmbeddingSettings(), *parts).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    words = ["--init-checkpoint", str(folder), "--output-dir", str(tmp_path / "onnx")]
    result = run_here(words, export_onnx.main)
    assert_refused(result, "compares the vectors of two texts", "fine-tune without")


@pytest.mark.parametrize("name", ["model", "onnx"])
def test_names_that_other_libraries_do_not_take_are_refused_before_the_work(name, tmp_path):
    paths = {"model": tmp_path / "model", "onnx": tmp_path / "onnx"}
    model_folder(paths["model"], "BertForSequenceClassification")
    paths[name] = tmp_path / os.fsdecode(b"x\xff")
    if name == "model":
        (tmp_path / "model").rename(paths[name])
    words = ["--init-checkpoint", paths["model"], "--output-dir", paths["onnx"]]
    result = run_here(list(map(str, words)), export_onnx.main)
    assert_refused(result, "x\\udcff: this is a name of a file", "rename the file")


def test_the_exporters_warnings_are_not_shown():
    """In a process of its own: torch sets the levels of its loggers when it is imported."""
    code = "import logging; from scripts.export_onnx import silence_exporter; silence_exporter()"
    code += "; import torch.onnx; print(logging.getLogger('torch.onnx.x').getEffectiveLevel())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(logging.ERROR)]
