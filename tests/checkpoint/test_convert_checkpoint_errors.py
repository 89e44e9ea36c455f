"""convert_checkpoint.py executes no pickle and keeps what is there. What
else it refuses: tests/refusals.
"""

import errno
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from checkpoint_files import (
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

QUERY = "bert.encoder.layer.1.attention.self.query.weight"


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


def test_cut_off_and_damaged_files_are_refused(tmp_path):
    whole = (FIXTURES / "paddle" / "squad.pdparams").read_bytes()
    model = hugging_face_model()
    torch.save(nvidia_state_dict(model), tmp_path / "whole.pt")
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
    damaged[content.index(model.state_dict()[QUERY].numpy().tobytes())] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"cut.pt is not a complete PyTorch file"):
        reader(path)
