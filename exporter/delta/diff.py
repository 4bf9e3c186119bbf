"""Compare two states bit for bit: which rows of tables and which whole variables differ.

Tables stream in chunks of whole rows, several at a time. Only changed rows are kept, in a scratch file when
they are many. If hashes of the old rows are known, old bytes are read only in the blocks whose hashes differ.
Values are compared as bytes: NaN equals the same NaN, -0.0 is not 0.0.

A range of a table in an object store is fetched into a scratch file, compared, and removed before the next
one is fetched (`_Table`). Old rows that are read because a hash differs are not even written to a file: see
`exporter.delta.row_reader`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from exporter.delta.compare_rows import (
    ComparedRows,
    Found,
    SideChecksums,
    StoredChecksums,
    StoredSide,
    differing_rows,
)
from exporter.delta.format import Change, ChangeKind, Rows, Schema, ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.row_hashes import BlockHasher, HashIndex
from exporter.delta.row_spill import RowSpill, in_pieces, spilled
from exporter.jobs.task import Input, Task
from exporter.storage.requests import GAP_BYTES, PART_BYTES
from exporter.storage.waiting import workers
from exporter.tables.integer_sets import distinct
from exporter.terminal.progress import NoProgress, Progress
from exporter.wire.dtypes import Array

if TYPE_CHECKING:
    from exporter.delta.compare_rows import TaskComparison
    from exporter.jobs.runner import Runner


T = TypeVar("T")

_STORE_BYTES = 128 << 20  # fetched from a store at a time, on each side, by all threads together

_SMALL = 1024  # a table is small below this fraction of a task's bytes
_AHEAD = 2  # chunks submitted for each thread: enough to keep it busy, few enough to bound memory


class Compared(Struct, frozen=True):
    """The changes from the old state to the new one, the new rows' hashes by table, the bytes compared."""

    changes: dict[str, Change]
    hashes: dict[str, Array]
    bytes_: int


class Comparison(Struct, frozen=True):
    """Options of a comparison: `known` are hashes of the old state.

    `scratch` is a directory for large results. With a `runner`, its tasks compare tables instead of threads
    of this process. With `changes`, only changes are wanted and no hashes: bytes that both states share are
    not read. `workers` 0 means one thread per processor.
    """

    scratch: Path
    known: HashIndex | None = None
    hasher: BlockHasher = field(default_factory=BlockHasher.fresh)
    workers: int = 0
    progress: Progress = field(default_factory=NoProgress)
    runner: Runner | None = None
    changes: bool = False

    @property
    def threads(self) -> int:
        """The number of threads of this process that compare.

        It is `workers`, or one per processor that the process may use if `workers` is 0.
        """
        return self.workers or len(os.sched_getaffinity(0))


