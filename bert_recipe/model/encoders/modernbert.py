"""ModernBERT (Warner et al., 2024): rotary positions, pre-norm, GeGLU, local and global attention,
no biases.

Legend: T tokens, N sequences, M masked tokens, R tokens with an output, H heads, D head size, E
hidden size.
"""

import dataclasses
import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn

from bert_recipe.model.attention import PreparedAttention, with_rotary_positions
from bert_recipe.model.costs import modernbert as modernbert_costs
from bert_recipe.model.encoders.base import EncoderModel, PreTrainedModel
from bert_recipe.model.encoders.config import (
    HEAD_ACTS,
    HIDDEN_ACTS,
    POOLINGS,
    ModelConfig,
    dropout,
    number,
    one_of,
)
from bert_recipe.model.encoders.heads import (
    MaskedLanguageModel,
    ModelsByHead,
    QuestionAnswering,
    SentenceEmbedding,
    SequenceClassification,
    TokenClassification,
)
from bert_recipe.model.encoders.modules import (
    ACTIVATIONS,
    Linear,
    OutputBias,
    Transform,
    VocabularyEmbedding,
)
from bert_recipe.model.kernels.dropout import Dropout
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.utils.json_files import JsonObject


@dataclass(frozen=True)
class ModernBertConfig(ModelConfig):
    """ModernBERT's architecture, with the keys and defaults of Hugging Face's `config.json`.

    local_attention: window of the local layers; a token attends to half as many tokens on each
    side. Token ids are those of the vocabulary, for other libraries; they are ignored when configs
    are compared.
    """

    hidden_activation: str = one_of(HIDDEN_ACTS, "gelu")
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    initializer_cutoff_factor: float = number(2.0, maximum=100)
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    attention_dropout: float = dropout(0.0)
    embedding_dropout: float = dropout(0.0)
    mlp_bias: bool = False
    mlp_dropout: float = dropout(0.0)
    decoder_bias: bool = True
    classifier_pooling: str = one_of(POOLINGS, "cls")
    classifier_dropout: float = dropout(0.0)
    classifier_bias: bool = False
    classifier_activation: str = one_of(HEAD_ACTS, "gelu")
    global_attn_every_n_layers: int = 3
    local_attention: int = 128
    global_rope_theta: float = number(160_000.0, maximum=1e12)
    local_rope_theta: float = number(10_000.0, maximum=1e12)
    pad_token_id: int | None = dataclasses.field(default=None, compare=False)
    cls_token_id: int | None = dataclasses.field(default=None, compare=False)
    sep_token_id: int | None = dataclasses.field(default=None, compare=False)
    bos_token_id: int | None = dataclasses.field(default=None, compare=False)
    eos_token_id: int | None = dataclasses.field(default=None, compare=False)

    model_types = ("modernbert",)
    model_type = "modernbert"
    options = ("global_rope_theta",)
    needs_tokenizer_json = True
    # global_rope_theta may change: a later phase with longer sequences has a larger one.
    meaning = (
        "num_attention_heads",
        "hidden_activation",
        "classifier_activation",
        "norm_eps",
        "local_attention",
        "global_attn_every_n_layers",
        "local_rope_theta",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_size % 2:
            raise ValueError(
                f"the head size {self.head_size} is odd: rotary positions need an even one"
            )
        if min(self.global_rope_theta, self.local_rope_theta) < 1:
            raise ValueError("rope thetas must be at least 1")

    @classmethod
    def from_dict(cls, values: JsonObject) -> Self:
        """See ModelConfig; in the form of transformers 4 or 5 (`layer_types` and
        `rope_parameters`).
        """
        values = dict(values)
        if values.get("position_embedding_type") == "sans_pos":  # mmBERT and Ettin: rotary only
            del values["position_embedding_type"]
        if values.get("rope_scaling") is not None:
            raise ValueError(f"rope_scaling is {values['rope_scaling']!r}; only null is supported")
        values |= rope_thetas(values.get("rope_parameters") or {})
        if (types := values.get("layer_types")) is not None:
            layers = values.get("num_hidden_layers")
            values["global_attn_every_n_layers"] = global_layers_interval(types, layers)
        window = values.get("sliding_window")  # tokens on each side, transformers' other name
        if isinstance(window, int):
            values["local_attention"] = 2 * window
        return super().from_dict(values)

    def with_linear_head(self, pooling: str) -> "ModernBertConfig":
        pooling = "mean" if pooling == "mean" else "cls"
        return replace(self, classifier_pooling=pooling, classifier_activation="linear")

    def window(self, layer: int) -> int | None:
        """The tokens on each side that a layer, counted from 0, attends to; None: all."""
        is_global = layer % self.global_attn_every_n_layers == 0
        return None if is_global else self.local_attention // 2

    @property
    def head_dropout(self) -> float:
        return self.classifier_dropout

    def with_dropout(self, prob: float) -> Self:
        return dataclasses.replace(
            self,
            embedding_dropout=prob,
            attention_dropout=prob,
            mlp_dropout=prob,
            classifier_dropout=prob,
        )

    def with_vocabulary(self, tokenizer: Any) -> Self:
        return dataclasses.replace(
            self,
            pad_token_id=tokenizer.pad_token_id,
            cls_token_id=tokenizer.cls_token_id,
            sep_token_id=tokenizer.sep_token_id,
            bos_token_id=tokenizer.cls_token_id,
            eos_token_id=tokenizer.sep_token_id,
        )


FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' types of layers


def rope_thetas(parameters: Any) -> JsonObject:
    """The thetas of ModernBertConfig in `rope_parameters` of transformers 5. Raises ValueError for
    other parameters.
    """
    fields = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
    if not isinstance(parameters, dict) or not parameters.keys() <= fields.keys():
        raise ValueError(
            f"rope_parameters must have {' and '.join(fields)} only, as transformers needs it"
        )
    thetas = {}
    for kind, rope in parameters.items():
        if not isinstance(rope, dict):
            raise ValueError(f"rope_parameters has {rope!r} for {kind}: it must be an object")
        for name, value in rope.items():
            if name == "rope_theta":
                thetas[fields[kind]] = value
            elif (name, value) != ("rope_type", "default"):
                raise ValueError(f"rope_parameters has {name} {value!r}, which is not supported")
    return thetas


def global_layers_interval(types: Any, num_layers: Any) -> int:
    """n where every n-th of the `layer_types` of transformers 5, from the first on, is global.
    Raises ValueError if no n gives these types.
    """
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(
            "layer_types must be a list with a type for each of num_hidden_layers layers"
        )
    full = [index for index, kind in enumerate(types) if kind == FULL]
    every = full[1] if len(full) > 1 else len(types)
    expected = [SLIDING if index % every else FULL for index in range(len(types))]
    if types != expected:
        raise ValueError(
            "layer_types has full_attention in other layers than every n-th from the first on"
        )
    return every


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
        self.Wqkv = Linear(
            config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias, stacked=3
        )
        self.Wo = Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)
        self.dropout = Dropout(config.attention_dropout)

    def forward(
        self,
        normed_TE: Tensor,
        residual_TE: Tensor,
        attention: PreparedAttention,
        output_R: Tensor | None,
    ) -> Tensor:
        qkv_T3HD = self.Wqkv(normed_TE).unflatten(-1, (3, self.num_attention_heads, -1))
        context_TE = attention(qkv_T3HD, self.dropout_prob if self.training else 0.0).flatten(1)
        if output_R is not None:
            context_TE = context_TE.index_select(0, output_R)
            residual_TE = residual_TE.index_select(0, output_R)
        return self.dropout(self.Wo(context_TE), residual_TE)


