"""convert_checkpoint.py on files that Paddle, PyTorch and transformers wrote: the logits stay the
same.

paddlepaddle 3.3.1 made fixtures/checkpoints and computed the logits in expected.npz, with the
modules of NVIDIA's recipe in a small size; tests/make_checkpoint_fixtures.py of commit 07eb968 is
the program.
"""

import numpy as np
import pytest
import torch
from checkpoint_files import (
    CONFIG,
    FIXTURES,
    converted,
    hugging_face_model,
    nvidia_state_dict,
)
from conftest import read_json, run_program
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification
from transformers import BertForPreTraining as HFForPreTraining
from transformers import BertForQuestionAnswering as HFForQuestionAnswering
from transformers import BertForSequenceClassification as HFForSequenceClassification

from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.checkpoint.weight_files import open_model_weights
from bert_recipe.model.encoders.bert import BertForPreTraining, BertForQuestionAnswering
from bert_recipe.utils.errors import UserError

EXPECTED = np.load(FIXTURES / "expected.npz")
INPUTS = {
    key: torch.from_numpy(EXPECTED[key])
    for key in ("input_ids", "token_type_ids", "attention_mask")
}
IS_REAL = INPUTS["attention_mask"].bool()
TIGHT = {"rtol": 1e-4, "atol": 1e-4}
# Paddle's encoder layers have a LayerNorm epsilon of 1e-5, BERT's 1e-12.
PADDLE = {"rtol": 1e-3, "atol": 1e-3}


def assert_same_pretraining_logits(folder, mlm, nsp, tolerance=TIGHT):
    """Of this project's model and of transformers', on real tokens."""
    mlm = torch.as_tensor(mlm)[..., : CONFIG["vocab_size"]]
    nsp = torch.as_tensor(nsp)
    theirs, problems = HFForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not problems["missing_keys"] and not problems["unexpected_keys"]
    with torch.no_grad():
        ours = load_pretrained(BertForPreTraining, folder).eval()(**INPUTS)
        theirs = theirs.eval()(**INPUTS)
    for prediction_logits in (ours.prediction_logits, theirs.prediction_logits):
        torch.testing.assert_close(prediction_logits[IS_REAL], mlm[IS_REAL], **tolerance)
    for nsp_logits in (ours.seq_relationship_logits, theirs.seq_relationship_logits):
        torch.testing.assert_close(nsp_logits, nsp, **tolerance)


def assert_same_squad_logits(folder, logits, tolerance=TIGHT):
    logits = torch.as_tensor(logits)
    with torch.no_grad():
        ours = load_pretrained(BertForQuestionAnswering, folder).eval()(**INPUTS)
        theirs = HFForQuestionAnswering.from_pretrained(folder).eval()(**INPUTS)
    for output in (ours, theirs):
        torch.testing.assert_close(
            output.start_logits[IS_REAL], logits[..., 0][IS_REAL], **tolerance
        )
        torch.testing.assert_close(output.end_logits[IS_REAL], logits[..., 1][IS_REAL], **tolerance)


@pytest.mark.parametrize("name", ["pretraining", "state_dict"])
def test_paddle_pretraining_has_paddles_logits(tmp_path, name):
    output = converted("nvidia-paddle", FIXTURES / "paddle" / f"{name}.pdparams", tmp_path / "out")
    key = name if name == "state_dict" else "paddle"
    assert_same_pretraining_logits(
        tmp_path / "out", EXPECTED[f"{key}_mlm"], EXPECTED[f"{key}_nsp"], PADDLE
    )
    assert "cut 3 rows that pad the vocabulary from 101 to 104" in output
    assert "epsilon is 1e-05 in the encoder layers" in output


def test_paddle_squad_has_paddles_logits(tmp_path):
    (leftover := tmp_path / "out.tmp-0123456789abcdef").mkdir()  # of a killed conversion
    converted("nvidia-paddle", FIXTURES / "paddle" / "squad", tmp_path / "out")
    assert_same_squad_logits(tmp_path / "out", EXPECTED["paddle_squad"], PADDLE)
    assert not leftover.exists()


@pytest.fixture(scope="module")
def pretraining_model():
    return hugging_face_model()


def pretraining_logits(model):
    with torch.no_grad():
        output = model(**INPUTS)
    return output.prediction_logits, output.seq_relationship_logits


