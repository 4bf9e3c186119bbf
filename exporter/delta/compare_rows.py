"""Compare rows of one table in two states, chunk by chunk and bit by bit: in this process, or by tasks.

`ComparedRows` compares. A `Compare` task does it for a range of rows in two bundles, and writes one object:
the hashes of the new rows' blocks (uint64), the numbers of the rows that differ (int64) and their new values,
one behind another. A task does not read deltas on top of a bundle: `TaskComparison` compares the rows that
these change in the process that began the job.

Both report the checksum of every range that they read; `StoredChecksums` joins them and compares whole runs
of stored bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, Extent, SliceSpec, TensorRef
from exporter.checkpoint.source_shard import open_shard, reading
from exporter.checkpoint.tensor_values import compare_checksum, map_bytes
from exporter.delta.format import ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.row_hashes import BlockHasher, block_rows, without_rows
from exporter.delta.row_reader import RowReader, SliceOrder, StoredRun, overlaps
from exporter.jobs.runner import Runner
from exporter.jobs.task import Input, Range, RangeChecksums, Receipt, Task
from exporter.storage.output_directory import Directory, new_file
from exporter.tables.integer_sets import among, distinct
from exporter.wire.crc32c import extend, mask
from exporter.wire.dtypes import Array, DType

CHUNK_BYTES = 4 << 20  # with less, two threads wait for one another more than they compare

_FEW = 8  # gather single blocks only below 1/8 of a chunk: it costs several times a sequential read


def differing_rows(old: Array, new: Array) -> Array:
    """Return the numbers, int64 ascending, of the rows that differ in any byte.

    `old` and `new` are arrays [n, ...] of one shape and dtype.
    """
    a, b = _words(old), _words(new)
    unequal = a != b
    if not unequal.any():
        return np.empty(0, np.int64)
    return np.flatnonzero(unequal.any(axis=1))


class Found(Struct, frozen=True):
    """The changed rows of some whole blocks, these blocks' hashes, and checksums of the bytes read."""

    ids: Array
    values: Array
    hashes: Array
    bytes_: int
    old_read: tuple[ReadRange, ...] = ()
    new_read: tuple[ReadRange, ...] = ()


