"""Weights from model folders: Hugging Face's names, heads that a model adds or lacks, and errors
that name tensors.
"""

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file
from transformers import BertConfig as HFConfig
from transformers import BertForPreTraining as HFForPreTraining

from bert_recipe.checkpoint.formats.torch_files import read_pickled_weights
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.model.encoders.bert import BertForPreTraining, BertForQuestionAnswering, BertModel
from bert_recipe.tasks.squad.files import read_squad
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.tables import read_rows
from bert_recipe.utils.text_files import TextFile

SMALL = {**TINY, "vocab_size": 1000, "num_hidden_layers": 1}


@pytest.fixture
def folder(tmp_path):
    """A model folder of transformers."""
    torch.manual_seed(3)
    HFForPreTraining(HFConfig(**SMALL)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder, edit) -> None:
    """Writes the folder's tensors again, after `edit` has changed the dict of them."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_same(model, folder, prefix="") -> None:
    """All parameters of the encoder of `model` are the folder's."""
    given = load_file(folder / "model.safetensors")
    heads = ("cls.", "qa_outputs.")
    loaded = {
        name: tensor for name, tensor in model.state_dict().items() if not name.startswith(heads)
    }
    assert len(loaded) > 20
    for name, tensor in loaded.items():
        assert torch.equal(tensor, given["bert." + name.removeprefix(prefix)]), name


def test_folder_of_transformers_is_loaded_into_every_model(folder, capsys):
    pretraining = load_pretrained(BertForPreTraining, folder)
    assert_same(pretraining, folder, "bert.")
    given = load_file(folder / "model.safetensors")
    assert torch.equal(
        pretraining.cls.seq_relationship.weight, given["cls.seq_relationship.weight"]
    )
    assert capsys.readouterr().out == ""
    assert_same(load_pretrained(BertModel, folder), folder)
    assert "has tensors that BertModel does not use: " in capsys.readouterr().out
    questions = load_pretrained(BertForQuestionAnswering, folder)
    assert_same(questions, folder, "bert.")
    assert (
        "has no qa_outputs.bias, qa_outputs.weight: they start from their initial values"
        in capsys.readouterr().out
    )
    assert 0.001 < questions.qa_outputs.weight.std() < 0.1


def test_encoder_without_prefix_is_loaded_into_models_with_heads(folder, tmp_path):
    change(
        folder,
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("cls.")],
    )
    stripped = {
        name.removeprefix("bert."): t for name, t in load_file(folder / "model.safetensors").items()
    }
    (tmp_path / "encoder").mkdir()
    save_file(stripped, tmp_path / "encoder" / "model.safetensors")
    (tmp_path / "encoder" / "config.json").write_text((folder / "config.json").read_text())
    assert_same(load_pretrained(BertForPreTraining, tmp_path / "encoder"), folder, "bert.")
    assert_same(load_pretrained(BertModel, tmp_path / "encoder"), folder)


def test_old_names_buffers_and_copies_of_tied_weights_are_accepted(folder):
    expected = load_pretrained(BertForPreTraining, folder).state_dict()

    def edit(tensors):
        for name in list(tensors):
            if "LayerNorm" in name:
                old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                    "LayerNorm.bias", "LayerNorm.beta"
                )
                tensors[old] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
        tensors["cls.predictions.decoder.weight"] = torch.zeros(1000, 32)
        tensors["cls.predictions.decoder.bias"] = torch.zeros(1000)

    change(folder, edit)
    loaded = load_pretrained(BertForPreTraining, folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_types_are_converted_to_float32(folder, dtype):
    change(
        folder, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()})
    )
    model = load_pretrained(BertForPreTraining, folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    given = load_file(folder / "model.safetensors")["bert.pooler.dense.weight"]
    assert torch.equal(model.bert.pooler.dense.weight, given.float())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"bert.pooler.dense.bias": torch.zeros(31)},
            ["another shape", "bert.pooler.dense.bias is [31]"],
        ),
        (
            {"bert.pooler.dense.weight": torch.zeros(32)},
            ["another shape", "bert.pooler.dense.weight is [32]"],
        ),
        (
            {"bert.embeddings.LayerNorm.weight": None},
            ["of the model are missing", "bert.embeddings.LayerNorm.weight"],
        ),
        ({"bert.adapter.weight": torch.zeros(3)}, ["not in the model", "bert.adapter.weight"]),
        (
            {"bert.pooler.dense.bias": torch.zeros(32).int()},
            ["bert.pooler.dense.bias", "floating-point"],
        ),
        (
            {"bert.embeddings.word_embeddings.weight": torch.zeros(999, 32)},
            ["bert.embeddings.word_embeddings.weight is [999, 32]", "[1000, 32]"],
        ),
    ],
    ids=["shape", "dimensions", "missing", "unexpected", "whole numbers", "vocabulary"],
)
def test_wrong_tensor_is_an_error_that_names_it(folder, changed, words):
    tensors = {**load_file(folder / "model.safetensors"), **changed}
    save_file(
        {name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors"
    )
    with pytest.raises(UserError) as caught:
        load_pretrained(BertForPreTraining, folder)
    assert str(folder) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("is_pickled", [False, True])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrapped_models_are_those_of_the_model(folder, prefix, is_pickled):
    tensors = load_file(folder / "model.safetensors")
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    wrapped = {prefix + name: tensor for name, tensor in expected.items()}
    if is_pickled:
        torch.save(wrapped, folder / "pytorch_model.bin")
        read = read_pickled_weights(folder)
        assert all(torch.equal(read[name], expected[name]) for name in expected | read)
        return
    save_file(wrapped, folder / "model.safetensors")
    model = load_pretrained(BertForPreTraining, folder)
    assert all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)


def test_with_one_token_type_both_texts_of_a_pair_have_it(tmp_path):
    theirs = HFForPreTraining(HFConfig(**{**SMALL, "type_vocab_size": 1})).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_pretrained(BertForPreTraining, tmp_path).eval()
    ids, types = torch.arange(5, 15)[None], torch.tensor([[0] * 5 + [1] * 5])
    with torch.no_grad():
        logits = ours(ids, token_type_ids=types).prediction_logits
        torch.testing.assert_close(logits, theirs(ids).prediction_logits)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda path: ModelFolder(path.parent).config),
        ("vocab.txt", lambda path: ModelFolder(path.parent).tokenizer),
        ("model.safetensors", lambda path: ModelFolder(path.parent).tensors),
        ("pytorch_model.bin", lambda path: read_pickled_weights(path.parent)),
        ("shard.hdf5", lambda path: PretrainingDataset(path, 1000)),
        ("data.csv", lambda path: [*read_rows(TextFile(path))]),
        ("data.parquet", lambda path: [*read_rows(TextFile(path))]),
        ("squad.json", read_squad),
    ],
)
def test_a_pointer_of_git_lfs_is_named_as_such(tmp_path, name, read):
    lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{'4d7a' * 16}", "size 9")
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=rf"{name} is a pointer of git LFS, .* git lfs pull"):
        read(tmp_path / name)


def test_weights_that_are_a_pickle_only_are_refused_with_the_command_that_converts_them(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"convert_checkpoint\.py safetensors .* NEW_FOLDER"):
        load_pretrained(BertForPreTraining, folder)
