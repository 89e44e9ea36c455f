"""Writes checkpoints in the background, from all ranks that hold a part of the state."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from bert_recipe.checkpoint.best import link_best
from bert_recipe.checkpoint.folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    PROGRESS_SUFFIX,
    block_digests,
    is_valid,
    manifest_of,
    num_blocks,
    remove_old_checkpoints,
)
from bert_recipe.checkpoint.model_card import (
    CARD_FILE,
    CLASSIFIER,
    ModelParts,
    card_of,
)
from bert_recipe.checkpoint.record import RunRecord
from bert_recipe.checkpoint.rows import (
    FileLayout,
    TensorRows,
    create_file,
    file_layout,
    holds_rows,
    write_rows,
)
from bert_recipe.checkpoint.sentence_folders import MODULES_FILE
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.tokenization.tokenizer import model_files
from bert_recipe.utils.collectives import all_reduce
from bert_recipe.utils.device import pin_memory
from bert_recipe.utils.distributed import DistributedContext
from bert_recipe.utils.errors import PeerError, UserError, error_message
from bert_recipe.utils.files import publish_folder, temporary_path
from bert_recipe.utils.json_files import JsonObject, json_bytes, read_json
from bert_recipe.utils.memory import available_memory, process_memory

Result = TypeVar("Result")

KEPT_CHECKPOINTS = 3
ALIGNMENT = 64  # bytes
# CrossEncoder of sentence-transformers then gives the number itself, as inference.py does.
RAW_NUMBER = {"activation_fn": "torch.nn.modules.linear.Identity"}
HASHING_BYTES = 64 << 20  # of the threads that hash, with the files' pages


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder.

    tensors: by file name, this rank's rows of every tensor, with 0 rows where it has none.
    record, parts: of the run, see trained.SavedRun.
    prefix: of the names of its files.
    """

    step: int
    tensors: Mapping[str, Sequence[TensorRows]]
    config: ModelConfig
    architecture: str
    progress: JsonObject
    record: RunRecord
    parts: ModelParts
    prefix: str = "model"

    @property
    def rows(self) -> list[TensorRows]:
        return [tensor for tensors in self.tensors.values() for tensor in tensors]

    @property
    def gpu(self) -> torch.device | None:
        return next((tensor.rows.device for tensor in self.rows if tensor.rows.is_cuda), None)

    def other_files(self) -> dict[str, bytes]:
        padding = {"pad_token_id": self.parts.tokenizer.pad_token_id}
        config = {"architectures": [self.architecture], **padding, **self.config.to_dict()}
        if self.architecture.endswith(CLASSIFIER) and self.config.is_number:
            config["sentence_transformers"] = RAW_NUMBER
        values = {CONFIG_FILE: config, self.prefix + PROGRESS_SUFFIX: self.progress}
        files = {name: json_bytes(value) for name, value in values.items()}
        length = self.parts.max_length or self.config.max_length
        # text-embeddings-inference reads a tokenizer.json only.
        is_served = self.architecture.endswith(CLASSIFIER) or MODULES_FILE in self.parts.files
        needs_json = self.config.needs_tokenizer_json or is_served
        files |= model_files(
            self.parts.tokenizer, length, needs_json, self.config.takes_token_types
        )
        card = card_of(self.architecture, self.config, self.record, self.parts, self.step)
        return {**files, CARD_FILE: card.signed().encode(), **self.parts.files}


class StageError(Exception):
    """A stage of a write has failed, here (the cause) or on another writer."""


