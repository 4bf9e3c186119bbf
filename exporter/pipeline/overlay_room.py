"""Whether the rows that a log has changed since its base have room beside the base's mapped tables.

A server keeps a changed row of a mapped table in an overlay of bounded size (`exporter.subgraph.overlay`),
and refuses a delta for which there is no room. So the exporter counts: of each such table it keeps one bit a
row, set if a delta of the log has changed the row. A server that began with the base has used no more places.

The bits are a cache in the log's directory. If it is lost, the row numbers of the deltas that lead from the
base to the newest position tell the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec import Struct

from exporter.checkpoint.tensor_bundle import BundleWriter, check_tensor, read_array, read_catalog
from exporter.delta.format import Change, Rows, Schema
from exporter.delta.snapshot import Array
from exporter.errors import CheckpointError, OverlayFull
from exporter.publish.delta_log import DeltaLog
from exporter.publish.manifest import MappedRecord
from exporter.storage.files import make_directories
from exporter.storage.layout import CACHES_DIRECTORY, OVERLAID_PREFIX

_MOST_PLACES = (1 << 31) - 2
"""A slot is an int32, and place 0 is never used."""
_USUAL_SHARE = 0.25
"""Memory is taken by the rows that change. So a bound is what a host needs that has room for the mapped model
alone; with a quarter of the rows, lookups of many ids take 1.6 times as long.
"""


def room_for(rows: int, asked: int | None) -> int:
    """For how many changed rows of a table there is room; `asked` is what `--overlay-rows` says."""
    return min(rows, math.ceil(rows * _USUAL_SHARE) if asked is None else asked, _MOST_PLACES)


def asked_room(schema: Schema, record: MappedRecord) -> int | None:
    """What `--overlay-rows` said when a base was made."""
    rows = {variable.name: variable.shape[0] for variable in schema.variables if variable.is_table}
    rooms = {table.name: table.overlay_rows for table in record.tables}
    if all(room == room_for(rows[name], None) for name, room in rooms.items()):
        return None
    return max(room for room in rooms.values() if room is not None)


class OverlaidTable(Struct, frozen=True):
    """A mapped table of a base: how many changed rows there are, and for how many there is room."""

    name: str
    rows: int
    capacity: int


class OverlaidRows(Struct, frozen=True):
    """The rows that a log has changed since its base: for each table one bit a row, the lowest one first."""

    room: Mapping[str, int]
    bits: Mapping[str, Array]

    @classmethod
    def of(cls, log: DeltaLog) -> OverlaidRows:
        """Those of the deltas so far; nothing if the base maps no tables.

        Raises:
            CheckpointError, PositionError: the deltas that lead to the newest position cannot be read.
        """
        record = log.base.manifest.mapped
        room = {t.name: t.overlay_rows for t in record.tables if t.overlay_rows is not None} if record else {}
        if not room:
            return cls({}, {})
        bits = _load(_prefix(log, log.at.position, log.newest.manifest.state_id), log, room)
        if bits is not None:
            return cls(room, bits)
        shapes = {variable.name: variable.shape for variable in log.schema.variables}
        found = cls(room, {name: np.zeros(-(-shapes[name][0] // 8), np.uint8) for name in room})
        for delta in log.chain(log.base.at.position, log.at.position):
            found.add(log.open(delta, only=room.keys()).changes)
        return found

    @property
    def tables(self) -> tuple[OverlaidTable, ...]:
        """How full the overlays of servers are at most."""
        return tuple(OverlaidTable(name, _count(self.bits[name]), room) for name, room in self.room.items())

    def add(self, changes: Mapping[str, Change]) -> None:
        """Set the bits of what a delta changes."""
        for name, bits in self.bits.items():
            change = changes.get(name)
            if isinstance(change, Rows) and len(change.ids):
                at, masks = change.ids >> 3, np.left_shift(1, change.ids & 7).astype(np.uint8)
                # Ids increase, so those of a byte are neighbours.
                first = np.flatnonzero(np.diff(at, prepend=-1))
                bits[at[first]] |= np.bitwise_or.reduceat(masks, first)

    def require_room(self) -> None:
        """Refuse a delta that servers would refuse.

        Raises:
            OverlayFull: more rows of a table have changed than there is room for.
        """
        for table in self.tables:
            if table.rows > table.capacity:
                raise OverlayFull(
                    f"the overlay of table {table.name!r} is full: {table.rows:,} rows have changed since "
                    f"the base, it has room for {table.capacity:,}"
                )

    def save(self, log: DeltaLog, position: int, state: str) -> None:
        """Keep the bits for the delta after the one that led to a position.

        Raises:
            OSError, PublishError: they cannot be written.
        """
        if not self.bits:
            return
        prefix = _prefix(log, position, state)
        make_directories(prefix.parent)
        with BundleWriter(prefix) as writer:
            for name, bits in self.bits.items():
                writer.add(name, bits)
        for path in prefix.parent.glob(f"{OVERLAID_PREFIX}*"):
            if path.name.partition(".")[0] != prefix.name:
                path.unlink(missing_ok=True)


def _prefix(log: DeltaLog, position: int, state: str) -> Path:
    base = log.base.at.position
    return log.path / CACHES_DIRECTORY / f"{OVERLAID_PREFIX}{base}-{position}-{state}"


def _load(prefix: Path, log: DeltaLog, room: Mapping[str, int]) -> dict[str, Array] | None:
    """The bits that `save` kept, None if they are not whole."""
    shapes = {variable.name: variable.shape for variable in log.schema.variables}
    with suppress(CheckpointError):
        catalog, found = read_catalog(prefix), {}
        for name in room:
            tensor = catalog.tensors.get(name)
            if tensor is None or tensor.shape != (-(-shapes[name][0] // 8),) or tensor.dtype.itemsize != 1:
                return None
            check_tensor(catalog, tensor)
            found[name] = np.array(read_array(catalog, tensor)).view(np.uint8)
        return found
    return None


_ONES = np.array([value.bit_count() for value in range(256)], np.uint8)
_BLOCK_BYTES = 1 << 20


def _count(bits: Array) -> int:
    """How many bits are set."""
    blocks = (bits[start : start + _BLOCK_BYTES] for start in range(0, len(bits), _BLOCK_BYTES))
    return sum(int(_ONES[block].sum(dtype=np.int64)) for block in blocks)
