"""BERT (Devlin et al., 2018) on token streams: the encoder, the pre-training heads and the span head.

Parameters carry Hugging Face's names and shapes. Every model takes either of two inputs:

    padded    model(input_ids, attention_mask, token_type_ids), each [B, S]; the mask is 1 on real tokens
    stream    model(input_ids, token_type_ids=..., position_ids=..., cu_seqlens=..., max_seqlen=...): whole sequences
              end to end without padding, see token_stream.py

Padded input is turned into a stream first: everything token-wise runs on real tokens only, and only attention sees
sequences.

Legend: T tokens in the stream, N sequences, M masked tokens, B batch, S padded length, H heads, D head size,
E hidden size, F intermediate size, V vocabulary (padded to a multiple of 64 in memory).
"""

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropout import Dropout, draw_kept, only_kept

VOCABULARY_MULTIPLE = 64  # matrix units want sizes that divide evenly
ATTENTION_IMPLEMENTATIONS = ("auto", "flash", "padded", "by_length")

# What other libraries write into a BERT config besides its architecture. Where a value would change the model, only
# the value named here is BERT as this file computes it.
FOREIGN_KEYS = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}


@dataclass(frozen=True)
class BertConfig:
    """The architecture; the same keys as Google's and Hugging Face's `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        if self.hidden_act != "gelu":
            raise ValueError(f"hidden_act is {self.hidden_act!r}: only 'gelu' (the erf form) is BERT's")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field.name} is {value!r}: it must be a whole number from 1 up")
            if field.type is float and (not isinstance(value, int | float) or isinstance(value, bool) or value < 0):
                raise ValueError(f"{field.name} is {value!r}: it must be a number from 0 up")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if max(self.hidden_dropout_prob, self.attention_probs_dropout_prob) >= 1:
            raise ValueError("dropout probabilities must be below 1")

    @classmethod
    def from_json_file(cls, path) -> "BertConfig":
        """Reads a `config.json`. A key that is missing raises ValueError; so does one that nobody knows, unless the
        file says `"model_type": "bert"`, as Hugging Face's files do: those hold many keys besides the architecture."""
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 (path may be a string)
            values = json.load(file)
        if not isinstance(values, dict):
            raise ValueError(f"{path}: expected a JSON object")
        known = {field.name for field in dataclasses.fields(cls)}
        # layer_norm_eps came after Google's files, and has one value in all of them.
        missing = sorted(known - values.keys() - {"layer_norm_eps"})
        if missing:
            raise ValueError(f"{path}: missing key {', '.join(map(repr, missing))}")
        unknown = sorted(values.keys() - known - FOREIGN_KEYS.keys() - {"model_type"})
        if unknown and values.get("model_type") != "bert":
            raise ValueError(f"{path}: unknown key {', '.join(map(repr, unknown))}")
        for key, expected in {"model_type": "bert", **FOREIGN_KEYS}.items():
            if values.get(key, expected) != expected:
                raise ValueError(f"{path}: {key} is {values[key]!r}, and this model is BERT: {expected!r}")
        try:
            return cls(**{key: value for key, value in values.items() if key in known})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def training_flops(config: BertConfig, lengths, num_masked: int) -> float:
    """Model FLOPs of forward and backward for sequences of the given real `lengths` with `num_masked` predicted
    tokens in all: 3 * [layers * sum(2*s*(4h^2 + 2hf) + 4*s^2*h) + masked * (2h^2 + 2hV) + sequences * (2h^2 + 4h)],
    counting a multiply-add as two and nothing but matrix products (Narayanan et al., 2021, appendix)."""
    h, f, vocab = config.hidden_size, config.intermediate_size, config.padded_vocab_size
    lengths = torch.as_tensor(lengths, dtype=torch.float64)
    tokens, squares = float(lengths.sum()), float(lengths.square().sum())
    layers = config.num_hidden_layers * (tokens * (8 * h * h + 4 * h * f) + 4 * squares * h)
    return 3 * (layers + num_masked * (2 * h * h + 2 * h * vocab) + len(lengths) * (2 * h * h + 4 * h))


