"""BERT (Devlin et al., 2018) on token streams: the encoder, and heads for pre-training, spans and classification.

Parameters carry Hugging Face's names and shapes. Every model takes either of two inputs:

    padded    model(input_ids, attention_mask, token_type_ids), each [B, S]; the mask is 1 on real tokens
    stream    model(input_ids, token_type_ids=..., position_ids=..., cu_seqlens=..., max_seqlen=...): whole sequences
              end to end without padding, see data_loading/packing.py

Padded input is turned into a stream first. All token-wise layers run on real tokens only; only attention sees
sequences (attention.py).

Legend: T tokens in the stream, N sequences, M masked tokens, R tokens whose output is used, B batch, S padded length,
H heads, D head size, E hidden size, C labels, V vocabulary (padded to a multiple of 64 in memory).

One file for the encoder and all heads, as in Hugging Face's and Google's code, which makes it longer than the others.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import PreparedAttention, default_implementation, prepare_attention
from bert_config import BertConfig
from cpu.dropout import Dropout
from cpu.packed_linear import PackedLinear
from data_loading.packing import to_padded

# --- the encoder ------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """nn.Linear that skips its own initialization; `init_weights` initializes the whole model once."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """nn.Embedding that skips its own initialization, like Linear."""

    def reset_parameters(self) -> None:
        pass


class VocabularyEmbedding(Embedding):
    """Word embeddings, padded to a multiple of 64 rows in memory. The padding rows are zero, are never looked up, get
    no gradient, and are not part of the state dict."""

    def __init__(self, config: BertConfig):
        super().__init__(config.padded_vocab_size, config.hidden_size)
        self.vocab_size = config.vocab_size
        self.register_state_dict_post_hook(VocabularyEmbedding.strip_vocab_padding)
        self.register_load_state_dict_pre_hook(VocabularyEmbedding.pad_vocab)

    @staticmethod
    def strip_vocab_padding(module, state_dict, prefix, local_metadata) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"][: module.vocab_size]

    @staticmethod
    def pad_vocab(module, state_dict, prefix, *_) -> None:
        weight_VE = state_dict.get(prefix + "weight")
        if weight_VE is not None and len(weight_VE) == module.vocab_size:
            padding_rows = module.num_embeddings - module.vocab_size
            state_dict[prefix + "weight"] = F.pad(weight_VE, (0, 0, 0, padding_rows))


class BertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.word_embeddings = VocabularyEmbedding(config)
        self.position_embeddings = Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden_TE = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        hidden_TE = hidden_TE + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(hidden_TE))


class BertSelfAttention(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.dropout_prob = config.attention_probs_dropout_prob
        self.query = Linear(config.hidden_size, config.hidden_size)
        self.key = Linear(config.hidden_size, config.hidden_size)
        self.value = Linear(config.hidden_size, config.hidden_size)
        self.qkv: nn.Module | None = None  # the three in one, see `prepare_for_inference`

    def fuse_qkv(self) -> tuple[Tensor, Tensor]:
        """Weight [3E, E] and bias [3E] of query, key and value in one, so that one product reads, casts and
        differentiates the hidden states once."""
        projections = (self.query, self.key, self.value)
        return torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections])

    def forward(self, hidden_TE: Tensor, attention: PreparedAttention) -> Tensor:
        qkv = self.qkv(hidden_TE) if self.qkv is not None else F.linear(hidden_TE, *self.fuse_qkv())
        qkv_T3HD = qkv.unflatten(-1, (3, self.num_attention_heads, -1))
        return attention(qkv_T3HD, self.dropout_prob if self.training else 0.0).flatten(1)


class BertResidualOutput(nn.Module):
    """The end of both halves of a layer: dense, dropout, residual, LayerNorm. With pre-LN, LayerNorm is applied to the
    input of the half instead (Xiong et al., 2020), by `normalize_input`."""

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

    def forward(self, hidden_TE: Tensor) -> Tensor:
        return F.gelu(self.dense(hidden_TE))


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertResidualOutput(config.intermediate_size, config)

    def forward(self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None) -> Tensor:
        attended_TE = self.attention(hidden_TE, attention, output_R)
        return self.output(self.intermediate(self.output.normalize_input(attended_TE)), attended_TE)


class BertEncoder(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        if config.pre_layer_norm:
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None) -> Tensor:
        """The last hidden states [T, E], or [R, E] of the tokens `output_R` only: then the last layer computes nothing
        for the other tokens after its attention."""
        for layer in self.layer[:-1]:
            hidden_TE = layer(hidden_TE, attention)
        hidden = self.layer[-1](hidden_TE, attention, output_R)
        return self.LayerNorm(hidden) if hasattr(self, "LayerNorm") else hidden


class BertPooler(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, first_NE: Tensor) -> Tensor:
        return torch.tanh(self.dense(first_NE))


# --- the models -------------------------------------------------------------------------------------------------------


class EncoderOutput(NamedTuple):
    last_hidden_state: (
        Tensor  # [T, E] of a stream, [B, S, E] of padded input, zero on padding; or [M, E] at `output_positions`
    )
    pooler_output: Tensor | None  # [N, E] or [B, E]; None without a pooler


class PreTrainingOutput(NamedTuple):
    prediction_logits: Tensor  # [M, V] at `mlm_positions`; without them [T, V], or [B, S, V] of padded input
    seq_relationship_logits: Tensor  # [N, 2] or [B, 2]


class SpanOutput(NamedTuple):
    start_logits: Tensor  # [T], or [B, S] of padded input
    end_logits: Tensor

    @property
    def logits(self) -> Tensor:
        """Both in one, [T, 2] or [B, S, 2]."""
        return torch.stack(self, dim=-1)


class ClassificationOutput(NamedTuple):
    logits: Tensor  # [N, C], or [B, C] of padded input; of tokens [T, C] or [B, S, C]


class BertPreTrainedModel(nn.Module):
    """Base class: initial weights, inference mode, and loading from Hugging Face model folders."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.architecture = type(self).__name__  # sharding changes the class

    def initial_values(self, parts: str | tuple[str, ...] = "") -> Iterator[tuple[str, Tensor]]:
        """The names and initial values, from torch's random state, of all parameters whose names start with one of
        `parts`. Values are drawn on the CPU for every device, and as whole tensors if the parameters are sharded."""
        for name, module in self.named_modules():
            if not f"{name}.".startswith(parts):
                continue
            for key, p in module.named_parameters(prefix=name, recurse=False):
                value = torch.empty(p.shape, dtype=torch.float32, device="meta" if p.is_meta else "cpu")
                if key.endswith("bias"):
                    value.zero_()
                elif isinstance(module, nn.LayerNorm):
                    value.fill_(1.0)
                else:
                    value.normal_(std=self.config.initializer_range)
                if isinstance(module, VocabularyEmbedding):
                    value[module.vocab_size :] = 0
                yield key, value

    @torch.no_grad()
    def init_weights(self, parts: str | tuple[str, ...] = "") -> None:
        """Initializes all parameters whose names start with one of `parts`."""
        parameters = dict(self.named_parameters())
        for name, value in self.initial_values(parts):
            parameters[name].copy_(value)

    @torch.no_grad()
    def prepare_for_inference(self, dtype: torch.dtype) -> None:
        """Casts Linear weights to `dtype`, fuses QKV and packs weights (see PackedLinear) once, instead of in every
        forward pass. The logits are the same. Inference only: do not train or save the model afterwards."""
        for module in self.modules():
            if isinstance(module, BertSelfAttention):
                weight, bias = module.fuse_qkv()
                module.qkv = Linear(*weight.T.shape)
                module.qkv.weight, module.qkv.bias = nn.Parameter(weight), nn.Parameter(bias)
                module.query = module.key = module.value = None
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    child.to(dtype)
                    setattr(module, name, PackedLinear(child) if PackedLinear.supports(child.weight) else child)

    @classmethod
    def from_pretrained(cls, folder, **kwargs):
        """Loads the model in `folder`: a checkpoint of this project or a Hugging Face model folder.

        Heads that the folder lacks keep their initial weights, and a note names them. Raises UserError, naming the
        tensor, for any other missing, unexpected or misshapen tensor."""
        from checkpoint.weights import load_pretrained  # imported here: the model itself needs no file format

        return load_pretrained(cls, folder, **kwargs)


