"""The operations that increments add to a training graph: record, read and write rows.

# Recording the rows that workers write (`record`)

Rows are recorded where the variables live, so that no update is lost. Beside each table (and the slots that
the same operations write) lies a variable `touched`, uint8 [rows], on the same parameter server. Every
worker's graph is extended: after an operation W that writes rows, an operation M sets their flags to 1. The
chief collects:

    C1  rows = where(touched)      C2  touched[rows] = 0      R  values = table[rows]

Control edges order C1 -> C2, and R is a later call. *Claim*: after the last collection, the collected values
applied in order give the table, except for rows that are flagged, or about to be.

*Proof.* Take the last write W of row r, and its M. If M comes before C1 of some collection and after C2 of
the previous one, r is in that collection's rows, and R reads r after W: it collects the newest value. If M
falls between C1 and C2, there are two cases. Either r was among the rows of C1: C2 clears the flag, perhaps
M's, but R comes after C2, so after M, so after W, and collects the newest value. Or r was not among them: C2
leaves its flag, which stays for the next collection. A value that R reads half-written belongs to a W whose M
is still to come. Setting and clearing a flag store one byte, which leaves its neighbours alone.

*Death of a worker.* M needs W, the indices that W needed, and a constant, which are all on the parameter
server when W runs. TensorFlow's executor continues with the successors of an operation that succeeded,
whatever fails elsewhere in the step (cancellation strikes only at receives, calls and loop conditions). So W
without M means that the server itself died, and its table with it. *Death of the chief or of a server*: the
chief's next session restores every variable from files, so older flags are superfluous and do no harm.
*Failure to publish*: collected rows stay with the chief until an increment that holds them is durable.

M runs because every consumer of W waits for it; if W itself is fetched, the hook fetches M, too. A W without
consumers is also flagged before it runs, in case that a caller runs it in a session without the hook.

# Tables by keys (`table_access`)

A table's increment holds the rows that gradients wrote (flagged as above), the rows that were given to keys,
and the keys that were removed. The chief collects in this order:

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

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from exporter.errors import MissingTensors, ShapeMismatch
from exporter.graph.recording_nodes import SCOPE
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
Array = np.ndarray[Any, Any]
Session = Any

CHUNK_BYTES = 32 << 20
"""The largest number of bytes that one call of a session carries, unless a single row is larger."""


class RowGroup(Struct, frozen=True):
    """Parts that the same operations write, with one set of flags. `collect`: the flagged rows, int64 [n]."""

    parts: tuple[VariablePart, ...]
    touched: Variable
    collect: Tensor


class Recording(Struct, frozen=True):
    """The nodes that recording added to a graph. `marks` has each M by the name of its W (see the module)."""

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
        """The variables of the recording. They are in no collection, so no saver or initializer sees them."""
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
    """The parts whose touched rows are recorded, grouped by the operations that write them."""
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
            # Nothing that runs later can carry the M: flag the rows before, besides.
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
    """A variable to which every worker that records adds its steps, before it adds them to the global step.

    A global step that grows faster than this variable reveals a worker that does not record.
    """
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
    """True if the graph changes the global step only by additions, so that recorded steps can be compared."""
    return set(variable_use(global_step).whole_writes) <= {"AssignAdd", "AssignAddVariableOp"}


def _beside(variable: Variable, name: str, shape: list[int], dtype: Any, initial: int = 0) -> Variable:
    """A variable on the same device as `variable`, in no collection, filled with `initial`."""
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


class Access(Protocol):
    """Write access to a variable, for restoring."""

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
    """Add the operations on a variable to the current default graph."""
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


class TableAccess(Struct, frozen=True):
    """The operations on one table of a graph, on its own device; a `KeyedAccess`.

    `recorded` makes the table note removed keys. `given` and `removed` take the rows and keys that were noted
    since the last time. `used` gives for each row that is fed whether it is in use, and its key. `rows`,
    `keys`, `values` and `gone` (removed keys) are placeholders.
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
        none = np.empty(0, np.int64)
        row = max(1, change.values[:1].nbytes)
        step = max(1, CHUNK_BYTES // row)
        for start in range(0, max(1, len(change.ids)), step):
            piece = slice(start, start + step)
            fed = {self.rows: change.ids[piece], self.keys: change.keys[piece]}
            # Keys are removed with the first piece, before any row is written.
            fed |= {self.values: change.values[piece], self.gone: none if start else change.removed}
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
            written=table.lay_over(keys, rows, values, gone),
        )


def check_tables(stored: StoredIncrement, kinds: dict[str, tuple[str, int, int]]) -> None:
    """Check that a graph has the tables of an increment; `kinds` are its own (dtype, dim, capacity) by name.

    Raises:
        MissingTensors, ShapeMismatch: the graph lacks a table, or it differs.
        CorruptFile: the increment is damaged.
    """
    hint = "train with the graph that wrote the increments, or move the increments directory away"
    for table, _ in stored.tables():
        kind = kinds.get(table.name)
        if kind is None:
            raise MissingTensors(
                f"{stored.path} holds table {table.name!r}, which this graph lacks", hint=hint
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
    """Write the tables' changes of increments, in order."""
    by_name = {access.name: access for access in accesses}
    for table, change in _changes(chain):
        by_name[table.name].write(session, change)


def _changes(chain: Iterable[StoredIncrement]) -> Iterator[tuple[ChangedTable, TableRows]]:
    for stored in chain:
        yield from stored.tables()
