"""Compare two states bit for bit: which rows of tables and which whole variables differ.

Tables stream in chunks of whole rows, several at a time; nothing but the changed rows is kept, and those
spill into a scratch file when they are many. Where hashes of the old rows are known, old bytes are read
only in the blocks whose hashes differ. Values are compared as bytes: NaN equals the same NaN, -0.0 is not
0.0.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field

from exporter.delta.format import Change, ChangeKind, Rows, Schema, ServedVariable
from exporter.delta.row_hashes import BlockHasher, HashIndex, block_rows
from exporter.delta.snapshot import Snapshot
from exporter.errors import CorruptFile
from exporter.progress import NoProgress, Progress
from exporter.wire.crc32c import combine, extend, mask

Array = np.ndarray[Any, Any]

CHUNK_BYTES = 4 << 20  # less, and two threads wait for one another more than they compare
SPILL_BYTES = 256 << 20
"""Changed rows of a table in memory before they go to the scratch file."""

_FEW = 8  # gathering single blocks costs several times what reading all in a row does
_AHEAD = 2  # chunks in work for each thread: enough to keep it busy, few enough to bound memory


class Compared(Struct, frozen=True):
    """The changes that lead from the old state to the new one, and the hashes of all new rows by table."""

    changes: dict[str, Change]
    hashes: dict[str, Array]
    bytes_: int


class Comparison(Struct, frozen=True):
    """How to compare: `known` are hashes of the old state; `scratch` is a directory for large results."""

    scratch: Path
    known: HashIndex | None = None
    hasher: BlockHasher = field(default_factory=BlockHasher.fresh)
    workers: int = 0
    progress: Progress = field(default_factory=NoProgress)


def diff(old: Snapshot, new: Snapshot, schema: Schema, how: Comparison) -> Compared:
    """What of `new` differs from `old`, for the variables of `schema`.

    The checksums of everything stored of `new` are compared on the way: a damaged row must not get a checksum
    that calls it right. So are those of `old`, of which a damaged row could hide a change; where hashes of
    its rows are known, they tell whether the blocks that are read are as they were.

    Raises:
        CorruptFile: one of them differs.
        CheckpointError: a file cannot be read, see errors.py.
        MappingError: a value does not fit the dtype it is served in.
        DiskFull, PublishError: the scratch file cannot be written.
    """
    hasher = how.known.hasher if how.known else how.hasher
    changes: dict[str, Change] = {}
    hashes: dict[str, Array] = {}
    total = 0
    with ThreadPoolExecutor(how.workers or len(os.sched_getaffinity(0)), "diff") as pool:
        for variable in schema.variables:
            if variable.kind is ChangeKind.DENSE:
                value = new.whole(variable.name)
                is_same = same_bits(old.whole(variable.name), value)
                change: Change | None = None if is_same else value
                size = value.size * (variable.dtype.itemsize or 0)
                how.progress.advance(size)
            else:
                job = _Table(old, new, variable, hasher, how)
                change, hashes[variable.name] = job.run(pool)
                size = job.row_bytes * variable.shape[0]
            total += size
            if change is not None:
                changes[variable.name] = change
    _complete(changes, new, schema)
    return Compared(changes, hashes, total)


def diff_lookups(old: Snapshot, new: Snapshot, schema: Schema) -> dict[str, Change]:
    """The contents of the lookup tables of `new` that differ from those of `old`, every checksum compared.

    Raises:
        CheckpointError: a file is damaged or cannot be read, see errors.py.
    """
    names = [half.name for pair in schema.lookups for half in pair]
    values = {name: new.whole(name) for name in names}
    changes: dict[str, Change] = {
        name: value for name, value in values.items() if not same_bits(old.whole(name), value)
    }
    _complete(changes, new, schema)
    return changes


def same_bits(a: Array, b: Array) -> bool:
    """True if two arrays of one dtype have one shape and hold the same bytes; strings count as strings."""
    if a.shape != b.shape:
        return False
    if a.dtype == object:
        return bool(np.array_equal(a, b))
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def differing_rows(old: Array, new: Array) -> Array:
    """The numbers, int64, of the rows whose bytes differ in two arrays [n, ...] of one shape."""
    a, b = _words(old), _words(new)
    unequal = a != b
    if not unequal.any():
        return np.empty(0, np.int64)
    return np.flatnonzero(unequal.any(axis=1))


def _complete(changes: dict[str, Change], new: Snapshot, schema: Schema) -> None:
    """Add the other half of each lookup table of which one half changed."""
    for pair in schema.lookups:
        if any(half.name in changes for half in pair):
            changes |= {half.name: new.whole(half.name) for half in pair if half.name not in changes}


class _Found(Struct, frozen=True):
    """The changed rows of one chunk, and the hashes of all its blocks."""

    ids: Array
    values: Array
    hashes: Array
    new_crc: int
    old_crc: int
    bytes_: int


class _Table:
    """The comparison of one table."""

    def __init__(
        self, old: Snapshot, new: Snapshot, variable: ServedVariable, hasher: BlockHasher, how: Comparison
    ) -> None:
        self._old, self._new, self._name = old, new, variable.name
        self._variable, self._hasher, self._how = variable, hasher, how
        self._rows = variable.shape[0]
        self.row_bytes = math.prod(variable.shape[1:]) * variable.dtype.numpy.itemsize
        self._block = block_rows(self.row_bytes)
        self._known = how.known.find(variable.name, self._rows, self.row_bytes) if how.known else None
        self._is_old_as_known = True

    def run(self, pool: ThreadPoolExecutor) -> tuple[Rows | None, Array]:
        """The changed rows, and the hashes of all."""
        hashes = np.empty(-(-self._rows // self._block), np.uint64)
        at = new_crc = old_crc = 0
        with RowSpill(self._variable, self._how.scratch) as spill:
            for found in _in_order(pool, self._compare, self._chunks()):
                new_crc = combine(new_crc, found.new_crc, found.bytes_)
                old_crc = combine(old_crc, found.old_crc, found.bytes_)
                hashes[at : at + len(found.hashes)] = found.hashes
                at += len(found.hashes)
                spill.add(found.ids, found.values)
                self._how.progress.advance(found.bytes_)
            self._check(self._new, new_crc)
            if self._known is None:
                self._check(self._old, old_crc)
            elif not self._is_old_as_known:
                self._old.check([self._name])
            else:  # all rows that may differ lie in blocks that were compared with their hashes
                self._old.trust(self._old.stored[self._name].runs)
            return spill.rows(), hashes

    def _check(self, state: Snapshot, crc: int) -> None:
        """Compare the checksum of what is stored of one side, given that of all rows in a row."""
        stored = state.stored[self._name]
        extent = stored.extent
        if extent is None:
            state.check([self._name])
        elif mask(crc) != extent.crc32c:
            raise CorruptFile(
                f"{stored.catalog.path_of(extent)} is damaged at {stored.tensor.name!r}: "
                f"its checksum is {mask(crc):08x}, expected {extent.crc32c:08x}",
                hint=state.hint,
            )
        else:
            state.note_checked(self._name)

    def _crc(self, state: Snapshot, start: int, stop: int) -> int:
        stored = state.stored[self._name]
        return 0 if stored.extent is None else extend(0, _bytes_of(stored.rows(start, stop)))

    def _chunks(self) -> Iterator[tuple[int, int]]:
        step = max(1, CHUNK_BYTES // max(1, self.row_bytes * self._block)) * self._block
        for start in range(0, self._rows, step):
            yield start, min(start + step, self._rows)

    def _compare(self, chunk: tuple[int, int]) -> _Found:
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
        new_crc = self._crc(self._new, start, stop)
        old_crc = self._crc(self._old, start, stop) if self._known is None else 0
        return _Found(local + start, np.array(new[local]), hashes, new_crc, old_crc, new.nbytes)

    def _compare_with_known(self, old: Array, blocks: Array, start: int) -> None:
        """See whether the old rows, those of these blocks of a chunk, have the hashes that are known.

        If not, they are damaged; or rows among them were held back, whose hashes are unknown.
        """
        if self._known is not None:
            known = self._known[blocks + start // self._block]
            if (self._hasher.hash_rows(old) != known).any():
                self._is_old_as_known = False

    def _suspects(self, start: int, hashes: Array) -> Array:
        """The blocks of a chunk that may differ."""
        if self._known is None:
            return np.arange(len(hashes))
        first = start // self._block
        return np.flatnonzero(hashes != self._known[first : first + len(hashes)])

    def _among(self, suspects: Array, new: Array, start: int) -> Array:
        """The rows that differ in these blocks of a chunk."""
        if not len(suspects):
            return np.empty(0, np.int64)
        rows = (suspects[:, np.newaxis] * self._block + np.arange(self._block)).reshape(-1)
        rows = rows[rows < len(new)]
        old = self._old.rows_at(self._name, rows + start)
        self._compare_with_known(old, suspects, start)
        return np.asarray(rows[differing_rows(old, new[rows])])


class RowSpill:
    """Rows of a table as they are found, in ascending order; on disk when they are many.

    As a context manager it closes its file, which has no name: the rows that it gave live as long as they do.
    """

    def __init__(self, variable: ServedVariable, scratch: Path, limit: int = SPILL_BYTES) -> None:
        self._variable, self._scratch, self._limit = variable, scratch, limit
        self._ids: list[Array] = []
        self._values: list[Array] = []
        self._in_memory = 0
        self._spilled = 0
        self._file: Any = None

    def __enter__(self) -> RowSpill:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, ids: Array, values: Array) -> None:
        """Keep more rows."""
        if not len(ids):
            return
        self._ids.append(ids)
        self._values.append(values)
        self._in_memory += values.nbytes
        if self._in_memory > self._limit:
            self._spill()

    def rows(self) -> Rows | None:
        """Everything that was added, None if nothing was."""
        if not self._ids:
            return None
        ids = np.concatenate(self._ids)
        if self._file is None:
            return Rows(ids, np.concatenate(self._values))
        self._spill()
        self._file.flush()
        shape = (len(ids), *self._variable.shape[1:])
        values = np.memmap(self._file, np.uint8, "r", shape=(self._spilled,))
        return Rows(ids, values.view(np.ndarray).view(self._variable.dtype.numpy).reshape(shape))

    def _spill(self) -> None:
        import tempfile

        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115  __exit__ closes it
        for values in self._values:
            self._file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            self._spilled += values.nbytes
        self._values, self._in_memory = [], 0


def _in_order(
    pool: ThreadPoolExecutor,
    work: Callable[[tuple[int, int]], _Found],
    chunks: Iterable[tuple[int, int]],
) -> Iterator[_Found]:
    """Results in the order of the chunks, a bounded number of them in work."""
    pending: deque[Future[_Found]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(work, chunk))
            if len(pending) > _AHEAD * pool._max_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _bytes_of(rows: Array) -> Array:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)


def _words(rows: Array) -> Array:
    """Rows as a matrix of the widest words that their bytes divide into."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), math.prod(rows.shape[1:])).view(np.uint8)
    word = next(size for size in (8, 4, 2, 1) if flat.shape[1] % size == 0)
    return flat.view(f"<u{word}") if flat.shape[1] else flat