class ComparedRows:
    """Compares the rows of a table in two states, or only the rows from `rows[0]` to `rows[1]`.

    If hashes of the old rows are `known`, old bytes are read only in the blocks whose hashes differ; if a
    block that is read has another hash than the known one, `is_old_as_known` becomes False. `Found` gets the
    checksums of stored runs that hold exactly the served rows; none with `checksums` False.
    """

    def __init__(
        self,
        old: LayeredState,
        new: LayeredState,
        variable: ServedVariable,
        hasher: BlockHasher,
        known: Array | None = None,
        rows: tuple[int, int] | None = None,
        *,
        checksums: bool = True,
    ) -> None:
        self._old, self._new, self._name, self._hasher = old, new, variable.name, hasher
        self._first, self._stop = rows or (0, variable.shape[0])
        self.row_bytes = variable.row_bytes
        self.block = block_rows(self.row_bytes)
        self.known = known
        self.is_old_as_known = True
        self._checksums = checksums

    @property
    def blocks(self) -> int:
        """The number of blocks of the compared rows; each has one hash."""
        return -(-(self._stop - self._first) // self.block)

    def _read(self, state: LayeredState, start: int, stop: int) -> tuple[ReadRange, ...]:
        """Return the checksum of rows `start` to `stop` in a state, as at most one range of a stored run.

        Empty if no checksums are wanted, or no stored run holds exactly the served rows. Raises
        CheckpointError and subclasses if rows cannot be read, DiskFull or PublishError if bytes fetched from
        a store cannot be kept.
        """
        stored = state.stored[self._name]
        if not self._checksums or stored.extent is None:
            return ()
        rows = _bytes_of(stored.rows(start, stop))
        first = start * self.row_bytes
        return (ReadRange(stored.run_of[stored.extent], first, rows.nbytes, extend(0, rows)),)

    def chunks(self, most: int = 0) -> Iterator[tuple[int, int]]:
        """Yield ranges (start, stop) of rows, whole blocks of about `most` bytes, in order.

        At least one block each; the last range may end within a block. 0 means `CHUNK_BYTES`.
        """
        step = max(1, (most or CHUNK_BYTES) // max(1, self.row_bytes * self.block)) * self.block
        for start in range(self._first, self._stop, step):
            yield start, min(start + step, self._stop)

    def compare(self, chunk: tuple[int, int]) -> Found:
        """Return the rows of a chunk (start, stop) that differ, with the hashes of its new rows.

        The chunk begins with a whole block. Sets `is_old_as_known` to False if an old block that is read has
        another hash than the known one. Raises MappingError or NotFinite if a value does not fit the served
        dtype, CheckpointError (and subclasses) if rows cannot be read, DiskFull or PublishError if rows
        fetched from a store cannot be kept.
        """
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
        """Set `is_old_as_known` to False if blocks of old rows have other hashes than the known ones.

        No effect if none are known. `old` has the rows of `blocks`, numbered within the chunk that begins
        with row `start`.
        """
        # If they differ, rows are damaged, or some were held back and their hashes are unknown.
        if self.known is not None:
            known = self.known[blocks + start // self.block]
            if (self._hasher.hash_rows(old) != known).any():
                self.is_old_as_known = False

    def _suspects(self, start: int, hashes: Array) -> Array:
        """Return the numbers, within a chunk, of the blocks that may differ from the old ones, ascending.

        All if no hashes are known, otherwise the blocks with another hash than the known one. `start` is the
        chunk's first row, `hashes` are those of its new rows.
        """
        if self.known is None:
            return np.arange(len(hashes))
        first = start // self.block
        return np.flatnonzero(hashes != self.known[first : first + len(hashes)])

    def _among(self, suspects: Array, new: Array, start: int) -> Array:
        """Return the rows of a chunk that differ, numbered within it, ascending.

        Old rows are read in the blocks `suspects` only. `suspects` are the numbers of blocks, `new` all new
        rows of the chunk, and `start` is its first row. Raises CheckpointError (and subclasses) if old rows
        cannot be read, MappingError or NotFinite if a value does not fit the served dtype, DiskFull or
        PublishError if bytes fetched from a store cannot be kept.
        """
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
    """Return rows as a matrix [n, words] of unsigned integers, the widest that divide a row's bytes.

    It is a view, or a copy if the rows are not contiguous.
    """
    flat = np.ascontiguousarray(rows).reshape(len(rows), math.prod(rows.shape[1:])).view(np.uint8)
    word = next(size for size in (8, 4, 2, 1) if flat.shape[1] % size == 0)  # a row must be whole words
    return flat.view(f"<u{word}") if flat.shape[1] else flat


class StoredSide(Struct, frozen=True):
    """A `RowReader` for some of its rows, as a value that a task can hold.

    `shards` are the numbers of the catalog's shards with these rows, in the order of the task's inputs;
    `first` is the number of the task's first input that belongs to this side.
    """

    tensor: TensorRef
    box: SliceSpec
    dtype: DType
    order: SliceOrder
    part: int
    shards: tuple[int, ...]
    first: int

    @classmethod
    def of(cls, reader: RowReader, start: int, stop: int, first: int) -> StoredSide:
        """Return the description of a reader for rows `start` to `stop`.

        Slices that hold none of these rows are left out. But if rows are distributed over slices (`gather`),
        all slices stay, as a row's number follows from its slice's. `first` is the number of the side's first
        input in the task.
        """
        whole = cls(reader.tensor, reader.box, reader.dtype, reader.order, reader.part, (), first)
        if reader.order.gather:  # a slice's rows follow from its number, so no slice may be left out
            return replace(whole, shards=tuple(sorted({extent.shard for extent in reader.tensor.extents})))
        near = replace(reader.tensor, slices=reader.slices_near(*whole._stored_rows(start, stop)))
        whole = replace(whole, tensor=near)
        extents = {extent for extent, _, _ in whole.stored(start, stop)}
        tensor = replace(near, slices=tuple(part for part in near.slices if part.extent in extents))
        return replace(whole, tensor=tensor, shards=tuple(sorted({extent.shard for extent in extents})))

    def reader(self, name: str, paths: Sequence[Path]) -> RowReader:
        """Return the reader of these rows, named `name`; `paths` has the file of each input of the task.

        Nothing is opened until rows are read.
        """
        found = dict(zip(self.shards, paths[self.first :], strict=False))
        # shards without these rows are not opened
        known = tuple(found.get(number, Path()) for number in range(max(self.shards, default=-1) + 1))
        catalog = Catalog("", Path(), {}, known, ())
        return RowReader(name, catalog, self.tensor, self.box, self.dtype, self.order, self.part)

    def stored(self, start: int, stop: int) -> Iterator[tuple[Extent, int, int]]:
        """Yield the stored bytes of served rows `start` to `stop`: extent, offset in it, size in bytes.

        They are whole stored rows, in the order of the slices. If served rows are scattered in the tensor,
        other parts' rows between them are included. Strings, rows of 0 bytes and slices that are not stored
        are left out.
        """
        low, high = self._stored_rows(start, stop)
        whole = [(SliceSpec.whole(self.tensor.shape), self.tensor.extent)]
        slices = sorted(self.tensor.slices, key=lambda part: part.spec.starts)
        stored = [(part.spec, part.extent) for part in slices] or whole
        for number, (spec, extent) in enumerate(stored):
            if extent is None or (self.order == SliceOrder() and not overlaps(spec, self.box)):
                continue
            first, last = low - spec.starts[0], high - spec.starts[0]
            if self.order.gather:
                first, last = (-((number - each) // self.order.gather) for each in (low, high))
            first, last = (min(max(each, 0), spec.lengths[0]) for each in (first, last))
            row = math.prod(spec.lengths[1:]) * (self.tensor.dtype.itemsize or 0)
            if first < last and row:
                yield extent, first * row, (last - first) * row

    def read_ranges(
        self, reader: RowReader, start: int, stop: int, crcs: Iterable[int]
    ) -> Iterator[ReadRange]:
        """Yield the bytes of `stored` as ranges of the reader's stored runs, with their checksums.

        Each gets the next of `crcs`, plain crc32c. `crcs` may be an iterator with more: it is advanced only
        by as many as are yielded. `start` and `stop` are served rows. KeyError if the reader has no such
        stored run.
        """
        for (extent, first, size), crc in zip(self.stored(start, stop), crcs, strict=False):
            yield ReadRange(reader.run_of[extent], first, size, crc)

    def _stored_rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range (first, stop) of natural rows that contains served rows `start` to `stop`."""
        if self.order.scatter:
            return start * self.order.scatter, stop * self.order.scatter
        return self.box.starts[0] + start, self.box.starts[0] + stop

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Yield the bytes of `stored` as ranges of the task's inputs, in the same order.

        `start` and `stop` are served rows.
        """
        for extent, first, size in self.stored(start, stop):
            yield Range(self.first + self.shards.index(extent.shard), extent.offset + first, size)


class Compare(Task, frozen=True, kw_only=True):
    """A task that compares rows `start` to `stop`, whole blocks.

    It writes their hashes and the rows that differ.
    """

    # The receipt has the checksums of the ranges of `StoredSide.stored`, of the old side first.

    operation: ClassVar[str] = "compare"

    variable: ServedVariable
    old: StoredSide
    new: StoredSide
    start: int
    stop: int
    seed: int

    def run(self, directory: Directory) -> Receipt:
        """Compare the rows, and write the task's object in `directory`; return the receipt.

        Its `rows` is the number of rows that differ. Raises CheckpointChanged or another CheckpointError
        (CorruptFile: rows are not stored) if an input changed or cannot be read, MappingError or NotFinite if
        a value does not fit; OSError, DiskFull or PublishError if the object or a scratch file cannot be
        written.
        """
        name, found = self.variable.name, list[Found]()
        ranges = [*self.old.ranges(self.start, self.stop), *self.new.ranges(self.start, self.stop)]
        with self.files(ranges, directory.scratch) as paths:
            old, new = (LayeredState({name: side.reader(name, paths)}) for side in (self.old, self.new))
            hasher, chosen = BlockHasher(self.seed), (self.start, self.stop)
            rows = ComparedRows(old, new, self.variable, hasher, rows=chosen, checksums=False)
            crcs = [SideChecksums(side, paths) for side in (self.old, self.new)]
            for chunk in rows.chunks():
                found.append(rows.compare(chunk))
                for side in crcs:
                    side.read(*chunk)
        with new_file(directory.scratch) as (descriptor, path):
            # A duplicate: `new_file` closes the descriptor itself.
            with os.fdopen(os.dup(descriptor), "wb") as file:
                for field in ("hashes", "ids", "values"):
                    for each in found:
                        file.write(np.ascontiguousarray(getattr(each, field)).reshape(-1).view(np.uint8).data)
                size = file.tell()
            tag = directory.put_file(self.name, path)
        count = sum(len(each.ids) for each in found)
        read = [crc for side in crcs for crc in side.of(self.start, self.stop)]
        return Receipt(self.name, tuple(read), (), size, tag, count)


class SideChecksums:
    """Checksums of one side's extents, extended as rows are read in order."""

    def __init__(self, side: StoredSide, paths: Sequence[Path]) -> None:
        self._side, self._paths = side, paths
        self._maps: dict[Extent, Array] = {}
        self._crcs: dict[Extent, int] = {}

    def of(self, start: int, stop: int) -> list[int]:
        """Return the plain crc32c of each extent with served rows `start` to `stop`.

        They have the order of `StoredSide.stored`. All of these rows must have been passed to `read`;
        KeyError otherwise.
        """
        return [self._crcs[extent] for extent, _, _ in self._side.stored(start, stop)]

    def ranges(self, reader: RowReader, start: int, stop: int) -> tuple[ReadRange, ...]:
        """Return the checksums of `of` as ranges of the stored runs of `reader`.

        `start` and `stop` are served rows. KeyError if some of them were not passed to `read`.
        """
        return tuple(self._side.read_ranges(reader, start, stop, self.of(start, stop)))

    def read(self, start: int, stop: int) -> None:
        """Read the bytes of served rows `start` to `stop` and extend the checksums by them.

        The rows must follow the previous ones. Raises CheckpointChanged or CheckpointError if a file is gone
        or too short, or cannot be opened or mapped.
        """
        # Called right after the comparison of these rows, which has brought them into the processor's cache.
        for extent, first, size in self._side.stored(start, stop):
            if extent not in self._maps:
                path = self._paths[self._side.first + self._side.shards.index(extent.shard)]
                with open_shard(path) as descriptor, reading(path):
                    self._maps[extent] = map_bytes(descriptor, extent)
            self._crcs[extent] = extend(self._crcs.get(extent, 0), self._maps[extent][first : first + size])


class TaskComparison:
    """Compares tables by the tasks of one job, in order.

    As a context manager, it cancels the rest at its end.
    """

    def __init__(
        self,
        old: LayeredState,
        new: LayeredState,
        tables: Iterable[ServedVariable],
        hasher: BlockHasher,
        runner: Runner,
        scratch: Path,
    ) -> None:
        self._old, self._new, self._hasher, self._runner = old, new, hasher, runner
        self._rows = {table.name: ComparedRows(old, new, table, hasher) for table in tables}
        self._planned = cache(Input.of)
        self._tasks = [
            task for number, table in enumerate(tables) for task in self._tasks_of(table, f"{number:05d}")
        ]
        self._next = iter(self._tasks)
        self._checksums = StoredChecksums(old), StoredChecksums(new)
        self._job = runner.job(self._tasks, os.fspath(scratch / "compared"))
        self._receipts = self._job.receipts()

    def __enter__(self) -> TaskComparison:
        return self

    def __exit__(self, *error: Any) -> None:
        self._job.__exit__(*error)
        if not self._job.is_kept:
            self._job.directory.remove()

    def found(self, name: str) -> Iterator[Found] | None:
        """Return an iterator of the results for the table `name`, in the order of its rows.

        None if tasks do not compare it. Tables must be asked for in the order in which they were given. The
        iterator waits for each task, and records its checksums for `check`.

        Raises (while iterating):
            EngineFailed: the engine failed.
            CheckpointError: an input changed, or rows or a task's result cannot be read.
            MappingError, NotFinite: a value does not fit the served dtype.
            OSError, DiskFull, PublishError: a result or a scratch file cannot be written.
        """
        return self._found(name, self._rows[name]) if name in self._rows else None

    def check(self) -> None:
        """Verify the checksums of all stored runs of the tables; bytes that no task has read are read now.

        Raises CorruptFile if one differs, CheckpointError (and subclasses) if bytes cannot be read, DiskFull
        or PublishError if bytes fetched from a store cannot be kept.
        """
        for side in self._checksums:
            side.check(self._rows)

    def _found(self, name: str, rows: ComparedRows) -> Iterator[Found]:
        touched = self._old.touched(name), self._new.touched(name)
        for _ in rows.chunks(self._runner.task_bytes):
            task, receipt = next(self._next), next(self._receipts)
            found = _read(self._job.directory, receipt, task, rows)
            self._note(task, receipt)
            yield _with_layers(found, task, self._old, self._new, touched)

    def _note(self, task: Compare, receipt: Receipt) -> None:
        """Record the checksums in a task's receipt, for the old and the new side."""
        crcs = iter(receipt.read)
        for side, state, known in zip(
            (task.old, task.new), (self._old, self._new), self._checksums, strict=True
        ):
            known.add(side.read_ranges(state.stored[task.variable.name], task.start, task.stop, crcs))

    def _tasks_of(self, variable: ServedVariable, name: str) -> Iterator[Compare]:
        """Yield the tasks of a table, in the order of its rows, named `<name>-<number>`.

        Raises CheckpointChanged or CheckpointError if a file is gone or cannot be reached.
        """
        old, new = self._old.stored[variable.name], self._new.stored[variable.name]
        rows = self._rows[variable.name]
        paths = [{run.extent.shard: run.path for run in side.runs} for side in (old, new)]
        for number, (start, stop) in enumerate(rows.chunks(self._runner.task_bytes)):
            before = StoredSide.of(old, start, stop, 0)
            after = StoredSide.of(new, start, stop, len(before.shards))
            sides = zip(paths, (before.shards, after.shards), strict=True)
            yield Compare(
                name=f"{name}-{number:06d}",
                inputs=tuple(self._planned(known[shard]) for known, shards in sides for shard in shards),
                bytes_=sum(size for side in (before, after) for _, _, size in side.stored(start, stop)),
                variable=variable,
                old=before,
                new=after,
                start=start,
                stop=stop,
                seed=self._hasher.seed,
            )


def _read(directory: Directory, receipt: Receipt, task: Compare, rows: ComparedRows) -> Found:
    """Return the hashes and the rows that differ, read from the object that a task wrote.

    The object is in `directory`; `receipt` is the task's, `rows` has the sizes of rows and blocks. Raises
    CheckpointError if it cannot be read, PublishError and subclasses if a scratch file cannot be written.
    """
    source = Input(f"{directory.place}/{receipt.task}", receipt.written, receipt.tag)
    count, shape = task.stop - task.start, task.variable.shape[1:]
    blocks = -(-count // rows.block)
    with source.file((Range(0, 0, receipt.written),), directory.scratch) as path:
        content = np.fromfile(path, np.uint8)
    hashes, ids, values = np.split(content, np.cumsum([8 * blocks, 8 * receipt.rows]))
    typed = values.view(task.variable.dtype.numpy).reshape(receipt.rows, *shape)
    size = count * rows.row_bytes
    return Found(ids.view(np.int64), typed, hashes.view(np.uint64), size)


def _with_layers(
    found: Found, task: Compare, old: LayeredState, new: LayeredState, touched: tuple[Array, Array]
) -> Found:
    """Return the result of a task, corrected for the rows that changes on top of the bundles contain.

    `touched` has the numbers of these rows, ascending, in the old and the new state; they are compared here.
    The hashes of blocks that the new state's changes touch are invalidated. Raises CheckpointError (and
    subclasses) if these rows cannot be read, MappingError or NotFinite if a value does not fit the served
    dtype, DiskFull or PublishError if bytes fetched from a store cannot be kept.
    """
    here = [ids[slice(*np.searchsorted(ids, (task.start, task.stop)))] for ids in touched]
    ids = distinct(np.concatenate(here))
    if not len(ids):
        return found
    name = task.variable.name
    values = new.rows_at(name, ids)
    differ = differing_rows(old.rows_at(name, ids), values)
    kept = ~among(found.ids, ids)
    rows = np.concatenate([found.ids[kept], ids[differ]])
    order = np.argsort(rows)
    hashes = without_rows(found.hashes, here[1] - task.start, found.bytes_ // (task.stop - task.start))
    return replace(
        found,
        ids=rows[order],
        values=np.concatenate([found.values[kept], values[differ]])[order],
        hashes=hashes,
    )


# --- checksums of what was read ----------------------------------------------------------------------------


class ReadRange(Struct, frozen=True):
    """`size` bytes at `start` of a stored run that were read, and their plain crc32c."""

    run: StoredRun
    start: int
    size: int
    crc: int


class StoredChecksums:
    """Joins checksums of ranges of one side's stored runs, and compares them for whole runs."""

    def __init__(self, state: LayeredState) -> None:
        self._state = state
        self._ranges = RangeChecksums[StoredRun]()

    def add(self, read: Iterable[ReadRange]) -> None:
        """Record the checksums of these ranges, in any order, for a later `check`."""
        for each in read:
            self._ranges.add(each.run, each.start, each.size, each.crc)

    def check(self, names: Iterable[str]) -> None:
        """Verify the checksums of all stored runs of these variables.

        Runs that were not read completely are read now. Verified runs are recorded in the state. Raises
        CorruptFile if one differs, CheckpointError (and subclasses) if bytes cannot be read, DiskFull or
        PublishError if bytes fetched from a store cannot be kept.
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
