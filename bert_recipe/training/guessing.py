"""Says at the end of training if its loss is still that of guessing."""

import torch

from bert_recipe.metrics.throughput import GlobalBatchStats
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.training.callbacks import Callback, Update
from bert_recipe.training.run import Run

LAST_SHARE = 0.2  # of the updates, whose mean loss is compared
LEAST_UPDATES = 5  # of a mean
LEAST_FALL = 0.03  # below the loss of guessing, as a share of it


class GuessingLoss(Callback):
    """Compares the mean loss of the last updates with the task's `guessing_loss`."""

    def __init__(self, run: Run, guessing_loss: float, runtime: Runtime):
        self.task, self.guessing_loss = run.task, guessing_loss
        self.max_steps = run.max_steps
        self.runtime = runtime
        self.num_updates = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64)  # of this rank
        self.stats = GlobalBatchStats()
        self.reached_end = False

    def after_update(self, update: Update) -> None:
        if update.step <= (1 - LAST_SHARE) * self.max_steps:
            return
        self.num_updates += 1
        self.loss_sum = self.loss_sum.to(update.sums["loss"].device) + update.sums["loss"].detach()
        self.stats += update.stats
        self.reached_end = update.step >= self.max_steps

    def finish(self, stopped_by: int | None, final_loss: float | None) -> None:
        if not self.reached_end or self.num_updates < LEAST_UPDATES:
            return
        (total,) = self.runtime.distributed.all_reduce_sum([float(self.loss_sum)])
        loss = self.task.loss({"loss": total}, self.stats.counts)
        if loss <= (1 - LEAST_FALL) * self.guessing_loss:
            return
        text = (
            f"warning: the loss of the last {self.num_updates} updates is {loss:.4g}, and "
            f"{self.guessing_loss:.4g} is that of guessing, the same output for all: nothing was "
            f"learnt; try {self.task.advice}"
        )
        self.runtime.reporter.log((), {}, text)
