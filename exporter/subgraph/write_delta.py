"""Write a checked delta into the served variables, inside the graph.

*Snapshot*: the sequence goes odd, all writes run without any loop between, position and step follow, the
sequence goes even. A cancelled call stops at a loop's condition and nowhere else, so a straight line is never
left half done. *Rows*: chunk by chunk under no sequence, each chunk under the table's exclusive lock, so that
every row that is read is one that existed. Either way the position that the update is on its way to is noted
first: if it dies after all, only a delta that leads at least that far makes the state whole again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from exporter.delta.format import ChangeKind, Schema
from exporter.subgraph.read_delta import ReadDelta, by_variable, tensors_in
from exporter.subgraph.state import SETTLED, Tensor, UpdateState, assign, sleep

CHUNK_ROWS = 4096
"""Rows written under one hold of a table's lock: about a millisecond for 64 floats a row."""

_LONGEST_QUIET_SECONDS = 30.0
"""However long readers ask for, and whatever becomes of the clock."""

_AT_ONCE = 4
"""Parts of tables that are written at the same time, where a model has fewer tables."""


class UpdateTarget(Struct, frozen=True):
    """What a delta is written into: handles by the names of the schema (several if twins share one)."""

    schema: Schema
    handles: Mapping[str, Sequence[Tensor]]

    def writes(self, delta: ReadDelta) -> Writes:
        """The writes that a delta needs; variables without elements need none."""
        import tensorflow as tf

        tensors = tensors_in(delta.tensors, self.schema)
        writes = Writes(tensors, [], [], [])
        flags = tf.unstack(delta.changed)  # one node, where an index takes three for each variable
        changed = dict(zip(self.schema.variables, flags, strict=True))
        found = dict(by_variable(self.schema, tensors))
        for variable, its_tensors in found.items():
            if variable.contents is not None or 0 in variable.shape:  # kernels refuse rows of no elements
                continue
            for handle in self.handles[variable.name]:
                if variable.kind is ChangeKind.TABLE:
                    writes.tables.append((handle, *its_tensors))
                else:
                    writes.dense.append((handle, changed[variable], *its_tensors))
        for keys, values in self.schema.lookups:
            for handle in self.handles[keys.name]:
                writes.lookups.append((handle, changed[keys], *found[keys], *found[values]))
        return writes


class Writes(Struct, frozen=True):
    """A delta's `tensors`, and what is to be done with them, one item for each handle.

    `tables` are scattered (handle, ids, rows), `dense` assigned (handle, if it changed, value), the entries
    of `lookups` replaced (handle, if they changed, keys, values).
    """

    tensors: Sequence[Tensor]
    tables: list[tuple[Tensor, Tensor, Tensor]]
    dense: list[tuple[Tensor, Tensor, Tensor]]
    lookups: list[tuple[Tensor, Tensor, Tensor, Tensor]]


def write_snapshot(
    state: UpdateState, target: UpdateTarget, delta: ReadDelta, start: Tensor, end: Tensor
) -> Tensor:
    """Write all tensors while the sequence is odd. Returns the last operation, which nothing may overtake.

    `start` and `end` are the position's values while the writes are under way and when they are done.
    """
    import tensorflow as tf

    writes = target.writes(delta)
    # What readers wait for is writing alone: all that can be prepared is.
    tables = _in_parts(writes.tables)
    dense = [(handle, _value_if(handle, changed, value)) for handle, changed, value in writes.dense]
    prepared = [*writes.tensors, start, end, *(value for _, *values in (*tables, *dense) for value in values)]
    with tf.control_dependencies(prepared):
        granted = _grant_quiet(state)
    with tf.control_dependencies([granted]):
        noted = [assign(state.since, tf.timestamp()), assign(state.position, start)]
        odd = tf.bitwise.bitwise_or(state.read_sequence(), 1)
    with tf.control_dependencies(noted):
        begun = assign(state.sequence, odd)
    with tf.control_dependencies([begun]):
        written = [
            tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=ids, updates=rows)
            for handle, ids, rows in tables
        ]
        written += [assign(handle, value) for handle, value in dense]
        written += [_import_if(*write) for write in writes.lookups]
    return _settle(state, end, written, odd + 1)


def _grant_quiet(state: UpdateState) -> Tensor:
    """Wait as long as readers had asked for when this began: what is asked for meanwhile the next one grants.

    The one loop on the way to a write is before all writes: a call that is cut off in it has written nothing.
    """
    import tensorflow as tf

    def wait(_: Tensor) -> Tensor:
        with tf.control_dependencies([sleep()]):
            return tf.timestamp()

    now = tf.timestamp()
    until = tf.minimum(state.read_quiet(), now + _LONGEST_QUIET_SECONDS)
    (granted,) = tf.while_loop(lambda now: now < until, wait, [now], parallel_iterations=1)
    return granted


