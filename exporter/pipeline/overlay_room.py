"""Check that the rows that a log has changed since its base fit into the overlays of mapped tables.

A server keeps a changed row of a mapped table in an overlay of bounded size (`exporter.subgraph.overlay`),
and refuses a delta for which there is no room. So the exporter records, for each such table, the rows that
deltas of the log have changed. A server that began with the base has used no more places.

The record is a cache in the log's directory. If it is lost, the row numbers in the deltas from the base to
the newest position give the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec import Struct

from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.delta.format import Schema, ServedVariable
from exporter.errors import CheckpointError, OverlayFull
from exporter.graph.inference_graph import GraphVariable
from exporter.mapping.build import VariableMapping
from exporter.options import ExportRequest
from exporter.publish.delta_log import DeltaLog
from exporter.publish.manifest import MappedRecord
from exporter.storage.files import make_directories
from exporter.storage.layout import CACHES_DIRECTORY, OVERLAID_PREFIX
from exporter.tables.integer_sets import among
from exporter.wire.dtypes import Array, DType

_MOST_ROWS = (1 << 30) - 1
"""A slot is an int32, place 0 is never used, and a row has two places."""
_USUAL_SHARE, _LARGE_SHARE, _LARGE_BYTES = 0.25, 0.125, 8 << 30
"""Memory is used by rows that change, and twice by rows that change twice. So a host with memory only for the
mapped model needs a bound; with a quarter of the rows, lookups of many ids take 1.6 times as long. For a
large table it is an eighth: Linux refuses a server more address space at once than the machine has memory,
and both places of all rows are one tensor.
"""


def room_for(table: GraphVariable | ServedVariable, asked: int | None) -> int:
    """Return the number of changed rows of a table that fit in its overlay: at most the table's rows.

    `asked` is `--overlay-rows`; for None it is a quarter of the rows, or an eighth of a table above 8 GiB.
    """
    rows, size = table.shape[0], math.prod(table.shape) * (table.dtype.itemsize or 1)
    usual = math.ceil(rows * (_USUAL_SHARE if size <= _LARGE_BYTES else _LARGE_SHARE))
    return min(rows, usual if asked is None else asked, _MOST_ROWS)


def room_of_mapped(mapping: VariableMapping, request: ExportRequest) -> dict[str, int]:
    """Return the number of changed rows that fit in its overlay, by the name of each mapped variable's node.

    {} for a plain version, which takes no deltas.
    """
    if not request.updates:
        return {}
    mapped = (source for source in mapping.sources if source.is_mapped)
    return {
        variable.node: room_for(variable, request.overlay_rows)
        for source in mapped
        for variable in source.variables
    }


def asked_room(schema: Schema, record: MappedRecord) -> int | None:
    """Return the `--overlay-rows` that gives overlays the same room as a base has; None for the usual room.

    `schema` and `record` (of mapped tables) are the base's. The option's value is not recorded: the result is
    the largest room of a table.
    """
    mapped = {variable.name: variable for variable in schema.variables if variable.is_table}
    rooms = {table.name: table.overlay_rows for table in record.tables}
    if all(room == room_for(mapped[name], None) for name, room in rooms.items()):
        return None
    return max(room for room in rooms.values() if room is not None)


class OverlaidTable(Struct, frozen=True):
    """A mapped table of a base: the number of its changed rows, and the number that fit."""

    name: str
    rows: int
    capacity: int


class OverlaidRows(Struct, frozen=True):
    """The rows that a log has changed since its base.

    For each table `found` has their numbers, int64 [n], increasing; or, where these would be larger, one bit
    per row, uint8 [rows / 8], the lowest one first. So the cost depends on the changes, not on the table: for
    250 M rows the bits are 30 MB, which take 0.11 s per delta to read, count and write; the numbers of
    1,000,000 changed rows take 0.01 s.
    """

    room: Mapping[str, int]
    rows: Mapping[str, int]
    found: dict[str, Array]

    @classmethod
    def of(cls, log: DeltaLog) -> OverlaidRows:
        """Read the rows of mapped tables that the log's deltas have changed; none if the base maps no tables.

        They are read from a cache, else from the deltas. Raises CheckpointError or VerificationError if a
        delta is damaged; DeltaGap, StaleDelta, ForeignLineage or SchemaChanged if the deltas do not connect.
        """
        record = log.base.manifest.mapped
        room = {t.name: t.overlay_rows for t in record.tables if t.overlay_rows is not None} if record else {}
        rows = {each.name: each.shape[0] for each in log.schema.variables if each.name in room}
        if not room:
            return cls({}, {}, {})
        known = _load(_prefix(log, log.at.position, log.newest.manifest.state_id), rows)
        if known is not None:
            return cls(room, rows, known)
        found = cls(room, rows, {name: np.empty(0, np.int64) for name in room})
        for delta in log.chain(log.base.at.position, log.at.position):
            found.add(log.row_numbers(delta, room.keys()))
        return found

    @property
    def tables(self) -> tuple[OverlaidTable, ...]:
        """The mapped tables, each with the number of its changed rows and the number that its overlay holds.

        Rows count as changed if a delta since the log's newest base has them.
        """
        return tuple(OverlaidTable(name, _count(self.found[name]), room) for name, room in self.room.items())

    def add(self, changed: Mapping[str, Array]) -> None:
        """Add to `found` the rows that a delta changes: `changed` has increasing row numbers by table name.

        Tables that are not mapped are ignored; rows that are in `found` already count once.
        """
        for name, found in self.found.items():
            if len(ids := changed.get(name, _NONE)):
                self.found[name] = _with(found, ids, self.rows[name])

    def require_room(self) -> None:
        """Raise OverlayFull if more rows of a table have changed than its overlay in servers has room for."""
        for table in self.tables:
            if table.rows > table.capacity:
                raise OverlayFull(
                    f"the overlay of table {table.name!r} is full: {table.rows:,} rows have changed since "
                    f"the base, it has room for {table.capacity:,}"
                )

    def save(self, log: DeltaLog, position: int, state: str) -> None:
        """Write the rows to the cache beside the log, for this position and state id.

        Records of other positions are removed. Nothing is done if no table is mapped. Raises OSError or
        PublishError if the cache cannot be written.
        """
        if not self.found:
            return
        prefix = _prefix(log, position, state)
        make_directories(prefix.parent)
        with BundleWriter(prefix) as writer:
            for name, found in self.found.items():
                writer.add(name, found)
        for path in prefix.parent.glob(f"{OVERLAID_PREFIX}*"):
            if path.name.partition(".")[0] != prefix.name:
                path.unlink(missing_ok=True)


def _prefix(log: DeltaLog, position: int, state: str) -> Path:
    """Return the prefix of the cache's bundle for a position of the log and the id of its state."""
    base = log.base.at.position
    return log.path / CACHES_DIRECTORY / f"{OVERLAID_PREFIX}{base}-{position}-{state}"


