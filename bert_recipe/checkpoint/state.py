"""The state of a run: captured to and restored from checkpoints, on all ranks.

Resuming is exact because steps depend only on the weights, the optimizer state, the loss scale and
the number of samples consumed: the data order and the random state of each step are functions of
that number.
"""

import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_recipe.checkpoint.folder import MODEL_FILE, OPTIMIZER_SUFFIX
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.progress import (
    ADVICE,
    FLOAT32_LINEAR,
    Progress,
    changes_since,
    complete_identity,
)
from bert_recipe.checkpoint.rows import LazyTensor, TensorRows, open_safetensors
from bert_recipe.checkpoint.spans import training_spans
from bert_recipe.checkpoint.start import StartKind
from bert_recipe.checkpoint.trained import SavedRun, TrainedModel
from bert_recipe.checkpoint.weights import (
    check_loaded,
    checkpoint_shapes,
    copy_rows,
    load_weights,
    unused_pooler,
)
from bert_recipe.checkpoint.writer import Checkpoint
from bert_recipe.model.kernels.linear import float32_library
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject
from bert_recipe.utils.progress import print_line, print_once

# Before the names of parameters that only training needs, in the optimizer's file.
TRAINING_ONLY = "parameters."


class TrainState:
    """The state of a run on this rank, after `step` updates and `samples_consumed` samples. The
    host reads `step` from `device_step` on the device. The learning-rate schedule starts at update
    `schedule_start`.

    first_step, last_step: this process makes the updates after the first one, up to the last one.
    spans: the updates that train each parameter.
    encoder_start: the update after which the encoder is trained, too; None while only the head is.
    head_losses: of the last updates of the head alone.
    loaded: names of the parameters that are not those of a new model.
    pooler: of the starting weights, if only fine-tuning needs it; checkpoints have it as it is.
    """

    def __init__(self, run: SavedRun, parallel: TrainedModel, optimizer: torch.optim.Optimizer):
        self.run, self.record, self.prefix = run, run.record, run.settings.prefix
        self.parallel, self.model, self.optimizer = parallel, parallel.model, optimizer
        self.distributed = parallel.distributed
        self.identity = run.record.identity  # with what only the resumed checkpoint knows
        self.step = self.samples_consumed = self.schedule_start = 0
        self.first_step = self.last_step = 0
        self.device_step = torch.zeros(
            (), dtype=torch.int64, device=parallel.loss_scale.value.device
        )
        self.shapes = checkpoint_shapes(self.model)
        self.saved_optimizer = run.optimizer_spec.saved_as or type(optimizer).__name__
        self.state_layout = run.optimizer_spec.state(self.model, self.shapes)
        # Totals over all resumes; raw: without evaluation and checkpoints.
        self.train_seconds = self.raw_train_seconds = 0.0
        self.clock = time.perf_counter()
        self.versions = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            FLOAT32_LINEAR: float32_library(),
        }
        self.start_encoder(0)
        self.head_losses: list[float] = []
        self.loaded: frozenset[str] = frozenset()
        self.pooler: dict[str, Tensor] = {}
        # Those that chose the best step, see best.py.
        self.evaluations: list[JsonObject] = []
        self.best_step: int | None = None
        # Whether the files of the data are not those of the restored checkpoint.
        self.data_may_differ = False

    def start_encoder(self, step: int | None) -> None:
        """Trains the encoder from the update after `step` on; None: from one not known yet."""
        self.encoder_start = step
        self.spans = training_spans(self.model, step)

    @property
    def epoch_and_step(self) -> tuple[int, int]:
        """The epoch, counted from 0, and the number of the last update."""
        return max(self.samples_consumed - 1, 0) // self.record.num_samples, self.step

    def place(self, max_steps: int) -> str:
        """The phase and the step, for the log."""
        return f"{self.record.phase}  step {self.step}/{max_steps}"

    def read_clock(self) -> None:
        """Adds the time since the last call, or since construction, to `train_seconds`."""
        now = time.perf_counter()
        self.train_seconds = self.train_seconds + now - self.clock
        self.clock = now

    def capture(self) -> Checkpoint:
        """The state as a checkpoint, called on all ranks. Tensors are not copied."""
        parameters = self.parallel.named_parameters()
        prefix = self.prefix
        folder_tensors = self.model.folder_tensors
        state_rows = []
        for name, p in parameters.items():
            if name not in folder_tensors:
                state_rows.append(self._rows(name, TRAINING_ONLY + name, p))
            state = self.parallel.optimizer_state(self.optimizer, name)
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state_rows.append(self._state_rows(name, key, value))
        tensors = {
            MODEL_FILE: [
                self._rows(name, name, p)
                for name, p in parameters.items()
                if name in folder_tensors
            ],
            prefix + OPTIMIZER_SUFFIX: state_rows,
        }
        for name, tensor in self.pooler.items():
            rows = tensor if self.distributed.is_main else tensor[:0]
            tensors[MODEL_FILE].append(TensorRows(name, tuple(tensor.shape), rows))
        config, architecture = self.model.config, self.model.architecture
        progress, parts = self._progress(), self.run.parts
        return Checkpoint(
            self.step, tensors, config, architecture, progress, self.record, parts, prefix
        )

    def _rows(
        self, parameter: str, name: str, tensor: Tensor, shape: tuple[int, ...] | None = None
    ) -> TensorRows:
        """This rank's rows of a tensor with one row per row of `parameter`, and its shape if none
        is given, without vocabulary padding. Rows are single elements if `tensor` is a flattened
        part of a matrix.
        """
        shape = shape or self.shapes[parameter]
        start = self.parallel.row_start(parameter)
        num_rows = math.prod(shape) // math.prod(tensor.shape[1:])
        count = max(num_rows - start, 0) if self.parallel.saves_rows else 0
        return TensorRows(name, shape, tensor[:count], min(start, num_rows))

    def _state_rows(self, parameter: str, key: str, tensor: Tensor) -> TensorRows:
        name, (shape, owner) = f"{parameter}.{key}", self.state_layout[parameter][key]
        if owner == "rows":
            return self._rows(parameter, name, tensor, shape)
        # All ranks may write the same number.
        saved = tensor if not shape or self.distributed.is_main else tensor[:0]
        return TensorRows(name, shape, saved)

    def _progress(self) -> dict[str, Any]:
        record = vars(self.record) | {"identity": self.identity}
        progress = Progress(
            **record,
            step=self.step,
            samples_consumed=self.samples_consumed,
            schedule_start=self.schedule_start,
            optimizer=self.saved_optimizer,
            loss_scale=self.parallel.loss_scale.state_dict(),
            train_seconds=self.train_seconds,
            raw_train_seconds=self.raw_train_seconds,
            world_size=self.distributed.world_size,
            evaluations=self.evaluations,
            best_step=self.best_step,
            encoder_start=self.encoder_start,
            head_losses=self.head_losses,
            versions=self.versions,
        )
        return asdict(progress)

    def restore(self) -> None:
        """Restores a checkpoint, loads weights, or does nothing, as the start of the run says."""
        start = self.run.start
        if start.source is not None:  # else the weights stay random
            if start.progress is None:
                self.load_weights(start.source)
            elif start.kind is StartKind.RESUMED:
                self._resume(start.source, start.progress)
            else:
                self._continue_with_warmup(start.source, start.progress)
            if start.kind is not StartKind.RESUMED:
                check_loaded(self.parallel, start.source)
        self.first_step, self.last_step = self.step, self.run.last_step(self.step)

    def _resume(self, folder: ModelFolder, progress: Progress) -> None:
        """Resumes from a checkpoint of this run: weights, optimizer, schedule, loss scale and data
        position.
        """
        for note in changes_since(progress, self.record, self.versions):
            self._log(note)
        self.identity = complete_identity(self.identity, progress.identity)
        self.evaluations, self.best_step = progress.evaluations, progress.best_step
        self.data_may_differ = progress.data_files != self.record.data_files
        self._restore_updates(folder, progress)
        self.samples_consumed = progress.samples_consumed
        self.schedule_start = progress.schedule_start
        self.start_encoder(progress.encoder_start)
        self.head_losses = progress.head_losses
        self.train_seconds = progress.train_seconds
        self.raw_train_seconds = progress.raw_train_seconds
        self._log(
            f"resumed from {folder}: step {self.step}, {self.samples_consumed} samples consumed"
        )

    def _continue_with_warmup(self, folder: ModelFolder, progress: Progress) -> None:
        """Takes over all of phase 1's last checkpoint but its data and schedule (--lr-rewarmup)."""
        self._restore_updates(folder, progress)
        self.schedule_start = self.step
        self._log(
            f"continuing from {folder}: step {self.step}, with a new warmup of the learning rate"
        )

    def _restore_updates(self, folder: ModelFolder, progress: Progress) -> None:
        """Restores weights, optimizer, loss scale and number of updates."""
        if progress.optimizer != self.saved_optimizer:
            advice = (
                "use the same --optimizer, or take only its weights with --from-pretrained-params"
            )
            raise UserError(
                f"checkpoint {folder} was saved with {progress.optimizer}, not "
                f"{self.saved_optimizer}: {advice}"
            )
        self._restore_optimizer(folder.path / (self.prefix + OPTIMIZER_SUFFIX))
        self.load_weights(folder)
        self.parallel.loss_scale.load_state_dict(progress.loss_scale)
        self.step = progress.step
        self.device_step.fill_(self.step)

    def _restore_optimizer(self, path: Path) -> None:
        """Copies this rank's rows of the optimizer state in the file `path`, and the parameters
        that only training needs. A parameter that had no gradient so far has no state.
        """
        parameters = self.parallel.named_parameters()
        required: dict[str, tuple[int, ...]] = {}
        states = []
        folder_tensors = self.model.folder_tensors
        for name in parameters:
            layout = self.state_layout[name]
            states.append({f"{name}.{key}": shape for key, (shape, _) in layout.items()})
            if name not in folder_tensors:
                required[TRAINING_ONLY + name] = self.shapes[name]
        tensors = open_state(path, required, states)
        for name, p in parameters.items():
            if TRAINING_ONLY + name in tensors:
                copy_rows(p.detach(), self.parallel.row_start(name), tensors[TRAINING_ONLY + name])
            for key, (shape, owner) in self.state_layout[name].items():
                tensor = tensors.get(f"{name}.{key}")
                if tensor is None:
                    continue
                local_shape, start = shape, 0  # those of this rank's rows
                if owner == "rows":
                    local_shape = p.shape if shape == self.shapes[name] else (len(p), *shape[1:])
                    start = self.parallel.row_start(name)
                value = torch.empty(local_shape, dtype=torch.float32, device=p.device)
                copy_rows(value, start, tensor)
                state = self.parallel.optimizer_state(self.optimizer, name)
                if key in state:  # keep the tensor: another object may own its memory
                    state[key].copy_(value)
                else:
                    state[key] = value

    def load_weights(self, folder: ModelFolder) -> None:
        """Loads only the weights of a model folder."""
        device = next(iter(self.parallel.named_parameters().values())).device
        self.pooler = unused_pooler(self.model, folder.tensors, device)
        self.loaded = load_weights(self.parallel, folder, print_once)

    def _log(self, text: str) -> None:
        if self.distributed.is_main:
            print_line(text)


