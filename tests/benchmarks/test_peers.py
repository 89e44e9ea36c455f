"""Comparisons are with transformers at its best, and with the same settings on both sides."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import NO_DROPOUT, ROOT, TINY, VOCAB_FILE, read_json
from hugging_face import save
from small_runs import InMemoryDataset
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from benchmarks import inference_speed, text_to_samples, update_time
from benchmarks.common import worker as worker_module
from benchmarks.common.quality_runs import CONTESTANTS, LENGTH, Data, Plan, modern_config
from benchmarks.common.transformers_training import (
    Float32Muon,
    hidden_matrices,
    make_optimizers,
    masked_lm_model,
)
from benchmarks.pretraining_step import pad
from benchmarks.update_time import Turn

PEER = "transformers ModernBERT, AdamW"
CONFIG = modern_config(2) | {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return masked_lm_model(CONFIG)


def test_logits_of_masked_tokens_only_change_neither_loss_nor_gradients(model):
    ids = torch.randint(5, 40, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.where(torch.arange(16) % 3 == 0, -100)
    losses, gradients = [], []
    for sparse in (True, False):
        model.sparse_prediction = sparse
        model.zero_grad()
        output = model(input_ids=ids, labels=labels)
        output.loss.backward()
        assert output.logits.numel() == 40 * ((labels != -100).sum() if sparse else ids.numel())
        losses.append(output.loss.item())
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_muon_updates_hidden_matrices_and_adamw_all_others_once(model):
    optimizers = make_optimizers(model, "Muon")
    assert [type(optimizer) for optimizer in optimizers] == [torch.optim.AdamW, Float32Muon]
    updated = [
        [id(p) for group in optimizer.param_groups for p in group["params"]]
        for optimizer in optimizers
    ]
    assert sorted([*updated[0], *updated[1]]) == sorted(map(id, model.parameters()))
    names = [re.sub(r"\d+", "N", name) for name in hidden_matrices(model)]
    layer = "model.layers.N."
    kinds = {f"{layer}{part}.weight" for part in ("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo")}
    assert set(names) == {*kinds, "head.dense.weight"} and len(names) == 2 * 4 + 1


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_in_float32_makes_torchs_updates_up_to_the_rounding_of_bfloat16(shape):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    updates = []
    for kind in (torch.optim.Muon, Float32Muon):
        weight = torch.nn.Parameter(torch.ones(shape))
        weight.grad = gradient.clone()
        kind([weight], 0.1, adjust_lr_fn="match_rms_adamw").step()
        updates.append(weight.detach())
    torch.testing.assert_close(*updates, rtol=0, atol=2e-3)
    assert not torch.equal(*updates)


@pytest.mark.parametrize(("lengths", "has_filler"), [([3, 3], False), ([3, 2], True)])
def test_transformers_gets_a_mask_of_attention_only_with_filler(lengths, has_filler):
    stream = InMemoryDataset(lengths).stream(np.arange(2))
    stream = {name: torch.from_numpy(values) for name, values in stream.items()}
    rows = pad(stream, pin_memory=False, is_bert=False)
    assert rows["input_ids"].shape == rows["labels"].shape == (2, 3)
    assert ("attention_mask" in rows) == has_filler
    if has_filler:
        assert rows["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def worker(**settings):
    return SimpleNamespace(settings=lambda: {"own": {}, "threads": 2, **settings})


class PeerProcess:
    """A Worker in this process."""

    def __init__(self, make, arguments):
        self.peer, self.settings = make(*arguments), worker().settings

    def call(self, method):
        return getattr(self.peer, method)()

    def close(self):
        pass


def test_the_settings_of_a_peers_process_stand_beside_its_own(monkeypatch):
    monkeypatch.setattr(worker_module, "Worker", PeerProcess)
    peer = SimpleNamespace(run=lambda: {"f1": 1.0, "peer": {"attention": "sdpa"}})
    settings = worker_module.call_in_worker(lambda: peer, "run")
    assert settings == {"f1": 1.0, "peer": {"threads": 2, "attention": "sdpa"}}


def test_an_update_of_the_peer_has_full_blocks(tmp_path):
    blocks = np.full((64, LENGTH), 7)
    plan = Plan(CONTESTANTS[PEER], modern_config(2), 1e-3, 2, seed=1)
    data = Data(tmp_path, tmp_path, blocks, blocks)
    peer = update_time.TransformersUpdates(plan, data, tmp_path, compiled=False)
    assert peer.turn(0, 2).tokens == 32 * LENGTH
    assert peer.settings()["logits of masked tokens only"] and not peer.settings()["compiled"]


def test_updates_are_compared_by_token_in_pairs():
    ours, theirs = ([Turn(10, 8), Turn(20, 8), Turn(40, 8)], [Turn(20, 4)] * 3)
    ratios = update_time.token_ratios({"ModernBERT": ours, PEER: theirs})
    assert ratios == {f"ModernBERT / {PEER}": {"median": 2.0, "low": 1.5, "high": 3.0}}


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("task", ["embedding", "classes"])
def test_the_peer_of_inference_predicts_every_text(tmp_path, task, weights):
    if task == "embedding":
        pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    config = BertConfig(**{**TINY, **NO_DROPOUT, "max_position_embeddings": 256})
    save(BertForSequenceClassification(config), tmp_path)
    BertTokenizerFast(str(VOCAB_FILE)).save_pretrained(tmp_path)
    texts = ["a great ship", "the sea"]
    flags = [f"--init-checkpoint={tmp_path}", "--input=texts.jsonl", f"--task={task}"]
    flags += ["--amp"] if weights == "bfloat16" else []
    args = inference_speed.parse_arguments(flags)
    kinds = {
        "embedding": inference_speed.SentenceTransformers,
        "classes": inference_speed.Pipeline,
    }
    own = inference_speed.ThisProject(args, tmp_path, texts)
    peer = kinds[task](args, tmp_path, texts)
    assert len(own.predict(texts)) == len(peer.predict(texts)) == len(texts)
    assert peer.settings()["weights"] == own.settings()["weights"] == weights


class ThisProcess:
    """A pool without processes, which would import both libraries again."""

    __init__ = __exit__ = lambda *_, **__: None

    def __enter__(self):
        return self

    def submit(self, function, *args):
        return SimpleNamespace(result=lambda: function(*args))


def test_both_sides_make_samples_of_the_same_text(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="the peer of text_to_samples.py needs it")
    output, text = tmp_path / "result.json", tmp_path / "text.jsonl"
    books = [path.read_text() for path in sorted(ROOT.glob("data/sample/books/*.txt"))]
    documents = [book[at : at + 3000] for book in books for at in range(0, 60_000, 3000)]
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    monkeypatch.setattr(text_to_samples, "ProcessPoolExecutor", ThisProcess)
    for name in text_to_samples.PEER_ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that it is as before at the end
    text_to_samples.main(f"--input {text} --rounds 1 --output {output}".split())
    sides = read_json(output)["implementations"]
    ours, theirs = (sides[name]["tokens"] for name in text_to_samples.CONTESTANTS)
    assert ours == pytest.approx(theirs, rel=0.05)  # the peer drops what fills no sample
