"""A new head is trained alone first, since its gradients would damage the encoder (LP-FT: Kumar et
al., 2022, "Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution").
"""

import math
from collections.abc import Callable, Sequence

from bert_recipe.checkpoint.state import TrainState
from bert_recipe.checkpoint.weights import lacks_head
from bert_recipe.optimization.lr_scheduler import exact_product
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.training.callbacks import Callback, Update
from bert_recipe.training.run import Run
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.stop_signal import StopSignal

WINDOW = 50  # updates
LEAST_FALL = 0.01  # of the mean loss from one window to the next, as a share
LARGEST_SHARE = 0.2  # of the run's updates
RATE_FACTOR = 10.0  # of the peak learning rate


def is_trained(losses: Sequence[float]) -> bool:
    """Whether the mean loss of the last WINDOW updates is less than LEAST_FALL below that of the
    WINDOW updates before them.
    """
    if len(losses) < 2 * WINDOW:
        return False
    before, last = losses[-2 * WINDOW : -WINDOW], losses[-WINDOW:]
    return math.fsum(last) > (1 - LEAST_FALL) * math.fsum(before)


class HeadFirst(Callback):
    """Freezes the encoder until the head is trained: after --freeze-encoder-steps, or by the rule
    of that flag. Then the encoder is trained, too, with a new warmup of the learning rate.

    begin: called when the encoder is trained from the present update on.
    """

    def __init__(
        self,
        run: Run,
        state: TrainState,
        runtime: Runtime,
        begin: Callable[[], None],
    ):
        self.run, self.state, self.runtime, self.begin = run, state, runtime, begin
        self.stops_early = run.settings.trainer.freeze_encoder_steps is None
        self.last_step = state.schedule_start + most_updates(run)

    def start(self, stop: StopSignal) -> None:
        rule = f"for {self.last_step - self.state.schedule_start} updates"
        if self.stops_early:
            rule = (
                f"until its loss falls by less than {LEAST_FALL:.0%} in {WINDOW} updates, at most "
                f"to update {self.last_step}"
            )
        self._log(f"only the head is trained, {rule} (--freeze-encoder-steps)")
        self._end_if_trained()

    def is_due(self, update: Update) -> bool:
        return self.state.encoder_start is None

    def after_update(self, update: Update) -> None:
        state = self.state
        if state.encoder_start is not None:
            return
        stats = update.stats
        loss = self.run.task.loss(update.sums, stats.counts)
        (value,) = self.runtime.distributed.all_reduce_sum([float(loss)])
        if math.isfinite(value):
            state.head_losses = [*state.head_losses, value][-2 * WINDOW :]
        self._end_if_trained()

    def _end_if_trained(self) -> None:
        state = self.state
        num_updates = state.step - state.schedule_start
        is_checked = self.stops_early and num_updates % WINDOW == 0
        is_over = state.step >= self.last_step or (is_checked and is_trained(state.head_losses))
        if state.encoder_start is not None or not is_over:
            return
        state.start_encoder(state.step)
        state.head_losses = []
        self.begin()
        self._log(f"the encoder is trained from update {state.step + 1} on, with a new warmup")

    def _log(self, text: str) -> None:
        place = self.state.place(self.run.max_steps)
        self.runtime.reporter.log((), {}, f"{place}  {text}")


def begins_with_head(run: Run, state: TrainState) -> bool:
    """Whether a run begins now, from starting weights, with updates of the head alone. Raises
    UserError if its strategy cannot do that.
    """
    is_new = state.samples_consumed == 0 and run.saves
    weights = run.start.weights
    if not is_new or not run.task.has_trained_head or weights is None:
        return False
    is_asked = run.settings.trainer.freeze_encoder_steps is not None
    begins = most_updates(run) > 0
    if begins and not is_asked:
        begins = lacks_head(state.model, weights.tensors)
    if begins and state.parallel.cannot_freeze:
        raise UserError(
            f"{state.parallel.cannot_freeze} cannot train a new head alone first: leave it out "
            "(DDP and FSDP2 can), or give --freeze-encoder-steps 0 to train all weights from the "
            "first update on"
        )
    return begins


def most_updates(run: Run) -> int:
    """Number of updates of the head alone, at most."""
    given = run.settings.trainer.freeze_encoder_steps
    if given is not None:
        return given
    return math.floor(exact_product(LARGEST_SHARE, run.max_steps))


def head_rate(optimizer: str, peak_rate: float) -> float:
    """The learning rate of the head alone. LAMB's updates are relative to the weights, so that a
    higher rate is not for it.
    """
    return peak_rate if optimizer == "Lamb" else RATE_FACTOR * peak_rate
