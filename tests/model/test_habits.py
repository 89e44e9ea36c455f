"""What users of transformers type: labels, hidden states, pairs, other configs and keywords."""

import pytest
import torch
import transformers
from hugging_face import SIZES

import bert_recipe
from bert_recipe import TokenStream

pytestmark = pytest.mark.fast

IDS = torch.randint(10, 90, (3, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 7 + [0] * 2])
TOKEN_LABELS = torch.tensor([0, 1, 2] * 9).view(3, 9).masked_fill(MASK == 0, -100)
HEADS = {
    "a class": ("SequenceClassification", {"num_labels": 3}, torch.tensor([0, 2, 1])),
    "a number": (
        "SequenceClassification",
        {"num_labels": 1, "problem_type": "regression"},
        torch.tensor([0.5, -1.0, 2.0]),
    ),
    # As many labels as tokens.
    "several": (
        "SequenceClassification",
        {"num_labels": 9, "problem_type": "multi_label_classification"},
        (torch.arange(27).view(3, 9) % 2).float(),
    ),
    "tokens": ("TokenClassification", {"num_labels": 3}, TOKEN_LABELS),
    # Classes, whatever a config of texts with them would mean.
    "tokens of one class": ("TokenClassification", {"num_labels": 1}, TOKEN_LABELS.clamp(max=0)),
    "tokens as several": (
        "TokenClassification",
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        TOKEN_LABELS,
    ),
    "masked words": ("MaskedLM", {}, TOKEN_LABELS),
}


@pytest.mark.parametrize("kind", ["Bert", "ModernBert", "Roberta"])
@pytest.mark.parametrize("name", HEADS)
def test_the_loss_and_the_hidden_states_are_those_of_transformers(name, kind, tmp_path):
    head, more, labels = HEADS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    theirs = getattr(transformers, f"{kind}For{head}")(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = getattr(bert_recipe, f"{kind}For{head}").from_pretrained(tmp_path)
    expected = theirs(IDS, MASK, labels=labels, output_hidden_states=True)
    output = ours(IDS, MASK, labels=labels, output_hidden_states=True)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-4, atol=1e-5)
    assert len(output.hidden_states) == len(expected.hidden_states)
    for state, other in zip(output.hidden_states, expected.hidden_states, strict=True):
        real = MASK.bool()
        torch.testing.assert_close(state[real], other[real], rtol=1e-4, atol=1e-4)
    assert ours(IDS, MASK).loss is None and ours(IDS, MASK).hidden_states is None


def test_pairs_have_the_types_that_are_given():
    rows, types = [[2, 7, 3, 9, 3], [2, 8, 3, 3]], [[0, 0, 0, 1, 1], [0, 0, 0, 1]]
    stream = TokenStream.from_sequences(rows, token_type_ids=types)
    assert stream.token_type_ids.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert TokenStream.from_sequences(rows).token_type_ids.tolist() == [0] * 9
    with pytest.raises(ValueError, match="a token type for each token"):
        TokenStream.from_sequences(rows, token_type_ids=[[0], [0]])


def test_a_config_of_transformers_and_an_unknown_keyword_are_told_the_way(tmp_path):
    theirs = transformers.BertConfig(**SIZES)
    with pytest.raises(TypeError, match=r"BertConfig\.from_dict\(config\.to_dict\(\)\)"):
        bert_recipe.BertModel(theirs)
    model = bert_recipe.BertModel(bert_recipe.BertConfig.from_dict(theirs.to_dict()))
    model.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"dtype.*num_labels, labels.*model\.to"):
        bert_recipe.BertModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
