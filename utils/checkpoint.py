"""Checkpoint folders: `<output-dir>/<bert-model>/<phase>/<step>/`, each a Hugging Face model folder as it stands, with
the optimizer's state, the run's progress, and a manifest of sizes and SHA-256.

A folder is written under a temporary name, synced and renamed, so that one with a step for a name is complete. Tensors
are in safetensors files and all else is JSON: nothing is ever unpickled.
"""

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from utils.errors import UserError, one_line
from utils.files import read_json
from utils.progress import print_line

MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
VOCAB_FILE = "vocab.txt"
TOKENIZER_FILE = "tokenizer_config.json"
MANIFEST_FILE = "manifest.json"
TEMPORARY_SUFFIX = ".tmp"
KEPT_CHECKPOINTS = 3
ALIGNMENT = 64  # bytes, of the tensors' copies in memory
FORMAT_VERSION = 1


def optimizer_file(prefix: str) -> str:
    return f"{prefix}_optimizer.safetensors"


def progress_file(prefix: str) -> str:
    return f"{prefix}_progress.json"


class BadCheckpoint(UserError):
    """A checkpoint folder that is not what its manifest says."""


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass
class Checkpoint:
    """Everything that a checkpoint folder holds."""

    step: int
    model: dict[str, Tensor]
    config: dict[str, Any]
    optimizer: dict[str, Tensor]
    progress: dict[str, Any]
    vocab_file: Path | None = None
    do_lower_case: bool = True
    prefix: str = "model"


def write_checkpoint(parent: str | Path, checkpoint: Checkpoint, keep: int = KEPT_CHECKPOINTS) -> Path:
    """Writes `parent`/`step` and then removes older checkpoints, so that `keep` are left with it. A whole folder of
    that name stays as it is: the same step of the same run holds the same numbers. Tensors are contiguous, on the CPU,
    and not changed by anyone meanwhile."""
    parent = Path(parent)
    folder = parent / str(checkpoint.step)
    if folder.is_dir():
        if is_whole(folder):
            return folder
        remove_checkpoint(folder)
    temporary = temporary_name(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write_files(temporary, checkpoint)
        temporary.rename(folder)
        _sync(parent)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(str(error))
        raise UserError(
            f"cannot write the checkpoint {folder} ({reason}): the checkpoints before it are untouched; make room or "
            f"choose another --output-dir, then run the same command again"
        ) from error
    upto = [step for step in checkpoint_steps(parent) if step <= checkpoint.step]
    for old in upto[:-keep]:
        remove_checkpoint(parent / str(old))
    return folder


def prepare_folder(parent: str | Path) -> None:
    """Makes the folder of steps `parent` and removes what a killed run left half-written there, so that a path that
    cannot be written is known before the training and not at its first checkpoint."""
    parent = Path(parent)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left_over in parent.glob(f"*{TEMPORARY_SUFFIX}"):
            if left_over.stem.isdigit():
                shutil.rmtree(left_over)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write checkpoints to {parent} ({error.strerror or error}): choose another --output-dir"
        ) from error


