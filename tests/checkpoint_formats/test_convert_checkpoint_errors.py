"""convert_checkpoint.py refuses what it cannot place, executes no pickle, and maps names one to
one.
"""

import errno
import json
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from checkpoint_files import (
    CONFIG,
    FIXTURES,
    Malicious,
    convert,
    converted,
    hugging_face_model,
    nvidia_state_dict,
)
from conftest import assert_refused

from bert_recipe.checkpoint.formats import nvidia_paddle, nvidia_pytorch
from bert_recipe.checkpoint.formats.torch_files import read_pickled_weights
from bert_recipe.utils.errors import UserError


@pytest.fixture(scope="module")
def pretraining_model():
    return hugging_face_model()


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def with_rows(tensors, count):
    return {**without(tensors, DECODER), EMBEDDING: tensors[EMBEDDING][:count]}


EMBEDDING, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
DECODER = "cls.predictions.decoder.weight"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


UNPLACED = {
    "unknown tensor": (lambda t: {**t, "bert.extra.weight": torch.ones(2)}, ["bert.extra.weight"]),
    "missing tensor": (lambda t: without(t, QUERY), [QUERY, "incomplete"]),
    "incomplete head": (lambda t: without(t, BIAS), [BIAS, "incomplete"]),
    "wrong shape": (lambda t: {**t, QUERY: torch.ones(16, 15)}, [QUERY, "[16, 15]", "[16, 16]"]),
    "not finite": (lambda t: {**t, QUERY: t[QUERY] / 0}, [QUERY, "finite"]),
    "integers": (lambda t: {**t, QUERY: t[QUERY].long()}, [QUERY, "floats"]),
    "odd padding": (lambda t: with_rows(t, 103), [EMBEDDING, "103 rows", "101"]),
    "too few rows": (lambda t: with_rows(t, 96), [EMBEDDING, "96 rows"]),
    "another padding of the bias": (lambda t: {**t, BIAS: t[BIAS][:103]}, [BIAS, "[103]", "[101]"]),
    "a tied copy with other values": (lambda t: {**t, DECODER: t[DECODER] + 1}, [DECODER, "ties"]),
    "not a tensor": (lambda t: {**t, "module": 3}, ["'module'", "int"]),
    "not a state dict": (lambda t: [1, 2], ["list"]),
}


@pytest.mark.parametrize(("change", "words"), UNPLACED.values(), ids=UNPLACED)
def test_what_cannot_be_placed_is_an_error_that_names_it(
    tmp_path, pretraining_model, change, words
):
    torch.save(change(nvidia_state_dict(pretraining_model)), tmp_path / "wrong.pt")
    result = convert("nvidia-pytorch", tmp_path / "wrong.pt", tmp_path / "out")
    assert_refused(result, "wrong.pt", *words)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out.tmp*"))


