"""Parallel reading and writing of safetensors files by rows.

Tensors are stored in row-major order, so rows are a contiguous byte range. One process writes the
header and sets the file size; then each rank writes its rows at their offsets. Format:
https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import refuse_pointer
from bert_recipe.utils.json_files import parse_json

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}


@dataclass(frozen=True)
class TensorRows:
    """Rows [start, start + len(rows)) of the tensor `name` with the full shape `shape`."""

    name: str
    shape: tuple[int, ...]
    rows: Tensor
    start: int = 0


@dataclass(frozen=True)
class FileLayout:
    """Byte offset of each tensor in a safetensors file."""

    header: bytes
    offsets: dict[str, int]
    size: int


def file_layout(tensors: Iterable[TensorRows]) -> FileLayout:
    """The layout of a file with `tensors`, which are sorted by element size and name; identical on
    every rank.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # as transformers writes
    starts: dict[str, int] = {}  # in the data, which is after the header
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.rows.element_size(), tensor.name)):
        start = end
        end += math.prod(tensor.shape) * tensor.rows.element_size()
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.rows.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        starts[tensor.name] = start
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    header = len(encoded).to_bytes(8, "little") + encoded
    offsets = {name: len(header) + start for name, start in starts.items()}
    return FileLayout(header, offsets, size=len(header) + end)


def create_file(path: Path, layout: FileLayout) -> None:
    """Writes the header and sets the file's size."""
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)


def write_rows(
    path: Path, layout: FileLayout, tensors: Iterable[TensorRows], several_machines: bool = False
) -> None:
    """Writes tensors to their offsets in a file made by `create_file`, and syncs it.

    several_machines: others write to the file, too. NFS's client would then extend a write to whole
    pages, with zeros for what others have written there meanwhile; it does not if the file cannot
    be read and each write is synced.
    """
    descriptor = os.open(path, os.O_WRONLY | (os.O_DSYNC if several_machines else 0))
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        for offset, data in _pieces(layout, tensors):
            file.seek(offset)
            while len(data):
                data = data[file.write(data) :]
        os.fsync(descriptor)


def holds_rows(path: Path, layout: FileLayout, tensors: Iterable[TensorRows]) -> bool:
    """Whether a file has the tensors at their offsets."""
    with path.open("rb") as file:
        for offset, data in _pieces(layout, tensors):
            file.seek(offset)
            if file.read(len(data)) != data:
                return False
    return True


def _pieces(layout: FileLayout, tensors: Iterable[TensorRows]) -> Iterator[tuple[int, memoryview]]:
    """The offset and the bytes of each tensor's rows."""
    for tensor in tensors:
        rows = tensor.rows.detach().cpu()
        if rows.numel():
            row_bytes = rows.nbytes // (len(rows) if rows.dim() else 1)
            data = rows.contiguous().view(-1).view(torch.uint8).numpy().data
            yield layout.offsets[tensor.name] + tensor.start * row_bytes, data


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read on demand: `read(start, stop)` reads rows, `read()` all of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[..., Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "LazyTensor":
        """A tensor in memory, for functions that take one to read."""
        return cls(
            tuple(tensor.shape),
            tensor.dtype,
            lambda *bounds: tensor[slice(*bounds)] if bounds else tensor,
        )


def open_file(path: Path) -> safetensors.safe_open:
    """Opens a safetensors file, also one whose name is not UTF-8, which safetensors refuses."""
    try:
        os.fspath(path).encode()
        return safetensors.safe_open(path, framework="pt")
    except UnicodeEncodeError:
        with path.open("rb") as file:
            return safetensors.safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt")


def check_header(path: Path) -> None:
    """Raises UserError if the header of a safetensors file has a name twice."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        parse_json(file.read(size), f"the header of {path}")


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a safetensors file by name, read on demand. Raises UserError if the file is
    damaged, or its header has a name twice, of which safetensors takes the last one.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: expected a model folder with it")
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    tensors = {}
    try:
        file = open_file(path)
        check_header(path)
        for name in file.keys():  # noqa: SIM118 (not a dict)

            def read(*bounds: int, name: str = name) -> Tensor:
                """Rows [start, stop) of the tensor if they are given, else all of it."""
                if not bounds:
                    return file.get_tensor(name)
                start, stop = bounds
                return file.get_slice(name)[start:stop]

            view = file.get_slice(name)
            # torch.bool stands for types that models do not use, which callers refuse.
            dtype = dtypes.get(view.get_dtype(), torch.bool)
            tensors[name] = LazyTensor(tuple(view.get_shape()), dtype, read)
    except safetensors.SafetensorError as error:
        refuse_pointer(path)
        raise UserError(
            f"{path} is not a complete safetensors file ({error}): fetch or write it again"
        ) from error
    return tensors
