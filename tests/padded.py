"""Models on padded input [B, S], as transformers takes it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from token_stream import TokenStream


def to_stream(
    input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
) -> tuple[TokenStream, Tensor]:
    """The stream, and the places [T] of its tokens in the flattened input."""
    real_BS = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
    types_BS = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
    positions_BS = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    cu_seqlens = F.pad(real_BS.sum(dim=1).cumsum(dim=0), (1, 0)).int()
    tokens = (values[real_BS] for values in (input_ids, types_BS, positions_BS))
    return TokenStream(*tokens, cu_seqlens, input_ids.shape[1], has_filler=False), real_BS.flatten().nonzero()[:, 0]


def run_padded(model: nn.Module, input_ids: Tensor, *padded: Tensor | None, **named: Tensor | None) -> NamedTuple:
    """The output of `model`: states and logits of tokens as [B, S, ...], zero on padding, those of the vocabulary
    without its padding."""
    stream, place_T = to_stream(input_ids, *padded, **named)
    output = model(stream)

    def to_padded(values: Tensor | None) -> Tensor | None:
        if values is None or len(values) != len(place_T):
            return values
        found = values.new_zeros(input_ids.numel(), *values.shape[1:]).index_copy(0, place_T, values)
        found = found.unflatten(0, input_ids.shape)
        return found[..., : model.config.vocab_size] if hasattr(output, "prediction_logits") else found

    return type(output)(*map(to_padded, output))
