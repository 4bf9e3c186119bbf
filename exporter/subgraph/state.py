"""The variables in which a served model keeps its position and the state of its updates.

    sequence  int64 []    even: no update is writing; odd: an update is writing
    position  int64 [3]   position, step, and the target of an unfinished update, else -1
    since     float64 []  when the sequence became odd, in seconds since 1970
    base      string []   the model base path, derived from an asset's path while the model loads
    warm      bool []     true after the first update, even if that had nothing to do
    turn      int64 [3]   zeros unless a call is acquiring the turn (`update.one_at_a_time`)
    holder    string [1]  the iterator's name of the last call that got the turn; empty once it ended normally
    quiet     float64 []  the time until which readers ask that no update begins to write, in seconds since
    1970
    unsettled int64 []    the number of responses that were given without a position

One variable holds position, step and target, so that one read sees all three of one moment, without a lock.
"""

from __future__ import annotations

from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import astuple

from exporter.graph.editor import GraphEditor
from exporter.late_names import tf
from exporter.wire.dtypes import DType

Tensor = Any
"""A symbolic tensor; TensorFlow has no types for it."""

_POLL_MICROSECONDS = 200  # short compared with the milliseconds that an update writes

SETTLED = -1
"""The third field of `position` while no update is under way."""

T = TypeVar("T")


class State(Struct, Generic[T], frozen=True):
    """The state's variables, in the order in which functions take them: as nodes, or as handles inside a
    function.

    TensorFlow orders at most the accesses to one variable: the caller orders reads and writes of several by
    control dependencies.
    """

    sequence: T
    position: T
    since: T
    base: T
    warm: T
    turn: T
    holder: T
    quiet: T
    unsettled: T

    @property
    def all(self) -> list[T]:
        """Return the nine variables as a new list, in the order of the fields."""
        return [*astuple(self)]

    def read(self, name: str) -> Tensor:
        """Add a read of the variable in the field `name`, inside a function, and return its value.

        The value has the variable's dtype and static shape (see the module). KeyError for an unknown field.
        """
        return read(getattr(self, name), *_KINDS[name])


StateNodes: TypeAlias = "State[str]"
UpdateState: TypeAlias = "State[Tensor]"

_KINDS: dict[str, tuple[DType, tuple[int, ...]]] = {
    "sequence": (DType.INT64, ()),
    "position": (DType.INT64, (3,)),
    "since": (DType.DOUBLE, ()),
    "base": (DType.STRING, ()),
    "warm": (DType.BOOL, ()),
    "turn": (DType.INT64, (3,)),
    "holder": (DType.STRING, (1,)),
    "quiet": (DType.DOUBLE, ()),
    "unsettled": (DType.INT64, ()),
}
STATE_INPUTS: dict[str, tuple[DType, tuple[int, ...]]] = dict.fromkeys(_KINDS, (DType.RESOURCE, ()))
"""The inputs of a function that takes the state."""


def add_state(editor: GraphEditor) -> StateNodes:
    """Add the nine variables of the state to a graph, without values, and return their handles' node names.

    `add_init` adds the values.
    """
    # While a model loads, `add_init` sets all variables whose names end in `/warm` to false.
    names = {name: "update/warm" if name == "warm" else name for name in _KINDS}
    return State(**{name: editor.variable(names[name], *kind) for name, kind in _KINDS.items()})


def read(handle: Tensor, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """Add a read of the variable with this handle and return the value, with `shape` as its static shape."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(int(dtype)))
    value.set_shape(shape)
    return value


def assign(handle: Tensor, value: Tensor) -> Tensor:
    """Add the operation that assigns a value to the variable with this handle, and return the operation."""
    return tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def sleep(microseconds: int = _POLL_MICROSECONDS) -> Tensor:
    """Add a sleep of `microseconds`, and return its tensor: an int32 [] zero, for other nodes to depend on.

    The sleep does not block a thread of the server's compute pool.
    """
    kind: dict[str, Any] = {"output_types": [tf.int32], "output_shapes": [tf.TensorShape([])]}
    element = tf.raw_ops.TensorDataset(components=[tf.constant(0)], output_shapes=kind["output_shapes"])
    slow = tf.raw_ops.SleepDataset(
        input_dataset=element, sleep_microseconds=tf.constant(microseconds, tf.int64), **kind
    )
    return tf.raw_ops.DatasetToSingleElement(dataset=slow, **kind)[0]
