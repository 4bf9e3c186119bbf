"""Collect the changes since the last durable increment, and write them into the next one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.embedding_variables import KEYS, ROWS, VALUES, embedding_variables
from exporter.checkpoint.tensor_bundle import BundleWriter, memory_map, read_array
from exporter.delta.compare_rows import differing_rows
from exporter.delta.format import ChangeKind, Rows, ServedVariable
from exporter.increments.changed_tables import ChangedTable
from exporter.increments.increment import Changed, Contents, StoredIncrement, rows_of
from exporter.tables.integer_sets import among, distinct
from exporter.training.access import CHUNK_BYTES, Access, KeyedAccess, PartAccess, Recording, RowGroup, access
from exporter.training.change_tracking import TrackingMode, VariablePart, VariableTracking

Array = np.ndarray[Any, Any]
Session = Any


class RowSource(Protocol):
    """A place that values are read from: the session, a full checkpoint, or eager variables."""

    def rows(self, tracked: VariableTracking, ids: Array) -> Iterator[Array]:
        """Rows `ids` (ascending, of the whole variable) of a variable with parts of whole rows, in pieces."""

    def all_rows(self, tracked: VariableTracking) -> Iterator[tuple[int, Array]]:
        """All rows of such a variable in pieces, each with the number of its first row."""

    def wholes(self, tracked: Iterable[VariableTracking]) -> Iterator[tuple[VariableTracking, Array]]:
        """Variables as a whole, one after the other."""

    def keyed(self, tracked: VariableTracking, ids: Array) -> tuple[Array, Array]:
        """Those of a table's rows `ids` that are in use, and their keys, which are distinct."""


class SessionSource(Struct, frozen=True):
    """The present values, read through a session."""

    session: Session
    accesses: Mapping[int, PartAccess]
    tables: Mapping[str, KeyedAccess] = MappingProxyType({})

    def rows(self, tracked: VariableTracking, ids: Array) -> Iterator[Array]:
        """See `RowSource`."""
        for part in tracked.parts:
            yield from self._access(part).read(self.session, _inside(part, ids) - part.offset)

    def all_rows(self, tracked: VariableTracking) -> Iterator[tuple[int, Array]]:
        """See `RowSource`."""
        for part in tracked.parts:
            for start, values in self._access(part).read_all(self.session):
                yield part.offset + start, values

    def wholes(self, tracked: Iterable[VariableTracking]) -> Iterator[tuple[VariableTracking, Array]]:
        """See `RowSource`. Small variables are all read in one call."""
        entries = list(tracked)
        small = [entry for entry in entries if entry.bytes_ * len(entries) <= CHUNK_BYTES]
        tensors = {entry.name: [self._access(part).whole for part in entry.parts] for entry in small}
        values = self.session.run(tensors)
        for entry in entries:
            found = values.get(entry.name)
            yield entry, _join(entry, found if found is not None else map(self._whole, entry.parts))

    def keyed(self, tracked: VariableTracking, ids: Array) -> tuple[Array, Array]:
        """See `RowSource`."""
        return self.tables[tracked.name].find(self.session, ids)

    def _whole(self, part: VariablePart) -> Array:
        pieces = [values for _, values in self._access(part).read_all(self.session)]
        return np.concatenate(pieces) if part.shape and pieces else pieces[0]

    def _access(self, part: VariablePart) -> PartAccess:
        return self.accesses[id(part)]


