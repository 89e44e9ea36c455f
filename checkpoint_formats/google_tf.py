"""Google's TensorFlow BERT: `bert_model.ckpt.index` and `.data-...`, read without TensorFlow.

The index is a LevelDB table of protocol buffers with type, shape and location of each variable; the data files have the
values, little-endian and uncompressed. TensorFlow is over half a gigabyte and does not support every version of Python.
Formats: tensorflow/core/protobuf/tensor_bundle.proto and LevelDB's doc/table_format.md.
"""

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from checkpoint_formats.source_weights import SourceWeights, find_file
from encoders.bert import BertConfig
from utils.errors import UserError
from utils.progress import progress_bar

OPTIMIZER_STATE = re.compile(r"(/adam_[mv]|^global_step)$")
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
HEADS = {"cls/squad/": "qa_outputs.", "": "classifier.", "cls/seq_relationship/": "cls.seq_relationship."}

TABLE_MAGIC = 0xDB4775248B80FB57
FOOTER_BYTES = 48
BLOCK_TRAILER = struct.Struct("<BI")  # compression, checksum
NO_COMPRESSION = 0
CRC_MASK = 0xA282EAD8
CRC_POLYNOMIAL = 0x82F63B78  # CRC-32C, reversed
DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<f8"), 3: np.dtype("<i4"), 9: np.dtype("<i8"), 19: np.dtype("<f2")}


def read(source: Path, _config: BertConfig) -> SourceWeights:
    path = find_file(source, ".index")
    bundle = TensorBundle(path)
    if OBJECT_GRAPH in bundle.entries:
        raise UserError(
            f"{path} is an object-based checkpoint of TensorFlow 2 (Keras): only name-based checkpoints are read "
            f"(bert/encoder/layer_0/...), as Google published them"
        )
    weights = SourceWeights(path)
    placed = {name: entry for name, entry in bundle.entries.items() if not OPTIMIZER_STATE.search(name)}
    for variable in sorted(bundle.entries.keys() - placed.keys()):
        weights.skip("optimizer state", variable)
    with progress_bar(sum(entry.size for entry in placed.values()), "reading", delay=1) as bar:
        for variable, entry in placed.items():
            tensor = torch.from_numpy(bundle.read(variable))
            is_kernel = variable.endswith("/kernel") and tensor.dim() == 2
            weights.add(hugging_face_name(variable), tensor.T.contiguous() if is_kernel else tensor, variable)
            bar.update(entry.size)
    return weights


def hugging_face_name(variable: str) -> str:
    """`bert/encoder/layer_0/output/dense/kernel` as `bert.encoder.layer.0.output.dense.weight`. A `kernel` is
    [in, out]; the heads' matrices (`output_weights`) and the embeddings are laid out as in PyTorch."""
    if head := re.fullmatch(r"(.*/|)output_(weights|bias)", variable):
        if head[1] in HEADS:
            return HEADS[head[1]] + ("weight" if head[2] == "weights" else "bias")
        return f"{head[1].replace('/', '.')}{head[2]}"  # cls.predictions.bias
    name = re.sub(r"/layer_(\d+)/", r"/layer/\1/", variable)
    if name.endswith("_embeddings"):
        name += "/weight"
    name = name.replace("/LayerNorm/gamma", "/LayerNorm/weight").replace("/LayerNorm/beta", "/LayerNorm/bias")
    return re.sub(r"/kernel$", "/weight", name).replace("/", ".")


