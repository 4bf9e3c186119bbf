"""Tables by keys in increments: rows that gradients wrote, rows that were assigned to keys, and removed keys.

The chief collects in this order:

    F  rows that gradients wrote, rows that were assigned to keys
    K  removed keys, and the rows of those that have rows again
    R  keys and values of all these rows that are in use

An increment's keys are removed before its rows are written. *Claim*: after the last collection, the
increments applied in order give the table, except for changes that the next collection will find.

*Proof.* Take a key's last change. If it got a row: the row has its values before the index has it, and its
flag after. If F finds the flag, R finds the key; otherwise the next F does. A K that lists the key, because
it was removed earlier, finds its new row, too, or comes before that row is assigned. If the key was removed:
that is recorded after the index lost it. If R still finds the key, the record comes after this K, and the
next K lists it; otherwise R leaves the key out, and this K or the next one lists it. A key that lost its row
to another one is recorded as removed: two workers may race for a row, and a restoring session may overwrite
rows that other workers have assigned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct, to_builtins

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


class TableAccess(Struct, frozen=True):
    """Access to one table by keys, of a graph or of a layer.

    Each function is called with the session, or None. `take_given` and `take_removed` return and clear the
    rows and the keys recorded since the last call; such keys may have rows again. `rows_of` returns the rows
    of the keys that have one, `find` the given rows that are in use, and their keys, which are distinct.
    `write` removes keys, then assigns rows and values to others. All numbers are int64 [n]. `begin` makes the
    table record removed keys.
    """

    name: str
    begin: Callable[[Session], object]
    take_given: Callable[[Session], Array]
    take_removed: Callable[[Session], Array]
    rows_of: Callable[[Session, Array], Array]
    find: Callable[[Session, Array], tuple[Array, Array]]
    write: Callable[[Session, TableRows], None]


class KeyedChanges:
    """The changes that a table by keys recorded since its last durable increment, for a `Collector`."""

    def __init__(self, access: TableAccess) -> None:
        self.access = access
        self._session: Session = None
        self.take_none()

    def take_none(self) -> None:
        """Forget all changes that `collect` read from the table or `note` counted."""
        self._given, self._removed = NONE, NONE

    def collect(self, session: Session) -> None:
        """Read and clear the table's record: given rows first, then removed keys, so as to miss no change.

        Rows of removed keys that exist again count as given. In another order changes could be missed: see
        the proof in the module's docstring. `session` is None for a layer's table. TensorFlow's errors pass.
        """
        self._session = session
        given, removed = self.access.take_given(session), self.access.take_removed(session)
        self.note(given, removed)
        self._given = union(self._given, self.access.rows_of(session, self._removed))

    def note(self, given: Array, removed: Array) -> None:
        """Count further rows (int64) as given, and further keys (int64) as removed."""
        self._given, self._removed = union(self._given, given), union(self._removed, removed)

    @property
    def knows_more(self) -> bool:
        """True if `collect` or `note` counted a row or a key that no durable increment has yet."""
        return bool(len(self._given) or len(self._removed))

    def write(self, writer: Bundle, source: Source, entry: VariableTracking, wrote: Array) -> Document | None:
        """Write removed keys, and the rows in use among `wrote` and the given ones, into a bundle.

        `wrote` are the rows that gradients wrote; `source` gives the rows' values. Returns the table's entry
        in the increment's manifest; None, and nothing is written, if there are neither rows nor keys. OSError
        of the bundle, and the source's errors pass: TensorFlow's own, or of a checkpoint CheckpointError, or
        KeyError if it lacks the table.
        """
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
        return to_builtins(table)  # type: ignore[no-any-return]  # a Struct gives a dict


def table_access(table: TrainableTable) -> TableAccess:
    """Add the operations on a table to the current default graph; return a `TableAccess` that runs them."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.control_dependencies(None), tf.name_scope(f"{SCOPE}/table/"):
        rows, keys, gone = (v1.placeholder(tf.int64, [None]) for _ in range(3))
        values = v1.placeholder(table.values.dtype, [None, table.dim])
        with table.values.graph.colocate_with(table.values.handle):
            recorded = table.index.is_recorded.assign(True).op
        given, removed = table.index.take_changed(), table.index.take_removed()
        used, found = table.index.is_in_use(rows), table.index.find(keys)
        written = table.lay_over(keys, rows, values, gone)

    def find(session: Session, wanted: Array) -> tuple[Array, Array]:
        is_used, its_keys = session.run(used, {rows: wanted})
        return wanted[is_used], its_keys[is_used]

    def write(session: Session, change: TableRows) -> None:
        step = max(1, CHUNK_BYTES // max(1, change.values[:1].nbytes))
        for start in range(0, max(1, len(change.ids)), step):
            piece = slice(start, start + step)
            fed = {rows: change.ids[piece], keys: change.keys[piece], values: change.values[piece]}
            # Keys are removed with the first piece, before any row is written.
            session.run(written, {**fed, gone: NONE if start else change.removed})

    return TableAccess(
        name=table.name,
        begin=lambda session: session.run(recorded),
        take_given=lambda session: session.run(given),
        take_removed=lambda session: session.run(removed),
        rows_of=lambda session, wanted: _there(session.run(found, {keys: wanted})),
        find=find,
        write=write,
    )


def layer_access(table: Any) -> TableAccess:
    """Return access to the table of a layer (`exporter.tables.trainable_table`), which needs no session.

    The table's last row, which has no key, is never found.
    """
    import tensorflow as tf

    def tensor(numbers: Array) -> Any:
        return tf.constant(numbers, tf.int64)

    def find(_: Session, rows: Array) -> tuple[Array, Array]:
        rows = rows[rows < table.index.capacity]
        is_used, keys = (each.numpy() for each in table.index.is_in_use(tensor(rows)))
        return rows[is_used], keys[is_used]

    def write(_: Session, change: TableRows) -> None:
        table.lay_over(tensor(change.keys), tensor(change.ids), change.values, tensor(change.removed))

    return TableAccess(
        name=str(table.name),
        begin=lambda _: table.index.is_recorded.assign(True),
        take_given=lambda _: table.take_given().numpy(),
        take_removed=lambda _: table.take_removed().numpy(),
        rows_of=lambda _, keys: _there(table.index.find(tensor(keys)).numpy()),
        find=find,
        write=write,
    )


def layer_tracking(table: Any) -> VariableTracking:
    """Return the tracking of a layer's table: by its keys, and by comparing its rows."""
    shape, dtype = tuple(table.rows.shape), table.dtype
    part, mode = VariablePart(table.rows, shape, (0, 0)), TrackingMode.COMPARED
    return VariableTracking(str(table.name), dtype.label, dtype.numpy, shape, (part,), mode, is_keyed=True)


def _there(rows: Array) -> Array:
    return rows[rows >= 0]
