"""The progress file of a checkpoint, and how it differs from the run that resumes it."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_recipe.checkpoint.folder import PROGRESS_SUFFIX
from bert_recipe.checkpoint.identity import ANOTHER, RANDOM, READING, WEIGHTS
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.older import OLD_PROGRESS, old_values
from bert_recipe.checkpoint.record import RunRecord
from bert_recipe.config import is_step
from bert_recipe.tokenization.files import Casing
from bert_recipe.tokenization.tokenizer import Tokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject, from_json, read_json

GLOBAL_BATCH = "the global batch size"  # its name among the hyperparameters
FLOAT32_LINEAR = "float32_linear"  # the library of linear layers, among the versions
LENGTH = ("--max-steps", "--epochs")  # of a run, which may change
OTHER_DATA = "other data"
WAYS_OUT = "take only its weights with --from-pretrained-params"
WAYS_OUT_OF_A_FOLDER = f"{ANOTHER}, or add --overwrite to remove what is there"
ADVICE = "use the checkpoint before it, or take only its weights with --from-pretrained-params"


@dataclass(frozen=True, kw_only=True)
class Progress(RunRecord):
    """The progress file of a checkpoint: the record of its run, and how far that was.

    evaluations: that chose the best model until then, oldest first: the step and the scores.
    best_step: that of the best one, or None.
    encoder_start, head_losses: see TrainState.

    A fit to a frozen encoder has no updates, and leaves those with a default.
    """

    phase: str = field()  # which all have, as those after it
    seed: int = field()
    num_samples: int = field()
    step: int
    samples_consumed: int
    schedule_start: int
    optimizer: str
    loss_scale: dict[str, float]
    train_seconds: float
    raw_train_seconds: float
    world_size: int | None = None
    evaluations: list[JsonObject] = field(default_factory=list)
    best_step: int | None = None
    encoder_start: int | None = 0
    head_losses: list[float] = field(default_factory=list)
    versions: JsonObject = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Whether the run had made all its updates, or early stopping ended it: its last
        evaluations were not better than the best one before. True if the record does not say.
        """
        max_steps, patience = map(self.arguments.get, ("max_steps", "early_stopping"))
        if not isinstance(max_steps, int) or self.step >= max_steps:
            return True
        steps = [evaluation["step"] for evaluation in self.evaluations]
        if not isinstance(patience, int) or self.best_step not in steps:
            return False
        return len(steps) - 1 - steps.index(self.best_step) >= patience


def read_progress(folder: Path, prefix: str) -> Progress:
    """Reads the progress file of a verified checkpoint."""
    path = folder / (prefix + PROGRESS_SUFFIX)
    if not path.is_file():
        advice = "give its --model-prefix, or take only its weights with --from-pretrained-params"
        raise UserError(f"checkpoint {folder} has no {path.name}: {advice}")
    description = "the progress of a checkpoint"
    content = read_json(path, description, OLD_PROGRESS)
    if "best_step" not in content:  # a version before 1.0.0
        content |= old_values(folder, content)
    progress: Progress = from_json(Progress, content, f"{description} {path}")
    if is_step(folder.name) and progress.step != int(folder.name):
        raise UserError(
            f"{path}: step is {progress.step}, and the folder is {folder.name}: {ADVICE}"
        )
    return progress


def check_same_run(
    folder: ModelFolder,
    progress: Progress,
    record: RunRecord,
    tokenizer: Tokenizer,
    is_own: bool,
    world_size: int,
    task_flags: Collection[str] = (),
) -> None:
    """Raises UserError if the checkpoint `folder` is of another run, or of a finished run with
    other settings.

    record: of the run that resumes it.
    tokenizer: of its model.
    is_own: whether the checkpoint is in the folder of the run.
    world_size: processes of the run.
    task_flags: names of the arguments that its task reads, some of which decide its samples.
    """
    casing = Casing.of(folder.tokenizer_settings)
    where, ways_out = f"checkpoint {folder}", WAYS_OUT
    if is_own:
        where, ways_out = str(folder.path.parent), WAYS_OUT_OF_A_FOLDER
    if progress.phase != record.phase:
        raise UserError(
            f"{where}: the phase or task was {progress.phase}; this run uses {record.phase}: "
            f"{ways_out}"
        )
    if progress.evaluations and record.identity["development data"] is None:
        raise UserError(
            f"{where} has the best model of its evaluations, and this run makes none: add "
            f"--eval-steps as before, or {ways_out}"
        )
    if difference := first_difference(progress.identity, record.identity):
        if is_own and difference == f"other {WEIGHTS}":  # a script's --overwrite removes phase 1
            ways_out = f"{ANOTHER}, or rename or remove the folder"
        if difference == OTHER_DATA:
            difference += changed_flags(progress.arguments, record.arguments, task_flags)
        raise UserError(f"{where} belongs to a run with {difference}: {ways_out}")
    casing_now = Casing.of(tokenizer.casing_settings())
    if casing not in (casing_now, None):
        raise UserError(
            f"{where}: the casing of the vocabulary was {casing}; this run uses {casing_now}: "
            f"{ways_out}"
        )
    check_length(where, progress, record.hyperparameters, ways_out)
    check_same_batch(folder, progress, record, world_size)


