"""Read rows of a stored tensor; of one in an object store, fetch what is read and no more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog, Extent, SliceRef, TensorRef
from exporter.checkpoint.source_shard import open_shard, shard_status
from exporter.checkpoint.tensor_values import map_bytes, memory_map, stored_extent
from exporter.errors import CheckpointChanged
from exporter.storage import mirror
from exporter.storage.requests import GAP_BYTES

Array = np.ndarray[Any, Any]


class RowMap:
    """The rows of a tensor, or of one stored slice of it, as `memory_map` has them.

    If a shard stands for an object of a store, the rows that are read, and no others, are fetched first.

    Raises:
        ValueError, UnsupportedFormat, CheckpointChanged: as `memory_map`.
    """

    def __init__(self, catalog: Catalog, ref: TensorRef, part: SliceRef | None = None) -> None:
        extent, shape = stored_extent(ref, part)
        path = catalog.path_of(extent)
        self._object: _ObjectRange | None = None
        if mirror.find(path) is None:
            self._values = memory_map(catalog, ref, part)
            return
        with open_shard(path) as fd:
            self._object = _ObjectRange(path, os.fstat(fd).st_ino, extent)
            self._values = map_bytes(fd, extent).view(ref.dtype.numpy).reshape(shape)

    def fetch(self) -> None:
        """Fetch all rows, for who is going to read them all: many requests are under way at a time.

        Raises:
            CheckpointChanged, CheckpointError, DiskFull, PublishError: they cannot be fetched.
        """
        if self._object is not None:
            self._object.fetch(np.array([0]), np.array([self._object.extent.size]))

    def at(self, rows: Array) -> Array:
        """The rows of these numbers, as a copy.

        Raises:
            CheckpointChanged, CheckpointError, DiskFull, PublishError: as `fetch`.
        """
        if self._object is not None and len(rows):
            size = self._object.extent.size // len(self._values)
            self._object.fetch(rows * size, rows * size + size)
        return np.asarray(self._values[rows])

    def box(self, box: tuple[slice, ...]) -> Array:
        """A view of a box, whose ranges of rows and columns have a start and a stop.

        Raises:
            CheckpointChanged, CheckpointError, DiskFull, PublishError: as `fetch`.
        """
        if self._object is not None and len(self._values):
            size = self._object.extent.size // len(self._values)
            self._object.fetch(np.array([box[0].start * size]), np.array([box[0].stop * size]))
        return np.asarray(self._values[box])


class _ObjectRange(Struct, frozen=True):
    """An extent of a file that stands for an object of a store, and the number of that file."""

    path: Path
    inode: int
    extent: Extent

    def fetch(self, starts: Array, stops: Array) -> None:
        """Fetch ranges of bytes of the extent.

        Raises:
            CheckpointChanged: the object was replaced, and the file with it.
            CheckpointError, DiskFull, PublishError: see `Mirror.fetch`.
        """
        mirror.fetch(self.path, _blocks_of(starts + self.extent.offset, stops + self.extent.offset))
        if shard_status(self.path).st_ino != self.inode:
            raise CheckpointChanged(f"{self.path} was replaced after its index was read")


def _blocks_of(starts: Array, stops: Array) -> list[tuple[int, int]]:
    """Ranges of whole blocks that hold ranges (start, stop), in order and apart: of a million rows, few."""
    first, last = starts // GAP_BYTES, np.maximum(stops - 1, starts) // GAP_BYTES
    order = np.argsort(first, kind="stable")
    first, last = first[order], np.maximum.accumulate(last[order])
    is_new = np.append(True, first[1:] > last[:-1] + 1)
    ends = np.append(np.flatnonzero(is_new)[1:] - 1, len(last) - 1)
    return [
        (int(start) * GAP_BYTES, (int(stop) + 1) * GAP_BYTES)
        for start, stop in zip(first[is_new], last[ends], strict=True)
    ]
