"""Record touched rows where the variables live, so that no update is lost.

Beside each table (and the slots that the same operations write) lies a variable `touched`, uint8 [rows], on
the same parameter server. Every worker's graph is extended: after an operation W that writes rows, an
operation M sets their flags to 1. The chief collects:

    C1  rows = where(touched)      C2  touched[rows] = 0      R  values = table[rows]

C1 -> C2 -> R by control edges and by being separate calls. *Claim*: after the last collection, overlaying all
collected values in order gives the table, except for rows that are flagged, or about to be.

*Proof.* Take the last write W of row r, and its M. If M comes before C1 of some collection and after C2 of
the one before, r is in that collection's rows, and R reads r after W: the newest value is collected. If M
falls between C1 and C2, then either r was among the rows of C1: C2 clears the flag, perhaps M's, but R
comes after C2, so after M, so after W, and the newest value is collected. Or r was not among them: C2 does
not touch its flag, which stays for the next collection. A value that R reads half-written belongs to a W
whose M is still to come. Setting and clearing are stores of one byte, so neighbours do not disturb each
other.

*Death of a worker.* M needs W, the indices that W needed, and a constant, all on the parameter server when
W runs. TensorFlow's executor goes on with the successors of an operation that succeeded, whatever fails
elsewhere in the step (cancellation strikes only at receives, calls and loop conditions), so W without M
means that the server itself died, and with it the table. *Death of the chief or of a server*: the chief's
next session restores every variable from files, so flags of before are merely superfluous. *Failure to
publish*: collected rows stay with the chief until an increment that holds them is durable.

M runs because whatever consumes W waits for it; the hook runs it with a W that is fetched itself. A W that
nothing consumes is flagged before it runs, too, in case that it is run behind the hook's back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from exporter.training.change_tracking import (
    RowWrite,
    TrackingMode,
    VariablePart,
    VariableTracking,
    consumers_of,
    is_resource,
    tracking_digest,
    variable_use,
)

Operation = Any
Tensor = Any
Variable = Any

SCOPE = "increments"
"""Prefix of the names of everything that is added to a graph."""


class RowGroup(Struct, frozen=True):
    """Parts that the same operations write: one set of flags. `collect` gives int64 [n], their rows."""

    parts: tuple[VariablePart, ...]
    touched: Variable
    collect: Tensor


class Recording(Struct, frozen=True):
    """The nodes that recording added to a graph. `marks` has the Ms by the names of their Ws."""

    groups: tuple[RowGroup, ...]
    marks: Mapping[str, Operation]
    steps: Variable
    recorded_steps: Tensor
    plan: Variable
    plan_of_chief: Tensor
    tracking_digest: int
    are_ready: Tensor

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables of the recording, which no saver, initializer or report knows of."""
        return (*(group.touched for group in self.groups), self.steps, self.plan)


def record(tracked: tuple[VariableTracking, ...], global_step: Variable) -> Recording:
    """Extend the current default graph, the same way in every worker."""
    import tensorflow as tf

    marks: dict[str, Operation] = {}
    groups = tuple(_group(parts, marks) for parts in _parts_by_operation(tracked))
    steps = _count_steps(global_step)
    digest = tracking_digest(tracked)
    plan = _beside(global_step, f"{SCOPE}/plan", [], tf.int64, digest)
    variables = [*(group.touched for group in groups), steps, plan]
    with tf.name_scope(f"{SCOPE}/"):
        are_ready = tf.stack([variable.is_initialized() for variable in variables], name="are_ready")
        return Recording(groups, marks, steps, steps.read_value(), plan, plan.read_value(), digest, are_ready)


def _parts_by_operation(tracked: Iterable[VariableTracking]) -> list[tuple[VariablePart, ...]]:
    """The parts with touched rows; those that one operation writes together."""
    parts = [part for entry in tracked if entry.mode is TrackingMode.TOUCHED for part in entry.parts]
    leader = {id(part): id(part) for part in parts}

    def find(key: int) -> int:
        while leader[key] != key:
            key = leader[key]
        return key

    writers: dict[Operation, int] = {}
    for part in parts:
        for write in part.row_writes:
            leader[find(id(part))] = find(writers.setdefault(write.op, id(part)))
    groups: dict[int, list[VariablePart]] = defaultdict(list)
    for part in parts:
        groups[find(id(part))].append(part)
    return [tuple(group) for group in groups.values()]


