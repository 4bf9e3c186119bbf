"""Runs of bytes that a task reads or writes one after another, and their checksums."""

from __future__ import annotations

from typing import Any

import numpy as np

from exporter.errors import CheckpointChanged
from exporter.jobs.few_files import FewFiles
from exporter.jobs.task import Range
from exporter.storage.open_files import read_at, write_at
from exporter.wire import crc32c

Array = np.ndarray[Any, Any]


class ReadRun:
    """A range of a file, read once from its beginning, and the checksum of what was read.

    Raises:
        CheckpointChanged: the file, which is called `place`, ends before.
    """

    def __init__(self, files: FewFiles, wanted: Range, place: str) -> None:
        self._files, self._input = files, wanted.input
        self._offset, self._place = wanted.offset, place
        self.size = self.left = wanted.size
        self.crc = 0

    @property
    def done(self) -> int:
        """Bytes that were read."""
        return self.size - self.left

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The next values."""
        values = np.empty(shape, dtype)
        self.fill(values.reshape(-1).view(np.uint8))
        return values

    def fill(self, flat: Array) -> Array:
        """Fill bytes with the next ones, as far as the run goes; those that are left."""
        count = min(len(flat), self.left)
        for start in range(0, count, crc32c.CHUNK):  # small enough to be in a core's cache still
            data = self.read(flat[start : min(start + crc32c.CHUNK, count)])
            self.crc = crc32c.extend(self.crc, data)
        return flat[count:]

    def read(self, buffer: Array) -> Array:
        """Fill a buffer of bytes with the next ones, whose checksum is the caller's to take."""
        # A read, not a map: a file that shrinks under a map kills the process.
        if read_at(self._files[self._input], self._offset + self.done, buffer.data) != len(buffer):
            raise CheckpointChanged(f"{self._place} became shorter after its index was read")
        self.left -= len(buffer)
        return buffer


class WrittenRun:
    """A place in a file that fills from its beginning, and the checksum of what was written."""

    def __init__(self, descriptor: int, offset: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self.done = 0
        """Bytes that were written."""
        self.crc = 0

    def write(self, values: Array) -> None:
        """Append values."""
        view = np.ascontiguousarray(values).reshape(-1).view(np.uint8)  # no copy of what lies in order
        self.crc = crc32c.extend(self.crc, view)
        self.put(view)

    def put(self, data: Array) -> None:
        """Append bytes, whose checksum is the caller's to take."""
        write_at(self._descriptor, self._offset + self.done, data.data)
        self.done += len(data)
