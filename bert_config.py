"""Architecture of a BERT model, as in `config.json`."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

PRE_LN_MODEL_TYPE = "bert_pre_layer_norm"
MULTI_LABEL = "multi_label_classification"
VOCAB_MULTIPLE = 64  # the vocabulary is padded to a multiple of this, for matrix units
HIDDEN_ACTS = ("gelu", "gelu_new", "gelu_pytorch_tanh")  # the erf form; the other two are the same tanh form

# Upper bounds, far above any real model, so that sizes can be computed before memory is allocated.
MAX_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "intermediate_size": 2**20,
    "max_position_embeddings": 2**20,
    "type_vocab_size": 2**10,
}

# Keys of other libraries that change the model. Only these values are supported.
FOREIGN_KEYS = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}


@dataclass(frozen=True)
class BertConfig:
    """The architecture, with the keys of Google's and Hugging Face's `config.json`.

    labels: class names of a classification head (Hugging Face's `id2label`); a single one means regression.
    multi_label: labels are independent (Hugging Face's `problem_type`). Both are ignored when configs are compared."""

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
    pre_layer_norm: bool = False  # LayerNorm before attention and feed-forward, and after the last layer
    labels: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    multi_label: bool = dataclasses.field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.hidden_act not in HIDDEN_ACTS:
            raise ValueError(f"hidden_act is {self.hidden_act!r}: it must be one of {', '.join(HIDDEN_ACTS)}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field.name} is {value!r}: it must be a whole number >= 1")
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name} is {value!r}: it must be true or false")
            if field.type is int and value > MAX_SIZES[field.name]:
                raise ValueError(f"{field.name} is {value}: at most {MAX_SIZES[field.name]} is possible")
            if field.type is float and (
                not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1
            ):
                raise ValueError(f"{field.name} is {value!r}: it must be a number from 0 to 1")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if max(self.hidden_dropout_prob, self.attention_probs_dropout_prob) >= 1:
            raise ValueError("dropout probabilities must be below 1")

    @classmethod
    def from_dict(cls, values: dict) -> "BertConfig":
        """Builds a config from the content of `config.json`. Raises ValueError for a missing key, and for an unknown
        key unless `"model_type": "bert"` is set, as in Hugging Face's files, which contain many other keys."""
        model_type = values.get("model_type", "bert")
        if model_type not in ("bert", PRE_LN_MODEL_TYPE):
            raise ValueError(f"model_type is {model_type!r}, and only BERT is supported: use a BERT model")
        known = {field.name for field in dataclasses.fields(cls)} - {"labels", "multi_label"}
        # Google's files have no layer_norm_eps; the value is 1e-12 in all of them.
        missing = sorted(known - values.keys() - {"layer_norm_eps", "pre_layer_norm"})
        if missing:
            raise ValueError(f"missing key {', '.join(map(repr, missing))}")
        unknown = sorted(values.keys() - known - FOREIGN_KEYS.keys() - {"model_type"})
        if unknown and values.get("model_type") not in ("bert", PRE_LN_MODEL_TYPE):
            raise ValueError(f"unknown key {', '.join(map(repr, unknown))}")
        model_type = PRE_LN_MODEL_TYPE if values.get("pre_layer_norm") else "bert"
        for key, expected in {"model_type": model_type, **FOREIGN_KEYS}.items():
            if values.get(key, expected) != expected:
                raise ValueError(f"{key} is {values[key]!r}; this model is BERT: {expected!r}")
        labels = labels_from_json(values.get("id2label") or {})
        multi_label = values.get("problem_type") == MULTI_LABEL
        architecture = {key: value for key, value in values.items() if key in known}
        return cls(**architecture, labels=labels, multi_label=multi_label)

    @classmethod
    def from_json_file(cls, path) -> "BertConfig":
        """Reads a `config.json`; see `from_dict`."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{path}: expected a JSON object")
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict:
        """The content of `config.json`; with `id2label` and `label2id` if there are labels. transformers has no pre-LN
        BERT, so a pre-LN config has another model type: transformers would load it as post-LN."""
        values = {"model_type": PRE_LN_MODEL_TYPE if self.pre_layer_norm else "bert", **dataclasses.asdict(self)}
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


def labels_from_json(id2label) -> tuple[str, ...]:
    """The labels by index. Raises ValueError unless `id2label` maps "0", "1", ... to strings."""
    if not isinstance(id2label, dict) or not all(isinstance(label, str) for label in id2label.values()):
        raise ValueError("id2label must be an object of texts")
    labels = tuple(id2label.get(str(index)) for index in range(len(id2label)))
    if None in labels:
        raise ValueError(f"id2label has the keys {', '.join(id2label)}: expected 0 to {len(id2label) - 1}")
    return labels
