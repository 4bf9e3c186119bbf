"""Compare rows of one table in two states, chunk by chunk and bit by bit.

The checksums of stored runs, joined from those of the ranges that were read of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.checkpoint.tensor_values import compare_checksum
from exporter.delta.format import ServedVariable
from exporter.delta.row_hashes import BlockHasher, block_rows
from exporter.delta.row_reader import StoredRun
from exporter.delta.snapshot import Snapshot
from exporter.jobs.range_checksums import RangeChecksums
from exporter.wire.crc32c import extend, mask


class ReadRange(Struct, frozen=True):
    """`size` bytes from `start` of a stored run that were read, and their plain crc32c."""

    run: StoredRun
    start: int
    size: int
    crc: int


class StoredChecksums:
    """What is known of one side's runs."""

    def __init__(self, state: Snapshot) -> None:
        self._state = state
        self._ranges = RangeChecksums[StoredRun]()

    def add(self, read: Iterable[ReadRange]) -> None:
        """Note what was read."""
        for each in read:
            self._ranges.add(each.run, each.start, each.size, each.crc)

    def check(self, names: Iterable[str]) -> None:
        """Compare the checksums of what these variables are made of; what was not read is read.

        Raises:
            CorruptFile: one differs.
            CheckpointChanged: a file vanished or shrank.
        """
        names = list(names)
        for variable in (self._state.stored[name] for name in names):
            for run in variable.runs:
                crc = self._ranges.of(run, 0, run.extent.size)
                if crc is None:
                    continue
                name = variable.tensor.name
                compare_checksum(run.path, name, run.extent, mask(crc), hint=self._state.hint)
                self._state.note_checked([run])
        self._state.check(names)


Array = np.ndarray[Any, Any]

CHUNK_BYTES = 4 << 20  # less, and two threads wait for one another more than they compare

_FEW = 8  # gathering single blocks costs several times what reading all in a row does


def differing_rows(old: Array, new: Array) -> Array:
    """The numbers, int64, of the rows whose bytes differ in two arrays [n, ...] of one shape."""
    a, b = _words(old), _words(new)
    unequal = a != b
    if not unequal.any():
        return np.empty(0, np.int64)
    return np.flatnonzero(unequal.any(axis=1))


class Found(Struct, frozen=True):
    """The changed rows of some whole blocks, the hashes of all, and the checksums of what was read."""

    ids: Array
    values: Array
    hashes: Array
    bytes_: int
    old_read: tuple[ReadRange, ...] = ()
    new_read: tuple[ReadRange, ...] = ()


class TableRows:
    """The rows of a table, or those from `rows[0]` to `rows[1]`, in two states.

    Where hashes of the old rows are `known`, old bytes are read only in the blocks whose hashes differ.
    `Found` tells the checksums of stored runs that hold exactly the served rows; none without `checksums`.
    """

    def __init__(
        self,
        old: Snapshot,
        new: Snapshot,
        variable: ServedVariable,
        hasher: BlockHasher,
        known: Array | None = None,
        rows: tuple[int, int] | None = None,
        *,
        checksums: bool = True,
    ) -> None:
        self._old, self._new, self._name, self._hasher = old, new, variable.name, hasher
        self._first, self._stop = rows or (0, variable.shape[0])
        self.row_bytes = math.prod(variable.shape[1:]) * variable.dtype.numpy.itemsize
        self.block = block_rows(self.row_bytes)
        self.known = known
        self.is_old_as_known = True
        self._checksums = checksums

    @property
    def blocks(self) -> int:
        """The number of blocks that have a hash."""
        return -(-(self._stop - self._first) // self.block)

    def _read(self, state: Snapshot, start: int, stop: int) -> tuple[ReadRange, ...]:
        stored = state.stored[self._name]
        if not self._checksums or stored.extent is None:
            return ()
        rows = _bytes_of(stored.rows(start, stop))
        first = start * self.row_bytes
        return (ReadRange(stored.run_of[stored.extent], first, rows.nbytes, extend(0, rows)),)

    def chunks(self, most: int = 0) -> Iterator[tuple[int, int]]:
        """Whole blocks of all rows, as ranges (start, stop) of about `most` bytes, by default a chunk."""
        step = max(1, (most or CHUNK_BYTES) // max(1, self.row_bytes * self.block)) * self.block
        for start in range(self._first, self._stop, step):
            yield start, min(start + step, self._stop)

    def compare(self, chunk: tuple[int, int]) -> Found:
        """The rows of a chunk (start, stop) that differ."""
        start, stop = chunk
        new = self._new.rows(self._name, start, stop)
        hashes = self._hasher.hash_rows(new)
        suspects = self._suspects(start, hashes)
        if len(suspects) > len(hashes) // _FEW:
            old = self._old.rows(self._name, start, stop)
            self._compare_with_known(old, np.arange(len(hashes)), start)
            local = differing_rows(old, new)
        else:
            local = self._among(suspects, new, start)
        old_read = self._read(self._old, start, stop) if self.known is None else ()
        new_read = self._read(self._new, start, stop)
        return Found(local + start, np.array(new[local]), hashes, new.nbytes, old_read, new_read)

    def _compare_with_known(self, old: Array, blocks: Array, start: int) -> None:
        """See whether the old rows, those of these blocks of a chunk, have the hashes that are known.

        If not, they are damaged; or rows among them were held back, whose hashes are unknown.
        """
        if self.known is not None:
            known = self.known[blocks + start // self.block]
            if (self._hasher.hash_rows(old) != known).any():
                self.is_old_as_known = False

    def _suspects(self, start: int, hashes: Array) -> Array:
        """The blocks of a chunk that may differ."""
        if self.known is None:
            return np.arange(len(hashes))
        first = start // self.block
        return np.flatnonzero(hashes != self.known[first : first + len(hashes)])

    def _among(self, suspects: Array, new: Array, start: int) -> Array:
        """The rows that differ in these blocks of a chunk."""
        if not len(suspects):
            return np.empty(0, np.int64)
        rows = (suspects[:, np.newaxis] * self.block + np.arange(self.block)).reshape(-1)
        rows = rows[rows < len(new)]
        old = self._old.rows_at(self._name, rows + start)
        self._compare_with_known(old, suspects, start)
        return np.asarray(rows[differing_rows(old, new[rows])])


def _bytes_of(rows: Array) -> Array:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)


def _words(rows: Array) -> Array:
    """Rows as a matrix of the widest words that their bytes divide into."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), math.prod(rows.shape[1:])).view(np.uint8)
    word = next(size for size in (8, 4, 2, 1) if flat.shape[1] % size == 0)
    return flat.view(f"<u{word}") if flat.shape[1] else flat