def _group(parts: tuple[VariablePart, ...], marks: dict[str, Operation]) -> RowGroup:
    import tensorflow as tf

    first = min(parts, key=lambda part: str(part.variable.op.name))
    name = first.variable.op.name
    touched = _beside(first.variable, f"{SCOPE}/touched/{name}", [first.rows], tf.uint8)
    writes = {write.op: write for part in parts for write in part.row_writes}
    for write in writes.values():
        _mark(touched, write, marks)
    return RowGroup(parts, touched, _collect(touched))


def _mark(touched: Variable, write: RowWrite, marks: dict[str, Operation]) -> None:
    """Make sure that the rows of `write` are flagged after it."""
    import tensorflow as tf

    graph = write.op.graph
    consumers = consumers_of(write.op)
    with graph.colocate_with(touched.handle.op, ignore_existing=True), tf.name_scope(f"{SCOPE}/mark/"):
        rows = write.indices[..., 0] if write.is_nd else write.indices
        one = tf.constant(1, tf.uint8)

        def mark() -> Operation:
            return tf.raw_ops.ResourceScatterUpdate(resource=touched.handle, indices=rows, updates=one)

        with tf.control_dependencies(None), tf.control_dependencies([write.op]):
            after = mark()
        marks[write.op.name] = after
        if not consumers:
            with tf.control_dependencies(None):
                write.op._add_control_input(mark())
    for consumer in consumers:
        consumer._add_control_input(after)


def _collect(touched: Variable) -> Tensor:
    import tensorflow as tf

    graph = touched.handle.op.graph
    with graph.colocate_with(touched.handle.op, ignore_existing=True), tf.name_scope(f"{SCOPE}/collect/"):
        rows = tf.where(tf.not_equal(touched.read_value(), 0))[:, 0]
        with tf.control_dependencies([rows]):
            zero = tf.constant(0, tf.uint8)
            clear = tf.raw_ops.ResourceScatterUpdate(resource=touched.handle, indices=rows, updates=zero)
        with tf.control_dependencies([clear]):
            return tf.identity(rows)


def _count_steps(global_step: Variable) -> Variable:
    """A variable that grows with the global step in every worker that records, before the step does."""
    import tensorflow as tf

    steps = _beside(global_step, f"{SCOPE}/recorded_steps", [], tf.int64)
    for op in _additions(global_step):
        with (
            tf.control_dependencies(None),
            op.graph.colocate_with(steps.handle.op, ignore_existing=True),
            tf.name_scope(f"{SCOPE}/count/"),
        ):
            added = tf.cast(op.inputs[1], tf.int64)
            count = tf.raw_ops.AssignAddVariableOp(resource=steps.handle, value=added)
        op._add_control_input(count)
    return steps


def _additions(global_step: Variable) -> list[Operation]:
    tensor = global_step.handle if is_resource(global_step) else global_step.op.outputs[0]
    return [op for op in tensor.consumers() if op.type in ("AssignAdd", "AssignAddVariableOp")]


def counts_every_step(global_step: Variable) -> bool:
    """True if the step only ever moves by additions, so that recorded steps can be checked against it."""
    return set(variable_use(global_step).whole_writes) <= {"AssignAdd", "AssignAddVariableOp"}


def _beside(variable: Variable, name: str, shape: list[int], dtype: Any, initial: int = 0) -> Variable:
    """A variable on the same device as `variable`, in no collection, full of `initial`."""
    import tensorflow as tf

    device = variable.handle.op if is_resource(variable) else variable.op
    with (
        tf.control_dependencies(None),
        tf.name_scope(""),
        device.graph.colocate_with(device, ignore_existing=True),
    ):
        return tf.compat.v1.Variable(
            lambda: tf.fill(shape, tf.constant(initial, dtype)),
            trainable=False,
            collections=[],
            name=name,
            dtype=dtype,
            use_resource=True,
        )