@dataclass
class BundleEntry:
    """BundleEntryProto: a variable's type, shape and location."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int  # bytes
    checksum: int
    is_sliced: bool


class TensorBundle:
    """The variables of a checkpoint by name. Damaged files raise UserError."""

    def __init__(self, index_path: Path):
        self.index_path = index_path
        self.prefix = index_path.name.removesuffix(".index")
        try:
            table = dict(read_table(index_path.read_bytes()))
            header = parse_message(table.pop(b""))
            self.num_shards = header.get(1, [0])[0]
            self.entries = {key.decode(): parse_entry(value) for key, value in table.items()}
        except (ValueError, KeyError, IndexError, TypeError, struct.error) as error:
            raise UserError(
                f"{index_path} is not a complete index of a TensorFlow checkpoint ({error}): fetch it again"
            ) from error
        if header.get(2, [0])[0] != 0:
            raise UserError(f"{index_path}: big-endian checkpoint: write it again on a little-endian machine")

    def read(self, name: str) -> np.ndarray:
        """The values of a variable, checked against its checksum."""
        entry = self.entries[name]
        if entry.is_sliced or entry.dtype not in DTYPES:
            what = "partitioned" if entry.is_sliced else f"of TensorFlow's type {entry.dtype}"
            raise UserError(
                f"{self.index_path}: variable {name} is {what}: only unpartitioned numeric variables are read"
            )
        path = self.index_path.with_name(f"{self.prefix}.data-{entry.shard:05d}-of-{self.num_shards:05d}")
        if not path.is_file():
            raise UserError(f"{path} does not exist: {self.index_path.name} names it, fetch the missing file")
        with path.open("rb") as file:
            file.seek(entry.offset)
            data = file.read(entry.size)
        dtype = DTYPES[entry.dtype]
        is_complete = len(data) == entry.size == dtype.itemsize * int(np.prod(entry.shape, dtype=np.int64))
        if not is_complete or masked_crc32c(data) != entry.checksum:
            raise UserError(f"{path}: the values of {name} are damaged or cut off: fetch the file again")
        return np.frombuffer(data, dtype).reshape(entry.shape).copy()


def parse_entry(data: bytes) -> BundleEntry:
    first = {field: values[0] for field, values in parse_message(data).items()}
    shape = parse_message(first.get(2, b""))
    sizes = tuple(parse_message(size).get(1, [0])[0] for size in shape.get(2, []))
    dtype, *numbers = (first.get(field, 0) for field in (1, 3, 4, 5, 6))
    return BundleEntry(dtype, sizes, *numbers, is_sliced=7 in first)


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table. An index block refers to the blocks that contain them."""
    footer = data[-FOOTER_BYTES:]
    if len(footer) < FOOTER_BYTES or struct.unpack("<Q", footer[-8:])[0] != TABLE_MAGIC:
        raise ValueError("no table footer")
    _, position = read_handle(footer, 0)  # the meta index, which bundles do not use
    (offset, size), _ = read_handle(footer, position)
    for _, handle in read_block(data, offset, size):
        yield from read_block(data, *read_handle(handle, 0)[0])


def read_handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and the position after them."""
    offset, position = read_varint(data, position)
    size, position = read_varint(data, position)
    return (offset, size), position


def read_block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yields the entries of a block. Keys are stored without the prefix that they share with the previous key."""
    block = data[offset : offset + size]
    compression, checksum = BLOCK_TRAILER.unpack_from(data, offset + size)
    if masked_crc32c(data[offset : offset + size + 1]) != checksum:
        raise ValueError("wrong checksum")
    if compression != NO_COMPRESSION:
        raise ValueError("compressed")
    num_restarts = struct.unpack("<I", block[-4:])[0]
    end, position, key = size - 4 * (num_restarts + 1), 0, b""
    while position < end:
        shared, position = read_varint(block, position)
        rest, position = read_varint(block, position)
        value_size, position = read_varint(block, position)
        key = key[:shared] + block[position : position + rest]
        yield key, block[position + rest : position + rest + value_size]
        position += rest + value_size


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A number of 7 bits per byte, lowest first, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def parse_message(data: bytes) -> dict[int, list]:
    """The fields of a message by number: ints, or bytes for what has a length."""
    fields: dict[int, list] = {}
    position = 0
    while position < len(data):
        tag, position = read_varint(data, position)
        wire_type = tag & 7
        if wire_type == 0:
            value, position = read_varint(data, position)
        elif wire_type == 2:
            size, position = read_varint(data, position)
            value, position = data[position : position + size], position + size
        elif wire_type == 5:
            value, position = struct.unpack_from("<I", data, position)[0], position + 4
        else:
            raise ValueError(f"wire type {wire_type}")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ (table & np.uint32(1)) * np.uint32(CRC_POLYNOMIAL)
    return table


BYTE_TABLE = _byte_table()


def masked_crc32c(data: bytes) -> int:
    """CRC-32C as TensorFlow and LevelDB store it: rotated by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + CRC_MASK) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """CRC-32C of `data` (at least 4 bytes) with NumPy: the data is split into lanes, which are processed in parallel.

    Leading zeros do not change a register that starts at 0, so the data is padded in front. A CRC is linear, so the
    lanes' results are combined by xor, after each is advanced over the bytes that follow it."""
    num_lanes = max(1, math.isqrt(len(data)))
    lane_bytes = -(-len(data) // num_lanes)
    padded = np.zeros(num_lanes * lane_bytes, np.uint8)
    start = len(padded) - len(data)
    padded[start:] = np.frombuffer(data, np.uint8)
    padded[start : start + 4] ^= 0xFF  # a register that starts at 0xFFFFFFFF
    registers = np.zeros(num_lanes, np.uint32)
    for column in np.ascontiguousarray(padded.reshape(num_lanes, lane_bytes).T):
        registers = BYTE_TABLE[(registers ^ column) & 0xFF] ^ (registers >> 8)
    basis = bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(lane_bytes):
        basis = BYTE_TABLE[basis & 0xFF] ^ (basis >> 8)  # each bit of a register, advanced over one lane
    result = np.uint32(0)
    for register in registers:
        result = np.bitwise_xor.reduce(basis[result & bits != 0]) ^ register
    return int(result) ^ 0xFFFFFFFF
