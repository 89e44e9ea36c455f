"""Small checkpoints of other projects, and convert_checkpoint.py run on them."""

import re
from collections import OrderedDict

import torch
from conftest import ROOT, read_json
from small_runs import run_here
from transformers import BertConfig as HFConfig
from transformers import BertForPreTraining as HFForPreTraining

import convert_checkpoint

FIXTURES = ROOT / "tests" / "fixtures" / "checkpoints"
CONFIG = read_json(FIXTURES / "bert_config.json")


class Malicious:
    """An object whose pickle creates the file `marker` where it is loaded without restrictions."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        import os

        return os.system, (f"touch {self.marker}",)


def convert(source_format, source, folder, *extra, beside=True):
    """Runs the program in this process, which is 2 seconds shorter than in one of its own."""
    files = (
        ("--config-file", FIXTURES / "bert_config.json", "--vocab-file", FIXTURES / "vocab.txt")
        if beside
        else ()
    )
    return convert_with("--from", source_format, source, folder, *files, *extra)


def convert_with(*words):
    return run_here(words, convert_checkpoint.main)


def converted(source_format, source, folder, *extra, **kwargs):
    result = convert(source_format, source, folder, *extra, **kwargs)
    assert result.returncode == 0, result.stderr
    return result.stdout


def large_weights(model):
    """`model` with weights far from 0, so that no two tensors can be exchanged without a change in
    the logits.
    """
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def hugging_face_model(model_class=HFForPreTraining, **config):
    return large_weights(model_class(HFConfig(**{**CONFIG, **config})))


def nvidia_state_dict(model):
    """A transformers model's weights as NVIDIA's PyTorch recipe names and pads them."""
    tensors = OrderedDict()
    for name, tensor in model.state_dict().items():
        if name.endswith("position_ids") or name == "cls.predictions.decoder.bias":
            continue
        tensor = tensor.clone()
        if tensor.shape[0] == CONFIG["vocab_size"]:
            tensor = torch.cat([tensor, torch.ones(3, *tensor.shape[1:])])
        tensors[re.sub(r"(intermediate|pooler|transform)\.dense\.", r"\1.dense_act.", name)] = (
            tensor
        )
    return tensors
