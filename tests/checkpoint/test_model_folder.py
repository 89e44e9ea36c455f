"""A model folder is opened once, and its own name is that of its folder of results."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from conftest import (
    BERT_VOCAB_FILE,
    NO_DROPOUT,
    ROOT,
    TINY,
    VOCAB_FILE,
    read_json,
)
from small_runs import run_here
from tokenizer_kinds import file_of

import inference
import run_glue
from bert_recipe.checkpoint.model_choice import choose_model
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.start import find_starts
from bert_recipe.config import ModelSelection, StartConfig

TINY_CONFIG = read_json(ROOT / "bert_configs" / "bert-tiny-uncased.json")


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("table") / "texts.csv"
    path.write_text("text,label\na great ship,good\nan awful river,bad\n" * 4)
    return path


def save(folder: Path, tokenizer_file: Path, **config) -> Path:
    """A model of transformers with the tokenizer in a file."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**config)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    name = "tokenizer.json" if tokenizer_file.suffix == ".json" else "vocab.txt"
    shutil.copyfile(tokenizer_file, folder / name)
    if tokenizer_file.suffix == ".json":
        declared = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    return folder


def glue(output: Path, table: Path, source: Path, *flags):
    """A run of two updates."""
    files = ("--train-file", table, "--label-column", "label")
    sizes = ("--max-steps", 2, "--train-batch-size", 4, "--max-seq-length", 16)
    words = ("--do-train", "--init-checkpoint", source, "--output-dir", output)
    words += ("--text-column", "text", "--device", "cpu", "--show-config", "false")
    return run_here((*words, *files, *sizes, *flags), run_glue.main)


def test_two_models_of_one_shape_have_two_folders_and_flags_keep_their_names(tmp_path):
    for name in ("law", "medicine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(TINY_CONFIG))
        shutil.copyfile(BERT_VOCAB_FILE, tmp_path / name / "vocab.txt")
        source = ModelFolder(tmp_path / name)
        named = ModelSelection("bert-tiny-uncased")
        of_file = ModelSelection(config_file=ROOT / "bert_configs" / "bert-tiny-uncased.json")
        assert choose_model(ModelSelection(), source).name == name
        assert choose_model(named, source).name == "bert-tiny-uncased"
        assert choose_model(of_file, source).name == "bert-tiny-uncased"


@pytest.mark.parametrize(
    ("path", "steps", "name"),
    [
        ("models/law", None, "law"),
        ("results/law/phase2/100", "results/law/phase2", "law"),
        ("results/law/squad/best", "results/law/squad", "law"),
        ("results/law/squad/seed-7/best", "results/law/squad/seed-7", "law"),
        ("hub/models--google-bert--bert-base-cased/snapshots/cd5ef92", None, "bert-base-cased"),
    ],
)
def test_the_name_is_that_of_the_model_wherever_its_folder_lies(tmp_path, path, steps, name):
    (tmp_path / path).mkdir(parents=True)
    if steps:
        (tmp_path / steps / "100").mkdir(exist_ok=True)
        (tmp_path / steps / "100" / "manifest.json").write_text("{}")
    assert ModelFolder(tmp_path / path).name == name


def test_a_folder_without_a_tokenizer_gets_no_vocabulary_by_its_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    with pytest.raises(Exception, match="has no tokenizer: copy it there"):
        choose_model(ModelSelection(), ModelFolder(tmp_path))


@pytest.fixture
def parses(monkeypatch) -> dict[str, int]:
    """How often `tokenizer.json` was parsed: by json, and by the library that uses it."""
    counts = {"json": 0, "library": 0}
    loads, library = json.loads, tokenizers.Tokenizer

    def counting_loads(text, **kwargs):
        counts["json"] += '"pre_tokenizer"' in str(text)
        return loads(text, **kwargs)

    class CountingTokenizer:
        def __new__(cls, model):
            return library(model)

        @staticmethod
        def from_str(text):
            counts["library"] += 1
            return library.from_str(text)

    monkeypatch.setattr(json, "loads", counting_loads)
    monkeypatch.setattr(tokenizers, "Tokenizer", CountingTokenizer)
    return counts


def test_tokenizer_json_is_parsed_once_by_each_program(tmp_path, table, parses):
    """And once more by the library that uses it."""
    config = {**TINY, **NO_DROPOUT, "vocab_size": 640}
    source = save(tmp_path / "law", file_of("bpe"), **config)
    output = tmp_path / "results"
    results = output / "law" / "classification"
    save_each = ("--num-steps-per-checkpoint", 1)
    text = ("--init-checkpoint", results, "--text", "a great ship", "--device", "cpu")
    programs = [
        lambda: glue(output, table, source, *save_each, "--steps-this-run", 1),
        lambda: glue(output, table, source, "--resume-from-checkpoint"),
        lambda: run_here(text, inference.main),
    ]
    for program in programs:
        parses.update(json=0, library=0)
        result = program()
        assert result.returncode in (None, 0), result.stderr
        assert parses == {"json": 1, "library": 1}


def test_seeds_share_the_folder_of_their_starting_weights(tmp_path):
    """Also where each seed has a folder of its own to resume."""
    source = save(tmp_path / "model", VOCAB_FILE, **TINY)
    config = StartConfig(
        from_checkpoint=tmp_path / "out",
        last_step_of_checkpoint="auto",
        from_pretrained_params=source,
    )
    first, second = find_starts(config, ["seed-1", "seed-2"]).values()
    assert first.named != second.named
    assert first.weights is second.weights is not None
