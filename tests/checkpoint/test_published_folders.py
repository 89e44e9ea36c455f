"""A folder that is published as docs/after_training.md says, without the state of its run, serves
every reader; of a folder with a manifest, what is read is verified, and nothing else.
"""

import itertools
import re
import shlex
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import transformers
from conftest import NO_DROPOUT, ROOT, TINY, VOCAB_FILE, assert_refused, read_json
from small_runs import run_here

import convert_checkpoint
import inference
import run_glue
from bert_recipe.checkpoint.folder import STATE_SUFFIXES, BadCheckpoint, verify_checkpoint
from bert_recipe.checkpoint.model_folder import ModelFolder

TEXT = ("--text", "a great ship", "--device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A classifier of a run of two updates: a step with the state of the run."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**TINY, **NO_DROPOUT})
    transformers.BertForMaskedLM(config).save_pretrained(folder / "model")
    shutil.copyfile(VOCAB_FILE, folder / "model" / "vocab.txt")
    (folder / "texts.csv").write_text("text,label\na great ship,good\nan awful river,bad\n" * 4)
    result = glue(folder, folder / "model", *training(folder), "--train-batch-size", 4)
    assert result.returncode in (None, 0), result.stderr
    return folder


def glue(folder: Path, source: Path, *flags):
    words = ("--text-column", "text", "--label-column", "label", "--init-checkpoint", source)
    words += ("--output-dir", folder / "results", "--max-seq-length", 16)
    return run_here((*words, *flags, "--device", "cpu", "--show-config", "false"), run_glue.main)


def training(folder: Path) -> tuple:
    return "--do-train", "--train-file", folder / "texts.csv", "--max-steps", 2


@pytest.fixture
def published(trained, tmp_path) -> Path:
    """The step as the page's command uploads it."""
    page = (ROOT / "docs" / "after_training.md").read_text()
    words = shlex.split(re.search(r"`(hf upload .*?)`", page)[1])
    patterns = [after for flag, after in itertools.pairwise(words) if flag == "--exclude"]
    shutil.copytree(trained / "results" / "model" / "classification" / "2", tmp_path / "published")
    names = [path.name for path in (tmp_path / "published").iterdir()]
    left_out = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    assert sorted(left_out) == ["model_optimizer.safetensors", "model_progress.json"]
    assert all(
        any(fnmatch(f"x{suffix}", pattern) for pattern in patterns) for suffix in STATE_SUFFIXES
    )
    for name in left_out:
        (tmp_path / "published" / name).unlink()
    return tmp_path / "published"


def test_all_readers_take_a_published_folder_and_a_run_cannot_resume_it(
    trained, published, tmp_path
):
    assert run_here(("--init-checkpoint", published, *TEXT), inference.main).returncode in (None, 0)
    scoring = ("--do-eval", "--eval-file", trained / "texts.csv")
    for output, flags in ((trained, training(trained)), (tmp_path, scoring)):
        result = glue(output, published, *flags)
        assert result.returncode in (None, 0), result.stderr
    elsewhere = glue(tmp_path, published, *scoring, "--from-checkpoint", published)
    assert elsewhere.returncode in (None, 0), elsewhere.stderr
    convert_checkpoint.main(["average", str(published), str(published), str(tmp_path / "average")])
    assert ModelFolder.find(tmp_path / "average").config == ModelFolder.find(published).config
    resumed = glue(trained, published, *training(trained), "--from-checkpoint", published)
    assert_refused(resumed, str(published), "model_optimizer.safetensors")


def test_of_a_model_what_is_read_is_verified_and_nothing_else(trained, tmp_path):
    """The newest step whose model is whole serves, though its state is damaged."""
    steps = tmp_path / "classification"
    shutil.copytree(trained / "results" / "model" / "classification", steps)
    for name in ("model_optimizer.safetensors", "model_progress.json"):
        (steps / "2" / name).write_bytes(b"damaged")
    (steps / "2" / "notes.txt").write_text("mine")
    (steps / "2" / "onnx").mkdir()
    (steps / "2" / "onnx" / "tokenizer.json").write_text("{}")
    assert ModelFolder.find(steps / "2").path == steps / "2"
    with pytest.raises(BadCheckpoint, match="model_optimizer"):
        verify_checkpoint(steps / "2")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{}"),
        ("vocab.txt", "x"),
        ("tokenizer.json", "{}"),
        ("special_tokens_map.json", '{"cls_token": "a"}'),
        ("added_tokens.json", '{"ship": 5}'),
        ("modules.json", "[]"),
        ("sentence_bert_config.json", '{"do_lower_case": true}'),
    ],
)
def test_a_file_that_would_change_what_a_model_says_is_refused(trained, tmp_path, file, content):
    """Also one that was added to the folder, with both ways out."""
    step = tmp_path / "2"
    shutil.copytree(trained / "results" / "model" / "classification" / "2", step)
    is_new = not (step / file).exists()
    (step / file).write_text(content)
    says = f"does not list {file}" if is_new else f"{file} is damaged"
    with pytest.raises(BadCheckpoint, match=f"{says}.*remove manifest.json if you changed"):
        ModelFolder.find(step)
    (step / "manifest.json").unlink()
    assert ModelFolder.find(step).path == step
    assert read_json(trained / "results" / "model" / "classification" / "2" / "manifest.json")


@pytest.mark.parametrize("page", ["README.md", "docs/choose_a_model.md"])
def test_a_download_as_pages_say_has_all_that_is_read(page, monkeypatch):
    """Each value after the first of an option would be a file to download instead."""
    huggingface_hub = pytest.importorskip("huggingface_hub", minversion="1.0")
    from huggingface_hub.cli.hf import app

    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.cli.download.snapshot_download",
        lambda **options: asked.update(options) or "folder",
    )
    (command,) = re.findall(r"^hf (download .*)$", (ROOT / page).read_text(), re.MULTILINE)
    app(shlex.split(command), standalone_mode=False)
    needed = {"config.json", "modules.json", "1_Pooling/config.json", "tokenizer.json"}
    needed |= {"vocab.txt", "model.safetensors", "model-00001-of-00002.safetensors"}
    others = {"pytorch_model.bin", "tf_model.h5", "onnx/model.onnx", "flax_model.msgpack"}
    others |= {"rust_model.ot", "openvino/openvino_model.xml", "README.md", ".gitattributes"}
    chosen = huggingface_hub.utils.filter_repo_objects(
        needed | others, allow_patterns=asked["allow_patterns"]
    )
    assert set(chosen) == needed