def _load(prefix: Path, rows: Mapping[str, int]) -> dict[str, Array] | None:
    """Read the changed rows that `save` kept at `prefix`, by table; `rows` has the tables' numbers of rows.

    None if the record is absent, incomplete or damaged, or of tables of another size.
    """
    with suppress(CheckpointError):
        catalog, found = read_catalog(prefix), {}
        for name, count in rows.items():
            tensor = catalog.tensors.get(name)
            kinds = {DType.UINT8: (_bytes(count),), DType.INT64: tensor.shape if tensor is not None else ()}
            if tensor is None or tensor.shape != kinds.get(tensor.dtype):
                return None
            found[name] = read_array(catalog, tensor)
        return found
    return None


_NONE = np.empty(0, np.int64)


def _bytes(rows: int) -> int:
    """Return the number of bytes that hold one bit for each of `rows` rows."""
    return -(-rows // 8)


def _with(found: Array, ids: Array, rows: int) -> Array:
    """Return the changed rows `found` with the row numbers `ids`, which increase, added.

    `rows` is the table's number of rows. Row numbers are copied; bits are set in `found` itself. Numbers
    become bits (uint8) once these take fewer bytes.
    """
    if found.dtype != np.uint8:
        new = ids[~among(ids, found)]
        if (len(found) + len(new)) * ids.itemsize <= _bytes(rows):
            return np.insert(found, np.searchsorted(found, new), new)
        bits = np.zeros(_bytes(rows), np.uint8)
        _set(bits, found)
        found = bits
    _set(found, ids)
    return found


def _set(bits: Array, ids: Array) -> None:
    """Set the bits of rows `ids`, which increase, in `bits`: of row `id`, bit `id & 7` of byte `id >> 3`."""
    at, masks = ids >> 3, np.left_shift(1, ids & 7).astype(np.uint8)
    first = np.flatnonzero(np.diff(at, prepend=-1))  # numbers of one byte are neighbours
    if len(first):
        # Each byte once: of an index that occurs twice, numpy's `|=` keeps only the last value.
        bits[at[first]] |= np.bitwise_or.reduceat(masks, first)


# numpy before 2.0 has no `bitwise_count`
_ONES = np.array([value.bit_count() for value in range(256)], np.uint8)
_BLOCK_BYTES = 1 << 20


def _count(found: Array) -> int:
    """Return the number of changed rows, given as row numbers or as one bit per row (uint8)."""
    if found.dtype != np.uint8:
        return len(found)
    blocks = (found[start : start + _BLOCK_BYTES] for start in range(0, len(found), _BLOCK_BYTES))
    return sum(int(_ONES[block].sum(dtype=np.int64)) for block in blocks)
