"""Models of this project and of transformers with the same weights."""

import torch
import transformers
from encoder_cases import BERT, DISTILBERT, MODERNBERT, ROBERTA

from bert_recipe.model.encoders.registry import config_from_dict, make_model

# Of each model type: the config, and what the names of transformers' classes begin with.
ENCODERS = {
    **{
        "bert": (BERT, "Bert"),
        "modernbert": (MODERNBERT, "ModernBert"),
        "roberta": (ROBERTA, "Roberta"),
    },
    "distilbert": (DISTILBERT, "DistilBert"),
    "electra": ({**BERT, "embedding_size": 24}, "Electra"),
    **{"xlm-roberta": (ROBERTA, "XLMRoberta"), "camembert": (ROBERTA, "Camembert")},
}
HEADS = {
    "pretraining": "PreTraining",
    "masked_lm": "MaskedLM",
    "question_answering": "QuestionAnswering",
    "sequence_classification": "SequenceClassification",
    "token_classification": "TokenClassification",
}


def make_pair(kind: str, head: str, **changes):
    """A model of this project with large weights, and transformers' with the same weights."""
    values, prefix = ENCODERS[kind]
    values = {**values, "model_type": kind, **changes}
    torch.manual_seed(0)
    model = make_model(head, config_from_dict(values))
    size = 0.2 if kind == "modernbert" else 0.1  # with larger ones, post-LN amplifies rounding
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * size + (1 if "orm.weight" in name else 0))
        model.word_embeddings.weight[values["vocab_size"] :] = 0
    config = getattr(transformers, f"{prefix}Config")(
        **values, num_labels=2, attn_implementation="sdpa"
    )
    twin = getattr(transformers, f"{prefix}For{HEADS[head]}")(config)
    missing, unexpected = twin.load_state_dict(model.state_dict(), strict=False)
    tied = ("decoder", "vocab_projector.weight", "generator_lm_head.weight")
    assert not unexpected and all(any(part in name for part in tied) for name in missing)
    twin.tie_weights()
    return model, twin
