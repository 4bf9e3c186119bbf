"""The variables that hold a served model's position and sequence.

    sequence  int64 []    even: the model stands still; odd: an update is writing
    position  int64 [3]   position, step, and where an unfinished update was going to, else -1
    since     float64 []  when the sequence became odd, in seconds since 1970
    base      string []   the model base path, from an asset's path while the model loads
    warm      bool []     true after the first update, if only an update with nothing to do

One variable holds position and step, so that they are read together without any lock.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from exporter.graph.editor import GraphEditor
from exporter.wire.dtypes import DType

Tensor = Any
"""A symbolic tensor of TensorFlow, which has no type information to offer."""

SETTLED = -1
"""The third field of `position` while no update is under way."""


class StateNodes(Struct, frozen=True):
    """Names of the nodes that make the handles, in the order in which functions take them."""

    sequence: str
    position: str
    since: str
    base: str
    warm: str

    @classmethod
    def add(cls, editor: GraphEditor) -> StateNodes:
        """Add the variables to a graph."""
        return cls(
            sequence=editor.variable("sequence", DType.INT64),
            position=editor.variable("position", DType.INT64, (3,)),
            since=editor.variable("since", DType.DOUBLE),
            base=editor.variable("base", DType.STRING),
            warm=editor.variable("update/warm", DType.BOOL),
        )

    @property
    def names(self) -> list[str]:
        """The names of all nodes."""
        return [self.sequence, self.position, self.since, self.base, self.warm]


STATE_INPUTS: dict[str, tuple[DType, tuple[int, ...]]] = dict.fromkeys(
    ("sequence", "position", "since", "base", "warm"), (DType.RESOURCE, ())
)
"""The inputs of a function that takes the state."""


class UpdateState(Struct, frozen=True):
    """The handles inside a function, and how they are read; control dependencies give the order."""

    sequence: Tensor
    position: Tensor
    since: Tensor
    base: Tensor
    warm: Tensor

    def read_sequence(self) -> Tensor:
        """The sequence, int64 []."""
        return read(self.sequence, DType.INT64, ())

    def read_position(self) -> Tensor:
        """Position, step and the unfinished target, int64 [3]."""
        return read(self.position, DType.INT64, (3,))

    def read_base(self) -> Tensor:
        """The model base path, string []."""
        return read(self.base, DType.STRING, ())

    def read_warm(self) -> Tensor:
        """If an update has run, bool []."""
        return read(self.warm, DType.BOOL, ())


def read(handle: Tensor, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """The value of a variable, of known shape."""
    import tensorflow as tf

    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(int(dtype)))
    value.set_shape(shape)
    return value


def assign(handle: Tensor, value: Tensor) -> Tensor:
    """The operation that gives a variable a new value."""
    import tensorflow as tf

    return tf.raw_ops.AssignVariableOp(resource=handle, value=value)
