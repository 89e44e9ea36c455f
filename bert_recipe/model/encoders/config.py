"""The part of a model's architecture (`config.json`) that all encoders have."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject

REGRESSION, MULTI_LABEL = "regression", "multi_label_classification"  # of Hugging Face
VOCAB_MULTIPLE = 64  # the vocabulary is padded to a multiple of this, for matrix units
HIDDEN_ACTS = ("gelu", "gelu_new", "gelu_pytorch_tanh")  # erf; two names of the tanh form
HEAD_ACTS = (*HIDDEN_ACTS, "linear")  # of the dense layer of a head
POOLINGS = ("cls", "mean")
MAX_SIZE = 2**24  # of whole numbers; far above any real model


class UnsupportedModelError(ValueError):
    """A config of an architecture that has no encoder here: to be replaced, not to be corrected."""


def one_of(choices: Sequence[str], default: str) -> Any:
    """A field with one of `choices`."""
    return dataclasses.field(default=default, metadata={"choices": choices})


def number(default: float, maximum: float) -> Any:
    """A field with a number from 0 to `maximum`, which is 1 for fields without it."""
    return dataclasses.field(default=default, metadata={"maximum": maximum})


def dropout(default: float | None) -> Any:
    """A field with a probability below 1."""
    return dataclasses.field(default=default, metadata={"below_one": True})


def token_id(default: int) -> Any:
    """A field with a whole number from 0, which is 1 for fields without it."""
    return dataclasses.field(default=default, metadata={"minimum": 0})


def requirement(field: "dataclasses.Field[Any]", value: Any) -> str | None:
    """What the value of a field must be; None if it is that."""
    kind, limits = field.type, field.metadata
    if value is None and kind in (bool | None, float | None):
        return None
    if kind in (bool, bool | None):
        return None if isinstance(value, bool) else "true or false"
    if kind is int:
        low = limits.get("minimum", 1)
        fits = type(value) is int and low <= value <= MAX_SIZE
        return None if fits else f"a whole number from {low} to {MAX_SIZE}"
    if kind in (float, float | None):
        maximum, below_one = limits.get("maximum", 1), limits.get("below_one", False)
        fits = type(value) in (int, float) and 0 <= value <= maximum
        if fits and not (below_one and value == 1):
            return None
        expected = f"a number from 0 to {maximum:g}"
        return f"{expected}, and below 1" if below_one else expected
    choices = limits.get("choices", (value,))
    return None if value in choices else f"one of {', '.join(choices)}"


# Keys of other libraries that change the model. Only these values are supported.
FOREIGN_KEYS = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
}
# Fields that config.json has under other keys, or not.
RENAMED = ("labels", "multi_label", "embedding_pooling")


@dataclass(frozen=True)
class ModelConfig:
    """The part of the architecture that all encoders have.

    labels: class names of a classification head (Hugging Face's `id2label`); a single one means
        regression.
    multi_label: labels are independent (Hugging Face's `problem_type`).
    text_pairs: whether a classification head is for pairs of texts; None: unknown.
    label_all_tokens: whether a token classification head has learnt the labels of all tokens, not
        only those of the first token of each word; None: unknown.
    embedding_pooling: `mean` or `first`, the state of the first token; stored in
        sentence-transformers' files.
    tie_word_embeddings: whether the output layer of a masked-language-model head has the word
        embeddings; other heads have none.

    These six are ignored when configs are compared. Of the class:

    model_types: the values of `model_type` for this architecture.
    options: fields that the flags of ModelSelection (config/start.py) with the tag `encoder_option`
        change.
    needs_tokenizer_json: whether a `vocab.txt` alone does not serve transformers for this
        architecture.
    meaning: keys that change the meaning of weights of the same shapes.
    """

    model_types: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]] = ()
    needs_tokenizer_json: ClassVar[bool] = False
    meaning: ClassVar[tuple[str, ...]]

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    labels: tuple[str, ...] = dataclasses.field(default=(), compare=False, kw_only=True)
    multi_label: bool = dataclasses.field(default=False, compare=False, kw_only=True)
    text_pairs: bool | None = dataclasses.field(default=None, compare=False, kw_only=True)
    label_all_tokens: bool | None = dataclasses.field(default=None, compare=False, kw_only=True)
    embedding_pooling: str = dataclasses.field(default="mean", compare=False, kw_only=True)
    tie_word_embeddings: bool = dataclasses.field(default=True, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (expected := requirement(field, value)) is not None:
                raise ValueError(f"{field.name} is {value!r}: it must be {expected}")
        if isinstance(self.labels, str) or not all(isinstance(name, str) for name in self.labels):
            raise ValueError(f"labels are {self.labels!r:.60}: they must be texts")
        if len(set(self.labels)) < len(self.labels):
            twice = next(label for label in self.labels if self.labels.count(label) > 1)
            raise ValueError(
                f"the labels have {twice!r} more than once: results could not tell them apart"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}"
            )

    @classmethod
    def from_dict(cls, values: JsonObject) -> Self:
        """The config from the known keys in `values`, the content of a `config.json`. Raises
        ValueError for a missing key that has no default, and for a value that is not supported.
        """
        fields = [field for field in dataclasses.fields(cls) if field.name not in RENAMED]
        known = {field.name: field.default for field in fields}
        required = {key for key, default in known.items() if default is dataclasses.MISSING}
        if missing := sorted(required - values.keys()):
            raise ValueError(f"missing key {', '.join(map(repr, missing))}")
        for key, expected in FOREIGN_KEYS.items():
            if values.get(key, expected) != expected:
                raise UnsupportedModelError(
                    f"{key} is {values[key]!r}; only {expected!r} is supported: use another model "
                    f"(docs/choose_a_model.md has one for each use)"
                )
        labels = labels_from_json(values.get("id2label") or {})
        if (problem := values.get("problem_type")) == REGRESSION and len(labels) != 1:
            raise ValueError(
                f"problem_type is 'regression' of {len(labels) or 2} numbers; only one is supported"
            )
        known_values = {key: value for key, value in values.items() if key in known}
        return cls(**known_values, labels=labels, multi_label=problem == MULTI_LABEL)

    def to_dict(self) -> JsonObject:
        """The content of `config.json`; with `id2label` and `label2id` if there are labels."""
        values = {"model_type": self.model_type, **dataclasses.asdict(self)}
        del values["embedding_pooling"], values["tie_word_embeddings"]
        for name in ("text_pairs", "label_all_tokens"):
            if values[name] is None:
                del values[name]
        if values.pop("multi_label"):
            values["problem_type"] = MULTI_LABEL
        if self.is_number:  # or transformers' pipeline takes it for a logit
            values["problem_type"] = REGRESSION
        if labels := values.pop("labels"):
            values["id2label"] = {str(index): label for index, label in enumerate(labels)}
            values["label2id"] = {label: index for index, label in enumerate(labels)}
        return values

    if TYPE_CHECKING:  # what each architecture has, as fields, properties or constants

        @property
        def model_type(self) -> str: ...
        @property
        def max_position_embeddings(self) -> int: ...
        @property
        def initializer_range(self) -> float: ...
        @property
        def attention_dropout(self) -> float: ...
        @property
        def embedding_dropout(self) -> float: ...
        @property
        def head_dropout(self) -> float: ...
        @property
        def classifier_pooling(self) -> str: ...

        def with_dropout(self, prob: float) -> Self: ...

    def with_linear_head(self, pooling: str) -> "Self | None":
        """The config with which the classification head is linear in the normalized pooled state;
        None if the architecture has no such head. pooling: a key of POOLINGS of
        sentence_folders.py.
        """
        return None

    @property
    def num_labels(self) -> int:
        """Number of labels of a classification head: 2 if they have no names, as in
        transformers.
        """
        return len(self.labels) or 2

    @property
    def is_number(self) -> bool:
        """Whether a classification head predicts a number."""
        return len(self.labels) == 1 and not self.multi_label

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def takes_token_types(self) -> bool:
        """Whether the texts of a pair have embeddings of their own."""
        return False

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
        """The config with the ids of special tokens. Raises ValueError if they do not fit the
        architecture.
        """
        return self


def labels_from_json(id2label: object) -> tuple[str, ...]:
    """The labels by index. Raises ValueError unless `id2label` maps "0", "1", ... to strings."""
    if not isinstance(id2label, dict) or not all(
        isinstance(label, str) for label in id2label.values()
    ):
        raise ValueError("id2label must be an object of texts")
    id2label = {
        str(key): label for key, label in id2label.items()
    }  # numbers in transformers' dicts
    labels = tuple(id2label[key] for key in map(str, range(len(id2label))) if key in id2label)
    if len(labels) < len(id2label):
        raise ValueError(
            f"id2label has the keys {', '.join(id2label)}: expected 0 to {len(id2label) - 1}"
        )
    return labels


def check_length(what: str, length: int, config: ModelConfig) -> None:
    """Raises UserError unless the model takes `what` of `length` tokens."""
    if length > config.max_length:
        raise UserError(
            f"{what} {length} is above the config's {config.max_length} positions: use shorter "
            f"sequences, or another model"
        )