class BertModel(BertPreTrainedModel):
    """The encoder with its pooler. `attention_implementation` is a key of attention.IMPLEMENTATIONS, or `auto`: the
    fastest one for the device.

    With `output_positions` [M], places in the stream (or in the flattened padded input), the last hidden states are
    those of these tokens only, [M, E], and the last layer's feed-forward half runs on them and the pooled tokens."""

    optional_heads = ("pooler.",)

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.attention_implementation = "auto"
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.init_weights()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        output_positions: Tensor | None = None,
    ) -> EncoderOutput:
        if cu_seqlens is None:
            return self._forward_padded(input_ids, attention_mask, token_type_ids, output_positions)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        if max_seqlen is None:
            max_seqlen = int(cu_seqlens.diff().max())
        if position_ids is None:
            starts_N = cu_seqlens[:-1].long()
            position_ids = torch.arange(len(input_ids), device=input_ids.device) - starts_N.repeat_interleave(
                cu_seqlens.diff(), output_size=len(input_ids)
            )
        hidden_TE = self.embeddings(input_ids, token_type_ids, position_ids)
        attention = prepare_attention(self._attention_implementation(hidden_TE), cu_seqlens, max_seqlen, len(input_ids))
        # An empty filler sequence may start at T; its pooled state is not used.
        first_N = cu_seqlens[:-1].clamp(max=len(input_ids) - 1)
        if output_positions is None:
            last_TE = self.encoder(hidden_TE, attention)
            return EncoderOutput(last_TE, self.pooler(last_TE[first_N]) if self.pooler is not None else None)
        last_RE = self.encoder(hidden_TE, attention, torch.cat([first_N, output_positions]))
        first_NE, last_ME = last_RE.tensor_split([len(first_N)])
        return EncoderOutput(last_ME, self.pooler(first_NE) if self.pooler is not None else None)

    def _forward_padded(self, input_ids, attention_mask, token_type_ids, output_positions) -> EncoderOutput:
        if input_ids.dim() != 2:
            raise ValueError(f"expected input_ids [B, S], or cu_seqlens with a stream; got {tuple(input_ids.shape)}")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        batch, length = input_ids.shape
        real_BS = attention_mask.bool()
        # The pooler reads the first token of each sequence.
        if not bool(real_BS[:, 0].all()):
            raise ValueError("attention_mask must be 1 on the first token of every row: pad on the right")
        flat_T = real_BS.flatten().nonzero().squeeze(1)
        position_BS = torch.arange(length, device=input_ids.device).expand(batch, length)
        encoded = self(
            input_ids.flatten()[flat_T],
            token_type_ids=token_type_ids.flatten()[flat_T],
            position_ids=position_BS.flatten()[flat_T],
            cu_seqlens=F.pad(real_BS.sum(dim=1).cumsum(dim=0), (1, 0)).int(),
            max_seqlen=length,
            output_positions=torch.searchsorted(flat_T, output_positions) if output_positions is not None else None,
        )
        if output_positions is not None:
            return encoded
        hidden_BSE = to_padded(encoded.last_hidden_state, flat_T, batch, length)
        return EncoderOutput(hidden_BSE, encoded.pooler_output)

    def _attention_implementation(self, hidden_TE: Tensor) -> str:
        if self.attention_implementation != "auto":
            return self.attention_implementation
        device = hidden_TE.device
        autocast = torch.is_autocast_enabled(device.type) if device.type == "cuda" else False
        return default_implementation(device, torch.get_autocast_dtype("cuda") if autocast else hidden_TE.dtype)


