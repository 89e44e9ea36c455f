"""The way in for other programs: trains a model of theirs on data of theirs, as a run with
checkpoints, logs and everything else that flags give.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from torch import Tensor, nn

from bert_recipe.checkpoint.model_choice import ModelChoice
from bert_recipe.checkpoint.start import NamedStart, decide_start
from bert_recipe.config import CUSTOM, FINE_TUNING, ModelSelection, RunConfig
from bert_recipe.config.arguments import make_run_config, parse_run_arguments, run_flags
from bert_recipe.data_loading.loader import StreamDataset
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.token_stream import BatchCounts, MicroBatch
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import Number, SeparableTask, Task, TaskData
from bert_recipe.tokenization.tokenizer import Tokenizer
from bert_recipe.training.chosen_settings import given_settings
from bert_recipe.training.plan import folders_of, make_run
from bert_recipe.training.setup import build_trainer, open_report, start_runtime
from bert_recipe.training.trainer import Trainer
from bert_recipe.training.workflow import train as train_run
from bert_recipe.utils.command_line import ArgumentParser, flags_of
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject

BATCH_SIZE = 32
# Of flags whose work is the caller's.
UNUSED = {
    *(flag.name for flag in flags_of(ModelSelection)),
    *("from_pretrained_params", "from_checkpoint", "last_step_of_checkpoint", "num_seeds"),
    *("estimate_memory", "eval_steps", "early_stopping", "max_seq_length"),
}


@dataclass(frozen=True)
class OwnTask(SeparableTask):
    """A task whose loss is a function of the caller.

    sum_of_losses: of the plain model and a micro-batch, whose tensors are those of the data set's
        `stream`: the loss, summed over its sequences, a scalar.
    max_seq_length: most tokens of a sequence.
    name: of its folder.
    """

    sum_of_losses: Callable[[nn.Module, MicroBatch], Tensor]
    max_seq_length: int
    name: str = "own"

    head = ""
    metric = "loss"

    def logged_settings(self, data: TaskData, batch_size: int, max_steps: int) -> JsonObject:
        return {"task": self.name, "train_batch_size": batch_size, "steps": max_steps}

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        return {"loss": model(micro_batch, objective=self.sum_of_losses)}

    def loss(self, sums: Mapping[str, Number], counts: BatchCounts) -> Number:
        return sums["loss"] / counts.sequences

    def metrics(self, sums: dict[str, float], counts: BatchCounts) -> dict[str, float]:
        return {"loss": self.loss(sums, counts)}


class Parser(ArgumentParser):
    """For settings that no command line gives."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def make_settings(output_dir: str | Path, **flags: Any) -> RunConfig:
    """The settings of a run in `output_dir`. flags: those of the training programs, with
    underscores: `learning_rate=1e-4` for `--learning-rate 1e-4`, and `amp=True` for `--amp`. Raises
    UserError for what a command line would refuse.
    """
    parser = Parser(add_help=False)
    for title, group in run_flags(FINE_TUNING, UNUSED).items():
        if title != "task":
            parser.add_flags(title, group, optimizer="AdamW", max_steps=-1, batch_size=BATCH_SIZE)
    words = []
    for name, value in flags.items():
        if value is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    args = parse_run_arguments(parser, [*words, f"--output-dir={output_dir}"])
    if args.max_steps < 1 and args.epochs is None:
        raise UserError("the run has no length: give max_steps or epochs")
    return make_run_config(args)


def make_trainer(
    model: PreTrainedModel,
    task: Task,
    dataset: StreamDataset,
    settings: RunConfig,
    runtime: Runtime,
    tokenizer: Tokenizer | None = None,
) -> Trainer:
    """The trainer of a run whose model, task and data are made. tokenizer: for the model folders;
    None for a run that saves nothing (`benchmark=True`).
    """
    choice = ModelChoice(CUSTOM, model.config, cast(Tokenizer, tokenizer))
    data = TaskData(task, choice, dataset, max_length=task.max_seq_length)
    values = given_settings(settings, task.max_seq_length).values(len(dataset))
    folder = folders_of(settings, data, [""], runtime)[""]
    start = decide_start(NamedStart(), folder, settings)
    run = make_run(settings, {}, folder, start, data, values, runtime)
    run.check_start()
    return build_trainer(run, runtime, model)


def train(
    model: PreTrainedModel,
    task: Task,
    dataset: StreamDataset,
    tokenizer: Tokenizer,
    output_dir: str | Path,
    **flags: Any,
) -> Path:
    """Trains `model` in place, and returns the folder of the last checkpoint, which is a model
    folder. An interrupted run is resumed with `resume_from_checkpoint=True`. Under torchrun it runs
    on several GPUs.

    model: plain, with its weights, or on the meta device for random ones.
    task: such as an OwnTask.
    dataset: to train on, such as a TextDataset.
    tokenizer: for the model folders.
    flags: see `make_settings`.

    Raises UserError for settings that a command line would refuse, and SystemExit after a signal.
    """
    settings = make_settings(output_dir, **flags)
    with start_runtime(settings, task.name) as runtime:
        trainer = make_trainer(model, task, dataset, settings, runtime, tokenizer)
        folder = trainer.run.folder.path
        open_report(settings, folder, runtime)
        exit_code = train_run(trainer)
    if exit_code:
        raise SystemExit(exit_code)
    return folder / str(trainer.state.step)