# --- sequences in a stream --------------------------------------------------------------------------------------------


class Sequences:
    """Where the sequences lie in a stream, in the form that each attention implementation wants; made once a forward
    pass and shared by all layers."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int, num_tokens: int, implementation: str):
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.implementation = implementation
        if implementation == "by_length":
            self.groups = groups_of_like_length(cu_seqlens.tolist())
        elif implementation == "padded":
            self.index_NS, self.real_NS = padded_index(cu_seqlens, max_seqlen, num_tokens)
            self.place_T = stream_index(cu_seqlens, max_seqlen, num_tokens)


class Group(NamedTuple):
    """Neighbouring sequences that attention takes as one batch, padded to the longest where their lengths differ."""

    start: int  # the first one's first token
    lengths: list[int]

    def batched(self, states_TCHD: Tensor) -> Tensor:
        """A copy of the group's states as [C, N, H, L, D], contiguous, zero beyond each sequence's end."""
        count, longest = len(self.lengths), max(self.lengths)
        _, *channels_and_heads, size = states_TCHD.shape
        if min(self.lengths) == longest:
            states_NLCHD = states_TCHD[self.start : self.start + count * longest].unflatten(0, (count, longest))
            return states_NLCHD.permute(2, 0, 3, 1, 4).clone(memory_format=torch.contiguous_format)
        channels, heads = channels_and_heads
        padded_CNHLD = states_TCHD.new_zeros(channels, count, heads, longest, size)
        for row, states_LCHD in enumerate(self.each(states_TCHD)):
            padded_CNHLD[:, row, :, : len(states_LCHD)] = states_LCHD.permute(1, 2, 0, 3)
        return padded_CNHLD

    def unbatch(self, states_CNHLD: Tensor, out_TCHD: Tensor) -> None:
        """Writes the group's states to their places in a stream; the inverse of `batched`."""
        count, longest = len(self.lengths), max(self.lengths)
        if min(self.lengths) == longest:
            out_NLCHD = out_TCHD[self.start : self.start + count * longest].unflatten(0, (count, longest))
            out_NLCHD.copy_(states_CNHLD.permute(1, 3, 0, 2, 4))
            return
        for row, out_LCHD in enumerate(self.each(out_TCHD)):
            out_LCHD.copy_(states_CNHLD[:, row, :, : len(out_LCHD)].permute(2, 0, 1, 3))

    def each(self, states_T: Tensor) -> tuple[Tensor, ...]:
        """The sequences' parts of a stream, as views."""
        return states_T[self.start : self.start + sum(self.lengths)].split(self.lengths)


# Lengths are alike where padding the shorter one makes attention's work a fifth more at the most, which is less than a
# batch of its own costs in calls. Many sequences of one length stay without padding.
LIKE_LENGTHS, RUN_OF_ITS_OWN = 0.9, 4


def groups_of_like_length(cu_seqlens: list[int]) -> list[Group]:
    """The sequences of a stream as batches of neighbours; empty sequences are left out."""
    groups: list[Group] = []
    mixed: list[int] | None = None  # the lengths of the last group, where it may take more
    start = cu_seqlens[0]
    lengths = [end - begin for begin, end in itertools.pairwise(cu_seqlens) if end > begin]
    for length, repeats in itertools.groupby(lengths):
        run = list(repeats)
        joined = [*(mixed or ()), length]
        if mixed and len(run) < RUN_OF_ITS_OWN and min(joined) >= LIKE_LENGTHS * max(joined):
            mixed.extend(run)
        else:
            groups.append(Group(start, run))
            mixed = run if len(run) < RUN_OF_ITS_OWN else None
        start += sum(run)
    return groups


