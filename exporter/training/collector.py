"""Collect what changed since the last durable increment, and write it into the next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.tensor_bundle import BundleWriter, memory_map, read_array
from exporter.delta.diff import differing_rows
from exporter.delta.format import ChangeKind, Rows, ServedVariable
from exporter.increments.increment import Changed, StoredIncrement, rows_of
from exporter.integer_sets import distinct
from exporter.training.access import CHUNK_BYTES, Access, PartAccess, access
from exporter.training.change_tracking import TrackingMode, VariablePart, VariableTracking
from exporter.training.recording import Recording, RowGroup

Array = np.ndarray[Any, Any]
Session = Any


class RowSource(Protocol):
    """Where values are read."""

    def rows(self, tracked: VariableTracking, ids: Array) -> Iterator[Array]:
        """Rows `ids` (ascending, of the whole variable) of a variable with parts of whole rows, in pieces."""

    def all_rows(self, tracked: VariableTracking) -> Iterator[tuple[int, Array]]:
        """All rows of such a variable in pieces, each with the number of its first row."""

    def wholes(self, tracked: Iterable[VariableTracking]) -> Iterator[tuple[VariableTracking, Array]]:
        """Variables as a whole, one after the other."""


class SessionSource(Struct, frozen=True):
    """The values of now."""

    session: Session
    accesses: Mapping[int, PartAccess]

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
        """See `RowSource`. Small ones are read in one call."""
        entries = list(tracked)
        small = [entry for entry in entries if entry.bytes_ * len(entries) <= CHUNK_BYTES]
        tensors = {entry.name: [self._access(part).whole for part in entry.parts] for entry in small}
        values = self.session.run(tensors)
        for entry in entries:
            found = values.get(entry.name)
            yield entry, _join(entry, found if found is not None else map(self._whole, entry.parts))

    def _whole(self, part: VariablePart) -> Array:
        pieces = [values for _, values in self._access(part).read_all(self.session)]
        return np.concatenate(pieces) if part.shape and pieces else pieces[0]

    def _access(self, part: VariablePart) -> PartAccess:
        return self.accesses[id(part)]


class CheckpointSource(Struct, frozen=True):
    """The values that a full checkpoint holds."""

    catalog: Catalog

    def rows(self, tracked: VariableTracking, ids: Array) -> Iterator[Array]:
        """See `RowSource`."""
        yield rows_of(self.catalog, self._stored(tracked), ids)

    def all_rows(self, tracked: VariableTracking) -> Iterator[tuple[int, Array]]:
        """See `RowSource`."""
        ref = self._stored(tracked)
        if ref.extent is not None:
            yield 0, memory_map(self.catalog, ref)
        for part in sorted(ref.slices, key=lambda part: part.spec.starts):
            yield part.spec.starts[0], memory_map(self.catalog, ref, part)

    def wholes(self, tracked: Iterable[VariableTracking]) -> Iterator[tuple[VariableTracking, Array]]:
        """See `RowSource`."""
        for entry in tracked:
            yield entry, read_array(self.catalog, self._stored(entry))

    def _stored(self, entry: VariableTracking) -> TensorRef:
        """The tensor; of one that is declared larger than it is (`change_tracking`), its part."""
        ref = self.catalog.tensors[entry.name]
        if ref.shape == entry.shape:
            return ref
        part = next(part for part in ref.slices if part.spec.lengths == entry.shape)
        return TensorRef(ref.name, ref.dtype, entry.shape, part.extent)


class Collector:
    """The changes since the last call of `commit` or `forget`.

    `accesses` are by the id of a part, `source` gives the values of now.
    Rows that were collected stay pending until `commit`; what is compared is compared with what was written
    last, or counts as changed as a whole if that is not known.
    """

    def __init__(
        self,
        tracked: tuple[VariableTracking, ...],
        groups: tuple[RowGroup, ...],
        accesses: Mapping[int, Access],
        source: Callable[[Session], RowSource],
    ) -> None:
        self.tracked = tracked
        self.accesses = accesses
        self.source = source
        self._groups = groups
        self._pending: dict[int, Array] = {}
        self._written: dict[str, Array] = {}
        self._digests: dict[str, bytes] = {}
        self._new_digests: dict[str, bytes] = {}
        self.forget()

    @classmethod
    def of_graph(cls, tracked: tuple[VariableTracking, ...], recording: Recording) -> Collector:
        """A collector that reads and writes the current default graph's variables through a session."""
        accesses = {id(part): access(part) for entry in tracked for part in entry.parts}
        return cls(tracked, recording.groups, accesses, lambda session: SessionSource(session, accesses))

    def forget(self) -> None:
        """Begin to count changes from another state: everything that is compared counts as changed."""
        self._pending = dict.fromkeys(range(len(self._groups)), np.empty(0, np.int64))
        self._written.clear()
        self._digests.clear()

    def collect(self, session: Session) -> None:
        """Take over the touched rows of every group; see the proof in `recording`."""
        found = session.run([group.collect for group in self._groups]) if self._groups else []
        for index, rows in enumerate(found):
            self._pending[index] = distinct(np.concatenate([self._pending[index], rows]))

    def touch(self, stored: StoredIncrement) -> None:
        """Count the rows that an increment holds as touched."""
        by_name = {entry.name: entry for entry in self._by(TrackingMode.TOUCHED)}
        for changed, change in stored.changes():
            entry = by_name.get(changed.variable.name)
            if entry is None or not isinstance(change, Rows):
                continue
            for part in entry.parts:
                rows = _inside(part, change.ids) - part.offset
                for index in self._groups_of(part):
                    self._pending[index] = distinct(np.concatenate([self._pending[index], rows]))

    @property
    def knows_more(self) -> bool:
        """False if no row was touched and nothing was written since `forget`: nothing to compare with."""
        return bool(self._digests) or any(len(rows) for rows in self._pending.values())

    def write(self, writer: BundleWriter, source: RowSource) -> tuple[Changed, ...]:
        """Write what changed, by name; call `commit` when it is durable, `abandon` when it is not."""
        changed = [
            *(self._touched(writer, source, entry) for entry in self._by(TrackingMode.TOUCHED)),
            *(self._compared(writer, source, entry) for entry in self._by(TrackingMode.COMPARED)),
            *self._wholes(writer, source),
        ]
        return tuple(sorted(filter(None, changed), key=lambda entry: entry.variable.name))

    def commit(self) -> None:
        """Note that what `write` wrote is durable."""
        for index in self._pending:
            self._pending[index] = np.empty(0, np.int64)
        self._digests |= self._new_digests
        self._new_digests.clear()

    def abandon(self) -> None:
        """Note that what `write` wrote is lost, so that it is written again."""
        self._written.clear()
        self._new_digests.clear()

    def _by(self, mode: TrackingMode) -> list[VariableTracking]:
        return [entry for entry in self.tracked if entry.mode is mode]

    def _touched(self, writer: BundleWriter, source: RowSource, entry: VariableTracking) -> Changed | None:
        ids = [rows + part.offset for part in entry.parts for rows in self._rows_of(part)]
        return _write_rows(writer, entry, np.concatenate(ids), lambda rows: source.rows(entry, rows))

    def _rows_of(self, part: VariablePart) -> Iterator[Array]:
        return (self._pending[index] for index in self._groups_of(part))

    def _groups_of(self, part: VariablePart) -> Iterator[int]:
        for index, group in enumerate(self._groups):
            if any(member is part for member in group.parts):
                yield index

    def _compared(self, writer: BundleWriter, source: RowSource, entry: VariableTracking) -> Changed | None:
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
        rows = np.concatenate(ids) if ids else np.empty(0, np.int64)
        return _write_rows(writer, entry, rows.astype(np.int64), lambda wanted: _pieces(known, wanted))

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
