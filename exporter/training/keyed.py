"""Tables by keys in increments: the rows that gradients wrote, that were given to keys, and removed keys.

The chief collects in this order:

    F  rows that gradients wrote, rows that were given to keys
    K  removed keys, and the rows of those that have rows again
    R  keys and values of all these rows that are in use

An increment's keys are removed before its rows are written. *Claim*: after the last collection, the
increments applied in order give the table, except for changes that the next collection will find.

*Proof.* Take a key's last change. If it was given a row: the row has its values before the index leads to it,
and its flag after. If F finds the flag, R finds the key; otherwise the next F does. A K that lists the key,
because it was removed earlier, finds its new row, too, or comes before that row is given. If the key was
removed: that is noted after the index lost it. If R still finds the key, the note comes after this K, and the
next K lists it; otherwise R leaves the key out, and this K or the next one lists it. A key that lost its row
to another one is noted as removed: two workers may race for a row, and a restoring session may overwrite rows
that other workers have given out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from exporter.increments.changed_tables import ChangedTable, TableRows
from exporter.tables.trainable_table import TrainableTable
from exporter.training.store import Bundle, CatalogSource
from exporter.training.trainer_side import (
    CHUNK_BYTES,
    NONE,
    SCOPE,
    Document,
    Source,
    TrackingMode,
    VariablePart,
    VariableTracking,
    union,
)

Tensor = Any
Array = np.ndarray[Any, Any]
Session = Any


class KeyedAccess(Protocol):
    """Access to one table by keys, for collecting and restoring. All numbers are int64 [n]."""

    @property
    def name(self) -> str:
        """The table's name in checkpoints."""

    def take_given(self, session: Session) -> Array:
        """The rows that were given to keys since the last call."""

    def take_removed(self, session: Session) -> Array:
        """The keys that were removed since the last call; they may have rows again."""

    def rows_of(self, session: Session, keys: Array) -> Array:
        """The rows of the keys; keys without a row are left out."""

    def find(self, session: Session, rows: Array) -> tuple[Array, Array]:
        """Those of the rows that are in use, and their keys, which are distinct."""

    def write(self, session: Session, change: TableRows) -> None:
        """Remove keys, then give rows and values to others."""


class KeyedChanges:
    """What a table by keys noted since its last durable increment, for a `Collector`."""

    def __init__(self, access: KeyedAccess) -> None:
        self.access = access
        self._session: Session = None
        self.take_none()

    def take_none(self) -> None:
        """Forget what was noted."""
        self._given, self._removed = NONE, NONE

    def collect(self, session: Session) -> None:
        """Take the given rows, then the removed keys: the proof rests on this order."""
        self._session = session
        given, removed = self.access.take_given(session), self.access.take_removed(session)
        self.note(given, removed)
        self._given = union(self._given, self.access.rows_of(session, self._removed))

    def note(self, given: Array, removed: Array) -> None:
        """Count rows as given, and keys as removed."""
        self._given, self._removed = union(self._given, given), union(self._removed, removed)

    @property
    def knows_more(self) -> bool:
        """True if a row was given, or a key removed."""
        return bool(len(self._given) or len(self._removed))

    def write(self, writer: Bundle, source: Source, entry: VariableTracking, wrote: Array) -> Document | None:
        """Write the rows in use among those written and given, and removed keys; None if there are none."""
        ids = keys = union(wrote, self._given)
        if len(ids):
            if isinstance(source, CatalogSource):
                ids, keys = source.keyed(entry, ids)
            else:
                ids, keys = self.access.find(self._session, ids)
        if not len(ids) and not len(self._removed):
            return None
        capacity, dim = entry.shape
        table = ChangedTable(entry.name, entry.dtype, dim, capacity, len(ids), len(self._removed))
        ids_key, keys_key, values_key, removed_key = table.keys
        writer.add(ids_key, ids)
        writer.add(keys_key, keys)
        writer.add_rows(values_key, entry.dtype, (len(ids), dim), source.rows(entry, ids))
        writer.add(removed_key, self._removed)
        return table_document(table)


def table_document(table: ChangedTable) -> Document:
    """What an increment's manifest says of a table."""
    return {
        "name": table.name,
        "dtype": table.label,
        "dim": table.dim,
        "capacity": table.capacity,
        "rows": table.rows,
        "removed": table.removed,
    }