class BertPredictionHeadTransform(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_ME: Tensor) -> Tensor:
        return self.LayerNorm(F.gelu(self.dense(hidden_ME)))


class BertLMPredictionHead(nn.Module):
    """The masked-token head. Its output matrix is the word embedding, so it holds only the transform and a bias."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, hidden_ME: Tensor, embedding_VE: Tensor) -> Tensor:
        # The vocabulary's padding rows get no probability: their logits are -inf, so their gradient is exactly zero.
        bias_V = F.pad(self.bias, (0, len(embedding_VE) - len(self.bias)), value=-math.inf)
        return F.linear(self.transform(hidden_ME), embedding_VE, bias_V)


class BertPreTrainingHeads(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = Linear(config.hidden_size, 2)


class BertForPreTraining(BertPreTrainedModel):
    """BERT with the masked-language-model and next-sentence heads. With `mlm_positions` [M], places in the stream (or
    in the flattened padded input), the vocabulary is predicted for those tokens only."""

    optional_heads = ("cls.", "bert.pooler.")

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self.init_weights("cls.")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        mlm_positions: Tensor | None = None,
        **stream,
    ) -> PreTrainingOutput:
        hidden, pooled_NE = self.bert(
            input_ids, attention_mask, token_type_ids, output_positions=mlm_positions, **stream
        )
        logits = self.cls.predictions(hidden, self.bert.embeddings.word_embeddings.weight)
        if mlm_positions is None:  # without the padding: callers expect the real vocabulary
            logits = logits[..., : self.config.vocab_size]
        return PreTrainingOutput(logits, self.cls.seq_relationship(pooled_NE))


class BertForQuestionAnswering(BertPreTrainedModel):
    """BERT with a span head: a start and an end logit per token."""

    optional_heads = ("qa_outputs.",)

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.qa_outputs = Linear(config.hidden_size, 2)
        self.init_weights("qa_outputs.")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **stream,
    ) -> SpanOutput:
        hidden = self.bert(input_ids, attention_mask, token_type_ids, **stream).last_hidden_state
        return SpanOutput(*self.qa_outputs(hidden).unbind(dim=-1))


class BertForSequenceClassification(BertPreTrainedModel):
    """BERT with a classifier on the pooled first token: a logit per label of the config, or the predicted number itself
    where there is one label (regression)."""

    optional_heads = ("classifier.", "bert.pooler.")

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.bert = BertModel(config)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = Linear(config.hidden_size, config.num_labels)
        self.init_weights("classifier.")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **stream,
    ) -> ClassificationOutput:
        nothing = input_ids.new_empty(0)  # the last layer then computes the pooled tokens only
        encoded = self.bert(input_ids, attention_mask, token_type_ids, output_positions=nothing, **stream)
        pooled_NE = encoded.pooler_output
        return ClassificationOutput(self.classifier(self.dropout(pooled_NE)))


class BertForTokenClassification(BertPreTrainedModel):
    """BERT with a classifier on each token: a logit per label of the config."""

    optional_heads = ("classifier.",)

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = Linear(config.hidden_size, config.num_labels)
        self.init_weights("classifier.")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **stream,
    ) -> ClassificationOutput:
        hidden = self.bert(input_ids, attention_mask, token_type_ids, **stream).last_hidden_state
        return ClassificationOutput(self.classifier(self.dropout(hidden)))
