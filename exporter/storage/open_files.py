"""Read and write whole buffers at offsets of open files: one system call may move fewer bytes."""

from __future__ import annotations

import os


def write_at(descriptor: int, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write bytes to an offset of a file."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def read_at(descriptor: int, offset: int, buffer: memoryview) -> int:
    """Fill a buffer of bytes from an offset of a file; how many it got, fewer only where the file ends."""
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not got:
            break
        done += got
    return done
