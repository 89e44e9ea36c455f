"""ModernBERT against transformers' ModernBERT: logits, gradients, initial weights, model folders."""

import numpy as np
import pytest
import torch
import transformers
from test_modeling import relative_error

from attention import IMPLEMENTATIONS
from bert_config import ModernBertConfig, config_from_dict
from data_loading.packing import TokenStream
from modeling import MODELS

CPU_IMPLEMENTATIONS = [name for name in IMPLEMENTATIONS if name != "flash"]
SMALL = {
    "model_type": "modernbert",
    "vocab_size": 130,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "local_attention": 16,
    "max_position_embeddings": 512,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Lengths below, at and far above the window and the blocks of the CPU's attention.
LENGTHS = [5, 9, 10, 300, 290, 128, 129, 40]
HEADS = {
    "masked_lm": "ModernBertForMaskedLM",
    "question_answering": "ModernBertForQuestionAnswering",
    "sequence_classification": "ModernBertForSequenceClassification",
    "token_classification": "ModernBertForTokenClassification",
}


def make_pair(head: str, **changes):
    """A model of this project with large weights, and transformers' with the same weights."""
    values = {**SMALL, **changes}
    torch.manual_seed(0)
    model = MODELS[ModernBertConfig][head](config_from_dict(values))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (1 if "norm.weight" in name else 0))
        model.word_embeddings.weight[values["vocab_size"] :] = 0
    config = transformers.ModernBertConfig(**values, attn_implementation="sdpa")
    twin = getattr(transformers, HEADS[head])(config)
    missing, unexpected = twin.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected and set(missing) <= {"decoder.weight"}
    twin.tie_weights()
    return model, twin


def make_input() -> tuple[TokenStream, dict[str, torch.Tensor], torch.Tensor]:
    """The same sequences as a stream and padded, and where the real tokens are."""
    torch.manual_seed(1)
    rows = [torch.randint(3, SMALL["vocab_size"], (length,)) for length in LENGTHS]
    stream = TokenStream(
        torch.cat(rows),
        torch.zeros(sum(LENGTHS), dtype=torch.long),
        torch.cat([torch.arange(length) for length in LENGTHS]),
        torch.tensor(np.append(0, np.cumsum(LENGTHS)), dtype=torch.int32),
        max(LENGTHS),
    )
    padded = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "attention_mask": torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None],
    }
    return stream, padded, padded["attention_mask"]


def logits_of(output) -> torch.Tensor:
    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("masked_lm", {}),
        ("masked_lm", {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}),
        ("masked_lm", {"decoder_bias": False, "hidden_activation": "gelu_new", "local_attention": 2}),
        ("question_answering", {}),
        ("sequence_classification", {"classifier_pooling": "cls"}),
        ("sequence_classification", {"classifier_pooling": "mean"}),
        ("token_classification", {}),
    ],
)
def test_logits_and_gradients_agree_with_transformers(head, changes, implementation):
    model, twin = make_pair(head, **changes)
    model.base_model.attention_implementation = implementation
    stream, padded, real = make_input()
    theirs = logits_of(twin(**padded))
    is_per_sequence = head == "sequence_classification"
    theirs = theirs if is_per_sequence else theirs[real]
    torch.manual_seed(2)
    weights = torch.randn_like(theirs)
    (theirs * weights).sum().backward()
    their_gradients = {name: p.grad for name, p in twin.named_parameters()}
    for form in ("stream", "padded"):
        model.zero_grad()
        ours = logits_of(model(stream) if form == "stream" else model(**padded))
        ours = ours[real] if form == "padded" and not is_per_sequence else ours
        assert relative_error(ours, theirs) < 1e-5, form
        (ours * weights).sum().backward()
        for name, p in model.named_parameters():
            gradient = p.grad[: SMALL["vocab_size"]] if name.endswith("tok_embeddings.weight") else p.grad
            assert relative_error(gradient, their_gradients[name]) < 1e-5, (form, name)