class CheckpointWriter:
    """Writes one checkpoint at a time in a background thread. `error` is that of the last write, if
    it has failed; the next call of `write` or `wait` raises it.

    Training waits only for a copy of the tensors. The buffer is reused, because allocating pages
    takes ten times as long as the copy. If there is not enough memory for a copy, training waits
    for the whole write.

    parent: the folder of steps, on storage shared by all ranks.
    sharded: whether all ranks write; otherwise `write` is a no-op on all but the main process.
    keep_every: steps to keep besides the newest ones.
    """

    def __init__(
        self,
        parent: str | Path,
        distributed: DistributedContext,
        sharded: bool = False,
        keep_every: int | None = None,
    ):
        self.parent = Path(parent)
        self.distributed = distributed
        self.keep_every = keep_every
        self.is_writer = sharded or distributed.is_main
        self.writers = distributed.world_size if sharded else 1
        # Writers on this machine. They allocate their buffers at the same time.
        self.local_writers = distributed.local_world_size if sharded else 1
        # A separate group, so that the thread's collectives do not mix with those of training.
        self.group = distributed.new_group(backend="gloo") if self.writers > 1 else None
        self.writing: Future[None] | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.preparing: Future[bool] | None = None

    @property
    def error(self) -> BaseException | None:
        """Of the last write, if it has ended."""
        if self.writing is None or not self.writing.done():
            return None
        return self.writing.exception()

    def write(self, checkpoint: Checkpoint) -> None:
        """Writes `checkpoint` after the previous one. The tensors, on any device, may change after
        the call.
        """
        if not self.is_writer:
            return
        self.wait()
        temporary = temporary_path(self.parent / str(checkpoint.step)).name
        if self.writers > 1:
            temporary = self.distributed.broadcast_json(temporary)
        copied = self._copy(checkpoint)
        arguments = (self.parent, temporary, copied or checkpoint)
        self.writing = ThreadPoolExecutor(1, "checkpoint").submit(self._write, *arguments)
        if copied is None:
            self.wait()

    def prepare(self, checkpoint: Checkpoint) -> None:
        """Allocates the buffer for checkpoints like this one in a thread, because pinning takes
        seconds.
        """
        if self.is_writer:
            self.preparing = ThreadPoolExecutor(1, "checkpoint memory").submit(
                self._allocate, checkpoint
            )

    def _copy(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Copies the tensors of `checkpoint` to the buffer; None if there is not enough memory."""
        if self.preparing is not None:
            self.preparing.result()
        if len(self.memory) < aligned_bytes(checkpoint.rows) and not self._allocate(checkpoint):
            return None
        copies: dict[str, list[TensorRows]] = {name: [] for name in checkpoint.tensors}
        start = 0
        for name, tensors in checkpoint.tensors.items():
            for tensor in tensors:
                rows = tensor.rows.detach()
                place = self.memory[start : start + rows.nbytes].view(rows.dtype).view(rows.shape)
                copies[name].append(replace(tensor, rows=place.copy_(rows, non_blocking=True)))
                start += aligned_bytes([tensor])
        if checkpoint.gpu is not None:
            torch.cuda.synchronize()
        return replace(checkpoint, tensors=copies)

    def _allocate(self, checkpoint: Checkpoint) -> bool:
        """Allocates the buffer, pinned if tensors are on a GPU. Returns whether there was enough
        memory.
        """
        needed = aligned_bytes(checkpoint.rows)
        gpu = checkpoint.gpu
        # The next update needs what the last one has returned, at least gradients, and hashing some
        # more.
        now, peak = process_memory()
        next_update = max(peak - now, aligned_bytes(checkpoint.tensors[MODEL_FILE]))
        if needed + next_update + HASHING_BYTES > available_memory() / self.local_writers:
            return False
        try:
            self.memory = torch.empty(needed, dtype=torch.uint8)
        except RuntimeError:  # a limit below the free memory
            return False
        if gpu is not None:
            pin_memory(self.memory, gpu, self)
        return True

    def move_to(self, parent: Path) -> None:
        """Writes to `parent` from now on, after `finish`; for another folder, drops the last
        write's error.
        """
        if parent != self.parent:
            self.parent, self.writing = parent, None

    def wait(self) -> None:
        """Waits until the last checkpoint is durable. Raises its error if it failed."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> None:
        """Waits for the last checkpoint, without raising its error."""
        if self.writing is not None:
            wait([self.writing])

    def _write(self, parent: Path, temporary_name: str, checkpoint: Checkpoint) -> None:
        """Writes `parent`/step, called on all writers, and removes all but the newest
        KEPT_CHECKPOINTS checkpoints and every `keep_every`-th step.

        An existing valid checkpoint is kept: the same step of the same run has the same content, if
        it has the same evaluations.
        Raises UserError if it cannot be written, and PeerError if another rank failed.
        """
        folder = parent / str(checkpoint.step)
        temporary = parent / temporary_name
        if self._agree(self.distributed.is_main and is_written(checkpoint, folder)):
            self._link_best(folder, checkpoint)
            return
        layouts = file_layouts(checkpoint)
        parts = [
            (temporary / name, layouts[name], tensors)
            for name, tensors in checkpoint.tensors.items()
        ]
        several_machines = self.writers > self.local_writers
        rank = self.distributed.rank
        try:
            self._together(self._create_files, temporary, checkpoint, layouts)
            self._together(_write_parts, parts, several_machines)
            if several_machines:
                self._together(_check_parts, parts)
            digests = self._together(_hash_blocks, temporary, rank, self.writers)
            self._together(self._publish, temporary, folder, checkpoint, digests)
        except StageError as failure:
            if self.distributed.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            error = failure.__cause__
            if error is not None and not isinstance(error, OSError | RuntimeError):
                raise error from None
            raise unwritable(folder, error) from error

    def _together(self, stage: Callable[..., Result], *args: Any) -> Result:
        """Calls `stage`, and raises StageError on all writers if it fails on one, so that none
        starts the next stage. A stage may fail only before or after its collectives.
        """
        result, error = None, None
        try:
            result = stage(*args)
        except Exception as raised:  # any error, because the other ranks wait for this one
            error = raised
        if self._agree(error is not None):
            raise StageError from error
        return cast(Result, result)

    def _create_files(
        self, folder: Path, checkpoint: Checkpoint, layouts: dict[str, FileLayout]
    ) -> None:
        """Writes all files except the tensors' rows, on the main process."""
        if not self.distributed.is_main:
            return
        folder.mkdir(parents=True)
        for name, layout in layouts.items():
            create_file(folder / name, layout)
        for name, content in checkpoint.other_files().items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    def _publish(
        self, temporary: Path, folder: Path, checkpoint: Checkpoint, digests_32: Tensor
    ) -> None:
        """Writes the manifest, renames the folder and removes old checkpoints, on the main process.
        digests_32: of this writer's blocks.
        """
        if self.group is not None:
            all_reduce(digests_32, self.group)
        if not self.distributed.is_main:
            return
        digests = [bytes(row.tolist()).hex() for row in digests_32]
        manifest = manifest_of(_file_sizes(temporary), digests)
        text = json.dumps(manifest, indent=1) + "\n"
        (temporary / MANIFEST_FILE).write_text(text, encoding="utf-8")
        publish_folder(temporary, folder)
        self._link_best(folder, checkpoint)
        self.prune(folder.parent, checkpoint.step)

    def prune(self, parent: Path, step: int) -> None:
        """Removes what is not to be kept up to `step`; also called at the start of a run, since a
        kill may have prevented it. For the main process.
        """
        remove_old_checkpoints(parent, step, KEPT_CHECKPOINTS, self.keep_every)

    def _link_best(self, folder: Path, checkpoint: Checkpoint) -> None:
        if self.distributed.is_main:
            link_best(folder.parent, checkpoint.progress.get("best_step"))

    def _agree(self, flag: bool) -> bool:
        """Whether `flag` is true on any writer."""
        if self.group is None:
            return flag
        tensor = torch.tensor(int(flag))
        all_reduce(tensor, self.group, dist.ReduceOp.MAX)
        return bool(tensor)


def is_written(checkpoint: Checkpoint, folder: Path) -> bool:
    """Whether `folder` is this checkpoint."""
    if not folder.is_dir() or not is_valid(folder):
        return False
    path = folder / (checkpoint.prefix + PROGRESS_SUFFIX)
    stored = read_json(path, "the progress of a checkpoint") if path.is_file() else {}
    return stored.get("evaluations") == checkpoint.progress.get("evaluations")


def aligned_bytes(tensors: Iterable[TensorRows]) -> int:
    """The size of the tensors in the buffer, where each starts at a multiple of ALIGNMENT."""
    return sum(-(-tensor.rows.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def file_layouts(checkpoint: Checkpoint) -> dict[str, FileLayout]:
    """The layout of each file of tensors, identical on every rank."""
    return {name: file_layout(tensors) for name, tensors in checkpoint.tensors.items()}


def unwritable(folder: Path, error: OSError | RuntimeError | None) -> UserError:
    """The error of a failed write. error: None if it is another process's."""
    if error is None:
        return PeerError(f"cannot write the checkpoint {folder}: see the error of another process")
    return UserError(
        f"cannot write the checkpoint {folder}: {error_message(error) or error}; then resume: the "
        f"checkpoints before it are unchanged"
    )


def _write_parts(
    parts: Sequence[tuple[Path, FileLayout, Sequence[TensorRows]]], several_machines: bool
) -> None:
    for part in parts:
        write_rows(*part, several_machines)


def _check_parts(parts: Sequence[tuple[Path, FileLayout, Sequence[TensorRows]]]) -> None:
    """Compares the files with this rank's memory, since the checksums are of what is in the
    files.
    """
    for path, layout, tensors in parts:
        if not holds_rows(path, layout, tensors):
            raise UserError(
                f"{path} does not hold what was written: this file system loses writes of several "
                "machines to one file; choose another --output-dir, or "
                "--data-parallel-shard-degree 1, where one process writes"
            )


def _file_sizes(folder: Path) -> dict[str, int]:
    """Of the files in the manifest. The card may be edited."""
    files = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CARD_FILE
    ]
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _hash_blocks(folder: Path, rank: int, writers: int) -> Tensor:
    """The digests of all blocks of all files, [number of blocks, 32] bytes; zeros for the blocks of
    other ranks.
    """
    blocks = [
        (folder / name, block)
        for name, size in _file_sizes(folder).items()
        for block in range(num_blocks(size))
    ]
    digests_32 = torch.zeros(len(blocks), 32, dtype=torch.uint8)
    mine = range(rank, len(blocks), writers)
    for block, digest in zip(mine, block_digests([blocks[block] for block in mine]), strict=True):
        digests_32[block] = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
    return digests_32