def open_state(
    path: Path,
    required: dict[str, tuple[int, ...]],
    states: Sequence[dict[str, tuple[int, ...]]],
) -> dict[str, LazyTensor]:
    """The tensors of a checkpoint's file by name.

    required: shapes of the tensors that the file must have.
    states: shapes of groups of tensors, of each of which it has all or none, and of one all.

    Raises UserError, naming a tensor, if one is missing or unexpected, or has another shape or
    another dtype than float32.
    """
    tensors = open_safetensors(path)
    shapes, needed = dict(required), set(required)
    for state in states:
        shapes |= state
        if not tensors.keys().isdisjoint(state):
            needed |= state.keys()
    if len(needed) == len(required):  # an update makes the state of a parameter
        needed.update(*states)
    if missing := sorted(needed - tensors.keys()):
        raise UserError(f"{path} lacks {missing[0]} (and {len(missing) - 1} more): {ADVICE}")
    unexpected = sorted(tensors.keys() - shapes.keys())
    if unexpected:
        raise UserError(
            f"{path} has {unexpected[0]}, which belongs to no parameter of this model: {ADVICE}"
        )
    for name, shape in shapes.items():
        if name not in tensors:
            continue
        actual = (list(tensors[name].shape), tensors[name].dtype)
        expected = (list(shape), torch.float32)
        if actual != expected:
            raise UserError(f"{path}: {name} is {actual}, expected {expected}: {ADVICE}")
    return tensors