@pytest.mark.parametrize("layout", ["checkpoint", "bare", "legacy file", "data parallel"])
def test_nvidia_pretraining_has_the_models_logits(tmp_path, pretraining_model, layout):
    tensors = nvidia_state_dict(pretraining_model)
    assert sum("dense_act" in name for name in tensors) == 2 * (CONFIG["num_hidden_layers"] + 2)
    optimizer = torch.optim.Adam(pretraining_model.parameters())
    checkpoint = {
        "model": tensors,
        "optimizer": optimizer.state_dict(),
        "master params": list(pretraining_model.parameters()),
        "files": [1, "shard_0.hdf5"],
        "data_loader": None,
    }
    value = {
        "bare": tensors,
        "data parallel": {"model": {f"module.{name}": tensor for name, tensor in tensors.items()}},
    }.get(layout, checkpoint)
    torch.save(
        value, tmp_path / "ckpt_3.pt", _use_new_zipfile_serialization=layout != "legacy file"
    )
    flags = () if value is checkpoint else ("--hidden-act", "gelu")
    output = converted("nvidia-pytorch", tmp_path / "ckpt_3.pt", tmp_path / "out", *flags)
    assert_same_pretraining_logits(tmp_path / "out", *pretraining_logits(pretraining_model))
    assert "cut 3 rows" in output and "cls.predictions.decoder.weight" in output
    if value is checkpoint:
        assert (
            "not used (state of the training run): optimizer, master params, files and 1 more"
            in output
        )


@pytest.mark.parametrize(
    "beside", [{"grad_scaler": {"scale": 1.0}, "epoch": 1}, None], ids=["from the file", "flag"]
)
def test_nvidia_checkpoint_since_2022_computes_gelu_by_tanh(tmp_path, beside):
    model = hugging_face_model(hidden_act="gelu_pytorch_tanh")
    torch.save({"model": nvidia_state_dict(model), **(beside or {})}, tmp_path / "ckpt.pt")
    flags = () if beside else ("--hidden-act", "gelu_pytorch_tanh")
    output = converted("nvidia-pytorch", tmp_path / "ckpt.pt", tmp_path / "out", *flags)
    assert "hidden_act gelu_pytorch_tanh" in output
    assert read_json(tmp_path / "out" / "config.json")["hidden_act"] == "gelu_pytorch_tanh"
    assert_same_pretraining_logits(tmp_path / "out", *pretraining_logits(model))


def test_nvidia_checkpoint_with_a_data_loader_is_read_without_making_one(
    tmp_path, pretraining_model
):
    """A checkpoint from the middle of a run holds objects of the training script; the script here
    writes one.
    """
    torch.save(nvidia_state_dict(pretraining_model), tmp_path / "weights.pt")
    script = """
import sys, numpy as np, torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
class pretraining_dataset(Dataset):
    def __init__(self): self.inputs = [np.arange(6).reshape(2, 3), np.ones(2, np.int8)]
    def __len__(self): return 2
    def __getitem__(self, i): return [x[i] for x in self.inputs]
class WorkerInitObj:
    def __init__(self, seed): self.seed = seed
data = pretraining_dataset()
options = {"batch_size": 2, "worker_init_fn": WorkerInitObj(3), "num_workers": 0}
loader = DataLoader(data, sampler=RandomSampler(data), **options)
model = torch.load(sys.argv[1], weights_only=True)
torch.save({"model": model, "epoch": 0, "data_loader": loader}, sys.argv[2])
"""
    (tmp_path / "train.py").write_text(script)
    written = run_program(tmp_path / "train.py", tmp_path / "weights.pt", tmp_path / "ckpt_1.pt")
    assert written.returncode == 0, written.stderr
    assert "torch.utils.data.dataloader.DataLoader" in str(
        torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "ckpt_1.pt")
    )
    output = converted(
        "nvidia-pytorch", tmp_path / "ckpt_1.pt", tmp_path / "out", "--hidden-act", "gelu"
    )
    assert_same_pretraining_logits(tmp_path / "out", *pretraining_logits(pretraining_model))
    assert "data_loader" in output


def test_nvidia_squad_in_half_precision_is_written_as_float32(tmp_path):
    model = hugging_face_model(HFForQuestionAnswering).half().float()
    torch.save({"model": nvidia_state_dict(model.half())}, tmp_path / "bert_large_qa.pt")
    output = converted(
        "nvidia-pytorch", tmp_path / "bert_large_qa.pt", tmp_path / "out", "--hidden-act", "gelu"
    )
    with torch.no_grad():
        logits = model.float()(**INPUTS)
    assert_same_squad_logits(
        tmp_path / "out", torch.stack([logits.start_logits, logits.end_logits], -1)
    )
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        torch.float32
    }
    assert "float16 weights are written as float32" in output


def test_nvidia_classifier_has_its_logits_and_labels(tmp_path):
    model = hugging_face_model(HFForSequenceClassification, num_labels=3)
    torch.save(nvidia_state_dict(model), tmp_path / "pytorch_model.bin")
    source = tmp_path / "pytorch_model.bin"
    output = converted("nvidia-pytorch", source, tmp_path / "out", "--hidden-act", "gelu")
    assert "not in the source: cls.predictions.*, cls.seq_relationship.*, qa_outputs.*" in output
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert type(loaded) is HFForSequenceClassification and loaded.config.num_labels == 3
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(**INPUTS).logits, model(**INPUTS).logits, **TIGHT)


def test_a_missing_shard_is_named(tmp_path, pretraining_model):
    pretraining_model.save_pretrained(tmp_path, max_shard_size="15KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name} does not exist"):
        open_model_weights(tmp_path)
