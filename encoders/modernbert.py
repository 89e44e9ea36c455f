"""ModernBERT's encoder (Warner et al., 2024): rotary positions, pre-norm, GeGLU, local and global attention, no biases.

Legend: T tokens in the stream, N sequences, R tokens whose output is used, H heads, D head size, E hidden size.
"""

import numpy as np
from torch import Tensor, nn

from attention import IMPLEMENTATIONS, PreparedAttention
from bert_config import ModernBertConfig
from cpu.dropout import Dropout
from data_loading.packing import PassSizes, TokenStream
from encoders.modules import ACTIVATIONS, LayerMemory, Linear, VocabularyEmbedding


def make_norm(config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


class ModernBertEmbeddings(nn.Module):
    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.tok_embeddings = VocabularyEmbedding(config)
        self.norm = make_norm(config)
        self.dropout = Dropout(config.embedding_dropout)

    def forward(self, stream: TokenStream) -> Tensor:
        return self.dropout(self.norm(self.tok_embeddings(stream.input_ids)))


class ModernBertAttention(nn.Module):
    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.dropout_prob = config.attention_dropout
        self.Wqkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.Wo = Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)
        self.dropout = Dropout(config.attention_dropout)

    def forward(
        self, normed_TE: Tensor, residual_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None
    ) -> Tensor:
        qkv_T3HD = self.Wqkv(normed_TE).unflatten(-1, (3, self.num_attention_heads, -1))
        context_TE = attention(qkv_T3HD, self.dropout_prob if self.training else 0.0).flatten(1)
        if output_R is not None:
            context_TE, residual_TE = context_TE.index_select(0, output_R), residual_TE.index_select(0, output_R)
        return self.dropout(self.Wo(context_TE), residual_TE)


class ModernBertMLP(nn.Module):
    """GeGLU (Shazeer, 2020): Wo(act(a) * b), where Wi computes a and b."""

    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.Wi = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.Wo = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_activation]
        self.dropout = Dropout(config.mlp_dropout)

    def forward(self, hidden_TE: Tensor) -> Tensor:
        inner, gate = self.Wi(hidden_TE).chunk(2, dim=-1)
        return self.Wo(self.dropout(self.activation(inner) * gate))


class ModernBertLayer(nn.Module):
    """A layer; layer 0 has no norm before its attention, because the embeddings end in one."""

    def __init__(self, config: ModernBertConfig, index: int):
        super().__init__()
        self.config = config
        self.window = None if config.is_global(index) else config.local_attention // 2
        self.attn_norm = make_norm(config) if index else nn.Identity()
        self.attn = ModernBertAttention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = ModernBertMLP(config)

    def forward(self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None) -> Tensor:
        attended_TE = self.attn(self.attn_norm(hidden_TE), hidden_TE, attention, output_R)
        return attended_TE + self.mlp(self.mlp_norm(attended_TE))

    def forward_flops(self, lengths_N: np.ndarray) -> float:
        """FLOPs of the matrix products for sequences of these real lengths; in local layers only pairs of tokens inside
        the window count."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        pairs_N = np.square(lengths_N)
        if self.window is not None:
            reach_N = np.minimum(self.window, lengths_N - 1)
            pairs_N = lengths_N * (2 * reach_N + 1) - reach_N * (reach_N + 1)
        return float(lengths_N.sum() * (8 * hidden**2 + 6 * hidden * inner) + 4 * pairs_N.sum() * hidden)

    def memory(self, sizes: PassSizes, rows: int) -> LayerMemory:
        """rows: number of tokens that are computed after attention."""
        config, product, residual = self.config, sizes.product, sizes.residual
        hidden, inner, tokens = config.hidden_size, config.intermediate_size, sizes.tokens
        attention = IMPLEMENTATIONS[sizes.attention].memory(
            sizes, config.num_attention_heads, hidden, config.attention_dropout > 0, rows, self.window
        )
        # The input of each norm and its copy for the product, the context, and five products of GeGLU.
        masks = sizes.mask * (hidden * (config.attention_dropout > 0) + inner * (config.mlp_dropout > 0))
        after_attention = rows * (hidden * (residual + 2 * product) + 4 * inner * product + masks)
        feed_forward_backward = rows * (2 * hidden * residual + 4 * inner * product)
        # Rotary positions are applied to a copy of query, key and value.
        attention_backward = tokens * hidden * (residual + 8 * product) + attention.backward - after_attention
        cached = (4 * hidden**2 + 3 * hidden * inner) * product if sizes.autocast else 0
        return LayerMemory(
            kept=tokens * hidden * (residual + product) + attention.kept + after_attention,
            input=tokens * hidden * residual,
            linear_outputs=(3 * tokens * hidden + rows * (2 * hidden + 2 * inner)) * product,
            backward=max(feed_forward_backward, attention_backward),
            weight_copies=cached,
            cached_copies=cached,
        )