def check_length(
    where: str, progress: Progress, hyperparameters: JsonObject, ways_out: str
) -> None:
    """Raises UserError if the run that has made the checkpoint is longer than this one will be, or
    as long, with other settings. A benchmark has no length.
    """
    max_steps = hyperparameters.get("--max-steps", math.inf)
    if progress.step > max_steps:
        raise UserError(
            f"{where} already holds step {progress.step}; --max-steps is {max_steps}: raise it, or "
            f"{ways_out}"
        )
    difference = first_setting(progress.hyperparameters, hyperparameters)
    if progress.step == max_steps and difference:
        raise UserError(f"{where} holds a finished run with {difference}: {ways_out}")


def check_same_batch(
    folder: ModelFolder, progress: Progress, record: RunRecord, world_size: int
) -> None:
    """Raises UserError if another number of processes alone changes the global batch: nobody asked
    for that, and the learning rate would not fit.
    """
    then = progress.hyperparameters.get(GLOBAL_BATCH)
    now = record.hyperparameters.get(GLOBAL_BATCH)
    if then in (now, None) or progress.world_size == world_size:
        return
    is_asked = any(
        progress.arguments.get(name) != record.arguments.get(name)
        for name in ("batch_size", "gradient_merge_steps", "global_batch_size")
    )
    if not is_asked:
        raise UserError(
            f"checkpoint {folder}: {GLOBAL_BATCH} was {then}, of {progress.world_size} processes; "
            f"with {world_size} it would be {now}: to keep it, give --global-batch-size {then}, or "
            f"--gradient-merge-steps that make it; to change it, --global-batch-size {now}"
        )


def changes_since(progress: Progress, record: RunRecord, versions: JsonObject) -> list[str]:
    """Notes on settings of the run, and on its `versions` (see TrainState), that are not those of
    the checkpoint that it resumes.
    """
    changes = changed_values(progress.hyperparameters, record.hyperparameters)
    notes = [f"note: {change}" for change in changes]
    library = progress.versions.get(FLOAT32_LINEAR)
    for name, then, now in (
        ("--compile", progress.arguments.get("compile"), record.arguments.get("compile")),
        ("the library of float32 linear layers", library, versions[FLOAT32_LINEAR]),
    ):
        if then not in (now, None):
            notes.append(
                f"note: {name} was {then} and is {now} now: the weights will differ by rounding "
                "from those of a run without the change"
            )
    return notes


def changed_values(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each name in both whose value is another one now."""
    return [
        f"{name} was {then[name]} and is {now[name]} now"
        for name in sorted(then.keys() & now.keys())
        if then[name] != now[name]
    ]


def changed_flags(then: JsonObject, now: JsonObject, names: Collection[str]) -> str:
    """The flags of these arguments that have changed, in brackets; "" if only the files have."""
    flags_then, flags_now = (
        {f"--{name.replace('_', '-')}": arguments.get(name) for name in names}
        for arguments in (then, now)
    )
    changes = changed_values(flags_then, flags_now)
    return f" ({', '.join(changes)})" if changes else ""


def first_setting(then: JsonObject, now: JsonObject) -> str | None:
    """The first hyperparameter, but the run's length, whose value was another one; None if all are
    the same.
    """
    for name, value in now.items():
        stored = then.get(name, value)  # the flag may be newer than the record
        if name not in LENGTH and stored != value:
            return _difference(name, stored, value)
    return None


def first_difference(identity: JsonObject, other: JsonObject) -> str | None:
    """What tells the run with the identity `other` from the run with `identity`; None if nothing
    that is known does.
    """
    for name, now in other.items():
        then = identity.get(name)
        if then is not None and _is_known(name, now) and then != now:
            return _difference(name, then, now)
    return None


def _is_known(name: str, value: Any) -> bool:
    return value is not None and not (name == WEIGHTS and value == RANDOM)


def _difference(name: str, then: Any, now: Any) -> str:
    """Says that the value of `name` was `then` and is `now`. Of two dictionaries, the first value
    that differs is named.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        name = next(key for key in {**then, **now} if then.get(key) != now.get(key))
        then, now = then.get(name), now.get(name)
    if name in ("data", "development data", "vocabulary", WEIGHTS) and RANDOM not in (then, now):
        return f"other {name}"
    if name == READING:
        return f"another {name}, as with another --max-seq-length, --do-lower-case or --doc-stride"
    return f"{name} {then} (this run uses {now})"


def complete_identity(identity: JsonObject, stored: JsonObject) -> JsonObject:
    """`identity` with the values of `stored` for those that a run which resumes does not know."""
    return {
        name: value if _is_known(name, value) else stored.get(name, value)
        for name, value in identity.items()
    }
