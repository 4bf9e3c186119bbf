"""Read and write rows of variables through a session, in bounded pieces.

Read, record and write tables by keys through a session.

A table's increment tells of rows that gradients wrote (flagged by `recording`, like any other row), of rows
that were given to keys, and of keys that were removed. It is collected in this order:

    F  rows that gradients wrote, rows that were given to keys
    K  removed keys, and the rows of those that have rows again
    R  keys and values of all these rows that are in use

and an increment's removed keys go before its rows are written. *Claim*: after the last collection, the
increments overlaid in order give the table, but for what the next collection will tell. *Proof.* Take a
key's last change. If it was given a row: the row has its values before the index leads to it, and its flag
after. If F finds the flag, R finds the key; else the next F does. A K that tells of the key, as it was
removed before, finds its new row, too, or comes before that is given. If it was removed: it is noted after
the index lost it. If R still finds it, the note comes after this K, and the next K tells; else R leaves it
out, and this K or the next tells. A key that lost its row to another, by the lock's fault or as a session
laid increments over what others had met, is noted as removed.

Record touched rows where the variables live, so that no update is lost.

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

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from exporter.errors import MissingTensors, ShapeMismatch
from exporter.increments.changed_tables import ChangedTable, TableRows
from exporter.increments.increment import StoredIncrement
from exporter.tables.trainable_table import TrainableTable
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


Array = np.ndarray[Any, Any]
Session = Any


class KeyedAccess(Protocol):
    """Access to one table by keys, as collecting and restoring need it."""

    @property
    def name(self) -> str:
        """What checkpoints call the table."""

    def take_given(self, session: Session) -> Array:
        """Rows that were given to keys since they were last taken."""

    def take_removed(self, session: Session) -> Array:
        """Keys that were removed since they were last taken; they may be there again."""

    def rows_of(self, session: Session, keys: Array) -> Array:
        """The rows of those of the keys that have some."""

    def find(self, session: Session, rows: Array) -> tuple[Array, Array]:
        """Those of the rows that are in use, and their keys, which are distinct."""

    def write(self, session: Session, change: TableRows) -> None:
        """Take keys away, then give others their rows."""


class TableAccess(Struct, frozen=True):
    """The operations on one table of a graph, on its own device; a `KeyedAccess`.

    `recorded` makes it note what is removed. `given` and `removed` take what was noted since the last time.
    `used` gives for each of the fed rows if it is in use, and its key.
    """

    name: str
    capacity: int
    dim: int
    recorded: Any
    given: Tensor
    removed: Tensor
    used: tuple[Tensor, Tensor]
    found: Tensor
    rows: Tensor
    keys: Tensor
    values: Tensor
    gone: Tensor
    laid_over: Any

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
        none = np.empty(0, np.int64)
        row = max(1, change.values[:1].nbytes)
        step = max(1, CHUNK_BYTES // row)
        for start in range(0, max(1, len(change.ids)), step):
            piece = slice(start, start + step)
            fed = {self.rows: change.ids[piece], self.keys: change.keys[piece]}
            fed |= {self.values: change.values[piece], self.gone: none if start else change.removed}
            session.run(self.laid_over, fed)


def table_access(table: TrainableTable) -> TableAccess:
    """Add the operations to the current default graph."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.control_dependencies(None), tf.name_scope(f"{SCOPE}/table/"):
        rows, keys, gone = (v1.placeholder(tf.int64, [None]) for _ in range(3))
        values = v1.placeholder(table.values.dtype, [None, table.dim])
        with table.values.graph.colocate_with(table.values.handle):
            recorded = table.index.is_recorded.assign(True).op
        return TableAccess(
            name=table.name,
            capacity=table.capacity,
            dim=table.dim,
            recorded=recorded,
            given=table.index.take_changed(),
            removed=table.index.take_removed(),
            used=table.index.is_in_use(rows),
            found=table.index.find(keys),
            rows=rows,
            keys=keys,
            values=values,
            gone=gone,
            laid_over=table.lay_over(keys, rows, values, gone),
        )


def check_tables(stored: StoredIncrement, kinds: dict[str, tuple[str, int, int]]) -> None:
    """Check that a graph has the tables of an increment; `kinds` are those of its own.

    Raises:
        MissingTensors, ShapeMismatch: it has not.
        CorruptFile: the increment is damaged.
    """
    hint = "train with the graph that wrote the increments, or move the increments directory away"
    for table, _ in stored.tables():
        kind = kinds.get(table.name)
        if kind is None:
            raise MissingTensors(
                f"{stored.path} holds table {table.name!r}, which this graph has not", hint=hint
            )
        if kind[:2] != table.kind[:2] or kind[2] < table.capacity:
            raise ShapeMismatch(
                f"table {table.name!r} has {kind[2]} rows {kind[0]}[{kind[1]}], in {stored.path} it has "
                f"{table.capacity} rows {table.dtype.label}[{table.dim}]",
                hint=hint,
            )


def overlay_tables(
    session: Session, chain: Iterable[StoredIncrement], accesses: Iterable[KeyedAccess]
) -> None:
    """Write what increments hold of tables, in order."""
    by_name = {access.name: access for access in accesses}
    for table, change in _changes(chain):
        by_name[table.name].write(session, change)


def _changes(chain: Iterable[StoredIncrement]) -> Iterator[tuple[ChangedTable, TableRows]]:
    for stored in chain:
        yield from stored.tables()


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