def temporary_name(folder: Path) -> Path:
    return folder.with_name(folder.name + TEMPORARY_SUFFIX)


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint under its temporary name, so that a kill in between leaves no part of one with a step for
    a name."""
    temporary = temporary_name(folder)
    folder.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    config = {"architectures": ["BertForPreTraining"], "model_type": "bert", **checkpoint.config}
    save_file(checkpoint.model, folder / MODEL_FILE, metadata={"format": "pt"})
    save_file(checkpoint.optimizer, folder / optimizer_file(checkpoint.prefix))
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / progress_file(checkpoint.prefix), checkpoint.progress)
    if checkpoint.vocab_file is not None:
        shutil.copyfile(checkpoint.vocab_file, folder / VOCAB_FILE)
        tokenizer = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": checkpoint.do_lower_case,
            "model_max_length": checkpoint.config.get("max_position_embeddings", 512),
        }
        _write_json(folder / TOKENIZER_FILE, tokenizer)
    paths = sorted(folder.iterdir())
    files = {
        path.name: {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, sha256_of_each(paths), strict=True)
    }
    _write_json(folder / MANIFEST_FILE, {"format_version": FORMAT_VERSION, "files": files})
    for path in folder.iterdir():
        shutil.copymode(folder / CONFIG_FILE, path)  # safetensors' own files are for their owner only
        _sync(path)
    _sync(folder)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Makes the file or the folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_each(paths: Sequence[Path]) -> list[str]:
    """On several cores: gigabytes of weights and moments take seconds on one."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(sha256_of, paths))


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time, while training goes on. A failure shows in `error` and is
    raised by the next call of `write` or `wait`.

    Training stands still only while the tensors are copied. The copies go to memory that is kept from one checkpoint to
    the next: pages that a process touches for the first time cost ten times the copy and more.
    """

    def __init__(self, parent: str | Path):
        self.parent = Path(parent)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.reserving: threading.Thread | None = None

    def reserve(self, num_bytes: int, pinned: bool = False) -> None:
        """Readies memory for checkpoints of about `num_bytes` in the background, so that the first is as quick as the
        others; `pinned` for tensors that come from a GPU."""
        num_bytes += num_bytes // 64 + 2**20  # what the tensors' alignment takes, and the optimizer's small ones
        self.reserving = threading.Thread(target=self._reserve, args=(num_bytes, pinned), name="reserve", daemon=True)
        self.reserving.start()

    def _reserve(self, num_bytes: int, pinned: bool) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        pages = self.memory.numpy()[::4096]
        for start in range(0, len(pages), 1024):  # in short turns, since training wants the interpreter too
            pages[start : start + 1024] = 0

    def write(self, checkpoint: Checkpoint) -> None:
        """Copies the tensors of `checkpoint`, from whatever device, and returns; they may change from then on. Waits
        first for the checkpoint before, if that is not durable yet."""
        self.wait()
        checkpoint = self._copy(checkpoint)
        # Not a daemon: an exit on the way of an error still lets a write that has begun come to its end.
        self.thread = threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint")
        self.thread.start()

    def _copy(self, checkpoint: Checkpoint) -> Checkpoint:
        if self.reserving is not None:
            self.reserving.join()
        tensors = [*checkpoint.model.values(), *checkpoint.optimizer.values()]
        ends = list(itertools.accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors))
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if ends and ends[-1] > len(self.memory):
            self.memory = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        for tensor, start in zip(tensors, [0, *ends], strict=False):
            place = self.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(place.copy_(tensor.detach(), non_blocking=True))
        if on_gpu:
            torch.cuda.synchronize()
        model = dict(zip(checkpoint.model, copies, strict=False))
        optimizer = dict(zip(checkpoint.optimizer, copies[len(model) :], strict=True))
        return replace(checkpoint, model=model, optimizer=optimizer)

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            write_checkpoint(self.parent, checkpoint)
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        """Returns when the last checkpoint is durable."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error


# --- reading ----------------------------------------------------------------------------------------------------------


def checkpoint_steps(parent: str | Path) -> list[int]:
    """The steps of the complete checkpoints in `parent`, oldest first."""
    parent = Path(parent)
    if not parent.is_dir():
        return []
    return sorted(int(path.name) for path in parent.iterdir() if path.name.isdigit() and path.is_dir())


