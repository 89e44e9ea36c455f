"""BERT's encoder (Devlin et al., 2018): absolute positions, post-LN (pre-LN by config), GELU.

Legend: T tokens in the stream, N sequences, R tokens whose output is used, H heads, D head size, E hidden size.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import IMPLEMENTATIONS, PreparedAttention
from bert_config import BertConfig
from cpu.dropout import Dropout
from data_loading.packing import PassSizes, TokenStream
from encoders.modules import ACTIVATIONS, Embedding, LayerMemory, Linear, VocabularyEmbedding


class BertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.word_embeddings = VocabularyEmbedding(config)
        self.position_embeddings = Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, stream: TokenStream) -> Tensor:
        hidden_TE = self.word_embeddings(stream.input_ids) + self.token_type_embeddings(stream.token_type_ids)
        hidden_TE = hidden_TE + self.position_embeddings(stream.position_ids)
        return self.dropout(self.LayerNorm(hidden_TE))


class BertSelfAttention(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.dropout_prob = config.attention_probs_dropout_prob
        self.query = Linear(config.hidden_size, config.hidden_size)
        self.key = Linear(config.hidden_size, config.hidden_size)
        self.value = Linear(config.hidden_size, config.hidden_size)
        self.qkv: nn.Module | None = None  # fused, see `prepare_for_inference`

    def fuse_qkv(self) -> tuple[Tensor, Tensor]:
        """Fused weight [3E, E] and bias [3E] of query, key and value, so that one product reads and casts the hidden
        states once."""
        projections = (self.query, self.key, self.value)
        return torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections])

    def forward(self, hidden_TE: Tensor, attention: PreparedAttention) -> Tensor:
        qkv = self.qkv(hidden_TE) if self.qkv is not None else F.linear(hidden_TE, *self.fuse_qkv())
        qkv_T3HD = qkv.unflatten(-1, (3, self.num_attention_heads, -1))
        return attention(qkv_T3HD, self.dropout_prob if self.training else 0.0).flatten(1)


class BertResidualOutput(nn.Module):
    """Output of the attention and feed-forward blocks: dense, dropout, residual, LayerNorm. With pre-LN, LayerNorm is
    applied to the block's input instead (Xiong et al., 2020), by `normalize_input`."""

    def __init__(self, in_features: int, config: BertConfig):
        super().__init__()
        self.pre_layer_norm = config.pre_layer_norm
        self.dense = Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def normalize_input(self, hidden_TE: Tensor) -> Tensor:
        return self.LayerNorm(hidden_TE) if self.pre_layer_norm else hidden_TE

    def forward(self, inner: Tensor, residual_TE: Tensor) -> Tensor:
        output_TE = self.dropout(self.dense(inner), residual_TE)
        return output_TE if self.pre_layer_norm else self.LayerNorm(output_TE)


class BertAttention(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertResidualOutput(config.hidden_size, config)

    def forward(self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None) -> Tensor:
        context_TE = self.self(self.output.normalize_input(hidden_TE), attention)
        if output_R is not None:
            context_TE, hidden_TE = context_TE.index_select(0, output_R), hidden_TE.index_select(0, output_R)
        return self.output(context_TE, hidden_TE)


class BertIntermediate(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden_TE: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_TE))


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertResidualOutput(config.intermediate_size, config)

    def forward(self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None) -> Tensor:
        attended_TE = self.attention(hidden_TE, attention, output_R)
        return self.output(self.intermediate(self.output.normalize_input(attended_TE)), attended_TE)

    def forward_flops(self, lengths_N: np.ndarray) -> float:
        """FLOPs of the matrix products for sequences of these real lengths."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return float(lengths_N.sum() * (8 * hidden**2 + 4 * hidden * inner) + 4 * np.square(lengths_N).sum() * hidden)

    def memory(self, sizes: PassSizes, rows: int) -> LayerMemory:
        """rows: number of tokens that are computed after attention."""
        config, product, residual = self.config, sizes.product, sizes.residual
        hidden, inner, tokens = config.hidden_size, config.intermediate_size, sizes.tokens
        attention = IMPLEMENTATIONS[sizes.attention].memory(
            sizes, config.num_attention_heads, hidden, config.attention_probs_dropout_prob > 0, rows
        )
        # Inputs of LayerNorm with the dropout masks, and the inputs of linear layers and of the activation function.
        mask = sizes.mask if config.hidden_dropout_prob else 0
        after_attention = rows * (2 * hidden * (residual + mask) + (2 * hidden + 2 * inner) * product)
        # When the backward pass reaches attention, the activations of the rest of the layer are freed.
        feed_forward_backward = rows * (2 * hidden * residual + 2 * inner * product)
        attention_backward = tokens * hidden * (residual + 8 * product) + attention.backward - after_attention
        cached = (hidden**2 + 2 * hidden * inner) * product if sizes.autocast else 0  # query, key and value are fused
        return LayerMemory(
            kept=tokens * hidden * product + attention.kept + after_attention,
            input=tokens * hidden * residual,
            linear_outputs=(3 * tokens * hidden + rows * (2 * hidden + inner)) * product,
            backward=max(feed_forward_backward, attention_backward),
            weight_copies=3 * hidden**2 * product + cached,
            cached_copies=cached,
        )


class BertEncoder(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        if config.pre_layer_norm:
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self, hidden_TE: Tensor, attentions: Sequence[PreparedAttention], output_R: Tensor | None = None
    ) -> Tensor:
        """Returns the last hidden states [T, E], or [R, E] for the tokens `output_R` only: the last layer then skips
        the other tokens after its attention. `attentions`: one per layer."""
        for layer, attention in zip(self.layer[:-1], attentions[:-1], strict=True):
            hidden_TE = layer(hidden_TE, attention)
        hidden = self.layer[-1](hidden_TE, attentions[-1], output_R)
        return self.LayerNorm(hidden) if hasattr(self, "LayerNorm") else hidden


class BertPooler(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, first_NE: Tensor) -> Tensor:
        return torch.tanh(self.dense(first_NE))
