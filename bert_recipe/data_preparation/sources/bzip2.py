"""Reads any part of a bzip2 file: every block (at most 900 kB of text) can be decompressed by
itself.

A block starts with a magic number at any bit of the file. With a header before it and its checksum
after it, it is a bzip2 file of its own, so that plain and multistream files are read by many units.
"""

import bz2
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

READ_SIZE = 1 << 20
MAX_COMPRESSED_BLOCK = 2 << 20  # bytes; bzip2 makes at most 1% more than the 900 kB of a block
FILE_START = b"BZh9"  # 9: the largest blocks, which also allows smaller ones
BLOCK_START, STREAM_END = 0x314159265359, 0x177245385090
MAGIC_BITS, CHECKSUM_BITS = 48, 32


class Mark(NamedTuple):
    bit: int
    starts_block: bool  # else it is the end of a stream


def find_marks(data: bytes) -> list[Mark]:
    """The magic numbers in `data`, in order. One in 10^14 places has one by chance."""
    marks = []
    for magic in (BLOCK_START, STREAM_END):
        for shift in range(8):
            # Its bytes that are whole at this shift.
            middle = (magic << (8 - shift)).to_bytes(7, "big")[1:6]
            at = data.find(middle, 1)
            while at > 0:
                around = int.from_bytes(data[at - 1 : at + 6].ljust(7, b"\0"), "big")
                if (around >> (8 - shift)) & ((1 << MAGIC_BITS) - 1) == magic:
                    marks.append(Mark(8 * (at - 1) + shift, magic == BLOCK_START))
                at = data.find(middle, at + 1)
    return sorted(marks)


def decompress_block(data: bytes, start: int, stop: int) -> bytes | None:
    """The text of the block in the bits from `start` to `stop`; None if it is damaged."""
    first = start // 8
    last = -(-stop // 8)
    block = (int.from_bytes(data[first:last], "big") >> (8 * last - stop)) & (
        (1 << (stop - start)) - 1
    )
    checksum = (block >> (stop - start - MAGIC_BITS - CHECKSUM_BITS)) & ((1 << CHECKSUM_BITS) - 1)
    bits = stop - start + MAGIC_BITS + CHECKSUM_BITS
    stream = ((block << MAGIC_BITS | STREAM_END) << CHECKSUM_BITS | checksum) << (-bits % 8)
    try:
        return bz2.decompress(FILE_START + stream.to_bytes(-(-bits // 8), "big"))
    except (OSError, ValueError):
        return None


def read_blocks(file: BinaryIO, start: int) -> Iterator[tuple[int, bytes | None]]:
    """The blocks that start at byte `start` or later: where each starts, and its text, or None if
    it is damaged.
    """
    file.seek(start)
    data, base = b"", start
    while chunk := file.read(READ_SIZE):
        data += chunk
        marks = find_marks(data)
        index = 0
        while index + 1 < len(marks):
            mark = marks[index]
            after = index + 1
            if mark.starts_block:
                text = decompress_block(data, mark.bit, marks[after].bit)
                # The mark after it may be there by chance.
                if text is None and after + 1 < len(marks):
                    text = decompress_block(data, mark.bit, marks[after + 1].bit)
                    after += text is not None
                yield base + mark.bit // 8, text
            index = after
        done = marks[index].bit // 8 if marks else max(len(data) - MAGIC_BITS // 8, 0)
        if marks and len(data) - done > MAX_COMPRESSED_BLOCK:
            if marks[index].starts_block:
                yield base + done, None
            done = len(data) - MAGIC_BITS // 8
        data = data[done:]
        base += done
    last = find_marks(data)[-1:]
    if last and last[0].starts_block:
        yield base + last[0].bit // 8, None
