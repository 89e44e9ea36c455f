"""The package in a project that has modules of the same names as the folders here."""

import copy
import pickle
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, TINY, VOCAB_FILE, run_program
from hugging_face import SIZES

import bert_recipe
from bert_recipe import BertForSequenceClassification, BertModel, NorMuon
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.sentence_folders import (
    EmbeddingSettings,
    classifier_files,
    read_classifier,
)
from bert_recipe.utils import errors, requirements


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    words += ["--wheel-dir", str(folder)]
    subprocess.run([sys.executable, *words, ROOT], check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


def test_the_wheel_has_only_the_package_with_the_files_that_it_reads(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"bert_recipe"}
    for name in (
        "py.typed",
        "vocab/bert-base-uncased-vocab.txt",
        "bert_configs/modernbert-base.json",
    ):
        assert f"bert_recipe/{name}" in names
    tracked = subprocess.run(
        ["git", "ls-files", "bert_recipe"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()} <= {*names}


def test_the_page_runs_in_a_project_with_modules_of_the_same_names(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "installed")
    for name in ("utils", "data", "tasks", "metrics", "loss", "model", "tokenizer", "optimizer"):
        (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**TINY))
    theirs.save_pretrained(tmp_path / "bert-base-uncased")
    transformers.BertTokenizer(str(VOCAB_FILE)).save_pretrained(tmp_path / "bert-base-uncased")
    page = (ROOT / "docs" / "use_as_a_library.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    checks = """
import bert_recipe
assert "installed" in bert_recipe.__file__
assert utils.VALUE == data.VALUE == tasks.VALUE == metrics.VALUE == own_loss.VALUE == 1
ids = their_tokenizer(texts, padding=True, return_tensors="pt")
fresh = BertForSequenceClassification.from_pretrained("my-model")
expected = AutoModelForSequenceClassification.from_pretrained("my-model")(**ids).logits
torch.testing.assert_close(fresh(**ids).logits, expected, rtol=1e-4, atol=1e-5)
from bert_recipe.config.start import BERT_MODELS
assert "bert-large-uncased" in BERT_MODELS
"""
    program = "".join(["import utils, data, tasks, metrics, loss as own_loss\n", *examples, checks])
    (tmp_path / "own.py").write_text(program)
    environment = {"PYTHONPATH": str(tmp_path / "installed")}
    result = run_program(tmp_path / "own.py", env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_names_of_the_package():
    for name in bert_recipe.__all__:
        assert getattr(bert_recipe, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = bert_recipe.Nothing


def test_the_dependencies_and_extras_are_those_of_requirements_txt():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    packages = {*project["dependencies"], *extras["data"], *extras["tasks"], *extras["report"]}
    listed = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    needed = set(re.findall(r"^[\w-]+>=[\d.]+", listed, re.MULTILINE))
    assert {name for name in packages if not name.startswith("torch")} == needed
    assert any(name.startswith(requirements.TORCH) for name in packages)
    base = {re.match(r"[\w-]+", name)[0].replace("-", "_") for name in project["dependencies"]}
    assert base == {*errors.REQUIRED_PACKAGES}
    assert not base & errors.OPTIONAL_PACKAGES.keys()


def test_versions_agree():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    versions = {
        bert_recipe.__version__,
        re.search(r"^version: (.*)$", cited, re.MULTILINE)[1],
        re.search(r"^## (\S+)", changes, re.MULTILINE)[1],
    }
    assert len(versions) == 1


@pytest.mark.parametrize("kind", ["Bert", "ModernBert", "Roberta", "Electra"])
def test_hidden_states_are_those_of_transformers(kind, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    theirs = getattr(transformers, f"{kind}Model")(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = getattr(bert_recipe, f"{kind}Model").from_pretrained(tmp_path)
    assert not ours.training
    ids = torch.randint(10, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids, output_hidden_states=True).hidden_states
    states = ours(ids, output_hidden_states=True).hidden_states
    assert len(states) == len(expected)
    for state, other in zip(states, expected, strict=True):
        torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-5)


def test_another_number_of_labels_gives_a_new_head_and_a_saved_model_is_the_same(tmp_path, capsys):
    config = transformers.BertConfig(**SIZES, num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "theirs")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "theirs", num_labels=5)
    assert "classifier.weight" in capsys.readouterr().out
    assert model.config.num_labels == 5
    model.save_pretrained(tmp_path / "ours")
    ids = torch.randint(10, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_model_saved_in_the_folder_of_another_is_what_is_read(tmp_path):
    """Also where the other one's vectors went through a classifier of sentence-transformers."""
    model = BertForSequenceClassification(bert_recipe.BertConfig(**TINY, labels=("a", "b")))
    weights, biases = np.ones((3, 32), np.float32), np.zeros(3, np.float32)
    for name, content in classifier_files(EmbeddingSettings(), weights, biases, 64).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    model.save_pretrained(tmp_path)
    assert read_classifier(tmp_path) is None and not (tmp_path / "modules.json").exists()


def test_an_opened_folder_can_be_copied_and_pickled(tmp_path):
    BertModel(bert_recipe.BertConfig(**TINY)).save_pretrained(tmp_path)
    folder = ModelFolder(tmp_path)
    names = set(folder.tensors)
    for again in (copy.copy(folder), copy.deepcopy(folder), pickle.loads(pickle.dumps(folder))):  # noqa: S301
        assert again.config == folder.config and set(again.tensors) == names


def test_a_text_is_no_list_of_labels():
    with pytest.raises(ValueError, match="labels are 'ab': they must be texts"):
        bert_recipe.BertConfig(**TINY, labels="ab")


def test_muon_without_its_groups_says_what_to_give():
    model = BertModel(bert_recipe.BertConfig(**{**TINY, "vocab_size": 90}))
    with pytest.raises(ValueError, match="NorMuon takes the groups of muon_groups"):
        NorMuon(model.parameters(), lr=0.1)
