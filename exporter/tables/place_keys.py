"""The task of placing sorted keys in the slots of an index; see `key_ranges` and `partition_keys`.

A task places a run of ranges, about 40 MB at a time, and gets by without what other tasks place: the range
behind its last one is the first of another run, and begins in empty slots. So it places the beginning of that
range, too, as the other task does, and only then its own last range around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct

from exporter.checkpoint.source_shard import open_shard
from exporter.errors import CheckpointChanged, CorruptFile, TableFull
from exporter.files import writing
from exporter.jobs.task import Range, Receipt, Task
from exporter.storage.open_files import read_at, write_at
from exporter.storage.output_directory import Directory, new_file
from exporter.storage.waiting import workers
from exporter.tables.crowding import table_full
from exporter.tables.geometry import WINDOW, keys_of
from exporter.tables.key_ranges import KEY_BYTES, KeyRanges
from exporter.tables.partition_keys import bytes_of
from exporter.tables.spread import Crowded, spread
from exporter.wire.crc32c import crc_of

Array = np.ndarray[Any, Any]
KeysOfRange = Callable[[int, int], tuple[Array, Array]]
"""Reads a range, by its number, up to so many keys: their hashes and rows, `~row` for keys not served."""

_CHUNK_GROUPS = 1 << 16
_FETCHED = 16  # sections that are fetched at a time


class KeyTwice(Exception):
    """A key occurs twice in one table, in two rows."""

    def __init__(self, key: int, rows: Sequence[int]) -> None:
        super().__init__(f"key {key} occurs twice")
        self.key, self.rows = key, rows


class Section(Struct, frozen=True, array_like=True):
    """Sorted keys of a run of ranges in an input, from `offset` on; `counts` has how many of each range."""

    input: int
    offset: int
    counts: tuple[int, ...]

    @property
    def bytes_(self) -> int:
        """Bytes of the keys."""
        return KEY_BYTES * sum(self.counts)


class RangeRun(Struct, frozen=True):
    """Ranges `start`, an even number, to `stop` of a table.

    The sections have the keys in the order of their rows, and those of the range behind. `stored` are the
    tensors that keys come from, each with its number of rows.
    """

    table: str
    ranges: KeyRanges
    start: int
    stop: int
    sections: tuple[Section, ...]
    stored: tuple[tuple[str, int], ...]

    @property
    def end(self) -> int:
        """The first range whose keys are not read."""
        return min(self.stop + 1, self.ranges.count)

    @property
    def groups(self) -> tuple[int, int]:
        """The first group and how many follow: what the run has of `index_seeds`."""
        return self.start * self.ranges.groups, (self.stop - self.start) * self.ranges.groups

    @property
    def slots(self) -> tuple[int, int]:
        """The first slot and how many follow: what the run has of `index_rows`."""
        first = self.start * self.ranges.slots + (WINDOW if self.start else 0)
        return first, self.stop * self.ranges.slots + WINDOW - first

    @property
    def written_bytes(self) -> int:
        """Bytes of seeds and slots."""
        return 8 * self.groups[1] + 4 * self.slots[1]


class Place(Task, frozen=True, kw_only=True):
    """Write seeds and slots of runs of ranges, one behind another. The receipt has the checksums of each.

    Raises:
        CorruptFile: a key occurs twice, served or not.
        TableFull: the keys crowd in a few places of an index.
    """

    operation: ClassVar[str] = "place"

    checkpoint: str
    runs: tuple[RangeRun, ...]

    def run(self, directory: Directory) -> Receipt:
        """See `Task`."""
        with self._fetched(directory) as places, new_file(directory.scratch) as (target, path):
            wrote: list[int] = []
            offset = 0
            with writing(path):
                for run, sections in zip(self.runs, places, strict=True):
                    wrote += self._place(run, sections, target, offset)
                    offset += run.written_bytes
            tag = directory.put_file(self.name, path)
        keys = sum(sum(section.counts) for run in self.runs for section in run.sections)
        return Receipt(self.name, (), tuple(wrote), offset, tag, keys)

    @contextmanager
    def _fetched(self, directory: Directory) -> Iterator[list[list[_Located]]]:
        """Files with the sections of each run; from a store all are fetched into one, many at a time."""
        with new_file(directory.scratch) as (descriptor, path), workers(_FETCHED, "sections") as pool:

            def fetch(section: Section, offset: int) -> _Located:
                wanted, source = Range(0, section.offset, section.bytes_), self.inputs[section.input]
                if source.fetch(wanted, descriptor, offset, path):
                    return _Located(path, offset)
                return _Located(Path(source.place), section.offset)

            sections = [section for run in self.runs for section in run.sections]
            offsets = [0, *accumulate(section.bytes_ for section in sections)]
            places = pool.map(fetch, sections, offsets)
            yield [list(islice(places, len(run.sections))) for run in self.runs]

    def _place(self, run: RangeRun, places: Sequence[_Located], target: int, offset: int) -> tuple[int, int]:
        """The checksums of the seeds and slots, which go to the target."""
        sorted_keys = _SortedKeys(run, places)
        slots_at = offset + 8 * run.groups[1]
        try:
            for piece in place_ranges(run.ranges, run.start, run.stop, sorted_keys.read):
                write_at(target, offset + 8 * (piece.group - run.groups[0]), bytes_of(piece.seeds))
                write_at(target, slots_at + 4 * (piece.slot - run.slots[0]), bytes_of(piece.rows))
        except KeyTwice as error:
            raise self._twice(run, error) from None
        except TableFull as error:
            error.message = f"table {run.table!r}: {error.message}"
            raise
        sizes = slots_at - offset, offset + run.written_bytes - slots_at
        return crc_of(target, offset, sizes[0]), crc_of(target, slots_at, sizes[1])

    def _twice(self, run: RangeRun, error: KeyTwice) -> CorruptFile:
        bounds = np.cumsum([rows for _, rows in run.stored])
        places = np.searchsorted(bounds, sorted(error.rows)[:2], side="right")
        names = [run.stored[place][0] for place in places]
        where = f"twice in {names[0]!r}" if names[0] == names[-1] else f"in {names[0]!r} and in {names[1]!r}"
        return CorruptFile(f"{self.checkpoint}: key {error.key} is {where}")


class Piece(Struct, frozen=True, eq=False):
    """Seeds from a group on, and rows of slots from a slot on."""

    group: int
    seeds: Array
    slot: int
    rows: Array


def place_ranges(ranges: KeyRanges, start: int, stop: int, keys: KeysOfRange) -> Iterator[Piece]:
    """Seeds and slots of the ranges `start`, an even number, to `stop`; see `RangeRun.slots`.

    Raises:
        KeyTwice: a key occurs twice, served or not.
        TableFull: the keys crowd in a few places of the index.
    """
    placing = _Placing(ranges, keys)
    empty = np.full(WINDOW, ranges.geometry.empty_row, np.int32)
    ends = dict.fromkeys(range(start, stop + 1), empty)  # the windows that neighbours share
    for number in range(start, stop, 2):
        seeds, area = placing.place(number, empty, empty)
        ends[number], ends[number + 1] = area[:WINDOW].copy(), area[-WINDOW:].copy()
        yield _inner(ranges, number, seeds, area)
    if stop < ranges.count:
        _, area = placing.place(stop, empty, empty, only_first=True)
        ends[stop] = area[:WINDOW].copy()
    for number in range(start + 1, stop, 2):
        seeds, area = placing.place(number, ends[number], ends[number + 1])
        ends[number], ends[number + 1] = area[:WINDOW].copy(), area[-WINDOW:].copy()
        yield _inner(ranges, number, seeds, area)
    none = np.empty(0, np.int64)
    for number in range(start + 1 if start else 0, stop + 1):
        yield Piece(start * ranges.groups, none, number * ranges.slots, ends[number])


def _inner(ranges: KeyRanges, number: int, seeds: Array, area: Array) -> Piece:
    slots = np.ascontiguousarray(area[WINDOW:-WINDOW])
    return Piece(number * ranges.groups, seeds, number * ranges.slots + WINDOW, slots)


class _Placing(Struct, frozen=True):
    """Places the keys of ranges."""

    ranges: KeyRanges
    keys: KeysOfRange

    def place(
        self, number: int, before: Array, behind: Array, *, only_first: bool = False
    ) -> tuple[Array, Array]:
        """The seeds of a range's groups, and its slots, around those that its neighbours have in common ones.

        With `only_first` the first slots alone are right.
        """
        ranges, geometry = self.ranges, self.ranges.geometry
        hashed, rows, counts = self._by_groups(number)
        area = np.full(ranges.slots + WINDOW, geometry.empty_row, np.int32)
        area[:WINDOW], area[-WINDOW:] = before, behind
        occupied = area != geometry.empty_row
        chosen = np.empty(ranges.groups, np.int64)
        key, stop = 0, min(_CHUNK_GROUPS, ranges.groups) if only_first else ranges.groups
        for begin in range(0, stop, _CHUNK_GROUPS):
            part = counts[begin : begin + _CHUNK_GROUPS]
            end, last = begin + len(part), key + int(part.sum())
            window = slice(begin * geometry.stride, end * geometry.stride + WINDOW)
            windows = np.arange(len(part)) * geometry.stride
            try:
                seeds, slots = spread(keys_of(hashed[key:last]), part, windows, occupied[window])
            except Crowded as error:
                raise self._refused(number, error) from None
            area[window][slots] = rows[key:last]
            chosen[begin:end], key = seeds, last
        return chosen, area

    def _by_groups(self, number: int) -> tuple[Array, Array, Array]:
        """Hashes and rows of a range's served keys, ordered by groups, and how many each group has."""
        hashed, rows = self.keys(number, self.ranges.room + 1)
        if len(hashed) > self.ranges.room:
            raise self._refused(number, Crowded(keys_of(hashed)))
        is_left_out = rows < 0
        if is_left_out.any():
            ordered = np.sort(hashed)
            twice = np.flatnonzero(ordered[1:] == ordered[:-1])
            if len(twice):
                raise self._twice(number, int(keys_of(ordered[twice[:1]])[0]))
            hashed, rows = hashed[~is_left_out], rows[~is_left_out]
        groups = self.ranges.geometry.group_of_hash(hashed) - number * self.ranges.groups
        # Numbers below groups, in one word: much quicker than to sort numbers by groups.
        packed = groups.view(np.uint64) << np.uint64(32)
        packed |= np.arange(len(rows), dtype=np.uint64)
        packed.sort()
        order = (packed & np.uint64(0xFFFFFFFF)).view(np.int64)
        counts = np.bincount(groups, minlength=self.ranges.groups)
        return hashed.take(order), rows.take(order), counts

    def _refused(self, number: int, crowded: Crowded) -> KeyTwice | TableFull:
        if crowded.twice is not None:
            return self._twice(number, crowded.twice)
        return table_full(self.ranges.geometry, crowded.keys)

    def _twice(self, number: int, key: int) -> KeyTwice:
        hashed, rows = self.keys(number, self.ranges.room + 1)
        found = rows[keys_of(hashed) == key]
        return KeyTwice(key, np.where(found < 0, ~found, found).tolist())


class _Located(Struct, frozen=True):
    """A file, and an offset in it."""

    path: Path
    offset: int


class _SortedKeys(Struct, frozen=True):
    """Reads keys of ranges. Files are opened for each read: they may be more than a process may open."""

    run: RangeRun
    places: Sequence[_Located]

    def read(self, number: int, most: int) -> tuple[Array, Array]:
        """See `KeysOfRange`."""
        at = number - self.run.start
        count = min(sum(section.counts[at] for section in self.run.sections), most)
        hashed, rows, done = np.empty(count, np.uint64), np.empty(count, np.int32), 0
        for section, place in zip(self.run.sections, self.places, strict=True):
            stored = section.counts[at]
            last = min(done + stored, most)
            begin = place.offset + KEY_BYTES * sum(section.counts[:at])
            with open_shard(place.path) as descriptor:
                for array, offset in ((hashed, begin), (rows, begin + 8 * stored)):
                    wanted = bytes_of(array[done:last])
                    if read_at(descriptor, offset, wanted) < len(wanted):
                        raise CheckpointChanged(f"{place.path} became shorter after it was written")
            done = last
        return hashed, rows