def _in_parts(tables: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The rows of a few tables in parts, which are written at the same time; many tables as they are.

    The kernel copies row by row in one thread (source: tensorflow/core/kernels/scatter_functor.h).
    """
    import tensorflow as tf

    count = _AT_ONCE // len(tables) if tables else 1
    if count < 2:
        return list(tables)
    parts = []
    for handle, ids, rows in tables:
        size = tf.shape(ids)[0]
        edges = [size * n // count for n in range(count + 1)]
        for begin, end in pairwise(edges):
            parts.append((handle, ids[begin:end], rows[begin:end]))
    return parts


def write_rows(
    state: UpdateState, target: UpdateTarget, delta: ReadDelta, start: Tensor, end: Tensor
) -> Tensor:
    """Write all tensors, tables chunk by chunk. Returns the last operation."""
    import tensorflow as tf

    writes = target.writes(delta)
    with tf.control_dependencies([*writes.tensors, start, end]):
        sequence = state.read_sequence()
        noted = assign(state.position, start)
    with tf.control_dependencies([noted]):
        written = [
            assign(handle, _value_if(handle, changed, value)) for handle, changed, value in writes.dense
        ]
        written += [_import_if(*write) for write in writes.lookups]
        if writes.tables:
            written.append(_scatter_chunks(target, delta))
    # Odd here is what an update left that died: these rows have made it whole.
    return _settle(state, end, written, sequence + tf.bitwise.bitwise_and(sequence, 1))


def _settle(state: UpdateState, end: Tensor, written: Sequence[Tensor], sequence: Tensor) -> Tensor:
    import tensorflow as tf

    with tf.control_dependencies(written):
        moved = assign(state.position, end)
    with tf.control_dependencies([moved]):
        return assign(state.sequence, sequence)


def _value_if(handle: Tensor, changed: Tensor, value: Tensor) -> Tensor:
    """What is to be assigned: `value` [1, ...], or what the variable holds (no copy) if it is [0, ...].

    The choice is made of the value, not of the assignment: raw ops and no `tf.cond`, which makes two
    functions for each variable that a server takes seconds to inline; and nothing waits for an assignment in
    a branch, because servers that rewrite graphs by MLIR lose that order.
    """
    import tensorflow as tf

    held = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
    kept = tf.raw_ops.Switch(data=held, pred=changed).output_false
    taken = tf.raw_ops.Switch(data=value, pred=changed).output_true
    return tf.raw_ops.Merge(inputs=[kept, taken[0]]).output


def _import_if(handle: Tensor, changed: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Replace all entries of a lookup table by `keys` and `values` [1, n, ...], or touch nothing.

    The kernels clear and fill a table under its lock: a lookup sees all old entries or all new ones (source:
    tensorflow/core/kernels/lookup_table_op.cc, `ImportValues`).
    """
    import tensorflow as tf

    def replace() -> Tensor:
        # Shape inference takes keys for scalars, which tables of buckets store as [1]: it is told no shapes.
        whole = [
            tf.raw_ops.PlaceholderWithDefault(input=half[0], shape=tf.TensorShape(None))
            for half in (keys, values)
        ]
        imported = tf.raw_ops.LookupTableImportV2(table_handle=handle, keys=whole[0], values=whole[1])
        with tf.control_dependencies([imported]):
            return tf.identity(changed)

    return tf.cond(changed, replace, lambda: tf.identity(changed))


def _scatter_chunks(target: UpdateTarget, delta: ReadDelta) -> Tensor:
    """Scatter the rows of all tables, the next chunk of every table in each turn of one loop.

    A few nodes for each table, and the loop takes the delta as one: what a table adds here, the first update
    of a hundred tables waits for.
    """
    import tensorflow as tf

    def write(start: Tensor) -> Tensor:
        end = start + CHUNK_ROWS
        rows = {"begin": start[tf.newaxis], "end": end[tf.newaxis], "strides": tf.constant([1])}
        columns = {key: tf.concat([edge, [int(key == "strides")]], 0) for key, edge in rows.items()}
        scatters = [
            tf.raw_ops.ResourceScatterNdUpdate(
                ref=handle,
                indices=tf.raw_ops.StridedSlice(input=ids, new_axis_mask=0b10, **columns),
                updates=tf.raw_ops.StridedSlice(input=values, **rows),
                use_locking=True,
            )
            for handle, ids, values in target.writes(delta).tables
        ]
        with tf.control_dependencies(scatters):
            return tf.identity(end)

    lengths = tf.raw_ops.ShapeN(input=[ids for _, ids, _ in target.writes(delta).tables])
    rows = tf.reduce_max(tf.concat(lengths, 0))
    (end,) = tf.while_loop(lambda start: start < rows, write, [tf.constant(0)], parallel_iterations=1)
    return end


def position_vector(position: Tensor, step: Tensor, target: Tensor | int = SETTLED) -> Tensor:
    """The value of the position variable, int64 [3]."""
    import tensorflow as tf

    return tf.stack([position, step, tf.cast(target, tf.int64)])
