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
from exporter.storage import mirror, unkept
from exporter.storage.requests import GAP_BYTES

Array = np.ndarray[Any, Any]

_NEAR_BYTES = 4096
"""What lies between two rows and comes with them, because it costs less than a piece of its own."""
_PASSED_BYTES = 32 << 20
"""About what comes so in one call; a few rows between two always may."""
_FEW_ROWS = 16


class RowMap:
    """The rows of a tensor, or of one stored slice of it, as `memory_map` has them.

    Of a shard that stands for an object of a store, rows are read when they are asked for, and no others.
    They are not kept, because who reads a table comes by each row once. Kept are rows of one element, as of
    an index, and ranges that are smaller than what a request should fetch.

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
            if are_elements(self._values.shape):
                self._object.fetch(rows * size, rows * size + size)
            else:
                wanted, places = np.unique(rows, return_inverse=True)
                most = max(_FEW_ROWS, _PASSED_BYTES // max(1, size * len(wanted)))
                starts, stops, found_at = _runs_of(wanted, min(most, _NEAR_BYTES // max(1, size)))
                found = self._rows_of(self._object, starts, stops, size)
                if found is not None:
                    return np.asarray(found[found_at[places]])
        return np.asarray(self._values[rows])

    def box(self, box: tuple[slice, ...]) -> Array:
        """A box, whose ranges of rows and columns have a start and a stop: a view of the file, or a copy.

        Raises:
            CheckpointChanged, CheckpointError, DiskFull, PublishError: as `fetch`.
        """
        if self._object is not None and len(self._values):
            size = self._object.extent.size // len(self._values)
            start, stop = np.array([box[0].start]), np.array([box[0].stop])
            if are_elements(self._values.shape) or (stop - start) * size < GAP_BYTES:
                self._object.fetch(start * size, stop * size)
            elif (found := self._rows_of(self._object, start, stop, size)) is not None:
                return np.asarray(found[:, *box[1:]])
        return np.asarray(self._values[box])

    def _rows_of(self, source: _ObjectRange, starts: Array, stops: Array, size: int) -> Array | None:
        """Runs of rows (start, stop) one behind another, or None if the file has them."""
        found = source.read(starts * size, stops * size)
        return found if found is None else found.view(self._values.dtype).reshape(-1, *self._values.shape[1:])


def are_elements(shape: tuple[int, ...]) -> bool:
    """True for rows of one element each: they are few bytes, and may be asked for in any order, and again."""
    return len(shape) == 1


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
        self._require_same()

    def read(self, starts: Array, stops: Array) -> Array | None:
        """The bytes of ranges of the extent, of which nothing is kept; None if the file has them.

        Raises:
            CheckpointChanged: the object was replaced, and the file with it.
            CheckpointError: see `unkept.read`.
        """
        first, ends = self.extent.offset, np.cumsum(stops - starts)
        columns = starts + first, stops + first, ends - (stops - starts)
        found = np.empty(ends[-1], np.uint8)
        pieces = [*zip(*(column.tolist() for column in columns), strict=True)]
        is_read = unkept.read(self.path, pieces, found.data)
        self._require_same()
        return found if is_read else None

    def _require_same(self) -> None:
        if shard_status(self.path).st_ino != self.inode:
            raise CheckpointChanged(f"{self.path} was replaced after its index was read")


def _runs_of(rows: Array, gap: int) -> tuple[Array, Array, Array]:
    """Runs (starts, stops) that hold rows, which increase, and gaps of so many; where each row is in them."""
    is_new = np.append(True, np.diff(rows) > gap + 1)
    starts, ends = rows[is_new], rows[np.append(is_new[1:], True)] + 1
    before = np.cumsum(ends - starts) - (ends - starts)
    return starts, ends, rows + (before - starts)[np.cumsum(is_new) - 1]


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
