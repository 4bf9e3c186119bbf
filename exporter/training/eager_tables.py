"""Access to the tables by keys of a Keras model, as increments need it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.increments.changed_tables import TableRows
from exporter.training.change_tracking import TrackingMode, VariablePart, VariableTracking

Array = np.ndarray[Any, Any]
Session = Any


class EagerTableAccess(Struct, frozen=True):
    """A `KeyedAccess` to the table of a layer (`exporter.tables.trainable_layer`)."""

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
        """See `KeyedAccess`. The layer's last row is no key's."""
        rows = rows[rows < self.table.index.capacity]
        is_used, keys = (each.numpy() for each in self.table.index.is_in_use(_tensor(rows)))
        return rows[is_used], keys[is_used]

    def write(self, session: Session, change: TableRows) -> None:
        """See `KeyedAccess`."""
        self.table.lay_over(_tensor(change.keys), _tensor(change.ids), change.values, _tensor(change.removed))

    def tracked(self) -> VariableTracking:
        """How its changes are found: by keys, and by comparing rows."""
        shape = tuple(self.table.rows.shape)
        part = VariablePart(self.table.rows, shape, (0, 0), ())
        mode = TrackingMode.COMPARED
        return VariableTracking(self.name, self.table.dtype, shape, (part,), mode, (), is_keyed=True)


def eager_tables(objects: Iterable[Any]) -> Iterator[EagerTableAccess]:
    """The tables among what a checkpoint tracks; from now on they note which keys are removed."""
    for trackable in objects:
        if getattr(trackable, "is_dynamic_table", False):
            trackable.index.is_recorded.assign(True)
            yield EagerTableAccess(trackable)


def _tensor(numbers: Array) -> Any:
    import tensorflow as tf

    return tf.constant(numbers, tf.int64)