def diff(old: LayeredState, new: LayeredState, schema: Schema, how: Comparison) -> Compared:
    """Compare two states variable by variable.

    Return the changes from `old` to `new` and the hashes of the new tables that were compared. All stored
    bytes of `new` that are read are verified by their checksums: a damaged row must not get a new, right
    checksum. So are those of `old`, where a damaged row could hide a change; if hashes of its rows are known,
    these verify the blocks that are read; with a runner they are not used. With `how.changes`, bytes that
    both share are neither read nor verified, and their tables have no hashes. Verified runs of tables are
    recorded in both states; `how.progress` advances by the bytes compared. Changes may be maps of unnamed
    files in `how.scratch`.

    Raises:
        CorruptFile: a checksum differs.
        CheckpointError: a file changed or cannot be read.
        MappingError, NotFinite: a value does not fit the dtype it is served in.
        EngineFailed: the engine of `how.runner` failed.
        UsageError: the store in which `how.runner` keeps jobs cannot be opened.
        OSError, DiskFull, PublishError: a scratch file, or a task's result, cannot be written.
    """
    hasher = how.known.hasher if how.known else how.hasher  # hashes of other seeds tell nothing
    changes: dict[str, Change] = {}
    hashes: dict[str, Array] = {}
    total = 0
    with ExitStack() as stack:
        pool = stack.enter_context(workers(how.threads, "diff"))
        tasks = None if how.runner is None else stack.enter_context(_tasks(old, new, schema, hasher, how))
        for variable in schema.variables:
            change: Change | None
            if how.changes and _is_shared(old, new, variable):
                change = _changed_since(old, new, variable, how.scratch)
                size = variable.bytes_
                how.progress.advance(size)
            elif variable.kind is ChangeKind.DENSE:
                value = new.whole(variable.name)
                is_same = same_bits(old.whole(variable.name), value)
                change = None if is_same else value
                size = value.size * (variable.dtype.itemsize or 0)
                how.progress.advance(size)
            else:
                job = _Table(old, new, variable, hasher, how)
                change, hashes[variable.name] = job.run(pool, tasks)
                size = job.bytes_
            total += size
            if change is not None:
                changes[variable.name] = change
        if tasks is not None:
            tasks.check()
    _add_other_halves(changes, new, schema)
    return Compared(changes, hashes, total)


def _tasks(
    old: LayeredState, new: LayeredState, schema: Schema, hasher: BlockHasher, how: Comparison
) -> TaskComparison:
    """Start to compare tables by the tasks of `how.runner`, and return the comparison.

    It has the tables that are large or in an object store, that no change replaces as a whole, and, with
    `how.changes`, that the states do not share. Raises CheckpointChanged or CheckpointError if a file is gone
    or cannot be reached, DiskFull, PublishError or UsageError if the directory of the job cannot be made.
    """
    # Small tables in files, of which there may be thousands, are compared here: a task costs more than they
    # do.
    from exporter.delta.compare_rows import TaskComparison  # late: few use it, and imports slow every delta

    assert how.runner is not None
    tables = [
        variable
        for variable in schema.variables
        if variable.kind is not ChangeKind.DENSE
        and not (old.replaces(variable.name) or new.replaces(variable.name))
        and not (how.changes and _is_shared(old, new, variable))
        and (
            variable.bytes_ > how.runner.task_bytes // _SMALL
            or any(side.stored[variable.name].is_remote for side in (old, new))
        )
    ]
    return TaskComparison(old, new, tables, hasher, how.runner, how.scratch)


def _is_shared(old: LayeredState, new: LayeredState, variable: ServedVariable) -> bool:
    """True if both states store a variable in the same bytes, and only changes of rows are on top."""
    name, layers = variable.name, (*old.layers, *new.layers)
    if any(name in layer and not isinstance(layer[name], Rows) for layer in layers):
        return False
    return old.is_stored_as(new, name)


def _changed_since(
    old: LayeredState, new: LayeredState, variable: ServedVariable, scratch: Path
) -> Change | None:
    """Compare the rows that changes on top contain, for a variable that `_is_shared`.

    Return the rows that differ; of a dense variable, the whole new value. None if nothing differs. Raises
    CheckpointError and subclasses if rows cannot be read, DiskFull or PublishError if bytes fetched from a
    store cannot be kept, OSError if a file in `scratch` cannot be written.
    """
    name = variable.name
    ids = distinct(np.concatenate([old.touched(name), new.touched(name)]))
    if variable.kind is ChangeKind.DENSE:
        value = new.whole(name) if len(ids) else None
        return None if value is None or same_bits(old.whole(name), value) else value

    def differing() -> Iterator[tuple[Array, Array]]:
        for some in in_pieces(ids):
            values = new.rows_at(name, some)
            differ = differing_rows(old.rows_at(name, some), values)
            yield some[differ], values[differ]

    return spilled(variable, scratch, differing())