def verify_checkpoint(folder: str | Path) -> None:
    """Raises BadCheckpoint, naming the file, unless `folder` holds what its manifest says."""
    folder = Path(folder)
    manifest_path = folder / MANIFEST_FILE
    if not manifest_path.is_file():
        raise BadCheckpoint(
            f"checkpoint {folder} has no {MANIFEST_FILE}: it is not whole, or no checkpoint of this program "
            f"(--from-pretrained-params takes the weights of any model folder); take the checkpoint before it"
        )
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        if manifest["format_version"] != FORMAT_VERSION:
            raise BadCheckpoint(
                f"checkpoint {folder} has format {manifest['format_version']}, and this program reads "
                f"{FORMAT_VERSION}: use the version of this project that wrote it"
            )
        expected = manifest["files"]
        for name in expected:
            if not (folder / name).is_file():
                raise BadCheckpoint(f"checkpoint {folder} lacks {name}: take the checkpoint before it")
        paths = [folder / name for name in expected]
        for path, file, digest in zip(paths, expected.values(), sha256_of_each(paths), strict=True):
            if path.stat().st_size != file["size"] or digest != file["sha256"]:
                raise BadCheckpoint(
                    f"{path} is damaged (its bytes are not those that {MANIFEST_FILE} names): take the checkpoint "
                    f"before it"
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{manifest_path} is damaged ({error}): take the checkpoint before it") from error


def latest_checkpoint(parent: str | Path, tell: Callable[[str], None] = print_line) -> Path | None:
    """The newest whole checkpoint in `parent`, passing over damaged ones and saying so; None where there is none yet.
    Where there are some and none is whole, that is an error: to start from nothing is not what anyone asked for."""
    steps = checkpoint_steps(parent)
    for step in reversed(steps):
        folder = Path(parent) / str(step)
        try:
            verify_checkpoint(folder)
        except BadCheckpoint as error:
            tell(f"warning: {error}")
        else:
            return folder
    if steps:
        raise UserError(f"none of the checkpoints in {parent} is whole: move them away to start from step 1")
    return None


def find_checkpoint(path: str | Path, last_step: str | None, tell: Callable[[str], None] = print_line) -> Path | None:
    """What `--from-checkpoint PATH --last-step-of-checkpoint LAST_STEP` names.

    `last_step` None: `path` is a checkpoint folder. A number: `path`/number. "auto": the newest whole checkpoint in
    the folder of steps `path`, or None where there is none yet."""
    path = Path(path)
    if last_step == "auto":
        if path.is_file() or (path / MANIFEST_FILE).is_file():
            raise UserError(
                f"{path} is no folder of steps: with --last-step-of-checkpoint auto, --from-checkpoint names the "
                f"folder that holds the steps' folders"
            )
        return latest_checkpoint(path, tell)
    folder = path if last_step is None else path / str(last_step)
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder} does not exist: check --from-checkpoint and --last-step-of-checkpoint")
    verify_checkpoint(folder)
    return folder


