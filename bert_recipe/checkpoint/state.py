"""The state of a run: captured to and restored from checkpoints, on all ranks.

Resuming is exact because steps depend only on the weights, the optimizer state, the loss scale and
the number of samples consumed: the data order and the random state of each step are functions of
that number.
"""

import math
import os
import platform
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_recipe.checkpoint.best import find_best, link_best, take_best
from bert_recipe.checkpoint.folder import (
    MODEL_FILE,
    OPTIMIZER_SUFFIX,
    PROBE,
    checkpoint_steps,
    remove_leftovers,
    restore_replaced,
)
from bert_recipe.checkpoint.identity import complete_identity, overwrite
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.progress import (
    ADVICE,
    FLOAT32_LINEAR,
    Progress,
    changes_since,
    check_same_batch,
    read_progress,
)
from bert_recipe.checkpoint.rows import LazyTensor, TensorRows, open_safetensors
from bert_recipe.checkpoint.spans import training_spans
from bert_recipe.checkpoint.start import StartKind, resolve_start
from bert_recipe.checkpoint.trained import SavedLossScale, SavedRun, StateSpec, TrainedModel
from bert_recipe.checkpoint.weights import (
    check_loaded,
    checkpoint_shapes,
    copy_rows,
    load_weights,
    unused_pooler,
)
from bert_recipe.checkpoint.writer import Checkpoint
from bert_recipe.model.kernels.linear import float32_library
from bert_recipe.utils.distributed import DistributedContext
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import (
    FolderLock,
    lock_folder,
    temporary_path,
    write_atomically,
)
from bert_recipe.utils.json_files import JsonObject
from bert_recipe.utils.progress import print_line

# Before the names of parameters that only training needs, in the optimizer's file.
TRAINING_ONLY = "parameters."