def padded_index(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The stream's place of each padded token, and which of them are real; both [N, S]."""
    offsets_S = torch.arange(max_seqlen, device=cu_seqlens.device)
    starts_N1, lengths_N1 = cu_seqlens[:-1, None], cu_seqlens.diff()[:, None]
    return (starts_N1 + offsets_S).clamp(max=num_tokens - 1), offsets_S < lengths_N1


def stream_index(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> Tensor:
    """The place of each of the stream's tokens in a padded view [N * S], as [T]."""
    tokens_T = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence_T = torch.searchsorted(cu_seqlens[1:], tokens_T, right=True)
    return sequence_T * max_seqlen + tokens_T - cu_seqlens[sequence_T]


def attention(qkv_T3HD: Tensor, sequences: Sequences, dropout_prob: float) -> Tensor:
    """Scaled dot-product attention within each sequence of the stream, of queries, keys and values; [T, H, D]."""
    if sequences.implementation == "by_length":
        return AttentionByLength.apply(qkv_T3HD, sequences.groups, dropout_prob)
    if sequences.implementation == "flash":
        # torch's public varlen_attn has no dropout; the operator below it does, and carries its own derivative.
        out_THD, *_ = torch.ops.aten._flash_attention_forward(
            *qkv_T3HD.unbind(1),
            sequences.cu_seqlens,
            sequences.cu_seqlens,
            sequences.max_seqlen,
            sequences.max_seqlen,
            dropout_prob,
            False,  # is_causal
            False,  # return_debug_mask
        )
        return out_THD
    query_NHSD, key_NHSD, value_NHSD = qkv_T3HD[sequences.index_NS].permute(2, 0, 3, 1, 4)
    # Rows of an empty sequence would see no key at all, and softmax over nothing is NaN: they see every key.
    mask_N11S = (sequences.real_NS | ~sequences.real_NS.any(dim=1, keepdim=True))[:, None, None, :]
    out_NHSD = F.scaled_dot_product_attention(
        query_NHSD, key_NHSD, value_NHSD, attn_mask=mask_N11S, dropout_p=dropout_prob
    )
    return out_NHSD.transpose(1, 2).flatten(0, 1)[sequences.place_T]


class AttentionByLength(torch.autograd.Function):
    """softmax(QK' / sqrt(D)) V group by group, [T, 3, H, D] to [T, H, D], with dropout on the probabilities.

    Written out for the CPU, where scaled_dot_product_attention is 4 times slower in bfloat16 (its backward is), falls
    back to an even slower path under dropout, and wants a mask. It keeps the probabilities for the backward pass: 2
    bytes a pair of tokens and head in bfloat16, and as many for the dropout mask.
    """

    @staticmethod
    def forward(ctx, qkv_T3HD: Tensor, groups: list[Group], dropout_prob: float) -> Tensor:
        out_THD = torch.empty_like(qkv_T3HD[:, 0], memory_format=torch.contiguous_format)
        scale = 1 / math.sqrt(qkv_T3HD.shape[-1])
        saved: list[Tensor | None] = []
        for group in groups:
            qkv_3NHLD = group.batched(qkv_T3HD)
            query, key, value = qkv_3NHLD.flatten(1, 2)
            scores_BLL = torch.bmm(query.mul_(scale), key.transpose(1, 2))
            for row, length in enumerate(group.lengths):
                if length < scores_BLL.shape[-1]:
                    scores_BLL.unflatten(0, (len(group.lengths), -1))[row, :, :, length:] = -math.inf
            probs_BLL = scores_BLL.softmax(dim=-1)
            kept, keep_scale = draw_kept(probs_BLL, dropout_prob)
            out_BLD = torch.bmm(only_kept(probs_BLL, kept), value).mul_(keep_scale)
            group.unbatch(out_BLD.view_as(qkv_3NHLD[:1]), out_THD[:, None])
            saved += [qkv_3NHLD, probs_BLL, kept]
        ctx.save_for_backward(*saved)
        ctx.groups, ctx.scale, ctx.keep_scale = groups, scale, keep_scale
        return out_THD

    @staticmethod
    def backward(ctx, grad_THD: Tensor):
        grad_T3HD = grad_THD.new_empty(len(grad_THD), 3, *grad_THD.shape[1:])
        saved = iter(ctx.saved_tensors)
        for group, qkv_3NHLD, probs_BLL, kept in zip(ctx.groups, saved, saved, saved, strict=True):
            query, key, value = qkv_3NHLD.flatten(1, 2)  # the query is scaled
            grad_BLD = group.batched(grad_THD[:, None]).flatten(0, 2).mul_(ctx.keep_scale)
            grad_3NHLD = torch.empty_like(qkv_3NHLD)
            grad_query, grad_key, grad_value = grad_3NHLD.flatten(1, 2)
            torch.bmm(only_kept(probs_BLL, kept).transpose(1, 2), grad_BLD, out=grad_value)
            grad_probs_BLL = only_kept(torch.bmm(grad_BLD, value.transpose(1, 2)), kept)
            grad_scores_BLL = torch._softmax_backward_data(grad_probs_BLL, probs_BLL, -1, probs_BLL.dtype)
            torch.bmm(grad_scores_BLL, key, out=grad_query).mul_(ctx.scale)
            torch.bmm(grad_scores_BLL.transpose(1, 2), query, out=grad_key)
            group.unbatch(grad_3NHLD, grad_T3HD)
        return grad_T3HD, None, None


# --- the encoder ------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """Without values of its own: the whole model's are drawn once, by `BertPreTrainedModel.init_weights`."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """Without values of its own, like Linear."""

    def reset_parameters(self) -> None:
        pass


class VocabularyEmbedding(Embedding):
    """Word embeddings with rows up to a multiple of 64. The extra rows are zero, are never looked up, get no
    gradient, and are left out of the state dict."""

    def __init__(self, config: BertConfig):
        super().__init__(config.padded_vocab_size, config.hidden_size)
        self.vocab_size = config.vocab_size
        self.register_state_dict_post_hook(VocabularyEmbedding._cut)
        self.register_load_state_dict_pre_hook(VocabularyEmbedding._fill)

    @staticmethod
    def _cut(module, state_dict, prefix, local_metadata) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"][: module.vocab_size]

    @staticmethod
    def _fill(module, state_dict, prefix, *_) -> None:
        weight_VE = state_dict.get(prefix + "weight")
        if weight_VE is not None and len(weight_VE) == module.vocab_size:
            filler_rows = module.num_embeddings - module.vocab_size
            state_dict[prefix + "weight"] = F.pad(weight_VE, (0, 0, 0, filler_rows))


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
        self.joined: tuple[Tensor, Tensor] | None = None  # see `prepare_for_inference`

    def join(self) -> tuple[Tensor, Tensor]:
        """Weight [3E, E] and bias [3E] of query, key and value as one: hidden states are then read, cast and given a
        gradient once."""
        projections = (self.query, self.key, self.value)
        return torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections])

    def forward(self, hidden_TE: Tensor, sequences: Sequences) -> Tensor:
        weight, bias = self.joined or self.join()
        qkv_T3HD = F.linear(hidden_TE, weight, bias).unflatten(-1, (3, self.num_attention_heads, -1))
        return attention(qkv_T3HD, sequences, self.dropout_prob if self.training else 0.0).flatten(1)