def diff_lookups(old: LayeredState, new: LayeredState, schema: Schema) -> dict[str, Change]:
    """Return the changes from the lookup tables of `old` to those of `new`: keys and values, by variable.

    A table with the same bytes in both is left out. All checksums of lookup tables are verified. Raises
    CorruptFile if one differs, CheckpointError (and subclasses) if a file cannot be read, DiskFull or
    PublishError if bytes fetched from a store cannot be kept.
    """
    names = [half.name for pair in schema.lookups for half in pair]
    values = {name: new.whole(name) for name in names}
    changes: dict[str, Change] = {
        name: value for name, value in values.items() if not same_bits(old.whole(name), value)
    }
    _add_other_halves(changes, new, schema)
    return changes


def same_bits(a: Array, b: Array) -> bool:
    """True if two arrays of one dtype have the same shape and bytes; strings are compared as strings."""
    if a.shape != b.shape:
        return False
    if a.dtype == object:
        return bool(np.array_equal(a, b))
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _add_other_halves(changes: dict[str, Change], new: LayeredState, schema: Schema) -> None:
    """Complete `changes`, in place, by the other half, from `new`, of each lookup table with one half in it.

    The halves of a table are its keys and its values. Raises CheckpointError and subclasses if a half cannot
    be read or is damaged, DiskFull or PublishError if bytes fetched from a store cannot be kept.
    """
    for pair in schema.lookups:
        if any(half.name in changes for half in pair):
            changes |= {half.name: new.whole(half.name) for half in pair if half.name not in changes}