class ModernBertMLP(nn.Module):
    """GeGLU (Shazeer, 2020): Wo(act(a) * b), where Wi computes a and b."""

    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.Wi = Linear(
            config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias, stacked=2
        )
        self.Wo = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_activation]
        self.dropout = Dropout(config.mlp_dropout)

    def forward(self, hidden_TE: Tensor) -> Tensor:
        # For inference, Wi is another module.
        if type(self.Wi) is Linear:
            inner, gate = self.Wi.products(hidden_TE)
        else:
            inner, gate = self.Wi(hidden_TE).chunk(2, dim=-1)
        return self.Wo(self.dropout(self.activation(inner) * gate))


class ModernBertLayer(nn.Module):
    """A layer; layer 0 has no norm before its attention, because the embeddings end in one."""

    def __init__(self, config: ModernBertConfig, index: int):
        super().__init__()
        self.config = config
        self.window = config.window(index)
        self.attn_norm = make_norm(config) if index else nn.Identity()
        self.attn = ModernBertAttention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = ModernBertMLP(config)

    def forward(
        self, hidden_TE: Tensor, attention: PreparedAttention, output_R: Tensor | None = None
    ) -> Tensor:
        attended_TE = self.attn(self.attn_norm(hidden_TE), hidden_TE, attention, output_R)
        return attended_TE + self.mlp(self.mlp_norm(attended_TE))