class BertResidualOutput(nn.Module):
    """dense, dropout, residual, LayerNorm: what ends both halves of a layer."""

    def __init__(self, in_features: int, config: BertConfig):
        super().__init__()
        self.dense = Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, inner: Tensor, residual_TE: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(inner), residual_TE))


class BertAttention(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertResidualOutput(config.hidden_size, config)

    def forward(self, hidden_TE: Tensor, sequences: Sequences, wanted_R: Tensor | None = None) -> Tensor:
        context_TE = self.self(hidden_TE, sequences)
        if wanted_R is not None:
            context_TE, hidden_TE = context_TE.index_select(0, wanted_R), hidden_TE.index_select(0, wanted_R)
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

    def forward(self, hidden_TE: Tensor, sequences: Sequences, wanted_R: Tensor | None = None) -> Tensor:
        attended_TE = self.attention(hidden_TE, sequences, wanted_R)
        return self.output(self.intermediate(attended_TE), attended_TE)


class BertEncoder(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, hidden_TE: Tensor, sequences: Sequences, wanted_R: Tensor | None = None) -> Tensor:
        """The last states [T, E], or [R, E] of the tokens `wanted_R` alone: after its attention, the last layer
        computes nothing for the others."""
        for layer in self.layer[:-1]:
            hidden_TE = layer(hidden_TE, sequences)
        return self.layer[-1](hidden_TE, sequences, wanted_R)


class BertPooler(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, first_NE: Tensor) -> Tensor:
        return torch.tanh(self.dense(first_NE))


# --- the models -------------------------------------------------------------------------------------------------------


class EncoderOutput(NamedTuple):
    last_hidden_state: Tensor  # [T, E] of a stream, [B, S, E] of padded input, zero on padding; or [M, E], see there
    pooler_output: Tensor | None  # [N, E] or [B, E]; None without a pooler


class PreTrainingOutput(NamedTuple):
    prediction_logits: Tensor  # [M, V] at `mlm_positions`; without them [T, V], or [B, S, V] of padded input
    seq_relationship_logits: Tensor  # [N, 2] or [B, 2]


class SpanOutput(NamedTuple):
    start_logits: Tensor  # [T], or [B, S] of padded input
    end_logits: Tensor


class BertPreTrainedModel(nn.Module):
    """What the models share: initial weights, and Hugging Face model folders."""

    config: BertConfig

    def init_weights(self, parts: str | tuple[str, ...] = "") -> None:
        """Draws the initial values of all modules whose names start with one of `parts`."""
        for name, module in self.named_modules():
            if not f"{name}.".startswith(parts):
                continue
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear | BertLMPredictionHead):
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            if isinstance(module, VocabularyEmbedding):
                nn.init.zeros_(module.weight[module.vocab_size :])

    @torch.no_grad()
    def prepare_for_inference(self, dtype: torch.dtype) -> None:
        """Holds what products multiply with in `dtype`, the type that they compute in, in place of having autocast
        make it anew in every forward pass: the same logits, sooner. Not to be trained or saved afterwards."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.to(dtype)
        for module in self.modules():
            if isinstance(module, BertSelfAttention):
                module.joined = module.join()
                module.query = module.key = module.value = None

    @classmethod
    def from_pretrained(cls, folder, **kwargs):
        """The model in `folder`, which holds `config.json` and `model.safetensors`: a checkpoint of this project's or
        a Hugging Face model folder. Heads that the folder lacks keep their initial weights, and a note names them;
        any other missing or misshapen tensor is an error that names it."""
        from utils.checkpoint import load_pretrained  # here, since a model needs no file format to be a model

        return load_pretrained(cls, BertConfig, folder, **kwargs)


class BertModel(BertPreTrainedModel):
    """The encoder with its pooler. `attention_implementation`: `flash` (variable-length flash attention, CUDA, 16-bit),
    `padded` (a padded view with a mask, anywhere), `by_length` (runs of equal length without a mask; it reads the
    lengths on the host, so it is meant for the CPU), or `auto`, which takes the best of these for the device.

    With `wanted_positions` [M], places in the stream (or in the flattened padded input), the last states are those of
    these tokens alone, [M, E], and the last layer's feed-forward half runs on them and the pooled tokens only."""

    optional_heads = ("pooler.",)

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True):
        super().__init__()
        self.config = config
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
        wanted_positions: Tensor | None = None,
    ) -> EncoderOutput:
        if cu_seqlens is None:
            return self._forward_padded(input_ids, attention_mask, token_type_ids, wanted_positions)
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
        sequences = Sequences(cu_seqlens, max_seqlen, len(input_ids), self._implementation(hidden_TE))
        # A filler sequence may be empty and start at T; its pooled state is never used.
        first_N = cu_seqlens[:-1].clamp(max=len(input_ids) - 1)
        if wanted_positions is None:
            last_TE = self.encoder(hidden_TE, sequences)
            return EncoderOutput(last_TE, self.pooler(last_TE[first_N]) if self.pooler is not None else None)
        last_RE = self.encoder(hidden_TE, sequences, torch.cat([first_N, wanted_positions]))
        first_NE, last_ME = last_RE.tensor_split([len(first_N)])
        return EncoderOutput(last_ME, self.pooler(first_NE) if self.pooler is not None else None)

    def _forward_padded(self, input_ids, attention_mask, token_type_ids, wanted_positions) -> EncoderOutput:
        if input_ids.dim() != 2:
            raise ValueError(f"expected input_ids [B, S], or cu_seqlens with a stream; got {tuple(input_ids.shape)}")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        batch, length = input_ids.shape
        real_BS = attention_mask.bool()
        # A stream has each sequence's first token in front, which is what the pooler reads; so does padded BERT.
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
            wanted_positions=torch.searchsorted(flat_T, wanted_positions) if wanted_positions is not None else None,
        )
        if wanted_positions is not None:
            return encoded
        hidden_BSE = to_padded(encoded.last_hidden_state, flat_T, batch, length)
        return EncoderOutput(hidden_BSE, encoded.pooler_output)

    def _implementation(self, hidden_TE: Tensor) -> str:
        if self.attention_implementation != "auto":
            return self.attention_implementation
        if hidden_TE.device.type != "cuda":
            return "by_length"
        half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden_TE.dtype
        return "flash" if half in (torch.float16, torch.bfloat16) else "padded"