class TableAccess(Struct, frozen=True):
    """The operations on one table of a graph, on its own device; a `KeyedAccess`.

    `recorded` makes the table note removed keys. `given` and `removed` take the rows and keys that were noted
    since the last time. `used` gives for each row that is fed whether it is in use, and its key. `rows`,
    `keys`, `values` and `gone` (removed keys) are placeholders.
    """

    name: str
    recorded: Any
    given: Tensor
    removed: Tensor
    used: tuple[Tensor, Tensor]
    found: Tensor
    rows: Tensor
    keys: Tensor
    values: Tensor
    gone: Tensor
    written: Any

    def take_given(self, session: Session) -> Array:
        """See `KeyedAccess`."""
        return np.asarray(session.run(self.given))

    def take_removed(self, session: Session) -> Array:
        """See `KeyedAccess`."""
        return np.asarray(session.run(self.removed))

    def find(self, session: Session, rows: Array) -> tuple[Array, Array]:
        """See `KeyedAccess`."""
        is_used, keys = session.run(self.used, {self.rows: rows})
        return rows[is_used], keys[is_used]

    def rows_of(self, session: Session, keys: Array) -> Array:
        """See `KeyedAccess`."""
        rows = session.run(self.found, {self.keys: keys})
        return np.asarray(rows[rows >= 0])

    def write(self, session: Session, change: TableRows) -> None:
        """See `KeyedAccess`."""
        step = max(1, CHUNK_BYTES // max(1, change.values[:1].nbytes))
        for start in range(0, max(1, len(change.ids)), step):
            piece = slice(start, start + step)
            fed = {self.rows: change.ids[piece], self.keys: change.keys[piece]}
            # Keys are removed with the first piece, before any row is written.
            fed |= {self.values: change.values[piece], self.gone: NONE if start else change.removed}
            session.run(self.written, fed)


def table_access(table: TrainableTable) -> TableAccess:
    """Add the operations on a table to the current default graph."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.control_dependencies(None), tf.name_scope(f"{SCOPE}/table/"):
        rows, keys, gone = (v1.placeholder(tf.int64, [None]) for _ in range(3))
        values = v1.placeholder(table.values.dtype, [None, table.dim])
        with table.values.graph.colocate_with(table.values.handle):
            recorded = table.index.is_recorded.assign(True).op
        return TableAccess(
            name=table.name,
            recorded=recorded,
            given=table.index.take_changed(),
            removed=table.index.take_removed(),
            used=table.index.is_in_use(rows),
            found=table.index.find(keys),
            rows=rows,
            keys=keys,
            values=values,
            gone=gone,
            written=table.lay_over(keys, rows, values, gone),
        )


class EagerTableAccess(Struct, frozen=True):
    """A `KeyedAccess` to the table of a layer (`exporter.tables.trainable_table`)."""

    table: Any

    @property
    def name(self) -> str:
        """See `KeyedAccess`."""
        return str(self.table.name)

    def take_given(self, session: Session) -> Array:
        """See `KeyedAccess`."""
        return np.asarray(self.table.take_given().numpy())

    def take_removed(self, session: Session) -> Array:
        """See `KeyedAccess`."""
        return np.asarray(self.table.take_removed().numpy())

    def rows_of(self, session: Session, keys: Array) -> Array:
        """See `KeyedAccess`."""
        rows = self.table.index.find(_tensor(keys)).numpy()
        return np.asarray(rows[rows >= 0])

    def find(self, session: Session, rows: Array) -> tuple[Array, Array]:
        """See `KeyedAccess`. The layer's last row belongs to no key."""
        rows = rows[rows < self.table.index.capacity]
        is_used, keys = (each.numpy() for each in self.table.index.is_in_use(_tensor(rows)))
        return rows[is_used], keys[is_used]

    def write(self, session: Session, change: TableRows) -> None:
        """See `KeyedAccess`."""
        self.table.lay_over(_tensor(change.keys), _tensor(change.ids), change.values, _tensor(change.removed))

    def tracked(self) -> VariableTracking:
        """The table's tracking: by its keys, and by comparing rows."""
        shape, dtype = tuple(self.table.rows.shape), self.table.dtype
        part = VariablePart(self.table.rows, shape, (0, 0))
        mode = TrackingMode.COMPARED
        return VariableTracking(self.name, dtype.label, dtype.numpy, shape, (part,), mode, is_keyed=True)


def eager_tables(objects: Iterable[Any]) -> Iterator[EagerTableAccess]:
    """The tables among the objects of a checkpoint. From now on they note which keys are removed."""
    for trackable in objects:
        if getattr(trackable, "is_dynamic_table", False):
            trackable.index.is_recorded.assign(True)
            yield EagerTableAccess(trackable)


def _tensor(numbers: Array) -> Any:
    import tensorflow as tf

    return tf.constant(numbers, tf.int64)