class TrainState:
    """The state of a run on this rank, after `step` updates and `samples_consumed` samples. The
    host reads `step` from `device_step` on the device. The learning-rate schedule starts at update
    `schedule_start`.

    spans: the updates that train each parameter.
    encoder_start: the update after which the encoder is trained, too; None while only the head is.
    head_losses: of the last updates of the head alone.
    pooler: of the starting weights, if only fine-tuning needs it; checkpoints have it as it is.
    """

    def __init__(
        self,
        run: SavedRun,
        parallel: TrainedModel,
        optimizer: torch.optim.Optimizer,
        optimizer_spec: StateSpec,
        loss_scale: SavedLossScale,
        distributed: DistributedContext,
    ):
        self.run, self.record, self.prefix = run, run.record, run.settings.prefix
        self.parallel, self.model, self.optimizer = parallel, parallel.model, optimizer
        self.loss_scale, self.distributed = loss_scale, distributed
        self.identity = run.record.identity  # with what only the resumed checkpoint knows
        self.step = self.samples_consumed = self.schedule_start = 0
        self.device_step = torch.zeros((), dtype=torch.int64, device=loss_scale.value.device)
        self.shapes = checkpoint_shapes(self.model)
        self.saved_optimizer = optimizer_spec.saved_as or type(optimizer).__name__
        self.state_layout = optimizer_spec.state(self.model, self.shapes)
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
        self.pooler: dict[str, Tensor] = {}
        # Those that chose the best step, see best.py, and where that is, on the main process.
        self.evaluations: list[JsonObject] = []
        self.best_step: int | None = None
        self.best_folder: Path | None = None
        self.lock: FolderLock | None = None  # of the folder of steps
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
            loss_scale=self.loss_scale.state_dict(),
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
        """Restores a checkpoint, loads weights, or does nothing, as the start of the run says. Its
        folder, if there is one and the run saves, is locked and must not belong to another run.
        """
        kind, folder = self._resolve_start()
        if folder is None:
            pass  # the weights stay random
        elif kind is StartKind.WEIGHTS:
            self.load_weights(folder)
            check_loaded(self.parallel, folder, self.distributed)
        else:
            progress = read_progress(folder.path, self.prefix)
            if kind is StartKind.RESUMED:
                self._resume(folder, progress)
            else:
                self._continue_with_warmup(folder, progress)

    def _resolve_start(self) -> tuple[StartKind, ModelFolder | None]:
        """What the run takes over, and from which folder, which all ranks see; None for random
        weights. Locks the run's own folder and checks it.
        """
        run, start = self.run, self.run.start

        def prepare() -> tuple[str, str | None]:
            if run.saves and run.folder.is_dir():
                self.lock = lock_folder(run.folder)
                restore_replaced(run.folder)
            point = resolve_start(start, run.folder, run.saves)
            return point.kind.name, None if point.folder is None else str(point.folder)

        kind, path = self.distributed.on_main(prepare)
        self._check_shared([] if path is None else [path])
        return StartKind[kind], None if path is None else start.open(Path(path))

    def _check_shared(self, paths: list[str]) -> None:
        """Raises UserError on the main process unless all ranks see the paths."""
        unseen_by = self.distributed.all_reduce_sum([not Path(path).exists() for path in paths])

        def check() -> None:
            for path, count in zip(paths, unseen_by, strict=True):
                if count:
                    processes = f"{int(count)} of the {self.distributed.world_size} processes"
                    advice = "checkpoints must be on storage that all machines share"
                    raise UserError(f"{path} cannot be read by {processes}: {advice}")

        self.distributed.on_main(check)

    def _resume(self, folder: ModelFolder, progress: Progress) -> None:
        """Resumes from a checkpoint of this run: weights, optimizer, schedule, loss scale and data
        position. Raises UserError if it is of another run.
        """
        self.run.check_resumed(folder, progress)
        check_same_batch(folder, progress, self.record, self.distributed.world_size)
        for note in changes_since(progress, self.record, self.versions):
            self._log(note)
        self.identity = complete_identity(self.identity, progress.identity)
        self.evaluations, self.best_step = progress.evaluations, progress.best_step
        if self.best_step is not None:
            self._find_best(folder, self.best_step)
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

    def _find_best(self, resumed: ModelFolder, step: int) -> None:
        """Raises UserError if the best model of the resumed run is gone, or damaged."""

        def find() -> None:
            places = [resumed.path.parent]
            if not self.run.start.config.overwrite:
                places.insert(0, self.run.folder)
            self.best_folder = find_best(places, step)

        self.distributed.on_main(find)

    def _continue_with_warmup(self, folder: ModelFolder, progress: Progress) -> None:
        """Takes over all of phase 1's last checkpoint but its data and schedule (--lr-rewarmup)."""
        self._restore_updates(folder, progress)
        check_loaded(self.parallel, folder, self.distributed)
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
        spans = training_spans(self.model, progress.encoder_start)
        trained = {name for name, span in spans.items() if span.has_state(progress.step)}
        self._restore_optimizer(folder.path / (self.prefix + OPTIMIZER_SUFFIX), trained)
        self.load_weights(folder)
        self.loss_scale.load_state_dict(progress.loss_scale)
        self.step = progress.step
        self.device_step.fill_(self.step)

    def _restore_optimizer(self, path: Path, trained: Collection[str]) -> None:
        """Copies this rank's rows of the optimizer state in the file `path`, and the parameters
        that only training needs. trained: names of parameters that the file has the state of; it
        may have that of others.
        """
        parameters = self.parallel.named_parameters()
        required: dict[str, tuple[int, ...]] = {}
        optional: dict[str, tuple[int, ...]] = {}
        folder_tensors = self.model.folder_tensors
        for name in parameters:
            shapes = required if name in trained else optional
            for key, (shape, _) in self.state_layout[name].items():
                shapes[f"{name}.{key}"] = shape
            if name not in folder_tensors:
                required[TRAINING_ONLY + name] = self.shapes[name]
        tensors = open_state(path, required, optional)
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
        load_weights(self.parallel, folder, self._log)

    def claim_folder(self) -> None:
        """Before the first step: creates and locks the folder of this run, and with --overwrite
        removes another run from it. Raises UserError, without a change of the folder, if another
        run has it, or if ranks do not see it.
        """
        folder, start = self.run.folder, self.run.start

        def lock() -> str:
            if self.lock is None:  # there was no folder when the run chose its start
                self.lock = lock_folder(folder)
                if checkpoint_steps(folder):
                    raise UserError(
                        f"{folder} has checkpoints of another run, which was started at the same "
                        f"moment: rerun the same command"
                    )
            probe = temporary_path(folder / PROBE)
            write_atomically(probe, b"\0")  # so that a disk that is full is found now
            return str(probe)

        def claim() -> None:
            if start.config.overwrite:
                overwrite(folder, self.run.result_files, start.weights)
            if self.best_folder is not None:
                take_best(self.best_folder, folder / str(self.best_step))
            link_best(folder, self.best_step)

        probe = self.distributed.on_main(lock)  # a file that all ranks must see
        try:
            self._check_shared([probe])
        finally:
            self.distributed.on_main(partial(remove_leftovers, folder))
        self.distributed.on_main(claim)

    def current_folder(self) -> Path:
        """Where the run's folder of steps is now, which somebody may have renamed; if it was
        removed, a new folder beside it. For the ranks that write.
        """

        def find() -> str:
            folder = self.run.folder if self.lock is None else self.lock.current_path()
            if folder is None:
                name = f"{self.run.folder.name}-removed-{os.getpid()}"
                folder = self.run.folder.with_name(name)
                folder.mkdir(parents=True, exist_ok=True)
            return str(folder)

        if self.parallel.shard_group is None:
            # Only the main process writes, perhaps because another one has failed.
            return Path(find())
        return Path(self.distributed.on_main(find))

    def keep_lock(self) -> AbstractContextManager[object]:
        """The lock of the run's folder, for a caller who outlives this state. `close` leaves it."""
        lock, self.lock = self.lock, None
        return nullcontext() if lock is None else closing(lock)

    def close(self) -> None:
        """Unlocks the run's folder, for the end of the run. The garbage collector can be late."""
        if self.lock is not None:
            self.lock.close()

    def _log(self, text: str) -> None:
        if self.distributed.is_main:
            print_line(text)


def open_state(
    path: Path,
    required: dict[str, tuple[int, ...]],
    optional: dict[str, tuple[int, ...]] | None = None,
) -> dict[str, LazyTensor]:
    """The tensors of a checkpoint's file by name.

    required: shapes of the tensors that the file must have.
    optional: shapes of those that it may have besides.

    Raises UserError, naming a tensor, if one is missing or unexpected, or has another shape or
    another dtype than float32.
    """
    tensors = open_safetensors(path)
    shapes = required | (optional or {})
    missing = sorted(required.keys() - tensors.keys())
    if missing:
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