def to_padded(states: Tensor, flat_T: Tensor, batch: int, length: int) -> Tensor:
    """Puts the stream's `states` [T, ...] at the places `flat_T` of a padded tensor [batch, length, ...]."""
    padded = states.new_zeros(batch * length, *states.shape[1:])
    return padded.index_copy(0, flat_T, states).unflatten(0, (batch, length))


class BertPredictionHeadTransform(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_ME: Tensor) -> Tensor:
        return self.LayerNorm(F.gelu(self.dense(hidden_ME)))


class BertLMPredictionHead(nn.Module):
    """The masked-token head; its output matrix is the word embedding, so it holds only the transform and a bias."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, hidden_ME: Tensor, embedding_VE: Tensor) -> Tensor:
        # The vocabulary's filler rows take no probability: their logits are -inf, and so exactly no gradient.
        bias_V = F.pad(self.bias, (0, len(embedding_VE) - len(self.bias)), value=-math.inf)
        return F.linear(self.transform(hidden_ME), embedding_VE, bias_V)


class BertPreTrainingHeads(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = Linear(config.hidden_size, 2)


class BertForPreTraining(BertPreTrainedModel):
    """Masked-language-model and next-sentence heads. With `mlm_positions` [M], places in the stream (or in the
    flattened padded input), the vocabulary is predicted for those tokens only."""

    optional_heads = ("cls.", "bert.pooler.")

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
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
            input_ids, attention_mask, token_type_ids, wanted_positions=mlm_positions, **stream
        )
        logits = self.cls.predictions(hidden, self.bert.embeddings.word_embeddings.weight)
        if mlm_positions is None:  # whoever asks for all tokens wants the vocabulary as it is
            logits = logits[..., : self.config.vocab_size]
        return PreTrainingOutput(logits, self.cls.seq_relationship(pooled_NE))


class BertForQuestionAnswering(BertPreTrainedModel):
    """Start and end of an answer's span: one logit a token each."""

    optional_heads = ("qa_outputs.",)

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
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
