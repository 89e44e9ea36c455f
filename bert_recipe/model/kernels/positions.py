"""What depends on the positions of queries and keys: rotary angles, and the pairs that attention
hides.

Legend: T tokens, Q queries, K keys, D head size, F rotary frequencies (D / 2).
"""

import torch
from torch import Tensor


def rotary_table(position_ids: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position / theta^(2f / D), by which rotary positions (Su et al., 2021) rotate
    the elements f and f + D/2 of a query or key; [T, D] float32: cosines twice, sines with minus
    and with plus.
    """
    exponents_F = (
        torch.arange(0, head_size, 2, dtype=torch.float32, device=position_ids.device) / head_size
    )
    angles_TF = position_ids[:, None].float() * (1.0 / theta**exponents_F)
    cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
    return torch.cat([cos_TF, cos_TF], dim=-1), torch.cat([-sin_TF, sin_TF], dim=-1)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the last axis of `states`, with the cosines and sines of `rotary_table`; float32.
    With -sin, back.
    """
    states = states.float()
    # In place: with a third temporary, less fits the cache.
    return torch.cat(states.chunk(2, dim=-1)[::-1], dim=-1).mul_(sin).addcmul_(states, cos)


def hidden_pairs(query_Q: Tensor, key_K: Tensor, window: int) -> Tensor:
    """Which keys [Q, K] a query does not attend to: those beyond the window, by position."""
    return (key_K - query_Q[:, None]).abs() > window