class _Table:
    """Compares one table."""

    def __init__(
        self,
        old: LayeredState,
        new: LayeredState,
        variable: ServedVariable,
        hasher: BlockHasher,
        how: Comparison,
    ) -> None:
        self._old, self._new, self._name = old, new, variable.name
        self._variable, self._how = variable, how
        known = None
        if how.known is not None and how.runner is None:  # a task reads both sides
            known = how.known.find(variable.name, variable.shape[0], variable.row_bytes)
        self._rows = ComparedRows(old, new, variable, hasher, known)
        self._hasher = hasher
        self._planned = cache(Input.of)  # every range that is fetched is of the same objects
        self.bytes_ = variable.bytes_

    def run(self, pool: Executor, tasks: TaskComparison | None) -> tuple[Rows | None, Array]:
        """Return the changed rows (None without any) and the hashes of all blocks (uint64 [blocks]).

        The table is compared by `tasks` if these include it, else by the threads of `pool`; then the stored
        checksums of the bytes that were read are verified here. Raises CheckpointError (and subclasses) if
        rows changed, are damaged or cannot be read, MappingError or NotFinite if a value does not fit the
        served dtype, EngineFailed if the engine of the tasks failed, OSError, DiskFull or PublishError if a
        scratch file cannot be written.
        """
        by_tasks = None if tasks is None else tasks.found(self._name)
        hashes = np.empty(self._rows.blocks, np.uint64)
        at = 0
        old_read, new_read = StoredChecksums(self._old), StoredChecksums(self._new)
        with RowSpill(self._variable, self._how.scratch) as spill:
            for found in by_tasks or self._found_here(pool):
                old_read.add(found.old_read)
                new_read.add(found.new_read)
                hashes[at : at + len(found.hashes)] = found.hashes
                at += len(found.hashes)
                spill.add(found.ids, found.values)
                self._how.progress.advance(found.bytes_)
            if by_tasks is None:  # else checksums are compared after all tables
                new_read.check([self._name])
                if self._rows.known is None or not self._rows.is_old_as_known:
                    old_read.check([self._name])
                else:  # all rows that may differ are in blocks that were compared with their hashes
                    self._old.trust(self._old.stored[self._name].runs)
            return spill.rows(), hashes

    def _found_here(self, pool: Executor) -> Iterator[Found]:
        """Compare the table by threads of this process, and yield the results in the order of the rows.

        Rows in an object store are fetched first. While iterating, raises CheckpointError (and subclasses) if
        rows changed, are damaged or cannot be read, MappingError or NotFinite if a value does not fit the
        served dtype, DiskFull or PublishError if fetched rows cannot be kept.
        """
        rows, ahead = self._rows, _AHEAD * self._how.threads
        old, new = (state.stored[self._name] for state in (self._old, self._new))
        is_remote = old.is_remote or new.is_remote
        # Parts and columns share stored runs: range by range, each would fetch the same bytes again.
        if self.bytes_ < GAP_BYTES or not is_remote or not (old.has_own_runs and new.has_own_runs):
            new.fetch()
            if rows.known is None:  # else few old blocks are read: those whose hashes differ
                old.fetch()
            yield from _in_order(pool, rows.compare, rows.chunks(), ahead)
            return

        chunks = rows.chunks(max(PART_BYTES, _STORE_BYTES // self._how.threads))
        for found in _in_order(pool, self._compare_fetched, chunks, self._how.threads):
            yield from found

    def _compare_fetched(self, chunk: tuple[int, int]) -> list[Found]:
        """Fetch rows `start` to `stop` of `chunk`, whole blocks, into scratch files, and compare them.

        Return the results in order. The last result has the checksums of all bytes fetched. If hashes of the
        old rows are known, old rows are read without a file and without checksums. The files are removed at
        the end. Raises CheckpointError (and subclasses) if rows changed, are damaged or cannot be read,
        MappingError or NotFinite if a value does not fit the served dtype, DiskFull or PublishError if a
        scratch file cannot be written.
        """
        known, old = self._rows.known, None
        with ExitStack() as stack:
            new_state, new = stack.enter_context(self._fetched(self._new, chunk))
            old_state = self._old
            if known is None:
                old_state, old = stack.enter_context(self._fetched(self._old, chunk))
            rows = ComparedRows(
                old_state, new_state, self._variable, self._hasher, known, chunk, checksums=False
            )
            found = []
            # With known hashes the range is one chunk, so that few requests fetch the old rows.
            for part in rows.chunks() if old else (chunk,):
                found.append(rows.compare(part))
                for side in (old, new):
                    if side is not None:
                        side.read(*part)
            if not rows.is_old_as_known:
                self._rows.is_old_as_known = False
            old_read = () if old is None else old.ranges(self._old.stored[self._name], *chunk)
            new_read = new.ranges(self._new.stored[self._name], *chunk)
            return [*found[:-1], replace(found[-1], old_read=old_read, new_read=new_read)]

    @contextmanager
    def _fetched(
        self, state: LayeredState, chunk: tuple[int, int]
    ) -> Iterator[tuple[LayeredState, SideChecksums]]:
        """Fetch a range of one state's rows into a scratch file.

        Yield a state that reads them there, and the object that computes their checksums. The file is removed
        at the end of the context. Raises CheckpointChanged if the object is not as planned, CheckpointError
        if it cannot be read, DiskFull or PublishError if the file cannot be written.
        """
        name, reader = self._name, state.stored[self._name]
        side, paths = StoredSide.of(reader, *chunk, 0), {run.extent.shard: run.path for run in reader.runs}
        task = Task(name=name, inputs=tuple(self._planned(paths[shard]) for shard in side.shards))
        with task.files(list(side.ranges(*chunk)), self._how.scratch) as files:
            yield LayeredState({name: side.reader(name, files)}, state.layers), SideChecksums(side, files)


def _in_order(
    pool: Executor, work: Callable[[tuple[int, int]], T], chunks: Iterable[tuple[int, int]], ahead: int
) -> Iterator[T]:
    """Yield the results of `work` in the order of the chunks, with at most `ahead` pending in the pool.

    Waits for each result. At the end, or if the iterator is closed, pending ones are cancelled. An error of
    `work` is raised when the turn of its chunk comes.
    """
    pending: deque[Future[T]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(work, chunk))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
