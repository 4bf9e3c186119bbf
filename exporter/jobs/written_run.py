"""Bytes that a task writes one after another, and their checksum."""

from __future__ import annotations

from typing import Any

import numpy as np

from exporter.storage.open_files import write_at
from exporter.wire import crc32c

Array = np.ndarray[Any, Any]


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
