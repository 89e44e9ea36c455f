"""Architecture of a model, as in `config.json`: BERT (Devlin et al., 2018) and ModernBERT (Warner et al., 2024)."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

PRE_LN_MODEL_TYPE = "bert_pre_layer_norm"
MULTI_LABEL = "multi_label_classification"
VOCAB_MULTIPLE = 64  # the vocabulary is padded to a multiple of this, for matrix units
HIDDEN_ACTS = ("gelu", "gelu_new", "gelu_pytorch_tanh")  # the erf form; the other two are the same tanh form
POOLINGS = ("cls", "mean")
ACTIVATIONS = ("hidden_act", "hidden_activation", "classifier_activation")
CHOICES = dict.fromkeys(ACTIVATIONS, HIDDEN_ACTS) | {"classifier_pooling": POOLINGS}

# Upper bounds, far above any real model, so that sizes can be computed before memory is allocated.
MAX_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "intermediate_size": 2**20,
    "max_position_embeddings": 2**20,
    "type_vocab_size": 2**10,
    "global_attn_every_n_layers": 2**12,
    "local_attention": 2**20,
    "global_rope_theta": 1e12,
    "local_rope_theta": 1e12,
    "initializer_cutoff_factor": 100,
}

# Keys of other libraries that change the model. Only these values are supported.
FOREIGN_KEYS = {"is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True}


@dataclass(frozen=True)
class ModelConfig:
    """The part of the architecture that all encoders have.

    labels: class names of a classification head (Hugging Face's `id2label`); a single one means regression.
    multi_label: labels are independent (Hugging Face's `problem_type`). Both are ignored when configs are compared."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    labels: tuple[str, ...] = dataclasses.field(default=(), compare=False, kw_only=True)
    multi_label: bool = dataclasses.field(default=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, limit = getattr(self, field.name), MAX_SIZES.get(field.name, 1)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if field.type is int and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field.name} is {value!r}: it must be a whole number >= 1")
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name} is {value!r}: it must be true or false")
            if field.type is int and value > limit:
                raise ValueError(f"{field.name} is {value}: at most {limit} is possible")
            if field.type is float and (not is_number or not 0 <= value <= limit):
                raise ValueError(f"{field.name} is {value!r}: it must be a number from 0 to {limit:g}")
            if "dropout" in field.name and value == 1:
                raise ValueError("dropout probabilities must be below 1")
            if field.name in CHOICES and value not in CHOICES[field.name]:
                raise ValueError(f"{field.name} is {value!r}: it must be one of {', '.join(CHOICES[field.name])}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )

    @classmethod
    def from_values(cls, values: dict[str, Any], optional: set[str]) -> Self:
        """The config from the known keys in `values`. Raises ValueError for a missing key that is not in `optional`,
        and for a key whose value is not supported."""
        known = {field.name for field in dataclasses.fields(cls)} - {"labels", "multi_label"}
        if missing := sorted(known - values.keys() - optional):
            raise ValueError(f"missing key {', '.join(map(repr, missing))}")
        for key, expected in FOREIGN_KEYS.items():
            if values.get(key, expected) != expected:
                raise ValueError(f"{key} is {values[key]!r}; only {expected!r} is supported")
        return cls(
            **{key: value for key, value in values.items() if key in known},
            labels=labels_from_json(values.get("id2label") or {}),
            multi_label=values.get("problem_type") == MULTI_LABEL,
        )

    @classmethod
    def from_json_file(cls, path) -> Self:
        """Reads a `config.json`; see `from_dict`."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{path}: expected a JSON object")
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict:
        """The content of `config.json`; with `id2label` and `label2id` if there are labels."""
        values = {"model_type": self.model_type, **dataclasses.asdict(self)}
        if values.pop("multi_label"):
            values["problem_type"] = MULTI_LABEL
        if labels := values.pop("labels"):
            values["id2label"] = {str(index): label for index, label in enumerate(labels)}
            values["label2id"] = {label: index for index, label in enumerate(labels)}
        return values

    @property
    def num_labels(self) -> int:
        """Number of labels of a classification head: 2 if they have no names, as in transformers."""
        return len(self.labels) or 2

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def with_vocabulary(self, _tokenizer: Any) -> Self:
        """The config with the ids of special tokens."""
        return self


@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """BERT's architecture, with the keys of Google's and Hugging Face's `config.json`."""

    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pre_layer_norm: bool = False  # LayerNorm before attention and feed-forward, and after the last layer

    # Keys that change the meaning of weights of the same shapes.
    meaning = ("num_attention_heads", "hidden_act", "layer_norm_eps", "pre_layer_norm")

    @classmethod
    def from_dict(cls, values: dict) -> Self:
        """Builds a config from the content of `config.json`. Raises ValueError for a missing key, and for an unknown
        key unless `"model_type": "bert"` is set, as in Hugging Face's files, which contain many other keys."""
        # Google's files have no layer_norm_eps; the value is 1e-12 in all of them.
        optional = {"layer_norm_eps", "pre_layer_norm"}
        model_type = PRE_LN_MODEL_TYPE if values.get("pre_layer_norm") else "bert"
        foreign = {"model_type": model_type, "position_embedding_type": "absolute"}
        known = {field.name for field in dataclasses.fields(cls)} | FOREIGN_KEYS.keys() | foreign.keys()
        unknown = sorted(values.keys() - known)
        if unknown and values.get("model_type") not in ("bert", PRE_LN_MODEL_TYPE):
            raise ValueError(f"unknown key {', '.join(map(repr, unknown))}")
        for key, expected in foreign.items():
            if values.get(key, expected) != expected:
                raise ValueError(f"{key} is {values[key]!r}; this model is BERT: {expected!r}")
        return cls.from_values(values, optional)

    @property
    def model_type(self) -> str:
        """transformers has no pre-LN BERT, so a pre-LN config has another model type: transformers would load it as
        post-LN."""
        return PRE_LN_MODEL_TYPE if self.pre_layer_norm else "bert"

    # The names that ModernBERT has for the same settings.
    classifier_pooling = "cls"

    @property
    def embedding_dropout(self) -> float:
        return self.hidden_dropout_prob

    @property
    def classifier_dropout(self) -> float:
        return self.hidden_dropout_prob

    def with_dropout(self, prob: float) -> Self:
        return dataclasses.replace(self, hidden_dropout_prob=prob, attention_probs_dropout_prob=prob)


@dataclass(frozen=True)
class ModernBertConfig(ModelConfig):
    """ModernBERT's architecture, with the keys and defaults of Hugging Face's `config.json`.

    local_attention: window of the local layers; a token attends to half as many tokens on each side. Token ids are
    those of the vocabulary, for other libraries; they are ignored when configs are compared."""

    hidden_activation: str = "gelu"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    initializer_cutoff_factor: float = 2.0
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    mlp_bias: bool = False
    mlp_dropout: float = 0.0
    decoder_bias: bool = True
    classifier_pooling: str = "cls"
    classifier_dropout: float = 0.0
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    global_attn_every_n_layers: int = 3
    local_attention: int = 128
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    pad_token_id: int | None = dataclasses.field(default=None, compare=False)
    cls_token_id: int | None = dataclasses.field(default=None, compare=False)
    sep_token_id: int | None = dataclasses.field(default=None, compare=False)
    bos_token_id: int | None = dataclasses.field(default=None, compare=False)
    eos_token_id: int | None = dataclasses.field(default=None, compare=False)

    model_type = "modernbert"
    # global_rope_theta may change: a later phase with longer sequences has a larger one.
    meaning = (
        *("num_attention_heads", "hidden_activation", "classifier_activation", "norm_eps", "local_attention"),
        *("global_attn_every_n_layers", "local_rope_theta"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_size % 2:
            raise ValueError(f"the head size {self.head_size} is odd: rotary positions need an even one")
        if min(self.global_rope_theta, self.local_rope_theta) < 1:
            raise ValueError("rope thetas must be at least 1")

    @classmethod
    def from_dict(cls, values: dict) -> Self:
        """Builds a config from the content of `config.json`, in the form of transformers 4 or 5 (`layer_types` and
        `rope_parameters`). Raises ValueError for a missing size and for a value that is not supported."""
        values = dict(values)
        if values.get("rope_scaling") is not None:
            raise ValueError(f"rope_scaling is {values['rope_scaling']!r}; only null is supported")
        for kind, key in (("full_attention", "global_rope_theta"), ("sliding_attention", "local_rope_theta")):
            rope = (values.get("rope_parameters") or {}).get(kind) or {}
            if unsupported := {name for name in rope if name not in ("rope_type", "rope_theta")}:
                raise ValueError(f"rope_parameters has {min(unsupported)!r}, which is not supported")
            if rope.get("rope_type", "default") != "default":
                raise ValueError(f"rope_type is {rope['rope_type']!r}; only 'default' is supported")
            if "rope_theta" in rope:
                values[key] = rope["rope_theta"]
        if (types := values.get("layer_types")) is not None:
            full = [index for index, kind in enumerate(types) if kind == "full_attention"]
            every = full[1] if len(full) > 1 else len(types)
            if types != ["sliding_attention" if index % every else "full_attention" for index in range(len(types))]:
                raise ValueError("layer_types has full_attention in other layers than every n-th from the first on")
            values["global_attn_every_n_layers"] = every
        optional = {field.name for field in dataclasses.fields(cls)} - {
            field.name for field in dataclasses.fields(ModelConfig)
        }
        return cls.from_values(values, optional)

    def is_global(self, layer: int) -> bool:
        """Whether a layer, counted from 0, attends to the whole sequence."""
        return layer % self.global_attn_every_n_layers == 0

    def with_dropout(self, prob: float) -> Self:
        names = ("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout")
        return dataclasses.replace(self, **dict.fromkeys(names, prob))

    def with_vocabulary(self, tokenizer: Any) -> Self:
        return dataclasses.replace(
            self,
            pad_token_id=tokenizer.pad_token_id,
            cls_token_id=tokenizer.cls_token_id,
            sep_token_id=tokenizer.sep_token_id,
            bos_token_id=tokenizer.cls_token_id,
            eos_token_id=tokenizer.sep_token_id,
        )


def config_from_dict(values: dict) -> ModelConfig:
    """The config in the content of a `config.json`, by its `model_type`. Raises ValueError if it is not supported."""
    model_type = values.get("model_type", "bert")
    if model_type == ModernBertConfig.model_type:
        return ModernBertConfig.from_dict(values)
    if model_type not in ("bert", PRE_LN_MODEL_TYPE):
        raise ValueError(f"model_type is {model_type!r}, and only bert and modernbert are supported: use such a model")
    return BertConfig.from_dict(values)


def labels_from_json(id2label) -> tuple[str, ...]:
    """The labels by index. Raises ValueError unless `id2label` maps "0", "1", ... to strings."""
    if not isinstance(id2label, dict) or not all(isinstance(label, str) for label in id2label.values()):
        raise ValueError("id2label must be an object of texts")
    labels = tuple(id2label.get(str(index)) for index in range(len(id2label)))
    if None in labels:
        raise ValueError(f"id2label has the keys {', '.join(id2label)}: expected 0 to {len(id2label) - 1}")
    return labels
