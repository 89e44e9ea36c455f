"""The commands and programs of docs/, on small files and with few steps."""

import csv
import re
import shlex
import subprocess
from collections import Counter

import pytest
import torch
from conftest import ROOT, TINY, VOCAB_FILE
from small_runs import run_here
from tokenizer_kinds import file_of, ours
from transformers import (
    AutoModel,
    BertConfig,
    BertForPreTraining,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

import inference
import report
import run_glue
import run_ner
import run_pretraining
from bert_recipe.tasks.classification.files import read_examples
from bert_recipe.tasks.classification.specs import custom_spec
from bert_recipe.tasks.classification.task import find_labels
from data import prepare

PROGRAMS = {
    "run_glue.py": run_glue.main,
    "run_ner.py": run_ner.main,
    "run_pretraining.py": run_pretraining.main,
    "inference.py": inference.main,
    "data/prepare.py": prepare.main,
    "report.py": report.main,
}

# Flags that would take long; the rest of each command is the page's.
SMALL = {"--max-steps": "2", "--vocab-size": "600", "--batch-size": "4", "--epochs": "1"}
SMALL |= {"--num-seeds": "2"}
SMALL |= {"--bert-config": str(ROOT / "bert_configs" / "bert-tiny-uncased.json")}


def blocks(title: str, language: str) -> list[str]:
    """The code blocks of a recipe."""
    names = ("fine_tuning.md", "pretraining.md", "continue_pretraining.md", "messy_table.md")
    pages = [ROOT / "README.md", *(ROOT / "docs" / name for name in names)]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    recipe = re.search(
        rf"^##? {re.escape(title)}\n(.*?)(?=^##? |\Z)", text, re.MULTILINE | re.DOTALL
    )[1]
    return re.findall(rf"^```{language}\n(.*?)^```", recipe, re.MULTILINE | re.DOTALL)


def run_recipe(title: str, *flags: str) -> None:
    """Runs the commands in the working folder, those that train with more `flags`."""
    block = blocks(title, "bash")[0]
    for command in block.replace("\\\n", " ").splitlines():
        if command.startswith(("git", "hf download", "source", "pip")):
            continue
        command = command.partition(" #")[0]
        echo = subprocess.run(
            ["bash", "-c", f"echo {command}"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        # Presets.
        python, program, *words = shlex.split(echo.stdout if "$(" in command else command)
        assert python == "python3"
        words = [
            SMALL.get(flag, word) for flag, word in zip([program, *words], words, strict=False)
        ]
        if "--do-train" in words:
            words += flags
        assert not PROGRAMS[program](words), command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the recipes start from, and where the results of all of them are."""
    folder = tmp_path_factory.mktemp("cookbook")
    torch.manual_seed(0)
    config = BertConfig(**{**TINY, "max_position_embeddings": 128})
    BertForPreTraining(config).save_pretrained(folder / "bert-base-uncased")
    (folder / "bert-base-uncased" / "vocab.txt").write_bytes(VOCAB_FILE.read_bytes())
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    ids = {
        f"{role}_token_id": number
        for number, role in enumerate(("pad", "bos", "eos", "cls", "sep"))
    }
    modern = ModernBertConfig(
        vocab_size=-(-ours("modernbert").vocab_size // 64) * 64, **sizes, **ids
    )
    ModernBertForMaskedLM(modern).save_pretrained(folder / "ModernBERT-base")
    (folder / "ModernBERT-base" / "tokenizer.json").write_bytes(file_of("modernbert").read_bytes())
    for name, count in (("train.csv", 24), ("dev.csv", 12), ("new.csv", 24)):
        with (folder / name).open("w", newline="") as file:
            rows = [
                (f"review {number}, with a comma", ("one", "five")[number % 2])
                for number in range(count)
            ]
            csv.writer(file).writerows([("review", "stars"), *rows])
    (folder / "texts").mkdir()
    for number in range(12):
        sentences = [
            f"Der {word} steht am {number + 1}. Haus und wartet."
            for word in ("Hund", "Mann", "Baum", "Wagen")
        ]
        (folder / "texts" / f"{number}.txt").write_text(" ".join(sentences * 6), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_readmes_first_command_trains_on_the_table_that_ships(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(folder / "bert-base-uncased")
    run_recipe("Try it on a table", "--max-steps", "10")
    out = capsys.readouterr().out
    assert "predictions are wrong" in out
    assert "tf-idf + logistic regression" in out
    assert "most confident mistakes" in (tmp_path / "results" / "report.html").read_text().lower()


def test_the_table_that_ships_has_the_rows_that_its_page_names(capsys):
    path = ROOT / "data" / "sample" / "authors.csv"
    spec = custom_spec("text", None, "author")
    examples = read_examples(path, spec, labelled=True)
    page = " ".join((path.parent / "README.md").read_text(encoding="utf-8").split())
    assert len(examples) == 500
    assert set(find_labels(examples, spec)) == {"Carroll", "Shelley", "Stevenson"}
    twice = Counter(examples.texts)
    lines = [
        line
        for text, line in zip(examples.texts, examples.lines, strict=True)
        if twice[text] > 1 and examples.texts.index(text) + 2 == line
    ]
    assert f"twice with two authors (lines {', '.join(map(str, lines))} and" in page


def test_the_messy_table_that_ships_has_the_messages_of_its_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / "bert_configs").symlink_to(ROOT / "bert_configs")
    for title, code, small in (
        ("What does the program find?", 2, ()),
        ("How do I say what the file is?", 0, ("--max-steps", "1", "--no-baseline")),
    ):
        (command,) = blocks(title, "bash")
        _, program, *words = shlex.split(command.replace("\\\n", " "))
        done = run_here([*words, *small], PROGRAMS[program])
        printed = " ".join((done.stdout + done.stderr).split())
        (messages,) = blocks(title, "text")
        assert done.returncode == code, done.stderr
        assert all(
            message in printed for message in re.split(r" (?=note:)", " ".join(messages.split()))
        ), printed


def test_train_on_my_own_table(folder, capsys):
    run_recipe("How do I train on my own table?")
    results = folder / "results" / "bert-base-uncased" / "classification"
    assert (results / "scores.json").is_file()
    assert len((results / "predictions.csv").read_text().splitlines()) == 25
    assert re.search(r"^label +(one|five)$", capsys.readouterr().out, re.MULTILINE)


def test_pre_train_on_my_language(folder, capsys):
    run_recipe("When do I take BERT with LAMB in two phases?")
    assert (
        folder / "german" / "results" / "custom" / "phase2" / "2" / "model.safetensors"
    ).is_file()
    assert re.search(
        r"^text +Berlin ist die \S+ von Deutschland\.$", capsys.readouterr().out, re.MULTILINE
    )


def test_continue_pre_training_on_my_domain_and_use_the_result_in_transformers(folder, capsys):
    run_recipe("How do I continue a BERT or ModernBERT?")
    results = folder / "domain" / "results" / "ModernBERT-base"
    assert (results / "classification" / "scores.json").is_file()
    AutoModel.from_pretrained(results / "phase1" / "2")
    if not (folder / "results").exists():
        run_recipe("How do I train on my own table?")
    (newest,) = (
        path.name
        for path in (folder / "results/bert-base-uncased/classification").iterdir()
        if path.is_dir()
    )
    (code,) = blocks("How do I train on my own table?", "python")
    assert "classification/375" in code
    code = code.replace("classification/375", f"classification/{newest}")
    exec(compile(code, "use.py", "exec"), {})  # noqa: S102 # the page's
    assert "'label': " in capsys.readouterr().out