class CheckpointSource(Struct, frozen=True):
    """The values of a full checkpoint."""

    catalog: Catalog

    def rows(self, tracked: VariableTracking, ids: Array) -> Iterator[Array]:
        """See `RowSource`. A checkpoint holds a table's rows that are in use, and no others."""
        if tracked.is_keyed:
            ids = np.searchsorted(self._table(tracked, ROWS), ids)
        yield rows_of(self.catalog, self._stored(tracked), ids)

    def all_rows(self, tracked: VariableTracking) -> Iterator[tuple[int, Array]]:
        """See `RowSource`. Unused rows of a table are 0."""
        ref = self._stored(tracked)
        if tracked.is_keyed:
            whole = np.zeros(tracked.shape, tracked.dtype.numpy)
            whole[self._table(tracked, ROWS)] = memory_map(self.catalog, ref)
            yield 0, whole
            return
        if ref.extent is not None:
            yield 0, memory_map(self.catalog, ref)
        for part in sorted(ref.slices, key=lambda part: part.spec.starts):
            yield part.spec.starts[0], memory_map(self.catalog, ref, part)

    def wholes(self, tracked: Iterable[VariableTracking]) -> Iterator[tuple[VariableTracking, Array]]:
        """See `RowSource`."""
        for entry in tracked:
            yield entry, read_array(self.catalog, self._stored(entry))

    def keyed(self, tracked: VariableTracking, ids: Array) -> tuple[Array, Array]:
        """See `RowSource`."""
        rows = self._table(tracked, ROWS)
        found = ids[among(ids, rows)]
        return found, self._table(tracked, KEYS)[np.searchsorted(rows, found)]

    def _table(self, entry: VariableTracking, part: str) -> Array:
        return read_array(self.catalog, self._part(entry, part))

    def _part(self, entry: VariableTracking, part: str) -> TensorRef:
        """A tensor of a table; Keras' checkpoints name it by the path to the table's object."""
        keys = embedding_variables(self.catalog)[entry.name].parts[0].keys.name
        return self.catalog.tensors[keys.removesuffix(KEYS) + part]

    def _stored(self, entry: VariableTracking) -> TensorRef:
        """The tensor; a part of it if the checkpoint declares it larger than it is (`change_tracking`)."""
        if entry.is_keyed:
            return self._part(entry, VALUES)
        ref = self.catalog.tensors[entry.name]
        if ref.shape == entry.shape:
            return ref
        part = next(part for part in ref.slices if part.spec.lengths == entry.shape)
        return TensorRef(ref.name, ref.dtype, entry.shape, part.extent)


