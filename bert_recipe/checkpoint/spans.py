"""Which parameters train, said once: by name, from which update and until which one."""

from collections.abc import Mapping
from typing import NamedTuple

from bert_recipe.model.encoders.base import PreTrainedModel


class Span(NamedTuple):
    """The updates after `start`, up to `stop`.

    start: None if it is not known yet.
    stop: None for all further ones.
    """

    start: int | None = 0
    stop: int | None = None

    def trains(self, step: int) -> bool:
        """Whether the update after `step` changes the parameter."""
        has_begun = self.start is not None and self.start <= step
        return has_begun and (self.stop is None or step < self.stop)


NEVER = Span(0, 0)


def training_spans(model: PreTrainedModel, encoder_start: int | None) -> dict[str, Span]:
    """The span of each parameter of a model: NEVER without `requires_grad`. encoder_start: the
    update after which the encoder trains, too, and not only the heads and the pooler; None if it is
    not known yet.
    """
    spans = {}
    for name, p in model.named_parameters():
        is_of_head = name.startswith(model.optional_heads)
        spans[name] = Span() if is_of_head else Span(encoder_start)
        if not p.requires_grad:
            spans[name] = NEVER
    return spans


def waiting(spans: Mapping[str, Span], step: int) -> list[str]:
    """The parameters that the update after `step` does not change."""
    return [name for name, span in spans.items() if not span.trains(step)]