def test_a_config_of_another_model_is_refused(tmp_path):
    for change, words in (
        ({"num_hidden_layers": 3}, ["bert.encoder.layer.2."]),
        ({"num_hidden_layers": 1}, ["bert.encoder.layers.1."]),
        ({"hidden_size": 32}, ["word_embeddings", "shape [101, 16]", "[101, 32]"]),
        ({"vocab_size": 90}, ["101 tokens", "90"]),
        ({"hidden_act": "relu"}, ["config.json", "hidden_act"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
        source = FIXTURES / "paddle" / "state_dict.pdparams"
        out = tmp_path / "out"
        assert_refused(
            convert("nvidia-paddle", source, out, "--config-file", tmp_path / "config.json"), *words
        )


def test_missing_files_are_named(tmp_path):
    source = FIXTURES / "paddle" / "state_dict.pdparams"
    assert_refused(
        convert("nvidia-paddle", source, tmp_path / "out", beside=False), "--config-file"
    )
    assert_refused(convert("nvidia-paddle", tmp_path / "no" / "such", tmp_path / "out"), "such")
    (tmp_path / "such.txt").touch()
    assert_refused(
        convert("nvidia-paddle", tmp_path / "such", tmp_path / "out"), "such", "such.pdparams"
    )
    assert_refused(
        convert("nvidia-paddle", FIXTURES / "paddle", tmp_path / "out"), "squad.pdparams", "found"
    )
    assert_refused(
        convert("nvidia-paddle", source, tmp_path / "out", "--vocab-file", tmp_path / "v.txt"),
        "v.txt",
    )


def test_a_folder_that_holds_something_is_refused_and_untouched(tmp_path):
    (tmp_path / "out").mkdir()
    source = FIXTURES / "paddle" / "state_dict.pdparams"
    converted("nvidia-paddle", source, tmp_path / "out")  # an empty folder is taken
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert before.keys() == {
        "README.md",
        "model.safetensors",
        "config.json",
        "vocab.txt",
        "tokenizer_config.json",
    }
    assert_refused(convert("nvidia-paddle", source, tmp_path / "out"), "not empty")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_a_full_disk_is_one_line_and_leaves_no_folder(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bert_recipe.checkpoint.rows.os.fsync", full)
    result = convert("nvidia-paddle", FIXTURES / "paddle" / "state_dict.pdparams", tmp_path / "out")
    assert_refused(result, str(tmp_path / "out"), "the disk is full")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_pdparams_is_refused_and_not_executed(tmp_path, protocol):
    marker = tmp_path / "executed"
    content = pickle.dumps({"linear_0.w_0": Malicious(marker)}, protocol=protocol)
    (tmp_path / "bad.pdparams").write_bytes(content)
    assert_refused(
        convert("nvidia-paddle", tmp_path / "bad.pdparams", tmp_path / "out"),
        "posix.system",
        "nothing was executed",
    )
    assert not marker.exists()
    pickle.loads(content)  # noqa: S301 - the attack works where nothing stops it
    assert marker.exists()


@pytest.mark.parametrize("new_format", [True, False])
def test_a_malicious_torch_file_is_refused_and_not_executed(tmp_path, new_format):
    marker, path = tmp_path / "executed", tmp_path / "pytorch_model.bin"
    torch.save({"model": Malicious(marker)}, path, _use_new_zipfile_serialization=new_format)
    assert_refused(
        convert("nvidia-pytorch", path, tmp_path / "out"), "posix.system", "pytorch_model.bin"
    )
    with pytest.raises(UserError, match=r"posix\.system"):
        read_pickled_weights(tmp_path)
    assert not marker.exists()


def test_pickled_arrays_of_objects_and_other_classes_are_refused(tmp_path):
    for value, words in (
        ({"linear_0.w_0": np.array([Malicious("x")], dtype=object)}, "posix.system"),
        ({"linear_0.w_0": np.array([None], dtype=object)}, "object"),
        ({"linear_0.w_0": np.ones(2, np.int64)}, "int64"),
        ({"linear_0.w_0": Fraction(1, 2)}, "fractions.Fraction"),
        ([1], "list"),
    ):
        path = tmp_path / "other.pdparams"
        path.write_bytes(pickle.dumps(value, protocol=4))
        with pytest.raises(UserError, match=words):
            nvidia_paddle.read_arrays(path)


def test_cut_off_and_damaged_files_are_refused(tmp_path, pretraining_model):
    whole = (FIXTURES / "paddle" / "squad.pdparams").read_bytes()
    torch.save(nvidia_state_dict(pretraining_model), tmp_path / "whole.pt")
    for path, content, reader in (
        (tmp_path / "cut.pdparams", whole, nvidia_paddle.read),
        (tmp_path / "cut.pt", (tmp_path / "whole.pt").read_bytes(), nvidia_pytorch.read),
    ):
        for size in (0, 1, 100, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:size])
            with pytest.raises(UserError, match=path.name):
                reader(path)
    damaged = bytearray(content)
    # torch reads that
    damaged[content.index(pretraining_model.state_dict()[QUERY].numpy().tobytes())] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"cut.pt is not a complete PyTorch file"):
        reader(path)
