"""Build the index of a whole table: millions of keys a second, in memory that does not grow with them.

Keys come in blocks. Each goes with its row to the range of groups that it belongs to, in an unnamed file of
12 bytes a key. Then each range is ordered and placed by itself; one for each processor at a time, four at
most, in about 40 MB each, whatever the table's size. A range ends in the window of its last groups, which
reaches into the next range's slots: so every other range is placed first, and those between around them.
What is built does not depend on which of several threads was quicker.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from msgspec import Struct

from exporter.errors import TableFull
from exporter.tables.crowding import table_full
from exporter.tables.geometry import (
    INDEX_ROWS,
    INDEX_SEEDS,
    WINDOW,
    TableGeometry,
    hashes_of,
    keys_of,
)
from exporter.tables.spread import Crowded, spread

Array = np.ndarray[Any, Any]
KeyBlocks = Iterable[tuple[Array, Array]]
"""Blocks of (rows, keys), int64, each of a bounded size. Row -1: a key that is not served."""
Put = Callable[[str, int, Array], object]
"""Takes elements of a variable of the table, and the number of the first; from several threads."""

RANGE_KEYS = 1 << 18
"""Keys of a range, at most twice as many as on average: all ranges are equally wide, and hashes even."""

_CHUNK_GROUPS = 1 << 16
_MOST_WORKERS = 4
_LEAST_GROUPS = WINDOW
"""Of a range: its slots begin and end with a window of their own."""


class KeyTwice(Exception):
    """A key occurs twice in one table."""

    def __init__(self, key: int) -> None:
        super().__init__(f"key {key} occurs twice")
        self.key = key


def build_index(
    geometry: TableGeometry, count: int, blocks: KeyBlocks, put: Put, scratch: Path | None = None
) -> None:
    """Give all of `index_seeds` and `index_rows` to `put`, for about `count` keys.

    The unnamed file is in the directory `scratch`.

    Raises:
        KeyTwice: a key occurs twice, served or not.
        TableFull: the keys crowd in a few places of the index.
        OSError: the unnamed file cannot be written.
    """
    ranges = _Ranges.of(geometry, count)
    ends = np.full((ranges.count + 1, WINDOW), geometry.empty_row, np.int32)
    with _scattered(ranges, blocks, scratch) as keys, ThreadPoolExecutor(_workers(), "index") as pool:
        building = _Building(ranges, keys, ends, put)
        for first in (0, 1):
            for _ in pool.map(building.place, range(first, ranges.count, 2)):
                pass
    for number, slots in enumerate(ends):
        put(INDEX_ROWS, number * ranges.slots, slots)


class _Ranges(Struct, frozen=True):
    """A table's groups in `1 << bits` ranges of the same width."""

    geometry: TableGeometry
    bits: int

    @classmethod
    def of(cls, geometry: TableGeometry, count: int) -> _Ranges:
        wanted = max(0, (-(-count // RANGE_KEYS) - 1).bit_length())
        most = geometry.group_bits - (_LEAST_GROUPS - 1).bit_length()
        return cls(geometry, max(0, min(wanted, most)))

    @property
    def count(self) -> int:
        return 1 << self.bits

    @property
    def groups(self) -> int:
        """Groups of each range."""
        return self.geometry.groups >> self.bits

    @property
    def slots(self) -> int:
        """Slots of each range, but for the window in which it reaches into the next one."""
        return self.groups * self.geometry.stride

    @property
    def room(self) -> int:
        """More keys than this have no place in a range."""
        return self.slots + WINDOW

    def of_hashes(self, hashed: Array) -> Array:
        """The range of each hash, in a type that is sorted quickly."""
        if not self.bits:
            return np.zeros(len(hashed), np.uint8)
        return (hashed >> np.uint64(64 - self.bits)).astype(np.uint8 if self.bits <= 8 else np.uint16)


@contextmanager
def _scattered(ranges: _Ranges, blocks: KeyBlocks, scratch: Path | None) -> Iterator[_Scattered]:
    """All keys by their ranges."""
    with tempfile.TemporaryFile(dir=scratch) as file, ThreadPoolExecutor(1, "scatter") as writer:
        keys = _Scattered(ranges, file)
        under_way: deque[Future[None]] = deque()
        for rows, block in blocks:
            under_way.append(writer.submit(keys.write, *keys.divide(rows, block)))
            if len(under_way) > 1:
                under_way.popleft().result()
        for each in under_way:
            each.result()
        yield keys


class _Scattered:
    """Hashes and rows of keys by ranges: of each range room for all hashes it may have, then for the rows."""

    def __init__(self, ranges: _Ranges, file: IO[bytes]) -> None:
        self._ranges, self._file = ranges, file
        self._counts = np.zeros(ranges.count, np.int64)

    def divide(self, rows: Array, keys: Array) -> tuple[Array, Array, Array, Array, Array]:
        """A block's rows and hashes, their order by ranges, where each range begins in it and in the file.

        Raises:
            TableFull: a range has more keys than slots.
        """
        hashed = hashes_of(keys)
        number = self._ranges.of_hashes(hashed)
        counts = np.bincount(number, minlength=self._ranges.count)
        before, self._counts = self._counts, self._counts + counts
        if self._counts.max() > self._ranges.room:
            raise _refused(self._ranges.geometry, Crowded(keys[number == self._counts.argmax()]))
        starts = np.concatenate([[0], np.cumsum(counts)])
        return rows, hashed, np.argsort(number, kind="stable"), starts, before

    def write(self, rows: Array, hashed: Array, order: Array, starts: Array, before: Array) -> None:
        """Write what `divide` has divided."""
        rows, hashed = rows.astype(np.int32).take(order), hashed.take(order)
        for number in np.flatnonzero(np.diff(starts)).tolist():
            part = slice(starts[number], starts[number + 1])
            hashes_at, rows_at = self._places(number)
            self._write(hashes_at + 8 * int(before[number]), hashed[part])
            self._write(rows_at + 4 * int(before[number]), rows[part])

    def read(self, number: int) -> tuple[Array, Array]:
        """Hashes and rows of a range."""
        count = int(self._counts[number])
        hashes_at, rows_at = self._places(number)
        return self._read(hashes_at, np.empty(count, np.uint64)), self._read(
            rows_at, np.empty(count, np.int32)
        )

    def _places(self, number: int) -> tuple[int, int]:
        begin = number * 12 * self._ranges.room
        return begin, begin + 8 * self._ranges.room

    def _write(self, offset: int, array: Array) -> None:
        left = array.view(np.uint8).data
        while len(left):
            written = os.pwrite(self._file.fileno(), left, offset)
            left, offset = left[written:], offset + written

    def _read(self, offset: int, array: Array) -> Array:
        left = array.view(np.uint8).data
        while len(left):
            got = os.preadv(self._file.fileno(), [left], offset)
            if not got:
                raise OSError(errno.EIO, "the end of a file that was written")
            left, offset = left[got:], offset + got
        return array


class _Building(Struct, frozen=True):
    """Places the keys of ranges. `ends` are the slots that neighbours share: the first ones of each range."""

    ranges: _Ranges
    keys: _Scattered
    ends: Array
    put: Put

    def place(self, number: int) -> None:
        """Place a range's keys around those that its neighbours have in common slots."""
        ranges, geometry = self.ranges, self.ranges.geometry
        keys, rows, counts = self._by_groups(number)
        area = np.full(ranges.slots + WINDOW, geometry.empty_row, np.int32)
        area[:WINDOW], area[-WINDOW:] = self.ends[number], self.ends[number + 1]
        occupied = area != geometry.empty_row
        chosen = np.empty(ranges.groups, np.int64)
        key = 0
        for begin in range(0, ranges.groups, _CHUNK_GROUPS):
            part = counts[begin : begin + _CHUNK_GROUPS]
            end, last = begin + len(part), key + int(part.sum())
            window = slice(begin * geometry.stride, end * geometry.stride + WINDOW)
            windows = np.arange(len(part)) * geometry.stride
            try:
                seeds, slots = spread(keys[key:last], part, windows, occupied[window])
            except Crowded as error:
                raise _refused(geometry, error) from None
            area[window][slots] = rows[key:last]
            chosen[begin:end], key = seeds, last
        self.ends[number], self.ends[number + 1] = area[:WINDOW], area[-WINDOW:]
        self.put(INDEX_SEEDS, number * ranges.groups, chosen)
        self.put(INDEX_ROWS, number * ranges.slots + WINDOW, area[WINDOW:-WINDOW])

    def _by_groups(self, number: int) -> tuple[Array, Array, Array]:
        """The served keys of a range and their rows, ordered by groups, and how many keys each group has."""
        hashed, rows = self.keys.read(number)
        is_left_out = rows < 0
        if is_left_out.any():
            ordered = np.sort(hashed)
            twice = np.flatnonzero(ordered[1:] == ordered[:-1])
            if len(twice):
                raise KeyTwice(int(keys_of(ordered[twice[:1]])[0]))
            hashed, rows = hashed[~is_left_out], rows[~is_left_out]
        groups = self.ranges.geometry.group_of_hash(hashed) - number * self.ranges.groups
        # Numbers below groups, in one word: much quicker than to sort numbers by groups.
        packed = groups.view(np.uint64) << np.uint64(32)
        packed |= np.arange(len(rows), dtype=np.uint64)
        packed.sort()
        order = (packed & np.uint64(0xFFFFFFFF)).view(np.int64)
        counts = np.bincount(groups, minlength=self.ranges.groups)
        return keys_of(hashed.take(order)), rows.take(order), counts


def _workers() -> int:
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)))


def _refused(geometry: TableGeometry, crowded: Crowded) -> KeyTwice | TableFull:
    if crowded.twice is not None:
        return KeyTwice(crowded.twice)
    return table_full(geometry, crowded.keys)
