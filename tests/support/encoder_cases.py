"""Small configs of encoders, the same input as a stream and padded, and how far results differ."""

import torch

from bert_recipe.model.attention import IMPLEMENTATIONS
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.parallel.attention_choice import CHOICES

CPU_IMPLEMENTATIONS = [
    name for name in IMPLEMENTATIONS if name not in ("flash", "efficient", *CHOICES)
]
# Lengths below, at and far above ModernBERT's window and the blocks of the CPU's attention.
LENGTHS = [5, 9, 10, 300, 290, 128, 129, 40]
SIZES = {"vocab_size": 130, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
BERT = {
    **SIZES,
    **{
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
    },
    **{"hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
ROBERTA = {
    **BERT,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
MODERNBERT = {
    **SIZES,
    **{
        "model_type": "modernbert",
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "local_attention": 16,
    },
    **{"global_attn_every_n_layers": 3, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
DISTILBERT = {
    **{"vocab_size": 130, "dim": 32, "n_layers": 4, "n_heads": 2, "hidden_dim": 48},
    **{"max_position_embeddings": 512, "dropout": 0.0, "attention_dropout": 0.0},
    **{"seq_classif_dropout": 0.0, "qa_dropout": 0.0, "activation": "gelu"},
}


def make_input(config=None) -> tuple[TokenStream, dict[str, torch.Tensor], torch.Tensor]:
    """The same sequences as a stream and padded, and where the real tokens are, among which are
    special tokens, as when a text has a literal "[PAD]". config: transformers'.
    """
    torch.manual_seed(1)
    rows = [torch.randint(SIZES["vocab_size"], (length,)) for length in LENGTHS]
    padding = getattr(config, "pad_token_id", 0)
    rows[0][2:4] = rows[3][-1] = padding
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded = {"input_ids": ids, "attention_mask": real}
    if getattr(config, "type_vocab_size", 1) == 2:
        padded["token_type_ids"] = (torch.arange(max(LENGTHS)) > 4).long().expand_as(ids)
    return TokenStream.from_padded(**padded)[0], padded, real


def logits_of(output, real: torch.Tensor | None = None) -> torch.Tensor:
    """All logits of the output for a stream, or for padded input those of the `real` tokens."""
    if hasattr(output, "start_logits"):
        logits = torch.stack([output.start_logits, output.end_logits], dim=-1)
    elif hasattr(output, "prediction_logits"):
        logits = output.prediction_logits[..., : SIZES["vocab_size"]]
    else:
        logits = output.logits
    if real is not None and logits.shape[:2] == real.shape:
        logits = logits[real]
    pairs = getattr(output, "seq_relationship_logits", None)
    return logits if pairs is None else torch.cat([logits.flatten(), pairs.flatten()])


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())
