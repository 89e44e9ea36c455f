"""What convert_checkpoint.py refuses, before anything is written."""

import pickle
from pathlib import Path

import numpy as np
import torch
from checkpoint_files import CONFIG, FIXTURES, hugging_face_model, nvidia_state_dict
from refusal_tables import Refusal, refusals
from safetensors.torch import load_file

import convert_checkpoint
from bert_recipe.checkpoint.formats import nvidia_paddle

BESIDE = "--config-file {fixtures}/bert_config.json --vocab-file {fixtures}/vocab.txt"
PYTORCH = f"--from nvidia-pytorch {{folder}}/a.pt {{folder}}/out {BESIDE}"
TO_OUT = "--from nvidia-paddle {fixtures}/paddle/state_dict.pdparams {folder}/out"
PADDLE = f"{TO_OUT} {BESIDE}"
AVERAGE = "average {folder}/a {folder}/b {folder}/out"
EMBEDDING, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
DECODER = "cls.predictions.decoder.weight"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"
TOKENS = (FIXTURES / "vocab.txt").read_text(encoding="utf-8").splitlines()


def torch_file(change):
    """A checkpoint of NVIDIA's PyTorch recipe, whose tensors `change` makes wrong."""
    return lambda path: torch.save(change(nvidia_state_dict(hugging_face_model())), path)


def without(tensors: dict, *names: str) -> dict:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def with_rows(tensors: dict, count: int) -> dict:
    return {**without(tensors, DECODER), EMBEDDING: tensors[EMBEDDING][:count]}


def fused_query_key_value(path: Path) -> None:
    arrays = nvidia_paddle.read_arrays(FIXTURES / "paddle" / "pretraining.pdparams")
    arrays["linear_0.w_0"] = np.zeros((16, 48), np.float32)
    path.write_bytes(pickle.dumps(arrays, protocol=4))


def folder(**changes):
    """A model of transformers, with another config than CONFIG."""

    def write(path: Path) -> None:
        hugging_face_model(**changes).save_pretrained(path)
        (path / "vocab.txt").write_text("\n".join(TOKENS) + "\n", encoding="utf-8")

    return write


def pickled_folder_with_a_number(path: Path) -> None:
    folder()(path)
    torch.save({**load_file(path / "model.safetensors"), "weight": 3}, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


TENSORS = [
    (PYTORCH, f"a.pt...{says}", {"a.pt": torch_file(change)})
    for says, change in (
        ("bert.extra.weight", lambda t: {**t, "bert.extra.weight": torch.ones(2)}),
        (f"incomplete...{QUERY}", lambda t: without(t, QUERY)),
        (f"incomplete...{BIAS}", lambda t: without(t, BIAS)),
        (f"{QUERY}...[16, 15]...[16, 16]", lambda t: {**t, QUERY: torch.ones(16, 15)}),
        (f"{QUERY}...finite", lambda t: {**t, QUERY: t[QUERY] / 0}),
        (f"{QUERY}...floats", lambda t: {**t, QUERY: t[QUERY].long()}),
        (f"{EMBEDDING}...103 rows...101", lambda t: with_rows(t, 103)),  # an odd padding
        (f"{EMBEDDING}...96 rows", lambda t: with_rows(t, 96)),
        (f"{BIAS}...[103]...[101]", lambda t: {**t, BIAS: t[BIAS][:103]}),
        (f"{DECODER}...ties", lambda t: {**t, DECODER: t[DECODER] + 1}),
        ("'module'...int", lambda t: {**t, "module": 3}),
        ("list", lambda t: [1, 2]),
        # A published checkpoint.
        ("does not show which GELU...--hidden-act", lambda t: {"model": t}),
    )
]
CONFIGS = [
    (f"{PADDLE} --config-file {{folder}}/config.json", says, {"config.json": {**CONFIG, **change}})
    for says, change in (
        ("bert.encoder.layer.2.", {"num_hidden_layers": 3}),
        ("bert.encoder.layers.1.", {"num_hidden_layers": 1}),
        ("word_embeddings...shape [101, 16]...[101, 32]", {"hidden_size": 32}),
        ("101 tokens...90", {"vocab_size": 90}),
        ("config.json...hidden_act", {"hidden_act": "relu"}),
    )
]
FILES = [
    (TO_OUT, "--config-file"),
    (f"--from nvidia-paddle {{folder}}/no/such {{folder}}/out {BESIDE}", "such"),
    (
        f"--from nvidia-paddle {{folder}}/such {{folder}}/out {BESIDE}",
        "such...such.pdparams",
        {"such.txt": ""},
    ),
    (
        f"--from nvidia-paddle {{fixtures}}/paddle {{folder}}/out {BESIDE}",
        "squad.pdparams",
    ),
    (f"{PADDLE} --vocab-file {{folder}}/v.txt", "v.txt"),
    (
        f"--from nvidia-paddle {{folder}}/fused {{folder}}/out {BESIDE}",
        "linear_0.w_0...--fuse-mha",
        {"fused.pdparams": fused_query_key_value},
    ),
]
FOLDERS = [
    (AVERAGE, "another config", {"a": folder(), "b": folder(num_attention_heads=4)}),
    *(
        (
            AVERAGE,
            says,
            {
                "a": folder(),
                "a/tokenizer_config.json": {"do_lower_case": True},
                "b": folder(),
                "b/tokenizer_config.json": {"do_lower_case": True},
                f"b/{name}": content,
            },
        )
        for says, name, content in (
            ("another vocabulary", "vocab.txt", "\n".join([*TOKENS[:5], *TOKENS[:4:-1]])),
            ("another casing", "tokenizer_config.json", {"do_lower_case": False}),
            (
                "another casing",
                "tokenizer_config.json",
                {"do_lower_case": True, "strip_accents": False},
            ),
            ("another pooling", "modules.json", []),
        )
    ),
    (
        "safetensors {folder}/in {folder}/out",
        "pytorch_model.bin...entry 'weight' is a int",
        {"in": pickled_folder_with_a_number},
    ),
]


@refusals(*TENSORS, *CONFIGS, *FILES, *FOLDERS)
def test_convert_checkpoint_refuses(refusal: Refusal, tmp_path):
    refusal.check(convert_checkpoint.main, [], tmp_path, fixtures=FIXTURES)
    assert not list(tmp_path.glob("out*")), "not even a folder"
