"""A dense layer before the classifier that the starting weights lack begins with outputs of mean 0
and variance 1 on the texts to learn.
"""

from functools import partial

import pytest
import torch
from conftest import NO_DROPOUT, TINY, VOCAB_FILE
from encoder_cases import DISTILBERT
from glue_runs import own_files, sentences
from processes import exit_codes, fine_tune_on_ports, free_port, start_several
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import run_glue
from bert_recipe.model.encoders.registry import config_from_dict, make_model
from bert_recipe.tokenization.files import find_tokenizer
from bert_recipe.tokenization.tokenizer import load_tokenizer

# The new dense layers of encoders without a head.
LAYERS = {"bert": "bert.pooler.dense", "distilbert": "pre_classifier"}
LAYERS |= {"electra": "classifier.dense", "roberta": "classifier.dense"}


def make_encoder(folder, kind="bert", head="sentence_embedding"):
    """A folder as of sentence-transformers, or with a pooler."""
    config = {**(DISTILBERT if kind == "distilbert" else {**TINY, **NO_DROPOUT})}
    config["vocab_size"] = len(VOCAB_FILE.read_text(encoding="utf-8").splitlines())
    folder.mkdir()
    (folder / "vocab.txt").write_text(VOCAB_FILE.read_text(encoding="utf-8"), encoding="utf-8")
    tokenizer = load_tokenizer(find_tokenizer(folder))
    torch.manual_seed(0)
    make_model(head, config_from_dict({**config, "model_type": kind})).save_pretrained(
        folder, tokenizer
    )
    return folder


def command(files, encoder, output, *flags):
    words = ["--init-checkpoint", encoder, "--output-dir", output, "--max-seq-length", 16]
    words += ["--device", "cpu", *own_files(files, "--do-train"), *flags]
    return [*map(str, words)]


def first_weights(files, encoder, output, *flags):
    """The folder with the weights before the first update."""
    flags = ("--max-steps", 1, "--learning-rate", 0, *flags)
    assert run_glue.main(command(files, encoder, output, *flags)) == 0
    return output / "encoder" / "classification" / "1"


@pytest.mark.parametrize("kind", LAYERS)
def test_new_dense_layers_are_standardized(kind, glue_files, tmp_path):
    """As transformers computes them. The pooled states of random weights deviate by 0.1."""
    encoder = make_encoder(tmp_path / "encoder", kind)
    folder = first_weights(glue_files, encoder, tmp_path / "a")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    seen = []
    dense = model.get_submodule(LAYERS[kind])
    dense.register_forward_hook(lambda *args: seen.append(args[-1]))
    texts = [text for text, _ in sentences(48, 0)]
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        model(**batch)
    outputs_nE = seen[0].reshape(48, -1)
    width = outputs_nE.shape[1]
    close = {"atol": 2e-3, "rtol": 0}
    torch.testing.assert_close(outputs_nE.mean(0), torch.zeros(width), **close)
    torch.testing.assert_close(outputs_nE.std(0, correction=0), torch.ones(width), **close)


def test_what_is_trained_stays(glue_files, tmp_path):
    encoder = make_encoder(tmp_path / "encoder", head="pretraining")
    trained = load_file(encoder / "model.safetensors")
    folder = first_weights(glue_files, encoder, tmp_path / "a")
    weights = load_file(folder / "model.safetensors")
    for part in ("weight", "bias"):
        name = f"{LAYERS['bert']}.{part}"
        assert torch.equal(weights[name], trained[name])


def test_two_processes_and_a_run_in_parts_are_one(glue_files, tmp_path):
    encoder = make_encoder(tmp_path / "encoder")
    flags = ("--max-steps", 3, "--learning-rate", 1e-3)
    one = partial(command, glue_files, encoder)
    last = "encoder/classification/3/model.safetensors"
    batch = "--train-batch-size"
    assert run_glue.main(one(tmp_path / "one", *flags, batch, 8)) == 0
    for more in (("--steps-this-run", 1), ("--resume-from-checkpoint",)):
        assert run_glue.main(one(tmp_path / "parts", *flags, batch, 8, *more)) == 0
    assert (tmp_path / "parts" / last).read_bytes() == (tmp_path / "one" / last).read_bytes()
    sharded = ("--data-parallel-shard-degree", 2)
    commands = [
        (str(free_port()), one(tmp_path / name, *flags, batch, 4, *extra))
        for name, extra in (("ddp", ()), ("fsdp2", sharded))
    ]
    function = partial(fine_tune_on_ports, run_glue.main)
    processes = start_several(commands, tmp_path / "log", function=function)
    assert exit_codes(processes) == [0, 0], (tmp_path / "log.0").read_text()
    weights = load_file(tmp_path / "one" / last)
    for name in ("ddp", "fsdp2"):
        torch.testing.assert_close(load_file(tmp_path / name / last), weights, rtol=1e-3, atol=1e-5)


def test_texts_that_are_all_alike_do_not_blow_weights_up(glue_files, tmp_path):
    encoder = make_encoder(tmp_path / "encoder")
    table = tmp_path / "alike.csv"
    table.write_text("sentence,label\n" + "a,0\n" * 4 + "a,1\n" * 4)
    words = ["--init-checkpoint", encoder, "--output-dir", tmp_path / "a", "--device", "cpu"]
    words += ["--train-file", table, "--text-column", "sentence", "--label-column", "label"]
    words += ["--do-train", "--max-steps", 1, "--learning-rate", 0]
    assert run_glue.main([*map(str, words)]) == 0
    weights = load_file(tmp_path / "a" / "encoder" / "classification" / "1" / "model.safetensors")
    assert weights["bert.pooler.dense.weight"].abs().max() < 1000