class Collector:
    """The changes since the last call of `commit` or `forget`.

    `accesses` has the id() of a part as key, `tables` the name of a table by keys; `source` gives the present
    values. Rows that were collected stay pending until `commit`. A compared variable is compared with the
    values that were written last; if there are none, all of it counts as changed.
    """

    def __init__(
        self,
        tracked: tuple[VariableTracking, ...],
        groups: tuple[RowGroup, ...],
        accesses: Mapping[int, Access],
        source: Callable[[Session], RowSource],
        tables: Mapping[str, KeyedAccess] = MappingProxyType({}),
    ) -> None:
        self.tracked = tracked
        self.accesses = accesses
        self.tables = tables
        self.source = source
        self._groups = groups
        self._pending: dict[int, Array] = {}
        self._given: dict[str, Array] = {}
        self._removed: dict[str, Array] = {}
        self._written: dict[str, Array] = {}
        self._digests: dict[str, bytes] = {}
        self._new_digests: dict[str, bytes] = {}
        self.forget()

    @classmethod
    def of_graph(
        cls,
        tracked: tuple[VariableTracking, ...],
        recording: Recording,
        tables: Mapping[str, KeyedAccess],
    ) -> Collector:
        """A collector that reads and writes the current default graph's variables through a session."""
        accesses = {id(part): access(part) for entry in tracked for part in entry.parts}

        def source(session: Session) -> SessionSource:
            return SessionSource(session, accesses, tables)

        return cls(tracked, recording.groups, accesses, source, tables)

    def forget(self) -> None:
        """Count changes from another state on. Everything that is compared counts as changed."""
        self._take_none()
        self._written.clear()
        self._digests.clear()

    def remember(self, session: Session) -> None:
        """Compare with the present values from now on: nothing has changed yet.

        For a process that alone writes the variables; others may have written some of them already.
        """
        for entry in self.tracked:
            if entry.mode is TrackingMode.COMPARED:
                self._moved(self.source(session), entry)

    def collect(self, session: Session) -> None:
        """Take the touched rows of every group, and the given rows and removed keys of every table."""
        # The order of these calls, and that values are read after them, is what the proofs in `access` rest
        # on: flags and given rows, then removed keys, then the rows of those keys.
        if self._groups:
            found = session.run([group.collect for group in self._groups])
            _add_all(self._pending, dict(enumerate(found)))
        for name, table in self.tables.items():
            _add_all(self._given, {name: table.take_given(session)})
            _add_all(self._removed, {name: table.take_removed(session)})
            _add_all(self._given, {name: table.rows_of(session, self._removed[name])})

    def touch(self, stored: StoredIncrement) -> None:
        """Count the rows that an increment holds as touched."""
        by_name = {entry.name: entry for entry in self._by(TrackingMode.TOUCHED)}
        for changed, change in stored.changes():
            entry = by_name.get(changed.variable.name)
            if entry is None or not isinstance(change, Rows):
                continue
            for part in entry.parts:
                rows = _inside(part, change.ids) - part.offset
                _add_all(self._pending, dict.fromkeys(self._groups_of(part), rows))
        for table, found in stored.tables():
            _add_all(self._given, {table.name: found.ids})
            _add_all(self._removed, {table.name: found.removed})

    @property
    def knows_more(self) -> bool:
        """True if a row was touched, or something was written since `forget` that can be compared with."""
        pending = (*self._pending.values(), *self._given.values(), *self._removed.values())
        return bool(self._digests) or any(len(rows) for rows in pending)

    def write(self, writer: BundleWriter, source: RowSource) -> Contents:
        """Write the changes, by name. Call `commit` once they are durable, `abandon` if they are lost."""
        changed = [
            *(self._touched(writer, source, entry) for entry in self._by(TrackingMode.TOUCHED)),
            *(self._compared(writer, source, entry) for entry in self._by(TrackingMode.COMPARED)),
            *self._wholes(writer, source),
        ]
        tables = [self._keyed(writer, source, entry) for entry in self.tracked if entry.is_keyed]
        return Contents(
            tuple(sorted(filter(None, changed), key=lambda entry: entry.variable.name)),
            tuple(filter(None, tables)),
        )

    def commit(self) -> None:
        """Note that the changes that `write` wrote are durable."""
        self._take_none()
        self._digests |= self._new_digests
        self._new_digests.clear()

    def abandon(self) -> None:
        """Note that the changes that `write` wrote are lost, so that they are written again."""
        self._written.clear()
        self._new_digests.clear()

    def _by(self, mode: TrackingMode) -> list[VariableTracking]:
        return [entry for entry in self.tracked if entry.mode is mode and not entry.is_keyed]

    def _take_none(self) -> None:
        none = np.empty(0, np.int64)
        self._pending = dict.fromkeys(range(len(self._groups)), none)
        self._given, self._removed = dict.fromkeys(self.tables, none), dict.fromkeys(self.tables, none)

    def _touched(self, writer: BundleWriter, source: RowSource, entry: VariableTracking) -> Changed | None:
        return _write_rows(writer, entry, self._ids(entry), lambda rows: source.rows(entry, rows))

    def _ids(self, entry: VariableTracking) -> Array:
        ids = [rows + part.offset for part in entry.parts for rows in self._rows_of(part)]
        return np.concatenate([np.empty(0, np.int64), *ids])

    def _keyed(self, writer: BundleWriter, source: RowSource, entry: VariableTracking) -> ChangedTable | None:
        is_compared = entry.mode is TrackingMode.COMPARED
        wrote = self._moved(source, entry)[0] if is_compared else self._ids(entry)
        ids = distinct(np.concatenate([wrote, self._given[entry.name]]))
        ids, keys = source.keyed(entry, ids) if len(ids) else (ids, ids)
        removed = self._removed[entry.name]
        if not len(ids) and not len(removed):
            return None
        capacity, dim = entry.shape
        table = ChangedTable(entry.name, entry.dtype.label, dim, capacity, len(ids), len(removed))
        ids_key, keys_key, values_key, removed_key = table.keys
        writer.add(ids_key, ids)
        writer.add(keys_key, keys)
        writer.add_chunks(values_key, entry.dtype, (len(ids), dim), source.rows(entry, ids))
        writer.add(removed_key, removed)
        return table

    def _rows_of(self, part: VariablePart) -> Iterator[Array]:
        return (self._pending[index] for index in self._groups_of(part))

    def _groups_of(self, part: VariablePart) -> Iterator[int]:
        for index, group in enumerate(self._groups):
            if any(member is part for member in group.parts):
                yield index

    def _compared(self, writer: BundleWriter, source: RowSource, entry: VariableTracking) -> Changed | None:
        rows, known = self._moved(source, entry)
        return _write_rows(writer, entry, rows, lambda wanted: _pieces(known, wanted))

    def _moved(self, source: RowSource, entry: VariableTracking) -> tuple[Array, Array]:
        """The rows that differ from those written last, and the present values of all rows."""
        known = self._written.get(entry.name)
        if known is None:
            known = self._written[entry.name] = np.empty(entry.shape, entry.dtype.numpy)
            is_new = True
        else:
            is_new = False
        ids = []
        for start, values in source.all_rows(entry):
            piece = known[start : start + len(values)]
            moved = np.arange(len(values)) if is_new else differing_rows(piece, values)
            piece[moved] = values[moved]
            ids.append(moved + start)
        return np.concatenate([np.empty(0, np.int64), *ids]), known

    def _wholes(self, writer: BundleWriter, source: RowSource) -> Iterator[Changed | None]:
        for entry, value in source.wholes(self._by(TrackingMode.WHOLE)):
            value = np.ascontiguousarray(value, entry.dtype.numpy).reshape(entry.shape)
            digest = hashlib.blake2b(value.reshape(-1).view(np.uint8).data, digest_size=16).digest()
            if self._digests.get(entry.name) == digest:
                continue
            self._new_digests[entry.name] = digest
            variable = ServedVariable(entry.name, entry.dtype, entry.shape, ChangeKind.DENSE)
            writer.add(variable.keys[0], value[np.newaxis, ...])
            yield Changed(variable, 1)


