"""The variables in which a served model keeps its position and the state of its updates.

    sequence  int64 []    even: no update is writing; odd: an update is writing
    position  int64 [3]   position, step, and the target of an unfinished update, else -1
    since     float64 []  when the sequence became odd, in seconds since 1970
    base      string []   the model base path, taken from an asset's path while the model loads
    warm      bool []     true after the first update, even if that had nothing to do
    turn      int64 [3]   zeros while no call has the turn (`update.one_at_a_time`)
    quiet     float64 []  until when readers ask that no update begins to write, in seconds since 1970
    unsettled int64 []    how many responses were given without a position

One variable holds position, step and target, so that one read sees all three of one moment, without a lock.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from exporter.graph.editor import GraphEditor
from exporter.late_names import tf
from exporter.wire.dtypes import DType

Tensor = Any
"""A symbolic tensor of TensorFlow, which has no type information to offer."""

_POLL_MICROSECONDS = 200
"""How often a waiting loop looks again: short beside the milliseconds that an update writes."""

SETTLED = -1
"""The third field of `position` while no update is under way."""


class StateNodes(Struct, frozen=True):
    """Names of the nodes that create the handles, in the order in which functions take them."""

    sequence: str
    position: str
    since: str
    base: str
    warm: str
    turn: str
    quiet: str
    unsettled: str

    @classmethod
    def add(cls, editor: GraphEditor) -> StateNodes:
        """Add the variables to a graph."""
        return cls(
            sequence=editor.variable("sequence", DType.INT64),
            position=editor.variable("position", DType.INT64, (3,)),
            since=editor.variable("since", DType.DOUBLE),
            base=editor.variable("base", DType.STRING),
            warm=editor.variable("update/warm", DType.BOOL),
            turn=editor.variable("turn", DType.INT64, (3,)),
            quiet=editor.variable("quiet", DType.DOUBLE),
            unsettled=editor.variable("unsettled", DType.INT64),
        )

    @property
    def names(self) -> list[str]:
        """The names of all nodes."""
        return [getattr(self, name) for name in self.__struct_fields__]


STATE_INPUTS: dict[str, tuple[DType, tuple[int, ...]]] = dict.fromkeys(
    StateNodes.__struct_fields__, (DType.RESOURCE, ())
)
"""The inputs of a function that takes the state."""


class UpdateState(Struct, frozen=True):
    """The handles inside a function, and reads of them.

    TensorFlow orders accesses to one variable at most: the caller orders reads and writes of several by
    control dependencies.
    """

    sequence: Tensor
    position: Tensor
    since: Tensor
    base: Tensor
    warm: Tensor
    turn: Tensor
    quiet: Tensor
    unsettled: Tensor

    def read_sequence(self) -> Tensor:
        """The sequence, int64 []."""
        return read(self.sequence, DType.INT64, ())

    def read_position(self) -> Tensor:
        """Position, step and the unfinished target, int64 [3]."""
        return read(self.position, DType.INT64, (3,))

    def read_quiet(self) -> Tensor:
        """The end of the quiet that readers ask for, in seconds since 1970, float64 []."""
        return read(self.quiet, DType.DOUBLE, ())

    def read_base(self) -> Tensor:
        """The model base path, string []."""
        return read(self.base, DType.STRING, ())

    def read_warm(self) -> Tensor:
        """Whether an update has run, bool []."""
        return read(self.warm, DType.BOOL, ())


def read(handle: Tensor, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """The value of a variable, with a static shape."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(int(dtype)))
    value.set_shape(shape)
    return value


def assign(handle: Tensor, value: Tensor) -> Tensor:
    """The operation that assigns a value to a variable."""
    return tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def sleep(microseconds: int = _POLL_MICROSECONDS) -> Tensor:
    """An operation that ends a little later, and meanwhile blocks no thread of the server's compute pool."""
    kind: dict[str, Any] = {"output_types": [tf.int32], "output_shapes": [tf.TensorShape([])]}
    element = tf.raw_ops.TensorDataset(components=[tf.constant(0)], output_shapes=kind["output_shapes"])
    slow = tf.raw_ops.SleepDataset(
        input_dataset=element, sleep_microseconds=tf.constant(microseconds, tf.int64), **kind
    )
    return tf.raw_ops.DatasetToSingleElement(dataset=slow, **kind)[0]
