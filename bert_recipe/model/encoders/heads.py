"""Heads that all encoders have: masked language model, spans, classification, embeddings.

Legend: T tokens of the stream, N sequences, M masked tokens, E hidden size, C labels, V vocabulary,
padded in memory.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_recipe.model.encoders.base import PreTrainedModel, accepts_padded
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.encoders.modules import Linear
from bert_recipe.model.kernels.dropout import Dropout
from bert_recipe.model.kernels.linear import linear
from bert_recipe.model.token_stream import TokenStream

# Of an encoder. The keys are the heads' names; `pretraining` is for data with next-sentence labels,
# if the encoder learns them.
ModelsByHead = dict[str, type[PreTrainedModel]]


FirstOutputs = tuple[float | tuple[float, ...], float]  # see ClassificationModel

HiddenStates = tuple[Tensor, ...] | None  # with `output_hidden_states`, see EncoderOutput


class MaskedLMOutput(NamedTuple):
    prediction_logits: Tensor  # [M, V] at `mlm_positions`, or [T, V] without them
    loss: Tensor | None = None  # with labels: the mean over those that are not -100
    hidden_states: HiddenStates = None


class SpanOutput(NamedTuple):
    start_logits: Tensor  # [T]
    end_logits: Tensor
    hidden_states: HiddenStates = None

    @property
    def logits(self) -> Tensor:
        """Start and end logits, [T, 2]."""
        return torch.stack([self.start_logits, self.end_logits], dim=-1)


class ClassificationOutput(NamedTuple):
    logits: Tensor  # [N, C], or of tokens [T, C]
    loss: Tensor | None = None  # with labels: the mean over those that are not -100
    hidden_states: HiddenStates = None


class MaskedLanguageModel(PreTrainedModel):
    """An encoder with the masked-language-model head. With `mlm_positions` [M], indices into the
    stream, the vocabulary is predicted for those tokens only. A loss that never has all logits in
    float32 takes the output of `transform` and the `output_layer` instead.
    """

    @abstractmethod
    def transform(self, hidden_ME: Tensor) -> Tensor:
        """The input of the output layer, from the last hidden states."""

    @property
    @abstractmethod
    def output_bias(self) -> Tensor | None:
        """The bias of the output layer, without the vocabulary's padding; None without a bias."""

    @property
    def output_weight(self) -> Tensor:
        """The weight of the output layer [V, E]: by default tied to the word embeddings."""
        return self.word_embeddings.weight

    def output_layer(self) -> tuple[Tensor, Tensor]:
        """The weight [V, E] and the bias [V] of the output layer."""
        weight_VE, bias = self.output_weight, self.output_bias
        if bias is None:
            bias = weight_VE.new_zeros(self.config.vocab_size)
        # The logits of the vocabulary's padding are -inf, so their probability and gradient are
        # exactly zero.
        return weight_VE, F.pad(bias, (0, len(weight_VE) - len(bias)), value=-math.inf)

    def prediction_logits(self, hidden: Tensor) -> Tensor:
        return linear(self.transform(hidden), *self.output_layer())

    @accepts_padded
    def forward(
        self,
        stream: TokenStream,
        *,
        mlm_positions: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> MaskedLMOutput:
        """labels: of the tokens, as many as logits; -100 where there is none."""
        output = self.base_model(
            stream, output_positions=mlm_positions, output_hidden_states=output_hidden_states
        )
        logits = self.prediction_logits(output.last_hidden_state)
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        return MaskedLMOutput(logits, loss, output.hidden_states)


class NextSentenceModel(MaskedLanguageModel):
    """A masked language model that also has the next-sentence head."""

    @property
    @abstractmethod
    def next_sentence_layer(self) -> Linear: ...

    def next_sentence_logits(self, pooled_NE: Tensor) -> Tensor:
        """The logits [N, 2]: the second text follows the first one, or is random."""
        return self.next_sentence_layer(pooled_NE)


class DenseClassifier(nn.Module):
    """A classifier after a dense layer with an `activation`."""

    activation: Callable[[Tensor], Tensor]

    def __init__(self, hidden_size: int, num_outputs: int, dropout: float):
        super().__init__()
        self.dense = Linear(hidden_size, hidden_size)
        self.out_proj = Linear(hidden_size, num_outputs)
        self.dropout = Dropout(dropout)

    def forward(self, first_NE: Tensor) -> Tensor:
        return self.out_proj(self.dropout(self.activation(self.dense(first_NE))))


class ClassificationModel(PreTrainedModel):
    """An encoder with a classifier on each token, or with `pooling` on the pooled state. ModernBERT
    has a `head` before it.

    classifier_class: from the numbers of inputs and outputs and the dropout.
    classifier_name: in model folders.
    first_outputs: the bias of a new output layer, of all outputs or each, and the factor of its
        weight: outputs that begin near 0 do not reach numbers far from it, or the shares of rare
        tags, in a few hundred updates.
    """

    first_outputs: FirstOutputs = (0.0, 1.0)

    classifier_class: Callable[[int, int, float], nn.Module] = lambda inputs, outputs, _dropout: (
        Linear(inputs, outputs)
    )
    classifier_name = "classifier"

    def add_modules(self, pooling: str | None, num_outputs: int, dropout: float) -> None:
        self.add_encoder(pooling)
        self.head = self.make_transform()
        self.dropout = Dropout(dropout)
        classifier = type(self).classifier_class(self.config.hidden_size, num_outputs, dropout)
        setattr(self, self.classifier_name, classifier)
        self.task_head = (f"{self.classifier_name}.",)
        self.init_weights(self.optional_heads)

    @property
    def output_layer_name(self) -> str:
        has_dense = isinstance(getattr(self, self.classifier_name), DenseClassifier)
        return f"{self.classifier_name}.out_proj" if has_dense else self.classifier_name

    def initial_values(self, parts: str | tuple[str, ...] = "") -> Iterator[tuple[str, Tensor]]:
        bias, factor = self.first_outputs
        for name, value in super().initial_values(parts):
            if name == f"{self.output_layer_name}.weight":
                value *= factor
            elif name == f"{self.output_layer_name}.bias":
                value += torch.tensor(bias, device="cpu")
            yield name, value

    @accepts_padded
    def forward(
        self,
        stream: TokenStream,
        *,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> ClassificationOutput:
        """labels: classes of the texts [N], or of the tokens; -100 where there is none. Of texts
        numbers where the config has one label, and 0 or 1 for each of several labels [N, C].
        """
        hidden_states = None
        if output_hidden_states or self.base_model.pooling is None:
            output = self.base_model(stream, output_hidden_states=output_hidden_states)
            hidden_states = output.hidden_states
            states = output.pooler_output
            if self.base_model.pooling is None:
                states = output.last_hidden_state
        else:
            states = self.base_model.pooled(stream)
        # A mean is in float32, and the weights may be in 16 bits.
        logits = self.logits(states.to(self.word_embeddings.weight.dtype))
        loss = None if labels is None else self.loss(logits.float(), labels)
        return ClassificationOutput(logits, loss, hidden_states)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computed in the type of the classifier's weights: in 16 bits, many would be equal."""
        states = self.dropout(self.head(hidden))
        classifier = getattr(self, self.classifier_name)
        states = states.to(next(classifier.parameters()).dtype)
        if states.device.type == "meta":  # which has no autocast
            return classifier(states)
        with torch.autocast(states.device.type, enabled=False):
            return classifier(states)


class QuestionAnswering(ClassificationModel):
    """A span head: a start and an end logit per token."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.classifier_name = self.span_classifier_name
        self.add_modules(None, 2, self.span_dropout)

    @accepts_padded
    def forward(self, stream: TokenStream, *, output_hidden_states: bool = False) -> SpanOutput:
        output = self.base_model(stream, output_hidden_states=output_hidden_states)
        start_logits_T, end_logits_T = self.logits(output.last_hidden_state).unbind(dim=-1)
        return SpanOutput(start_logits_T, end_logits_T, output.hidden_states)


class SequenceClassification(ClassificationModel):
    """A logit per label on the pooled state: `logits` [N, C]; with one label the predicted value,
    [N, 1].

        model = BertForSequenceClassification.from_pretrained(folder, labels=("no", "yes")).train()
        model(stream, labels=labels_N).loss.backward()
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.add_modules(config.classifier_pooling, config.num_labels, config.head_dropout)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.config.is_number:
            return F.mse_loss(logits.squeeze(-1), labels.float().view(-1))
        if self.config.multi_label:
            return F.binary_cross_entropy_with_logits(logits, labels.float())
        return super().loss(logits, labels)


class TokenClassification(ClassificationModel):
    """A logit per label of the config for each token."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.add_modules(None, config.num_labels, self.token_dropout)


class SentenceEmbedding(PreTrainedModel):
    """The mean of each sequence's last hidden states, or that of its first token, as `logits` [N,
    E].

    text_settings: of a loaded model, what is done to texts and vectors around it, to be saved
        again.
    """

    text_settings: Any = None

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.add_encoder(config.embedding_pooling)

    @accepts_padded
    def forward(self, stream: TokenStream) -> ClassificationOutput:
        return ClassificationOutput(self.base_model.pooled(stream))

    @property
    def num_outputs(self) -> int:
        return self.config.hidden_size