def is_whole(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except BadCheckpoint:
        return False
    return True


def find_model_folder(path: str | Path, tell: Callable[[str], None] = print_line) -> Path:
    """The folder with a model that `path` names: `path` itself, or the newest whole checkpoint in a folder of steps."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"model folder {path} does not exist: check the path")
    if (path / MODEL_FILE).is_file():
        if (path / MANIFEST_FILE).is_file():
            verify_checkpoint(path)
        return path
    newest = latest_checkpoint(path, tell)
    if newest is None:
        raise UserError(f"model folder {path} holds neither {MODEL_FILE} nor a whole checkpoint: check the path")
    return newest


def read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path} does not exist: expected a folder with {MODEL_FILE} and {CONFIG_FILE}")
    try:
        return load_file(path)
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}): fetch or write it again") from error


def read_progress(folder: Path, prefix: str) -> dict[str, Any]:
    path = folder / progress_file(prefix)
    if not path.is_file():
        raise UserError(f"checkpoint {folder} has no {path.name}: give the --model-prefix that it was written with")
    return read_json(path, "the progress of a checkpoint")


def read_optimizer(folder: Path, prefix: str) -> dict[str, Tensor]:
    return read_tensors(folder / optimizer_file(prefix))


# --- weights ----------------------------------------------------------------------------------------------------------


def canonical_names(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """`tensors` under the names that `model` uses: old LayerNorm names (gamma, beta) are renamed, buffers and copies of
    tied weights are dropped, and the prefix `bert.` is added or taken off as the model wants it."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if not name.endswith(("position_ids", "predictions.decoder.weight", "predictions.decoder.bias")):
            renamed[name] = tensor
    model_has_prefix = hasattr(model, "bert")
    tensors_have_prefix = any(name.startswith("bert.") for name in renamed)
    if model_has_prefix and not tensors_have_prefix:
        heads = ("cls.", "qa_outputs.", "classifier.")
        return {name if name.startswith(heads) else f"bert.{name}": tensor for name, tensor in renamed.items()}
    if not model_has_prefix and tensors_have_prefix:
        return {name.removeprefix("bert."): tensor for name, tensor in renamed.items()}
    return renamed


def check_same_kind(folder: Path, config: Mapping[str, Any], vocab_file: Path) -> None:
    """Raises UserError where weights of the right shapes would still mean something else in this run: another number
    of heads, another vocabulary of the same size."""
    if (folder / CONFIG_FILE).is_file():
        theirs = read_json(folder / CONFIG_FILE, "the config")
        for key in ("num_attention_heads", "hidden_act", "layer_norm_eps"):
            if theirs.get(key, config[key]) != config[key]:
                raise UserError(
                    f"{folder / CONFIG_FILE}: {key} is {theirs[key]}, and this run's config has {config[key]}: use "
                    f"the config that the weights were made with"
                )
    given = folder / VOCAB_FILE
    if given.is_file() and given.read_bytes().split() != vocab_file.read_bytes().split():
        raise UserError(
            f"{given} and {vocab_file} hold other words: use the vocabulary that the weights were made with"
        )


def load_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], source: str | Path, tell: Callable[[str], None] = print_line
) -> None:
    """Loads `tensors` into `model`. Heads of other tasks in `tensors` are passed over; heads that `tensors` lack keep
    their initial weights; both are told. Any other missing, unexpected or misshapen tensor is an error."""
    given = canonical_names(tensors, model)
    wanted = model.state_dict()
    misshapen = [
        f"{name} is {list(given[name].shape)}, the model's is {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in given and given[name].shape != tensor.shape
    ]
    if misshapen:
        raise UserError(
            f"{source}: {len(misshapen)} tensors have another shape ({'; '.join(misshapen[:3])}): use the config and "
            f"the vocabulary that it was made with"
        )
    optional = model.optional_heads
    missing = sorted(wanted.keys() - given.keys())
    if lacking := [name for name in missing if not name.startswith(optional)]:
        raise UserError(f"{source} lacks {len(lacking)} tensors of the model ({', '.join(lacking[:3])})")
    foreign_heads = ("cls.", "qa_outputs.", "classifier.", "pooler.", "bert.pooler.")
    unexpected = sorted(given.keys() - wanted.keys())
    if strangers := [name for name in unexpected if not name.startswith(foreign_heads)]:
        raise UserError(f"{source} has {len(strangers)} tensors that the model lacks ({', '.join(strangers[:3])})")
    if missing:
        tell(f"note: {source} has no {', '.join(missing)}: they start from their initial values")
    if unexpected:
        tell(f"note: {source}: {', '.join(unexpected)} are not used by {type(model).__name__}")
    model.load_state_dict({**wanted, **{name: given[name] for name in wanted if name in given}})


def load_pretrained(model_class, config_class, folder: str | Path, **kwargs):
    """`model_class` with the config and the weights in `folder`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist: expected {CONFIG_FILE} and {MODEL_FILE} in it")
    read_json(folder / CONFIG_FILE, "the config")
    tensors = read_tensors(folder / MODEL_FILE)
    try:
        config = config_class.from_json_file(folder / CONFIG_FILE)
    except ValueError as error:
        raise UserError(str(error)) from error
    with torch.device("meta"):  # draws no values that would be overwritten
        model = model_class(config, **kwargs)
    model.to_empty(device="cpu")
    model.init_weights(model.optional_heads)
    load_weights(model, tensors, folder / MODEL_FILE)
    return model
