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
    block_bits = stop - start
    first_byte = start // 8
    stop_byte = -(-stop // 8)
    block = int.from_bytes(data[first_byte:stop_byte], "big")
    block >>= 8 * stop_byte - stop  # without the bits after the block
    block &= (1 << block_bits) - 1  # and without those before it
    # A block begins with a magic number and its checksum.
    checksum = block >> (block_bits - MAGIC_BITS - CHECKSUM_BITS)
    checksum &= (1 << CHECKSUM_BITS) - 1
    # A file of one block: the block, the mark of the end, the checksum, and zeros to a whole byte.
    stream = (block << MAGIC_BITS) | STREAM_END
    stream = (stream << CHECKSUM_BITS) | checksum
    stream_bits = block_bits + MAGIC_BITS + CHECKSUM_BITS
    stream <<= -stream_bits % 8
    stream_bytes = -(-stream_bits // 8)
    try:
        return bz2.decompress(FILE_START + stream.to_bytes(stream_bytes, "big"))
    except (OSError, ValueError):
        return None


def read_blocks(file: BinaryIO, start: int) -> Iterator[tuple[int, bytes | None]]:
    """The blocks that start at byte `start` or later: where each starts, and its text, or None if
    it is damaged.
    """
    file.seek(start)
    data = b""  # what is read, from the last mark on
    data_start = start  # its position in the file
    mark_bytes = MAGIC_BITS // 8
    while chunk := file.read(READ_SIZE):
        data += chunk
        marks = find_marks(data)
        # A block goes from its mark to the next one, so the last mark waits for more data.
        index = 0
        while index + 1 < len(marks):
            mark = marks[index]
            next_index = index + 1
            if mark.starts_block:
                text = decompress_block(data, mark.bit, marks[next_index].bit)
                if text is None and next_index + 1 < len(marks):
                    # The next mark may be there by chance: up to the one after it.
                    text = decompress_block(data, mark.bit, marks[next_index + 1].bit)
                    if text is not None:
                        next_index += 1
                yield data_start + mark.bit // 8, text
            index = next_index
        done = max(len(data) - mark_bytes, 0)  # the beginning of a mark may be at the end
        if marks:
            last_mark = marks[index]
            last_byte = last_mark.bit // 8
            if len(data) - last_byte <= MAX_COMPRESSED_BLOCK:
                done = last_byte
            elif last_mark.starts_block:  # no block is that long
                yield data_start + last_byte, None
        data = data[done:]
        data_start += done
    marks = find_marks(data)
    if marks and marks[-1].starts_block:  # without an end
        yield data_start + marks[-1].bit // 8, None
