"""The part of a model's architecture (`config.json`) that all encoders have."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

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
FOREIGN_KEYS |= {"position_embedding_type": "absolute"}


@dataclass(frozen=True)
class ModelConfig:
    """The part of the architecture that all encoders have.

    labels: class names of a classification head (Hugging Face's `id2label`); a single one means regression.
    multi_label: labels are independent (Hugging Face's `problem_type`).
    embedding_pooling: `mean` or `first`, the state of the first token; stored in sentence-transformers' files.
    These three are ignored when configs are compared.
    model_types: the values of `model_type` for this architecture. options: fields that flags change.
    needs_tokenizer_json: whether transformers reads no `vocab.txt` for this architecture."""

    model_types: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]] = ()
    needs_tokenizer_json: ClassVar[bool] = False

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    labels: tuple[str, ...] = dataclasses.field(default=(), compare=False, kw_only=True)
    multi_label: bool = dataclasses.field(default=False, compare=False, kw_only=True)
    embedding_pooling: str = dataclasses.field(default="mean", compare=False, kw_only=True)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, limit = getattr(self, field.name), MAX_SIZES.get(field.name, 1)
            is_number, minimum = isinstance(value, int | float) and not isinstance(value, bool), 1
            if field.name.endswith("_id"):
                minimum, limit = 0, MAX_SIZES["vocab_size"]
            if field.type is int and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
                raise ValueError(f"{field.name} is {value!r}: it must be a whole number >= {minimum}")
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name} is {value!r}: it must be true or false")
            if field.type is int and value > limit:
                raise ValueError(f"{field.name} is {value}: at most {limit} is possible")
            is_float = field.type is float or (field.type == float | None and value is not None)
            if is_float and (not is_number or not 0 <= value <= limit):
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
        known = {field.name for field in dataclasses.fields(cls)} - {"labels", "multi_label", "embedding_pooling"}
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

    def to_dict(self) -> dict:
        """The content of `config.json`; with `id2label` and `label2id` if there are labels."""
        values = {"model_type": self.model_type, **dataclasses.asdict(self)}
        del values["embedding_pooling"]
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
    def max_length(self) -> int:
        """Tokens of the longest possible sequence."""
        return self.max_position_embeddings

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def with_padding(self, _pad_token_id: int) -> Self:
        """The config for another padding token."""
        return self

    def with_vocabulary(self, _tokenizer: Any) -> Self:
        """The config with the ids of special tokens. Raises ValueError if they do not fit the architecture."""
        return self


def labels_from_json(id2label) -> tuple[str, ...]:
    """The labels by index. Raises ValueError unless `id2label` maps "0", "1", ... to strings."""
    if not isinstance(id2label, dict) or not all(isinstance(label, str) for label in id2label.values()):
        raise ValueError("id2label must be an object of texts")
    labels = tuple(id2label.get(str(index)) for index in range(len(id2label)))
    if None in labels:
        raise ValueError(f"id2label has the keys {', '.join(id2label)}: expected 0 to {len(id2label) - 1}")
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(f"id2label has {twice!r} more than once: results could not tell the labels apart")
    return labels