class ModernBertPreTrainedModel(PreTrainedModel):
    base_model_prefix = "model"
    head_names = ("head.", "decoder.", "classifier.")
    tied_copies = ("decoder.weight",)
    config_class = ModernBertConfig
    config: ModernBertConfig

    @property
    def span_dropout(self) -> float:
        return self.config.classifier_dropout

    def add_encoder(self, pooling: str | None) -> None:
        self.model = ModernBertModel(self.config, pooling)

    def make_transform(self) -> nn.Module:
        config = self.config
        norm = make_norm(config)
        return Transform(
            config.hidden_size, config.classifier_activation, "norm", norm, config.classifier_bias
        )

    def draw_matrix(self, name: str, value: Tensor) -> None:
        """A normal distribution, truncated at `initializer_cutoff_factor` standard deviations."""
        config = self.config
        std = config.initializer_range
        if name.endswith(("Wo", "head.dense")):
            std /= math.sqrt(2 * config.num_hidden_layers)
        elif name == "classifier":
            std = config.hidden_size**-0.5
        limit = config.initializer_cutoff_factor * std
        nn.init.trunc_normal_(value, std=std, a=-limit, b=limit)


class ModernBertModel(ModernBertPreTrainedModel, EncoderModel):
    """The encoder. Local layers attend to a window; rotary positions of local and global layers
    differ in frequency. Input and output are those of BertModel, without a `pooler_output`.
    """

    costs: ClassVar[ModuleType] = modernbert_costs

    def __init__(self, config: ModernBertConfig, pooling: str | None = None):
        super().__init__(config, pooling)
        self.embeddings = ModernBertEmbeddings(config)
        layers = (ModernBertLayer(config, index) for index in range(config.num_hidden_layers))
        self._modules["layers"] = nn.ModuleList(layers)
        self.final_norm = make_norm(config)
        self.init_weights()

    @property
    def layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self._modules["layers"])

    def normalize_output(self, hidden: Tensor) -> Tensor:
        return self.final_norm(hidden)

    def prepare_attentions(self, stream: TokenStream, hidden_TE: Tensor) -> list[PreparedAttention]:
        config = self.config
        windows = [config.window(index) for index in range(len(self.layers))]
        prepared: dict[int | None, PreparedAttention] = {}
        for window in windows:
            if window not in prepared:
                theta = config.global_rope_theta if window is None else config.local_rope_theta
                attention = self.prepare_attention(stream, hidden_TE, window)
                prepared[window] = with_rotary_positions(
                    attention, stream.position_ids, config.head_size, theta
                )
        return [prepared[window] for window in windows]


class ModernBertForMaskedLM(ModernBertPreTrainedModel, MaskedLanguageModel):
    """ModernBERT with the masked-language-model head. Returns `prediction_logits`, see
    BertForMaskedLM.
    """

    def __init__(self, config: ModernBertConfig):
        super().__init__(config)
        self.add_encoder(None)
        self.head = self.make_transform()
        self.decoder = OutputBias(config.vocab_size if config.decoder_bias else None)
        self.init_weights(self.head_names)

    def transform(self, hidden_ME: Tensor) -> Tensor:
        return self.head(hidden_ME)

    @property
    def output_bias(self) -> Tensor | None:
        return self.decoder.bias


class ModernBertForQuestionAnswering(ModernBertPreTrainedModel, QuestionAnswering):
    """ModernBERT with a span head: a start and an end logit per token."""


class ModernBertForSequenceClassification(ModernBertPreTrainedModel, SequenceClassification):
    """ModernBERT with a classifier of texts, see heads.SequenceClassification."""


class ModernBertForTokenClassification(ModernBertPreTrainedModel, TokenClassification):
    """ModernBERT with a classifier of tokens: a logit per label for each token."""


class ModernBertForSentenceEmbedding(ModernBertPreTrainedModel, SentenceEmbedding):
    """ModernBERT with a vector for each text, see heads.SentenceEmbedding."""


MODELS: ModelsByHead = {
    "pretraining": ModernBertForMaskedLM,
    "masked_lm": ModernBertForMaskedLM,
    "question_answering": ModernBertForQuestionAnswering,
    "sequence_classification": ModernBertForSequenceClassification,
    "token_classification": ModernBertForTokenClassification,
    "sentence_embedding": ModernBertForSentenceEmbedding,
}