def _write_rows(writer: BundleWriter, entry: VariableTracking, ids: Array, values: Any) -> Changed | None:
    if not len(ids):
        return None
    variable = ServedVariable(entry.name, entry.dtype, entry.shape, ChangeKind.TABLE)
    ids_key, values_key = variable.keys
    writer.add(ids_key, ids)
    writer.add_chunks(values_key, entry.dtype, (len(ids), *entry.shape[1:]), values(ids))
    return Changed(variable, len(ids))


def _add_all(pending: dict[Any, Array], found: Mapping[Any, Array]) -> None:
    """Add integers to sorted sets of integers, by key."""
    for key, values in found.items():
        pending[key] = distinct(np.concatenate([pending[key], values]))


def _inside(part: VariablePart, ids: Array) -> Array:
    start, stop = np.searchsorted(ids, [part.offset, part.offset + part.rows])
    return ids[start:stop]


def _pieces(values: Array, ids: Array) -> Iterator[Array]:
    row = max(1, values[:1].nbytes)
    step = max(1, CHUNK_BYTES // row)
    for start in range(0, len(ids), step):
        yield values[ids[start : start + step]]


def _join(entry: VariableTracking, values: Iterable[Array]) -> Array:
    parts = list(values)
    if len(parts) == 1:
        return np.asarray(parts[0])
    whole = np.empty(entry.shape, entry.dtype.numpy)
    for part, value in zip(entry.parts, parts, strict=True):
        whole[tuple(slice(s, s + n) for s, n in zip(part.starts, part.shape, strict=True))] = value
    return whole
