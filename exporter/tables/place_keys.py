"""The tasks that make an index: sort keys by ranges of their table's groups, then place them in its slots.

Each range of groups is placed by itself, a few ranges (about 40 MB) to a task. The window of a range's last
groups overlaps the slots of the next range. So every second range is placed first, into empty slots, and the
others are placed around them: the index depends only on keys, rows and sizes, not on how ranges are divided
among tasks. A task does not wait for the task behind it: it also places the beginning of the range behind its
last one, as the other task does, and only then its own last range around it.

The object of a `Partition` has the keys of one run after another: for each range the hashes of its keys
(uint64), then their rows (int32), in the order in which they are stored. `~row` is the row of a key that is
not served. After a run whose keys are stored as int32, they follow as int64, the type that is served. The
object of a `PlaceKeys` has the seeds (int64) and the slots (int32) of each run of ranges.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import ClassVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.admission import Admission
from exporter.checkpoint.embedding_variables import check_buckets, read_offsets
from exporter.checkpoint.source_shard import open_shard
from exporter.errors import CheckpointChanged, CheckpointError, CorruptFile, TableFull
from exporter.jobs.task import Range, Receipt, Task
from exporter.storage.files import writing
from exporter.storage.open_files import read_at, write_at
from exporter.storage.output_directory import Directory, new_file
from exporter.storage.waiting import workers
from exporter.tables.geometry import WINDOW, TableGeometry, hashes_of, keys_of
from exporter.tables.spread import Crowded, spread, table_full
from exporter.wire.crc32c import crc_of, extend
from exporter.wire.dtypes import Array, DType

RANGE_KEYS = 1 << 18
"""The most keys of a range on average: all ranges are equally wide, and hashes are evenly distributed."""

KEY_BYTES = 12
"""Bytes of a sorted key: its hash (uint64) and its row (int32)."""

_LEAST_GROUPS = WINDOW  # of a range: its slots begin and end with a window of their own


class KeyRanges(Struct, frozen=True):
    """A table's groups in `1 << bits` ranges of the same width."""

    geometry: TableGeometry
    bits: int

    @classmethod
    def of(cls, geometry: TableGeometry, count: int) -> KeyRanges:
        """Return a table's ranges for about `count` keys; their number is a power of two.

        A range has at most `RANGE_KEYS` keys on average. A table with few groups has fewer ranges, of more
        keys.
        """
        wanted = max(0, (-(-count // RANGE_KEYS) - 1).bit_length())
        most = geometry.group_bits - (_LEAST_GROUPS - 1).bit_length()
        return cls(geometry, max(0, min(wanted, most)))

    @property
    def count(self) -> int:
        """The number of ranges, a power of two."""
        return 1 << self.bits

    @property
    def groups(self) -> int:
        """The number of groups in each range."""
        return self.geometry.groups >> self.bits

    @property
    def slots(self) -> int:
        """The number of slots of each range, without the window that overlaps the next one."""
        return self.groups * self.geometry.stride

    @property
    def room(self) -> int:
        """The most keys that fit into a range: its slots and the window that overlaps the next one."""
        return self.slots + WINDOW

    def of_hashes(self, hashed: Array) -> Array:
        """Return the range number of each hash (uint64 [n]): uint8 or uint16 [n]."""
        if not self.bits:
            return np.zeros(len(hashed), np.uint8)
        # numpy sorts small integers by radix.
        # 16 bits are enough: `MAX_ROWS` keys make 2 ** 13 ranges.
        return (hashed >> np.uint64(64 - self.bits)).astype(np.uint8 if self.bits <= 8 else np.uint16)


_BLOCK = 1 << 20  # keys in memory at a time


class KeyRun(Struct, frozen=True):
    """Keys `start` to `stop` of a tensor, the first of which has row `row` in its table.

    Shards of the tensors are numbers of the task's inputs. `offsets` are the bucket offsets of the whole
    tensor; `freqs` and `versions` are set if they decide which keys are served.
    """

    ranges: KeyRanges
    keys: TensorRef
    start: int
    stop: int
    row: int
    offsets: TensorRef | None = None
    freqs: TensorRef | None = None
    versions: TensorRef | None = None

    @property
    def is_wide(self) -> bool:
        """True if keys are stored as int64, the type that is served."""
        return self.keys.dtype is DType.INT64

    @property
    def counted(self) -> tuple[TensorRef, ...]:
        """The tensors of which the run reads a part: keys, frequencies and versions.

        Frequencies and versions only if they decide on admission. The receipt has their checksums in this
        order.
        """
        return tuple(ref for ref in (self.keys, self.freqs, self.versions) if ref is not None)

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """All tensors that the run reads, whole or in part: `counted`, then bucket offsets if any."""
        return self.counted if self.offsets is None else (*self.counted, self.offsets)

    def renumbered(self, shards: Sequence[int]) -> KeyRun:
        """Return the run with each shard number replaced by its index in `shards`, which must contain it."""

        def renumber(ref: TensorRef | None) -> TensorRef | None:
            if ref is None or ref.extent is None:
                return ref
            return replace(ref, extent=replace(ref.extent, shard=shards.index(ref.extent.shard)))

        keys, *others = map(renumber, (self.keys, self.offsets, self.freqs, self.versions))
        assert keys is not None
        offsets, freqs, versions = others
        return replace(self, keys=keys, offsets=offsets, freqs=freqs, versions=versions)

    @property
    def sorted_bytes(self) -> int:
        """The number of bytes of the run's sorted keys in the task's object."""
        return KEY_BYTES * (self.stop - self.start)

    @property
    def written_bytes(self) -> int:
        """The number of bytes of the run in the task's object: sorted keys, and keys as int64.

        The latter are written only if keys are stored as another type.
        """
        return self.sorted_bytes + (0 if self.is_wide else 8 * (self.stop - self.start))

    def part(self, ref: TensorRef) -> Range:
        """Return the range of a task's input that has the run's elements of a tensor.

        The tensor has one extent.
        """
        (extent,) = ref.extents
        size = ref.dtype.numpy.itemsize
        return Range(extent.shard, extent.offset + self.start * size, (self.stop - self.start) * size)

    @property
    def ranges_read(self) -> Iterator[Range]:
        """Yield the ranges of all bytes that the run reads; bucket offsets are read whole, and last."""
        yield from map(self.part, self.counted)
        if self.offsets is not None:
            (extent,) = self.offsets.extents
            yield Range(extent.shard, extent.offset, extent.size)


class Partition(Task, frozen=True, kw_only=True):
    """A task that sorts runs of keys by ranges.

    The receipt has the checksums of the bytes read of each run's `counted`, those of the keys as int64 if
    they are written so, and in `counts` the number of keys in each range of each run.
    """

    operation: ClassVar[str] = "partition"

    checkpoint: str
    runs: tuple[KeyRun, ...]
    admission: Admission
    step: int | None

    def run(self, directory: Directory) -> Receipt:
        """Sort the runs, and write the task's object in `directory`; return the receipt.

        Raises:
            CorruptFile: a key is not in its bucket, or bucket offsets are damaged.
            CheckpointChanged, CheckpointError: an input changed or cannot be read.
            DiskFull, PublishError: the object cannot be written.
        """
        wanted = [each for run in self.runs for each in run.ranges_read]
        with self.files(wanted, directory.scratch) as files, new_file(directory.scratch) as (target, path):
            catalog = Catalog("", Path(self.checkpoint), {}, tuple(files), ())
            offset, sorting = 0, []
            for run in self.runs:
                one = _Sorting(self, run, catalog, target, offset)
                try:
                    with writing(path):
                        one.sort()
                except CheckpointError as error:
                    # The name of a fetched temporary file means nothing to a person.
                    for file, each in zip(files, self.inputs, strict=True):
                        error.message = error.message.replace(os.fspath(file), each.place)
                    raise
                sorting.append(one)
                offset += run.written_bytes
            tag = directory.put_file(self.name, path)
        return Receipt(
            self.name,
            tuple(crc for one in sorting for crc in one.read),
            tuple(one.wide_crc for one in sorting if not one.run.is_wide),
            offset,
            tag,
            sum(run.stop - run.start for run in self.runs),
            tuple(count for one in sorting for count in one.counts.tolist()),
        )


class _Sorting:
    """Sorts one run into a file from `offset` on; `counts`, `read` and `wide_crc` are for the receipt."""

    def __init__(self, task: Partition, run: KeyRun, catalog: Catalog, target: int, offset: int) -> None:
        self.run = run
        self.read: tuple[int, ...] = ()
        self.wide_crc = 0
        self.counts = np.zeros(run.ranges.count, np.int64)
        self._task, self._catalog = task, catalog
        self._target, self._offset = target, offset

    def sort(self) -> None:
        """Sort the run: write the hashes and rows of the keys of each range to the target file.

        The keys are read twice, first to count those in each range. Sets `counts`, `read` and `wide_crc`.
        Raises CorruptFile if a key is not in its bucket, CheckpointChanged or CheckpointError if a file
        became shorter or cannot be read, OSError if the target cannot be written.
        """
        of_blocks = list(self._count())
        self.counts = np.sum([self.counts, *of_blocks], axis=0)
        left_out = self._left_out()
        begins = np.concatenate([[0], np.cumsum(self.counts)])[:-1]
        hashes_at = self._offset + KEY_BYTES * begins
        rows_at = hashes_at + 8 * self.counts
        for (first, keys), counts in zip(self._blocks(self.run.keys), of_blocks, strict=True):
            hashed = hashes_of(keys.astype(np.int64, copy=False))
            # Stable: in which blocks keys are read must not change the index.
            order = np.argsort(self.run.ranges.of_hashes(hashed), kind="stable")
            rows = (order + (self.run.row + first)).astype(np.int32)
            if left_out is not None:
                rows ^= -left_out[first : first + len(keys)].take(order).astype(np.int32)  # x ^ -1 is ~x
            hashed, starts = hashed.take(order), np.concatenate([[0], np.cumsum(counts)])
            for number in np.flatnonzero(counts).tolist():
                part = slice(starts[number], starts[number + 1])
                write_at(self._target, int(hashes_at[number]), bytes_of(hashed[part]))
                write_at(self._target, int(rows_at[number]), bytes_of(rows[part]))
            hashes_at, rows_at = hashes_at + 8 * counts, rows_at + 4 * counts

    def _count(self) -> Iterator[Array]:
        """Yield the number of keys in each range, block by block; write int32 keys as int64 to the target.

        Sets the checksums of both. While iterating, raises CorruptFile if a key is not in its bucket or
        bucket offsets are damaged, CheckpointChanged or CheckpointError if a file became shorter or cannot be
        read, OSError if the target cannot be written.
        """
        run, crc = self.run, 0
        offsets = None if run.offsets is None else read_offsets(self._catalog, run.keys, run.offsets)
        for first, block in self._blocks(run.keys):
            crc = extend(crc, block.view(np.uint8))
            keys = block.astype(np.int64, copy=False)
            if run.offsets is not None and offsets is not None:
                check_buckets(self._catalog, run.offsets, offsets - (run.start + first), keys)
            if not run.is_wide:
                self.wide_crc = extend(self.wide_crc, keys.view(np.uint8))
                write_at(self._target, self._offset + run.sorted_bytes + 8 * first, bytes_of(keys))
            yield np.bincount(run.ranges.of_hashes(hashes_of(keys)), minlength=run.ranges.count)
        self.read = (crc,)

    def _left_out(self) -> Array | None:
        """Return a mask of the run's keys that are not admitted; None if all are.

        Adds the checksums read to `read`. Raises CheckpointChanged if a file is gone or became shorter,
        CheckpointError if it cannot be opened, OSError if reading fails.
        """
        run, task = self.run, self._task
        found = np.zeros(run.stop - run.start, bool)
        for ref in run.counted[1:]:
            crc = 0
            for first, block in self._blocks(ref):
                crc = extend(crc, block.view(np.uint8))
                of_freqs, rule = ref is run.freqs, task.admission
                admitted = rule.enough(block) if of_freqs else rule.recent(block, task.step)
                found[first : first + len(block)] |= np.logical_not(admitted)
            self.read += (crc,)
        return found if found.any() else None

    def _blocks(self, ref: TensorRef) -> Iterator[tuple[int, Array]]:
        """Yield the run's elements of a tensor in blocks, each with the number of its first element.

        The number counts within the run and comes first. While iterating, raises CheckpointChanged if the
        file is gone or became shorter, CheckpointError if it cannot be opened, OSError if reading fails.
        """
        count, dtype, at = self.run.stop - self.run.start, ref.dtype.numpy, self.run.part(ref)
        with open_shard(self._catalog.shards[at.input]) as descriptor:
            for first in range(0, count, _BLOCK):
                block = np.empty(min(_BLOCK, count - first), dtype)
                if read_at(descriptor, at.offset + first * dtype.itemsize, bytes_of(block)) < block.nbytes:
                    place = self._task.inputs[at.input].place
                    raise CheckpointChanged(f"{place} became shorter after its index was read")
                yield first, block


def bytes_of(array: Array) -> memoryview:
    """Return a view of a contiguous array's bytes, to write or fill them."""
    return array.view(np.uint8).data


KeysOfRange = Callable[[int, int], tuple[Array, Array]]
"""Reads at most that many keys of the range with that number: hashes and rows, `~row` for keys not served."""

_CHUNK_GROUPS = 1 << 16  # groups placed at a time: another number leads to other seeds
_FETCHED = 16  # sections fetched at a time


Located = tuple[Path, int]
"""An offset in a file."""


class KeyTwice(Exception):
    """A key occurs twice in one table, in two rows."""

    def __init__(self, key: int, rows: Sequence[int]) -> None:
        super().__init__(f"key {key} occurs twice")
        self.key, self.rows = key, rows


class SortedKeys(Struct, frozen=True, array_like=True):
    """Sorted keys of a run of ranges in an input, from `offset` on; `counts` is their number by range."""

    input: int
    offset: int
    counts: tuple[int, ...]

    @property
    def bytes_(self) -> int:
        """The number of bytes of all the section's keys."""
        return KEY_BYTES * sum(self.counts)


class RangeRun(Struct, frozen=True):
    """Ranges `start`, an even number, to `stop` of a table.

    The sections have the keys in the order of their rows, and those of the range after `stop`. `stored` are
    the tensors that keys come from, each with its number of rows.
    """

    table: str
    ranges: KeyRanges
    start: int
    stop: int
    sections: tuple[SortedKeys, ...]
    stored: tuple[tuple[str, int], ...]

    @property
    def end(self) -> int:
        """The number of the first range whose keys are not read.

        One range after `stop` is read, too, if there is one.
        """
        return min(self.stop + 1, self.ranges.count)

    @property
    def groups(self) -> tuple[int, int]:
        """The first group and the number of groups: the elements of `index_seeds` that the run writes."""
        return self.start * self.ranges.groups, (self.stop - self.start) * self.ranges.groups

    @property
    def slots(self) -> tuple[int, int]:
        """The first slot and the number of slots: the elements of `index_rows` that the run writes."""
        # The run before writes the window that both share.
        first = self.start * self.ranges.slots + (WINDOW if self.start else 0)
        return first, self.stop * self.ranges.slots + WINDOW - first

    @property
    def written_bytes(self) -> int:
        """The number of bytes of the run's seeds and slots in the task's object."""
        return 8 * self.groups[1] + 4 * self.slots[1]


class PlaceKeys(Task, frozen=True, kw_only=True):
    """A task that writes seeds and slots of runs of ranges, in order; the receipt has their checksums."""

    operation: ClassVar[str] = "place"

    checkpoint: str
    runs: tuple[RangeRun, ...]

    def run(self, directory: Directory) -> Receipt:
        """Place the keys of the runs, and write the task's object in `directory`; return the receipt.

        Raises:
            CorruptFile: a key occurs twice.
            TableFull: keys find no place.
            CheckpointChanged, CheckpointError: an input changed or cannot be read.
            DiskFull, PublishError: the object cannot be written.
        """
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
    def _fetched(self, directory: Directory) -> Iterator[list[list[Located]]]:
        """Yield, for each run, the file and offset of each of its sections.

        Sections in a store are fetched into a temporary file. The file is removed at the end. Raises
        CheckpointChanged if an object is not as planned, CheckpointError if it cannot be read, DiskFull or
        PublishError if the temporary file cannot be written.
        """
        with new_file(directory.scratch) as (descriptor, path), workers(_FETCHED, "sections") as pool:

            def fetch(section: SortedKeys, offset: int) -> Located:
                wanted, source = Range(0, section.offset, section.bytes_), self.inputs[section.input]
                if source.fetch(wanted, descriptor, offset, path):
                    return path, offset
                return Path(source.place), section.offset

            sections = [section for run in self.runs for section in run.sections]
            offsets = [0, *accumulate(section.bytes_ for section in sections)]
            places = pool.map(fetch, sections, offsets)
            yield [list(islice(places, len(run.sections))) for run in self.runs]

    def _place(self, run: RangeRun, places: Sequence[Located], target: int, offset: int) -> tuple[int, int]:
        """Write seeds and slots of a run to the open file `target` from `offset` on.

        Return their two checksums, plain crc32c. `places` has the file and offset of each section. Raises
        CorruptFile if a key occurs twice, TableFull, which names the table, if keys find no place,
        CheckpointChanged or CheckpointError if a section's file is gone, shorter or cannot be opened, OSError
        if reading or writing fails.
        """
        keys = partial(_read_keys, run, places)
        slots_at = offset + 8 * run.groups[1]
        try:
            for piece in place_ranges(run.ranges, run.start, run.stop, keys):
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
        """Return the error to raise for a key in two rows; it names the tensors of these rows."""
        bounds = np.cumsum([rows for _, rows in run.stored])
        places = np.searchsorted(bounds, sorted(error.rows)[:2], side="right")
        names = [run.stored[place][0] for place in places]
        where = f"twice in {names[0]!r}" if names[0] == names[-1] else f"in {names[0]!r} and in {names[1]!r}"
        return CorruptFile(f"{self.checkpoint}: key {error.key} is {where}")


class PlacedSlots(Struct, frozen=True, eq=False):
    """Seeds from a group on, and rows of slots from a slot on."""

    group: int
    seeds: Array
    slot: int
    rows: Array


def place_ranges(ranges: KeyRanges, start: int, stop: int, keys: KeysOfRange) -> Iterator[PlacedSlots]:
    """Yield seeds and slots of the ranges `start` (even) to `stop`, in pieces.

    The pieces are not in the order of their numbers. `keys` reads the keys of a range. While iterating,
    raises KeyTwice if a key occurs twice, TableFull if keys find no place, and the errors of `keys`.
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
    # The first window of all but the first run is written by the run before it.
    for number in range(start + 1 if start else 0, stop + 1):
        yield PlacedSlots(start * ranges.groups, none, number * ranges.slots, ends[number])


def _inner(ranges: KeyRanges, number: int, seeds: Array, area: Array) -> PlacedSlots:
    """Return seeds and slots of a range, without the slots of the windows that neighbours share."""
    slots = np.ascontiguousarray(area[WINDOW:-WINDOW])
    return PlacedSlots(number * ranges.groups, seeds, number * ranges.slots + WINDOW, slots)


class _Placing(Struct, frozen=True):
    """Places the keys of ranges."""

    ranges: KeyRanges
    keys: KeysOfRange

    def place(
        self, number: int, before: Array, behind: Array, *, only_first: bool = False
    ) -> tuple[Array, Array]:
        """Place the keys of a range around the keys in the two windows that it shares with its neighbours.

        Return the seeds of its groups (int64), and the rows in its slots and the window behind them (int32).
        `before` and `behind` are the rows in the shared windows as the neighbours left them. With
        `only_first` only the first slots are right. Raises KeyTwice if a key occurs twice, TableFull if keys
        find no place, and the errors of `keys`.
        """
        ranges, geometry = self.ranges, self.ranges.geometry
        hashed, rows, counts = self._by_groups(number)
        area = np.full(ranges.slots + WINDOW, geometry.empty_row, np.int32)
        area[:WINDOW], area[-WINDOW:] = before, behind
        occupied = area != geometry.empty_row
        chosen = np.empty(ranges.groups, np.int64)
        # A whole chunk, also for a few slots: seeds depend on all groups that are
        # spread together, and must be those that the task behind this one finds.
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
        """Return hashes and rows of a range's served keys, ordered by groups, and each group's key count.

        Raises TableFull if there are more keys than slots, KeyTwice if one of these occurs twice; if some
        keys are not served, KeyTwice for any key that occurs twice. Also raises the errors of `keys`.
        """
        # One more than fits shows that the range is too full; made-up keys could fill memory.
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
        # Key numbers in the lower half of a word, groups in the upper: much quicker than `argsort`.
        packed = groups.view(np.uint64) << np.uint64(32)
        packed |= np.arange(len(rows), dtype=np.uint64)
        packed.sort()
        order = (packed & np.uint64(0xFFFFFFFF)).view(np.int64)
        counts = np.bincount(groups, minlength=self.ranges.groups)
        return hashed.take(order), rows.take(order), counts

    def _refused(self, number: int, crowded: Crowded) -> KeyTwice | TableFull:
        """Return the error to raise for keys that find no seed: KeyTwice if one of them occurs twice."""
        if crowded.twice is not None:
            return self._twice(number, crowded.twice)
        return table_full(self.ranges.geometry, crowded.keys)

    def _twice(self, number: int, key: int) -> KeyTwice:
        hashed, rows = self.keys(number, self.ranges.room + 1)
        found = rows[keys_of(hashed) == key]
        return KeyTwice(key, np.where(found < 0, ~found, found).tolist())


def _read_keys(run: RangeRun, places: Sequence[Located], number: int, most: int) -> tuple[Array, Array]:
    """Return hashes (uint64) and rows (int32) of at most `most` keys of range `number`.

    The row of a key that is not served is `~row`. They are read from files: `places` has the file and offset
    of each of the run's sections. Raises CheckpointChanged if a file became shorter or is gone,
    CheckpointError if it cannot be opened, OSError if reading fails.
    """
    at = number - run.start
    count = min(sum(section.counts[at] for section in run.sections), most)
    hashed, rows, done = np.empty(count, np.uint64), np.empty(count, np.int32), 0
    for section, (path, offset) in zip(run.sections, places, strict=True):
        stored = section.counts[at]
        last = min(done + stored, most)
        begin = offset + KEY_BYTES * sum(section.counts[:at])
        with open_shard(path) as descriptor:  # anew for each read: a process may not open as many at once
            for array, start in ((hashed, begin), (rows, begin + 8 * stored)):
                wanted = bytes_of(array[done:last])
                if read_at(descriptor, start, wanted) < len(wanted):
                    raise CheckpointChanged(f"{path} became shorter after it was written")
        done = last
    return hashed, rows
