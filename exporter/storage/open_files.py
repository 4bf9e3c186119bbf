"""Read and write whole buffers at offsets of open files: one system call may transfer fewer bytes."""

from __future__ import annotations

import io
import os


def write_at(descriptor: int, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write all bytes at an offset of an open file; OSError if the disk refuses."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def read_at(descriptor: int, offset: int, buffer: memoryview) -> int:
    """Fill a buffer from an offset of an open file; return the number of bytes read.

    It is less than the buffer's size only at the file's end. OSError if the file cannot be read.
    """
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not got:
            break
        done += got
    return done


class Window(io.RawIOBase):
    """A binary file of `size` bytes from `offset` of another open file, which it does not close."""

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        self._descriptor, self._offset, self._size = descriptor, offset, size
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position in the window by `offset` from `whence`, and return the new position in bytes.

        `whence` is os.SEEK_SET, SEEK_CUR or SEEK_END, else KeyError. The position may be beyond the window's
        end; one before its beginning becomes 0.
        """
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer, /) -> int:  # type: ignore[no-untyped-def]  # the base class names no type either
        """Fill a buffer from the window; return the number of bytes read, 0 at its end.

        OSError if the file cannot be read.
        """
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        done = read_at(self._descriptor, self._offset + self._position, view)
        self._position += done
        return done
