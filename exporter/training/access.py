"""Read and write rows of variables through a session, in bounded pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from exporter.training.change_tracking import VariablePart
from exporter.training.recording import SCOPE
from exporter.training.writes import is_resource

Array = np.ndarray[Any, Any]
Session = Any
Tensor = Any

CHUNK_BYTES = 32 << 20
"""What one call of a session carries."""


class Access(Protocol):
    """Access to variables, as restoring needs it."""

    def write(self, session: Session, ids: Array, values: Array) -> None:
        """Write rows `ids` of a part, or a scalar."""

    @property
    def part(self) -> VariablePart:
        """The part that is written."""


class PartAccess(Struct, frozen=True):
    """The operations that read and write one variable of the graph, on its own device.

    `ids` int64 [n] and `values` [n, ...] are fed; for a scalar `values` [] is fed and there are no ids.
    """

    part: VariablePart
    ids: Tensor
    values: Tensor
    gathered: Tensor
    whole: Tensor
    written: Any

    @property
    def rows_a_call(self) -> int:
        """Rows that fit into one call."""
        row = math.prod(self.part.shape[1:]) * int(self.part.variable.dtype.base_dtype.size)
        return max(1, CHUNK_BYTES // max(1, row))

    def read(self, session: Session, ids: Array) -> Iterator[Array]:
        """The values of rows `ids`, in pieces."""
        for start in range(0, len(ids), self.rows_a_call):
            yield session.run(self.gathered, {self.ids: ids[start : start + self.rows_a_call]})

    def read_all(self, session: Session) -> Iterator[tuple[int, Array]]:
        """All values, in pieces with the number of the first row. A scalar is one piece."""
        if not self.part.shape:
            yield 0, session.run(self.whole)
            return
        for start in range(0, self.part.rows, self.rows_a_call):
            stop = min(start + self.rows_a_call, self.part.rows)
            yield start, session.run(self.gathered, {self.ids: np.arange(start, stop, dtype=np.int64)})

    def write(self, session: Session, ids: Array, values: Array) -> None:
        """Write rows `ids`, or a scalar."""
        if not self.part.shape:
            session.run(self.written, {self.values: values})
            return
        for start in range(0, len(ids), self.rows_a_call):
            piece = slice(start, start + self.rows_a_call)
            session.run(self.written, {self.ids: ids[piece], self.values: values[piece]})


def access(part: VariablePart) -> PartAccess:
    """Add the operations to the current default graph."""
    import tensorflow as tf

    variable, shape = part.variable, part.shape
    place = variable.handle.op if is_resource(variable) else variable.op
    with (
        tf.control_dependencies(None),
        place.graph.colocate_with(place, ignore_existing=True),
        tf.name_scope(f"{SCOPE}/access/"),
    ):
        ids = tf.compat.v1.placeholder(tf.int64, [None])
        fed_shape = [None, *shape[1:]] if shape else []
        values = tf.compat.v1.placeholder(variable.dtype.base_dtype, fed_shape)
        whole = variable.read_value()
        if not shape:
            return PartAccess(part, ids, values, whole, whole, variable.assign(values).op)
        written = tf.compat.v1.scatter_update(variable, ids, values)
        return PartAccess(part, ids, values, tf.gather(variable, ids), whole, tf.group(written))
